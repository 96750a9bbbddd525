"""Draw responses token by token: many rollouts side by side, each prompt encoded once.

Paper: does not cover this. Usage: Policy.sample calls `decode_rows`. On a CPU it uses a `Decoder`,
on a GPU a `GraphDecoder`, which records the same steps once and replays them.

Deviations: the library's cache repeats a prompt for each of its rollouts; here it is kept once.
tests/test_policy.py compares recorded steps with computed ones, and both with the plain forward
pass. A seed gives different texts on a GPU than on a CPU: the two draw different random numbers,
and on a GPU finished rollouts leave only every 16 tokens.

Shapes: B prompts (groups), G rollouts of each, P prompt tokens, at most T response tokens, V
vocabulary, D hidden size, K cached keys. As rollouts finish and leave, `live` groups remain, with
`slots` rollouts of each, some of which may have finished.
"""
import math
import warnings
from collections import Counter
from functools import partial

import torch
from torch.nn.functional import pad
from tqdm import tqdm
from transformers.cache_utils import Cache

from errors import UserError, first_line
from model.attention import PADDING, PROMPT, group_mask, heads_of
from model.cache import FreezingLayer, GrowingLayer
from model.memory import PREFILL_TOKENS

SHORT = 3         # seconds: batches that take longer get a progress bar, on a terminal only
CHECK_EVERY = 16  # on a GPU, the check for finished rollouts comes once every so many tokens


def draw(logits, temperature: float, generator):
    """Sample one token per row: logits (..., V) -> ids (...), log-probs (...).

    Only the temperature shapes the distribution: with top-k or top-p, the loss would score a
    different distribution from the one that was sampled. Temperature 0 is greedy; its log-probs are
    those at temperature 1.
    """
    logits = logits.float()
    if temperature not in (0, 1):
        logits = logits / temperature
    probs = logits.softmax(-1)
    if temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
    else:  # inverse CDF: it takes one random number per row, and the host need not wait for a GPU
        total = probs.cumsum(-1, dtype=torch.float64)  # fp32 would lose the tail of V = 152k
        point = torch.rand(*total.shape[:-1], 1, dtype=total.dtype, device=total.device,
                           generator=generator) * total[..., -1:]
        # right=True takes the first token whose cumulative sum exceeds the point, so a token of
        # probability 0 is never drawn
        ids = torch.searchsorted(total, point, right=True).clamp(max=total.shape[-1] - 1)
    return ids[..., 0], probs.gather(-1, ids)[..., 0].log()


def decode_rows(policy, prompts, G, T, temperature, generator, turns=None) -> list:
    """Decode one wide batch: prefill, then step until every rollout has ended or has T tokens.

    prompts: B lists of ids. turns: the Turns of episodes, or None for single answers. Return B*G
    tuples (ids, log-probs, limit, drawn), the last four fields of a policy.Rollout, in the order of
    the prompts. Raise UserError if the model gives numbers that are not finite.
    """
    B, device, head = len(prompts), policy.device, policy.lm.get_output_embeddings()
    eos = torch.tensor(policy.eos_ids, device=device)
    tokens = torch.zeros(B, G, T, dtype=torch.long, device=device)  # (B, G, T)
    is_drawn = torch.ones_like(tokens, dtype=torch.bool)            # (B, G, T) False: observation
    logps = torch.zeros(B, G, T, device=device)                     # (B, G, T)
    lengths = torch.zeros(B, G, dtype=torch.long, device=device)    # (B, G)
    done = torch.zeros(B, G, dtype=torch.bool, device=device)       # (B, G)

    # 1) prefill: encode each prompt once; the last token of a response is never fed back
    decoder = policy.decoder(policy.lm, prompts, G, T - 1, policy.eos_ids[0])
    hidden = decoder.hidden                                         # (live, slots, D)
    bar = tqdm(range(T), f"{B * G} texts", unit=" tokens", leave=False, delay=SHORT, disable=None)
    for t in bar:
        # 2) draw a token for every rollout that has a slot
        slots = decoder.places()                                    # into (B, G)
        ids, logp = draw(head(hidden), temperature, generator)      # (live, slots)
        if turns:
            # where an observation is already in the row, keep its token instead of the drawn one
            drawn_now = is_drawn[..., t][slots]
            ids = ids.where(drawn_now, tokens[..., t][slots])
            logp = logp.where(drawn_now, 0)
        tokens[..., t][slots] = ids
        logps[..., t][slots] = logp
        lengths[slots] += ~done[slots]  # a finished rollout may keep its slot for a while

        # 3) end a rollout when its response is complete, or when its episode is over
        if turns:
            end_of_turn = torch.isin(tokens[..., t], eos) & is_drawn[..., t] & ~done
            turns.answer_finished(t, end_of_turn, tokens, is_drawn, done)
        else:
            done[slots] |= torch.isin(ids, eos)

        # 4) drop finished rollouts to make room
        if not decoder.keep(done):
            break

        # 5) feed the tokens of the rollouts that remain
        hidden = decoder.step(tokens[..., t][decoder.places()])     # (live, slots, D)
    return cut_rows(tokens, logps, is_drawn, lengths, done, turns)


def cut_rows(tokens, logps, is_drawn, lengths, done, turns) -> list:
    """Cut a padded batch into one tuple per rollout, as `decode_rows` returns them.

    Raise UserError if the model gave numbers that are not finite.
    """
    if not logps.isfinite().all():
        raise UserError("the model's logits are not all finite: try --dtype fp32 or another base "
                        "model")
    columns = [x.flatten(0, 1).tolist() for x in (tokens, logps, is_drawn, lengths, done)]
    rows = []
    for n, (ids, logp, flags, length, ended) in enumerate(zip(*columns)):
        limit = "" if ended else "too many tokens"
        drawn = None  # every token was drawn
        if turns:
            limit, drawn = turns.ended_because.get(n, limit), flags[:length]
        rows.append((ids[:length], logp[:length], limit, drawn))
    return rows


# ---------------------------------------------------------------------------------------------
# one step for all rollouts


class Decoder:
    """Decode the rollouts of B prompts side by side.

    Each prompt is encoded once. Then all running rollouts get one token per step: `decode_rows`
    draws tokens from `hidden`, drops finished rollouts with `keep`, and feeds the tokens of the
    others with `step`.

    live (live,): the groups that are still being decoded. rollout (live, slots): which of the G
    rollouts is in each slot. owner (live, K): the owner of each cached key, which is PROMPT,
    PADDING or one of the G. hidden (B, G, D): the states that predict the first tokens. fed, left:
    how many steps have been made and how many remain.
    """
    layer_class = GrowingLayer  # holds the keys and values of one layer

    def __init__(self, lm, prompts, G: int, steps: int, pad_id: int):
        """Encode the prompts, B lists of ids. steps: how many calls of `step` may follow."""
        self.lm, self.fed, self.left = lm, 0, steps
        B, device = len(prompts), lm.get_input_embeddings().weight.device
        self.lengths = torch.tensor([len(p) for p in prompts], device=device)  # (B,)
        self.live = torch.arange(B, device=device)
        self.rollout = torch.arange(G, device=device).expand(B, G)
        last = self._prefill(prompts, pad_id)                                  # (B, D)
        # make it contiguous: multiplying an expanded tensor by lm_head would be a batched product,
        # which copies the weights (V, D) once per prompt
        self.hidden = last[:, None].expand(B, G, -1).contiguous()              # (B, G, D)

    def _prefill(self, prompts, pad_id):
        """Encode each prompt once, and return the hidden states of their last tokens (B, D).

        This also sets cache and owner. Prompts are padded on the right, where causal attention
        hides the padding from the real tokens. They are encoded in chunks of columns, which limits
        the tokens of a forward pass.
        """
        longest = max(map(len, prompts))
        padded = [list(p) + (longest - len(p)) * [pad_id] for p in prompts]
        ids = torch.tensor(padded, device=self.live.device)                    # (B, P)
        columns = torch.arange(longest, device=self.live.device)               # (P,)
        self.owner = torch.where(columns < self.lengths[:, None], PROMPT, PADDING)  # (B, P)
        self.cache = Cache(layer_class_to_replicate=partial(self.layer_class, longest))

        width, chunk_ends = max(1, PREFILL_TOKENS // len(prompts)), []
        for start in range(0, longest, width):
            # given a cache, the library's causal mask lets each chunk see the chunks before it
            hidden = self._forward(ids[:, start:start + width])                # (B, width, D)
            # keep one state per prompt and chunk; below, choose for each prompt the chunk that
            # holds its last token
            ends = (self.lengths - 1 - start).clamp(0, hidden.shape[1] - 1)    # (B,)
            chunk_ends.append(hidden[self.live, ends])
        last_chunk = (self.lengths - 1) // width                               # (B,)
        return torch.stack(chunk_ends)[last_chunk, self.live]

    def _forward(self, ids, **where):
        """Return hidden states (live, tokens, D) of ids (live, tokens), and cache their keys."""
        output = self.lm.base_model(input_ids=ids, past_key_values=self.cache, use_cache=True,
                                    **where)
        return output.last_hidden_state

    def places(self):
        """Return the index (live, slots) of each slot's rollout in a tensor (B, G)."""
        return self.live[:, None], self.rollout

    def positions(self):
        """Return the positions (live, slots) of the tokens that are fed next."""
        return (self.lengths[self.live, None] + self.fed).expand_as(self.rollout)

    def step(self, ids):
        """Feed the next token of each rollout: ids (live, slots) -> hidden states (live, slots, D).
        """
        self.owner = torch.cat([self.owner, self.rollout], dim=1)              # (live, K + slots)
        hidden = self._feed(ids)
        self.fed, self.left = self.fed + 1, self.left - 1
        return hidden

    def _feed(self, ids):
        """Compute the hidden states of a step; the owners of its keys are already set."""
        mask = group_mask(self.rollout, self.owner)
        return self._forward(ids, position_ids=self.positions(), attention_mask=mask)

    def keep(self, done) -> bool:
        """Drop finished rollouts, and return whether another step is needed.

        done (B, G): which rollouts have finished.
        """
        if self.left == 0:
            return False
        groups, rollout = compact(done[self.live])
        if len(groups):
            self._leave(groups, rollout)
        return len(groups) > 0

    def _leave(self, groups, rollout):
        """Keep only `groups` of the live groups. rollout (live, slots): which rollout is in each
        slot from now on."""
        self.rollout = rollout
        if len(groups) < len(self.live):
            self.live, self.owner = self.live[groups], self.owner[groups]
            self.rollout = rollout[groups]
            self.cache.batch_select_indices(groups)


def compact(done):
    """Choose which rollouts stay: done (live, G) -> groups to keep, rollout in each slot (live,
    slots).

    Running rollouts move to the front. slots: how many are still running in the group that has the
    most. Groups are dropped only once a quarter of them have finished, because dropping copies the
    cache.
    """
    running_counts = (~done).sum(1).tolist()
    order = done.long().argsort(dim=1, stable=True)  # running rollouts first
    groups = [b for b, count in enumerate(running_counts) if count > 0]
    if len(groups) > 0.75 * len(running_counts):
        groups = list(range(len(running_counts)))
    return torch.tensor(groups, device=done.device), order[:, :max(running_counts)]


# ---------------------------------------------------------------------------------------------
# the same on a GPU


class GraphDecoder(Decoder):
    """Decode with steps that are recorded as a CUDA graph and then replayed.

    To decode one token, the host starts some 1,700 kernels one by one, and a fast card waits for
    the host. A CUDA graph records the kernels, so that the host can start them all at once. It
    replays the same kernels on the same memory, so no tensor may change its shape or address.
    Decoding is therefore cut into stages, and one graph serves all steps of a stage. Between
    stages, rollouts leave and the cache gets more room.

    stage_left: how many steps the stage still has room for; 0 before the first stage.
    """
    layer_class, stage_left = FreezingLayer, 0

    def keep(self, done) -> bool:
        """Do what Decoder.keep does, but only once every CHECK_EVERY tokens: while the host finds
        out which rollouts have finished, the GPU is idle."""
        drawn = self.fed + 1  # the last token drawn has not been fed yet
        if self.left and drawn % CHECK_EVERY:
            return True
        return super().keep(done)

    def _leave(self, groups, rollout):
        """Do what Decoder._leave does, but only if the room of this stage runs out before the next
        check, or if at least half of the slots become free.

        A new stage then begins, which costs as much time as several tokens.
        """
        room_runs_out = self.stage_left < min(CHECK_EVERY, self.left)
        halved = 2 * len(groups) * rollout.shape[1] <= self.rollout.numel()
        if room_runs_out or halved:
            super()._leave(groups, rollout)
            self.stage_left = 0

    def _feed(self, ids):
        """Do what Decoder._feed does. The next call may overwrite the result."""
        if self.stage_left == 0:
            self._begin_stage()
        self.ids.copy_(ids)
        self.calls += 1
        # The first call of a stage computes without recording, because no kernel may be loaded
        # while a graph is recorded. The second call records, which computes nothing, and then
        # replays. Later calls only replay.
        if self.calls == 2:
            self.replay = cuda_graph_of(self._next, ids.device)
        self.stage_left -= 1
        return self.replay() if self.replay else self._next()

    def _begin_stage(self):
        """Allocate every tensor of the coming stage at its full size."""
        # K includes the keys of the coming step, because `step` has already added their owners
        slots, K = self.rollout.shape[1], self.owner.shape[1]
        # the stage lasts until the cache is 1.5 times as long, but for at least 32 steps
        self.stage_left = min(self.left, max(32, K // (2 * slots)))
        more = (self.stage_left - 1) * slots  # keys that the steps after the first one add
        self.calls, self.replay = 0, None
        self.columns = torch.arange(K - slots, K, device=self.owner.device)  # of this step's keys
        for layer in self.cache.layers:
            layer.freeze(K + more, self.columns)
        config = self.lm.config.get_text_config(decoder=True)
        mask_for = partial(step_mask, config, self.cache.layers[0].keys.dtype, self.rollout)
        self.mask = mask_for(pad(self.owner, (0, more), value=PADDING))
        # of the keys added in a step, each rollout sees only its own
        self.own_mask = mask_for(self.rollout)
        self.ids, self.position = torch.empty_like(self.rollout), self.positions().clone()

    def _next(self):
        """Compute the step that is recorded.

        It changes only tensors, and only in place: a graph would keep the old value of any Python
        variable.
        """
        # make the step's own keys visible from now on
        self.mask.index_copy_(3, self.columns, self.own_mask)
        hidden = self._forward(self.ids, position_ids=self.position, attention_mask=self.mask)
        self.columns.add_(self.ids.shape[1])
        self.position.add_(1)
        return hidden


def step_mask(config, dtype, rollout, owner):
    """Return the mask of a decoding step in its final form, so that no layer has to rebuild it.

    rollout (live, slots), owner (live, K) -> (live, 1, rows, K) in `dtype`: 0 where a key is
    visible, else -inf. The memory-efficient kernel adds such a mask without copying it if each row
    begins at a multiple of 8 numbers. There are `slots` rows, but if slots <= head_dim, there are
    sharing * slots, because attention.few_queries_attention then turns the `sharing` query heads of
    each key head into rows.
    """
    (live, slots), K = rollout.shape, owner.shape[1]
    heads, key_heads, head_dim = heads_of(config)
    sharing = heads // key_heads if slots <= head_dim else 1
    shape = live, 1, sharing * slots, 8 * math.ceil(K / 8)
    mask = owner.new_full(shape, -math.inf, dtype=dtype)[..., :K]
    return mask.masked_fill_(group_mask(rollout, owner).repeat(1, 1, sharing, 1), 0)


def cuda_graph_of(step, device):
    """Record step() as a CUDA graph, and return a function that replays it in the same memory.

    Return None on other devices, or if the model does something that a graph cannot hold.
    """
    if device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        # if recording fails, torch.cuda.graph leaves its side stream as the current one; the outer
        # context restores the stream that was current before
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            out = step()
    except torch.OutOfMemoryError:
        raise  # the model is not at fault: fewer rows would fit
    except RuntimeError as error:
        warnings.warn("rollouts will be slow, because this model cannot be recorded as a CUDA "
                      f"graph: {first_line(error)}")
        return None

    def replay():
        graph.replay()
        return out

    return replay


# ---------------------------------------------------------------------------------------------
# episodes


class Turns:
    """Track the turns of a batch of episodes; n is the index of a rollout among B * G.

    begin[n], count[n]: where the rollout's current turn begins, and how many turns it has finished.
    ended_because: {n of each episode that is over: the limit that it hit, or ""}.
    """

    def __init__(self, respond, places, max_turns, max_turn_tokens):
        """Keep the arguments.

        respond(i, ids of a turn) returns the ids of an observation, or None at the episode's end.
        places: the i of each rollout of this batch.
        """
        self.respond, self.places = respond, places
        self.max_turns, self.max_turn_tokens = max_turns, max_turn_tokens
        self.begin, self.count, self.ended_because = Counter(), Counter(), {}

    def answer_finished(self, t, end_of_turn, tokens, is_drawn, done):
        """Answer the turns that ended with token t, or end their episodes.

        end_of_turn, done (B, G); tokens, is_drawn (B, G, T). tokens, is_drawn and done are updated
        in place. The host waits for a GPU once, and again if turns ended, because the next token
        depends on the world's answers.
        """
        G, T = tokens.shape[1:]
        finished = end_of_turn.flatten().nonzero().flatten().tolist()
        rows = tokens.flatten(0, 1)[finished].tolist() if finished else []
        for n, row in zip(finished, rows):
            turn = row[self.begin[n]:t + 1]
            observation = self._answer(n, turn, T - t - 1)
            if observation is None:
                done[n // G, n % G] = True
                continue
            # write the observation into the row, to be read from the next token on
            self.begin[n] = t + 1 + len(observation)
            place = n // G, n % G, slice(t + 1, self.begin[n])
            tokens[place], is_drawn[place] = torch.tensor(observation), False

        for n in range(end_of_turn.numel()):
            too_long = t + 1 - self.begin[n] >= self.max_turn_tokens
            if too_long and n not in self.ended_because:
                self.ended_because[n] = "turn too long"
                done[n // G, n % G] = True

    def _answer(self, n, turn, room):
        """Return the world's answer to a turn. At the episode's end, note the reason in
        ended_because and return None. room: how many tokens are left."""
        self.count[n] += 1
        ids = self.respond(self.places[n], turn)
        if ids is not None and self.count[n] < self.max_turns and len(ids) < room:
            return ids
        if ids is None:
            self.ended_because[n] = ""
        elif self.count[n] >= self.max_turns:
            self.ended_because[n] = "too many turns"
        else:
            self.ended_because[n] = "too many tokens"
        return None

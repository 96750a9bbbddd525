"""One frozen base model, two LoRA adapters, and the reference policy for free.

Paper: pi_agent and pi_env of Algorithm 1, "both initialised from the same instruct model". Here
they *are* the same model: adapter "agent", adapter "env", and with both switched off the initial
policy, which is the reference of every KL term. (With --env-model there are two Policies of one
adapter each.)

Usage: genenv.py, grpo.py, rwr.py and eval/ call it.

    policy = Policy.load("Qwen/Qwen2.5-7B-Instruct", quant="nf4")
    rollouts = policy.sample("agent", [policy.encode("2+2=")], G=8)
    with policy.use("agent"):
        logp, mask = policy.logprobs(rollouts)

Deviations: G rollouts of one prompt are *one row* of the batch, in sampling and in training alike.
The prompt is encoded once, its keys and values are stored once, and a mask lets each rollout see
the prompt and itself. A group costs P + G*R tokens; repeating the prompt would cost G*(P + R).

Shapes: B prompts (groups), G rollouts of each, P prompt tokens, R response tokens (at most T), V
vocabulary, D hidden size, N responses of a micro-batch, L tokens of a packed row, M predicted
tokens, K cached keys. While decoding, finished rollouts leave: `live` groups remain, with `slots`
rollouts of each, some of which may have finished.
"""
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from errors import UserError
from model.attention import PADDING, PROMPT, attention_layout, cast_lora, group_mask
from model.attention import is_plain_lora, patch
from model.chat import Chat
from model.graphs import GraphSteps, GrowingLayer
from model.loading import add_adapters, check_base, check_paths, load_model, note_base, one_line
from model.memory import KEPT_LOGITS, LOGIT_CHUNK, PREFILL_TOKENS

LONG = 128  # by_prompt: texts share their prompt if it has at least this many tokens


@dataclass
class Rollout:
    """A response to a prompt. Token ids are kept: sampled text is never tokenised again."""
    group: int                # rollouts of one group stand together and share their prompt
    prompt: list[int]         # (P,) ids
    response: list[int]       # (R,) ids, the terminal EOS included unless a length limit cut it
    logps: list[float] = ()   # (R,) log-probs at the sampling temperature; empty if not sampled
    limit: str = ""           # the limit that it ran into ("too many tokens"); "" if it ended
    drawn: list[bool] | None = None  # (R,) drawn by the policy, not read; None: all of them

    @property
    def tokens(self) -> int:
        """How many tokens the policy drew: those that are trained on."""
        return sum(self.drawn) if self.drawn else len(self.response)


# ---------------------------------------------------------------------------------------------
# pure functions: log-softmax, drawing a token, rows of a batch


def token_logprobs(hidden, head, target, temperature: float):
    """log pi(target) from hidden states, without ever holding many logits.

    hidden (M, D), target (M,) -> (M,) fp32. Temperature divides the logits exactly as in sampling,
    otherwise the policy scored would not be the policy that acted. Differentiable.
    """
    def chunk_logprobs(h, y):
        logits = head(h).float()  # (chunk, V), fp32: bf16 log-softmax is noise
        if temperature != 1:
            logits = logits / temperature
        return -torch.nn.functional.cross_entropy(logits, y, reduction="none")

    score = chunk_logprobs
    if len(target) * len(head.weight) > KEPT_LOGITS:  # M * V
        # the backward pass computes each chunk again
        score = partial(checkpoint, chunk_logprobs, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(hidden.split(LOGIT_CHUNK), target.split(LOGIT_CHUNK))
    return torch.cat([score(h, y) for h, y in chunks])


def draw(logits, temperature: float, generator):
    """Sample one token per row: logits (..., V) -> ids (...), log-probs (...).

    Only temperature shapes the distribution: with top-k or top-p the loss would score a different
    one. Temperature 0 is greedy; its log-probs are those at temperature 1.
    """
    logits = logits.float()
    if temperature not in (0, 1):
        logits = logits / temperature
    probs = logits.softmax(-1)
    if temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
    else:  # inverse CDF: one random number per row, no host synchronisation
        total = probs.cumsum(-1, dtype=torch.float64)  # fp32 would lose the tail of V = 152k
        point = torch.rand(*total.shape[:-1], 1, dtype=total.dtype, device=total.device,
                           generator=generator) * total[..., -1:]
        # right=True: the first token whose cumulative sum exceeds the point: never one of
        # probability 0
        ids = torch.searchsorted(total, point, right=True).clamp(max=total.shape[-1] - 1)
    return ids[..., 0], probs.gather(-1, ids)[..., 0].log()


def by_group(rollouts) -> list:
    """Lists of rollouts that stand together and share group and prompt: the rows of `pack`."""
    return [list(group) for _, group in groupby(rollouts, lambda r: (r.group, r.prompt))]


@dataclass
class Pack:
    """The rows of a forward pass, and where in them the M tokens that the policy drew are
    predicted."""
    ids: torch.Tensor        # (B, L)
    positions: torch.Tensor  # (B, L)
    source: torch.Tensor     # (M,) into B*L: the hidden state that predicts the token
    target: torch.Tensor     # (M,) its id
    rows: torch.Tensor       # (M,) its place in a result of (N, R): the response
    cols: torch.Tensor       # (M,) and the token
    spans: list              # N rows (group, tokens of its prompt, first column, inputs)
    shape: tuple             # (N, R)


def pack(groups, device=None) -> Pack:
    """Lay each group out as one row: prompt, then its responses one after another.

    groups: B lists of Rollouts that share a prompt. The last token of a response predicts nothing,
    so it is a target but not an input.
    """
    B, L = len(groups), max(map(packed_length, groups))
    ids, positions, predictions, spans, longest = [], [], [], [], 0
    for b, group in enumerate(groups):
        prompt = group[0].prompt
        P = len(prompt)
        line, places = list(prompt), list(range(P))
        for r in group:
            R, start = len(r.response), b * L + len(line)
            # the prompt's last token predicts the first of a response, each token the next
            sources = [b * L + P - 1, *range(start, start + R - 1)]
            for col, token in enumerate(r.response):
                # observations are inputs of an episode, but nobody's choice
                if not r.drawn or r.drawn[col]:
                    predictions.append((sources[col], token, len(spans), col))
            spans.append((b, P, len(line), R - 1))
            line += r.response[:-1]
            places += range(P, P + R - 1)  # every response starts at P again
            longest = max(longest, R)
        padding = [0] * (L - len(line))  # any token pads: nothing attends to it
        ids += line + padding
        positions += places + padding
    # lists until here, then one transfer for each shape
    inputs = torch.tensor([ids, positions], device=device).view(2, B, L)
    outputs = torch.tensor(predictions, dtype=torch.long, device=device).view(-1, 4)  # (M, 4)
    return Pack(*inputs, *outputs.T.contiguous(), spans, shape=(len(spans), longest))


def packed_length(group) -> int:
    """Tokens of a group's row in `pack`."""
    return len(group[0].prompt) + sum(len(r.response) - 1 for r in group)


def by_prompt(texts) -> tuple:
    """Rollouts, not yet grouped -> (texts, order): texts[k] was at order[k].

    Those that share a prompt of at least LONG tokens become a group, so that it is encoded once.
    Every other is a group of its own. Groups keep the order in which they first came.
    """
    first, group = {}, []  # {long prompt: where it came first}; the group of each text
    for i, r in enumerate(texts):
        if len(r.prompt) >= LONG:
            group.append(first.setdefault(tuple(r.prompt), i))
        else:
            group.append(i)
    order = sorted(range(len(texts)), key=group.__getitem__)
    return [replace(texts[i], group=group[i]) for i in order], order


def split_groups(rollouts, token_budget: int):
    """Micro-batches under a token budget: lists of indices of rollouts, whole groups if possible.

    Groups are sorted by length so that a micro-batch pads little; a group that alone exceeds the
    budget is split over its responses, at the price of encoding its prompt again.
    """
    pieces, i = [], 0  # (length, indices of rollouts)
    for group in by_group(rollouts):
        length, members = len(group[0].prompt), []
        for r in group:
            if members and length + len(r.response) > token_budget:
                pieces.append((length, members))
                length, members = len(r.prompt), []
            length, members, i = length + len(r.response), members + [i], i + 1
        pieces.append((length, members))
    batch, rows, widest = [], 0, 0
    for length, members in sorted(pieces):
        if batch and max(widest, length) * (rows + 1) > token_budget:
            yield batch
            batch, rows, widest = [], 0, 0
        batch, rows, widest = batch + members, rows + 1, max(widest, length)
    if batch:
        yield batch


# ---------------------------------------------------------------------------------------------
# the policy handle


class Policy(Chat):
    """A frozen causal language model with named LoRA adapters, and its text (model/chat.py).

    active: name of the adapter in force, None for the bare base (= the reference policy).
    params: {adapter: its parameters}, gathered once by name. Optimisers are built from these lists
    and never from requires_grad, which PEFT flips whenever adapters are switched.
    """

    def __init__(self, model, tokenizer, adapters=("agent", "env"), rank=16, seed=0,
                 adapter_folder=None, chat_template_kwargs=None):
        """model: a transformers causal LM; the rest as in `load`. Adapters start with B = 0, so
        that pi equals the reference. Raises UserError if no token ends a response."""
        self.active = None
        self.source = ""  # the folder or hub name that it was loaded from
        model.requires_grad_(False)
        self.model = add_adapters(model, adapters, rank, seed, adapter_folder).eval()
        self.lm = self.model.get_base_model() if adapters else model  # head + decoder, LoRA inside
        self.lm.set_attn_implementation("prompt_once")
        patch(self.model)
        self.lora_layers = [m for m in self.model.modules() if is_plain_lora(m)]
        self.blocks = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        named = list(self.model.named_parameters())
        self.params = {adapter: [p for name, p in named if f".{adapter}." in name]
                       for adapter in adapters}
        self.device = self.lm.get_input_embeddings().weight.device
        self.decoder = Decoder if self.device.type == "cpu" else GraphDecoder
        self._activate(None)
        Chat.__init__(self, tokenizer, model.generation_config, chat_template_kwargs)

    @classmethod
    def load(cls, model: str, adapters=("agent", "env"), rank=16, quant=None, dtype="auto",
             device=None, seed=0, adapter_folder=None, chat_template_kwargs=None,
             max_tokens=None) -> "Policy":
        """Load a local folder or hub name. Raises UserError with one line if that cannot work.

        quant: None or "nf4" (4-bit base, double quantisation, bf16 compute on a GPU). device: None
        = a GPU if there is one. adapter_folder: one written by `save_adapters`, where the first
        adapter starts. chat_template_kwargs: what the chat template is given in addition to the
        messages, such as {"enable_thinking": False}; its "date" (ISO) counts as today. max_tokens:
        the most that a prompt and its response will have together; None: not known.
        """
        if adapter_folder:
            check_base(adapter_folder, model)
        lm, tokenizer = load_model(model, quant, dtype, device, max_tokens)
        with one_line(model):  # a model's own code may raise anything
            policy = cls(lm, tokenizer, adapters, rank, seed, adapter_folder, chat_template_kwargs)
            if tokenizer.chat_template:  # the built-in worlds' models have none and need no check
                check_paths(policy, max_tokens)
        policy.source = model
        return policy

    # ---- adapters

    def _activate(self, adapter):
        """Put one adapter (or none) in force and keep every adapter's gradients switched on."""
        if self.params:
            if adapter is None:
                self.model.base_model.disable_adapter_layers()
            else:
                self.model.base_model.enable_adapter_layers()
                self.model.set_adapter(adapter)
            # PEFT freezes the inactive adapter, and autograd then drops its pending gradients
            for params in self.params.values():
                for p in params:
                    p.requires_grad_(True)
        self.active = adapter

    @contextmanager
    def use(self, adapter):
        """`with policy.use("agent")`: that adapter inside, the former one after, errors or not.

        A backward pass belongs inside too: gradient checkpointing runs the forward again.
        """
        if adapter is not None and adapter not in self.params:
            raise ValueError(f"no adapter {adapter!r}, there are {sorted(self.params)}")
        former = self.active
        self._activate(adapter)
        try:
            yield self
        finally:
            self._activate(former)

    @contextmanager
    def _cast_once(self, adapter):
        """Inside, the adapter's weights lie ready in the dtype of the activations.

        For decoding, which calls each layer once per token. The copies pass no gradient and miss
        the optimiser's steps, so they are dropped at the end.
        """
        dtype = self.lm.get_input_embeddings().weight.dtype
        for layer in self.lora_layers:
            layer.cast = cast_lora(layer, adapter, dtype) if adapter in layer.lora_A else None
        try:
            yield
        finally:
            for layer in self.lora_layers:
                layer.cast = None

    def optimizer(self, adapter, lr: float):
        """AdamW over exactly the parameters of one adapter."""
        return torch.optim.AdamW(self.params[adapter], lr=lr, weight_decay=0.0)

    def save_adapters(self, folder):
        """Write folder/NAME for each adapter: PeftModel.from_pretrained(base, folder/NAME) reads
        it."""
        # no adapter touches the vocabulary: PEFT need not look for the base's config to know that
        # of a full disk safetensors has an error of its own
        with one_line(folder, "cannot be written"):
            self.model.save_pretrained(str(folder), selected_adapters=list(self.params),
                                       save_embedding_layers=False)
            if self.source:
                note_base(folder, self.params, self.source)

    def as_drawn(self, prompt, response) -> Rollout:
        """A prompt and a response as if this policy had drawn it; of an episode, a list of turns
        and observations in turn, the turns alone count as drawn."""
        texts = [response] if isinstance(response, str) else response
        ids = self.encode_answer(prompt, texts[0]) + self.end_of_turn
        drawn = [True for _ in ids]
        for i, text in enumerate(texts[1:], 1):
            is_turn = i % 2 == 0
            if is_turn:
                part = self.encode(text) + self.end_of_turn
            else:
                part = self.encode_observation(text)
            ids += part
            drawn += [is_turn for _ in part]
        return Rollout(0, self.encode(prompt), ids, drawn=drawn)

    def generator(self, seed: int):
        """An explicit random generator on the device of the model."""
        return torch.Generator(device=self.device).manual_seed(seed)

    # ---- log-probabilities of given responses

    def logprobs(self, rollouts, temperature: float = 1.0, grad_checkpoint=None):
        """Log-probs of N rollouts under the active adapter, the prompt of a group encoded once.

        Returns logp (N, R) fp32, zero where no token was drawn, and mask (N, R) bool, True where
        one was. Differentiable; grad_checkpoint: compute each layer again in the backward pass
        instead of keeping what it holds, None = on a GPU.
        """
        if grad_checkpoint is None:
            grad_checkpoint = self.device.type != "cpu"
        groups = by_group(rollouts)
        x = pack(groups, self.device)
        where = {}  # rows of one response each are plain causal sequences, right-padded
        if len(groups) < len(rollouts):
            layout = attention_layout(x)
            # transformers leaves a mask of four dimensions as it is
            where = {"position_ids": x.positions, "attention_mask": layout.mask, "layout": layout}
        hidden = self._hidden(x.ids, grad_checkpoint, **where)  # (B, L, D)
        picked = hidden.flatten(0, 1)[x.source]  # (M, D): predicted tokens only
        logp = token_logprobs(picked, self.lm.get_output_embeddings(), x.target, temperature)
        out = logp.new_zeros(x.shape).index_put((x.rows, x.cols), logp)
        mask = torch.zeros(x.shape, dtype=torch.bool, device=logp.device)
        # not a plain True, which would first have to be copied to a GPU
        return out, mask.index_put((x.rows, x.cols), mask.new_ones(()))

    def _hidden(self, ids, grad_checkpoint, **where):
        """Last hidden states (B, L, D). A block is checkpointed only while it is in train mode. We
        set this flag on the block alone, and reset it: in train mode a block drops the KV cache."""
        for block in self.blocks:
            block.training = grad_checkpoint and torch.is_grad_enabled()
        try:
            return self.lm.base_model(input_ids=ids, use_cache=False, **where).last_hidden_state
        finally:
            for block in self.blocks:
                block.training = False

    # ---- sampling

    @torch.no_grad()
    def sample(self, adapter, prompts, G=1, max_new_tokens=64, temperature=1.0, generator=None,
               max_rows=256, respond=None, max_turns=1, max_turn_tokens=64) -> list[Rollout]:
        """G responses to each prompt, in prompt order: rollout i belongs to prompts[i // G].

        prompts: list of id lists. adapter: a name, or None for the base. temperature 0 is greedy.
        max_rows bounds the rollouts that run at once, but the G of a prompt always run together.
        With respond(i, ids of a turn) -> ids of an observation, or None when the episode is over,
        rollout i is an episode: observations are inserted as given, only the turns are sampled.
        Its limits: max_turns turns, max_turn_tokens in a turn without EOS, and max_new_tokens in
        all, observations included. Raises ValueError on an empty prompt, UserError if the model
        gives no finite numbers.
        """
        if any(len(p) == 0 for p in prompts):
            raise ValueError("cannot sample from an empty prompt")
        out = [None] * (len(prompts) * G)
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        width = max(1, max_rows // G)
        with self.use(adapter), self._cast_once(adapter):
            for start in range(0, len(by_length), width):
                members = by_length[start:start + width]

                def answer(n, ids, members=members):  # n: in these rows; respond counts over all
                    return respond(members[n // G] * G + n % G, ids)

                turns = None
                if respond:
                    turns = Turns(answer, max_turns, max_turn_tokens)
                rows = self._sample_rows([prompts[i] for i in members], G, max_new_tokens,
                                         temperature, generator, turns)
                for n, row in enumerate(rows):
                    group = members[n // G]
                    out[group * G + n % G] = Rollout(group, list(prompts[group]), *row)
        return out

    def _sample_rows(self, prompts, G, T, temperature, generator, turns):
        """One wide batch: prefill, then decode until every rollout has ended or has T tokens.

        prompts: B id lists; turns: Turns or None -> B*G tuples (ids, log-probs, limit, drawn).
        """
        B, dev, head = len(prompts), self.device, self.lm.get_output_embeddings()
        eos = torch.tensor(self.eos_ids, device=dev)
        tokens = torch.zeros(B, G, T, dtype=torch.long, device=dev)  # (B, G, T)
        drawn = torch.ones_like(tokens, dtype=torch.bool)            # (B, G, T) drawn, not read
        logps = torch.zeros(B, G, T, device=dev)                     # (B, G, T)
        count = torch.zeros(B, G, dtype=torch.long, device=dev)      # (B, G) response lengths
        done = torch.zeros(B, G, dtype=torch.bool, device=dev)       # (B, G)

        # 1) prefill: each prompt is encoded once; the last token of a response is never fed back
        decoder = self.decoder(self.lm, prompts, G, T - 1, self.eos_ids[0])
        hidden = decoder.hidden                                      # (live, slots, D)
        for t in range(T):
            # 2) draw: a token of every rollout that has a slot
            at = decoder.live[:, None], decoder.rollout
            ids, logp = draw(head(hidden), temperature, generator)   # (live, slots)
            if turns:  # an observation is already in the row: its tokens are read, not drawn
                new = drawn[(*at, t)]
                ids, logp = ids.where(new, tokens[(*at, t)]), logp.where(new, 0)
            tokens[(*at, t)], logps[(*at, t)] = ids, logp
            count[at] += ~done[at]  # a finished rollout may keep its slot for a while, uncounted

            # 3) end: a rollout with its response, an episode with its world's last word
            ended = None  # nobody asks, where asking would make a GPU wait
            if turns:
                closed = torch.isin(tokens[..., t], eos) & drawn[..., t] & ~done
                ended = turns.end(t, closed, tokens, drawn, done)
            else:
                done[at] |= torch.isin(ids, eos)

            # 4) leave: what has ended makes room
            if not decoder.keep(done, ended):
                break

            # 5) feed: the tokens of those that stay
            at = decoder.live[:, None], decoder.rollout
            hidden = decoder.step(tokens[(*at, t)])                  # (live, slots, D)
        return _cut_rows(tokens, logps, drawn, count, done, turns)


# ---------------------------------------------------------------------------------------------
# decoding


class Decoder:
    """The rollouts of B prompts, decoded side by side. Each prompt is encoded once, then all
    rollouts still running get a token at a time: `_sample_rows` draws tokens from `hidden`, tells
    `keep` which rollouts have ended, and feeds what it drew with `step`.

    The library's cache repeats a prompt for each of its rollouts; here it is stored once.

    live (live,): the groups still decoded. rollout (live, slots): which of the G stands
    in each slot. owner (live, K): whose each cached key is: PROMPT, PADDING or one of the G.
    hidden (B, G, D): the states that predict the first tokens. fed, left: the steps made, and
    those that may follow.
    """

    def __init__(self, lm, prompts, G: int, steps: int, pad_id: int):
        """Encode the prompts, B lists of ids. steps: at most so many will follow."""
        self.lm, self.fed, self.left = lm, 0, steps
        B, device = len(prompts), lm.get_input_embeddings().weight.device
        self.lengths = torch.tensor([len(p) for p in prompts], device=device)  # (B,)
        self.live = torch.arange(B, device=device)
        self.rollout = torch.arange(G, device=device).expand(B, G)
        last = self._prefill(prompts, pad_id)                                  # (B, D)
        # contiguous: the product of an expanded tensor with lm_head would be a batched one, and
        # copy the weights (V, D) once per prompt
        self.hidden = last[:, None].expand(B, G, -1).contiguous()              # (B, G, D)

    def _prefill(self, prompts, pad_id):
        """Encode each prompt once -> the hidden state of its last token (B, D); sets cache and
        owner.

        Prompts are padded on the right: causality alone then hides the padding from real tokens.
        Long prompts are encoded in chunks of columns, which bounds the tokens of a forward pass.
        """
        longest = max(map(len, prompts))
        padded = [list(p) + (longest - len(p)) * [pad_id] for p in prompts]
        ids = torch.tensor(padded, device=self.live.device)                    # (B, P)
        columns = torch.arange(longest, device=ids.device)                     # (P,)
        self.owner = torch.where(columns < self.lengths[:, None], PROMPT, PADDING)  # (B, P)
        self.cache = Cache(layer_class_to_replicate=partial(GrowingLayer, longest))

        width, chunk_ends = max(1, PREFILL_TOKENS // len(prompts)), []
        for start in range(0, longest, width):
            # given a cache, the library's causal mask lets a chunk see the chunks before it
            hidden = self._forward(ids[:, start:start + width])                # (B, width, D)
            # a chunk stores one state per prompt; only that which holds its last token counts
            ends = (self.lengths - 1 - start).clamp(0, hidden.shape[1] - 1)    # (B,)
            chunk_ends.append(hidden[self.live, ends])
        last_chunk = (self.lengths - 1) // width                               # (B,)
        return torch.stack(chunk_ends)[last_chunk, self.live]

    def _forward(self, ids, **where):
        """Hidden states (live, tokens, D) of ids (live, tokens), whose keys go into the cache."""
        output = self.lm.base_model(input_ids=ids, past_key_values=self.cache, use_cache=True,
                                    **where)
        return output.last_hidden_state

    def positions(self):
        """(live, slots): the position of the token that is fed next."""
        return (self.lengths[self.live, None] + self.fed).expand_as(self.rollout)

    def step(self, ids):
        """Feed one more token of each rollout: ids (live, slots) -> hidden states (live, slots,
        D)."""
        self.owner = torch.cat([self.owner, self.rollout], dim=1)              # (live, K + slots)
        mask = group_mask(self.rollout, self.owner)
        hidden = self._forward(ids, position_ids=self.positions(), attention_mask=mask)
        self.fed, self.left = self.fed + 1, self.left - 1
        return hidden

    def keep(self, done, any_new=None) -> bool:
        """Let finished rollouts leave. Returns whether another step is needed.

        done (B, G): which have finished. any_new: True or False if the caller knows whether any
        has since the last call, else None.
        """
        if self.left == 0:
            return False
        if any_new is False:
            return True
        groups, rollout = compact(done[self.live])
        if len(groups):
            self._leave(groups, rollout)
        return len(groups) > 0

    def _leave(self, groups, rollout):
        """Keep `groups` of the live ones. rollout (live, slots): what then stands in each slot."""
        self.rollout = rollout
        if len(groups) < len(self.live):
            self.live, self.owner = self.live[groups], self.owner[groups]
            self.rollout = rollout[groups]
            self.cache.batch_select_indices(groups)


class GraphDecoder(GraphSteps, Decoder):
    """A Decoder on a GPU: steps of equal shape are recorded once and replayed (model/graphs.py)."""


def compact(done):
    """Drop finished rollouts: done (live, G) -> (groups to keep, rollout in each slot (live,
    slots)).

    Running rollouts move to the front; slots: the most that are running in any one group. Groups
    are only dropped once a quarter of them has finished, because dropping copies the cache.
    """
    running_counts = (~done).sum(1).tolist()
    order = done.long().argsort(dim=1, stable=True)  # running first
    groups = [b for b, count in enumerate(running_counts) if count > 0]
    if len(groups) > 0.75 * len(running_counts):
        groups = list(range(len(running_counts)))
    return torch.tensor(groups, device=done.device), order[:, :max(running_counts)]


# ---------------------------------------------------------------------------------------------
# helpers


def policy_options(o) -> dict:
    """What Policy.load takes of a run's Options."""
    template = json.loads(o.chat_template_kwargs or "{}")
    template["date"] = o.date
    max_tokens = o.max_prompt_tokens + max(o.max_response_tokens, o.max_task_tokens)
    return {"rank": o.rank, "quant": o.quant or None, "dtype": o.dtype, "seed": o.seed,
            "chat_template_kwargs": template, "max_tokens": max_tokens}


class Turns:
    """The turns of a batch of episodes; n is the index of a rollout among B * G.

    begin, count: where the current turn of a rollout begins, and how many turns it has had. why:
    {rollout whose episode is over: the limit that it ran into, or ""}.
    """

    def __init__(self, respond, max_turns, max_turn_tokens):
        self.respond, self.max_turns, self.max_turn_tokens = respond, max_turns, max_turn_tokens
        self.begin, self.count, self.why = Counter(), Counter(), {}

    def end(self, t, ended, tokens, drawn, done) -> bool:
        """Answer the turns that ended with token t, or end their episodes. True if any episode
        ended.

        ended, done (B, G), tokens, drawn (B, G, T); tokens, drawn and done are updated in place.
        The host waits for a GPU once, and again if turns ended: the next token needs the world's
        answers.
        """
        before, (G, T) = len(self.why), tokens.shape[1:]
        over = [n for n, end in enumerate(ended.flatten().tolist()) if end]
        rows = []
        if over:
            rows = tokens.flatten(0, 1)[over].tolist()
        for n, row in zip(over, rows):
            turn = row[self.begin[n]:t + 1]
            observation = self._answer(n, turn, T - t - 1)
            if observation is not None:
                self.begin[n] = t + 1 + len(observation)
                place = n // G, n % G, slice(t + 1, self.begin[n])
                tokens[place], drawn[place] = torch.tensor(observation), False
        for n in range(ended.numel()):
            if n not in self.why and t + 1 - self.begin[n] >= self.max_turn_tokens:
                self.why[n] = "turn too long"
        for n in list(self.why)[before:]:
            done[n // G, n % G] = True
        return len(self.why) > before

    def _answer(self, n, turn, room):
        """The world's answer to a turn; None if the episode ends with it. room: tokens left."""
        self.count[n] += 1
        ids = self.respond(n, turn)
        if ids is not None and self.count[n] < self.max_turns and len(ids) < room:
            return ids
        if ids is None:
            self.why[n] = ""
        elif self.count[n] >= self.max_turns:
            self.why[n] = "too many turns"
        else:
            self.why[n] = "too many tokens"
        return None


def _cut_rows(tokens, logps, drawn, count, done, turns) -> list:
    """A batch of full length as one tuple a rollout: (ids, log-probs, limit, drawn), each cut to
    its count. Raises UserError if the model gave no finite numbers."""
    if not logps.isfinite().all():
        raise UserError("the model gives no finite logits: --dtype fp32 or another base")
    columns = [x.flatten(0, 1).tolist() for x in (tokens, logps, drawn, count, done)]
    rows = []
    for n, (ids, logp, mine, length, ended) in enumerate(zip(*columns)):
        limit = "" if ended else "too many tokens"
        drawn_here = None  # all of them
        if turns:
            limit, drawn_here = turns.why.get(n, limit), mine[:length]
        rows.append((ids[:length], logp[:length], limit, drawn_here))
    return rows


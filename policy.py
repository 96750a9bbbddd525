"""One frozen base model, two LoRA adapters, and the reference policy for free.

What of the paper this is: pi_agent and pi_env of Algorithm 1, "both initialised from the same
instruct model". Here they *are* the same model: adapter "agent", adapter "env", and with both
switched off the initial policy, which is the reference of every KL term. (With --agent-adapter or
--env-adapter a run starts elsewhere; the reference stays the base. With --env-model there are two
Policies of one adapter each.)

How it is run: it is not; genenv.py, grpo.py, rwr.py and eval/ call it.

    policy = Policy.load("Qwen/Qwen2.5-7B-Instruct", quant="nf4")
    rollouts = policy.sample("agent", [policy.encode("2+2=")], G=8)
    with policy.use("agent"):
        logp, mask = policy.logprobs(rollouts)

Where it differs on purpose: G rollouts of one prompt are *one row* of the batch, in sampling and
in training alike. The prompt is encoded once, its keys and values are stored once, and a mask lets
each rollout see the prompt and itself. A group costs P + G*R tokens where repeating the prompt
costs G*(P + R). `logprobs_dense` is the plain path, kept so that the tests can compare.

Shapes everywhere: B prompts (groups), G rollouts, P prompt, R response, V vocabulary, D hidden,
N rollouts of a micro-batch (rows of its log-probs), L packed length, M predicted tokens of a pack,
K cached keys, b groups still decoded, S slots of their rollouts (some are finished), T limit of a
response's length.
"""
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from support.files import UserError
from support.attention import PADDING, PROMPT, GrowingLayer, attention_layout, cast_lora, \
    fused_norm, group_mask, is_plain_lora, lora_linear, pack, step_mask
from support.loading import add_adapter, check_adapter_folder, find_eos_ids, load_model, \
    refuse_unlike_heads

LOGIT_CHUNK = 256  # tokens whose (chunk, V) fp32 logits exist at once: 0.16 GB at V = 152k
PREFILL_TOKENS = 16384  # padded prompt tokens (rows x columns) encoded at once before decoding


@dataclass
class Rollout:
    """A response to a prompt. Token ids are kept: sampled text is never tokenised again."""
    group: int                # rollouts of one group stand together and share their prompt
    prompt: list[int]         # (P,) ids
    response: list[int]       # (R,) ids, the terminal EOS included unless a length limit cut it
    logps: list[float] = ()   # (R,) log-probs at the sampling temperature; empty if not sampled
    limit: str = ""           # the limit that it ran into, such as "too many tokens"
    drawn: list[bool] | None = None  # (R,) drawn by the policy, not read; None: all of them

    @property
    def tokens(self) -> int:
        """How many tokens the policy drew: those that are trained on."""
        return sum(self.drawn) if self.drawn else len(self.response)


# ---------------------------------------------------------------------------------------------
# pure functions: log-softmax, drawing a token, micro-batches


def token_logprobs(hidden, head, target, temperature: float):
    """log pi(target) from hidden states, without ever holding all logits.

    hidden (M, D), target (M,) -> (M,) fp32. Temperature divides the logits exactly as in sampling,
    otherwise the policy scored would not be the policy that acted. Differentiable in `hidden` (the
    head is frozen), once.
    """
    def chunk_logprobs(h, y):
        logits = head(h).float()  # (chunk, V), fp32: bf16 log-softmax is noise
        logits = logits if temperature == 1 else logits / temperature
        return -torch.nn.functional.cross_entropy(logits, y, reduction="none")

    chunks = list(zip(hidden.split(LOGIT_CHUNK), target.split(LOGIT_CHUNK)))
    if not hidden.requires_grad or not torch.is_grad_enabled():
        return torch.cat([chunk_logprobs(h, y) for h, y in chunks])
    # A token's log-prob depends on its own hidden state alone, so its gradient (D numbers) can be
    # taken now and the logits (V numbers) forgotten: nothing is kept, nothing computed again.
    logps, slopes = [], []
    for h, y in chunks:
        with torch.enable_grad():
            h = h.detach().requires_grad_(True)
            logp = chunk_logprobs(h, y)
            slopes.append(torch.autograd.grad(logp.sum(), h)[0])
        logps.append(logp.detach())
    # zero plus the linear term: the value stays, the gradient is the slope
    zero = (hidden - hidden.detach()).float()
    return torch.cat(logps) + (torch.cat(slopes) * zero).sum(-1)


def draw(logits, temperature: float, generator):
    """Sample one token per row: logits (..., V) -> ids (...), log-probs (...).

    Only temperature shapes the distribution: top-k or top-p would sample from another distribution
    than the loss scores. Temperature 0 is greedy, its log-probs are those at temperature 1.
    """
    logits = logits.float()
    probs = (logits / temperature if temperature not in (0, 1) else logits).softmax(-1)
    if temperature == 0:
        ids = logits.argmax(-1, keepdim=True)
    else:  # invert the distribution function: one random number per row, no host synchronisation
        total = probs.cumsum(-1, dtype=torch.float64)  # fp32 would lose the tail of V = 152k
        point = torch.rand(*total.shape[:-1], 1, dtype=total.dtype, device=total.device,
                           generator=generator) * total[..., -1:]
        # right: the first token whose sum exceeds the point, which is never one of probability 0
        ids = torch.searchsorted(total, point, right=True).clamp(max=total.shape[-1] - 1)
    return ids[..., 0], probs.gather(-1, ids)[..., 0].log()


def by_group(rollouts) -> list:
    """Lists of rollouts that stand together and share group and prompt: the rows of `pack`."""
    return [list(group) for _, group in groupby(rollouts, lambda r: (r.group, r.prompt))]


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


class Policy:
    """A frozen causal language model with named LoRA adapters.

    active: name of the adapter in force, None for the bare base (= the reference policy).
    params: {adapter: its parameters}, gathered once by name. Optimisers are built from these lists
    and never from requires_grad, which PEFT flips whenever adapters are switched.
    """

    def __init__(self, model, tokenizer, adapters=("agent", "env"), rank=16, seed=0, paths=None):
        """model: a transformers causal LM. Adapters start at zero: B = 0, so pi = reference."""
        from peft import LoraConfig, PeftModel, get_peft_model
        self.tokenizer, self.active, self.chat_template_kwargs = tokenizer, None, {}
        refuse_unlike_heads(model.config)
        model.requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0,
                            target_modules="all-linear", task_type="CAUSAL_LM")
        with torch.random.fork_rng():  # PEFT draws the A matrices from the global generator
            torch.manual_seed(seed)
            for name in adapters:
                path = (paths or {}).get(name)
                if path:
                    model = add_adapter(model, path, name)
                elif isinstance(model, PeftModel):
                    model.add_adapter(name, config)
                else:
                    model = get_peft_model(model, config, adapter_name=name)
        for module in model.modules():
            # bitsandbytes on a CPU: at the first inference it would repack 4-bit weights for a
            # kernel that has no gradient, and training would err
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
            # no dropout anywhere: the policy that is scored is the one that sampled
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
            if is_plain_lora(module):
                module.forward, module.cast = partial(lora_linear, module), None
            if hasattr(module, "variance_epsilon") and module.weight.device.type != "cpu":
                module.forward = partial(fused_norm, module)
        self.lora_layers = [m for m in model.modules() if is_plain_lora(m)]
        self.blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for block in self.blocks:  # in force in train mode only, see _hidden; nothing is random
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(
                checkpoint, use_reentrant=False, preserve_rng_state=False)
        self.model = model.eval()
        self.lm = model.get_base_model() if adapters else model  # head + decoder, LoRA inside
        self.lm.set_attn_implementation("prompt_once")
        self.params = {name: [p for n, p in model.named_parameters() if f".{name}." in n]
                       for name in adapters}
        self.device = self.lm.get_input_embeddings().weight.device
        if self.device.type != "cpu":
            # cuDNN plans its attention for exact sizes, and in decoding each step has its own
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.eos_ids = find_eos_ids(self.lm, tokenizer)
        self._activate(None)

    @classmethod
    def load(cls, model: str, adapters=("agent", "env"), rank=16, quant=None, dtype="auto",
             device="auto", seed=0, adapter_paths=None, chat_template_kwargs=None) -> "Policy":
        """Load a local folder or hub name. Raises UserError with one line if that cannot work.

        quant: None or "nf4" (4-bit base, double quantisation, bf16 compute on a GPU).
        chat_template_kwargs: what the chat template is told beside the messages, a dict such as
        {"enable_thinking": False}.
        """
        for name, path in (adapter_paths or {}).items():
            if path:
                check_adapter_folder(path, name)
        lm, tokenizer = load_model(model, quant, dtype, device)
        if (chat_template_kwargs or {}).keys() & {"tokenize", "add_generation_prompt"}:
            raise UserError("chat-template options tokenize and add_generation_prompt are set "
                            "here: leave them out")
        policy = cls(lm, tokenizer, adapters, rank, seed, adapter_paths)
        policy.chat_template_kwargs = dict(chat_template_kwargs or {})
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

        For decoding, which calls each layer once per token: a copy passes no gradient and knows
        nothing of an optimiser's step, so none outlives the call.
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

    def save_adapter(self, adapter, folder):
        """Write `folder` in PEFT format: PeftModel.from_pretrained(base, folder) reads it."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # no adapter touches the vocabulary: PEFT need not look for the base's config to know that
        weights = get_peft_model_state_dict(self.model, adapter_name=adapter,
                                            save_embedding_layers=False)
        save_file({k: v.detach().cpu().contiguous() for k, v in weights.items()},
                  str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
        self.model.peft_config[adapter].save_pretrained(str(folder))

    def generator(self, seed: int):
        """An explicit random generator on the device of the model."""
        return torch.Generator(device=self.device).manual_seed(seed)

    # ---- text

    def encode(self, prompt) -> list[int]:
        """str -> ids without special tokens; list of chat messages -> ids by the chat template."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=False)
        if not self.tokenizer.chat_template:
            raise UserError("the model's tokenizer has no chat template: use an instruct model")
        # the template writes BOS and headers itself: text first, then ids, no special token twice
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False,
                                                  add_generation_prompt=True,
                                                  **self.chat_template_kwargs)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_observation(self, text: str) -> list[int]:
        """What stands between two turns of an episode: text -> ids without special tokens, or with
        a chat template a user turn and the assistant's next header, as the template writes them.
        """
        if not self.tokenizer.chat_template:
            return self.encode(text)
        mark = "*turn*"
        messages = [{"role": role, "content": content} for role, content in
                    (("user", "-"), ("assistant", mark), ("user", text))]
        short, long = (self.tokenizer.apply_chat_template(
            messages[:n], tokenize=False, add_generation_prompt=n == 3,
            **self.chat_template_kwargs) for n in (2, 3))
        # the token that ends a turn is the policy's own: an observation begins after it
        closing = self.encode(short.split(mark)[1])
        end = max((i + 1 for i, token in enumerate(closing) if token in self.eos_ids), default=0)
        return self.encode(long.split(mark, 1)[1])[end:]

    def decode(self, ids) -> str:
        """ids -> text without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    # ---- log-probabilities of given responses

    def logprobs(self, rollouts, temperature: float = 1.0, grad_checkpoint: bool = False):
        """Log-probs of N rollouts under the active adapter, the prompt of a group encoded once.

        Returns logp (N, R) fp32, zero where no token was drawn, and mask (N, R) bool, True where
        one was. Differentiable.
        """
        groups = by_group(rollouts)
        x = pack(groups, self.eos_ids[0], self.device)
        where = {}  # rows of one response each are plain causal sequences, right-padded
        if len(groups) < len(rollouts):
            layout = attention_layout(groups, self.device)
            # a mask of four dimensions passes the library's mask making untouched
            where = dict(position_ids=x["positions"], attention_mask=layout["mask"], layout=layout)
        hidden = self._hidden(x["ids"], grad_checkpoint, **where)  # (B, L, D)
        picked = hidden.flatten(0, 1)[x["source"]]  # (M, D): predicted tokens only
        logp = token_logprobs(picked, self.lm.get_output_embeddings(), x["target"], temperature)
        out = logp.new_zeros(x["shape"]).index_put((x["rows"], x["cols"]), logp)
        mask = torch.zeros(x["shape"], dtype=torch.bool, device=logp.device)
        # a plain True would be copied to a GPU, which waits for it
        return out, mask.index_put((x["rows"], x["cols"]), mask.new_ones(()))

    def logprobs_dense(self, rollouts, temperature: float = 1.0):
        """The same numbers the plain way: one row per response, the prompt repeated in each."""
        ids = pack([[r] for r in rollouts], self.eos_ids[0], self.device)["ids"]
        logits = self.lm(input_ids=ids, use_cache=False).logits.float() / temperature  # (N, L, V)
        logps = logits.log_softmax(-1)
        out = logps.new_zeros(len(rollouts), max(len(r.response) for r in rollouts))  # (N, R)
        mask = torch.zeros_like(out, dtype=torch.bool)
        for n, r in enumerate(rollouts):
            for t, token in enumerate(r.response):  # logits at P-1+t score token P+t
                if not r.drawn or r.drawn[t]:
                    out[n, t], mask[n, t] = logps[n, len(r.prompt) - 1 + t, token], True
        return out, mask

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
        rollout i is an episode: observations are read where they come in, the turns are drawn.
        Its limits are max_turns turns without an end, max_turn_tokens in a turn without EOS, and
        max_new_tokens in all, observations included.
        Raises ValueError on an empty prompt.
        """
        if any(len(p) == 0 for p in prompts):
            raise ValueError("cannot sample from an empty prompt")
        out = [None] * (len(prompts) * G)
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        width = max(1, max_rows // G)
        with self.use(adapter), self._cast_once(adapter):
            for start in range(0, len(by_length), width):
                members = by_length[start:start + width]

                def answer(n, ids, members=members):  # n counts here, the caller counts over all
                    return respond(members[n // G] * G + n % G, ids)

                rows = self._sample_rows([prompts[i] for i in members], G, max_new_tokens,
                                         temperature, generator, answer if respond else None,
                                         max_turns, max_turn_tokens)
                for b, i in enumerate(members):
                    for g in range(G):
                        out[i * G + g] = Rollout(i, list(prompts[i]), *rows[b * G + g])
        return out

    def _sample_rows(self, prompts, G, T, temperature, generator, respond, *limits):
        """One wide batch: prefill, then decode until every rollout has ended.

        prompts: B id lists -> B*G tuples (response ids, log-probs, limit, drawn).
        """
        cache, owner, hidden = self._prefill(prompts, G * (T - 1))  # (B, K), (B, D)
        B, dev, head = len(prompts), self.device, self.lm.get_output_embeddings()
        lengths = torch.tensor([len(p) for p in prompts], device=dev)  # (B,)
        eos = torch.tensor(self.eos_ids, device=dev)
        tokens = torch.zeros(B, G, T, dtype=torch.long, device=dev)    # (B, G, T)
        logps = torch.zeros(B, G, T, device=dev)                       # (B, G, T)
        count = torch.zeros(B, G, dtype=torch.long, device=dev)        # (B, G) response lengths
        done = torch.zeros(B, G, dtype=torch.bool, device=dev)         # (B, G)
        begin = torch.zeros_like(count)                                # (B, G) where a turn begins
        # of episodes, see _end_turns; begins is begin once more, where reading it waits for no GPU
        state = dict(begin=begin, done=done, begins=Counter(), turns=Counter(), why={})
        drawn = torch.ones_like(tokens, dtype=torch.bool)              # (B, G, T) drawn, not read
        live = torch.arange(B, device=dev)                             # (b,) groups still decoded
        rollout = torch.arange(G, device=dev).expand(B, G)             # (b, S) the one in each slot
        # laid out in memory: for a view the head's weights would be copied once per prompt
        hidden = hidden[:, None].expand(B, G, -1).contiguous()         # (b, S, D)
        config, dtype = self.lm.config.get_text_config(decoder=True), hidden.dtype
        see = partial(group_mask, causal=False) if dev.type == "cpu" else \
            partial(step_mask, config, dtype)
        for t in range(T):
            ids, logp = draw(head(hidden), temperature, generator)     # (b, S)
            at = (live[:, None], rollout)
            if respond:  # an observation lies ready in the row: until its end tokens are read
                drawn[(*at, t)] = new = t >= begin[at]
                ids = torch.where(new, ids, tokens[(*at, t)])
                logp = logp.masked_fill(~new, 0)
            tokens[(*at, t)], logps[(*at, t)] = ids, logp
            count[at] += ~done[at]  # a finished rollout may keep its slot a while: it adds nothing
            if respond:
                ended = torch.isin(tokens[..., t], eos) & drawn[..., t] & ~done
                fewer = _end_turns(t, ended, tokens, respond, *limits, **state)
            else:
                done[at] |= torch.isin(ids, eos)
                # asking a GPU how many still run makes it wait
                fewer = dev.type == "cpu" or (t + 1) % 16 == 0
            if t == T - 1:
                break
            if fewer:
                keep, rollout = _compact(done[live], rollout)
                if len(keep) == 0:
                    break
                if len(keep) < len(live):  # finished groups leave, and their keys with them
                    live, owner, rollout = live[keep], owner[keep], rollout[keep]
                    cache.batch_select_indices(keep)
            owner = torch.cat([owner, rollout], dim=1)                 # (b, K + S)
            hidden = self.lm.base_model(
                input_ids=tokens[live[:, None], rollout, t], past_key_values=cache, use_cache=True,
                position_ids=(lengths[live, None] + t).expand_as(rollout),
                attention_mask=see(rollout, owner)).last_hidden_state
        tokens, logps, drawn = (x.flatten(0, 1).tolist() for x in (tokens, logps, drawn))
        why = [state["why"].get(n, "" if ended else "too many tokens")
               for n, ended in enumerate(done.flatten().tolist())]
        return [(tokens[n][:c], logps[n][:c], why[n], drawn[n][:c] if respond else None)
                for n, c in enumerate(count.flatten().tolist())]

    def _prefill(self, prompts, more):
        """Encode each prompt once. Returns the cache, owner (B, P) and the last hidden (B, D).

        Prompts are padded on the right: causality alone then hides the padding from real tokens.
        Long prompts go through in chunks of columns: the memory beside the cache is bounded by
        tokens, not by rows. more: the most keys that decoding will add to a row.
        """
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        longest, pad = max(map(len, prompts)), self.eos_ids[:1]
        ids = torch.tensor([[*p, *pad * (longest - len(p))] for p in prompts], device=self.device)
        rows, columns = (torch.arange(n, device=self.device) for n in ids.shape)
        cache = Cache(layer_class_to_replicate=partial(
            GrowingLayer, room=len(columns), most=len(columns) + more))
        width, last = max(1, PREFILL_TOKENS // len(prompts)), []
        for start in range(0, len(columns), width):
            # given a cache, the library's causal mask lets a chunk see the chunks before it
            hidden = self.lm.base_model(
                input_ids=ids[:, start:start + width], past_key_values=cache,
                use_cache=True).last_hidden_state                       # (B, width, D)
            ends = (lengths - 1 - start).clamp(0, hidden.shape[1] - 1)  # of the prompts ending here
            last.append(hidden[rows, ends])
        owner = torch.where(columns < lengths[:, None], PROMPT, PADDING)
        return cache, owner, torch.stack(last)[(lengths - 1) // width, rows]


# ---------------------------------------------------------------------------------------------
# helpers


def distance(before, now) -> float:
    """Euclidean distance of two lists of parameters: how far an adapter has moved."""
    return float(torch.stack([(a.detach() - b.detach()).float().norm()
                              for a, b in zip(before, now)]).norm())


def _end_turns(t, ended, tokens, respond, max_turns, max_turn_tokens, *, begin, done, begins, turns,
               why) -> bool:
    """Episodes whose turn ended with token t: write the world's answer into their rows, or end
    them.

    ended, begin, done (B, G), tokens (B, G, T). For each rollout, begins: where its turn begins;
    turns: how many it had; why, once it is over: the limit that it ran into, or "". All of these
    but ended are brought up to date. Returns whether an episode is over.
    The GPU is waited for once, and once more where turns ended: their answers have to be known
    before the next token.
    """
    (B, G, T), before = tokens.shape, len(why)
    over = [n for n, end in enumerate(ended.flatten().tolist()) if end]
    for n, row in zip(over, tokens.flatten(0, 1)[over].tolist() if over else ()):
        turns[n] += 1
        ids = respond(n, row[begins[n]:t + 1])
        if ids is not None and turns[n] < max_turns and t + 1 + len(ids) < T:
            begins[n] = t + 1 + len(ids)
            begin[n // G, n % G] = begins[n]
            tokens[n // G, n % G, t + 1:begins[n]] = torch.tensor(ids)
        else:
            limit = "too many turns" if turns[n] >= max_turns else "too many tokens"
            why[n] = "" if ids is None else limit
    for n in range(B * G):  # turns that hit max_turn_tokens
        if n not in why and t + 1 - begins[n] >= max_turn_tokens:
            why[n] = "turn too long"
    for n in list(why)[before:]:
        done[n // G, n % G] = True
    return len(why) > before


def _compact(done, rollout):
    """Who goes on: done (b, G), rollout (b, S) -> rows to keep (b',), rollout in each slot (b, S').

    Running rollouts move to the front; S' is the most that any group still runs. Rows are only
    dropped once a quarter of them has finished, because dropping copies the cache.
    """
    running = (~done).sum(1).tolist()
    if max(running) == 0:
        return [], rollout
    order = done.long().argsort(dim=1, stable=True)  # running first
    keep = [b for b, n in enumerate(running) if n > 0]
    if len(keep) > 0.75 * len(running):
        keep = range(len(running))
    return torch.tensor(list(keep), device=done.device), order[:, :max(running)]

"""Hold both policies: one frozen base model, two LoRA adapters, and the reference policy for free.

Paper: pi_agent and pi_env of Algorithm 1, "both initialised from the same instruct model". Here
they *are* the same model: adapter "agent", adapter "env", and with both switched off the initial
policy, which is the reference of every KL term. (With --env-model there are two Policies with one
adapter each.)

Usage: genenv.py, grpo.py, rwr.py and eval/ call it.

    policy = Policy.load("Qwen/Qwen2.5-7B-Instruct", quant="nf4")
    rollouts = policy.sample("agent", [policy.encode("2+2=")], G=8)
    with policy.use("agent"):
        logp, mask = policy.logprobs(rollouts)

Read `plain_logprobs` first. `logprobs` returns the same numbers, and is what runs.

Deviations: G rollouts of one prompt are *one row* of the batch, both in sampling and in training.
The prompt is encoded once, its keys and values are stored once, and a mask lets each rollout see
only the prompt and itself. A group costs P + G*R tokens; repeating the prompt would cost G*(P + R).
model/packing.py lays out the rows, model/decoding.py draws tokens.

Shapes: B prompts (groups), G rollouts of each, P prompt tokens, R response tokens (at most T), V
vocabulary, D hidden size, N responses of a micro-batch, L tokens of a row, M predicted tokens.
"""
import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from errors import one_line
from model.attention import attention_layout, cast_lora, is_plain_lora, patch
from model.chat import Chat
from model.decoding import Decoder, GraphDecoder, Turns, decode_rows
from model.loading import add_adapters, check_base, check_paths, load_model, note_base
from model.memory import KEPT_LOGITS, LOGIT_CHUNK, free_bytes, prompts_at_once
from model.packing import by_group, pack


@dataclass
class Rollout:
    """Hold a response to a prompt as token ids: sampled text is never tokenised again."""
    group: int                # rollouts of one group are neighbours and share their prompt
    prompt: list[int]         # (P,) ids
    response: list[int]       # (R,) ids, the terminal EOS included unless a length limit cut it
    # (R,) log-probs at the sampling temperature, 0 where no token was drawn; empty if the response
    # was not sampled
    logps: list[float] = ()
    # "" if it ended by itself, else "too many tokens", "too many turns" or "special tokens"
    limit: str = ""
    # (R,) whether the policy drew each token; the others are observations. None: all drawn
    drawn: list[bool] | None = None

    @property
    def tokens(self) -> int:
        """Count the tokens that the policy drew: those that are trained on."""
        return sum(self.drawn) if self.drawn else len(self.response)


def token_logprobs(hidden, head, target, temperature: float):
    """Return log pi(target) from hidden states, without ever holding many logits.

    hidden (M, D), target (M,) -> (M,) fp32, differentiable. Temperature divides the logits exactly
    as in sampling; otherwise the scored policy would not be the one that acted.
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


# ---------------------------------------------------------------------------------------------
# the policy handle


class Policy(Chat):
    """Wrap a frozen causal language model with named LoRA adapters; model/chat.py handles its text.

    active: name of the active adapter, None for the bare base (= the reference policy).
    params: {adapter: its parameters}, gathered once by name. Optimisers are built from these lists
    and never from requires_grad, which PEFT changes whenever adapters are switched.
    """

    def __init__(self, model, tokenizer, adapters=("agent", "env"), rank=16, seed=0,
                 adapter_folder=None, chat_template_kwargs=None):
        """Wrap a transformers causal LM; the other arguments are those of `load`.

        Adapters start with B = 0, so that pi equals the reference; one read from adapter_folder
        does not. Raise UserError if the model has no token that ends a response.
        """
        self.active = None
        self.source = ""  # the folder or hub name that it was loaded from
        self.slot_steps = 0  # tokens for which its rollouts had room, counted by model/decoding.py
        model.requires_grad_(False)
        self.model = add_adapters(model, adapters, rank, seed, adapter_folder).eval()
        self.lm = self.model.get_base_model() if adapters else model  # head + decoder, LoRA inside
        # our attention (model/attention.py): the G responses in a row see the prompt and
        # themselves, not each other
        self.lm.set_attn_implementation("prompt_once")
        patch(self.model)
        self.lora_layers = [m for m in self.model.modules() if is_plain_lora(m)]
        self.blocks = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        parameters = list(self.model.named_parameters())
        self.params = {adapter: [p for name, p in parameters if f".{adapter}." in name]
                       for adapter in adapters}
        self.device = self.lm.get_input_embeddings().weight.device
        self.decoder = Decoder if self.device.type == "cpu" else GraphDecoder
        self._activate(None)
        Chat.__init__(self, tokenizer, model.generation_config, chat_template_kwargs)

    @classmethod
    def load(cls, model: str, adapters=("agent", "env"), rank=16, quant=None, dtype="auto",
             device=None, seed=0, adapter_folder=None, chat_template_kwargs=None,
             max_tokens=None) -> "Policy":
        """Load a local folder or hub name. Raise UserError with a one-line message if it cannot be
        loaded.

        quant: None or "nf4" (4-bit base, double quantisation, bf16 compute on a GPU). device: None
        = a GPU if there is one. adapter_folder: a folder written by `save_adapters`, from which the
        first adapter is initialised. chat_template_kwargs: arguments of the chat template besides
        the messages, such as {"enable_thinking": False}; a "date" (ISO) replaces today's date.
        max_tokens: the most that a prompt and its response will have together; None: unknown.
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
        """Activate one adapter (or none), and keep gradients enabled for every adapter."""
        if self.params:
            if adapter is None:
                self.model.base_model.disable_adapter_layers()
            else:
                self.model.base_model.enable_adapter_layers()
                self.model.set_adapter(adapter)
            # PEFT freezes the inactive adapter. A switch between a forward pass and its backward
            # pass would silently lose the gradient.
            for params in self.params.values():
                for p in params:
                    p.requires_grad_(True)
        self.active = adapter

    @contextmanager
    def use(self, adapter):
        """Activate an adapter within `with policy.use("agent")`, and restore the previous one
        afterwards, even after an error.

        Run a backward pass inside, too: gradient checkpointing runs the forward pass again.
        """
        if adapter is not None and adapter not in self.params:
            raise ValueError(f"no adapter {adapter!r}; there are {sorted(self.params)}")
        former = self.active
        self._activate(adapter)
        try:
            yield self
        finally:
            self._activate(former)

    @contextmanager
    def _cast_once(self, adapter):
        """Keep the adapter's weights ready in the dtype of the activations, inside the block.

        This is for decoding, which calls each layer once per token. The copies pass no gradient and
        do not see the optimiser's steps, so they are dropped at the end.
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
        """Return an AdamW over exactly the parameters of one adapter."""
        return torch.optim.AdamW(self.params[adapter], lr=lr, weight_decay=0.0)

    def save_adapters(self, folder):
        """Write each adapter to folder/NAME, from which PeftModel.from_pretrained(base,
        folder/NAME) can load it."""
        # No adapter touches the vocabulary, so PEFT need not read the base's config to find out.
        # safetensors raises its own kind of error when the disk is full.
        with one_line(folder, "cannot be written"):
            self.model.save_pretrained(str(folder), selected_adapters=list(self.params),
                                       save_embedding_layers=False)
            if self.source:
                note_base(folder, self.params, self.source)

    def as_drawn(self, prompt, response) -> Rollout:
        """Return a Rollout of a prompt and a response, as if this policy had drawn it.

        response: a text, or for an episode the list of turns and observations, of which only turns
        count as drawn.
        """
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
        """Return an explicit random generator on the device of the model."""
        return torch.Generator(device=self.device).manual_seed(seed)

    # ---- log-probabilities of given responses

    def plain_logprobs(self, rollouts, temperature: float = 1.0):
        """Return what `logprobs` returns, the plain way: one row per response, with its prompt.

        N rollouts -> logp (N, R) and mask (N, R), under the active adapter. `logprobs` and `sample`
        are checked against it whenever a chat model is loaded (model/loading.py), and by the tests.
        """
        rows = [torch.tensor(r.prompt + r.response, device=self.device) for r in rollouts]
        # padding is on the right, where causal attention hides it from real tokens without a mask
        ids = pad_sequence(rows, batch_first=True)                                # (N, L)
        logits = self.lm(input_ids=ids, use_cache=False).logits.float()           # (N, L, V)
        logps = (logits / temperature).log_softmax(-1)
        out = logps.new_zeros(len(rollouts), max(len(r.response) for r in rollouts))  # (N, R)
        mask = torch.zeros_like(out, dtype=torch.bool)
        for n, r in enumerate(rollouts):
            for t, token in enumerate(r.response):
                if not r.drawn or r.drawn[t]:
                    # the logits at a position predict the next token
                    out[n, t] = logps[n, len(r.prompt) - 1 + t, token]
                    mask[n, t] = True
        return out, mask

    def logprobs(self, rollouts, temperature: float = 1.0, grad_checkpoint=None):
        """Score N rollouts under the active adapter; the prompt of a group is encoded once.

        Return logp (N, R) fp32, zero where no token was drawn, and mask (N, R) bool, True where
        one was. Differentiable. grad_checkpoint: compute each layer again in the backward pass
        instead of keeping its activations; None = only on a GPU.
        """
        if grad_checkpoint is None:
            grad_checkpoint = self.device.type != "cpu"
        # Lay out each group as one row: prompt, response 1, ..., response G. For predicted token m,
        # x.source[m] is the position whose hidden state predicts it, x.target[m] its id, and
        # (x.rows[m], x.cols[m]) its cell in the (N, R) results.
        groups = by_group(rollouts)
        x = pack(groups, self.device)
        # if no row has two responses, ordinary causal attention is enough
        layout_args = {}
        if len(groups) < len(rollouts):
            layout = attention_layout(x)
            # transformers uses a 4-D mask unchanged; it would turn a 2-D one into a causal mask
            layout_args = {"position_ids": x.positions, "attention_mask": layout.mask,
                           "layout": layout}
        hidden = self._hidden(x.ids, grad_checkpoint, **layout_args)  # (B, L, D)
        picked = hidden.flatten(0, 1)[x.source]  # (M, D): predicted tokens only
        logp = token_logprobs(picked, self.lm.get_output_embeddings(), x.target, temperature)
        out = logp.new_zeros(x.shape).index_put((x.rows, x.cols), logp)
        mask = torch.zeros(x.shape, dtype=torch.bool, device=logp.device)
        # new_ones creates its tensor on the device; a plain True would first have to be copied
        # there
        return out, mask.index_put((x.rows, x.cols), mask.new_ones(()))

    def _hidden(self, ids, grad_checkpoint, **where):
        """Return the last hidden states (B, L, D).

        A transformers block is checkpointed only in train mode. We set the `training` flag on the
        blocks only, and reset it afterwards, because in train mode a block drops the KV cache.
        """
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
        """Draw G responses to each prompt, in prompt order: rollout i belongs to prompts[i // G].

        prompts: list of id lists. adapter: a name, or None for the base. temperature 0 is greedy.
        max_rows bounds the rollouts that run at once, and so does the memory (model/memory.py), but
        the G rollouts of a prompt always run together.

        With respond(i, ids of a turn) -> ids of an observation, or None when the episode is over,
        rollout i is an episode: observations are inserted unchanged, only turns are sampled. Its
        limits are max_turns turns, max_turn_tokens in a turn without EOS, and max_new_tokens in
        all, observations included. Raise ValueError for an empty prompt, UserError if the model
        gives numbers that are not finite.
        """
        if any(len(p) == 0 for p in prompts):
            raise ValueError("cannot sample from an empty prompt")
        out = [None] * (len(prompts) * G)
        # prompts of similar length are decoded together, so that little padding is needed
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        on_gpu = self.device.type == "cuda"
        memory = free_bytes() if on_gpu else None
        with self.use(adapter), self._cast_once(adapter):
            while by_length:
                members = by_length[:max(1, max_rows // G)]
                if on_gpu:  # keep only as many as fit in its memory
                    lengths = [len(prompts[i]) for i in members]
                    width = prompts_at_once(self.lm, lengths, G, max_new_tokens, memory)
                    members = members[:width]
                by_length = by_length[len(members):]
                # where each of these rollouts belongs in `out`
                places = [i * G + g for i in members for g in range(G)]
                turns = Turns(respond, places, max_turns, max_turn_tokens) if respond else None
                rows = decode_rows(self, [prompts[i] for i in members], G, max_new_tokens,
                                   temperature, generator, turns)
                # a row is (response, logps, limit, drawn), in the order of Rollout's fields
                for place, row in zip(places, rows):
                    group = place // G
                    out[place] = Rollout(group, list(prompts[group]), *row)
        return out


# ---------------------------------------------------------------------------------------------
# helpers


def policy_options(o) -> dict:
    """Return the arguments of Policy.load that a run's Options determine."""
    template = json.loads(o.chat_template_kwargs or "{}")
    template["date"] = o.date
    max_tokens = o.max_prompt_tokens + max(o.max_response_tokens, o.max_task_tokens)
    return {"rank": o.rank, "quant": o.quant or None, "dtype": o.dtype, "seed": o.seed,
            "chat_template_kwargs": template, "max_tokens": max_tokens}

"""Hold both policies: one frozen base model, two LoRA adapters, and the reference policy for free.

Paper: pi_agent and pi_env of Algorithm 1, both initialised from the same instruct model. Here they
*are* the same model, once with the adapter "agent", once with the adapter "env". With both adapters
switched off, it is the initial policy, the reference of every KL term. (With --env-model there are
two Policies with one adapter each.)

Usage: all sampling from a model, and all scoring of text with it, go through a Policy.

    policy = Policy.load("Qwen/Qwen2.5-7B-Instruct", quant="nf4")
    rollouts = policy.sample("agent", [policy.encode("2+2=")], G=8)
    with policy.use("agent"):
        logp, mask = policy.logprobs(rollouts)

Read `plain_logprobs` first. Training uses `logprobs`, which returns the same numbers at less cost.

Deviations: the G rollouts of a prompt are *one row* of the batch, both in sampling and in training.
The prompt is encoded once, its keys and values are stored once, and a mask lets each rollout see
only the prompt and itself. A group costs P + G*R tokens; repeating the prompt would cost G*(P + R).
model/packing.py lays out the rows, and model/decoding.py draws the tokens.

Shapes: B prompts (groups), G rollouts of each, P prompt tokens, R response tokens, V vocabulary, D
hidden size, N responses in a micro-batch, L tokens of a row, M predicted tokens.
"""
import json
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from errors import one_line
from model.attention import attention_layout, cast_lora, patch
from model.chat import Chat
from model.decoding import Decoder, GraphDecoder, Turns, decode_rows
from model.loading import add_adapters, check_base, check_paths, load_model, note_base
from model.memory import KEPT_LOGITS, LOGIT_CHUNK, free_bytes, prompts_at_once
from model.packing import by_group, pack


@dataclass
class Rollout:
    """Hold a prompt and a response as token ids, so that sampled text is never tokenised again."""
    group: int                # the rollouts of a group are neighbours and share a prompt
    prompt: list[int]         # (P,) ids
    response: list[int]       # (R,) ids, with the final EOS unless a limit cut the response off
    # (R,) log-probs at the sampling temperature, 0 where no token was drawn; empty if the response
    # was not sampled
    logps: list[float] = ()
    # why the response was cut off: "too many tokens", "too many turns", "turn too long" or "special
    # tokens"; "" if it ended by itself
    limit: str = ""
    # (R,) whether the policy drew each token; the others are an episode's observations. None means
    # that it drew all of them
    drawn: list[bool] | None = None

    @property
    def tokens(self) -> int:
        """Return how many tokens the policy drew: only these are trained on."""
        return sum(self.drawn) if self.drawn else len(self.response)


def token_logprobs(hidden, head, target, temperature: float):
    """Return log pi(target) from hidden states, in chunks, so that few logits exist at a time.

    hidden (M, D), target (M,) -> (M,) fp32, differentiable. The temperature divides the logits as
    in sampling; otherwise the scored policy would not be the one that acted.
    """
    def chunk_logprobs(h, y):
        logits = head(h).float()  # (chunk, V), in fp32: a log-softmax in bf16 is too imprecise
        if temperature != 1:
            logits = logits / temperature
        return -torch.nn.functional.cross_entropy(logits, y, reduction="none")

    score = chunk_logprobs
    if len(target) * len(head.weight) > KEPT_LOGITS:  # M * V
        # keep no logits: the backward pass computes those of each chunk again
        score = partial(checkpoint, chunk_logprobs, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(hidden.split(LOGIT_CHUNK), target.split(LOGIT_CHUNK))
    return torch.cat([score(h, y) for h, y in chunks])


# ---------------------------------------------------------------------------------------------
# the policy handle


class Policy(Chat):
    """Wrap a frozen causal language model with named LoRA adapters. The base class, Chat, converts
    between text and token ids.

    active: name of the active adapter; None for the bare base, which is the reference policy.
    params: {adapter: its parameters}, gathered once by name. Optimisers are built from these lists
    and never from requires_grad, which PEFT changes whenever adapters are switched.
    """

    def __init__(self, model, tokenizer, adapters=("agent", "env"), rank=16, seed=0,
                 adapter_folder=None, chat_template_kwargs=None):
        """Wrap a transformers causal LM; the other arguments are those of `load`.

        In a new LoRA adapter the matrices B are 0, so its policy equals the reference. With an
        adapter read from adapter_folder it does not; only eval/ reads one, since a run starts with
        new adapters. Raise UserError if the model has no token that ends a response.
        """
        self.active = None
        self.source = ""  # the folder or hub name that the model was loaded from
        model.requires_grad_(False)
        self.model = add_adapters(model, adapters, rank, seed, adapter_folder).eval()
        # the transformers model itself, with LoRA inside its layers
        self.lm = self.model.get_base_model() if adapters else model
        # in our attention (model/attention.py), each of the G responses in a row sees the prompt
        # and itself, but no other response
        self.lm.set_attn_implementation("prompt_once")
        patch(self.model)
        self.lora_layers = [m for m in self.model.modules() if hasattr(m, "cast")]  # set by patch
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
        """Load a model from a local folder or by its hub name. Raise UserError if that fails.

        rank, seed: those of new adapters. quant: None, or "nf4" for a 4-bit base with double
        quantisation. dtype: "auto", "bf16" or "fp32", see model.loading.choose_dtype. device: None
        means a GPU if there is one. adapter_folder: the PEFT folder of a saved LoRA adapter, from
        which the first adapter is read. chat_template_kwargs: arguments of the chat template
        besides the messages, such as {"enable_thinking": False}; a "date" (ISO) replaces today's
        date. max_tokens: how many tokens a prompt and its response may have together; None if
        unknown.
        """
        if adapter_folder:
            check_base(adapter_folder, model)
        lm, tokenizer = load_model(model, quant, dtype, device, max_tokens)
        with one_line(model):  # the library's code for this model may raise anything
            policy = cls(lm, tokenizer, adapters, rank, seed, adapter_folder, chat_template_kwargs)
            if tokenizer.chat_template:  # the worlds' own tiny models have none and need no check
                check_paths(policy, max_tokens)
        policy.source = model
        return policy

    # ---- adapters

    def _activate(self, adapter):
        """Activate one adapter, or none, and keep gradients enabled for all adapters."""
        if self.params:
            if adapter is None:
                self.model.base_model.disable_adapter_layers()
            else:
                self.model.base_model.enable_adapter_layers()
                self.model.set_adapter(adapter)
            # PEFT freezes the inactive adapters. Without the following lines, a switch between a
            # forward pass and its backward pass would silently lose the gradient.
            for p in chain(*self.params.values()):
                p.requires_grad_(True)
        self.active = adapter

    @contextmanager
    def use(self, adapter):
        """Activate an adapter within `with policy.use("agent")`, and restore the previous one
        afterwards, even after an error.

        Run the backward pass inside the block as well: with gradient checkpointing it repeats the
        forward pass.
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
        """Keep copies of the adapter's weights in the dtype of the activations, inside the block.

        They save decoding, which calls each layer once per token, from casting every time. They
        pass no gradient on and do not follow the optimiser's steps, so they are dropped at the end.
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
        """Return an AdamW optimiser of exactly one adapter's parameters."""
        return torch.optim.AdamW(self.params[adapter], lr=lr, weight_decay=0.0)

    def save_adapters(self, folder):
        """Write each adapter to folder/NAME, from which PeftModel.from_pretrained(base,
        folder/NAME) can load it."""
        # Without save_embedding_layers=False, PEFT would read the base's config to find out whether
        # the vocabulary has changed; no adapter changes it. one_line is for safetensors, which has
        # its own kind of error for a full disk.
        with one_line(folder, "cannot be written"):
            self.model.save_pretrained(str(folder), selected_adapters=list(self.params),
                                       save_embedding_layers=False)
            if self.source:
                note_base(folder, self.params, self.source)

    def as_drawn(self, prompt, response) -> Rollout:
        """Return a prompt and a response as a Rollout, as if this policy had drawn the response.

        response: a text, or for an episode the list of its turns and observations, of which only
        the turns count as drawn.
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
        """Return a seeded random generator on the model's device."""
        return torch.Generator(device=self.device).manual_seed(seed)

    # ---- log-probabilities of given responses

    def plain_logprobs(self, rollouts, temperature: float = 1.0):
        """Return what `logprobs` returns, the plain way: one row per response, with its prompt.

        N rollouts -> logp (N, R) and mask (N, R), under the active adapter. Whenever a chat model
        is loaded, `logprobs` and `sample` are checked against this method (model/loading.py). The
        tests check them, too.
        """
        rows = [torch.tensor(r.prompt + r.response, device=self.device) for r in rollouts]
        # padding is on the right, where causal attention hides it from the real tokens before it
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
        """Return the log-probs of N rollouts under the active adapter, and their mask.

        logp (N, R) fp32, differentiable, is 0 where no token was drawn; mask (N, R) bool is True
        where one was. The prompt of a group is encoded once. grad_checkpoint: whether the backward
        pass computes each layer again, so that its activations need not be kept; None means only on
        a GPU.
        """
        if grad_checkpoint is None:
            grad_checkpoint = self.device.type != "cpu"
        # Lay out each group as one row: prompt, response 1, ..., response G. For the predicted
        # token m, x.source[m] is the position whose hidden state predicts it, x.target[m] is its
        # id, and (x.rows[m], x.cols[m]) is its cell in the results (N, R).
        groups = by_group(rollouts)
        x = pack(groups, self.device)
        # if no row has more than one response, ordinary causal attention is enough
        layout_args = {}
        if len(groups) < len(rollouts):
            layout = attention_layout(x)
            # this mask has four dimensions, so transformers uses it unchanged; it would combine one
            # of two dimensions with a causal mask
            layout_args = {"position_ids": x.positions, "attention_mask": layout.mask,
                           "layout": layout}
        hidden = self._hidden(x.ids, grad_checkpoint, **layout_args)  # (B, L, D)
        picked = hidden.flatten(0, 1)[x.source]  # (M, D): predicted tokens only
        logp = token_logprobs(picked, self.lm.get_output_embeddings(), x.target, temperature)
        out = logp.new_zeros(x.shape).index_put((x.rows, x.cols), logp)
        mask = torch.zeros(x.shape, dtype=torch.bool, device=logp.device)
        # new_ones creates the True on the device; a Python True would have to be copied there first
        return out, mask.index_put((x.rows, x.cols), mask.new_ones(()))

    def _hidden(self, ids, grad_checkpoint, **where):
        """Return the last layer's hidden states (B, L, D). where: further arguments of the model.

        transformers checkpoints a block only if its `training` flag is set. We set the flag only on
        the blocks and only for this call: with it, a block would drop the KV cache in sampling.
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

        adapter: a name, or None for the base. prompts: lists of ids. temperature: 0 is greedy.
        generator: on the model's device. At most max_rows rollouts run at once, and on a GPU only
        as many as its memory holds (model/memory.py), but the G rollouts of a prompt always run
        together.

        respond: None for single answers. With a function respond(i, ids of a turn) -> ids of an
        observation, rollout i is an episode of turns, which are sampled, and observations, which
        are inserted unchanged. The episode ends when respond returns None, after max_turns turns,
        in a turn that reaches max_turn_tokens without EOS, or at max_new_tokens in all,
        observations included. Raise ValueError for an empty prompt, and UserError if the model's
        numbers are not finite.
        """
        if any(len(p) == 0 for p in prompts):
            raise ValueError("cannot sample from an empty prompt")
        out = [None] * (len(prompts) * G)
        # decode prompts of similar length together, so that they need little padding
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        on_gpu = self.device.type == "cuda"
        memory = free_bytes() if on_gpu else None
        with self.use(adapter), self._cast_once(adapter):
            while by_length:
                members = by_length[:max(1, max_rows // G)]
                if on_gpu:  # take only as many prompts as its memory holds
                    lengths = [len(prompts[i]) for i in members]
                    width = prompts_at_once(self.lm, lengths, G, max_new_tokens, memory)
                    members = members[:width]
                by_length = by_length[len(members):]
                # the index in `out` of each of these rollouts
                places = [i * G + g for i in members for g in range(G)]
                turns = Turns(respond, places, max_turns, max_turn_tokens) if respond else None
                rows = decode_rows(self, [prompts[i] for i in members], G, max_new_tokens,
                                   temperature, generator, turns)
                # a row is (response, logps, limit, drawn), which are Rollout's last four fields
                for place, row in zip(places, rows):
                    group = place // G
                    out[place] = Rollout(group, prompts[group], *row)
        return out


# ---------------------------------------------------------------------------------------------
# helpers


def policy_options(o) -> dict:
    """Return those arguments of Policy.load that a run's Options determine."""
    template = json.loads(o.chat_template_kwargs or "{}")
    template["date"] = o.date
    max_tokens = o.max_prompt_tokens + max(o.max_response_tokens, o.max_task_tokens)
    return {"rank": o.rank, "quant": o.quant or None, "dtype": o.dtype, "seed": o.seed,
            "chat_template_kwargs": template, "max_tokens": max_tokens}

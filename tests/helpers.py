"""Helpers that the tests share: a tiny random Qwen2 with two adapters, toy tokens, references.

The references are slow and obvious on purpose: one forward pass per token, Python loops, no mask,
no cache. The code under test must agree with them.
"""
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_pool import read_jsonl
from errors import UserError
import grpo
from policy import Policy, Rollout
from support.options import Options
from worlds.tiny_model import word_tokenizer

WORLDS = Path(__file__).resolve().parents[1] / "worlds"
EXAMPLE_LIST = [  # options: our own list of functions, with its few examples and held-out requests
    "--tools", str(WORLDS / "tools/example_tools.json"),
    "--base-tasks", str(WORLDS / "tools/example_requests.jsonl"),
    "--validation-tasks", str(WORLDS / "tools/example_heldout.jsonl")]
WORDS = ["<pad>", "<eos>", "<stop>", "<bos>", *(f"w{i}" for i in range(36))]  # V = 40
PAD, EOS, STOP, BOS = range(4)
ENDINGS = [EOS, *range(4, 12)]  # many end tokens: responses have all lengths, and rows end early
TEMPLATE = ("<bos> {% for m in messages %}w0 {{ m['content'] }} <eos> {% endfor %}"
            "{% if add_generation_prompt %}w1{% endif %}")


def toy_tokenizer(chat=False, bos=False):
    """Return a tokenizer with one token per word.

    bos: whether it puts <bos> in front of a text unless special tokens are switched off.
    """
    from tokenizers.processors import TemplateProcessing
    tokenizer = word_tokenizer(WORDS)
    tokenizer.add_special_tokens({"bos_token": "<bos>", "additional_special_tokens": ["<stop>"]})
    if bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)])
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


TINY = dict(vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            pad_token_id=PAD, bos_token_id=None, eos_token_id=EOS, initializer_range=0.3,
            tie_word_embeddings=False)


def tiny_lm(config=None, **changes):
    """Return a random model of `config`, by default a two-layer Qwen2.

    Its query heads share key heads, and its distributions are far from uniform.
    """
    from transformers import AutoModelForCausalLM, Qwen2Config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            config or Qwen2Config(**{**TINY, **changes})).eval()


def tiny_policy(adapters=("agent", "env"), live=True, chat=False, bos=False, dtype=torch.float32,
                **lm):
    """Return a Policy on the tiny model.

    live: whether the B matrices are random, so that the adapters differ.
    """
    model = tiny_lm(**lm).to(dtype)
    policy = Policy(model, toy_tokenizer(chat, bos), adapters, rank=4)
    if live:
        randomise(policy)
    return policy


def randomise(policy, seed=0, scale=0.1):
    """Give every adapter its own non-zero B."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for params in policy.params.values():
            for p in params:
                p.add_(scale * torch.randn(p.shape, generator=generator))


def random_groups(shapes, seed=0):
    """Draw groups of random ids, none of them special. shapes: list of (P, [R, ...])."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n):
        return torch.randint(4, len(WORDS), (n,), generator=generator).tolist()

    return [(ids(P), [ids(R) for R in Rs]) for P, Rs in shapes]


# shapes for random_groups: prompts, lengths and even G differ
UNEVEN_GROUPS = [(5, [4, 1, 7]), (2, [3, 3]), (9, [2, 6, 1, 5]), (1, [2])]


def rollouts_of(groups, sampled=None, drawn=None):
    """Make Rollouts of groups (prompt ids, list of response ids), one group after the other.

    sampled, drawn: for each group, the logps and the drawn flags of its Rollouts.
    """
    rollouts = []
    for i, (prompt, responses) in enumerate(groups):
        for j, response in enumerate(responses):
            logps = sampled[i][j] if sampled else ()
            flags = drawn[i][j] if drawn else None
            rollouts.append(Rollout(i, prompt, response, logps, "", flags))
    return rollouts


def train_agent(policy, optimizer, groups, rewards, sampled=None, drawn=None, generator=None,
                grad_clip=1.0, **options):
    """Call grpo.grpo_update on groups as in rollouts_of; `options` replace default Options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "GRAD_CLIP", grad_clip)
        rollouts = rollouts_of(groups, sampled, drawn)
        return grpo.grpo_update(policy, "agent", optimizer, rollouts, rewards, Options(**options),
                                generator)


def naive_row(policy, adapter, rollout, temperature):
    """Return log pi of each response token of a rollout or record under an adapter, shape (R,).

    Each token gets a whole forward pass.
    """
    out = []
    for t, token in enumerate(rollout.response):
        ids = torch.tensor([rollout.prompt + rollout.response[:t]])
        with policy.use(adapter):
            logits = policy.lm(input_ids=ids, use_cache=False).logits[0, -1] / temperature
        out.append(logits.log_softmax(-1)[token])
    return torch.stack(out)


def gradients(policy, adapter):
    """Copy the gradients of one adapter, in the order of its parameters."""
    return [p.grad.clone() if p.grad is not None else None for p in policy.params[adapter]]


def clear(policy):
    """Forget all gradients."""
    for params in policy.params.values():
        for p in params:
            p.grad = None


def weights(policy, adapter):
    """Copy the parameters of one adapter, bit for bit."""
    return [p.detach().clone() for p in policy.params[adapter]]


def equal_bits(a, b):
    """Return whether two lists of tensors are equal bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def nearly_equal(a, b, tolerance=1e-5):
    """Return whether two lists of tensors are nearly equal, relative to the largest entry of b."""
    a, b = (torch.cat([x.flatten() for x in tensors]) for tensors in (a, b))
    return (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3)


def same_run(a, b):
    """Assert that two run folders agree in everything but the time that the runs took."""
    for name in ("metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl"):
        x, y = ([{k: v for k, v in r.items() if k != "cpu_seconds"}
                 for r in read_jsonl(folder / name)] for folder in (a, b))
        assert x == y, name
    for name in ("agent", "env"):
        x, y = ((f / "adapters" / name / "adapter_model.safetensors").read_bytes() for f in (a, b))
        assert x == y, name


def refused_with(kind, match, call, *args, **options) -> str:
    """Assert that `call` raises an exception of this kind with a message of one line, and return
    the message."""
    with pytest.raises(kind, match=match) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


user_error = partial(refused_with, UserError)


def one_line(capsys, code, *words):
    """Assert exit code 2 and one line on stderr that holds all of `words`; return stdout."""
    out, err = capsys.readouterr()
    assert code == 2, (code, err)
    # on a busy machine errors.users_code may report before that what it is trying
    [line] = [line for line in err.splitlines() if not line.startswith("trying ")]
    assert line.startswith("genenv: ") and all(str(w) in line for w in words), err
    return out


class Speaker:
    """Stand in for a policy with fixed answers: rollout i gives answers[i], a text or a list of
    turns.

    A whole text is one token, and the texts in `spoilt` contain a control token.
    """

    def __init__(self, answers, spoilt=(), tokens=1, special=()):
        self.answers, self.spoilt, self.tokens = answers, spoilt, tokens
        self.tokenizer = SimpleNamespace(added_tokens_decoder=dict(enumerate(special)))

    decode = staticmethod(lambda ids: ids[0])

    def encode(self, text):
        return [str(text) for _ in range(self.tokens)]

    encode_observation = encode

    def has_control_tokens(self, ids):
        return ids[0] in self.spoilt

    def sample(self, adapter, prompts, G, *args, respond=None, **limits):
        if respond is None:
            return [Rollout(i // G, [], [text]) for i, text in enumerate(self.answers)]
        for i, turns in enumerate(self.answers):
            for turn in turns:
                if respond(i, [turn]) is None:
                    break
        return [Rollout(i // G, [], []) for i in range(len(self.answers))]

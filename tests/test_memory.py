"""The memory estimate: known figures of Qwen2.5-7B, and a refusal before anything is loaded.

Run: python -m pytest tests/test_memory.py -q
"""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from helpers import user_error
from model import memory
from support.options import parse_options

def qwen(hidden, layers, heads, key_heads, inner, **more):
    """Return the configuration of a Qwen2.5 model with these sizes."""
    return Qwen2Config(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                       num_key_value_heads=key_heads, intermediate_size=inner, **more)


QWEN_7B = qwen(3584, 28, 28, 4, 18944, vocab_size=152064, tie_word_embeddings=False)
QWEN_3B = qwen(2048, 36, 16, 2, 11008, vocab_size=151936, tie_word_embeddings=True)
QWEN_1B = qwen(1536, 28, 12, 2, 8960, vocab_size=151936, tie_word_embeddings=True)
QWEN_05B = qwen(896, 24, 14, 2, 4864)
LIMITS = dict(max_prompt_tokens=4096, max_response_tokens=512, max_task_tokens=768)


def of_preset(name, **changes):
    """Return the options of a run of tool_calls with a preset and the largest limits."""
    o = parse_options(["--preset", name, "--world", "tool_calls"])
    return replace(o, **{**LIMITS, **changes})


def test_the_known_figures_of_qwen_7b():
    """Otherwise estimates would be far from published sizes, or from measurements on an H200."""
    n = memory.count_parameters(QWEN_7B, 16)
    assert n["lora"] == pytest.approx(40.4e6, rel=0.01)
    assert n["linear"] + n["other"] == pytest.approx(7.62e9, rel=0.01)
    o = of_preset("7b-24gb", quant="nf4", dtype="bf16")
    base, adapters, _ = memory.estimate(QWEN_7B, o)
    assert base == pytest.approx(5.55e9, rel=0.01)
    assert adapters == pytest.approx(2 * 0.65e9, rel=0.01)
    # 18 prompts of 4096 tokens, stored once each, with 8 responses of 512 each; 56 kB per token
    cache = 18 * (4096 + 8 * 511) * 57344
    assert cache < memory.rollout_bytes(QWEN_7B, 2, 18, 8, 4096, 512) < 1.1 * cache
    # the estimate for updates is an upper bound; 5.2 GB were measured for full groups of
    # 4096 + 8 x 512 tokens
    assert 5.0e9 < memory.update_bytes(QWEN_7B, 2, 8192, 8, 4096, 512) < 6.0e9


@pytest.mark.parametrize("preset, dtype, card, configs", [
    ("7b-24gb", "bf16", 24e9, [QWEN_7B, QWEN_05B]), ("7b-80gb", "bf16", 80e9, [QWEN_7B, QWEN_05B]),
    ("1.5b-8gb", "bf16", 7.5e9, [QWEN_1B]), ("1.5b-8gb", "fp32", 15.1e9, [QWEN_1B]),
    ("3b-16gb", "fp32", 15.1e9, [QWEN_3B])])
def test_the_presets_fit_their_cards(preset, dtype, card, configs):
    """Otherwise long prompts, or a second base for the simulator, would end a run in its first
    epoch."""
    memory.check(configs, of_preset(preset, dtype=dtype), card)


def test_rows_follow_from_the_prompts_real_length():
    """Otherwise short prompts would leave most of a card idle, or long ones overflow it."""
    o = of_preset("7b-24gb", dtype="bf16")
    base, adapters, _ = memory.estimate(QWEN_7B, o)
    free, lm = 24e9 - base - adapters, SimpleNamespace(config=QWEN_7B, dtype=torch.bfloat16)

    def prompts(*lengths):
        return memory.prompts_at_once(lm, lengths, o.G, o.max_response_tokens, free)

    # the 288 rows of the preset are 36 prompts with 8 rollouts each
    assert prompts(*[1024] * 36) == 36
    many = prompts(*[4096] * 36)
    assert 16 < many < 36
    used = memory.rollout_bytes(QWEN_7B, 2, many, o.G, 4096, o.max_response_tokens)
    assert used < free / memory.MARGIN < used * (many + 2) / many
    # a long prompt does not reduce the rows of the short ones before it
    assert prompts(*[1024] * 35, 10 ** 6) == 35


def test_check_refuses_in_one_line_that_names_what_to_lower():
    """Otherwise hours of download and loading would end in a traceback."""
    o = of_preset("7b-24gb", quant="", dtype="bf16")
    message = user_error("15.0 GB are free", memory.check, [QWEN_7B], o, 15e9)
    assert "--quant nf4" in message and "--token-budget" in message

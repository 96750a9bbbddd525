"""The memory estimate: against counted bytes of real models, and the known figures of Qwen2.5-7B.

Run: python -m pytest tests/test_memory.py -q
"""
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

import memory
from data_pool import UserError
from policy import Policy, _GrowingLayer
from presets import PRESETS
from test_tool_calls import chat_model

QWEN_7B = dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
               num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)


def options(**changes):
    """What the estimate reads of the options."""
    return SimpleNamespace(**{**dict(
        quant="nf4", rank=16, device="cpu", seeds=8, variations=1, replay=0.0, G=8,
        max_prompt_tokens=1024, max_response_tokens=512, max_task_tokens=512, max_rows=64,
        token_budget=8192, grad_checkpoint=True, env_batch=8, val_samples=8, agreement=0),
        **changes})


def stored_bytes(tensors) -> int:
    """Bytes of the distinct storages behind some tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in tensors}.values())


def base_tensors(policy):
    """Every tensor of the frozen base model, scales and code books of 4-bit weights included."""
    for name, p in policy.model.named_parameters():
        if "lora_" in name:
            continue
        yield p.data
        state = getattr(p, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code, state.offset, state.state2.absmax,
                        state.state2.code)


# ---------------------------------------------------------------------------------------------
# parameters


@pytest.mark.parametrize("quant, hidden, rank", [("", 64, 4), ("", 96, 16), ("nf4", 64, 4),
                                                 ("nf4", 256, 8)])
def test_base_and_adapters_are_within_ten_percent_of_counted_bytes(tmp_path, quant, hidden, rank):
    """What the estimate rests on: real tensors of a loaded policy."""
    policy = Policy.load(chat_model(tmp_path, hidden=hidden), rank=rank, quant=quant or None,
                         device="cpu")
    parts = memory.estimate(policy.lm.config, options(quant=quant, rank=rank))["always"]
    counted = stored_bytes(base_tensors(policy))
    assert parts["base weights"] == pytest.approx(counted, rel=0.10)
    for params in policy.params.values():  # gradients and AdamW's moments, once they exist
        for p in params:
            p.grad = torch.ones_like(p)
    optimisers = [policy.optimizer(name, 1e-3) for name in policy.params]
    for optimiser in optimisers:
        optimiser.step()
    counted = sum(t.numel() * t.element_size() for o in optimisers
                  for p in o.param_groups[0]["params"] for t in
                  (p, p.grad, o.state[p]["exp_avg"], o.state[p]["exp_avg_sq"]))
    assert parts["adapters and optimisers"] == counted


def test_tied_embeddings_are_counted_once():
    """Small models share embedding and head; twice would be a third too much."""
    shape = {**QWEN_7B, "num_hidden_layers": 1}
    counts = [memory.count_parameters(Qwen2Config(**{**shape, "tie_word_embeddings": tied}))
              for tied in (False, True)]
    sizes = [sum(c["linear"]) + c["other"] for c in counts]
    assert sizes[0] - sizes[1] == 152064 * 3584


def test_the_known_figures_of_qwen_7b():
    """Parameters on the meta device; figures worked out by hand from the published shape."""
    config = Qwen2Config(**QWEN_7B)
    counts = memory.count_parameters(config)
    assert sum(counts["linear"]) + counts["other"] == 7_615_616_512
    assert counts["lora"] == pytest.approx(40.4e6, rel=0.01)
    assert sum(map(memory.nf4_bytes, counts["linear"])) == pytest.approx(3.37e9, rel=0.01)
    assert memory.base_bytes(counts, "nf4", 2) == pytest.approx(5.55e9, rel=0.01)
    assert memory.base_bytes(counts, "", 2) == pytest.approx(15.23e9, rel=0.01)
    assert memory.kv_bytes_per_token(config, 2) == 56 * 1024
    # 8 prompts of 1024, 8 responses of 512 each: 2.35 GB with the prompt stored once
    keys = 8 * (1024 + 8 * 512)
    assert keys * 56 * 1024 == pytest.approx(2.35e9, rel=0.01)
    # the growing buffer may be ahead of its contents by half
    assert 1 <= 8 * memory.cache_keys(1024, 8, 512) / keys <= 1.5
    phases = memory.estimate(config, options(), e=2)
    assert phases["always"]["adapters and optimisers"] == pytest.approx(2 * 0.65e9, rel=0.01)
    assert phases["agent rollouts"]["keys and values"] == (
        8 * memory.cache_keys(1024, 8, 512) * 56 * 1024)


# ---------------------------------------------------------------------------------------------
# rollouts and activations


@pytest.mark.parametrize("P, G, R", [(5, 2, 40), (64, 8, 64), (300, 4, 7), (1, 1, 1)])
def test_cache_keys_is_the_size_of_the_buffer(P, G, R):
    """The estimate follows the cache's own growth, step by step."""
    layer, block = _GrowingLayer(), lambda n: torch.zeros(1, 2, n, 4)
    layer.update(block(P), block(P))
    for _ in range(R - 1):
        layer.update(block(G), block(G))
    assert layer.buffers[0].shape[2] == memory.cache_keys(P, G, R)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_activations_of_a_layer_are_as_counted(dtype):
    """Against what autograd really saves: the difference that one more layer makes."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2ForCausalLM
    T, rank, e = 256, 16, torch.tensor([], dtype=dtype).element_size()

    def saved(layers):
        config = Qwen2Config(vocab_size=64, hidden_size=128, intermediate_size=512,
                             num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2)
        model = get_peft_model(Qwen2ForCausalLM(config).to(dtype).requires_grad_(False), LoraConfig(
            r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept = []
        pack = lambda t: kept.append(t) or t
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model.get_base_model().base_model(
                input_ids=torch.zeros(1, T, dtype=torch.long), use_cache=False,
                attention_mask=torch.ones(1, 1, T, T, dtype=torch.bool).tril())
        del out
        return config, stored_bytes(t for t in kept
                                    if t.untyped_storage().data_ptr() not in weights)

    config, two = saved(2)
    per_token = (two - saved(1)[1]) / T - T * e  # the additive mask has a part of its own
    assert memory.layer_bytes_per_token(config, e, rank) == pytest.approx(per_token, rel=0.05)


def test_each_option_moves_the_part_it_is_named_under():
    """The advice of a refusal must help: lowering the option lowers the part."""
    config = Qwen2Config(**{**QWEN_7B, "num_hidden_layers": 2})
    thrifty = {"quant": "nf4", "grad_checkpoint": True}
    size = lambda o, part: sum(p.get(part, 0) for p in memory.estimate(config, o, 2).values())
    for part, names in memory.OPTIONS_OF.items():
        for name in set(names) - {"model"}:
            # in training the longest sequence binds only where the budget is below it
            budget = 256 if name.startswith("max_") else 8192
            # a cache that grows by halves has room to spare: responses short beside the prompt
            before = vars(options(quant="", seeds=64, variations=4, token_budget=budget,
                                  max_response_tokens=128,
                                  grad_checkpoint=part == "checkpointed layer inputs"))
            after = {**before, name: thrifty[name] if name in thrifty else before[name] // 4}
            assert size(options(**after), part) < size(options(**before), part), (part, name)


@pytest.mark.parametrize("name", ["7b-24gb", "7b-80gb", "7b-9k"])
def test_validation_prefills_no_more_than_the_agents_rollouts(name):
    """Greedy attempts, one per prompt, must not meet the card with max_rows long prompts at once."""
    config = Qwen2Config(**{**QWEN_7B, "num_hidden_layers": 1})
    phases = memory.estimate(config, options(**{**PRESETS[name], "agreement": 2}), e=2)
    for phase in ("validation", "agreement check"):
        assert phases[phase]["prefill"] <= phases["agent rollouts"]["prefill"], phase
    o = options(max_rows=64, max_prompt_tokens=1024)
    assert memory.rollout_rows(o, 1, 1024) == 8      # as many prompts as 64 // G
    assert memory.rollout_rows(o, 1, 32) == 32       # short ones: the tokens of one long prompt
    assert memory.rollout_rows(o, 1, 4) == 64 == memory.rollout_rows(o, 128, 4)


# ---------------------------------------------------------------------------------------------
# the check


def test_presets_fit_the_cards_they_are_named_after():
    """24e9 and 80e9 bytes; the 24 GB ones must not fit on half of that, or they waste it."""
    config = Qwen2Config(**QWEN_7B)
    for name, card in (("7b-24gb", 24e9), ("7b-9k", 24e9), ("7b-80gb", 80e9)):
        o = options(**{**vars(options()), **PRESETS[name], "replay": 0.125})
        peak = memory.MARGIN * memory.total_peak(memory.estimate(config, o, e=2))
        assert card / 2 < peak < card, (name, peak)


def test_check_refuses_in_one_line_that_names_what_to_lower():
    """It comes before hours of download and loading."""
    config = Qwen2Config(**QWEN_7B)
    with pytest.raises(UserError) as error:
        memory.check(config, options(quant="", grad_checkpoint=False), available=24e9)
    message = str(error.value)
    assert "\n" not in message and "24.0 GB are free" in message
    assert "--token-budget (now 8192)" in message and "--grad-checkpoint" in message
    with pytest.raises(UserError) as error:  # the base alone is too much
        memory.check(config, options(quant="", token_budget=1, max_rows=8), available=10e9)
    assert "--quant nf4" in str(error.value) and "a smaller --model" in str(error.value)


def test_check_prints_every_phase_and_knows_this_machine():
    """The table is what a user compares with the measured peaks."""
    config = Qwen2Config(**{**QWEN_7B, "num_hidden_layers": 1, "vocab_size": 1000})
    table = memory.check(config, options(), available=1e12)
    phases = memory.estimate(config, options())
    assert all(name in table for name in phases) and "free 1000.00" in table
    assert f"{memory.MARGIN * memory.total_peak(phases) / 1e9:.2f}" in table
    free = memory.free_memory("cpu")
    assert free is None or 1e6 < free < 1e15


def test_model_config_of_a_folder_that_is_none(tmp_path):
    """One line, not a traceback."""
    t5 = tmp_path / "t5"
    t5.mkdir()
    for content, message in ((None, "no config.json"), ("{", "cannot read the configuration"),
                             ('{"model_type": "t5"}', "no causal language model")):
        if content:
            (t5 / "config.json").write_text(content)
            (t5 / "tokenizer.json").write_text("{}")
        with pytest.raises(UserError, match=message) as error:
            memory.count_parameters(memory.model_config(str(t5)))
        assert "\n" not in str(error.value)
    assert memory.model_config(chat_model(tmp_path / "m")).num_hidden_layers == 2


def test_peak_memory_sees_an_allocation_and_survives_an_error():
    """The largest of a phase is kept, even if the phase ends in an exception."""
    peaks = {}
    with memory.peak_memory(peaks, "small", "cpu"):
        pass
    with pytest.raises(ZeroDivisionError), memory.peak_memory(peaks, "large", "cpu"):
        block = torch.ones(100_000_000)  # 400 MB, above whatever the process had
        1 / 0
    assert peaks["large"] >= peaks["small"] > 1e7
    assert peaks["large"] >= 4e8 and block.numel()

"""The memory estimate: against counted bytes of real models, and the known figures of Qwen2.5-7B.

Run: python -m pytest tests/test_memory.py -q
"""
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import BloomConfig, Qwen2Config, Qwen2ForCausalLM

from scripts import bench_gpu as bench
import genenv
from helpers import flat, user_error
from support import attention
from support.attention import attention_layout, pack
import policy as policy_module
from policy import Policy, by_group
from support import memory
from support.presets import PRESETS
from test_tool_calls import chat_model
from support.metrics import peak_memory
from worlds import rollout_rows, tool_calls

QWEN_7B = dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
               num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False)


def options(**changes):
    """What the estimate reads of the options."""
    return SimpleNamespace(**{**dict(
        quant="nf4", rank=16, device="cpu", seed_tasks=8, variations=1, write_rounds=1, replay=0.0, G=8,
        max_prompt_tokens=1024, max_response_tokens=512, max_task_tokens=512, max_rows=64,
        token_budget=8192, grad_checkpoint=True, env_batch=8, env_kl_sample=8, val_samples=8,
        agreement=0, variant="genenv", dtype="auto"),
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


@pytest.mark.parametrize("quant, hidden, rank", [("", 96, 16), ("nf4", 256, 8)])
def test_base_and_adapters_are_within_ten_percent_of_counted_bytes(tmp_path, quant, hidden, rank):
    """What the estimate rests on: real tensors of a loaded policy."""
    policy = Policy.load(chat_model(tmp_path, hidden=hidden), rank=rank, quant=quant or None,
                         device="cpu")
    parts = memory.estimate(policy.lm.config, options(quant=quant, rank=rank))["always"]
    counted = stored_bytes(base_tensors(policy))
    assert parts["base weights"] == pytest.approx(counted, rel=0.10)
    for params in policy.params.values():  # gradients and AdamW's instants, once they exist
        for p in params:
            p.grad = torch.ones_like(p)
    optimisers = [policy.optimizer(name, 1e-3) for name in policy.params]
    for optimiser in optimisers:
        optimiser.step()
    counted = sum(t.numel() * t.element_size() for o in optimisers
                  for p in o.param_groups[0]["params"] for t in
                  (p, p.grad, o.state[p]["exp_avg"], o.state[p]["exp_avg_sq"]))
    assert parts["adapters and optimisers"] == counted


def test_the_known_figures_of_qwen_7b():
    """Figures worked out by hand from the published shape."""
    config = Qwen2Config(**QWEN_7B)
    counts = memory.count_parameters(config)
    assert counts["lora"] == pytest.approx(40.4e6, rel=0.01)
    assert memory.base_bytes(counts, "nf4", 2) == pytest.approx(5.55e9, rel=0.01)
    assert memory.base_bytes(counts, "", 2) == pytest.approx(15.23e9, rel=0.01)
    # 8 prompts of 1024, 8 responses of 512 each: 2.35 GB with the prompt stored once
    keys = 8 * (1024 + 8 * 512)
    assert keys * memory.kv_bytes_per_token(config, 2) == pytest.approx(2.35e9, rel=0.01)
    assert 0.99 < 8 * memory.cache_keys(1024, 8, 512) / keys < 1
    phases = memory.estimate(config, options(), e=2)
    assert phases["always"]["adapters and optimisers"] == pytest.approx(2 * 0.65e9, rel=0.01)
    # in training the eight rollouts of one prompt of 4096 each meet copies of its keys and values:
    # 8 x (4096 + 512) x 28 heads of 128, twice, in bf16 = 0.53 GB; with a full set in each layer
    _, grouped = memory.layer_bytes(config, 2, 16, True, 8192, own=4096, keys=8 * 4608, pairs=0)
    assert grouped == pytest.approx(8 * 4608 * 3584 * 2 * 2 + (8192 + 4096) * 3584 * 2, rel=0.01)


# ---------------------------------------------------------------------------------------------
# rollouts and activations


SHAPES = {  # B, G, P, R of a micro-batch
    "groups": (2, 8, 300, 60), "long prompts, short answers": (4, 8, 200, 4),
    "many rollouts": (2, 64, 300, 3), "one response each": (8, 1, 200, 40)}


def small_policy(dtype, layers):
    """A random Qwen2 of the 7B's proportions, two adapters."""
    config = Qwen2Config(vocab_size=96, hidden_size=128, intermediate_size=672, eos_token_id=95,
                         num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2,
                         tie_word_embeddings=False)
    return Policy(Qwen2ForCausalLM(config).to(dtype), bench.word_tokenizer(95), rank=16)


def groups_of(B, G, P, R):
    """Rollouts of B groups of ids that do not matter."""
    return flat([([5] * P, [[6] * R] * G)] * B)


def counted(rollouts) -> dict:
    """The sizes of a micro-batch as it is really laid out, under the names of memory.py."""
    groups = by_group(rollouts)
    x = pack(groups, 0)
    batch = {"tokens": x["ids"].numel(), "targets": len(x["target"])}
    if len(groups) == len(rollouts):
        return batch
    mask = attention_layout(groups)["mask"]
    N, _, R, keys = mask.shape
    return {**batch, "own": N * R, "keys": N * keys, "pairs": mask.numel()}


def allocated(f) -> int:
    """The most bytes that f() holds at once on top of what was there, as torch's allocator says."""
    f()  # what only a first call needs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        f()
    events = [(e.start_ns(), e.nbytes()) for e in run.profiler.kineto_results.events()
              if e.name() == "[memory]"]
    return max(accumulate(nbytes for _, nbytes in sorted(events, key=lambda e: e[0])))


@pytest.fixture
def fused(monkeypatch):
    """bf16 as on a GPU: attention in one kernel, which keeps no weights."""
    monkeypatch.setattr(attention, "SHORT", 0)


@pytest.mark.parametrize("shape", [shape for shape, (_, G, _, _) in SHAPES.items() if G > 1])
def test_attention_weights_are_counted_where_they_are_kept(shape, monkeypatch):
    """bf16 on a CPU: a pass at the largest size would take more than was estimated."""
    rollouts, kept = groups_of(*SHAPES[shape]), {}
    for short in (0, 1024):
        monkeypatch.setattr(attention, "SHORT", short)
        policy, saved = small_policy(torch.bfloat16, 1), []
        keep = lambda t: saved.append(t) or t
        with policy.use("agent"), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = policy.logprobs(rollouts)
        del out
        kept[short] = stored_bytes(saved)
    config, o = policy.lm.config, options(grad_checkpoint=False)
    parts = memory.attention_weights(config, o, 2, counted(rollouts), SHAPES[shape][2])
    more = kept[1024] - kept[0]
    assert more < 1.1 * parts["attention weights"] and parts["attention weights"] < 2 * more
    assert not memory.attention_weights(config, o, 4, counted(rollouts), 300)


@pytest.mark.parametrize("shape, dtype, grad_checkpoint", [
    *((shape, torch.float32, True) for shape in SHAPES), ("groups", torch.float32, False),
    ("groups", torch.bfloat16, True), ("many rollouts", torch.bfloat16, False)])
def test_peak_of_a_training_pass_is_as_estimated(dtype, grad_checkpoint, shape, fused):
    """Forward and backward as the updates make them, gradients of the adapters already there."""
    policy, rollouts = small_policy(dtype, 3), groups_of(*SHAPES[shape])

    def step():
        with policy.use("agent"):
            logp, mask = policy.logprobs(rollouts, 1.0, grad_checkpoint)
            (logp * mask).sum().backward()

    instants = memory.training_instants(policy.lm.config, dtype.itemsize, 16, False, grad_checkpoint,
                                      counted(rollouts))
    assert max(map(memory.phase_peak, instants)) == pytest.approx(allocated(step), rel=0.10)


@pytest.mark.parametrize("B, G, P, R, at_once", [
    (4, 8, 512, 2, 1024),      # prefill: its MLP is the widest
    (1, 8, 2048, 2, 512),      # few columns, many keys: the attention of a late chunk
    (4, 8, 1024, 30, 256)])    # a wide decode: keys copied for every query head
def test_peak_of_a_rollout_is_as_estimated(monkeypatch, B, G, P, R, at_once):
    """Cache, prefill and decoding of one call of sample; test_gpu_path.py has presets in bf16."""
    for module in (policy_module, memory):
        monkeypatch.setattr(module, "PREFILL_TOKENS", at_once)
    # no response ends early
    monkeypatch.setattr(policy_module, "draw", lambda logits, *a: (
        torch.full(logits.shape[:-1], 5), torch.zeros(logits.shape[:-1])))
    policy, dtype = small_policy(torch.float32, 3), torch.float32
    lora = memory.count_parameters(policy.lm.config)["lora"]
    instants = memory.rollout_instants(policy.lm.config, dtype.itemsize, B, G, P, R, B * G, lora)
    call = lambda: policy.sample("agent", [[5] * P] * B, G=G, max_new_tokens=R)
    assert max(map(memory.phase_peak, instants)) == pytest.approx(allocated(call), rel=0.10)


@pytest.mark.parametrize("budget", [1, 700, 1500, 4000, 100_000])
def test_no_micro_batch_exceeds_the_largest(budget):
    """Whatever the lengths; most keys are met where long prompts have short answers."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda most: int(torch.randint(1, most + 1, (), generator=generator))
    for P, R, prompt in ((500, 60, 500), (500, 60, 240), (60, 120, 60)):
        for answer in (1, 3, R):
            rollouts = flat([([5] * prompt, [[6] * min(R, answer + draw(3))] * 8) for _ in range(6)])
            batches = list(memory.micro_batches(6, 8, P, R, budget))
            for rows in policy_module.split_groups(rollouts, budget):
                for part, size in counted([rollouts[i] for i in rows]).items():
                    largest = max(sizes.get(part, 0) for sizes in batches)
                    assert size <= 1.02 * largest, (part, P, R, prompt, answer)


def test_each_option_moves_the_part_it_is_named_under():
    """The advice of a refusal must help: lowering the option lowers the part."""
    config = Qwen2Config(**{**QWEN_7B, "num_hidden_layers": 2})
    thrifty = {"quant": "nf4", "grad_checkpoint": True}
    size = lambda o, part: sum(max(p.get(part, 0) for p in phase)
                               for phase in memory.instants(config, o, 2).values())
    for part, names in memory.OPTIONS_OF.items():
        for name in set(names) - {"model"}:
            # in training the longest sequence binds only where the budget is below it
            budget = 256 if name.startswith("max_") else 8192
            # a cache that grows by halves has room to spare: responses short beside the prompt
            before = vars(options(quant="", seed_tasks=64, variations=4, token_budget=budget,
                                  max_response_tokens=128,
                                  max_prompt_tokens=512 if part == "attention weights" else 1024,
                                  grad_checkpoint=part == "checkpointed layer inputs"))
            after = {**before, name: thrifty[name] if name in thrifty else before[name] // 4}
            assert size(options(**after), part) < size(options(**before), part), (part, name)


def test_validation_prefills_no_more_than_the_agents_rollouts():
    """Greedy attempts, one per prompt, must not meet a card with max_rows long prompts at once; see
    test_the_readme_states_what_check_prints for the memory that this takes."""
    o = options(max_rows=64, max_prompt_tokens=1024)
    assert rollout_rows(o, 1, 1024) == 8      # as many prompts as 64 // G
    assert rollout_rows(o, 1, 32) == 32       # short ones: the tokens of one long prompt
    assert rollout_rows(o, 1, 4) == 64 == rollout_rows(o, 128, 4)


# ---------------------------------------------------------------------------------------------
# the check


def test_the_small_preset_fits_16_gb_in_both_dtypes_and_the_page_says_so():
    """A free card has 16 GB, and some of them no bf16."""
    config = Qwen2Config(hidden_size=1536, num_hidden_layers=28, vocab_size=151936,
                         num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960,
                         max_position_embeddings=32768, tie_word_embeddings=True)
    readme = (Path(__file__).parent.parent / "run" / "README.md").read_text(encoding="utf-8")
    for e in (2, 4):
        o = options(**{**vars(genenv.Options()), **PRESETS["1.5b-16gb"], "device": "cuda"})
        peak = memory.MARGIN * memory.total_peak(memory.estimate(config, o, e=e)) / 1e9
        assert peak < 15 and f"{peak:.1f} GB" in readme, peak


def test_the_readme_states_what_check_prints():
    """A table that nobody refreshed would promise another card."""
    readme = (Path(__file__).parent.parent / "run" / "README.md").read_text(
        encoding="utf-8")
    rows = {cells[1].strip(): [cell.split("/")[0].strip() for cell in cells[2:5]] for cells in
            (line.split("|") for line in readme.splitlines()) if len(cells) == 8}
    for column, name in enumerate(("7b-24gb", "7b-80gb", "7b-9k")):
        o = options(**{**vars(genenv.Options()), **tool_calls.DEFAULTS, **PRESETS[name],
                       "device": "cuda"})
        phases = memory.estimate(Qwen2Config(**QWEN_7B), o, e=2)
        said = {label: rows[label][column] for label in rows}
        peaks = {phase: f"{memory.phase_peak(parts) / 1e9:.2f}" for phase, parts in phases.items()}
        assert float(peaks.pop("validation")) <= float(peaks["agent rollouts"])
        assert said["always: base, adapters and optimisers"] == peaks.pop("always")
        assert all(said["+ " + phase] == peak for phase, peak in peaks.items())
        assert said["rollouts decoded at once (`--max-rows`)"] == str(o.max_rows)
        peak = memory.MARGIN * memory.total_peak(phases) / 1e9
        assert said["estimated peak (always + largest phase, + 8 %)"] == f"{peak:.1f}"


def test_check_refuses_in_one_line_that_names_what_to_lower():
    """It comes before hours of download and loading."""
    config = Qwen2Config(**QWEN_7B)
    message = user_error("24.0 GB are free", memory.check, config,
                         options(quant="", grad_checkpoint=False), available=24e9)
    assert "--token-budget (now 8192)" in message and "--grad-checkpoint" in message
    message = user_error("--quant nf4", memory.check, config,  # the base alone is too much
                         options(quant="", token_budget=1, max_rows=8), available=10e9)
    assert "a smaller --model" in message


def test_two_models_take_the_room_of_both():
    """Two bases and an adapter on each; every phase is that of the model at work in it."""
    large, small = Qwen2Config(**QWEN_7B), Qwen2Config(**{**QWEN_7B, "num_hidden_layers": 4})
    o = options(agreement=2)
    mine, theirs = (memory.estimate(config, o, e=2) for config in (large, small))
    twice = memory.two_models(mine, mine)
    base = twice["always"].pop("base weights")
    assert base == 2 * mine["always"].pop("base weights") and twice == mine
    mine = memory.estimate(large, o, e=2)
    both, size = memory.two_models(mine, theirs), lambda parts: sum(parts.values())
    assert both["always"]["base weights"] == sum(e["always"]["base weights"] for e in (mine, theirs))
    assert both["agreement check"] == theirs["agreement check"]
    assert both["validation"] == mine["validation"]
    update = "simulator update (RWR)"  # beside it lie copies of one adapter of either size
    gap = size(both[update]) - size(theirs[update])
    counts = [memory.count_parameters(config)["lora"] for config in (large, small)]
    assert gap == 4 * (counts[0] - counts[1])
    message = user_error("16.0 GB are free", memory.check, large, o, large, available=16e9)
    assert memory.check(large, o, small, available=16e9) and "base weights" in message
    user_error("reads 600 tokens", memory.check, large, o, Qwen2Config(
        **{**QWEN_7B, "num_hidden_layers": 1, "max_position_embeddings": 600}), available=1e12)


@pytest.mark.parametrize("response, task, named", [
    (5121, 512, "max_response_tokens"), (512, 5121, "max_task_tokens")])
def test_check_refuses_lengths_that_the_model_cannot_read(response, task, named):
    """Beyond its positions a model writes noise, and nothing says why."""
    config = Qwen2Config(**{**QWEN_7B, "num_hidden_layers": 1, "max_position_embeddings": 6144})
    o = options(max_response_tokens=response, max_task_tokens=task)
    message = user_error("6144 tokens at most", memory.check, config, o, available=1e12)
    assert "may have 6145" in message
    assert "--max-prompt-tokens (now 1024)" in message
    assert f"--{named.replace('_', '-')} (now 5121)" in message
    setattr(o, named, 5120)  # to the last position
    assert memory.check(config, o, available=1e12)
    setattr(o, named, 5121)  # families that have no such limit
    memory.check_lengths(BloomConfig(), o)


def test_peak_memory_sees_an_allocation_and_survives_an_error():
    """The largest of a phase is kept, even if the phase ends in an exception."""
    peaks = {}
    with peak_memory(peaks, "small", "cpu"):
        pass
    with pytest.raises(ZeroDivisionError), peak_memory(peaks, "large", "cpu"):
        block = torch.ones(100_000_000)  # 400 MB, above whatever the process had
        1 / 0
    assert peaks["large"] >= peaks["small"] > 1e7
    assert peaks["large"] >= 4e8 and block.numel()

"""The benches: their arguments, their models, and that the GPU script runs to its end on a CPU.

Run: python -m pytest tests/test_bench.py -q
"""
import json
import math

import pytest
import torch

from scripts import bench_gpu as gpu
from scripts.bench_gpu import QWEN_7B, qwen2_config, random_nf4, random_prompts, reward_of, \
    rewards_of, small_config, word_tokenizer
from helpers import clear, flat, gradients, randomise
from policy import Policy


def test_the_7b_shape_has_the_published_number_of_parameters():
    """Speed would be that of another model: 7.62 B parameters, 6.53 B without embeddings."""
    from transformers import Qwen2ForCausalLM
    with torch.device("meta"):
        lm = Qwen2ForCausalLM(qwen2_config(**QWEN_7B))
    total = sum(p.numel() for p in lm.parameters())
    embeddings = 2 * lm.get_input_embeddings().weight.numel()
    assert total == 7_615_616_512 and round((total - embeddings) / 1e9, 2) == 6.53


@pytest.mark.parametrize("argv, why", [
    ("trl --G 1", "--G: must be at least 2, not 1"), ("trl --prompt x", "--prompt: invalid int value: 'x'"),
    ("gpu --prompt -1", "--prompt: must be at least 0, not -1"), ("episodes --turns 0", "at least 1, not 0")])
def test_a_number_that_measures_nothing_is_refused(argv, why, capsys):
    assert main(argv.split()) == 2
    assert why in capsys.readouterr().err


def test_every_response_has_full_length():
    """The two sides of a comparison would train on different numbers of tokens."""
    config = small_config(64, 1, 16)
    policy = Policy(random_nf4(config, "cpu", torch.float32), word_tokenizer(16), rank=4)
    rollouts = policy.sample("agent", random_prompts(3, 5, 16), 4, 40)
    assert all(len(r.response) == 40 and r.limit for r in rollouts)
    assert [r.prompt for r in rollouts[::4]] == random_prompts(3, 5, 16)
    assert reward_of([2, 4, 5, 7]) == 0.5 and rewards_of(rollouts, 4).shape == (3, 4)
    assert rewards_of(rollouts, 4)[1, 2] == reward_of(rollouts[6].response)


def test_the_linear_layers_are_four_bit_and_nothing_else_is():
    """The bench would measure an unquantised model, or a quantised head."""
    import bitsandbytes as bnb
    lm = random_nf4(small_config(64, 2, 32), "cpu", torch.float32)
    quantised = [n for n, m in lm.named_modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(quantised) == 2 * 7 and len(lm.model.layers) == lm.config.num_hidden_layers == 2
    assert all(m.weight.quant_state is not None for m in lm.modules()
               if isinstance(m, bnb.nn.Linear4bit))
    assert lm.lm_head.weight.dtype == torch.float32
    ids = torch.arange(8)[None]
    assert lm(input_ids=ids, use_cache=False).logits.isfinite().all()


def test_a_rollout_changes_no_gradient_of_a_four_bit_model():
    """On a CPU bitsandbytes repacks weights for inference; their products then have no gradient."""
    policy = Policy(random_nf4(small_config(64, 2, 32), "cpu", torch.float32),
                    word_tokenizer(32), rank=4)
    grads = []
    randomise(policy)
    groups = [([1, 2, 3], [[4, 5, 6], [7, 8]])]
    for _ in range(2):
        with policy.use("agent"):
            logp, mask = policy.logprobs(flat(groups))
            (logp * mask).sum().backward()
        grads.append(gradients(policy, "agent"))
        clear(policy)
        policy.sample("agent", [[1, 2, 3]], G=2, max_new_tokens=3)
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*grads))


def test_the_gpu_script_runs_to_its_end_on_a_cpu(tmp_path, capsys, monkeypatch):
    """Two policies, both updates, both layouts, JSON and table."""
    monkeypatch.setitem(gpu.SHAPES, "tiny", [(24, 6), (12, 4)])
    out = tmp_path / "new" / "gpu.json"
    main(["gpu", "--tiny", "--G", "4", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [(s["prompt"], s["response"]) for s in result["shapes"]] == [(24, 6), (12, 4)]
    for shape in result["shapes"]:
        assert {"simulator rollouts", "agent rollouts", "agent update (GRPO)",
                "simulator update (RWR)"} < set(shape["phases"])
        assert all(p["seconds"] > 0 and p["peak_gb"] > 0 for p in shape["phases"].values())
        for proof in shape["proof"].values():  # each adapter moves, and alone
            assert proof["moved"] > 0 and not proof["other_moved"]
        assert math.isclose(shape["efficiency"],
                            shape["training_speed_up"] / shape["token_count_limit"])
    assert result["shapes"][0]["token_count_limit"] == 4 * (24 + 6) / (24 + 4 * 6)
    assert {"torch", "transformers", "peft", "bitsandbytes"} == set(result["versions"])
    assert "| 24 / 6 | 1 |" in capsys.readouterr().out


def test_loss_and_gradients_equal_those_of_trl(capsys):
    """The comparison would be one of two different objectives."""
    pytest.importorskip("trl")
    main(["trl", "--check", "--prompt", "12", "--response", "6", "--prompts", "2", "--G", "4",
          "--hidden", "64", "--layers", "2", "--vocab", "50"])
    line = capsys.readouterr().out.strip().splitlines()[-1]
    ours, theirs = line.split("loss ours ")[1].split(";")[0].split(", TRL ")
    assert abs(float(ours) - float(theirs)) < 1e-6 and abs(float(ours)) > 1e-6
    assert float(line.split("relative ")[1]) < 1e-4


def test_a_real_models_speed_is_printed_as_a_share_of_the_peak(model, capsys):
    """The share would be above 1, or of another number of tokens."""
    from worlds.tool_calls import EXAMPLE_TASKS
    main(["model", "--model", model, "--base-tasks", str(EXAMPLE_TASKS), "--no-trl", "--prompts",
          "2", "--G", "2", "--response", "8", "--steps", "1"])
    out = capsys.readouterr().out
    share = float(out.split(" % of the peak")[0].split()[-1])
    assert 0 <= share < 100 and "rollouts: " in out and "in micro-batches of 1024" in out
    policy = Policy.load(model, ("agent",), rank=16, device="cpu")
    layers = policy.lm.config.num_hidden_layers * (4 * 32 * 32 - 2 * 32 * 16 + 3 * 32 * 64)
    lora = sum(p.numel() for p in policy.params["agent"])
    assert cpu.weight_products(policy, 7, 3) == 7 * (4 * layers + 6 * lora) + 3 * 4 * 32 * 259

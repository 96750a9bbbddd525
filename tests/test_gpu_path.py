"""The GPU path on torch's meta device: memory, host reads, kernels, and no operation on two devices.

Run: python -m pytest tests/test_gpu_path.py -q
"""
from types import SimpleNamespace

import pytest
import torch

from bench import simulation
from bench.models import qwen2_config
from bench.simulation import Simulation, preset_options, resident, simulate, simulated_policy
from commands import imitate
from models import attention, loading
from policy import Rollout
from run import memory
from run.options import Options

NF4 = SimpleNamespace(quant="nf4", dtype="auto", rank=16)


def narrow(layers=1):
    """A Qwen2 of few layers whose query heads share keys."""
    return qwen2_config(hidden=256, layers=layers, vocab=64, heads=8, kv_heads=2, intermediate=512)


@pytest.mark.slow
@pytest.mark.parametrize("preset, dtype, capability", [
    ("7b-24gb", "auto", 8), ("7b-9k", "auto", 8), ("1.5b-16gb", "fp32", 7)])
def test_the_estimate_is_at_most_a_fifth_above_the_simulated_peak(preset, dtype, capability):
    """A run would die on a card that was said to be large enough, or be refused one that is. The
    others differ in widths alone: `python -m bench memory` has them all."""
    o, config = preset_options(preset, dtype)
    layers = config.num_hidden_layers = 2
    config.layer_types = config.layer_types[:layers]
    estimate, phases = memory.estimate(config, o, 4 if dtype == "fp32" else 2), set()
    device = Simulation(capability)
    for phase, peak, _ in simulate(o, config, device):
        assert 1.0 <= round(memory.phase_peak(estimate[phase]) / peak, 3) <= 1.2, phase
        assert not device.math, "scores of all pairs are stored"
        phases.add(phase)
    assert phases == estimate.keys() - {"validation"}
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_plain_rollouts():
    """The host waits once in 16 tokens, and beside that only before the first and after the last."""
    with Simulation() as device:
        policy, lists = simulated_policy(NF4, narrow()), []
        for T in (17, 49):
            device.begin()
            policy.sample("agent", [[7] * 20] * 4, 8, T, 1.0, None, 32)
            asked = sum(n for what, n in device.reads.items() if "_compact" in what)
            assert asked == 2 * ((T - 1) // 16)  # how many run; which rows stay is written back
            lists.append(sum(device.reads.values()) - asked)
        assert lists[0] == lists[1]


def test_the_cache_never_has_more_room_than_can_be_used():
    """The buffer ends as large as memory.py says, however it grew on the way."""
    for P, G, R in ((4096, 8, 512), (5, 2, 40), (300, 4, 7), (1, 1, 1)):
        layer = attention.GrowingLayer(room=P, most=P + G * (R - 1))
        block = lambda n: torch.empty(1, 1, n, 1, device="meta")
        layer.update(block(P), block(P))
        for _ in range(R - 1):
            layer.update(block(G), block(G))
        assert layer.buffers[0].shape[2] == memory.cache_keys(P, G, R)


def test_a_decoded_token_takes_at_most_sixty_kernels_a_layer():
    """Large cards wait for launches: 90 a layer were 13 ms a token at 28 layers."""
    kernels = []
    for layers in (1, 2):
        with Simulation() as device:
            policy = simulated_policy(NF4, narrow(layers))
            kernels.append(simulation.rollouts(device, policy, "agent", 4, 64, 8, 16, 32))
    assert kernels[1] - kernels[0] <= 60


def test_episodes_ask_the_device_once_a_token_and_once_for_turns_that_ended():
    """It was asked four times a token. Every turn ends at once here, as every read says True."""
    with Simulation() as device:
        policy, T = simulated_policy(NF4, narrow()), 20
        policy.sample("agent", [[7] * 20] * 4, 8, 4, 1.0, None, 32)
        device.begin()
        out = policy.sample("agent", [[7] * 20] * 4, 8, T, 1.0, None, 32, respond=lambda n, ids: [5],
                            max_turns=T, max_turn_tokens=64)
        asked = sum(n for what, n in device.reads.items() if what.startswith("list read"))
        assert len(out) == 32 and 2 * T <= asked <= 2 * T + 8


def test_greedy_validation_and_warm_start_stay_on_the_device(monkeypatch):
    """What the phases above leave out. An operation on two devices raises."""
    with Simulation():
        policy = simulated_policy(NF4, narrow())
        assert len(policy.sample("agent", [[7] * 9, [7] * 5], 1, 8, 0.0, None, 8)) == 2
        monkeypatch.setattr(imitate, "ADAPTER", "agent")
        pairs = [Rollout(0, [7] * 9, [7] * 4),
                 Rollout(0, [7] * 9, [7] * 6, drawn=[False, *[True] * 5])] * 3
        o = Options(token_budget=32, grad_checkpoint=True)
        imitate.imitation_step(policy, resident(policy)["agent"], pairs, 1e-3, o)


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_a_card_without_fused_attention_in_bf16_gets_fp32(capability, dtype, monkeypatch):
    """A T4 would store all scores, and compute in bf16 by emulation."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert loading.choose_dtype("auto", "cuda") == dtype
    assert loading.choose_dtype("bf16", "cuda") == torch.bfloat16

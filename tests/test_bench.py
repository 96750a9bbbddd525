"""The GPU bench: its shapes, and that it runs to its end on a CPU.

Run: python -m pytest tests/test_bench.py -q
"""
import json

import torch

from scripts import bench_gpu


def test_the_7b_shape_has_the_published_number_of_parameters():
    """Speed would be that of another model."""
    from transformers import Qwen2ForCausalLM
    with torch.device("meta"):
        lm = Qwen2ForCausalLM(bench_gpu.qwen2_config(**bench_gpu.QWEN_7B))
    assert sum(p.numel() for p in lm.parameters()) == 7_615_616_512


def test_the_script_runs_to_its_end_on_a_cpu(tmp_path):
    assert bench_gpu.main(["--tiny", "--out", str(tmp_path / "gpu.json")]) == 0
    row = json.loads((tmp_path / "gpu.json").read_text())["models"]["tiny"]
    assert row["agent"]["trained_tokens"] > 0 and row["env"]["env_steps"] == 1
    assert sum("tokens_per_s" in figures for figures in row.values() if isinstance(figures, dict)) == 3

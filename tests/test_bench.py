"""The GPU bench runs to its end on a CPU.

Run: python -m pytest tests/test_bench.py -q
"""
import json

import torch

from scripts import bench_gpu


def test_the_script_runs_to_its_end_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_gpu.main([]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["agent"]["trained_tokens"] and row["env"]["env_steps"]
    assert row["16 rows"]["seconds"]

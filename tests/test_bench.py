"""The GPU bench runs to its end on a CPU.

Run: python -m pytest tests/test_bench.py -q
"""
import json

from scripts import bench_gpu


def test_the_script_runs_to_its_end_on_a_cpu(tmp_path):
    assert bench_gpu.main(["--tiny", "--out", str(tmp_path / "gpu.json")]) == 0
    row = json.loads((tmp_path / "gpu.json").read_text())["models"]["tiny"]
    assert row["agent"]["trained_tokens"] > 0 and row["env"]["env_steps"] == 1
    assert str(row).count("tokens_per_s") == 5 and "mismatch" in row["unrecorded"]

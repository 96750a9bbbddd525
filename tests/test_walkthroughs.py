"""The walkthroughs: each one runs to its end.

    python -m pytest -q tests/test_walkthroughs.py
"""
import runpy
import sys
from pathlib import Path

import pytest

import walkthroughs

SCRIPTS = sorted(Path(walkthroughs.__file__).parent.glob("[1-9]_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_it_runs_to_its_end(script, tmp_path, monkeypatch):
    """Otherwise the first script that a reader tries would end in a traceback."""
    monkeypatch.setattr(walkthroughs, "PICTURES", tmp_path)
    options = ["--steps", "2"] if script.name[0] == "1" else []
    monkeypatch.setattr(sys, "argv", [str(script), *options])
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / f"{script.stem}.png").is_file()

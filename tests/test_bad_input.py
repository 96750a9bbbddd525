"""Users' mistakes: each gives one clear line on stderr and exit code 2, and writes nothing.

Usage: python -m pytest -q tests/test_bad_input.py
"""
import pytest

import curriculum
import genenv
from helpers import one_line

MISTAKES = {  # (argv, the option or file that the line must name)
    "option misspelt": (["--epoch", "3"], "--epoch"),
    "four bits of a tiny model": (["--quant", "nf4", "--model", "worlds/base/ladder"], "--quant"),
    "nan": (["--agent-lr", "nan"], "--agent-lr"),
    "one rollout": (["--G", "1"], "--G"),
    "nothing in the band": (["--G", "3", "--k-min", "0.1"], "--k-min"),
    "schedule misspelt": (["--alpha-schedule", "liner"], "did you mean linear"),
    "a user's schedule fails": (["--alpha-schedule", "broken"], "alpha_broken"),
    "model for the simulator only": (["--env-model", "m"], "--env-model"),
    "no model": (["--world", "tool_calls"], "--model"),
    "model is a file": (["--model", "{tmp}/broken.jsonl"], "{tmp}/broken.jsonl"),
    "tasks broken": (
        ["--preset", "tiny", "--world", "tool_calls", "--model", "m",
         "--base-tasks", "{tmp}/broken.jsonl"], "{tmp}/broken.jsonl, line 2"),
    "teacher without tasks": (["--variant", "teacher"], "--teacher-tasks"),
    "out is not empty": (["--out", "{tmp}"], "{tmp}"),
    "resume nothing": (["--resume", "--out", "{tmp}/none"], "{tmp}/none"),
    "no examples to imitate": (
        ["warm-start", "--out", "{tmp}/m", "--model", "m", "--world", "tool_calls",
         "--tools", "list.json"], "--base-tasks"),
}


def alpha_broken(c):
    """Fail like a user's schedule with a mistake in it."""
    return 1 / 0


@pytest.mark.parametrize("name", MISTAKES)
def test_one_line_names_what_to_change(name, tmp_path, capsys, monkeypatch):
    """Otherwise a mistake in a command would end in a traceback, or after files were written."""
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"task": "Who?", "reference": "I"}\n{"te')
    monkeypatch.setattr(curriculum, "alpha_broken", alpha_broken, raising=False)
    monkeypatch.setattr(genenv, "epoch", None)  # a mistake that gets this far was not refused
    argv, word = MISTAKES[name]
    argv = [arg.replace("{tmp}", str(tmp_path)) for arg in argv]
    if argv[0].startswith("-") and "--out" not in argv:
        argv += ["--out", str(tmp_path / "r")]
    one_line(capsys, genenv.main(argv), word.replace("{tmp}", str(tmp_path)))
    assert list(tmp_path.iterdir()) == [broken]

"""What a run prints: short lines, and a dash for what was not measured.

    python -m pytest -q tests/test_screen.py
"""
from support import screen
from support.options import parse_options
from test_report import record, save


def test_every_line_is_under_100_characters(tmp_path):
    """At the worst, warnings included; each figure ends where its heading ends."""
    worst = record(1000, distinct_tasks=99999, env_kept=9999, env_kl=99.999, task_length=999.99,
                   seconds=9e5, validation=0.125, entropy=11.25, warnings=["collapse: " + "words " * 50])
    text = screen.line(worst)
    assert text.count("\n") > 2 and all(len(line) < 100 for line in text.splitlines())
    legend = screen.LEGEND.splitlines()[1]
    for value, heading in (("0.125", "held-out"), ("11.250", "entropy"), ("99.999", "KL")):
        end = text.index(value) + len(value)
        assert legend[:end].endswith(heading)
    words = screen.closing_words(save(tmp_path, [record(0), worst])).splitlines()
    assert all(len(line) < 100 for line in words if str(tmp_path) not in line)


def test_what_was_not_measured_is_a_dash(tmp_path):
    """Not 0.00: neither in the line of an epoch nor in the closing words."""
    silent = record(2, distinct_tasks=0, success_rate=0.0, validated=1, env_steps=0, env_kl=0.0)
    assert screen.line(record(2)).split().count("-") == 0
    assert screen.line(silent).split().count("-") == 6
    words = screen.closing_words(save(tmp_path, [record(0), silent]))
    assert "0.50 -> -" in words and "80% -> -" in words


def test_the_banner_names_world_model_and_folder(tmp_path):
    lines = screen.banner(parse_options(["--seed", "7"]), tmp_path, 3).splitlines()
    assert [line.split()[0] for line in lines] == ["world", "model", "folder"]
    assert "ladder" in lines[0] and "3 threads" in lines[1] and str(tmp_path) in lines[2]

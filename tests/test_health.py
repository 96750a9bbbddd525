"""Each way in which a run goes wrong raises its own warning only; a healthy run raises none.

    python -m pytest -q tests/test_health.py

The records of six epochs are made by hand; every check looks at every epoch.
"""
import pytest

import genenv
from support import health

QUIET = dict(epoch=3, alpha=0.5, success_rate=0.5, validated=3, validation=0.5, distinct_tasks=40,
             reward=0.5, skill_entropy=2.0, written=48, invalid={}, truncated=0.0,
             zero_variance=0.2, env_kept=20, env_kl=0.1, env_steps=16, env_capped=0,
             refused=0.1, mismatch=0.025, skipped_steps=0,
             env_skipped_steps=0, validation_greedy=0.5, solved=0.1,
             unsolved=0.0, kl=0.1, env_kl_step=0.1,
             response_length=9.0, length_unit="tools")


def epochs(n=0, **fields):
    """Return the records of six epochs, of which the last n have these fields."""
    records = [{**QUIET, "epoch": t, "validated": t} for t in range(6)]
    for r in records[6 - n:]:
        r.update(fields)
    return records


def warnings_of(records, **options):
    """Return the names of all warnings of a run, in order."""
    o = genenv.Options(**options)
    warnings = [w for t, r in enumerate(records) for w in health.warnings(r, records[:t], o)]
    assert all(warning["text"] for warning in warnings)
    return [warning["name"] for warning in warnings]


SICK = {  # name: (how many of the last epochs have the fields, the fields, the one warning)
    "repeats itself": (3, dict(invalid={"duplicate in the batch": 40}, distinct_tasks=8),
                       "collapse"),
    "is never updated": (1, dict(env_kept=8, env_steps=0), "starvation"),
    "has only hard tasks": (1, dict(zero_variance=1.0, reward=0.0, env_kept=0), "no signal"),
    "gets cut-off answers": (1, dict(truncated=0.4), "cut off"),
    "writes no task": (1, dict(invalid={"malformed": 48}, distinct_tasks=0, env_kept=0, env_steps=0,
                               success_rate=None, skill_entropy=None), "invalid"),
    "moves too fast": (2, dict(env_capped=1, env_steps=0), "KL"),
    "drifts": (2, dict(env_kl=3.0), "KL"),
    "is scored otherwise": (1, dict(mismatch=0.04), "mismatch"),
    "spoils its steps": (1, dict(env_skipped_steps=3), "not finite"),
}


@pytest.mark.parametrize("name", SICK)
def test_a_simulator_that(name):
    """Otherwise a fault would raise no warning, or would raise another one as well."""
    n, fields, keyword = SICK[name]
    assert set(warnings_of(epochs(n, **fields))) == {keyword}


def test_a_healthy_run_and_chance_raise_no_warning():
    """Otherwise one bad estimate, or a variant without a simulator, would raise a false alarm."""
    none = dict(written=0, skill_entropy=None, **dict.fromkeys(
        ("env_kept", "env_steps", "env_capped", "env_skipped_steps", "env_kl")))
    assert warnings_of(epochs()) == warnings_of(epochs(6, **none), variant="static") == []
    assert warnings_of(epochs(1, env_kl=3.0)) == []

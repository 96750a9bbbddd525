"""Fixtures that the tests share: a small copy of the embedded world, and runs of it.

Tests run on one thread: next to another busy process, two threads are far slower than one.
"""
from contextlib import contextmanager
import os
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

import genenv
from helpers import ENDINGS, tiny_policy
from support import report
from worlds import ladder, tiny_model

# this model ends its lines and knows a few tools; tests of the loop need no more
SMALL_MODEL = {**tiny_model.MODEL, "hidden_size": 64, "intermediate_size": 128,
               "num_hidden_layers": 1}
SMALL_RECIPE = dict(steps=150, batch=32, lr=6e-3)
write_report, whole_split = report.write, ladder.World.validation_tasks  # before any patch
# options of a run in the small world: an epoch takes a second, and every p_hat is in the band
MICRO = ["--threads", "1", "--steps", "2", "--seed-tasks", "4", "--val-samples", "1", "--rank", "4",
         "--k-min", "0.5"]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Save a random chat model whose tokens are single bytes, and return its folder."""
    from test_tool_calls import chat_model
    return chat_model(tmp_path_factory.mktemp("chat"), hidden=32)


@pytest.fixture(scope="module")
def ending():
    """Return a policy whose rollouts, or the turns of its episodes, end at different times."""
    return tiny_policy(eos_token_id=ENDINGS)


@pytest.fixture(scope="session")
def _small_base(tmp_path_factory):
    """Train the small base model for a few seconds, once per session; return its folder."""
    folder = tmp_path_factory.mktemp("ladder")
    pairs = ladder.World(genenv.Options()).pairs
    tiny_model.save(*tiny_model.train(ladder.WORDS, pairs, SMALL_MODEL, **SMALL_RECIPE), folder)
    return str(folder)


@contextmanager
def small_world():
    """Make the embedded world small within this context.

    It has two held-out tasks per rung, rewards wrong answers with `parity`, and draws no figures.
    """
    def score(self, task, text):
        return (1.0, True) if text == self.gold(task) else parity(task, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder.World, "validation_tasks", lambda *which: whole_split(*which)[::5])
        patch.setattr(ladder.World, "score", score)
        patch.setattr(report, "write", lambda run_folder: None)
        yield


@pytest.fixture(scope="module")
def small_ladder(_small_base):
    """Make the embedded world small for all tests of a module; yield its --model."""
    with small_world():
        yield _small_base


@pytest.fixture(scope="session")
def quiet_run(_small_base, tmp_path_factory):
    """Return the folder of an undisturbed run of three epochs with its figures.

    Tests must not change it.
    """
    out = tmp_path_factory.mktemp("runs") / "quiet"
    argv = ["--out", str(out), "--model", _small_base, *MICRO, "--epochs", "3"]
    with small_world(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write", write_report)
        assert genenv.main(argv) == 0
    return out


def parity(task, text):
    """Return a reward that the small model earns at times, so that both policies have a gradient.

    The more odd digits a response has, the likelier it earns 1.
    """
    return float(int(task.id[:2], 16) < 64 * sum(map(text.count, "13579"))), True

"""ALFWorld: the score of a step, the prompt, and whole games with a simulator of our own.

Usage: python -m pytest -q tests/test_eval_alfworld.py

Recorded verdicts are in test_eval_harness.py.
"""
import pytest

from eval import alfworld

STEP = {"id": "x", "game": "x", "category": "valid_seen/pick", "observation": "o", "history": [],
        "admissible": ["go to desk 1", "look"], "expert": "go to desk 1"}


@pytest.mark.parametrize("response, ok, admissible, acts", [
    (r"\boxed{GO TO DESK 1}", 1, 1, 0),
    (r"Not \boxed{look}: \boxed{go to desk 1}", 1, 1, 1),  # the last box counts
    (r"\boxed{go to desk 1}, or \boxed{look}", 0, 1, 1), (r"\boxed{fly}", 0, 0, 0),
    ("<think></think><action>go to desk 1</action>", 0, 0, 0)])
def test_score_is_exact_with_softer_scores_in_extra(response, ok, admissible, acts):
    """Otherwise a softer score would appear in the table under the paper's name."""
    verdict = alfworld.score(STEP, response)
    assert (verdict.ok, verdict.score) == (bool(ok), float(ok))
    assert (verdict.extra["admissible"], verdict.extra["acts"]) == (admissible, acts)
    assert verdict.extra["verl_agent_exact"] == ("<action>" in response)


def test_prompt_shows_the_past_and_the_options_but_not_the_answer():
    """Otherwise a model could copy the expert's command."""
    record = {**STEP, "expert": "secret", "history": [("go to bed 1", "You see a pen 1.")]}
    text = alfworld.prompt(record)[-1]["content"]
    assert "> go to bed 1\nYou see a pen 1." in text and "go to desk 1\nlook" in text
    assert "secret" not in text


class Simulator:
    """Stand in for a running game, which the command `win` wins."""

    def reset(self):
        return {"won": False, "feedback": "", "admissible_commands": []}

    def step(self, command):
        return {**self.reset(), "won": command == "win"}, 0, False

    def close(self):
        pass


@pytest.mark.parametrize("replies, won, commands", [
    ([r"\boxed{look}", r"\boxed{Win}", "no more"], True, ["look", "win"]),
    ([r"\boxed{look}"] * 60, False, ["look"] * 50), (["look", None], False, ["look"])])
def test_a_game_is_played_until_it_is_won_or_too_long(monkeypatch, replies, won, commands):
    """Otherwise a game that was won would count as lost, or a game would never end."""
    monkeypatch.setattr(alfworld, "_simulator", lambda: lambda path: Simulator())
    monkeypatch.setattr(alfworld, "game_file", lambda folder, game: game)
    left = iter(replies)
    game, = alfworld.episodes(None, lambda prompts: [next(left)], [STEP])
    assert (game["problem"] == "") == won and game["commands"] == commands

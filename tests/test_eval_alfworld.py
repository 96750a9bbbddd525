"""ALFWorld: readers and rules against independent references, recorded verdicts, base tasks.

Run: python -m pytest tests/test_eval_alfworld.py -q

The episode test needs the optional package `alfworld` and is skipped without it.
"""
import gzip
import json

import pytest

from helpers import Speaker, user_error
from eval import alfworld
from eval.common import read_rows
from test_eval_harness import SHARED, needs_data


def step(expert="go to desk 1", admissible=("go to desk 1", "look")):
    return {"id": "x#0", "category": "valid_seen/pick_and_place_simple", "game": "x", "step": 0,
            "goal": "g", "observation": "o", "history": [], "admissible": list(admissible),
            "expert": expert}


# ---------------------------------------------------------------------------------------------
# readers


@pytest.mark.parametrize("text, wanted", [
    ("  Go  TO\tdesk 1\n", "go to desk 1"), ("`'go'`", "go"), ("'`go`'", "`go`"),
    ('"go"', "go"), ("\"' go '\"", " go "), ("", "")])
def test_normalisation_strips_in_the_published_order(text, wanted):
    assert alfworld.normalise(text) == wanted


@pytest.mark.parametrize("response, command, valid", [
    ("<think>a</think><action> Go </action>", "go", 1), ("<action>go</action>", "go", 0),
    ("<think></think><action>a</action><action>b</action>", "a", 1),
    ("<Think></Think><ACTION>go</ACTION>", "go", 0),
    ("<think>去</think><action>a</action>", "a", 0),
    ("<think></think></action>go<action>", "", 1),
    ("x" * 40 + "<action>go", "x" * 20 + "<action>go", 0),
    ("", "", 0)])
def test_projection(response, command, valid):
    assert alfworld.projection(response) == (command, valid)


@pytest.mark.parametrize("response, ok, admissible, acts", [
    (r"\boxed{go to desk 1}", 1, 1, 1), (r"\boxed{GO TO DESK 1}", 1, 1, 0),
    (r"\boxed{look}", 0, 1, 1), (r"\boxed{fly}", 0, 0, 0), ("", 0, 0, 0),
    ("<think></think><action>go to desk 1</action>", 0, 0, 0)])
def test_score_is_exact_with_softer_scores_beside_it(response, ok, admissible, acts):
    verdict = alfworld.score(step(), response)
    assert (verdict.ok, verdict.score) == (bool(ok), float(ok))
    assert (verdict.extra["admissible"], verdict.extra["acts"]) == (admissible, acts)
    assert verdict.extra["verl_agent_exact"] == ("<action>" in response)
    assert verdict.reason and "\n" not in verdict.reason


def test_prompt_shows_the_past_and_the_options_but_not_the_answer():
    record = step(admissible=("look", "inventory"), expert="secret command")
    record["history"] = [("go to bed 1", "You see a pen 1.")]
    text = alfworld.prompt(record)[-1]["content"]
    assert "> go to bed 1\nYou see a pen 1." in text and "look\ninventory" in text
    assert "secret" not in text


# ---------------------------------------------------------------------------------------------
# recorded verdicts


COMPARED = {"step-string": ("in_admissible", "nothing_happens", "state_changed", "feedback", "won",
                            "reward"),
            "step-admissible": ("in_admissible", "done"),
            "raw-text": ("genenv_reward_vs_expert", "projection_action", "projection_valid",
                         "projected_in_admissible"),
            "episode": ("won_at_step", "success_within_50")}


@needs_data
def test_every_compared_field_can_disagree():
    """No field is compared with itself: a changed record is noticed."""
    golden, changed = read_rows(SHARED / "golden" / "alfworld.jsonl"), []
    for kind, key in ((kind, key) for kind, keys in COMPARED.items() for key in keys):
        row = next(r for r in golden if r["kind"] == kind and (
            key != "feedback" or r["official_verdict"]["nothing_happens"])
            and (key != "done" or r["response"] == r["detail"].get("expert_action")))
        value = row["official_verdict"][key]
        other = 49 if value is None else value + "x" if isinstance(value, str) else \
            not value if isinstance(value, bool) else value + 1
        changed.append({**row, "official_verdict": {**row["official_verdict"], key: other}})
    keys = [key for keys in COMPARED.values() for key in keys]
    for (_, agrees, detail), key in zip(alfworld.verify(SHARED, changed), keys, strict=True):
        assert agrees is False and key in detail


# ---------------------------------------------------------------------------------------------
# base tasks


def test_first_commands_of_all_orders_by_hand():
    plan = ["go to fridge 1", "open fridge 1", "take egg 1 from fridge 1", "go to microwave 1",
            "heat egg 1 with microwave 1", "go to shelf 1", "move egg 1 to shelf 1"]
    for k, command in enumerate(plan):  # nothing else can be given first: closed, away, no egg
        assert alfworld._first_commands(plan[:k], plan[k:]) == {command}
    # a lamp may be used from anywhere, and any of two receptacles be visited first
    lamp = ["go to desk 1", "use desklamp 1"]
    assert alfworld._first_commands([], lamp) == set(lamp)
    assert alfworld._first_commands(plan[:1], ["go to desk 1", "go to shelf 1"]) == {
        "go to desk 1", "go to shelf 1"}
    # nobody stays where he is, or takes two things
    assert alfworld._first_commands(plan[:1], plan[:1]) == set()
    both = [f"take {thing} 1 from fridge 1" for thing in ("egg", "cup")]
    assert alfworld._first_commands(plan[:2], both) == set()


# ---------------------------------------------------------------------------------------------
# whole episodes


def test_episodes_without_the_package_are_one_clear_line(tmp_path, monkeypatch):
    import sys
    monkeypatch.setitem(sys.modules, "textworld", None)
    user_error("pip install alfworld", next, alfworld.episodes(tmp_path, None, [step()]))


@needs_data
def test_game_files_are_unpacked_by_name(tmp_path):
    game = alfworld.load(SHARED)[0]["game"]
    paths = alfworld.unpack_games(SHARED, [game], tmp_path)
    assert set(json.loads(paths[game].read_text())) >= {"pddl_problem", "grammar", "walkthrough"}
    user_error("no game file for valid_seen/none", alfworld.unpack_games, SHARED, ["valid_seen/none"],
               tmp_path)


def test_damaged_archive_is_one_clear_line(tmp_path):
    (tmp_path / "alfworld").mkdir()
    path = tmp_path / "alfworld" / "json_2.1.1.valid_seen+valid_unseen.tar.xz"
    user_error("no such file", alfworld.unpack_games, tmp_path, ["x"], tmp_path)
    for content in (b"", b"no archive", gzip.compress(b"x" * 2000)):
        path.write_bytes(content)
        user_error("cannot be read", alfworld.unpack_games, tmp_path, ["x"], tmp_path)


class Game:
    """Stands in for a running game: won by `move mug 1 to sink 1`, else it says what it heard."""

    def reset(self):
        return {"won": False, "feedback": "", "admissible_commands": []}

    def step(self, command):
        return {**self.reset(), "feedback": f"heard {command}",
                "won": command == "move mug 1 to sink 1"}, 0, False

    def close(self):
        pass


def dialogue(monkeypatch, turns, **limits):
    """The row of one game in which the model says `turns`, and what it has read."""
    monkeypatch.setattr(alfworld, "_simulator", lambda: lambda path: Game())
    monkeypatch.setattr(alfworld, "unpack_games", lambda data, games, folder: dict.fromkeys(games))
    record = {**step(), "id": "g", "game": "g",
              "observation": "You see a mug 1.\n\nYour task is to: put it."}
    speaker = Speaker([turns], "turn too long")
    return alfworld.dialogues(None, speaker, None, [record], **limits)[0], speaker


def test_a_dialogue_is_played_turn_by_turn_until_the_game_is_won(monkeypatch):
    turns = ["go to sink 1", "I put it there.\nPut mug 1 in sink 1", "look"]
    row, speaker = dialogue(monkeypatch, turns)
    assert row["won"] and row["steps"] == 2 and row["id"] == "g"
    assert row["commands"] == ["go to sink 1", "move mug 1 to sink 1"]
    assert speaker.read == ["heard go to sink 1"]


def test_a_dialogue_is_lost_at_the_limit_of_commands_or_of_tokens(monkeypatch):
    row, speaker = dialogue(monkeypatch, ["look"] * 9, max_steps=3)
    assert not row["won"] and row["steps"] == 3 == len(speaker.read) + 1
    assert row["reason"] == "lost: not won within 3 commands"
    row, _ = dialogue(monkeypatch, ["look"])
    assert not row["won"] and row["reason"] == "lost: turn too long"  # as the policy says
    _, speaker = dialogue(monkeypatch, ["look"], tokens=100)
    assert speaker.limits == (100, alfworld.TURN_TOKENS)

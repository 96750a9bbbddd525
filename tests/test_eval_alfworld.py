"""ALFWorld: readers and rules by hand, and whole games with a scripted simulator."""
import pytest

from eval import alfworld


def step(expert="go to desk 1", admissible=("go to desk 1", "look")):
    return {
        "id": "x",
        "game": "x",
        "category": "valid_seen/pick",
        "observation": "o",
        "history": [],
        "admissible": list(admissible),
        "expert": expert,
    }


@pytest.mark.parametrize("text, wanted", [
    ("  Go  TO\tdesk 1\n", "go to desk 1"), ("`'go'`", "go"), ("'`go`'", "`go`"), ('"go"', "go")])
def test_normalisation_strips_in_the_published_order(text, wanted):
    assert alfworld.normalise(text) == wanted


@pytest.mark.parametrize("response, command, valid", [
    ("<think>a</think><action> Go </action>", "go", 1), ("<action>go</action>", "go", 0),
    ("<think></think><action>a</action><action>b</action>", "a", 1),
    ("<think>去</think><action>a</action>", "a", 0), ("<think></think></action>go<action>", "", 1),
    ("x" * 40 + "<action>go", "x" * 20 + "<action>go", 0)])
def test_projection(response, command, valid):
    assert alfworld.projection(response) == (command, valid)


@pytest.mark.parametrize("response, ok, admissible, acts", [
    (r"\boxed{go to desk 1}", 1, 1, 1), (r"\boxed{GO TO DESK 1}", 1, 1, 0),
    (r"Not \boxed{look}: \boxed{go to desk 1}", 1, 1, 1),  # the last box counts
    (r"\boxed{go to desk 1}, or \boxed{look}", 0, 1, 1),
    (r"\boxed{fly}", 0, 0, 0), ("$go to desk 1$", 1, 1, 1), ("", 0, 0, 0),
    ("<think></think><action>go to desk 1</action>", 0, 0, 0)])
def test_score_is_exact_with_softer_scores_in_extra(response, ok, admissible, acts):
    verdict = alfworld.score(step(), response)
    assert (verdict.ok, verdict.score) == (bool(ok), float(ok))
    assert (verdict.extra["admissible"], verdict.extra["acts"]) == (admissible, acts)
    assert verdict.extra["verl_agent_exact"] == ("<action>" in response)


def test_prompt_shows_the_past_and_the_options_but_not_the_answer():
    record = step(admissible=("look", "inventory"), expert="secret command")
    record["history"] = [("go to bed 1", "You see a pen 1.")]
    text = alfworld.prompt(record)[-1]["content"]
    assert "> go to bed 1\nYou see a pen 1." in text and "look\ninventory" in text
    assert "secret" not in text


class Simulator:
    """Stands for a running game, which `win` wins."""

    def reset(self):
        return {"won": False, "feedback": "", "admissible_commands": ["win", "look"]}

    def step(self, command):
        return {**self.reset(), "feedback": f"heard {command}", "won": command == "win"}, 0, False

    def close(self):
        pass


@pytest.mark.parametrize("replies, won, commands", [
    ([r"\boxed{look}", r"\boxed{Win}", "no more"], True, ["look", "win"]),
    ([r"\boxed{look}"] * 60, False, ["look"] * 50), (["look", None], False, ["look"])])
def test_a_game_is_played_until_it_is_won_or_too_long(monkeypatch, replies, won, commands):
    monkeypatch.setattr(alfworld, "_simulator", lambda: lambda path: Simulator())
    monkeypatch.setattr(alfworld, "unpack_games", lambda data, games, folder: dict.fromkeys(games))
    seen, left = [], iter(replies)

    def respond(prompts):
        seen.append(prompts[0][-1]["content"])
        return [next(left)]
    game, = alfworld.episodes(None, respond, [step()])
    assert game["won"] == won and game["commands"] == commands
    assert "heard look" not in seen[0] and "> look\nheard look" in seen[1]

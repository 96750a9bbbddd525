"""Episodes in the Policy: turns are drawn, observations are read, and only drawn tokens are scored.

Run: python -m pytest tests/test_episodes.py -q
"""
import pytest
import torch

from helpers import ENDINGS, EOS, tiny_policy

OBSERVATIONS = [[30], [31, 32, EOS], [33, 34, 35, 36, 37]]  # an EOS in an observation ends no turn


def play(policy, G=6, T=80, **limits):
    """Play G episodes of four turns for each of three prompts; return them, and the turns that the
    world heard."""
    log = {}

    def respond(i, ids):
        log.setdefault(i, []).append(list(ids))
        turn = len(log[i])
        return None if turn == 4 else OBSERVATIONS[(i + turn) % 3]

    limits = {"max_turns": 9, "max_turn_tokens": 40, **limits}
    prompts = [[20, 21], [22], [23] * 9]
    out = policy.sample("agent", prompts, G, T, 0.9, policy.generator(0), respond=respond, **limits)
    return out, log


def segments(rollout):
    """Split a response into [(drawn, ids)], one for each turn or observation."""
    out = []
    for token, drawn in zip(rollout.response, rollout.drawn):
        if not out or out[-1][0] != drawn:
            out.append((drawn, []))
        out[-1][1].append(token)
    return out


# ---------------------------------------------------------------------------------------------
# sampling


def test_an_episode_alternates_between_drawn_turns_and_the_worlds_very_tokens(ending):
    """Otherwise an observation would be shifted, cut or redrawn, or the world would hear another
    turn."""
    out, log = play(ending)
    assert len({len(r.response) for r in out}) > 5  # lengths differ
    for i, r in enumerate(out):
        speakers, texts = zip(*segments(r))
        assert speakers == (True, False) * 3 + (True,)
        assert list(texts[::2]) == log[i]
        assert list(texts[1::2]) == [OBSERVATIONS[(i + k) % 3] for k in (1, 2, 3)]
        for ids in log[i]:  # an end-of-turn token at the end, and nowhere else
            assert [token in ENDINGS for token in ids] == [False] * (len(ids) - 1) + [True]
        assert r.limit == "" and len(r.drawn) == len(r.response) == len(r.logps)


def test_same_generator_same_episodes_in_chunks_or_not(ending):
    """Otherwise a resumed run would play other episodes."""
    runs = [[(r.response, r.logps, r.drawn) for r in play(ending)[0]] for _ in range(2)]
    assert runs[0] == runs[1]
    out, log = play(ending, max_rows=6)
    for i, r in enumerate(out):  # in three chunks, i is still the caller's number
        assert [ids for drawn, ids in segments(r) if drawn] == log[i] and r.group == i // 6


# ---------------------------------------------------------------------------------------------
# limits


@pytest.mark.parametrize("limits, reason", [
    (dict(max_turns=2), "too many turns"), (dict(max_turn_tokens=1), "turn too long"),
    (dict(T=9), "too many tokens")])
def test_each_limit_has_its_own_reason_and_ends_on_an_own_token(ending, limits, reason):
    """Otherwise an episode that was cut off would pass as a whole one, or would end in half an
    observation, which would be scored as an answer."""
    out, log = play(ending, **limits)
    cut = [(i, r) for i, r in enumerate(out) if r.limit]
    assert cut and {r.limit for _, r in cut} == {reason}
    for i, r in enumerate(out):
        turns = [ids for drawn, ids in segments(r) if drawn]
        assert r.drawn[-1] and len(turns) <= limits.get("max_turns", 9)
        assert len(r.response) <= limits.get("T", 80)
        assert max(map(len, turns)) <= limits.get("max_turn_tokens", 40)
        assert bool(r.limit) == (len(log.get(i, [])) < 4)


def test_an_empty_or_endless_observation(ending):
    """Otherwise an observation without tokens would stall the rollout, or one that is too long
    would overrun its row."""
    for observation, reason in (([], "too many turns"), ([30] * 1000, "too many tokens")):
        out = ending.sample("agent", [[20]], 8, 200, 1.0, ending.generator(0), max_turns=3,
                            max_turn_tokens=60, respond=lambda i, ids: observation)
        assert {r.limit for r in out} == {reason}
        assert all(all(r.drawn) for r in out)


# ---------------------------------------------------------------------------------------------
# scoring


def test_own_tokens_score_as_they_were_drawn(ending):
    """Otherwise training would score tokens that the sampler did not draw, such as observations."""
    out, _ = play(ending)
    with ending.use("agent"), torch.no_grad():
        logp, mask = ending.logprobs(out, 0.9)
    sampled = torch.nn.utils.rnn.pad_sequence([torch.tensor(r.logps) for r in out], True)
    torch.testing.assert_close(logp, sampled, atol=3e-5, rtol=1e-5)
    assert mask.sum(1).tolist() == [r.tokens for r in out] == [sum(r.drawn) for r in out]


# ---------------------------------------------------------------------------------------------
# the chat template


def test_observations_of_a_chat_model_continue_the_conversation_as_its_template_writes_it():
    """Otherwise the model would read turns without headers, or with two end-of-turn tokens."""
    policy = tiny_policy(chat=True)
    turns = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w7 w8"},
             {"role": "user", "content": "w9 w10"}]
    # the toy template puts w0 before every message, and w1 where the assistant continues
    whole = policy.encode(turns)
    after_turn = len(policy.encode(turns[:1])) + len(["w7", "w8", "<eos>"])
    assert whole[after_turn - 1] == EOS  # the end of the turn, which the policy drew
    assert policy.encode_observation("w9 w10") == whole[after_turn:]

"""Faults found in public GRPO and co-evolution code, each turned into a test of ours.

The name of a test says what went wrong elsewhere. Some of them have a broader sibling in the test
of the module; here they stand in one list, so that none comes back unnoticed.

Run: python -m pytest tests/test_peers_bugs.py -q
"""
import math

import pytest
import torch

from curriculum import in_band
import grpo
from grpo import aggregate
from helpers import (BOS, EOS, clear, close, flat, gradients, naive_logps, random_groups, same,
                     scores, tiny_policy, train_agent, weights)
from policy import distance
from worlds import ladder

GROUPS = [(5, [4, 1, 7]), (2, [3, 3, 2]), (9, [2, 6, 5])]
REWARDS = torch.tensor([[1., 0, 0], [0, 1, 1], [1, 1, 0]])


@pytest.fixture(scope="module")
def shared():
    """One live policy whose rollouts often end early."""
    return tiny_policy(eos=[EOS, *range(4, 10)])


# ---------------------------------------------------------------------------------------------
# losses and masks


def test_denominator_is_the_number_of_response_tokens(shared, monkeypatch):
    """Labels edited through a view made it the number of all cells: a gradient six times small."""
    seen, real, groups = [], grpo.grpo_loss, random_groups(GROUPS)
    masks = []

    def spy(logp, old, ref, a, mask, tokens, rows, **options):
        before = [x.clone() for x in (old, ref, a, mask)]
        out = real(logp, old, ref, a, mask, tokens, rows, **options)
        assert same([old, ref, a, mask], before)
        seen.append((tokens, rows))
        masks.append(int(mask.sum()))
        return out

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    train_agent(shared, "agent", shared.optimizer("agent", 0), groups, REWARDS, token_budget=20)
    total = sum(len(r) for _, rs in groups for r in rs)
    assert len(seen) > 1 and set(seen) == {(total, 9)} and sum(masks) == total


def test_padding_token_equal_to_eos_hides_no_eos(shared):
    """Masks made from `ids != pad` dropped the terminal EOS, and EOS inside the prompt."""
    prompt = [20, EOS, 21, EOS, 22]  # a chat prompt is full of end-of-turn tokens
    groups = [(prompt, [[30, EOS], [EOS], [31, 32, EOS]]), ([23], [[33, 34, 35, 36, EOS]])]
    with shared.use("agent"), torch.no_grad():
        logp, mask = shared.logprobs(flat(groups))
        rows = [(p, r) for p, rs in groups for r in rs]
        for (p, r), row, m in zip(rows, logp, mask):
            assert int(m.sum()) == len(r)
            torch.testing.assert_close(row[m], torch.stack(naive_logps(shared, p, r)),
                                       atol=3e-5, rtol=1e-5)


def test_score_of_prompt_and_completion_is_the_sum_of_sampled_logprobs(shared):
    """With EOS of the prompt un-attended the scoring pass saw another context than the sampler."""
    prompts = [[20, EOS, 21], [EOS], [22, 23, EOS, EOS, 24]]
    out = shared.sample("agent", prompts, G=4, max_new_tokens=10, generator=shared.generator(0))
    for r in out:
        with shared.use("agent"), torch.no_grad():
            total = float(sum(naive_logps(shared, r.prompt, r.response)))
        assert sum(r.logps) == pytest.approx(total, abs=2e-4)


def test_stopping_is_credited(shared):
    """The terminal token was dropped from the trained ids: rewards never reached the stop."""
    prompt, stop, runs_on = [20, 21], [30, EOS], [30, 31]
    clear(shared)
    with shared.use("agent"):
        before = scores(shared, [(prompt, [stop])], 1.0, 99)[0][0]
        optimizer = torch.optim.SGD(shared.params["agent"], lr=0.05)
        saved = [p.detach().clone() for p in shared.params["agent"]]
        train_agent(shared, "agent", optimizer, [(prompt, [stop, runs_on])],
                    torch.tensor([[1.0, 0.0]]), agent_kl=0)
        after = scores(shared, [(prompt, [stop])], 1.0, 99)[0][0]
    with torch.no_grad():
        for p, old in zip(shared.params["agent"], saved):
            p.copy_(old)
    assert after[1] > before[1] + 1e-3  # the EOS itself became likelier


def test_sampler_has_no_hidden_top_k_or_top_p(shared):
    """Sampling from the top 50 and scoring with the full softmax is another policy."""
    out = shared.sample("agent", [[20, 21]] * 50, G=200, max_new_tokens=1, max_rows=10_000,
                        generator=shared.generator(0))
    with shared.use("agent"), torch.no_grad():
        p = shared.lm(input_ids=torch.tensor([[20, 21]])).logits[0, -1].softmax(-1)
    rare = p.argsort()[:20]
    hits = sum(r.response[0] in rare.tolist() for r in out)
    expected = 10_000 * float(p[rare].sum())
    assert expected > 20 and abs(hits - expected) < 5 * expected ** 0.5


def test_temperature_is_the_same_in_sampling_and_scoring(shared):
    """Sampled at .9 and scored at 1: the ratio of an on-policy step was not one."""
    out = shared.sample("agent", [[20, 21], [22]], G=6, max_new_tokens=8, temperature=0.9,
                        generator=shared.generator(0))
    groups = [(out[6 * b].prompt, [r.response for r in out[6 * b:6 * b + 6]]) for b in range(2)]
    sampled = torch.cat([torch.tensor(r.logps) for r in out])
    with shared.use("agent"):
        right, wrong = (torch.cat([row for rows in scores(shared, groups, T, 10_000)
                                   for row in rows]) for T in (0.9, 1.0))
    assert ((right - sampled).exp() - 1).abs().max() < 1e-3
    assert ((wrong - sampled).exp() - 1).abs().max() > 0.02


def test_learning_rate_does_not_scale_with_micro_batches(shared):
    """loss.mean().backward() per micro-batch, never divided: k micro-batches, k times the step."""
    groups, results = random_groups(GROUPS), []
    for budget in (10_000, 10):
        clear(shared)
        train_agent(shared, "agent", torch.optim.SGD(shared.params["agent"], lr=0.0), groups,
                    REWARDS, grad_clip=1e9, token_budget=budget)
        results.append(gradients(shared, "agent"))
    assert close(*results)


def test_batch_of_unfinished_or_equal_episodes_is_a_no_op(shared):
    """With all episodes filtered the token count was 0 and the loss undefined: a crash."""
    before = [p.detach().clone() for p in shared.params["agent"]]
    stats = train_agent(shared, "agent", shared.optimizer("agent", 1.0), random_groups(GROUPS),
                        torch.zeros(3, 3))
    assert same([p.detach() for p in shared.params["agent"]], before)
    assert all(math.isfinite(v) for v in stats.values())


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_row_without_tokens_is_no_nan(aggregation):
    """masked_mean divided 0 by 0, and the guard that caught the NaN hid its cause."""
    per_token = torch.tensor([[1.0, 2.0], [float(3), 4.0]])
    mask = torch.tensor([[True, True], [False, False]])
    expected = {"token": 1.5, "sequence": 0.75}
    assert float(aggregate(per_token, mask, aggregation, 2, 2)) == expected[aggregation]


# ---------------------------------------------------------------------------------------------
# prompts, tasks and rewards


def test_every_completion_is_scored_against_its_own_task(shared):
    """Prompts interleaved one way and tasks the other: two of six rewards for the wrong task."""
    tasks = [ladder._task(d, ["inc"] * n, "env") for d, n in ((1, 1), (5, 2), (7, 3))]
    prompts = [[20 + b] * (3 - b) for b in range(3)]
    out = shared.sample("agent", prompts, G=2, max_new_tokens=2, generator=shared.generator(0))
    order = [r.prompt for r in out]
    assert order == [prompts[i // 2] for i in range(6)]
    # a perfect answer to the prompt at hand must earn the reward of its task and of no other
    truth = [ladder._chain(t.spec["tools"], ladder.run_tools(t.spec["start"], t.spec["tools"]))
             for t in tasks]
    rewards = torch.tensor([[ladder.score(t, text)[0] for text in truth] for t in tasks])
    assert torch.equal(rewards, torch.eye(3))
    with shared.use("agent"), torch.no_grad():  # and the tokens do come from that prompt
        for r in out:
            own = torch.stack(naive_logps(shared, r.prompt, r.response))
            torch.testing.assert_close(torch.tensor(r.logps), own, atol=3e-5, rtol=1e-5)


def test_template_adds_the_generation_prompt_and_one_bos():
    """Without it the model wrote its own header; tokenised again it got a second BOS."""
    policy = tiny_policy(adapters=(), chat=True, bos=True)
    ids = policy.encode([{"role": "system", "content": "w9"}, {"role": "user", "content": "w8"}])
    assert ids == [BOS, 4, 13, EOS, 4, 12, EOS, 5] and ids.count(BOS) == 1


def test_sampled_ids_are_never_tokenised_again(shared, monkeypatch):
    """Text -> ids again gives other tokens than those that were sampled."""
    monkeypatch.setattr(shared.tokenizer, "encode", lambda *a, **k: pytest.fail("re-tokenised"))
    out = shared.sample("agent", [[20, 21]], G=3, max_new_tokens=5, generator=shared.generator(0))
    groups = [(out[0].prompt, [r.response for r in out])]
    train_agent(shared, "agent", shared.optimizer("agent", 0), groups, torch.tensor([[1., 0, 0]]))
    assert all(isinstance(t, int) for r in out for t in r.response)


def test_g_rollouts_means_g_rollouts(shared):
    """n > 1 was accepted and outputs[0] alone returned."""
    for G in (1, 2, 5):
        out = shared.sample("env", [[20], [21, 22]], G=G, max_new_tokens=3)
        assert len(out) == 2 * G


def test_simulators_text_has_no_template_tokens(shared):
    """Tasks decoded with their special tokens carried a chat template into the next prompt."""
    assert shared.decode([BOS, 30, EOS]) == "w26"


def test_answer_in_the_prompt_earns_nothing():
    """Prompt and response were decoded together: the example in the prompt was scored."""
    task = ladder._task(3, ["inc"], "env")
    assert ladder.score(task, "s1 inc 4")[0] == 1
    for response in ("", "=", "s1 inc"):  # the score sees the response alone
        assert ladder.score(task, response)[0] == 0
    assert ladder.score(task, ladder.agent_prompt(task) + " s1 inc 4")[0] == 0


def test_part_of_a_plan_is_no_success():
    """Any subset of the gold actions passed as the plan."""
    task = ladder._task(3, ["inc", "dbl", "neg"], "env")
    steps = ["s1 inc 4", "s2 dbl 8", "s3 neg 2"]
    assert ladder.score(task, " ".join(steps))[0] == 1
    for part in ([], steps[:1], steps[:2], steps[1:], steps[2:], [steps[0], steps[2]]):
        assert ladder.score(task, " ".join(part))[0] == 0


# ---------------------------------------------------------------------------------------------
# the difficulty filter


def test_filter_of_few_prompts_keeps_those_in_the_band():
    """sorted[-0:] selected everything for removal: fewer than ten prompts, none kept."""
    p_hats = [0.5, 0.5, 0.4, 0.9, 0.1]
    assert [p for p in p_hats if in_band(p, 0.5, 0.1)] == [0.5, 0.5, 0.4]
    assert [p for p in [0.5] if in_band(p, 0.5, 0.1)] == [0.5]


@pytest.mark.parametrize("p_hat", [0.0, 1.0])
def test_filter_keeps_nothing_where_every_task_is_solved_or_none(p_hat):
    """A percentile cut kept 80 of 100 prompts that carried no signal at all."""
    assert not any(in_band(p, 0.5, 0.1) for p in [p_hat] * 100)


def test_filter_asks_for_the_difficulty_and_not_for_the_rank():
    """With all prompts at the target a percentile cut threw a fifth of them away."""
    assert all(in_band(p, 0.5, 0.1) for p in [0.5] * 100)


# ---------------------------------------------------------------------------------------------
# two adapters on one base


def test_reference_is_not_the_policy(shared):
    """disable_adapter() was called without `with`, which does nothing: no KL term ever pulled."""
    groups = random_groups(GROUPS)
    with shared.use("agent"):
        mine = scores(shared, groups, 1.0, 10_000)
        shared.model.disable_adapter()  # the fault itself: the policy answers on
        wrong = scores(shared, groups, 1.0, 10_000)
        with shared.use(None):
            ref = scores(shared, groups, 1.0, 10_000)
        again = scores(shared, groups, 1.0, 10_000)
    join = lambda rows: torch.cat(sum(rows, []))
    assert torch.equal(join(wrong), join(mine)) and torch.equal(join(again), join(mine))
    assert (join(ref) - join(mine)).abs().max() > 0.01
    with shared.use("env"):
        assert (join(ref) - join(scores(shared, groups, 1.0, 10_000))).abs().max() > 0.01
    # and the update reports that distance, it does not compare the policy with itself
    stats = train_agent(shared, "agent", shared.optimizer("agent", 0), groups, REWARDS)
    kl = float(grpo.token_kl(join(mine), join(ref)).mean())
    assert kl > 1e-4 and stats["kl"] == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("other", ["env", None])
def test_gradient_arrives_after_a_switch_of_adapters(other):
    """Leaving the switch cleared requires_grad before backward(): the proposer never trained."""
    policy, groups = tiny_policy(), random_groups(GROUPS)
    peer = tiny_policy()
    with policy.use("agent"):
        loss = policy.logprobs(flat(groups))[0].sum()
        with policy.use(other), torch.no_grad():
            policy.logprobs(flat(groups))
        loss.backward()
    assert all(g is not None and g.abs().max() > 0 for g in gradients(policy, "agent"))
    assert all(g is None for g in gradients(policy, "env"))
    # the library's own switch, as the peer used it, loses them: the case is a real one
    with peer.use("agent"):
        loss = peer.logprobs(flat(groups))[0].sum()
        peer.model.set_adapter("env")
        loss.backward()
    assert all(g is None for g in gradients(peer, "agent"))


def test_each_update_moves_its_own_adapter_alone(shared):
    """Of the two players one never moved, and no figure told."""
    policy, groups = tiny_policy(), random_groups(GROUPS)
    for name, other in (("agent", "env"), ("env", "agent")):
        before, sums = weights(policy, name), [policy.checksum(n) for n in (name, other)]
        train_agent(policy, name, policy.optimizer(name, 1e-3), groups, REWARDS)
        assert policy.checksum(other) == sums[1] and policy.checksum(name) != sums[0]
        assert distance(before, policy.params[name]) > 1e-3


# ---------------------------------------------------------------------------------------------
# reports


def test_statistics_carry_the_name_of_what_they_hold(shared):
    """A metric called accuracy held a penalty: KL, clip and norm are checked against their own."""
    groups = random_groups(GROUPS)
    with shared.use("agent"):
        mine = scores(shared, groups, 1.0, 10_000)
    with shared.use(None):
        ref = scores(shared, groups, 1.0, 10_000)
    stats = train_agent(shared, "agent", shared.optimizer("agent", 0), groups, REWARDS)
    d = torch.cat([a - b for x, y in zip(mine, ref) for a, b in zip(x, y)])
    assert stats["kl"] == pytest.approx(float(((-d).exp() - 1 + d).mean()), rel=1e-4)
    assert stats["clip_fraction"] == 0 and stats["zero_variance"] == 0
    norm = sum(float((g ** 2).sum()) for g in gradients(shared, "agent")) ** 0.5
    assert min(stats["grad_norm"], 1.0) == pytest.approx(norm, rel=1e-3)  # clipped at one
    assert stats["trained_tokens"] == sum(len(r) for _, rs in groups for r in rs)

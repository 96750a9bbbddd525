"""The wiring: each call of the loop gets what the options say and what earlier calls returned.

Usage: python -m pytest -q tests/test_wiring.py

The small world of conftest.py runs for a few epochs, and every call of the sampler, of the checks
of texts and of both updates is recorded. Each test checks one fact about Algorithm 1, so whoever
changes a part of the loop must change its test too. The updates have their own test files. The
model writes texts of every kind: some are invalid, and some batches get too few valid ones, others
too many.
"""
import copy
import inspect
import json
import math
from types import SimpleNamespace

import pytest
import torch

import curriculum
import data_pool
import genenv
import interaction
import rwr
from curriculum import in_band
from data_pool import TrainPool, distinct, read_jsonl
from grpo import grpo_update
from interaction import attempt_score
from policy import Policy
from support.metrics import agent_figures, mean
from support.options import Options
from support.run import EpochState, alpha_of
from worlds import World, ladder

EPOCHS, G, BATCH = 4, 4, 12  # a batch has four seed tasks with three variations each
OPTIONS = dict(  # no value is a default, so that a constant in place of an option is noticed
    seed=8, epochs=EPOCHS, steps=2, seed_tasks=4, variations=3, G=G, base_share=0.4,
    temperature=0.7, max_task_tokens=9, max_response_tokens=10, max_prompt_tokens=40,
    val_samples=2, val_every=3, agent_lr=0.013, env_lr=0.017, alpha=0.35, alpha_end=0.65,
    alpha_schedule="linear", difficulty_reward="half", seed_selection="curated",
    agent_reward="graded", beta=5.0, k_min=0.2, p_hat_unit="seed", rank=3, max_rows=41,
    env_batch=2, threads=3)
RECORDED = [
    (Policy, "sample"), (TrainPool, "sample"), (curriculum, "select_seed_tasks"),
    (genenv, "read_written"), (interaction, "play"), (genenv, "interact"), (genenv, "grpo_update"),
    (genenv, "rwr_update"), (genenv, "note_refused"), (genenv, "end_epoch")]


@pytest.fixture(scope="module")
def model(small_ladder):
    """Return the small base model, in a world with few base tasks and rewards of many values."""
    base_tasks = ladder.World.base_tasks

    def score(self, task, text):
        if text == self.gold(task):
            return 1.0, True
        odd_digits = sum(map(text.count, "13579"))
        # for some tasks, wrong answers are not valid
        return [0.0, 0.4, 0.4, 0.7, 1.0][min(odd_digits, 4)], task.id[0] not in "abc"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ladder.World, "base_tasks", lambda self: base_tasks(self)[::60])
        patch.setattr(ladder.World, "score", score)
        patch.setattr(World, "graded", lambda self, task, text, reward: 0.4 * reward + 0.01)
        patch.setattr(curriculum, "reward_half", reward_half, raising=False)
        patch.setattr(data_pool, "FRESH_FOR", 1)
        patch.setattr(data_pool, "MAX_AGE", 2)
        patch.setattr(rwr, "KL_SEEDS", 5)
        patch.setattr(genenv, "WRITE_ROUNDS", 2)  # not enough to fill every batch
        yield small_ladder


def reward_half(p_hat, alpha, beta):
    """Return half of the paper's R_env."""
    return 0.5 * curriculum.reward_bell(p_hat, alpha, beta)


def record(patch, owner, name, calls):
    """Append every call of a function to `calls`: its arguments by name, as they were before the
    call, its result and the epoch."""
    function = getattr(owner, name)

    def recorded(*values, **keywords):
        arguments = inspect.signature(function).bind(*values, **keywords).arguments
        for key, value in arguments.items():
            if isinstance(value, list):
                arguments[key] = [copy.copy(item) for item in value]
        result = function(*values, **keywords)
        at = sum(call.name == "end_epoch" for call in calls)
        calls.append(SimpleNamespace(
            **arguments, name=function.__qualname__, result=result, at=at))
        return result

    patch.setattr(owner, name, recorded)


def recorded_run(model, folder, **options):
    """Make a run with OPTIONS, some of which `options` may replace; return (calls, Run)."""
    calls, threads = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", threads.append)
        for owner, name in RECORDED:
            record(patch, owner, name, calls)
        genenv.train(Options(out=str(folder), model=model, **{**OPTIONS, **options}))
    assert threads == [3]
    return calls, calls[-1].run


def of(calls, name):
    """Return the calls of one function."""
    return [call for call in calls if call.name == name]


def steps_of(calls):
    """Return the steps of a run.

    Each has the calls that drew seed tasks and those that read what was written for them, the texts
    and those of them that are new tasks, the trials, and the call that played the attempts.
    """
    steps, begin, seeds = [], 0, 0
    for end, call in enumerate(calls):
        if call.name == "end_epoch":
            seeds = 0
        if call.name == "interact":
            reads, texts = of(calls[begin:end], "read_written"), []
            for read in reads:
                # each text comes with the number of its seed task in the epoch
                texts += [(seeds + w.rollout.group, w) for w in read.result]
                seeds += len(read.seed_tasks)
            steps.append(SimpleNamespace(
                at=call.at, seeds=of(calls[begin:end], "select_seed_tasks"), reads=reads,
                texts=texts, new_texts=[(seed, w) for seed, w in texts if w.task][:BATCH],
                trials=call.result, play=calls[end - 1]))
            begin = end
    return steps


@pytest.fixture(scope="module")
def recording(model, tmp_path_factory):
    """Return the record of a whole run: its calls, its steps and the Run."""
    calls, run = recorded_run(model, tmp_path_factory.mktemp("wiring") / "r")
    return SimpleNamespace(calls=calls, steps=steps_of(calls), run=run)


def texts_of(recording, t):
    """Return everything that was written in an epoch: (number of the seed task, Written)."""
    return [text for step in recording.steps if step.at == t for text in step.texts]


# ---------------------------------------------------------------------------------------------
# one run, fact by fact


def test_options_reach_the_sampler_and_both_updates(recording):
    """Otherwise a run would use settings that differ from its config.json."""
    run, seed, sampled = recording.run, 3 * OPTIONS["seed"], set()
    for call in of(recording.calls, "Policy.sample"):
        limits = call.G, call.max_new_tokens, call.temperature, call.max_rows
        sampled.add((call.adapter, *limits, call.generator.initial_seed()))
    assert sampled == {
        ("env", 3, 9, 0.7, 41, seed + 1), ("agent", G, 10, 0.7, 41, seed + 1),
        ("agent", 2, 10, 0.7, 41, seed + 2), ("agent", 1, 10, 0.0, 41, seed + 2)}
    optimizers = {"grpo_update": run.agent_optimizer, "rwr_update": run.env_optimizer}
    for name, optimizer in optimizers.items():
        for call in of(recording.calls, name):
            assert (call.o, call.optimizer, call.generator) == (run.o, optimizer, run.rng)
    assert run.agent_optimizer.param_groups[0]["lr"] == 0.013
    assert run.env_optimizer.param_groups[0]["lr"] == 0.017
    assert run.policy.params["env"][0].shape[0] == 3  # the rank


def test_the_simulator_writes_again_for_what_is_missing(recording):
    """Otherwise a batch would be short or hold a task twice, or texts would be written in vain."""
    for step in recording.steps:
        batch = []
        for call in step.reads:
            missing = BATCH - len(batch)
            assert len(call.seed_tasks) == math.ceil(missing / 3) and call.batch == batch
            tasks = [w.task for w in call.result if w.task]
            seed_ids = [call.seed_tasks[w.rollout.group].id for w in call.result if w.task]
            assert [(task.seed_task, task.epoch) for task in tasks] == [
                (seed_id, step.at) for seed_id in seed_ids]
            batch += tasks[:missing]


def test_seed_tasks_are_of_the_base_or_were_measured_recently(recording):
    """Otherwise the simulator would vary stale tasks, or be shown outdated success rates."""
    run, measured = recording.run, {}
    samples = of(recording.calls, "Policy.sample")
    prompts = [call.prompts for call in samples if call.adapter == "env"]
    for step in recording.steps:
        # measured in this epoch or in the one before
        recent = {i: p_hat for i, (p_hat, at) in measured.items() if step.at - at <= 1}
        for call in step.seeds:
            assert (call.base_share, call.selection) == (0.4, "curated")
            assert call.alpha == pytest.approx(run.history[step.at]["alpha"])
            assert all(recent[task.id] == p_hat for task, p_hat in call.recent)
            shown = [run.world.env_prompt(task, recent.get(task.id)) for task in call.result]
            assert prompts.pop(0) == [run.simulator.encode(prompt) for prompt in shown]
        measured |= {trial.task.id: (trial.p_hat, step.at) for trial in step.trials}


def test_a_batch_is_filled_up_from_d_train(recording):
    """Otherwise earlier curricula would be forgotten, or batches would differ in size."""
    train_pool, p_hats = recording.run.train_pool, {}
    d_train = {task.id for task in train_pool.base}
    for step in recording.steps:
        batch = [trial.task.id for trial in step.trials]
        new_tasks = [w.task.id for _, w in step.new_texts]
        n = len(new_tasks)
        assert batch[:n] == new_tasks and d_train.issuperset(batch[n:])
        # 12 and an eighth of 12, rounded, however many are new
        assert len(batch) == (14 if step.at else n)
        for trial in step.trials:
            # a new task enters with its first valid attempt
            if trial.task.id in d_train or any(e.valid for e in trial.traces):
                d_train.add(trial.task.id)
                p_hats[trial.task.id] = trial.p_hat, step.at
    for call in of(recording.calls, "TrainPool.sample"):
        assert (call.base_share, call.generator) == (0.4, recording.run.rng)
    assert train_pool.tasks.keys() == d_train and train_pool.p_hat == p_hats
    assert not d_train.issuperset(w.task.id for step in recording.steps for _, w in step.new_texts)


def test_an_attempt_is_scored_with_its_own_task(recording):
    """Otherwise p_hat would count another task's attempts, or rewards other than Eq. 1."""
    for step in recording.steps:
        play = step.play
        scores = [attempt_score(play.world, play.tasks[rollout.group], rollout, text)
                  for rollout, text in zip(*play.result)]
        for i, trial in enumerate(step.trials):
            mine = scores[i * G:i * G + G]
            assert [(e.reward, e.valid, e.graded) for e in trial.traces] == mine
            assert trial.p_hat == mean(reward >= 0.5 for reward, _, _ in mine)
            assert trial.task == play.tasks[i]


def test_grpo_learns_from_its_own_rollouts_and_the_reward_of_the_option(recording):
    """Otherwise a group would get another group's rewards, or Eq. 1 instead of --agent-reward."""
    steps = [step for step in recording.steps if step.at]
    for step, update in zip(steps, of(recording.calls, "grpo_update"), strict=True):
        assert update.rollouts == step.play.result[0]
        assert not any(trial.rollouts for trial in step.trials)  # nothing can learn from them again
        graded = [[e.graded for e in trial.traces] for trial in step.trials]
        torch.testing.assert_close(update.rewards, torch.tensor(graded))


def test_d_env_knows_how_often_each_task_was_solved(recording):
    """Otherwise RWR would weight a text by the success rate of another task, seed task or step."""
    records = iter(recording.run.env_pool.records)
    for step in recording.steps[1:]:  # texts of epoch 0 do not enter D_env
        p_hats = {trial.task.id: trial.p_hat for trial in step.trials}
        batch = [next(records) for _ in step.new_texts]
        for r, (seed, w) in zip(batch, step.new_texts):
            assert (r.prompt, r.response) == (w.rollout.prompt, w.rollout.response)
            assert (r.text, r.task_id, r.keys) == (w.text, w.task.id, [w.task.id])
            assert (r.group, r.epoch) == (seed, step.at)
            assert r.p_hat == p_hats[w.task.id]
            assert r.p_hat_seed == mean(x.p_hat for x in batch if x.group == r.group)
            assert r.p_hat_batch == mean(x.p_hat for x in batch)
    assert not list(records)


def test_rwr_learns_from_the_band_of_this_epoch_and_of_d_env(recording):
    """Otherwise the simulator would imitate tasks that are outside the band or too old, or one task
    twice."""
    d_env, updates = recording.run.env_pool.records, of(recording.calls, "rwr_update")
    for figures, update in zip(recording.run.history[1:], updates, strict=True):
        t, alpha = figures["epoch"], figures["alpha"]
        fresh = distinct([r for r in d_env if r.epoch == t])
        again = {r.task_id for r in fresh}
        old = distinct([r for r in d_env if 1 <= t - r.epoch <= 2])
        old = [r for r in old if r.task_id not in again]
        for records, learned in ((fresh, update.fresh), (old, update.old)):
            near = [r for r in records if in_band(r.p_hat_seed, alpha, 0.2)]
            assert [(r.epoch, r.task_id) for r in learned] == [(r.epoch, r.task_id) for r in near]
            for r in learned:
                R_env = 0.5 * math.exp(-5 * (r.p_hat_seed - alpha) ** 2)
                assert r.r_env == pytest.approx(R_env, abs=1e-5)
        assert figures["env_kept"] == len(update.fresh)
    assert [r["alpha"] for r in recording.run.history] == [0.35, 0.35, 0.45, 0.55, 0.65]
    assert update.old


def test_the_kl_sample_is_of_all_that_was_written_valid_or_not(recording):
    """Otherwise a drift towards invalid texts would cost nothing."""
    junk = []
    for t, update in enumerate(of(recording.calls, "rwr_update"), 1):
        drawn = {r.group for r in update.kl_sample}
        texts = [(group, w) for group, w in texts_of(recording, t) if group in drawn]
        assert len(drawn) == 5
        assert [(r.group, r.response) for r in update.kl_sample] == [
            (group, w.rollout.response) for group, w in texts]
        junk += [w.text for _, w in texts if w.task is None]
    assert junk


def test_held_out_tasks_are_known_to_what_checks_texts(recording):
    """Otherwise validation would measure tasks that were trained on."""
    world = recording.run.world
    tasks = world.validation_tasks() + world.validation_tasks("tuning")
    for call in of(recording.calls, "read_written"):
        assert call.held_out == {task.id for task in tasks}


def test_an_epoch_is_recorded_as_it_went(recording):
    """Otherwise curves, schedules and warnings would rest on the wrong texts or attempts."""
    for t, figures in enumerate(recording.run.history):
        steps = [step for step in recording.steps if step.at == t]
        rollouts = [r for step in steps for r in step.play.result[0]]
        entropy = -sum(sum(r.logps) for r in rollouts) / sum(r.tokens for r in rollouts)
        assert figures["entropy"] == pytest.approx(entropy, abs=1e-6)
        reasons = [w.reason for _, w in texts_of(recording, t)]
        assert figures["written"] == len(reasons)
        assert figures["invalid"] == {x: reasons.count(x) for x in reasons if x}
    assert [r["validated"] for r in recording.run.history] == [0, 0, 0, 3, 4]
    # a refused text is shown beside its own seed task
    refused = []
    for read in of(recording.calls, "read_written"):
        refused += [(read.seed_tasks[w.rollout.group], w.text) for w in read.result if not w.task]
    assert [(c.seed_task, c.text) for c in of(recording.calls, "note_refused")] == refused


# ---------------------------------------------------------------------------------------------
# other runs


@pytest.mark.parametrize("variant, origins", [
    ("random", {"env"}), ("static", {"static"}), ("teacher", {"teacher"}), ("base", set())])
def test_variants_do_not_train_the_simulator(variant, origins, model, tmp_path):
    """Otherwise an ablation would train its simulator, or try tasks of the wrong origin."""
    path = tmp_path / "teacher.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{i} s1 cube"}) for i in range(10)))
    options = {"variant": variant, "epochs": 1}
    if variant == "teacher":
        options["teacher_tasks"] = str(path)
    calls, run = recorded_run(model, tmp_path / "r", **options)
    assert run.history[1]["env_steps"] is run.history[1]["env_kl"] is None
    assert not of(calls, "rwr_update") and not run.policy.params["env"][1].any()
    tried = [trial.task.origin for step in steps_of(calls) for trial in step.trials]
    assert set(tried) - {"base"} == origins
    # more than the few tasks that are replayed
    assert len(tried) - tried.count("base") > 12 or variant == "base"


def test_a_task_is_imitated_in_one_epoch_only_where_its_world_says_so(
        model, tmp_path, monkeypatch):
    """Otherwise the simulator would imitate a few favourites for ever, or again after a resume."""
    monkeypatch.setattr(World, "imitate_once", True)
    imitated = []
    for epochs in (1, 3):
        calls, _ = recorded_run(
            model, tmp_path / "r", epochs=epochs, resume=epochs == 3, alpha_schedule="constant",
            k_min=0.5)
        for update in of(calls, "rwr_update"):
            records = update.fresh + update.old
            imitated.append({records[i].task_id for i in update.result["env_imitated"]})
    assert all(imitated) and sum(map(len, imitated)) == len(set.union(*imitated))


def test_only_records_of_steps_that_were_taken_are_used_up(monkeypatch, recording):
    """Otherwise a task whose step the cap has undone would never be imitated."""
    monkeypatch.setattr(genenv, "rwr_update", lambda *arguments: {"env_imitated": [0, 3]})
    run, records = copy.copy(recording.run), recording.run.env_pool.records[:4]
    run.world, run.state.imitated = SimpleNamespace(imitate_once=True), []
    genenv.update_environment(run, records[:2], records[2:])
    assert run.state.imitated == records[0].keys + records[3].keys


def test_schedules_see_how_the_run_goes(monkeypatch):
    """Otherwise schedules would steer by the wrong epoch, such as one without new tasks."""
    monkeypatch.setattr(curriculum, "next_alpha", lambda schedule, context: context)
    figures = "alpha", "distinct_tasks", "success_rate", "mixed_share", "solved"
    rows = (0.1, 0, None, None, None), (0.2, 8, 0.3, 0.4, 0.5), (0.6, 0, None, None, None)
    history = [dict(zip(figures, row), unsolved=0.7, mixed_of_possible=row[0]) for row in rows]

    def context_of(epoch):
        return alpha_of(SimpleNamespace(
            o=Options(**OPTIONS), history=history[:epoch], state=EpochState(epoch)))

    assert context_of(0) == 0.35
    assert context_of(1) == curriculum.Context(1, EPOCHS, 0.35, 0.65, 0.1, 0)
    assert context_of(3) == curriculum.Context(
        3, EPOCHS, 0.35, 0.65, 0.6, 0, 0.3, 0.4, 0.5, 0.7, 0.2)


def test_what_an_epoch_did_not_measure_is_null(model, tmp_path, monkeypatch):
    """Otherwise 0 would pass for a measurement, for example that of a sampler without mismatch."""
    # no group is mixed, and no task is in the band
    monkeypatch.setattr(interaction, "attempt_score", lambda *attempt: (0.0, True, 0.0))
    options = "--preset", "tiny", "--threads", "1", "--model", model, "--out", str(tmp_path / "r")
    assert genenv.main(options) == 0
    untrained, *trained = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert untrained["env_steps"] is untrained["kl"] is None
    for figures in trained:
        unknown = {key for key, value in figures.items() if value is None}
        assert unknown == {"kl", "clip_fraction", "grad_norm", "mismatch", "env_kl_step",
                           "env_weight_ratio", "mixed_of_possible"}


def test_figures_of_updates_are_means_over_those_that_measured():
    """Otherwise an update without a mixed group would halve the mean of its epoch."""
    nothing = {**grpo_update(None, "agent", None, [], torch.ones(0, 3), None), "reward": None}
    state = EpochState(agent=[nothing, dict.fromkeys(nothing, 0.04)])
    figures = agent_figures(SimpleNamespace(state=state, o=Options()))
    assert figures["mismatch"] == figures["kl"] == figures["grad_norm"] == 0.04
    assert figures["skipped_steps"] == 0.04  # a sum

"""The whole loop of the tool-call world on a 4-bit chat model, by the documented command.

Run: python -m pytest tests/test_tool_loop.py -q

First with a random model, which writes no task at all; then with both roles scripted: what the
simulator and the agent say is given, so every count in metrics.jsonl is known beforehand, while
ids, pools, losses, updates, checkpoints and files are the real ones.
"""
import json
import os
import re
import shutil
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from commands import export
from common.files import append_jsonl, read_jsonl
import genenv
from helpers import noisy
from models.loading import model_config
from policy import Policy, Rollout, by_group
from run import memory
from helpers import one_line, same_run
from test_tool_calls import said
from watch import report
from worlds import tool_calls as world

SMALL = ["--threads", "1", "--device", "cpu", "--rank", "4", "--seed-tasks", "2", "--G", "2",
         "--val-samples", "1", "--env-updates", "2", "--env-kl-sample", "8",
         "--write-rounds", "1", "--env-passes", "0"]  # each text of the script is read once
FILES = ["config.json", "metrics.jsonl", "samples.jsonl", "train.jsonl", "memory.json",
         "report.html", "figures/validation.png", "figures/success_rate.png",
         *(f"adapters/{name}/adapter_{part}" for name in ("agent", "env")
           for part in ("config.json", "model.safetensors"))]


# ---------------------------------------------------------------------------------------------
# tasks: small ones, as every byte is a token here


TOOL = {"name": "dim", "description": "Dim a lamp.", "parameters": {
    "type": "object", "properties": {"lamp": {"type": "integer", "minimum": 0}},
    "required": ["lamp"]}}


def calls_record(n, text="Please dim lamp {} for me.", tool=TOOL, **arguments):
    """A task of the calls kind about lamp n."""
    call = {"name": "dim", "arguments": arguments or {"lamp": n}}
    return {"task": text.format(n), "tools": [tool], "calls": [call]}


def defaults_record(n):
    """A task of the calls kind that an empty call solves."""
    lamp = {**TOOL["parameters"]["properties"]["lamp"], "default": n}
    return calls_record(n, tool={**TOOL, "parameters": {"type": "object",
                                                        "properties": {"lamp": lamp}}})


def answer_record(n):
    """A free-form task about pupil n."""
    return {"task": f"What is the name of pupil number {n}?", "reference": f"name{n}"}


def right_answer(record):
    """What a perfect agent replies."""
    return said(*record["calls"]) if "calls" in record else record["reference"]


BASE = [calls_record(n) for n in range(9)] + [answer_record(n) for n in range(3)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """BASE as the file of --base-tasks."""
    path = tmp_path_factory.mktemp("tasks") / "base.jsonl"
    append_jsonl(path, BASE)
    return str(path)


@pytest.fixture
def no_figures(monkeypatch):
    """They are the slow part of a small run, and drawn in two of them."""
    monkeypatch.setattr(report, "write", lambda folder: None)


def command(model, tasks, out, *more):
    """python genenv.py --preset 7b-24gb --model DIR --base-tasks FILE, made small -> exit code."""
    return genenv.main(["--preset", "7b-24gb", "--model", model, "--base-tasks", tasks, "--out",
                        str(out), *SMALL, *more])


# ---------------------------------------------------------------------------------------------
# a random model: the real sampler, and not one valid task


SILENT = ["--no-gate", "--steps", "1", "--variations", "2", "--max-task-tokens", "64",
        "--max-response-tokens", "32"]


def test_a_run_where_tools_answer(model, tmp_path, no_figures, capsys, monkeypatch):
    """Single answers and episodes side by side in one batch: the loop takes both."""
    noisy(monkeypatch, 0.4)
    from test_call_text import ANSWERING
    append_jsonl(tmp_path / "base.jsonl", [*ANSWERING, *BASE[:4]])
    assert command(model, str(tmp_path / "base.jsonl"), tmp_path / "r", "--epochs", "1", *SILENT,
                   "--replay", "4", "--max-episode-tokens", "64") == 0
    record = read_jsonl(tmp_path / "r" / "metrics.jsonl")[-1]
    assert record["epoch"] == 1 and record["agent_moved"] > 0
    kept = read_jsonl(tmp_path / "r" / "train.jsonl")
    assert {"results" in r["task"]["spec"] for r in kept} == {True, False}


def test_a_model_that_writes_no_task_runs_to_the_end(model, tasks, tmp_path, capsys):
    """Base tasks fill the batch, every epoch warns, memory is told before and after."""
    assert command(model, tasks, tmp_path / "r", "--epochs", "2", *SILENT) == 0
    out, err = capsys.readouterr()
    assert not err
    for name in FILES + ["env.jsonl"]:
        assert (tmp_path / "r" / name).is_file(), name
    records = read_jsonl(tmp_path / "r" / "metrics.jsonl")
    assert [r["epoch"] for r in records] == [0, 1, 2]
    for r in records:
        assert r["written"] == 4 == sum(r["invalid"].values()) and not r["distinct_tasks"]
        assert any("--max-task-tokens" in w or "no task" in w for w in r["warnings"]), r
    # 4 written and round(4 / 8) replayed make a batch of 4, all of it base tasks
    assert all(r["task"]["origin"] == "base" for r in read_jsonl(tmp_path / "r" / "train.jsonl"))
    before, after = out.index("memory estimate"), out.index("peak memory")
    assert before < out.index("epoch   0") < out.index("epoch   2") < after
    peaks = json.loads((tmp_path / "r" / "memory.json").read_text())
    assert set(peaks) == {"simulator rollouts", "agent rollouts", "agent update (GRPO)",
                          "simulator update (RWR)", "validation"}
    assert all(f"{phase} {size / 1e9:.2f} GB" in out[after:] for phase, size in peaks.items())
    o = SimpleNamespace(**json.loads((tmp_path / "r" / "config.json").read_text()))
    assert (o.world, o.quant, o.alpha, o.k_min, o.lam) == ("tool_calls", "nf4", 0.5, 0.1, 1.0)
    assert set(memory.estimate(model_config(model), o)) == {*peaks, "always"}


def test_the_gate_stops_where_nothing_can_be_learned(model, tasks, tmp_path, no_figures, capsys):
    """One paragraph with the way out; followed, the run goes on from where it stood."""
    out = str(tmp_path / "r")
    one_line(capsys, command(model, tasks, out, "--epochs", "1", *SILENT[1:]), "warm-start")
    assert len(read_jsonl(tmp_path / "r" / "metrics.jsonl")) == 1
    assert genenv.main(["--no-gate", "--resume", "--out", out]) == 0
    assert [r["epoch"] for r in read_jsonl(tmp_path / "r" / "metrics.jsonl")] == [0, 1]


# ---------------------------------------------------------------------------------------------
# both roles scripted


VALID = ("half", "half", "all")  # share of the agent's attempts that are right
CASES = ["half", "duplicate in the batch", "no JSON object", "malformed task", "all",
         "trivial text", "tool schema", "held-out task",
         "unknown tool", "wrong arguments", "half", "answer leaked", "copy of the seed",
         "other kind than the seed", "truncated", "prompt too long", "special tokens",
         "nothing to answer"]  # 9 variations of 2 seeds


def written(case, seed, n, before):
    """(text of the simulator, the reason to count it under, empty if it is a valid task)."""
    calls = "calls" in seed
    record = calls_record(n) if calls else answer_record(n)
    held = [t for split in ("validation", "tuning") for t in SPLITS[split]
            if world.structured(t) == calls]
    texts = {
        "duplicate in the batch": before, "no JSON object": "I would rather not.",
        "malformed task": json.dumps({**record, "difficulty": "hard"}),
        "trivial text": json.dumps({**record, "task": "Go on."}),
        "tool schema": json.dumps(calls_record(n, tool={**TOOL, "parameters": {"type": "dict"}})),
        "held-out task": json.dumps({"task": "In other words.", **held[0].spec}) if calls else
        json.dumps({"task": held[0].text, "reference": "name"}),
        "unknown tool": json.dumps(calls_record(n, tool={**TOOL, "name": "dusk"})),
        "wrong arguments": json.dumps(calls_record(n, lamp=-n - 1)),
        "answer leaked": json.dumps(calls_record(n, 'Use {{"lamp": {}}} for it.')),
        "special tokens": json.dumps({**record, "task": f"Number {n}: @"}).replace(
            "@", "\\u003c|im_end|>"),
        "nothing to answer": json.dumps(defaults_record(n)) if calls else
        json.dumps({"task": f"Is name{n} the name of pupil {n}?", "reference": f"name{n}"}),
        "copy of the seed": json.dumps(seed),
        "other kind than the seed": json.dumps(answer_record(n) if calls else calls_record(n)),
        "truncated": json.dumps(record),
        "prompt too long": json.dumps({**record, "task": f"Number {n}: " + 2600 * "x"}),
    }
    reason = "" if case in VALID else case
    if case == "answer leaked" and not calls:  # it is a calls task
        reason = "other kind than the seed"
    if case == "nothing to answer" and not calls:  # a question is said to leak
        reason = "answer leaked"
    return texts.get(case, json.dumps(record)), reason


SPLITS = {}


class Script:
    """In place of Policy.sample: what both players say, and how often, is known beforehand.

    Numbers come from the run's own generator, so a resumed run that had lost its state would write
    other tasks. known: {task text: (right answer, share of right attempts)}; invalid: one Counter
    of reasons per call of the simulator, valid: the texts of its valid tasks likewise.
    """

    def __init__(self, agreement=0):
        self.agreement, self.invalid, self.valid = agreement, [], []
        self.known = {r["task"]: (right_answer(r), "half") for r in BASE}
        self.records = {}

    def __call__(self, policy, adapter, prompts, G=1, max_new_tokens=64, temperature=1.0,
                 generator=None, max_rows=256):
        seeds = [self.seed_of(policy.decode(p)) for p in prompts]
        players = {("env", True): self.write, ("env", False): self.solve_own,
                   ("agent", False): self.attempt}
        texts = players[adapter, seeds[0] is not None](
            seeds if seeds[0] else [policy.decode(p) for p in prompts], G, generator)
        return [self.rollout(policy, i // G, prompts[i // G], text) for i, text in enumerate(texts)]

    def rollout(self, policy, group, prompt, text):
        ids = policy.tokenizer.encode(text.removesuffix(" CUT"), add_special_tokens=False)
        cut = text.endswith(" CUT")
        ids = ids if cut else ids + policy.eos_ids[:1]
        return Rollout(group, list(prompt), ids, [0.0] * len(ids), "cut" * cut)

    @staticmethod
    def seed_of(prompt):
        """The record of the seed in a prompt for the simulator; None in one for the agent."""
        found = re.search(r"The task:\n(.*)\n\nThe assistant", prompt)
        return json.loads(found[1]) if found else None

    @staticmethod
    def task_of(prompt):
        return re.search(r"user\n(.*)\n", prompt)[1]

    def write(self, seeds, variations, generator):
        out, invalid, valid = [], Counter(), []
        for i in range(len(seeds) * variations):
            case, seed = CASES[i % len(CASES)], seeds[i // variations]
            n = 100 + int(torch.randint(10 ** 6, (), generator=generator))
            text, reason = written(case, seed, n, out[-1] if out else "")
            out.append(text + (" CUT" if case == "truncated" else ""))
            if reason:
                invalid[reason] += 1
                continue
            record = json.loads(text)
            self.known[record["task"]] = (right_answer(record), case)
            if self.agreement and n % 2:  # the simulator cannot solve every other task of its own
                invalid["no agreement"] += 1
            else:
                valid.append(text)
        self.invalid.append(invalid)
        self.valid.append(valid)
        return out

    def solve_own(self, prompts, tries, generator):
        """Its own tasks with an even number are solved in the last try."""
        out = []
        for task in map(self.task_of, prompts):
            n = int(re.search(r"\d+", task)[0])
            out += ["no idea"] * (tries - 1) + ["no idea" if n % 2 else self.known[task][0]]
        return out

    def attempt(self, prompts, G, generator):
        """Half of the attempts are right, or all; held-out tasks are never solved."""
        out, held = [], {t.text for split in ("validation", "tuning") for t in SPLITS[split]}
        for task in map(self.task_of, prompts):
            right, share = self.known[task]
            n_right = 0 if task in held else G if share == "all" else G // 2
            out += [right] * n_right + ["no idea " + "at all " * g for g in range(G - n_right)]
        return out


class Watch:
    """Around both updates: what they train on, which parameters they move, the policy itself."""

    def __init__(self, monkeypatch):
        self.policy, self.base, self.agent_groups, self.env_records = None, None, [], []
        self.moved = []  # (adapter updated, adapters that moved, whether anything was to learn)
        for name in ("grpo_update", "rwr_update"):
            monkeypatch.setattr(genenv, name, self.around(getattr(genenv, name)))

    def around(self, update):
        def watched(policy, adapter, optimizer, first, second, *rest, **options):
            if self.policy is not policy:
                self.policy, self.base = policy, frozen(policy)
            before = {k: [p.detach().clone() for p in ps] for k, ps in policy.params.items()}
            stats = update(policy, adapter, optimizer, first, second, *rest, **options)
            after = [k for k, ps in policy.params.items()
                     if not all(map(torch.equal, before[k], ps))]
            self.moved.append((adapter, after, bool(first)))
            {"agent": self.agent_groups, "env": self.env_records}[adapter].extend(by_group(first))
            return stats
        return watched


def frozen(policy) -> dict:
    """Copies of every weight of the base."""
    return {n: p.detach().clone() for n, p in policy.model.named_parameters() if "lora_" not in n}


STEPS = ["--steps", "2", "--variations", "9", "--max-response-tokens", "64",
         "--max-prompt-tokens", "2600", "--env-updates", "1"]


def scripted(monkeypatch, model, tasks, out, *more, agreement=0):
    """Run with the script in place -> (exit code, script, watch)."""
    SPLITS.update(world._splits(tasks, ""))
    script = Script(agreement)
    monkeypatch.setattr(Policy, "sample", lambda policy, *a, **k: script(policy, *a, **k))
    watch = Watch(monkeypatch)
    code = command(model, tasks, out, *STEPS, "--agreement", str(agreement), *more)
    return code, script, watch


@pytest.fixture(scope="module")
def done(model, tasks, tmp_path_factory):
    """An undisturbed scripted run of two epochs: folder, script, watch."""
    out = tmp_path_factory.mktemp("runs") / "two"
    with pytest.MonkeyPatch.context() as patch:
        code, script, watch = scripted(patch, model, tasks, out, "--epochs", "2")
    assert code == 0
    return SimpleNamespace(out=out, script=script, watch=watch)


def epochs_of(calls, steps=2):
    """Per-call lists of a script as epochs: epoch 0 is one call, each other one `steps`."""
    return [calls[:1]] + [calls[i:i + steps] for i in range(1, len(calls), steps)]


def test_every_generation_is_counted_under_its_reason(done):
    """Valid, duplicate, copied, cut off, held-out and every kind of broken: exact counts."""
    records, train = (read_jsonl(done.out / f"{name}.jsonl") for name in ("metrics", "train"))
    assert all((done.out / name).stat().st_size > 0 for name in FILES + ["env.jsonl"])
    invalid, valid = epochs_of(done.script.invalid), epochs_of(done.script.valid)
    assert len(records) == len(invalid) == 3
    assert {r for c in done.script.invalid for r in c} == set(CASES) - set(VALID)
    for r, reasons, texts in zip(records, invalid, valid):
        shares = [done.script.known[json.loads(t)["task"]][1] for call in texts for t in call]
        assert r["written"] == 18 * len(texts) and r["invalid"] == sum(reasons, Counter())
        assert r["distinct_tasks"] == len(shares) == 3 * len(texts)
        # half, half, all; a task that is replayed in the epoch that wrote it counts once
        tried = [done.script.known[x["task"]["text"]][1] for x in train
                 if x["epoch"] == r["epoch"] == x["task"]["epoch"] and x["task"]["origin"] == "env"]
        assert Counter(tried) >= Counter(shares) == Counter(VALID * len(texts))
        assert r["success_rate"] == pytest.approx(
            sum({"half": 0.5, "all": 1.0}[share] for share in shares) / len(shares), abs=1e-6)
        assert r["env_kept"] == (shares.count("half") if r["epoch"] else 0)
    assert [r["d_env"] for r in records] == [0, 6, 12]


def test_pools_hold_the_valid_tasks_and_nothing_else(done):
    """D_train has each with its traces, D_env each with the text and the p_hat it turned out to."""
    kept = [r for r in read_jsonl(done.out / "train.jsonl") if r["task"]["origin"] == "env"]
    texts = [t for call in done.script.valid for t in call]
    assert {r["task"]["text"] for r in kept} == {json.loads(t)["task"] for t in texts}
    for r in kept:
        share = done.script.known[r["task"]["text"]][1]
        assert r["p_hat"] == {"half": 0.5, "all": 1.0}[share]
        assert len(r["traces"]) and all(trace["valid"] for trace in r["traces"])
    records = read_jsonl(done.out / "env.jsonl")
    assert [r["text"] for r in records] == texts[3:]  # epoch 0 is a rehearsal
    decode = done.watch.policy.decode
    assert all(decode(r["response"]) == r["text"] for r in records)
    assert all(Script.seed_of(decode(r["prompt"])) for r in records)


def test_only_valid_tasks_reach_either_update(done):
    """The agent sees base tasks and valid ones; the simulator imitates those in the band."""
    valid = {json.loads(t)["task"] for call in done.script.valid for t in call}
    decode = done.watch.policy.decode
    seen = [Script.task_of(decode(r.prompt)) for r, *_ in done.watch.agent_groups]
    assert len(seen) == 4 * 20  # 18 written and a replay of an eighth, in each of four steps
    assert set(seen) <= valid | {r["task"] for r in BASE} and set(seen) & valid
    held = {t.text for split in ("validation", "tuning") for t in SPLITS[split]}
    assert held and not set(seen) & held
    filed = {r["text"]: r for r in read_jsonl(done.out / "env.jsonl")}
    assert done.watch.env_records
    for r, in done.watch.env_records:
        text = decode(r.response)
        assert json.loads(text)["task"] in valid
        assert (filed[text]["p_hat"], filed[text]["r_env"]) == (0.5, 1.0)


def test_only_the_named_adapter_moves_and_the_base_never(done):
    """Two policies in one model must not touch each other."""
    assert done.watch.moved == 2 * [("agent", ["agent"], True), ("agent", ["agent"], True),
                                    ("env", ["env"], True)]
    after = frozen(done.watch.policy)
    assert any(p.dtype == torch.uint8 for p in after.values())  # it is a 4-bit base
    assert after.keys() == done.watch.base.keys()
    assert all(torch.equal(p, done.watch.base[n]) for n, p in after.items())


def test_stopped_in_mid_epoch_it_resumes_to_the_same_run(done, model, tasks, tmp_path, no_figures,
                                                         monkeypatch):
    """Ctrl-C in the first step of epoch 2: metrics, pools and adapters agree to the bit."""
    real, steps = genenv.interact, []

    def interact(run, batch):
        steps.append(1)
        if len(steps) == 4:  # one in epoch 0, two in epoch 1
            os.kill(os.getpid(), signal.SIGINT)
        return real(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(genenv, "interact", interact)
        code, script, _ = scripted(patch, model, tasks, tmp_path / "r", "--epochs", "2")
    assert code == 128 + signal.SIGINT and len(steps) == 4
    monkeypatch.setattr(Policy, "sample", lambda policy, *a, **k: script(policy, *a, **k))
    assert genenv.main(["--resume", "--out", str(tmp_path / "r")]) == 0
    assert len(script.valid) == 5  # nothing was written twice
    same_run(done.out, tmp_path / "r")


def test_agreement_keeps_only_what_the_simulator_can_solve(model, tasks, tmp_path, no_figures,
                                                           monkeypatch):
    """--agreement 2: one right try of two is enough, none is a reason of its own."""
    code, script, watch = scripted(monkeypatch, model, tasks, tmp_path / "r", "--epochs", "1",
                                   "--seed", "1", agreement=2)
    assert code == 0
    dropped = 0
    for r, reasons, texts in zip(read_jsonl(tmp_path / "r" / "metrics.jsonl"),
                                 epochs_of(script.invalid), epochs_of(script.valid)):
        expected = sum(reasons, Counter())
        dropped += expected["no agreement"]
        assert {k: n for k, n in r["invalid"].items() if n} == dict(expected)
        assert r["distinct_tasks"] == sum(map(len, texts))
    assert 0 < dropped < 9
    numbers = [int(re.search(r"\d+", json.loads(watch.policy.decode(r.response))["task"])[0])
               for r, in watch.env_records]
    assert all(n % 2 == 0 for n in numbers)
    assert "agreement check" in json.loads((tmp_path / "r" / "memory.json").read_text())


# ---------------------------------------------------------------------------------------------
# what a user takes away


def test_the_run_exports_to_verl_and_back(done, tmp_path):
    """Every task of D_train, and a reward function that gives each right answer 1."""
    out = tmp_path / "tasks.jsonl"
    assert genenv.main(["export", str(done.out), "--format", "verl", "--out", str(out)]) == 0
    records = read_jsonl(out)
    tried = {r["task"]["id"]: r for r in read_jsonl(done.out / "train.jsonl")}
    base = {t.id for t in SPLITS["base"]}
    assert {r["extra_info"]["id"] for r in records} == base | set(tried)
    assert len(records) == len(base | set(tried))
    for r in records:
        right, _ = done.script.known[r["prompt"][-1]["content"]]
        score = [export.compute_score(r["data_source"], answer, r["reward_model"]["ground_truth"])
                 for answer in (right, "no idea")]
        assert score == [1.0, 0.0]
        last = tried.get(r["extra_info"]["id"], {"p_hat": -1.0})
        assert r["extra_info"]["p_hat"] == last["p_hat"]


# ---------------------------------------------------------------------------------------------
# models that cannot work: one line, exit code 2, no run folder


def without(*names):
    """A fault: these files are missing."""
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def cut(name):
    """A fault: a file ends early, as after a broken download."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:2000])


def narrower(folder):
    """A fault: the weights are another model's."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))


FAULTS = {"no folder": (shutil.rmtree, "does not exist"),
          "no config": (without("config.json"), "has no config.json"),
          "damaged tokenizer": (cut("tokenizer.json"), "cannot load the model"),
          "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
          "no chat template": (without("chat_template.jinja"), "no chat template"),
          "no weights": (without("model.safetensors"), "no file named"),
          "damaged weights": (cut("model.safetensors"), "do not load"),
          "other weights": (narrower, "do not load")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_cannot_work_is_refused(fault, model, tasks, tmp_path, capsys):
    """Before anything is written."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    damage, word = FAULTS[fault]
    damage(folder)
    one_line(capsys, command(str(folder), tasks, tmp_path / "r"), word)
    assert not (tmp_path / "r").exists()


def test_too_little_memory_is_refused_with_the_options_to_lower(model, tasks, tmp_path, capsys,
                                                                monkeypatch):
    """The estimate is checked before the model is loaded."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 1e6)
    monkeypatch.setattr(Policy, "load", lambda *a, **k: pytest.fail("it was loaded"))
    code = command(model, tasks, tmp_path / "r")
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and not (tmp_path / "r").exists()
    assert "0.0 GB are free" in err and "a lower --max-rows (now 144)" in err

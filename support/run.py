"""A run: what it consists of, how it begins, how an epoch and the whole of it end.

What of the paper this is: nothing; it is the frame around Algorithm 1, which is in genenv.py.

How it is run: genenv.train calls `prepare_run`, then `end_epoch` after every epoch, then `finish`.

Where it differs on purpose: all that a run is lies in one dataclass that is handed to every step,
so that each step says what it reads; nothing is global.
"""
import json
import sys
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tqdm import tqdm

from support.files import UserError, append_jsonl, write_whole
import curriculum
from data_pool import EnvPool, TrainPool
from support.loading import check_adapter_folder, model_config, policy_options
from policy import Policy
from support import checkpoint, memory, options
from support import health, report, screen
from support import metrics as measure
from worlds import World, held_out_keys, load_world, open_policy, probe, read_teacher

SILENT_EPOCHS = 3  # so many without a single valid task, and a run gives up


@dataclass
class EpochState:
    """What has been done so far in an epoch; a checkpoint inside the epoch holds all of it."""
    epoch: int = 0               # t of Algorithm 1; 0 is the state before training
    step: int = 0                # agent updates made in it
    seconds: float = 0.0         # of training; validation not counted
    written: int = 0             # generations of the simulator, valid or not
    invalid: Counter = field(default_factory=Counter)  # {reason: how many of them were invalid}
    attempts: list = field(default_factory=list)       # (Task, p_hat, [Trace])
    replays: list = field(default_factory=list)        # (p_hat before, epochs ago, p_hat now)
    agent: list = field(default_factory=list)          # statistics of each grpo_update
    records: list = field(default_factory=list)        # EnvRecords of this epoch
    kl_sample: list = field(default_factory=list)      # [prompt, response] of all generations
    refused: list = field(default_factory=list)        # [seed task, text, reason], a few to read
    rollout_tokens: int = 0
    rollout_seconds: float = 0.0


@dataclass
class Run:
    """A run as it goes on: what it was told, what it works with, and how far it has come."""
    o: object                         # run.options.Options
    world: World                      # the domain, see worlds/__init__.py
    policy: Policy                    # the agent's: a frozen base, adapters "agent" and "env"
    simulator: Policy                 # the same one, or that of --env-model
    folder: Path                      # where everything is written
    agent_optimizer: torch.optim.Optimizer
    env_optimizer: torch.optim.Optimizer
    rng: torch.Generator              # choices of the loop
    sampler: torch.Generator          # tokens
    held_out: frozenset               # keys of validation and tuning tasks: never trained on
    train_pool: TrainPool = None      # D_train
    env_pool: EnvPool = None          # D_env
    state: EpochState = field(default_factory=EpochState)
    history: list = field(default_factory=list)  # metrics records of the epochs that are over
    last_success: float = 0.5         # success rate on generated tasks, last epoch
    teacher: list = field(default_factory=list)  # ready-made tasks of --variant teacher
    peaks: dict = field(default_factory=dict)    # {phase: peak memory in bytes}
    progress: bool = False            # a terminal, with room for bars
    clock: tuple | None = None        # (seconds, epoch) from which the time left is foreseen
    legend_shown: bool = False        # what the columns of an epoch's line are
    since: float = field(default_factory=time.perf_counter)  # until then state.seconds is counted
    stop: int | None = None           # number of the signal that asks the run to stop
    lock: object = None               # holds the folder against a second program
    sources: dict = field(default_factory=dict)  # {file given in an option: its hash}

    @contextmanager
    def phase(self, name, adapter=""):
        """`with run.phase("agent update (GRPO)", "agent") as moved`: record the phase's peak memory
        and, if an adapter is trained in it, how far that one and no other moved."""
        with measure.peak_memory(self.peaks, name, self.policy.device):
            with measure.movement(self.params, adapter) if adapter else nullcontext() as moved:
                yield moved

    @property
    def policies(self) -> list:
        """The simulator's, then the agent's if that is another one."""
        return [self.simulator, self.policy][:1 + (self.policy is not self.simulator)]

    @property
    def params(self) -> dict:
        """{adapter: its parameters}, of both players."""
        return {name: params for p in self.policies for name, params in p.params.items()}

    def count_seconds(self):
        """Bring state.seconds up to date."""
        now = time.perf_counter()
        self.state.seconds, self.since = self.state.seconds + now - self.since, now


def prepare_run(o) -> Run:
    """Folder, world, policy, pools, optimisers and generators of a run, resumed if asked."""
    torch.set_num_threads(options.threads_of(o))
    curriculum.try_weights(o)
    for name, path in policy_options(o)["adapter_paths"].items():
        if path:
            check_adapter_folder(path, name, o.rank)
    sources = checkpoint.hashes(o)  # before they are read
    world = load_world(o.world)(o)
    if o.model:
        of_simulator = model_config(o.env_model) if o.env_model else None
        print(memory.check(model_config(o.model), o, of_simulator), flush=True)
    folder = checkpoint.choose_folder(o)  # before the slow part; it is made after that
    lock = checkpoint.lock_folder(folder) if o.resume else None
    held_out = held_out_keys(world)
    teacher = read_teacher(world, o.teacher_tasks, held_out) if o.variant == "teacher" else []
    base, policy = world.base_tasks(), world.load_policy()
    simulator = open_policy(o.env_model, replace(o, model=o.env_model), ("env",)) if o.env_model else policy
    for player in {policy, simulator}:
        probe(world, player, teacher)
    if not o.resume:
        folder, lock = checkpoint.create_folder(folder, o)
    run = Run(
        o=o, world=world, policy=policy, simulator=simulator, folder=folder, held_out=held_out,
        progress=sys.stderr.isatty(), teacher=teacher, lock=lock, sources=sources,
        agent_optimizer=policy.optimizer("agent", o.agent_lr),
        env_optimizer=simulator.optimizer("env", o.env_lr),
        # three streams per --seed, and none shared with another --seed (measure.py has the third)
        rng=torch.Generator().manual_seed(3 * o.seed), sampler=policy.generator(3 * o.seed + 1))
    if o.resume:
        checkpoint.load(run)
    run.train_pool = TrainPool(folder / "train.jsonl", base)
    run.env_pool = EnvPool(folder / "env.jsonl")
    if o.resume:
        checkpoint.write_config(folder, o)  # --epochs or memory options may have changed
        run.clock = time.perf_counter(), run.state.epoch - 1
    say(run, f"epoch {run.state.epoch}: the agent tries tasks ...")
    return run


def say(run, what: str):
    """On a terminal: what is done now, in a line that the next one writes over."""
    if run.progress:
        print(f"\r{what:<70}\r", end="", file=sys.stderr, flush=True)


def context_of(run) -> curriculum.Context:
    """What an alpha schedule may look at."""
    o = run.o
    signal = tuple(tuple(row) for r in run.history[-4:] for row in r["replay_signal"])
    return curriculum.Context(run.state.epoch, o.epochs, run.last_success, o.alpha, o.alpha_end,
                              run.history[-1]["alpha"], signal)


def steps(run):
    """The steps of this epoch that are still to be done, with a bar on a terminal."""
    state = run.state
    bar = tqdm(range(state.step, run.o.steps), desc=f"epoch {state.epoch}", leave=False,
               disable=not run.progress)
    for step in bar:
        yield step
        bar.set_postfix(measure.postfix(state))
    say(run, f"epoch {state.epoch}: learning from its tasks ...")


def fixed_tasks(run) -> list:
    """No simulator: draw equally many ready-made tasks, base tasks among them."""
    tasks = list(run.train_pool.tasks.values())
    picks = torch.randperm(len(tasks), generator=run.rng)[:run.o.seed_tasks * run.o.variations]
    return [tasks[i] for i in picks.tolist()]


def note_refused(run, seed_task, text, reason):
    """Count an invalid generation; keep three texts of every reason for samples.jsonl."""
    run.state.invalid[reason] += 1
    if run.state.invalid[reason] <= 3:
        run.state.refused.append([seed_task.text, text[:2000], reason])


def end_epoch(run, env_stats, alpha):
    """Measure, print one line, put everything on disk, begin the next epoch: t <- t + 1."""
    run.count_seconds()
    say(run, f"epoch {run.state.epoch}: the agent tries held-out tasks ...")
    record = measure.epoch_record(run, env_stats, alpha)
    if record["distinct_tasks"]:
        run.last_success = record["success_rate"]
    looked, verdict = look_before(run, record) if record["epoch"] == 0 and run.o.epochs else ("", "")
    record |= {"gate": verdict} if verdict else {}
    run.history.append(record)
    append_jsonl(run.folder / "metrics.jsonl", [record])
    append_jsonl(run.folder / "samples.jsonl", measure.samples(run, alpha))
    say(run, "")
    if not run.legend_shown:
        print(screen.LEGEND)
        run.legend_shown = True
    print(screen.line(record, time_left(run), run.o.verbose), flush=True)
    silent = [r for r in run.history[-SILENT_EPOCHS:] if r["written"] and not r["distinct_tasks"]]
    if looked:
        print(looked, flush=True)
    run.state = EpochState(epoch=run.state.epoch + 1)
    checkpoint.save(run)
    run.since = time.perf_counter()  # validation and saving are no training
    say(run, f"epoch {run.state.epoch} begins ..." * (run.state.epoch <= run.o.epochs))
    if len(silent) == SILENT_EPOCHS and record["epoch"] < run.o.epochs:  # after the last: no use
        finish(run)
        raise UserError(f"the simulator wrote no valid task in {SILENT_EPOCHS} epochs running "
                        f"({record['invalid']}): stopped; everything so far is in {run.folder}")


def hold_at_gate(run):
    """Raises UserError where epoch 0 said that nothing can be learned, and nothing is trained yet."""
    verdict = run.history[0].get("gate")
    if verdict and run.o.gate and (run.state.epoch, run.state.step) == (1, 0):
        raise UserError(f"{verdict} Or: --no-gate --resume --out {run.folder}")


def time_left(run) -> float | None:
    """Seconds to the end of the run, by the pace of the epochs that this program has done; None
    before the first of them is done."""
    epoch, now = run.state.epoch, time.perf_counter()
    run.clock = run.clock or (now, epoch)
    started, first = run.clock
    return (now - started) / (epoch - first) * (run.o.epochs - epoch) if epoch > first else None


def look_before(run, record) -> tuple[str, str]:
    """(what the batch of epoch 0 holds, why nothing can be learned from it or "")."""
    attempts = run.state.attempts
    valid = record["written"] - sum(record["invalid"].values())
    return health.judge(record["written"], valid, [p for _, p, _ in attempts], run.o.G,
                        [[e.reward for e in traces] for _, _, traces in attempts],
                        own_model=not run.o.model)


def finish(run):
    """Adapters, figures, report and the closing words."""
    say(run, "")
    for policy, name in ((run.policy, "agent"), (run.simulator, "env")):
        policy.save_adapter(name, run.folder / "adapters" / name)
    if run.o.model:  # the embedded world's few MB are of no interest
        print(measure.peaks_line(run.peaks, run.policy.device))
        write_whole(run.folder / "memory.json", json.dumps(run.peaks, indent=1))
    print("drawing figures ...", flush=True)
    report.write(run.folder)
    print(screen.closing_words(run.folder))

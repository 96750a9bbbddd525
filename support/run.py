"""Hold a run, prepare it, and finish each epoch and the run itself.

Usage: genenv.py calls `prepare_run`, then `end_epoch` after every epoch, then `finish`. A single
dataclass, `Run`, holds everything and is passed to every step; there is no global state.
"""
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

import curriculum
from data_pool import EnvPool, TrainPool, append_jsonl
from errors import UserError, write_whole
from interaction import read_teacher
from policy import Policy
from model import memory
from support import checkpoint, metrics as measure, report, screen
from model.loading import model_config
from support.options import Options
from support.origin import code_versions, origin
from worlds import World, held_out_keys, open_policy
from worlds.probe import check_texts_survive, open_world

# the fields of an epoch's record that a schedule may use, see curriculum.Context
SEEN_BY_SCHEDULES = "success_rate", "mixed_share", "solved", "unsolved", "mixed_of_possible"


@dataclass
class EpochState:
    """Hold the progress of an epoch; a checkpoint within the epoch saves all of it."""
    # how far the epoch has come
    epoch: int = 0               # t of Algorithm 1; 0 is the state before training
    step: int = 0                # index of the current step; in a checkpoint, the steps completed
    # what the updates of Algorithm 1 work on
    trials: list = field(default_factory=list)         # Trials of the steps so far
    records: list = field(default_factory=list)        # EnvRecords of the steps so far
    env_rollouts: list = field(default_factory=list)   # the simulator's Rollouts, valid or not
    # keys of all tasks imitated since the run began; kept only if World.imitate_once is set
    imitated: list = field(default_factory=list)
    # what is needed only for the epoch's record
    agent: list = field(default_factory=list)          # statistics of each grpo_update
    agent_nats: float = 0.0      # sum of -log-prob, in nats, of all tokens that the agent sampled
    invalid: Counter = field(default_factory=Counter)  # {reason: number of generations refused}
    refused: list = field(default_factory=list)        # a refused text per reason (samples.jsonl)
    cpu_seconds: float = 0.0     # CPU time spent on training, excluding validation


@dataclass
class Run:
    """Hold a run: its options, what it works with, and its progress."""
    # what Algorithm 1 works with
    o: Options
    world: World                      # the domain, see worlds/__init__.py
    # the agent's: a frozen base with the adapters "agent" and "env"
    policy: Policy
    # normally the same object; with --env-model there are two, each with only its own adapter
    simulator: Policy
    folder: Path                      # where everything is written
    agent_optimizer: torch.optim.Optimizer
    env_optimizer: torch.optim.Optimizer
    rng: torch.Generator              # makes the random choices of the loop
    sampler: torch.Generator          # draws tokens
    held_out: frozenset               # keys of validation and tuning tasks: never trained on
    train_pool: TrainPool = None      # D_train
    env_pool: EnvPool = None          # D_env
    # its progress
    state: EpochState = field(default_factory=EpochState)
    history: list = field(default_factory=list)  # metrics records of completed epochs
    teacher: list = field(default_factory=list)  # ready-made tasks of --variant teacher
    # signals, locking, timing and provenance
    stop: int | None = None           # number of the signal that asked the run to stop
    lock: object = None               # keeps a second program out of the folder
    origin: dict = field(default_factory=dict)   # what the run began with, see support/origin.py
    ends: list = field(default_factory=list)     # times at which this process finished an epoch
    saved_at: float = field(default_factory=time.monotonic)  # time of the last checkpoint
    # the process time up to which CPU time has been counted
    cpu_start: float = field(default_factory=time.process_time)

    @property
    def policies(self) -> list:
        """Return the simulator's policy, then the agent's if it is a different one."""
        return list(dict.fromkeys((self.simulator, self.policy)))

    @property
    def params(self) -> dict:
        """Return {adapter: its parameters} for the agent's adapter and the simulator's."""
        return self.policy.params | self.simulator.params

    def count_seconds(self):
        """Bring state.cpu_seconds up to date."""
        now = time.process_time()
        self.state.cpu_seconds += now - self.cpu_start
        self.cpu_start = now


def prepare_run(o, world=None) -> Run:
    """Return a run, new or resumed, that is ready for its next epoch.

    Raise UserError for anything the user can fix; any folder created for the run is then removed.
    world: a world that is already open; if None, o.world is opened here.
    """
    torch.set_num_threads(o.threads or torch.get_num_threads())
    o = replace(o, code=code_versions(o))
    with checkpoint.claimed_folder(o) as (folder, lock):
        print(screen.banner(o, folder, torch.get_num_threads()), flush=True)
        run = build_run(o, world or open_world(o), folder)
        run.lock = lock
        if o.resume:
            checkpoint.load(run)
        # Write the options on resume, too, because some of them may change (MAY_CHANGE). `resume`
        # is saved as False, because the options in a config.json can also begin a new run.
        options = {**asdict(o), "resume": False}
        write_whole(folder / "config.json", json.dumps(options, indent=1))
    # read the pools only now, because checkpoint.load truncates their files
    run.train_pool = TrainPool(folder / "train.jsonl", run.world.base_tasks())
    run.env_pool = EnvPool(folder / "env.jsonl")
    return run


def build_run(o, world, folder) -> Run:
    """Return a run before its first epoch, without its pools. Nothing is written."""
    held_out = held_out_keys(world)
    teacher = []
    if o.teacher_tasks:
        teacher = read_teacher(world, o.teacher_tasks, held_out)
    policy, simulator = load_players(o, world, teacher)
    # each --seed has its own three random streams; metrics.py uses the third
    rng, sampler = torch.Generator().manual_seed(3 * o.seed), policy.generator(3 * o.seed + 1)
    return Run(
        o=o, world=world, policy=policy, simulator=simulator, folder=folder,
        held_out=held_out, teacher=teacher, origin=origin(o, policy), rng=rng, sampler=sampler,
        agent_optimizer=policy.optimizer("agent", o.agent_lr),
        env_optimizer=simulator.optimizer("env", o.env_lr))


def load_players(o, world, teacher) -> tuple[Policy, Policy]:
    """Return the agent's policy and the simulator's.

    Both are the same object, because the paper starts them from one model; only --env-model gives
    the simulator a separate one. Raise UserError for a model that does not fit in memory, or does
    not suit the world or its tasks.
    """
    if o.model and world.chat:
        memory.check([model_config(name) for name in (o.model, o.env_model) if name], o)
    elif o.quant:
        raise UserError(f"--quant {o.quant} needs a chat model, and this run of --world {o.world} "
                        "has none: name one with --model, or leave --quant out")
    policy = simulator = world.load_policy()
    if o.env_model:
        simulator = open_policy(o.env_model, replace(o, model=o.env_model), ("env",))
        policy.params.pop("env", None)  # a world may have given it both adapters
    for player in dict.fromkeys((policy, simulator)):  # once if they are the same object
        check_texts_survive(world, player, teacher)
    print(f"computing in {policy.lm.dtype} on {policy.device}", flush=True)
    return policy, simulator


def alpha_of(run) -> float:
    """Return this epoch's target success rate: --alpha in epoch 0, then what the schedule gives."""
    o, epoch = run.o, run.state.epoch
    if epoch == 0:
        return o.alpha
    # an epoch without new tasks measured nothing, so use the last epoch that had some
    measured = {}
    for record in run.history:
        if record["distinct_tasks"]:
            measured = {key: record[key] for key in SEEN_BY_SCHEDULES}
    previous = run.history[-1]
    context = curriculum.Context(
        epoch=epoch, epochs=o.epochs, alpha=o.alpha, alpha_end=o.alpha_end,
        previous=previous["alpha"], new_tasks=previous["distinct_tasks"], **measured)
    return curriculum.next_alpha(o.alpha_schedule, context)


def note_refused(run, seed_task, text, reason):
    """Count an invalid generation; keep the epoch's first one per reason for samples.jsonl."""
    run.state.invalid[reason] += 1
    if run.state.invalid[reason] == 1:
        run.state.refused.append({"epoch": run.state.epoch, "seed_task": seed_task.text,
                                  "refused": text[:2000], "reason": reason})


def end_epoch(run, env_stats, alpha):
    """Measure and print the epoch, save everything, and put the next epoch's state in run.state.

    Raise Stopped if a signal has asked the run to stop.
    """
    run.count_seconds()
    record = measure.epoch_record(run, env_stats, alpha)
    run.history.append(record)
    append_jsonl(run.folder / "metrics.jsonl", [record])
    append_jsonl(run.folder / "samples.jsonl", measure.samples(run))
    print(screen.line(record, run.history[-2:-1]), flush=True)  # with the previous record, if any
    run.state = EpochState(epoch=run.state.epoch + 1, imitated=run.state.imitated)
    checkpoint.save(run)
    run.ends.append(time.perf_counter())
    if len(run.ends) == 3 and run.state.epoch <= run.o.epochs:
        print(screen.progress(run), flush=True)
    # do not count validation and saving as training
    run.cpu_start = time.process_time()
    checkpoint.end_step(run, 0)  # no step of the next epoch is done yet


def finish(run):
    """Save the adapters and the report, and print a summary."""
    for policy in run.policies:
        policy.save_adapters(run.folder / "adapters")
    peak = torch.cuda.max_memory_allocated()
    if peak:  # it is 0 on a CPU
        print(f"peak GPU memory: {peak / 1e9:.2f} GB")
    report.write(run.folder)
    print(screen.closing_words(run))

"""Define tasks, attempts at them, and the pools that keep them as JSON lines: D_train and D_env.

Paper: step 3 of Algorithm 1. D_train <- D_train + Valid(E_t) keeps the tasks that have valid
traces, with these traces. D_env <- D_env + weighted generations keeps what the simulator wrote, in
which context, and how often the agent solved it. Epoch 0 trains nothing and adds nothing to D_env.

Usage: a run has one pool of each kind. Each is an append-only JSONL file in the run folder, from
which a resumed run reads it back.

Deviations: the agent attempts a task of D_train again when it is replayed, so that GRPO stays
on-policy; the traces are kept only for people and for export. D_env keeps every valid generation.
The paper's filter, |p_hat - alpha| <= k_min, is applied whenever the simulator is trained, because
alpha may have changed since the task was written. A success rate is stored with the epoch that
measured it, because it becomes outdated as the agent learns.
"""
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from errors import one_line, require_file

# For how many epochs a success rate in D_train remains usable. Later, the simulator's prompt calls
# it unknown, and the task can no longer be a seed task, unless it is a base task.
FRESH_FOR = 2
MAX_AGE = 4  # in epochs; an older record of D_env is not imitated


@dataclass
class Task:
    """Describe a task: what the agent is asked, and how its answer is checked."""
    text: str             # the task as readable text
    spec: dict            # evaluation spec: all that the world's checker needs, as plain JSON
    origin: str = "base"  # base | env (the simulator) | static, teacher (--variant) | asked
    seed_task: str = ""   # id of the task that it is a variation of
    epoch: int = 0        # epoch in which it was written
    id: str = ""          # hash of the spec: tasks with equal specs are the same task

    def __post_init__(self):
        self.id = self.id or task_id(self.spec)


def task_id(spec: dict) -> str:
    """Return the first sixteen hex digits of the spec's hash; the order of its keys is ignored."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Trace:
    """Record an attempt: the paper's e = (task, trajectory, a', r) without the task, which is kept
    beside it."""
    text: str        # the response, decoded; for an episode the transcript
    reward: float    # Eq. 1
    valid: bool      # well-formed and evaluable, see World.score
    truncated: bool  # it hit the limit on length or turns, or drew a control token
    tokens: int      # how many tokens the agent drew, EOS included
    graded: float = 0.0  # reward with partial credit (World.graded); agent_reward_graded uses it


@dataclass
class Trial:
    """Hold the agent's G attempts at one task."""
    task: Task
    rollouts: list       # G Rollouts; emptied once the agent has learned from them
    traces: list[Trace]
    p_hat: float         # Eq. 2


@dataclass
class EnvRecord:
    """Record a generation of the simulator, (context -> task), and how often the task was solved.

    The success rates are None until the agent has attempted the task.
    """
    prompt: list[int]    # ids of the context
    response: list[int]  # generated ids, EOS included
    text: str            # the generation, decoded
    task_id: str         # id of the task that it describes
    keys: list[str]      # keys of that task: records that share a key hold the same task
    group: int           # number shared by the records written together for one seed task
    p_hat: float | None = None        # success rate of the agent on it (Eq. 2)
    p_hat_seed: float | None = None   # mean success rate on all records of its group
    p_hat_batch: float | None = None  # mean success rate on all records of its step
    epoch: int = 0       # epoch in which it was written and these rates were measured
    # R_env (Eq. 3), computed at the end of that epoch and again whenever the record may be
    # imitated. It stays 0 if the same task was written again later in that epoch.
    r_env: float = 0.0

    def p_hat_of(self, unit: str) -> float:
        """Return p_hat (Eq. 2) averaged over a unit: the "task", its "seed" group or the "batch".

        With "batch", either all records of a step pass the filter or none does.
        """
        by_unit = {"task": self.p_hat, "seed": self.p_hat_seed, "batch": self.p_hat_batch}
        return by_unit[unit]


# ---------------------------------------------------------------------------------------------
# the pools


class TrainPool:
    """Keep D_train: base tasks, ready-made tasks and every task with valid traces, with the last
    p_hat of each.

    tasks: {id: Task}. p_hat: {id: (success rate, epoch that measured it)}. pending: what `save` has
    not written yet.
    """

    def __init__(self, path, base):
        """Read the pool from its JSONL file `path`, if that exists. base: the base tasks, which are
        always in the pool."""
        self.path, self.base = Path(path), list(base)
        self.tasks = {task.id: task for task in self.base}
        self.p_hat, self.pending = {}, []
        if self.path.is_file():
            for r in read_jsonl(self.path):
                self._keep(Task(**r["task"]), r["p_hat"], r["epoch"])

    def add(self, task, traces, p_hat: float | None, epoch: int = 0):
        """Extend the pool: D_train <- D_train + Valid(E_t).

        A new task without a valid trace is left out, unless p_hat is None: then it is a ready-made
        task, which the agent has not attempted yet.
        """
        valid = [asdict(trace) for trace in traces if trace.valid]
        if valid or task.id in self.tasks or p_hat is None:
            self._keep(task, p_hat, epoch)
            self.pending.append(
                {"task": asdict(task), "p_hat": p_hat, "epoch": epoch, "traces": valid})

    def _keep(self, task, p_hat, epoch):
        self.tasks.setdefault(task.id, task)
        if p_hat is not None:
            self.p_hat[task.id] = (p_hat, epoch)

    def recent(self, epoch: int) -> list:
        """Return the candidates for seed tasks besides the base tasks: (task, p_hat) for every
        other task whose p_hat is at most FRESH_FOR epochs old."""
        seeds = []
        for i, (p_hat, measured) in self.p_hat.items():
            if self.tasks[i].origin != "base" and epoch - measured <= FRESH_FOR:
                seeds.append((self.tasks[i], p_hat))
        return seeds

    def recent_p_hat(self, task, epoch: int) -> float | None:
        """Return the p_hat of a task, or None if it was never measured or is more than FRESH_FOR
        epochs old."""
        p_hat, measured = self.p_hat.get(task.id, (None, 0))
        return p_hat if epoch - measured <= FRESH_FOR else None

    def sample(self, n: int, base_share: float, generator) -> list[Task]:
        """Draw n tasks for the agent with replacement: each is a base task with probability
        base_share, and otherwise any other task of the pool."""
        others = [t for t in self.tasks.values() if t.origin != "base"] or self.base
        from_base = torch.rand(n, generator=generator) < base_share  # (n,)
        picks = []
        for is_base in from_base.tolist():
            source = self.base if is_base else others
            i = torch.randint(len(source), (), generator=generator)
            picks.append(source[int(i)])
        return picks

    def save(self):
        """Append to the file what was added since the last call."""
        append_jsonl(self.path, self.pending)
        self.pending = []  # only now, because a failed write must not lose them


class EnvPool:
    """Keep D_env: valid generations of the simulator, each with its measured success rates."""

    def __init__(self, path):
        """Read the pool from its JSONL file `path`, if that exists."""
        self.path, self.pending, self.records = Path(path), [], []
        if self.path.is_file():
            self.records = [EnvRecord(**r) for r in read_jsonl(self.path)]

    def add(self, records):
        """Extend the pool: D_env <- D_env + weighted generations.

        The weights are not stored: they are computed from p_hat each time records are imitated.
        """
        self.records += records
        self.pending += records

    def imitable(self, epoch: int) -> list[EnvRecord]:
        """Return the records of earlier epochs that are at most MAX_AGE epochs old."""
        return [r for r in self.records if 0 < epoch - r.epoch <= MAX_AGE]

    def save(self):
        """Append to the file what was added since the last call."""
        append_jsonl(self.path, [asdict(r) for r in self.pending])
        self.pending = []


def distinct(records) -> list[EnvRecord]:
    """Return only the newest record of each task, in the order given, so that tasks that were
    written often get no extra weight."""
    newest, seen = [], set()
    for r in reversed(records):
        if seen.isdisjoint(r.keys):
            newest.append(r)
        # Remember the keys of a skipped record, too: a still older record of the same task may
        # share a key with that one only.
        seen.update(r.keys)
    return newest[::-1]


# ---------------------------------------------------------------------------------------------
# JSON lines: the format of pools, of a run's metrics and samples, and of task files


def read_jsonl(path) -> list[dict]:
    """Return all records of a JSONL file.

    Raise UserError if there is no file, or if a line is not a JSON object; the message then gives
    the line's number.
    """
    require_file(path)
    return parse_jsonl(Path(path).read_bytes(), path)


def parse_jsonl(contents: bytes, path) -> list[dict]:
    """Return all records in the contents of a JSONL file. path: used only in error messages."""
    records = []
    for number, line in enumerate(contents.split(b"\n"), 1):
        if line.strip():
            with one_line(f"{path}, line {number}", "must be a JSON object"):
                records.append(dict(**json.loads(line.decode())))
    return records


def append_jsonl(path, records):
    """Append records to a JSONL file and force them to disk.

    If the process is killed while it writes, the file may hold only some of them. A resumed run
    cuts its files back to their lengths at the checkpoint (support/checkpoint.py).
    """
    with open(path, "ab") as file:
        file.write(b"".join(json.dumps(r).encode() + b"\n" for r in records))
        file.flush()
        os.fsync(file.fileno())

"""Define tasks, attempts at them, and the pools that keep both as JSON lines: D_train and D_env.

Paper: step 3 of Algorithm 1. D_train <- D_train + Valid(E_t) keeps every task with its valid
traces. D_env <- D_env + weighted generations keeps what the simulator wrote, in which context, and
how hard it turned out to be. Epoch 0 trains nothing and adds nothing to D_env.

Usage: genenv.py has one pool of each kind per run. Each is an append-only JSONL file in the run
folder, from which a resumed run reads it back.

Deviations: a task of D_train is rolled out again when it is replayed, so that GRPO stays on-policy;
traces are kept for people and for export. D_env keeps every valid generation: the filter is applied
when the simulator is trained, because alpha may have changed by then. A success rate is stored with
the epoch that measured it, because it goes stale as the agent learns.
"""
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from errors import UserError, first_line, require_file

# How many epochs a success rate stays usable.
FRESH_FOR = 2  # D_train: after that a task cannot be a seed, and prompts call its p_hat "unknown"
MAX_AGE = 4    # D_env: after that a record is not imitated


@dataclass
class Task:
    """Describe a task: what the agent is asked, and how its answer is checked."""
    text: str             # human-readable task
    spec: dict            # evaluation spec: all that the world's checker needs, JSON only
    origin: str = "base"  # base | env | static | teacher
    seed_task: str = ""   # id of the task it is a variation of
    epoch: int = 0        # epoch that wrote it
    id: str = ""          # hash of the spec: equal specs are the same task

    def __post_init__(self):
        self.id = self.id or task_id(self.spec)


def task_id(spec: dict) -> str:
    """Return sixteen hex digits of the spec's hash; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Trace:
    """Record an attempt, the paper's e = (task, trajectory, a', r); its task is beside it."""
    text: str        # the response, decoded; for an episode the transcript
    reward: float    # Eq. 1
    valid: bool      # well-formed and evaluable, see World.score
    truncated: bool  # it ran into a limit of length or of turns, or drew a control token
    tokens: int      # how many tokens the agent drew, EOS included
    graded: float = 0.0  # reward with partial credit (World.graded), for agent_reward_graded only


@dataclass
class Trial:
    """Hold the agent's G attempts at one task."""
    task: Task
    rollouts: list       # G Rollouts; empty once the agent has learned from them
    traces: list[Trace]
    p_hat: float         # Eq. 2


@dataclass
class EnvRecord:
    """Record a generation of the simulator, (context -> task), and how often the task was solved.

    Success rates are None until the agent has tried the task.
    """
    prompt: list[int]    # context ids
    response: list[int]  # generated ids, EOS included
    text: str            # the generation, decoded
    task_id: str         # of the task it describes
    keys: list[str]      # records that share one describe the same task (worlds.task_keys)
    seed_id: str         # of the task that it varies
    group: int           # records of one group vary one seed task in one step
    p_hat: float | None = None        # success rate of the agent on it (Eq. 2)
    p_hat_seed: float | None = None   # ... on all variations of its group
    p_hat_batch: float | None = None  # ... on all records of its step
    epoch: int = 0       # epoch that wrote it and measured these
    # R_env (Eq. 3), computed in the epoch that wrote it and again before each use; 0 if it was
    # never computed, which happens when the same task was written again later in that epoch
    r_env: float = 0.0

    def p_hat_of(self, unit: str) -> float:
        """Return the p_hat (Eq. 2) of one unit of attempts: "task", "seed" or "batch".

        With "batch" all records of a step pass the filter, or none does.
        """
        by_unit = {"task": self.p_hat, "seed": self.p_hat_seed, "batch": self.p_hat_batch}
        return by_unit[unit]


# ---------------------------------------------------------------------------------------------
# the pools


class TrainPool:
    """Keep D_train: the base tasks, every task with valid traces, and the last p_hat of each.

    tasks: {id: Task}; p_hat: {id: (success rate, epoch that measured it)}.
    """

    def __init__(self, path, base):
        """Read the pool from its JSONL file `path`, if that exists. base: tasks that are always in
        it."""
        self.path, self.base = Path(path), list(base)
        self.tasks = {task.id: task for task in self.base}
        self.p_hat, self.pending = {}, []
        if self.path.is_file():
            for r in read_jsonl(self.path):
                self._keep(Task(**r["task"]), r["p_hat"], r["epoch"])

    def add(self, task, traces, p_hat: float | None, epoch: int = 0):
        """Extend the pool: D_train <- D_train + Valid(E_t).

        A new task without a valid trace is left out, unless it has not been tried (p_hat None):
        such a task was written before training, as in the static ablation.
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
        """Return the candidates for seed tasks: (task, p_hat) for every task measured in the last
        FRESH_FOR epochs, except base tasks."""
        seeds = []
        for i, (p_hat, measured) in self.p_hat.items():
            if self.tasks[i].origin != "base" and epoch - measured <= FRESH_FOR:
                seeds.append((self.tasks[i], p_hat))
        return seeds

    def recent_p_hat(self, task, epoch: int) -> float | None:
        """Return the p_hat of a task, or None if it was never measured, or was measured too long
        ago."""
        p_hat, measured = self.p_hat.get(task.id, (None, 0))
        return p_hat if epoch - measured <= FRESH_FOR else None

    def sample(self, n: int, base_share: float, generator) -> list[Task]:
        """Draw n tasks for the agent: each is a base task with probability base_share, else one of
        all other tasks in the pool."""
        others = [t for t in self.tasks.values() if t.origin != "base"]
        from_base = torch.rand(n, generator=generator) < base_share  # (n,)
        picks = []
        for is_base in from_base.tolist():
            source = self.base if is_base or not others else others
            i = torch.randint(len(source), (), generator=generator)
            picks.append(source[int(i)])
        return picks

    def save(self):
        """Append what is new to the file."""
        append_jsonl(self.path, self.pending)
        self.pending = []  # only now: a failed write must not lose them


class EnvPool:
    """Keep D_env: generations of the simulator, each with the success rate measured on it."""

    def __init__(self, path):
        """Read the pool from its JSONL file `path`, if that exists."""
        self.path, self.pending, self.records = Path(path), [], []
        if self.path.is_file():
            self.records = [EnvRecord(**r) for r in read_jsonl(self.path)]

    def add(self, records):
        """Extend the pool: D_env <- D_env + weighted generations. The weights are computed from
        p_hat each time the records are imitated."""
        self.records += records
        self.pending += records

    def imitable(self, epoch: int) -> list[EnvRecord]:
        """Return the records of earlier epochs that are not too old to be imitated."""
        return [r for r in self.records if 0 < epoch - r.epoch <= MAX_AGE]

    def save(self):
        """Append what is new to the file."""
        append_jsonl(self.path, [asdict(r) for r in self.pending])
        self.pending = []


def distinct(records) -> list[EnvRecord]:
    """Return the newest record of each task, so that frequently written tasks get no extra
    weight."""
    newest, seen = [], set()
    for r in reversed(records):
        if seen.isdisjoint(r.keys):
            newest.append(r)
        # Remember the keys of a skipped record, too: records that share any key are the same task,
        # and a third one may share a key with the skipped one only.
        seen.update(r.keys)
    return newest[::-1]


# ---------------------------------------------------------------------------------------------
# JSON lines: the format of pools, records of runs, and files of tasks


def read_jsonl(path) -> list[dict]:
    """Return every record of a JSONL file. Raise UserError naming the file and the line at
    fault."""
    require_file(path)
    return parse_jsonl(Path(path).read_bytes(), path)


def parse_jsonl(contents: bytes, path) -> list[dict]:
    """Return every record in the contents of a JSONL file. Raise UserError as read_jsonl does."""
    records = []
    for number, line in enumerate(contents.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            raise UserError(f"{where}: not JSON ({first_line(error)}): correct it") from None
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise UserError(f"{where}: not a JSON object (found: {kind}): correct it")
        records.append(record)
    return records


def append_jsonl(path, records):
    """Append records and force them to disk.

    If the process is killed, only some of them may be in the file; a resumed run cuts the file back
    to its checkpoint (support/checkpoint.py).
    """
    with open(path, "ab") as file:
        file.write(b"".join(json.dumps(r).encode() + b"\n" for r in records))
        file.flush()
        os.fsync(file.fileno())

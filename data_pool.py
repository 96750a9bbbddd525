"""Tasks, the agent's attempts at them, and the two pools that keep them: D_train and D_env.

Paper: step 3 of Algorithm 1. D_train <- D_train + Valid(E_t) keeps every task with its valid
traces, and D_env <- D_env + weighted generations keeps what the simulator wrote, in which
context, and how hard it turned out to be (from epoch 1 on).

Usage: genenv.py has one pool of each kind per run. Each is an append-only JSONL file in the run
folder, and is read back from it when a run is resumed.

Deviations: a task of D_train is rolled out again when it is replayed, so that GRPO stays on-policy;
traces are kept for people and for export. D_env keeps every valid generation: the filter is applied
when the simulator is trained, as alpha may have moved. A success rate is stored with the epoch that
measured it, because it goes stale as the agent learns.
"""
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from model.files import append_jsonl, read_jsonl

# how many epochs a success rate stays usable; it goes stale as the agent learns
FRESH_FOR = 2  # D_train: after that a task cannot be a seed, and prompts call its p_hat "unknown"
MAX_AGE = 4    # D_env: after that a record is not imitated


@dataclass
class Task:
    """A task instance: what the agent is asked, and how its answer is checked."""
    text: str             # human-readable task
    spec: dict            # evaluation spec: whatever the world's checker needs, JSON only
    origin: str = "base"  # base | env | static | teacher
    seed_task: str = ""   # id of the task it is a variation of
    epoch: int = 0        # epoch that wrote it
    id: str = ""          # hash of the spec: equal specs are the same task

    def __post_init__(self):
        self.id = self.id or task_id(self.spec)


def task_id(spec: dict) -> str:
    """Sixteen hex digits of the spec's hash; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Trace:
    """One attempt, the paper's e = (task, trajectory, a', r); its task is stored next to it."""
    text: str        # the response, decoded
    reward: float    # Eq. 1
    valid: bool      # well-formed and evaluable: the schema holds and the checker ran
    truncated: bool  # ended by a limit, of length or of turns
    tokens: int      # response length, EOS included
    graded: float = 0.0  # reward with partial credit (World.graded): for agent_reward_graded alone


@dataclass
class EnvRecord:
    """One generation of the simulator, (context -> task), and how often the task was solved.

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
    epoch: int = 0       # epoch in which these were measured
    r_env: float = 0.0   # R_env (Eq. 3), as last computed; 0 if it never was, because the
                         # same task was written again later in the epoch

    def p_hat_of(self, unit: str) -> float:
        """p_hat (Eq. 2) of one unit of attempts: "task", "seed" or "batch"."""
        return {"task": self.p_hat, "seed": self.p_hat_seed, "batch": self.p_hat_batch}[unit]


# ---------------------------------------------------------------------------------------------
# attempts


def play(world, o, policy, adapter, tasks, G, temperature, generator, max_rows=None):
    """G attempts at every task -> (rollouts, texts), in the order of the tasks.

    A text is the response, or the list of turns and observations of an episode. A rollout in which the
    policy drew control tokens, which no text shows, gets the limit "special tokens".
    max_rows: as policy.sample takes it; None: what `rollout_rows` says for these prompts.
    """
    prompts = [policy.encode(world.agent_prompt(task)) for task in tasks]
    max_rows = max_rows or rollout_rows(o, G, max(map(len, prompts)))
    states = [world.start(task) for task in tasks for _ in range(G)]
    episodes = any(state is not None for state in states)  # None: one answer, nothing to respond to
    said, spoilt = [[] for _ in states], set()

    def respond(i, ids):
        said[i].append(policy.decode(ids))
        if policy.has_control_tokens(ids):
            spoilt.add(i)
            return None
        observation = world.respond(tasks[i // G], states[i], said[i][-1])
        if observation is None:
            return None
        said[i].append(observation)
        return policy.encode_observation(observation)

    tokens, turns = o.max_response_tokens, {}
    if episodes:
        tokens = world.max_episode_tokens
        turns = dict(respond=respond, max_turns=world.max_turns, max_turn_tokens=o.max_response_tokens)
    rollouts = policy.sample(adapter, prompts, G, tokens, temperature, generator, max_rows=max_rows, **turns)
    if not episodes:
        said = [policy.decode(r.response) for r in rollouts]
        spoilt = {i for i, r in enumerate(rollouts) if policy.has_control_tokens(r.response)}
    for i in spoilt:
        rollouts[i] = replace(rollouts[i], limit="special tokens")
    return rollouts, said


def rollout_rows(o, G: int, longest: int) -> int:
    """max_rows for rollouts other than the agent's G per task: the simulator's, greedy validation's.

    longest: tokens of the longest prompt. The cache holds max_rows // G prompts at once, which with
    G = 1 would be all of max_rows. Here they are as many as in the agent's own rollouts, or as
    many short ones as hold the tokens of one prompt of the greatest length.
    """
    prompts = max(1, o.max_rows // o.G, o.max_prompt_tokens // longest)
    return min(o.max_rows, G * prompts)


def attempt_score(world, task, rollout, text) -> tuple[float, bool, float]:
    """Eq. 1, well-formedness, and the reward with partial credit, of one attempt of `play`. What ran into a
    limit earns nothing."""
    response = text if isinstance(text, str) else text[::2]
    reward, valid = world.score(task, response)
    if rollout.limit:  # an episode out of turns was well-formed, if its turns were
        return 0.0, valid and rollout.limit == "too many turns", 0.0
    return reward, valid, world.graded(task, response, reward)


def transcript(rollout, text) -> str:
    """An attempt as a person reads it: the response, or `> turn` and observation line by line."""
    if isinstance(text, str):
        return text
    lines = [line if i % 2 else f"> {line}" for i, line in enumerate(text)]
    return "\n".join(lines + ([f"({rollout.limit})"] if rollout.limit else []))


# ---------------------------------------------------------------------------------------------
# the pools


class TrainPool:
    """D_train: the base tasks, every task with valid traces, and the last p_hat of each.

    tasks: {id: Task}; p_hat: {id: (success rate, epoch that measured it)}.
    """

    def __init__(self, path, base):
        """path: its JSONL file, read if it exists. base: tasks that are always there."""
        self.path, self.base = Path(path), list(base)
        self.tasks = {task.id: task for task in self.base}
        self.p_hat, self.pending = {}, []
        for r in read_jsonl(self.path) if self.path.is_file() else ():
            self._keep(Task(**r["task"]), r["p_hat"], r["epoch"])

    def add(self, task, traces, p_hat: float | None, epoch: int = 0):
        """D_train <- D_train + Valid(E_t). A new task without a valid trace is not kept, unless
        it has not been tried (p_hat None): a task from before training, as in the static ablation."""
        valid = [t for t in traces if t.valid]
        if valid or task.id in self.tasks or p_hat is None:
            self._keep(task, p_hat, epoch)
            self.pending.append({"task": asdict(task), "p_hat": p_hat, "epoch": epoch,
                                 "traces": [asdict(t) for t in valid]})

    def _keep(self, task, p_hat, epoch):
        self.tasks.setdefault(task.id, task)
        if p_hat is not None:
            self.p_hat[task.id] = (p_hat, epoch)

    def recent(self, epoch: int) -> list:
        """(task, p_hat) of all but base tasks, if their p_hat is recent: they may be seed tasks."""
        return [(self.tasks[i], p) for i, (p, measured) in self.p_hat.items()
                if self.tasks[i].origin != "base" and epoch - measured <= FRESH_FOR]

    def recent_p_hat(self, task, epoch: int) -> float | None:
        """p_hat of a task; None if it was never measured, or too long ago."""
        p_hat, measured = self.p_hat.get(task.id, (None, 0))
        return p_hat if epoch - measured <= FRESH_FOR else None

    def sample(self, n: int, base_share: float, generator) -> list[Task]:
        """n tasks for the agent: a share of base tasks, the rest from everything kept so far."""
        import torch  # here and not above: options and --help are read without it
        kept = [t for t in self.tasks.values() if t.origin != "base"]
        picks = []
        for from_base in (torch.rand(n, generator=generator) < base_share).tolist():
            source = self.base if from_base or not kept else kept
            picks.append(source[int(torch.randint(len(source), (), generator=generator))])
        return picks

    def save(self):
        """Append what is new to the file."""
        append_jsonl(self.path, self.pending)
        self.pending = []  # only now: a failed write must not lose them


class EnvPool:
    """D_env: generations of the simulator with the success rate that each turned out to have."""

    def __init__(self, path):
        """path: its JSONL file, read if it exists."""
        self.path, self.pending = Path(path), []
        self.records = [EnvRecord(**r) for r in (read_jsonl(self.path) if self.path.is_file() else ())]

    def add(self, records):
        """D_env <- D_env + weighted generations: weights are recomputed from their p_hat."""
        self.records += records
        self.pending += records

    def aged(self, epoch: int) -> list[EnvRecord]:
        """Records of earlier epochs that are not too old to be imitated."""
        return [r for r in self.records if 0 < epoch - r.epoch <= MAX_AGE]

    def save(self):
        """Append what is new to the file."""
        append_jsonl(self.path, [asdict(r) for r in self.pending])
        self.pending = []


def distinct(records) -> list[EnvRecord]:
    """The newest record of each task, so that frequently written tasks get no extra weight."""
    kept, seen = [], set()
    for r in reversed(records):
        if seen.isdisjoint(r.keys):
            kept.append(r)
        seen.update(r.keys)
    return kept[::-1]

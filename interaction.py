"""Do step 1 of Algorithm 1: turn the simulator's texts into tasks, and let the agent attempt them.

Paper: "generate and interact". The simulator's texts are parsed and checked before the agent
attempts the tasks. An attempt is e = (task, trajectory, a', r): a' is the answer, r its reward
(Eq. 1).

Usage: genenv.py calls `read_written` on what the simulator wrote, and `try_tasks` on the resulting
tasks. `try_tasks` calls `play` to make the attempts and `attempt_score` to score each. A world
(worlds/) knows the domain: how to parse a text, what to ask the agent, and how to score an answer.

Deviations: the paper does not say how written tasks are checked. Here a task is refused if it is a
copy of its seed task, a held-out task or a duplicate in its batch, or for one of the other reasons
in the functions below. Control tokens such as <|im_start|> (records call them "special tokens")
disappear when ids become text, so no checker can see them. An attempt that contains one earns
nothing, like an attempt that was cut off.
"""
from dataclasses import dataclass, replace

import curriculum
from data_pool import Task, Trace, Trial, read_jsonl
from errors import UserError, checked
from policy import Rollout
from worlds import NO_SEED, InvalidTask, special_token_in, task_keys

# ---------------------------------------------------------------------------------------------
# generate: from the simulator's texts to tasks


@dataclass
class Written:
    """Hold a text that the simulator wrote, and the task that it describes, if it is valid."""
    rollout: Rollout
    text: str
    task: Task | None = None  # None: the text is not a valid task
    reason: str = ""          # why such a text was refused


def read_written(world, o, policies, rollouts, seed_tasks, *, epoch, held_out,
                 batch=()) -> list[Written]:
    """Parse and check what the simulator wrote; return one Written per rollout.

    policies: the simulator's, then the agent's if it is a different one. rollouts: what the
    simulator wrote; the group of each is the index of its seed task. held_out: keys of the held-out
    tasks; two tasks that share a key count as the same task. batch: tasks already in the batch.
    """
    seen = {key for task in batch for key in task_keys(world, task)}
    written = []
    for rollout in rollouts:
        w = Written(rollout, policies[0].decode(rollout.response))
        written.append(w)
        try:
            task = parse_written(world, o, policies, w, seed_tasks[rollout.group], epoch, held_out)
            # Not in the paper: a task enters a batch only once, however often it was written.
            # Otherwise RWR would reinforce whatever the simulator writes most often.
            if seen & task_keys(world, task):
                raise InvalidTask("duplicate in the batch")
        except InvalidTask as reason:
            w.reason = str(reason)
            continue
        w.task = task
        seen |= task_keys(world, task)
    return written


def parse_written(world, o, policies, w, seed_task, epoch, held_out) -> Task:
    """Return the task that a generation describes, or raise InvalidTask, whose message is the
    reason."""
    if w.rollout.limit:
        raise InvalidTask("truncated")
    if policies[0].has_control_tokens(w.rollout.response):
        raise InvalidTask("special tokens")
    task = world.parse_task(w.text, seed_task, epoch)
    check_task(world, task, seed_task, held_out, *(policy.tokenizer for policy in policies))
    # Two prompts will contain the task: the agent's, and the simulator's when this is its seed
    # task. Neither may exceed --max-prompt-tokens. The 0.5 is a placeholder for the task's p_hat.
    prompts = world.agent_prompt(task), world.env_prompt(task, 0.5)
    lengths = [len(policy.encode(prompt)) for policy in policies for prompt in prompts]
    if max(lengths) > o.max_prompt_tokens:
        raise InvalidTask("prompt too long")
    return task


def check_task(world, task, seed_task, held_out, *tokenizers):
    """Raise InvalidTask unless a task that the world has parsed may be used.

    held_out: the keys of held-out tasks. tokenizers: those of the models that will read the task.
    The reason is one of the three below, or what the world's `leaks` returns.
    """
    keys = task_keys(world, task)
    if seed_task.spec and keys & task_keys(world, seed_task):
        raise InvalidTask("copy of the seed")
    if keys & held_out:
        raise InvalidTask("held-out task")
    # a task that spells a control token could end the user's turn and continue as the assistant
    if any(special_token_in(task, tokenizer) for tokenizer in tokenizers):
        raise InvalidTask("special tokens")
    leak = world.leaks(task)
    if leak:
        raise InvalidTask(leak)


def read_teacher(world, path, held_out=frozenset()) -> list:
    """Return the tasks in a teacher's JSONL file.

    The field "text" of a record must be what the simulator would write. Raise UserError if the file
    holds no tasks, or if a record is not a task of this world or may not be used (see check_task).
    """
    tasks = []
    for n, record in enumerate(read_jsonl(path), 1):
        try:
            task = world.parse_task(str(record.get("text")), NO_SEED, 0)
            # no tokenizers yet: build_run looks for control tokens once the models are loaded
            check_task(world, task, NO_SEED, held_out)
        except InvalidTask as reason:
            raise UserError(f"{path}, record {n}: {reason}") from None
        tasks.append(replace(task, origin="teacher"))
    if not tasks:
        raise UserError(f"{path}: holds no tasks")
    return tasks


# ---------------------------------------------------------------------------------------------
# interact: the agent attempts the tasks


def try_tasks(world, o, policy, tasks, G, temperature, generator) -> list[Trial]:
    """Let the agent attempt every task G times, score the attempts, and return a Trial per task."""
    rollouts, texts = play(world, o, policy, "agent", tasks, G, temperature, generator)
    trials = []
    for b, task in enumerate(tasks):
        members = slice(b * G, (b + 1) * G)
        attempts = zip(rollouts[members], texts[members])
        traces = [trace_of(world, task, rollout, text) for rollout, text in attempts]
        p_hat = curriculum.success_rate([e.reward for e in traces])  # Eq. 2
        trials.append(Trial(task, rollouts[members], traces, p_hat))
    return trials


def trace_of(world, task, rollout, text) -> Trace:
    """Score one attempt and return its Trace."""
    reward, valid, graded = attempt_score(world, task, rollout, text)  # Eq. 1: r
    return Trace(transcript(rollout, text), reward, valid, bool(rollout.limit), rollout.tokens,
                 graded)


def play(world, o, policy, adapter, tasks, G, temperature, generator):
    """Let the agent attempt every task G times; return (rollouts, texts) in the order of the tasks.

    A text is the decoded response. In an episode, where the world replies to the agent's turns, it
    is the list turn, observation, turn, ... of what the two wrote. adapter: "agent", or None for
    the base model.
    """
    prompts = [policy.encode(world.agent_prompt(task)) for task in tasks]
    # a world plays either all of its tasks as episodes, or none
    if any(world.start(task) is not None for task in tasks):
        return play_episodes(world, o, policy, adapter, tasks, prompts, G, temperature, generator)
    rollouts = policy.sample(adapter, prompts, G, o.max_response_tokens, temperature, generator,
                             max_rows=o.max_rows)
    for rollout in rollouts:
        if policy.has_control_tokens(rollout.response):
            rollout.limit = "special tokens"
    return rollouts, [policy.decode(r.response) for r in rollouts]


def play_episodes(world, o, policy, adapter, tasks, prompts, G, temperature, generator):
    """Do what `play` does, for a world that replies to the agent's turns."""
    episodes = Episodes(world, policy, tasks, G)
    rollouts = policy.sample(adapter, prompts, G, world.max_episode_tokens, temperature,
                             generator, max_rows=o.max_rows, respond=episodes.respond,
                             max_turns=world.max_turns, max_turn_tokens=o.max_response_tokens)
    for i in episodes.spoilt:
        rollouts[i].limit = "special tokens"
    return rollouts, episodes.texts


class Episodes:
    """Play the world's side of G episodes for each task.

    texts: for each rollout, the list turn, observation, turn, ... so far. spoilt: the indices of
    rollouts in which the policy drew a control token; this ends the episode.
    """

    def __init__(self, world, policy, tasks, G):
        self.world, self.policy = world, policy
        self.tasks = [task for task in tasks for _ in range(G)]  # one per rollout
        self.states = [world.start(task) for task in self.tasks]
        self.texts = [[] for _ in self.tasks]
        self.spoilt = []

    def respond(self, i, ids):
        """Return the ids of the world's observation after a turn of rollout i, or None if the
        episode is over. ids: those of the turn."""
        turn = self.policy.decode(ids)
        self.texts[i].append(turn)
        if self.policy.has_control_tokens(ids):
            self.spoilt.append(i)
            return None
        observation = self.world.respond(self.tasks[i], self.states[i], turn)
        if observation is None:
            return None
        self.texts[i].append(observation)
        return self.policy.encode_observation(observation)


def attempt_score(world, task, rollout, text):
    """Score one attempt from `play`: return its reward (Eq. 1), whether it is valid, and its reward
    with partial credit.

    Eq. 1 is 1[a' = a] if the target action a is structured, such as a call, and otherwise
    sim(a', a). The world decides which of the two applies, and when two actions are equal.
    """
    # in an episode only the agent's turns are scored
    response = text if isinstance(text, str) else text[::2]
    reward, valid = world.score(task, response)  # Eq. 1
    checked(world.score, reward, 0, 1)  # raises UserError outside [0, 1]
    # An attempt that ran into a limit earns nothing and is not valid. The exception: an episode
    # that ran out of turns remains valid if its turns were well-formed, so D_train keeps it.
    if rollout.limit:
        return 0.0, valid and rollout.limit == "too many turns", 0.0
    return reward, valid, world.graded(task, response, reward)


def transcript(rollout, text) -> str:
    """Return an attempt as readable text: the response, or an episode with "> " before each of the
    agent's turns.

    An episode that ran into a limit ends with the limit in parentheses.
    """
    if isinstance(text, str):
        return text
    lines = list(text)
    lines[::2] = [f"> {turn}" for turn in text[::2]]
    if rollout.limit:
        lines.append(f"({rollout.limit})")
    return "\n".join(lines)

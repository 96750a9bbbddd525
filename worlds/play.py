"""A world is played: the agent's attempts at tasks, single answers or episodes, and their scores.

Paper: the rollouts of Algorithm 1, step 1. An attempt is e = (task, trajectory, a', r); Eq. 1
scores it.

Usage: `play` gives the rollouts (ids, for the updates) and the texts (for the checker and people).
A text is the response, or of an episode the list of the agent's turns and the world's observations,
a turn first. `attempt_score` scores one attempt, `transcript` writes it for a person.

Deviations: a rollout in which the policy drew control tokens, which no text shows, gets the limit
"special tokens" and earns nothing, like one that was cut.
"""
from dataclasses import replace


def play(world, o, policy, adapter, tasks, G, temperature, generator, max_rows=None):
    """G attempts at every task -> (rollouts, texts), in the order of the tasks.

    max_rows: as policy.sample takes it; None: what `rollout_rows` says for these prompts.
    """
    prompts = [policy.encode(world.agent_prompt(task)) for task in tasks]
    if max_rows is None:
        max_rows = rollout_rows(o, G, max(map(len, prompts)))

    def sample(max_new_tokens, **turns):
        return policy.sample(adapter, prompts, G, max_new_tokens, temperature, generator,
                             max_rows=max_rows, **turns)

    if all(world.start(task) is None for task in tasks):
        return play_answers(o, policy, sample)
    return play_episodes(world, o, policy, tasks, G, sample)


def play_answers(o, policy, sample):
    """One answer an attempt. sample(max_new_tokens): the rollouts."""
    rollouts = sample(o.max_response_tokens)
    texts = [policy.decode(r.response) for r in rollouts]
    spoilt = [i for i, r in enumerate(rollouts) if policy.has_control_tokens(r.response)]
    return mark(rollouts, spoilt), texts


def play_episodes(world, o, policy, tasks, G, sample):
    """Turns of the agent and observations of the world, until it says None or a limit is met.

    sample(max_new_tokens, respond=...): the rollouts; it calls `respond` after each turn.
    """
    states = [world.start(task) for task in tasks for _ in range(G)]
    texts = [[] for _ in states]  # of each rollout: turn, observation, turn, ...
    spoilt = []

    def respond(i, ids):
        """ids: what rollout i has just said. Returns the ids of the observation, or None."""
        turn = policy.decode(ids)
        texts[i].append(turn)
        if policy.has_control_tokens(ids):
            spoilt.append(i)
            return None
        observation = world.respond(tasks[i // G], states[i], turn)
        if observation is None:
            return None
        texts[i].append(observation)
        return policy.encode_observation(observation)

    rollouts = sample(world.max_episode_tokens, respond=respond, max_turns=world.max_turns,
                      max_turn_tokens=o.max_response_tokens)
    return mark(rollouts, spoilt), texts


def mark(rollouts, spoilt) -> list:
    """The rollouts, those with control tokens in them as cut. spoilt: their indices."""
    for i in spoilt:
        rollouts[i] = replace(rollouts[i], limit="special tokens")
    return rollouts


def rollout_rows(o, G: int, longest: int) -> int:
    """max_rows for rollouts other than the agent's G per task: the simulator's, validation's.

    longest: tokens of the longest prompt. The cache holds max_rows // G prompts at once, which with
    G = 1 would be all of max_rows. Here they are as many as in the agent's own rollouts, or as
    many short ones as hold the tokens of one prompt of the greatest length.
    """
    prompts = max(1, o.max_rows // o.G, o.max_prompt_tokens // longest)
    return min(o.max_rows, G * prompts)


def attempt_score(world, task, rollout, text):
    """Eq. 1, well-formedness, and the reward with partial credit, of one attempt of `play`. What
    ran into a limit earns nothing."""
    # of an episode the agent's turns
    response = text if isinstance(text, str) else text[::2]
    reward, valid = world.score(task, response)
    if rollout.limit:  # an episode out of turns was well-formed, if its turns were
        return 0.0, valid and rollout.limit == "too many turns", 0.0
    return reward, valid, world.graded(task, response, reward)


def transcript(rollout, text) -> str:
    """An attempt as a person reads it: the response, or `> turn` and observation line by line."""
    if isinstance(text, str):
        return text
    lines = list(text)
    lines[::2] = [f"> {turn}" for turn in text[::2]]
    if rollout.limit:
        lines.append(f"({rollout.limit})")
    return "\n".join(lines)

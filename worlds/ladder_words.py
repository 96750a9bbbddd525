"""Put the ladder into words for a chat model: the same tools and checker, but other texts.

Usage:

    python genenv.py warm-start --world ladder --model DIR --start stale --rounds 0 --out START
    python genenv.py --world ladder --model START

A task is `4: double, add 1, square`; the answer gives the digit after each step, modulo 10:
`double: 8, add 1: 9, square: 1`. Answers are computed, so no reference is wrong, and a small
model learns the world within an hour.

--start chooses what a warm start leaves for the loop to learn. A warm start is one pass over many
demonstrations: a second pass over the same ones would make all attempts at a task alike.
    stale    the agent sees mostly demonstrations of the four easy tools in one to three steps,
             and some of all tools with the ladder's slips; the simulator sees enough variations to
             stay near its seed tasks. After 52 updates the agent solves 0.84 of the tasks of an
             untrained simulator (mean of nine runs, results/words.jsonl)
    aligned  the agent sees all tools with the ladder's slips, so that p_hat differs by rung
    hard     the same with few demonstrations, so that most tasks that the simulator writes
             are too hard
"""
import re

from worlds.tiny_model import chat, in_words

TOOL_WORDS = {
    "inc": "add 1", "dec": "subtract 1", "dbl": "double", "neg": "negate", "hop": "add 3",
    "tpl": "triple", "mir": "mirror", "sqr": "square", "half": "halve", "drop": "subtract 4",
    "cube": "cube", "tri": "sum up"}
NAME_OF = {words: name for name, words in TOOL_WORDS.items()}
# {--start: how many pairs a warm start shows: easy tools, all tools (agent), variations (env)}
PAIRS = {
    "stale": (320, 160, 960), "aligned": (0, 640, 640), "hard": (0, 120, 320)}
# share of the ladder's slips in demonstrations of easy tools; with none, attempts at a task would
# be too alike
EASY_SLIPS = 0.3
DEFAULTS = dict(epochs=13, steps=4, seed_tasks=8, variations=4, G=8, val_samples=8, val_every=2,
                k_min=0.26, agent_lr=5e-4, env_lr=5e-4, env_passes=1, env_batch=8,
                max_task_tokens=40, max_response_tokens=56, max_prompt_tokens=128,
                token_budget=4096, max_rows=256)
MAX_CHARS = 200
ANSWER = rf"(({'|'.join(NAME_OF)}): [0-9](, |$))+"


class Words:
    """Read and write the ladder's tasks, answers and prompts for a chat model."""
    lengths, category_name = (1, 2, 3, 4, 5), "number of steps"  # lengths: steps of held-out tasks

    @staticmethod
    def write(start, tools) -> str:
        """Write `4: double, add 1`."""
        return f"{start}: {', '.join(TOOL_WORDS[name] for name in tools)}"

    @staticmethod
    def read(text):
        """Return (start, tools) of a text that `write` wrote, or None for any other text."""
        match = re.fullmatch(r"([0-9]): ([a-z0-9, ]+)", plain(text))
        if match is None:
            return None
        steps = match[2].split(", ")
        if not all(step in NAME_OF for step in steps):
            return None
        return int(match[1]), [NAME_OF[step] for step in steps]

    @staticmethod
    def answer(tools, digits) -> str:
        """Write `double: 8, add 1: 9`."""
        return ", ".join(f"{TOOL_WORDS[name]}: {digit}" for name, digit in zip(tools, digits))

    @staticmethod
    def read_answer(response: str):
        """Return a response as `answer` writes it, or None if it is not well-formed."""
        return plain(response) if re.fullmatch(ANSWER, plain(response)) else None

    @staticmethod
    def agent_prompt(text):
        """Return chat messages for the agent."""
        return chat("Give the digit after each step, modulo 10.", f"Digit {text}.")

    @staticmethod
    def env_prompt(text, success):
        """Return chat messages for the simulator: the success rate in eighths, the seed task."""
        return chat("Write a task: a digit and one to five steps.",
                    f"Vary, {in_words(success)}: {text}")

    @staticmethod
    def category(tools) -> str:
        """Return the number of steps."""
        return str(len(tools))


def plain(text) -> str:
    """Return a text in lower case without full stops at its end, or "" if it is too long."""
    return text.strip().rstrip(".").lower() if len(text) <= MAX_CHARS else ""

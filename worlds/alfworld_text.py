"""Write the prompt of an ALFWorld step, and read the command in the response to it.

Usage: worlds/alfworld.py (training) and eval/alfworld.py (evaluation) import this module.
"""
import re

SYSTEM = ("You act in a household through text commands, one command per turn. Names carry "
          "numbers, as in countertop 1. You can hold one object at a time.")
ASK = ("Give the next command, copied exactly from the list. Think briefly if you need to, then "
       "end with the command in \\boxed{}, for example \\boxed{go to desk 1}.")


def prompt(record: dict) -> list[dict]:
    """Return chat messages: the transcript so far, the admissible commands, the question."""
    lines = [record["observation"]]
    for command, observation in record["history"]:
        lines += [f"\n> {command}", observation]
    text = "\n".join([*lines, "", question(record["admissible"])])
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def question(admissible) -> str:
    """Return the end of a prompt: the admissible commands, then the question."""
    options = "\n".join(admissible)
    return f"Commands you can give now:\n{options}\n\n{ASK}"


def read_boxed(text: str) -> str:
    r"""Return the content of the last \boxed{...}, or else the text without the $ signs around it.

    The paper's repository reads a response in the same way: the box ends at the first closing
    brace, so \boxed{\text{x}} is cut off. We scan for boxes, because the usual lazy pattern takes
    quadratic time on a megabyte of unclosed ones.
    """
    boxes = list(between(text, "\\boxed{", "}"))
    if boxes:
        return boxes[-1].strip()
    text = text.strip()
    if len(text) >= 2 and text[0] == "$" == text[-1]:
        return text[1:-1].strip()
    return text


def normalise(text: str) -> str:
    """Return a text in lower case, with single spaces, without backticks or quotes at its ends.

    The paper's repository does the same before it compares commands.
    """
    text = text.strip().strip("`").strip('"').strip("'")
    return re.sub(r"\s+", " ", text).lower()


def between(text: str, opening: str, closing: str):
    """Yield each text between `opening` and the next `closing`, in linear time."""
    end = 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            return
        yield text[start:stop]
        end = stop + len(closing)

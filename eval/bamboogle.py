"""Score Bamboogle: 125 two-hop questions with one gold string each (Press et al. 2023, MIT).

Paper: the column "Bamboogle" (68.0 for Qwen2.5-7B, 76.0 for GenEnv 7B). Those figures do NOT come
from string matching: the paper means ToolRL's protocol (its benchmarks/Bamboogle), although it
names ToRL, whose repository holds only mathematics. That protocol allows up to four turns with a
live Google search, and GPT-4o judges "semantically the same?". Neither can be reproduced offline,
so be careful when comparing our number with the paper's.

Usage: python -m eval bamboogle --data DIR --model DIR
       python -m tests.verify bamboogle VERDICTS.jsonl --data DIR

Deviations: one turn, no tools, our own prompt. The answer is read by ToolRL's rule (the first
<response>, else what follows </think>, else the whole text) and compared with the gold string. The
headline metric is EM (exact match), which Search-R1 publishes for offline question answering and
which has hardly any false positives. Cover-EM asks only that the answer contains the gold one: it
accepts nearly every text if the gold one is the single letter "l", "yesterday" if it is "Yes", and
any text that lists enough names. EM is a lower estimate of what a judge accepts, and cover-EM
(always reported next to it, with token F1) roughly an upper one. There is no training part: all 125
questions are evaluated.
"""
import re
import string
from collections import Counter

from eval.common import Verdict, read_array
from worlds.alfworld_text import between

NAME = "bamboogle"
PAPER = {"Qwen2.5-7B": 68.0, "GenEnv 7B": 76.0}  # GPT-4o judge + live search, see above
MAX_NEW_TOKENS = 512
NOTE = "exact match, one turn, no search; the paper's figure: GPT-4o judge with live search"
VARIANTS = {"searchr1": ({}, {"extraction": "searchr1"})}

FILES = ("bamboogle.json", "data.json")  # our name, and the name in the ToolRL repository


# ------------------------------------------------------------------------------------- data

def load(folder) -> list[dict]:
    """Return the 125 questions: {"id", "category", "question", "answer"}."""
    path = next((folder / name for name in FILES if (folder / name).is_file()), folder / FILES[0])
    return [{"id": f"bamboogle-{index:03d}", "category": "two-hop question",
             "question": row["Question"], "answer": row["Answer"]}
            for index, row in enumerate(read_array(path))]


def prompt(record) -> list[dict]:
    """Return chat messages of the single-turn evaluation (no tools)."""
    system = ("Answer the question from your own knowledge. Reason briefly between <think> and "
              "</think>, then write the answer alone, as short as possible (a name, a date, a "
              "number), between <response> and </response>.")
    return [{"role": "system", "content": system},
            {"role": "user", "content": record["question"]}]


# ---------------------------------------------------------------------------------- metrics

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only: curly quotes stay
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation, articles or extra white space.

    Punctuation is deleted first and leaves no space, so "10.8" becomes "108".
    >>> normalize("The  U.S.A. (a country)")
    'usa country'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def metrics(prediction: str | None, golds) -> dict:
    """Return em, cover_em, f1, precision and recall, each the best over the gold answers.

    prediction: the answer; None (nothing extracted) scores 0. golds: one text or a list of them.
    Search-R1 and FlashRAG agree on all of these.
    """
    golds = [golds] if isinstance(golds, str) else golds
    result = {"em": 0, "cover_em": 0, "f1": 0.0, "precision": 0.0, "recall": 0.0}
    if prediction is None:
        return result
    predicted = normalize(prediction)
    for answer in map(normalize, golds):
        result["em"] = max(result["em"], int(predicted == answer))
        result["cover_em"] = max(result["cover_em"], int(answer in predicted))
        for name, value in _token_overlap(predicted, answer).items():
            result[name] = max(result[name], value)
    return result


def _token_overlap(predicted: str, answer: str) -> dict:
    """Return token precision, recall and F1 of two normalized texts, or {} if all are 0."""
    closed = ("yes", "no", "noanswer")
    # A closed answer is right or wrong as a whole; a shared word earns nothing.
    if predicted != answer and (predicted in closed or answer in closed):
        return {}
    ours, theirs = predicted.split(), answer.split()
    same = sum((Counter(ours) & Counter(theirs)).values())
    if same == 0:
        return {}
    precision, recall = same / len(ours), same / len(theirs)
    return {"precision": precision, "recall": recall,
            "f1": 2 * precision * recall / (precision + recall)}


# ------------------------------------------------------------------------------- extraction

def extract_toolrl(text: str) -> str:
    """Return the answer of a ToolRL turn without a tool call.

    >>> extract_toolrl("<think>1812</think> <response> James Madison </response>")
    'James Madison'
    """
    if "<response>" in text:
        return text.split("<response>")[1].split("</response>")[0].strip()
    if "</think>" in text:
        return text.split("</think>")[1].strip()
    return text.strip()


def extract_searchr1(text: str, minimum: int = 2) -> str | None:
    """Return the last <answer>...</answer> of a Search-R1 transcript, or None if there are fewer
    than `minimum`.

    The official rule wants two, because the transcript includes the prompt, which holds one as an
    example. Pass minimum=1 for a response without its prompt.
    """
    # Cut by hand: a lazy regular expression is quadratic on many unclosed tags.
    answers = [answer.strip() for answer in between(text, "<answer>", "</answer>")]
    return answers[-1] if len(answers) >= minimum else None


def score(record, response: str, extraction: str = "toolrl") -> Verdict:
    """Return the verdict on one response. ok, score: EM; extra: all metrics, the extracted answer.

    extraction: "toolrl" (what `prompt` asks for) or "searchr1" (<answer> tags).
    """
    answer = (extract_toolrl(response) if extraction == "toolrl"
              else extract_searchr1(response, minimum=1))
    values = metrics(answer, record["answer"])
    reason = f"{(answer or '')[:80]!r}, gold {record['answer'].strip()!r}"
    return Verdict(bool(values["em"]), float(values["em"]), reason,
                   {"answer": (answer or "")[:1000], **values})

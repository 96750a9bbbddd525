"""Bamboogle: 125 two-hop questions with one gold string each (Press et al. 2023, MIT).

What of the paper this is: the column "Bamboogle" (68.0 for Qwen2.5-7B, 76.0 for GenEnv 7B). Those
figures are NOT string matching: the protocol the paper means is ToolRL's (benchmarks/Bamboogle;
the paper writes ToRL, whose repository holds only mathematics). There a model may call a live
Google search in up to four turns and GPT-4o judges "semantically the same?". Neither the search
nor the judge can be reproduced offline, so compare our number with the paper's only with care.

What is scored here, without network:
* `score`: one turn, no tools. The answer is read by ToolRL's rule (the first <response>, else what
  follows </think>, else the whole text) and compared with the gold string. HEADLINE METRIC: EM,
  because it is what Search-R1 publishes for offline question answering and has hardly any false
  positives. Cover-EM accepts nearly every text where the gold answer is the one letter "l",
  "yesterday" where it is "Yes", and any text that lists enough names. EM is a lower and cover-EM
  (always reported beside it, with token F1) roughly an upper estimate of what a judge accepts.
* `dialogue` / `score_dialogue`: ToolRL's rules for a whole dialogue that was recorded (the model's
  turns and the judge's reply), held against the recorded official verdicts.

There is no training part: all 125 questions are the evaluation, `load(split="train")` raises and
the module has no `base_task`.

How to run:  python -m eval bamboogle --data DIR --model DIR
             python -m eval verify bamboogle VERDICTS.jsonl --data DIR

Where it differs on purpose: the prompt is worded anew; a judge's reply that stops the official run
with an exception counts as wrong, with the reason.
"""
import ast
import re
import string
import warnings
from collections import Counter

from support.files import UserError
from eval.common import Verdict, between, check_record, data_dir, read_array

NAME = "bamboogle"
PAPER = {"Qwen2.5-7B": 68.0, "GenEnv 7B": 76.0}  # GPT-4o judge + live search, see above
MAX_NEW_TOKENS = 512
MAX_TURNS = 4  # model turns of a ToolRL dialogue
REQUIRED = {"metric": 1.0, "searchr1_extract": 1.0, "toolrl_dialogue": 1.0}
NOTE = "exact match, one turn, no search; the paper's figure: GPT-4o judge with live search"
VARIANTS = {"searchr1": ({}, {"extraction": "searchr1"})}

# What the official run records as the answer when the turns are used up; it scores 0 unjudged.
NO_ANSWER = "Round Limit Exceeded, no answer is derived."
MAX_LITERAL = 20_000  # characters of a tool call that are parsed at all

FILES = ("bamboogle.json", "data.json")  # ours, and the name in the ToolRL repository


# ------------------------------------------------------------------------------------- data

def load(data, split: str = "test") -> list[dict]:
    """The 125 questions: {"id", "category", "question", "answer"}.

    data: the folder of benchmarks or of this one. Raises UserError naming file and record when
    the file is missing or malformed, and for any split but "test" (there is no other).
    """
    if split != "test":
        raise UserError(f"bamboogle has no {split} part: all 125 questions are the evaluation, "
                        "so no base tasks can be made of it")
    folder = data_dir(data, NAME)
    path = next((folder / name for name in FILES if (folder / name).is_file()), folder / FILES[0])
    return [{"id": f"bamboogle-{index:03d}", "category": "two-hop question",
             "question": row["Question"], "answer": row["Answer"]}
            for index, row in enumerate(read_array(path, {"Question": str, "Answer": str}))]


def prompt(record) -> list[dict]:
    """Chat messages of the single-turn evaluation (no tools)."""
    system = ("Answer the question from your own knowledge. Reason briefly between <think> and "
              "</think>, then write the answer alone, as short as possible (a name, a date, a "
              "number), between <response> and </response>.")
    return [{"role": "system", "content": system},
            {"role": "user", "content": record["question"]}]


def gold(record) -> str:
    """The response of a perfect model."""
    return f"<response>{record['answer'].strip()}</response>"


# ---------------------------------------------------------------------------------- metrics

_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only: curly quotes stay
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Lower case, ASCII punctuation deleted, articles blanked, white space collapsed.

    The order matters: punctuation is deleted, not blanked, so "10.8" becomes "108".
    >>> normalize("The  U.S.A. (a country)")
    'usa country'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def metrics(prediction: str | None, golds) -> dict:
    """em, cover_em, f1, precision, recall, each the best over the gold answers.

    prediction: answer text, None (nothing extracted) scores 0; golds: one text or a list of them.
    Search-R1 and FlashRAG agree on all of it.
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
    """Token precision, recall and F1 of two normalized texts."""
    closed = ("yes", "no", "noanswer")
    # a closed answer is right or wrong as a whole, a shared word in a longer text earns nothing
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
    """The answer of a ToolRL turn without a tool call.

    >>> extract_toolrl("<think>1812</think> <response> James Madison </response>")
    'James Madison'
    >>> extract_toolrl("<think>1812</think> James Madison")
    'James Madison'
    """
    if "<response>" in text:
        return text.split("<response>")[1].split("</response>")[0].strip()
    if "</think>" in text:
        return text.split("</think>")[1].strip()
    return text.strip()


def extract_searchr1(text: str, minimum: int = 2) -> str | None:
    """The last <answer>...</answer> of a Search-R1 transcript, None with fewer than `minimum`.

    The official rule wants two, since its prompt, part of the transcript, holds one as an example;
    pass minimum=1 for a response without its prompt.
    """
    # cut by hand: a lazy regular expression is quadratic on many unclosed tags
    answers = [answer.strip() for answer in between(text, "<answer>", "</answer>")]
    return answers[-1] if len(answers) >= max(minimum, 1) else None


# ----------------------------------------------------------------------------------- scores

def score(record, response: str, extraction: str = "toolrl") -> Verdict:
    """One single-turn response. ok and score: EM; extra: all metrics and the extracted answer.

    extraction: "toolrl" (what `prompt` asks for) or "searchr1" (<answer> tags). Raises ValueError
    for another extraction, never because of the response.
    """
    if extraction not in ("toolrl", "searchr1"):
        raise ValueError(f"extraction {extraction!r}: expected 'toolrl' or 'searchr1'")
    answer = (extract_toolrl(response) if extraction == "toolrl"
              else extract_searchr1(response, minimum=1))
    values = metrics(answer, record["answer"])
    ok = bool(values["em"])
    return Verdict(ok, float(ok), _reason(answer, values, record["answer"]),
                   {"answer": None if answer is None else answer[:1000], **values})


def _reason(answer, values, gold_answer) -> str:
    """Why the response got its verdict, in one printable sentence."""
    if not answer:
        return "no answer in the response"
    shown = f"{answer[:80]!r}, gold {gold_answer.strip()!r}"
    if values["em"]:
        return f"exact match: {shown}"
    if values["cover_em"]:
        return f"no exact match, but the gold answer occurs in it: {shown}"
    return f"no match (token F1 {values['f1']:.2f}): {shown}"


def aggregate(records, verdicts) -> dict:
    """score: EM in percent; metrics: the means of all five metrics in percent."""
    n = len(records)
    names = ("em", "cover_em", "f1", "precision", "recall")
    means = {name: 100.0 * sum(v.extra[name] for v in verdicts) / n if n else 0.0
             for name in names}
    return {"score": means["em"], "n": n, "metrics": means,
            "categories": {"two-hop question": {"score": means["em"], "n": n}} if n else {}}


# -------------------------------------------------------------------------------- dialogues

def dialogue(turns: list) -> dict:
    """ToolRL's loop over what a model said: at most four turns, one tool; the last turn repeats.

    Returns {"predicted": text, "rounds": int, "searches": [query], "history_roles": [role]}.
    """
    roles, searches = ["user"], []
    for number in range(1, MAX_TURNS + 1):
        text = turns[min(number, len(turns)) - 1].strip()
        # a tool call wins over a response in the same turn
        if "<tool_call>" not in text:
            return {"predicted": extract_toolrl(text), "rounds": number, "searches": searches,
                    "history_roles": roles + ["assistant"]}
        # a call that cannot be read costs the turn and leaves no trace in the history
        queries = _search_queries(text)
        searches += queries
        roles += ["assistant", "obs", "user"] * len(queries)
    return {"predicted": NO_ANSWER, "rounds": MAX_TURNS, "searches": searches,
            "history_roles": roles}


def _search_queries(text: str) -> list:
    """The query in the first line of the first tool call as a list; [] if it cannot be read."""
    line = text.split("<tool_call>")[1].split("</tool_call>")[0].strip().split("\n")[0]
    if len(line) > MAX_LITERAL:  # the parser itself refuses more than 200 nested brackets
        return []
    try:
        # a Python literal, as in the official loop: JSON's true and null are errors
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd backslashes in model text are no news to a user
            return [ast.literal_eval(line)["parameters"]["query"]]  # tool names are not read
    except (ValueError, SyntaxError, TypeError, LookupError, MemoryError, RecursionError):
        return []


def read_judgment(reply: str) -> bool:
    """True iff the text after the first "- Judgment:" (up to a second) is exactly "Yes".

    Raises ValueError when the "- Thought:" or the "- Judgment:" is missing.
    """
    parts = reply.split("- Judgment:")
    if "- Thought:" not in reply or len(parts) < 2:
        raise ValueError("the judge's reply lacks its \"- Thought:\" or \"- Judgment:\"")
    return parts[1].strip() == "Yes"


def score_dialogue(answer: str, turns: list, judge_reply: str) -> Verdict:
    """A recorded ToolRL dialogue; ok and score: the judge's Yes.

    extra: the outcome of `dialogue`, and crash (text or None: the official run stops on an
    unreadable judgment, we count it as wrong). A missing answer is never shown to the judge.
    """
    outcome = dialogue(turns)
    shown, ok, crash = f"{outcome['predicted'][:80]!r}, gold {answer.strip()!r}", False, None
    if outcome["predicted"] in ("", NO_ANSWER):
        reason = "no answer to judge"
    else:
        try:
            ok = read_judgment(judge_reply)
            reason = f"the judge {'accepts' if ok else 'rejects'} {shown}"
        except ValueError as error:
            crash = reason = f"{error}: counted as wrong"
    return Verdict(ok, float(ok), reason, {**outcome, "crash": crash})


# ------------------------------------------------------------------------ recorded verdicts

def verify(data, rows):
    """Yields (kind, agrees, detail) for each recorded verdict; the rows carry their own gold."""
    checks = {"metric": _check_metric, "searchr1_extract": _check_extract,
              "toolrl_dialogue": _check_dialogue}
    for number, row in enumerate(rows, 1):
        where = f"verdict {number} ({row.get('id')})"
        check_record(row, where, ("id", "kind", "response", "official_verdict"))
        if row["kind"] not in checks:
            raise UserError(f"{where}: unknown kind {row['kind']!r}, expected one of "
                            f"{', '.join(checks)}")
        expected, got = checks[row["kind"]](row)
        agrees = all(_same(expected[key], got[key]) for key in expected)
        yield row["kind"], agrees, f"{row['id']}: expected {expected}, got {got}"


def _same(a, b) -> bool:
    """Equality, of numbers up to rounding."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) < 1e-9
    return a == b


def _check_metric(row):
    return row["official_verdict"], metrics(row["response"], row["gold"])


def _check_extract(row):
    answer = extract_searchr1(row["response"])
    return row["official_verdict"], {"extracted": answer, **metrics(answer, row["gold"])}


def _check_dialogue(row):
    official = row["official_verdict"]
    verdict = score_dialogue(row["gold"], row["response"], row["judge_reply"])
    if official["crash"]:  # the official run ended without a score: only the crash compares
        return {"crash": True}, {"crash": verdict.extra["crash"] is not None}
    detail = {key: row["detail"][key] for key in ("rounds", "searches", "history_roles")
              if key in row["detail"]}
    return {**official, **detail}, {"score": verdict.score, **verdict.extra}

"""Format what a run prints: a banner, one line per epoch, the time left, the closing words.

Usage: genenv.py and support/run.py print these texts, which are made from a run's options and the
records of its metrics.jsonl.

Deviations: a figure that an epoch did not measure is a dash, not 0.00. "Success" is always printed
with the tasks it was measured on: on held-out tasks it should rise, on generated tasks it should
stay away from 0 and 1.
"""
import shlex
import textwrap

from support.figures import was_measured
from support.report import as_text, duration, facts

LEGEND = """\
in band: new tasks near alpha, which a trained simulator imitates
entropy, and the simulator's KL from its start, are in nats per token
CPU time excludes validation; a dash means not measured
         success on      mixed agent's       length   new   in   sim.     CPU
epoch held-out generated groups entropy alpha of task tasks band    KL    time"""
COLUMNS = (  # (figure, width, format), aligned with LEGEND
    ("epoch", 5, "d"),
    ("validation", 8, ".3f"),
    ("success_rate", 9, ".2f"),
    ("mixed_share", 6, ".2f"),
    ("entropy", 7, ".3f"),
    ("alpha", 5, ".2f"),
    ("task_length", 7, ".2f"),
    ("distinct_tasks", 5, "d"),
    ("env_kept", 4, "d"),
    ("env_kl", 5, ".3f"),
    ("cpu_seconds", 5, ".0f"),
)


def banner(o, folder, threads: int) -> str:
    """Return the first lines of a run: world, models and folder."""
    models = o.model or "the world's own"
    if o.env_model:
        models += f" and {o.env_model}"
    dtype = o.quant or o.dtype
    return (f"world    {o.world}, variant {o.variant}, seed {o.seed}\n"
            f"model    {models}, dtype {dtype}, LoRA of rank {o.rank}, threads {threads}\n"
            f"folder   {folder}, epochs 0 to {o.epochs}")


def line(r: dict, before=()) -> str:
    """Return an epoch's line, shorter than 80 characters, with its warnings wrapped below it.

    A warning that the previous epoch also had appears by name only. before: a list that holds the
    previous epoch's record, if there is one.
    """
    cells = []
    for key, width, form in COLUMNS:
        figure = r[key] if was_measured(r, key) else None
        cells.append(as_text(figure, form).rjust(width))
    lines = [" ".join(cells) + " s"]
    names_before = {warning["name"] for m in before for warning in m["warnings"]}
    for warning in r["warnings"]:
        name, text = warning["name"], warning["text"]
        words = f"still {name}" if name in names_before else f"{name}: {text}"
        lines.append(wrapped("  ! ", words))
    return "\n".join(lines)


def wrapped(beginning: str, text: str) -> str:
    """Return a text wrapped to lines of 80 characters, without breaking options or paths.

    The first line starts with `beginning`; the others are indented to match.
    """
    return textwrap.fill(text, 80, initial_indent=beginning,
                         subsequent_indent=" " * len(beginning), break_on_hyphens=False,
                         break_long_words=False)


def progress(run) -> str:
    """Return the label of an epoch's progress bar, with an estimate of the time left in the run.

    The estimate appears once three epochs have ended since the run was started or resumed.
    """
    label = f"epoch {run.state.epoch} of {run.o.epochs}"
    n = len(run.ends) - 1  # epochs, validation included, from the first recorded end to the last
    epochs_left = run.o.epochs + 1 - run.state.epoch
    if n < 2 or not epochs_left:
        return label
    per_epoch = (run.ends[-1] - run.ends[0]) / n
    return f"{label}, about {duration(per_epoch * epochs_left)} left"


def closing_words(run) -> str:
    """Return the last lines of a run: its main figures at the start and at the end, and what to do
    next."""
    lines = [""]
    for name, value in facts(run.history).items():
        lines.append(wrapped(f"{name:<28}", value))
    # explain what may surprise a reader who expects success near alpha
    last = run.history[-1]
    if last["distinct_tasks"] and last["success_rate"] > last["alpha"] + run.o.k_min:
        lines.append("success on generated tasks ends above alpha: expected, because the agent\n"
                     "learns from them (TROUBLESHOOTING.md, success stays above alpha)")
    lines.append(f"done; {run.folder}/report.html shows the curves, tasks and attempts")
    command = "python", "genenv.py", "ask", str(run.folder), run.train_pool.base[0].text
    lines.append(f"ask its agent: {shlex.join(command)}")
    return "\n".join(lines)

"""Format what a run prints: a banner, one line per epoch, the time left, the closing words.

Usage: support/run.py prints these texts, made from records of metrics.jsonl or from options.

Deviations: a figure that an epoch did not measure is a dash, not 0.00. "Success" always names its
tasks: on held-out tasks it should rise, on generated tasks it should stay away from 0 and 1.
"""
import shlex
import sys

from support.figures import was_measured
from support.report import as_text, duration, facts

LEGEND = """\
entropy, and KL to the simulator's start: nats per token; in band: those of the tasks near
alpha, which a trained simulator imitates; training time: without validation; -: not measured
        success on           mixed   agent's         length  distinct    in     sim.  training
 epoch  held-out  generated  groups  entropy  alpha  of task     tasks  band       KL    time"""
COLUMNS = (  # figure, width and format, aligned with LEGEND
    ("epoch", 6, "d"),
    ("validation", 8, ".3f"),
    ("success_rate", 9, ".2f"),
    ("mixed_share", 6, ".2f"),
    ("entropy", 7, ".3f"),
    ("alpha", 5, ".2f"),
    ("task_length", 7, ".2f"),
    ("distinct_tasks", 8, "d"),
    ("env_kept", 4, "d"),
    ("env_kl", 7, ".3f"),
    ("seconds", 4, ".0f"),
)


def banner(o, folder, threads: int) -> str:
    """Return the first lines of a run: world, models, folder and the command line's options."""
    models = o.model or "the world's own"
    if o.env_model:
        models += f" and {o.env_model}"
    dtype = o.quant or o.dtype
    options = " ".join(sys.argv[1:]) or "none given"
    return (f"world    {o.world}, variant {o.variant}, seed {o.seed}\n"
            f"model    {models}, dtype {dtype}, LoRA of rank {o.rank}, threads {threads}\n"
            f"folder   {folder}, epochs 0 to {o.epochs}\n"
            f"options  {options}")


def line(r: dict, before=()) -> str:
    """Return an epoch's line, of less than 100 characters, with its warnings below.

    A warning appears by name only if the previous epoch had it too. before: a list of the previous
    record, if any.
    """
    cells = []
    for key, width, form in COLUMNS:
        figure = r[key] if was_measured(r, key) else None
        cells.append(as_text(figure, form).rjust(width))
    lines = ["  ".join(cells) + " s"]
    names_before = {warning["name"] for m in before for warning in m["warnings"]}
    for warning in r["warnings"]:
        name, text = warning["name"], warning["text"]
        lines.append(f"  ! still {name}" if name in names_before else f"  ! {name}: {text}")
    return "\n".join(lines)


def time_left(ends: list, epochs_left: int) -> str:
    """Return how long the rest of a run will take, once: after two epochs since it was started or
    resumed. ends: when each epoch of this process ended, in seconds."""
    if len(ends) != 3 or not epochs_left:
        return ""
    per_epoch = (ends[2] - ends[0]) / 2  # validation included
    return f"about {duration(per_epoch * epochs_left)} left"


def closing_words(run) -> str:
    """Return the last lines of a run: its main figures, at the start and now, and what to do
    next."""
    lines = [""]
    for name, value in facts(run.history).items():
        lines.append(f"{name:<27} {value}")
    # explain what may surprise a reader who knows what alpha is for
    last = run.history[-1]
    if last["distinct_tasks"] and last["success_rate"] > last["alpha"] + run.o.k_min:
        lines.append("success on generated tasks ends above alpha: expected, as the agent learns "
                     "from them\n(TROUBLESHOOTING.md, success stays above alpha)")
    lines.append(f"done; {run.folder}/report.html shows the curves, tasks and attempts")
    lines.append(f"ask its agent: python genenv.py ask {shlex.quote(str(run.folder))} 'a task'")
    return "\n".join(lines)

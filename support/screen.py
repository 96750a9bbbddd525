"""What a run prints: the banner, one line an epoch, how long it will take, the closing words.

Usage: support/run.py prints it. All of it is text made from records of metrics.jsonl or from
options.

Deviations: a figure that an epoch did not measure is a dash, not 0.00. "Success" never appears by
itself: on held-out tasks it should rise, on generated tasks it should stay away from 0 and 1.
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
COLUMNS = (  # figure, width, format; below LEGEND
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
    """Before anything slow begins: world, models, run folder, and the options of the command
    line."""
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
    """An epoch in one line of less than 100 characters, under LEGEND; its warnings below it, by
    name only where the epoch before, the only record in `before`, had them too."""
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
    """How long the rest of a run will take, said once: after its second epoch of training, or of
    those since it was resumed. ends: when the epochs so far ended, in seconds, that before these
    two first."""
    if len(ends) != 3 or not epochs_left:
        return ""
    per_epoch = (ends[2] - ends[0]) / 2  # validation included
    return f"about {duration(per_epoch * epochs_left)} left"


def closing_words(run) -> str:
    """Return the last lines of a run: what matters most, at its start and now, and what next."""
    lines = [""]
    for name, value in facts(run.history).items():
        lines.append(f"{name:<27} {value}")
    # what surprises people who have read of alpha
    last = run.history[-1]
    if last["distinct_tasks"] and last["success_rate"] > last["alpha"] + run.o.k_min:
        lines.append("success on generated tasks ends above alpha: expected, as the agent learns "
                     "from them\n(TROUBLESHOOTING.md, success stays above alpha)")
    lines.append(f"done; {run.folder}/report.html shows the curves, tasks and attempts")
    lines.append(f"ask its agent: python genenv.py ask {shlex.quote(str(run.folder))} 'a task'")
    return "\n".join(lines)

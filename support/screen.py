"""What a run prints: the banner, one line an epoch, the closing words.

Usage: support/run.py prints it. All of it is text made from records of metrics.jsonl or from options.

Deviations: a figure that an epoch did not measure is a dash, not 0.00. "Success" never stands
alone: on held-out tasks it should rise, on generated tasks it should stay away from 0 and 1.
"""
import textwrap
from functools import partial

from support.report import facts, read_run, shown

LEGEND = ("        success on           agent's         length    new    in     sim.\n"
          " epoch  held-out  generated  entropy  alpha  of task  tasks  band       KL    time")


def banner(o, folder, threads: int) -> str:
    """Three lines, before anything slow begins: world, models, run folder."""
    models = " and ".join(filter(None, (o.model or "the world's own", o.env_model)))
    return (f"world    {o.world}, variant {o.variant}, seed {o.seed}\n"
            f"model    {models}, {o.quant or o.dtype}, LoRA of rank {o.rank}, threads {threads}\n"
            f"folder   {folder}, epochs 0 to {o.epochs}")


def duration(seconds: float) -> str:
    """Seconds in words: 50 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def line(r: dict) -> str:
    """An epoch in one line of less than 100 characters, under LEGEND; its warnings below it."""
    cell = partial(shown, r)
    text = (f"{r['epoch']:6d}  {cell('validation', '.3f'):>8}  {cell('success_rate', '.2f'):>9}  "
            f"{cell('entropy', '.3f'):>7}  {r['alpha']:5.2f}  {cell('task_length', '.2f'):>7}  "
            f"{r['distinct_tasks'] or '-':>5}  {cell('env_kept', 'd'):>4}  "
            f"{cell('env_kl', '.3f'):>7}  {duration(r['seconds']):>6}")
    return "\n".join([text, *(wrapped(f"  ! {w}", "    ") for w in r["warnings"])])


def wrapped(text: str, indent="  ") -> str:
    """A long line as several of less than 100 characters."""
    return textwrap.fill(text, 99, subsequent_indent=indent, break_on_hyphens=False,
                         break_long_words=False)


def closing_words(folder) -> str:
    """The last lines of a run: what matters most, at its start and now."""
    metrics, options = read_run(folder)
    lines = ["", *(f"{name:<28}{value}" for name, value in facts(metrics, options).items())]
    warned = sum(bool(m["warnings"]) for m in metrics)
    if warned:
        lines.append(f"{'warnings':<28}in {warned} epochs, see TROUBLESHOOTING.md")
    return "\n".join([*lines, f"{folder}/report.html shows the curves, tasks and attempts"])

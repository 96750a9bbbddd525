"""What a run prints: the banner, one line an epoch, the closing words.

Usage: support/run.py prints it. All of it is text made from records of metrics.jsonl or from options.

Deviations: a figure that an epoch did not measure is a dash, not 0.00. "Success" never stands
alone: on held-out tasks it should rise, on generated tasks it should stay away from 0 and 1.
"""
import sys

from support.report import facts, shown

LEGEND = ("entropy, and KL to the simulator's start: nats per token; in band: those of the tasks near\n"
          "alpha, which a trained simulator imitates; training time: without validation; -: not measured\n"
          "        success on           mixed   agent's         length  distinct    in     sim.  training\n"
          " epoch  held-out  generated  groups  entropy  alpha  of task     tasks  band       KL    time")


def banner(o, folder, threads: int) -> str:
    """Before anything slow begins: world, models, run folder, and the options of the command line."""
    models = " and ".join(filter(None, (o.model or "the world's own", o.env_model)))
    return (f"world    {o.world}, variant {o.variant}, seed {o.seed}\n"
            f"model    {models}, dtype {o.quant or o.dtype}, LoRA of rank {o.rank}, threads {threads}\n"
            f"folder   {folder}, epochs 0 to {o.epochs}\noptions  {' '.join(sys.argv[1:]) or 'none given'}")


def line(r: dict, before=()) -> str:
    """An epoch in one line of less than 100 characters, under LEGEND; its warnings below it, by name alone
    where the epoch before, the only record in `before`, had them too."""
    known = {warning.split(":")[0] for m in before for warning in m["warnings"]}
    cell = lambda key, form: shown(r, key, form)
    text = (f"{r['epoch']:6d}  {cell('validation', '.3f'):>8}  {cell('success_rate', '.2f'):>9}  "
            f"{cell('mixed_share', '.2f'):>6}  {cell('entropy', '.3f'):>7}  {r['alpha']:5.2f}  "
            f"{cell('task_length', '.2f'):>7}  {r['distinct_tasks'] or '-':>8}  {cell('env_kept', 'd'):>4}  "
            f"{cell('env_kl', '.3f'):>7}  {r['seconds']:4.0f} s")
    return "\n".join([text, *(f"  ! still {name}" if (name := warning.split(":")[0]) in known else
                              f"  ! {warning}" for warning in r["warnings"])])


def closing_words(run, seconds: int) -> str:
    """The last lines of a run: what matters most, at its start and now, how long that took since it began
    or was resumed, and where to go on."""
    ask = f'\nask its agent: python genenv.py ask {run.folder} "a request"' * (run.o.world == "tool_calls")
    took = f"{seconds // 60} min {seconds % 60} s{' since it was resumed' * run.o.resume}"
    return "\n".join(["", *(f"{name:<27} {value}" for name, value in facts(run.history).items()),
                      f"done in {took}; {run.folder}/report.html shows the curves, tasks and attempts{ask}"])

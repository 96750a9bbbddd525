"""What a run prints: the banner, one line an epoch, the closing words.

What of the paper this is: nothing. How it is run: commands/__init__.py prints the banner before
torch is loaded, run/frame.py the rest. Everything here makes text of a record of metrics.jsonl or
of the options; nothing is measured, so that nothing here needs torch.

Where it differs on purpose from what is usual: a figure that an epoch did not measure is a dash,
not 0.00, and "success" never stands alone: on held-out tasks it should rise, on generated tasks it
should stay away from 0 and 1.
"""
from functools import partial

from support.report import epochs_in_band, generates, read_run, shown

LEGEND = ("        success on           alpha  length   new    in    simulator's KL\n"
          " epoch  held-out  generated         of task  tasks  band  to its start    time")


def banner(o, folder, threads: int) -> str:
    """Four lines, before anything slow begins: world, model, device, run folder."""
    model = o.model or "the world's own"
    quant = f", {o.quant}" if o.quant else ""
    theirs = f", simulator {o.env_model}" if o.env_model else ""
    return "\n".join([
        f"world    {o.world}, variant {o.variant}, seed {o.seed}",
        f"model    {model}{theirs}{quant}, two LoRA adapters of rank {o.rank}",
        f"device   {o.device}, {threads} thread{'s' * (threads > 1)}",
        f"folder   {folder}, epochs 0 to {o.epochs}; from epoch 1 on the time left is shown"])


def duration(seconds: float) -> str:
    """Seconds in words: 50 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def line(r: dict, left: float | None = None, verbose: bool = False) -> str:
    """An epoch in one line of less than 100 characters, under LEGEND; its warnings below it.

    left: seconds to the end of the run, if known. verbose: below it the proof of training.
    """
    cell = partial(shown, r)
    text = [f"{r['epoch']:6d}  {cell('validation', '.3f'):>8}  {cell('success_rate', '.2f'):>9}  "
            f"{r['alpha']:5.2f}  {cell('task_length', '.2f'):>7}  "
            f"{r['distinct_tasks'] or '-':>5}  {cell('env_kept', 'd'):>4}  "
            f"{cell('env_kl', '.3f'):>12}  {duration(r['seconds']):>6}"
            + (f", {duration(left)} left" if left else "")]
    if verbose and (r["agent_moved"] or r["env_moved"]):
        text.append(proof_line(r))
    return "\n".join([*text, *(f"  ! {w}" for w in r["warnings"])])


def proof_line(r: dict) -> str:
    """That training takes place: how far each adapter moved, that it moved alone, and that policy
    and reference differ (nats per token; the agent's KL is the mean over the epoch's updates)."""
    alone = "ANOTHER ADAPTER MOVED TOO" if r["other_adapter_moved"] else "each alone"
    ratio = f"{r['env_weight_ratio']:.2f}" if r["env_weight_ratio"] else \
        "infinite" if r["env_steps"] else "-"
    return (f"        moved: agent {r['agent_moved']:.2f}, simulator {r['env_moved']:.2f}, {alone}"
            f" | agent's KL to its start {r['kl']:.3f} | largest weight / smallest {ratio} | batch "
            f"{r['env_batch_fresh']} fresh + {r['env_batch_aged']} aged | "
            f"{r['tokens_per_s']:.0f} tok/s")


def closing_words(folder) -> str:
    """The last lines of a run: what to see in it."""
    metrics, options = read_run(folder)
    first, last = metrics[0], metrics[-1]
    by, before = last["validation_by"], first["validation_by"]
    lines = [""]
    if by:
        mostly = [sum(rate > 0.5 for rate in rates.values()) for rates in (before, by)]
        lines += [_change("held-out success", metrics, "validation", ".3f",
                          f"tasks that neither model is trained on, {options['val_samples']} "
                          f"attempt{'s' * (options['val_samples'] > 1)} each"),
                  f"{'':<28}categories solved more than half of the time: "
                  f"{_arrow(metrics, *map(str, mostly))} of {len(by)}"]
    if generates(metrics):
        lines += [
            _change("success on generated tasks", metrics, "success_rate", ".2f",
                    f"{epochs_in_band(metrics, options)} of {len(metrics) - 1} epochs within alpha "
                    f"+- {options['k_min']}" if last["epoch"] else "nothing was trained"),
            _change("length of generated tasks", metrics, "task_length", ".2f", "responses "
                    + _arrow(metrics, *(shown(m, "response_length", ".1f") for m in (first, last)))
                    + " tokens"),
            _change("skills in generated tasks", metrics, "skill_entropy", ".2f",
                    "bits of entropy")]
        if "functions" in last:
            lines.append(f"functions practised         {last['functions_practised']} of "
                         f"{last['functions']}, {last['functions_solved']} solved when last tried")
    warned = sum(bool(m["warnings"]) for m in metrics)
    if warned:
        lines.append(f"warnings                    in {warned} epochs, see TROUBLESHOOTING.md")
    return "\n".join([*lines, f"{folder}/report.html shows the curves, tasks and attempts"])


def _change(name, metrics, key, form, note) -> str:
    """`name   first -> last   note`, in columns."""
    values = (shown(m, key, form) for m in (metrics[0], metrics[-1]))
    return f"{name:<28}{_arrow(metrics, *values)}".ljust(46) + note


def _arrow(metrics, first: str, last: str) -> str:
    """`first -> last`, or what there is before any training."""
    return f"{first} -> {last}" if len(metrics) > 1 else first

"""When does training the simulator pay? Its gain against the share of tasks with mixed rewards.

Paper: the claim behind Eq. 3 and RWR. An agent learns from a task only if some of its G attempts
succeed and some fail, so a trained simulator should help where it writes more such tasks than an
untrained one does.

Usage: `python -m scripts.law` makes results/law.md and results/law.png from results/law.json, a list
of settings. To add one, append {"setting", "kind", "starts", "trained": [FILE, NAME], "untrained":
[FILE, NAME]}: its figures are measured and filled in. FILE is JSONL with a run a line: "name",
"seed", and "metrics", a list over epochs (results of scripts.experiments are); "starts" has the base
model or warm start of each seed.
"""
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from scripts.experiments import MEASURES, RIVALS, half_width, interval
from model.files import read_jsonl

RESULTS = Path(__file__).resolve().parent.parent / "results"
HEAD = """What the columns mean: [Experiments](../EXPERIMENTS.md#when-does-training-the-simulator-pay).

| kind | setting | mixed, trained (late) | untrained | ratio | success, untrained | gain | pairs | starts |
|---|---|---|---|---|---|---|---|---|
"""


def read(file, name) -> dict:
    """{seed: metrics of its epochs} of the runs of this name."""
    return {r["seed"]: r["metrics"] for r in read_jsonl(RESULTS.parent / file) if r["name"] == name}


FIGURES = {  # mixed share of all epochs and of the second half, success there, held-out success at the end
    "mixed": lambda epochs: np.mean([m["mixed_share"] for m in epochs if m["epoch"]]),
    "mixed_late": MEASURES["mixed groups, 2nd half"], "held_out": MEASURES["held-out, last epoch"],
    "success_late": MEASURES["success on its tasks, 2nd half"]}


def measure(setting):
    """Fill in the figures of a setting, paired by seed."""
    found = {who: read(*setting[who]) for who in ("trained", "untrained")}
    setting["seeds"] = sorted(set(found["trained"]) & set(found["untrained"]))
    for key, f in FIGURES.items():
        setting[key] = {who: [round(float(f(runs[seed])), 6) for seed in setting["seeds"]]
                        for who, runs in found.items()}


def ratio(setting, key) -> float:
    return np.mean(setting[key]["trained"]) / np.mean(setting[key]["untrained"])


def gains(setting):
    """What held-out success gained by training the simulator, of each pair."""
    return np.subtract(setting["held_out"]["trained"], setting["held_out"]["untrained"])


def row(s) -> str:
    """One line of the table; figures of the second half are in brackets."""
    mixed = [f"{np.mean(s['mixed'][who]):.3f} ({np.mean(s['mixed_late'][who]):.3f})" for who in s["mixed"]]
    return (f"| {s['kind']} | {s['setting']} | {mixed[0]} | {mixed[1]} | {ratio(s, 'mixed'):.2f} "
            f"({ratio(s, 'mixed_late'):.2f}) | {np.mean(s['success_late']['untrained']):.2f} | "
            f"{interval(gains(s))} | {len(s['seeds'])} | {len(set(s['starts']))} |\n")


def picture(settings):
    """Held-out success on the ladder; and gain against ratio: a point a setting, a colour a kind."""
    figure, (left, axis) = plt.subplots(1, 2, figsize=(12, 4.6), dpi=120, layout="constrained")
    for name in RIVALS:
        ys = np.array([[m["validation"] for m in ms] for ms in read("results/ladder.jsonl", name).values()])
        left.errorbar(range(len(ys[0])), ys.mean(0), [half_width(y) for y in ys.T], label=name, elinewidth=.5)
    left.set(title="ladder, five base models, 95 % intervals", xlabel="epoch", ylabel="held-out success")
    left.legend(frameon=False)
    for i, kind in enumerate(dict.fromkeys(s["kind"] for s in settings)):
        x, y, half = zip(*((ratio(s, "mixed"), gains(s).mean(), half_width(gains(s)))
                           for s in settings if s["kind"] == kind))
        axis.errorbar(x, y, np.nan_to_num(half), fmt="osD^vP*X"[i], color=f"C{i}", label=kind)
    axis.axhline(0, color="black", lw=0.8)
    axis.set(xlabel="mixed groups, trained / untrained simulator", ylabel="gain in held-out success")
    axis.legend(frameon=False)
    figure.savefig(RESULTS / "law.png")


if __name__ == "__main__":
    settings = json.loads((RESULTS / "law.json").read_text())
    for setting in (s for s in settings if "mixed" not in s):
        measure(setting)
    (RESULTS / "law.json").write_text("[\n" + ",\n".join(map(json.dumps, settings)) + "\n]\n")
    (RESULTS / "law.md").write_text(HEAD + "".join(map(row, settings)))
    picture(settings)

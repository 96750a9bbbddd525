"""The suites: what is compared with what, as options of genenv.py.

What of the paper this is: RQ1-RQ4 (`paper`), its fixed alpha beside schedules (`alpha`), questions
that it leaves open (`open`), what moves the success rate (`levers`), which part does the work
(`which`): weights, units of p_hat, aims, and controls in which a reward is made blind;
and whether that holds for other base models of an embedded world (`bases`).

How it is run: `python -m scripts.experiments SUITE`. A suite maps names of variants to options of
genenv.py; its first variant is what the others are compared with. A new variant is one line here.

Where it differs on purpose: every variant gets the same number of agent updates and of rollouts
(tests/test_experiments.py holds them to it).
"""
from pathlib import Path

TEACHERS, PAPER_BASE = (957, 1777), 544  # the paper's teacher sets, and the base set they extend
SOFT = ["--k-min", "0.45", "--lam", "6", "--beta", "8"]  # sharp weights in a wide band
SHARP = [*SOFT, "--agent-lr", "1e-3"]
# name -> options of genenv.py; @teacher-N stands for a file made by the world's write_teacher, @NAME
# for a control of experiments/controls.py
PAPER = {
    "genenv": [],
    "random": ["--variant", "random"],
    "static": ["--variant", "static"],
    "teacher 1.76x": ["--variant", "teacher", "--teacher-tasks", "@teacher-957"],
    "teacher 3.27x": ["--variant", "teacher", "--teacher-tasks", "@teacher-1777"],
    "random, agent rate 1/2": ["--variant", "random", "--agent-lr", "1e-3"],
    "random, curated seeds": ["--variant", "random", "--seed-selection", "curated"],
    "genenv, no KL": ["--env-kl", "0", "--env-kl-cap", "1000"],
    "genenv, no filter": ["--k-min", "1"],
    "genenv, seed-level p_hat": ["--p-hat-unit", "seed"],
    # towards the band: sharp weights in a wide band, and an agent that learns more slowly
    "genenv, alpha 0.3, sharp": ["--alpha", "0.3", *SHARP],
    "genenv, steered": ["--alpha-schedule", "integral", *SHARP],
    "genenv, steered, signal": ["--alpha-schedule", "integral", "--difficulty-reward", "signal",
                                *SHARP],
}
ALPHA = {
    "constant 0.5": [],
    "constant 0.3": ["--alpha", "0.3"],
    "linear 0.7 to 0.4": ["--alpha-schedule", "linear", "--alpha", "0.7", "--alpha-end", "0.4"],
    "cosine 0.7 to 0.4": ["--alpha-schedule", "cosine", "--alpha", "0.7", "--alpha-end", "0.4"],
    "step 0.7 to 0.4": ["--alpha-schedule", "step", "--alpha", "0.7", "--alpha-end", "0.4"],
    "adaptive 0.5": ["--alpha-schedule", "adaptive"],
    "integral 0.5": ["--alpha-schedule", "integral"],
}
OPEN = {
    "alpha 0.5": [],
    **{f"alpha {a}": ["--alpha", a] for a in ("0.3", "0.4", "0.6", "0.7")},
    "reward noise 0.1": ["@noise-0.1"],
    "reward noise 0.2": ["@noise-0.2"],
    "no replay": ["--replay", "0"],
}
LEVERS = {  # each against the default settings
    "as is": [],
    "seed-level p_hat": ["--p-hat-unit", "seed"],
    "adaptive alpha": ["--alpha-schedule", "adaptive"],
    "integral alpha": ["--alpha-schedule", "integral"],
    "alpha 0.3": ["--alpha", "0.3"],
    "agent rate 1/2": ["--agent-lr", "1e-3"],
    "agent rate 1/4": ["--agent-lr", "5e-4"],
    "half the agent updates per epoch": ["--steps", "3", "--epochs", "48"],
    "twice the simulator updates": ["--env-updates", "32"],
    "three times the KL cap, faster": ["--env-kl-cap", "1.5", "--env-lr", "5e-3"],
    "k_min 0.13": ["--k-min", "0.13"],
    "soft weights, lam 6, beta 8": SOFT,
    "half of the seeds from base": ["--base-share", "0.5"],
    "a quarter of the seeds from base": ["--base-share", "0.25"],
}
# FAMILY: NAME; every family is drawn beside the first row. A claim stands only if it beats the
# controls. With the filter all weights of Eq. 3 are nearly equal: "sharp" is where they are not
WHICH = {
    "genenv": [],
    "update: linear": ["--env-weights", "linear"],
    "update: advantage": ["--env-weights", "advantage"],
    "update: none": ["--variant", "random"],
    "update: linear, no filter": ["--env-weights", "linear", "--k-min", "1"],
    "update: advantage, no filter": ["--env-weights", "advantage", "--k-min", "1"],
    "filter: per seed": ["--p-hat-unit", "seed"],  # of R_env as well
    "filter: per batch": ["--p-hat-unit", "batch"],
    "filter: none": ["--k-min", "1"],
    "filter: none, sharp": ["--k-min", "1", "--lam", "6", "--beta", "8"],
    "control: coin for the agent": ["@coin-agent"],
    "control: coin for p_hat": ["@coin-p-hat"],
    "control: shuffled R_env": ["@shuffled-r-env"],
    "control: untrained, curated seeds": ["--variant", "random", "--seed-selection", "curated"],
    "alpha: learned": ["--alpha-schedule", "learned"],
    "alpha: 0.3": ["--alpha", "0.3"],
    "alpha: integral": ["--alpha-schedule", "integral"],
}
# @base stands for a base model trained by the run's own seed, so the intervals are over base models
BASES = {
    "genenv": ["--model", "@base"],
    "random": ["--model", "@base", "--variant", "random"],
    "random, curated seeds": ["--model", "@base", "--variant", "random", "--seed-selection",
                              "curated"],
}
SUITES = {"paper": PAPER, "alpha": ALPHA, "open": OPEN, "levers": LEVERS, "which": WHICH,
          "bases": BASES}
SEEDS = {"which": 5, "bases": 5}  # runs of each variant, where it is not 3
QUICK = ["--no-gate", "--epochs", "2", "--steps", "2", "--seed-tasks", "4", "--val-samples", "1"]


def variants(suite: str, world) -> dict:
    """The variants of a suite that a world can run: teacher sets need its `write_teacher`, base
    models its `train_base`."""
    lacks = lambda x: x.startswith("@teacher") and "write_teacher" not in vars(world) or \
        x == "@base" and not world.OWN_MODEL
    return {name: options for name, options in SUITES[suite].items() if not any(map(lacks, options))}


def results_file(out: Path, suite: str, world: str, quick: bool) -> Path:
    """SUITE.jsonl for the ladder, SUITE-WORLD.jsonl for another world."""
    parts = [suite, *([world] if world != "ladder" else []), *(["quick"] if quick else [])]
    return Path(out) / f"{'-'.join(parts)}.jsonl"

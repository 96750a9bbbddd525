"""Export D_train, for users who outgrow one GPU and continue in veRL.

Paper: its authors ran their experiments in veRL.

Usage: `python genenv.py export RUN --out tasks.jsonl`. Each task of D_train, base tasks included,
becomes a record

    {"data_source": "genenv/WORLD" or "genenv/WORLD/FORM", "prompt": [chat messages],
     "ability": category,
     "reward_model": {"style": "rule", "ground_truth": "the task's evaluation spec as JSON"},
     "extra_info": {"split": "train", "index": 0, "origin": "base", "env", "static" or "teacher",
                    "p_hat": last success rate, -1 if never tried}}

and veRL scores responses with `compute_score` below, which is Eq. 1 of this project:

    custom_reward_function.path=scripts/export.py custom_reward_function.name=compute_score

It may be called on any thread, but only on the main thread can it stop a slow scorer of the world
gym.

The adapters need no export: they are PEFT folders. model/README.md shows how to merge one.

Deviations: ground_truth is a text, because a column of a parquet file has a single type. (To make
such a file, call `pandas.read_json(F, lines=True).to_parquet(...)`.) Traces are left out: in veRL
they would be attempts of an outdated agent.
"""
import json
import sys
from pathlib import Path

# veRL loads this file by its path, so Python has to be told where the project's folder is.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from data_pool import Task, TrainPool
from errors import check_overwrite, require_file, write_whole
from support.options import COMMANDS, Parser, saved_options
from worlds import load_world

BEGINNING = b'{"data_source": "genenv/'  # how every exported file begins


def main(argv) -> int:
    """Run the command `genenv.py export`. Return 0, or raise UserError."""
    p = Parser(prog="python genenv.py export", description=COMMANDS["export"])
    p.add_argument("run", help="run folder, such as runs/001-genenv")
    p.add_argument("--out", default="", help="JSONL file to write; empty: RUN/verl.jsonl")
    p.add_argument("--force", action="store_true", help="overwrite any file")
    args = p.parse_args(argv)
    out = args.out or Path(args.run, "verl.jsonl")
    check_overwrite(out, BEGINNING, args.force)
    records = verl_records(args.run)
    write_whole(out, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    print(f"{len(records)} tasks written to {out}")
    return 0


def verl_records(run_folder) -> list[dict]:
    """Return every task of a run's D_train as a veRL record, base tasks first."""
    o = saved_options(run_folder)
    world = load_world(o.world)(o)
    path = Path(run_folder, "train.jsonl")
    require_file(path)  # without its file, the pool would silently hold only base tasks
    pool = TrainPool(path, world.base_tasks())
    # The source tells compute_score in which form the run's agent gives its answers.
    source = f"genenv/{o.world}"
    if world.form:
        source += f"/{world.form}"
    records = []
    for index, task in enumerate(pool.tasks.values()):
        prompt = world.agent_prompt(task)
        if isinstance(prompt, str):  # the world's model has no chat template
            prompt = [{"role": "user", "content": prompt}]
        records.append({
            "data_source": source, "prompt": prompt, "ability": world.category(task),
            "reward_model": {"style": "rule", "ground_truth": json.dumps(task.spec)},
            "extra_info": {"split": "train", "index": index, "origin": task.origin,
                           "p_hat": pool.p_hat.get(task.id, (-1.0, 0))[0]}})
    return records


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Return Eq. 1, in [0, 1], with the signature of veRL's custom reward functions.

    Raise UserError if data_source is not one that verl_records writes.
    """
    name, _, form = data_source.removeprefix("genenv/").partition("/")
    world = load_world(name).scorer(form)
    return world.score(Task("", json.loads(ground_truth)), solution_str)[0]  # Eq. 1

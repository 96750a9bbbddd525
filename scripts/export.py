"""Take D_train elsewhere: for those who outgrow one GPU and continue in veRL.

What of the paper this is: nothing of the method; its own experiments ran in veRL.

How it is run: `python genenv.py export RUN --format verl --out tasks.jsonl` (or .parquet). Each
task of D_train, base tasks included, becomes a record

    {"data_source": "genenv/WORLD", "prompt": [chat messages], "ability": category,
     "reward_model": {"style": "rule", "ground_truth": "the task's evaluation spec, JSON text"},
     "extra_info": {"split": "train", "index": 0, "id": ..., "origin": ..., "seed_task": ...,
                    "epoch": ..., "p_hat": last success rate, -1 if never tried}}

and veRL scores responses with `compute_score` below, which is Eq. 1 of this project:

    custom_reward_function.path=commands/export.py custom_reward_function.name=compute_score

Where it differs from a plain dump on purpose: ground_truth is a text, as parquet needs one type per
column while specs differ from task to task; traces stay behind, as they would be stale there.

The adapters need no export: they are PEFT folders already.

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B-Instruct")
    model = PeftModel.from_pretrained(model, "RUN/adapters/agent")
"""
import json
import sys
from pathlib import Path
from types import SimpleNamespace

# veRL loads this file by its path: the modules of the project lie one folder up
sys.path.append(str(Path(__file__).resolve().parent.parent))

from support.cli import Parser
from support.files import UserError, write_whole
from data_pool import Task, TrainPool
from support.options import defaults, parse_options
from worlds import load_world


def main(argv) -> int:
    """The command `genenv.py export`; argv: what follows it. Raises UserError, returns 0."""
    p = Parser(prog="genenv.py export", allow_abbrev=False,
               description="Write the tasks of a run for another trainer.")
    p.add_argument("run", help="run folder, such as runs/001-genenv")
    p.add_argument("--format", default="verl", choices=["verl"], help="whose records to write")
    p.add_argument("--out", default="", help="file to write, .jsonl or .parquet (needs pyarrow); "
                   "empty: RUN/verl.jsonl")
    args = p.parse_args(argv)
    out = args.out or Path(args.run) / "verl.jsonl"
    print(f"{export_verl(args.run, out)} tasks written to {out}")
    return 0


def export_verl(run_folder, out) -> int:
    """Write D_train of a run for veRL; returns the number of records.

    out: file to write, replaced only when complete; as parquet (needs pyarrow) if its name ends so,
    else as JSONL. Raises UserError if the run or its base tasks cannot be read.
    """
    out = Path(out)
    records = verl_records(run_folder)
    if not out.parent.is_dir():
        raise UserError(f"{out.parent}: no such folder to write {out.name} to; create it first")
    write_whole(out, _as_parquet(records) if out.suffix == ".parquet" else "".join(
        json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return len(records)


def verl_records(run_folder) -> list[dict]:
    """Every task of D_train of a run as a veRL record, base tasks first."""
    o = run_options(run_folder)
    world = load_world(o.world)(o)
    pool = TrainPool(Path(run_folder) / "train.jsonl", world.base_tasks())
    form = o.world_options.get("call_format", "")
    source = f"{o.world}/{form}" if form else o.world  # as compute_score reads it
    return [_record(world, source, n, task, pool.p_hat.get(task.id, (-1.0, 0))[0])
            for n, task in enumerate(pool.tasks.values())]


def run_options(run_folder) -> SimpleNamespace:
    """The options of a run, as its config.json has them. Raises UserError if there are none."""
    path = Path(run_folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{run_folder} is no run folder: it has no config.json")
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
        return SimpleNamespace(**{**defaults(), **options, "world": str(options["world"])})
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not the options of a run ({error})") from None


def _record(world, source: str, index: int, task: Task, p_hat: float) -> dict:
    prompt = world.agent_prompt(task)
    if isinstance(prompt, str):  # worlds without a chat template write plain text
        prompt = [{"role": "user", "content": prompt}]
    return {
        "data_source": f"genenv/{source}",
        "prompt": prompt,
        "ability": world.category(task),
        "reward_model": {"style": "rule", "ground_truth": json.dumps(task.spec)},
        "extra_info": {"split": "train", "index": index, "id": task.id, "origin": task.origin,
                       "seed_task": task.seed_task, "epoch": task.epoch, "p_hat": p_hat},
    }


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Eq. 1 with the signature of veRL's custom reward functions -> reward in [0, 1].

    Raises UserError if data_source is not one that export_verl writes.
    """
    project, _, source = data_source.partition("/")
    if project != "genenv":
        raise UserError(f"{data_source!r} is no data source of genenv: expected genenv/WORLD")
    name, _, form = source.partition("/")
    world = load_world(name)(parse_options(["--world", name, *(["--call-format", form] if form else [])]))
    return world.score(Task("", json.loads(ground_truth)), solution_str)[0]  # Eq. 1


def _as_parquet(records) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError("parquet needs pyarrow: `pip install pyarrow`, or write JSONL, "
                        "which veRL reads as well") from None
    data = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(records), data)
    return data.getvalue().to_pybytes()

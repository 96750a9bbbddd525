"""Evaluate a model on the paper's five benchmarks: python -m eval.

Paper: its results table (API-Bank, ALFWorld, BFCL, Bamboogle, TravelPlanner). The paper ships no
evaluation code, and its protocols are partly unknown (eval/README.md).

Usage, where BENCH is one of the five or `all`:

    python -m eval BENCH --data DIR --model DIR [--adapter DIR] [--limit N] [--variant NAME]
    python -m eval BENCH --data DIR --responses FILE      # JSONL {"id", "response"}, no model
    python -m eval.make_base BENCH --data DIR --out FILE  # base tasks, see make_base.py

Responses are greedy. Each run writes two files to --out: NAME.jsonl has every prompt and response
as they come, and at the end the verdicts; NAME.json has the summary. NAME contains a hash of
everything that decides the responses. If the same command is run again, it keeps existing responses
and rescores them. So an interrupted run resumes, and no run overwrites the responses of another.
"""
import hashlib
import json
import sys
from datetime import date
from pathlib import Path

import torch
from tqdm import tqdm

from data_pool import read_jsonl
from errors import UserError, exit_code, one_line, write_whole
from model.loading import weights_of
from policy import Policy
from support.options import Parser, at_least
from eval import alfworld, api_bank, bamboogle, bfcl, travelplanner
from eval.common import (Verdict, load_records, mean_score, read_rows, results, spread,
                         verdict)

MODULES = {m.NAME: m for m in (api_bank, alfworld, bfcl, bamboogle, travelplanner)}
BENCHES = tuple(MODULES)
EPISODES = "episodes"  # the variant of alfworld in which each response decides the next prompt


def main(argv=None) -> int:
    """Run one command, and return the exit code: 0, or 2 for bad input."""
    return exit_code(lambda: run(argv))


def arguments() -> Parser:
    """Return the command line of an evaluation run."""
    parser = Parser(prog="python -m eval", description=__doc__.split("\n\n")[0], epilog=__doc__)
    parser.add_argument("bench", choices=BENCHES + ("all",))
    parser.add_argument("--data", required=True, metavar="DIR",
                        help="folder with a subfolder per benchmark (table in eval/README.md)")
    parser.add_argument("--model", metavar="DIR", help="chat model, local folder or hub name")
    parser.add_argument("--adapter", metavar="DIR", help="PEFT folder of a LoRA adapter")
    parser.add_argument("--quant", choices=("nf4",), help="load the model in 4 bit")
    parser.add_argument("--chat-template-kwargs", type=json_object, default={}, metavar="JSON",
                        help="options of the chat template, as in training")
    parser.add_argument("--responses", metavar="FILE", help="score responses made elsewhere; with "
                        "`all`, a folder that holds BENCH.jsonl files")
    parser.add_argument("--variant", help="another protocol or part of a benchmark: " + "; ".join(
        f"{bench}: {', '.join(m.VARIANTS)}" for bench, m in MODULES.items()))
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="N records, evenly spread")
    parser.add_argument("--batch-size", type=at_least(1), default=16, metavar="N")
    parser.add_argument("--max-prompt", type=at_least(1), metavar="TOKENS",
                        help="longer prompts fail (default: model's context minus response)")
    parser.add_argument("--max-new", type=at_least(1), metavar="TOKENS",
                        help="response length (default: that of the benchmark)")
    parser.add_argument("--out", default="results/eval", metavar="DIR")
    return parser


def json_object(text: str) -> dict:
    """Return the value of an option. Raise ValueError or TypeError unless it is a JSON object."""
    return dict(**json.loads(text))


# ---------------------------------------------------------------------------------------------
# one evaluation run


def run(argv) -> int:
    """Evaluate, write the results, print the scores, and return 0."""
    args = arguments().parse_args(argv)
    if (args.model is None) == (args.responses is None):
        raise UserError("pass either --model DIR or --responses FILE")
    benches = BENCHES if args.bench == "all" else (args.bench,)
    # Read all data first: a missing file should show up before hours of generation, not after.
    records = {bench: chosen_records(bench, args) for bench in benches}
    answers = {bench: read_responses(bench, records[bench], args)
               for bench in benches if args.responses}
    policy = None if args.responses else load_policy(args)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    print_scores([evaluate(bench, records[bench], policy, answers.get(bench), args)
                  for bench in benches])
    return 0


def variant(bench: str, name):
    """Return (arguments of load, arguments of score) of a variant; ({}, {}) for None."""
    variants = {None: ({}, {}), **MODULES[bench].VARIANTS}
    if name not in variants:
        raise UserError(
            f"{bench} has no variant {name!r}, only {', '.join(MODULES[bench].VARIANTS)}"
        )
    return variants[name]


def chosen_records(bench: str, args) -> list:
    """Return the records of the run: for whole episodes, one per game."""
    records = load_records(MODULES[bench], args.data, **variant(bench, args.variant)[0])
    if args.variant == EPISODES:
        records = [{**r, "id": r["game"]} for r in records if r["step"] == 0]
    if not records:
        raise UserError(f"{bench}: no records in {args.data}")
    return spread(records, args.limit)


def read_responses(bench: str, records: list, args) -> dict:
    """Return {id: text} from --responses. Records without a response fail later and are counted."""
    path = Path(args.responses) / f"{bench}.jsonl" if args.bench == "all" else args.responses
    with one_line(path, "is malformed"):
        answers = {row["id"]: row["response"] for row in read_rows(path)}
    if args.variant == EPISODES or not any(r["id"] in answers for r in records):
        raise UserError(
            f"{path}: none of its ids is one of {bench}'s, such as {records[0]['id']!r}"
        )
    if not all(isinstance(text, str) for text in answers.values()):
        raise UserError(f"{path}: a response is not text")
    return answers


def load_policy(args):
    """Load the model, with --adapter as adapter "agent"."""
    adapters = ("agent",) if args.adapter else ()
    # A chat template may show the date: keep the date on which the run began.
    kwargs = {"date": date.today().isoformat(), **args.chat_template_kwargs}
    return Policy.load(args.model, adapters=adapters, quant=args.quant, adapter_folder=args.adapter,
                       chat_template_kwargs=kwargs)


def evaluate(bench: str, records: list, policy, answers, args) -> dict:
    """Generate and score the responses of one benchmark; write the summary and return it."""
    module = MODULES[bench]
    prompts = [module.prompt(record) for record in records]
    settings = run_settings(bench, prompts, policy, answers, args)
    path = results_path(bench, settings, args)
    # Keep the responses of an earlier run. Write new ones before the next batch begins.
    rows = {row["id"]: row for row in earlier_rows(path)}
    todo = [(r, p) for r, p in zip(records, prompts) if r["id"] not in rows]
    with open(path, "a", encoding="utf-8") as file:
        for row in respond(bench, todo, policy, answers, settings, args):
            rows[row["id"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
    rows = [rows[record["id"]] for record in records]
    # Never reuse an earlier run's scores: the scorer may have been corrected since.
    verdicts = [verdict_of(module, record, row, args) for record, row in zip(records, rows)]
    lines = [json.dumps({**row, "verdict": vars(v)}) + "\n" for row, v in zip(rows, verdicts)]
    write_whole(path, "".join(lines))
    summary = {"benchmark": bench, "variant": args.variant}
    summary |= results(records, verdicts, vars(module).get("overall", mean_score))
    summary["prompts_too_long"] = sum("too long" in row["problem"] for row in rows)
    summary["cut_or_missing"] = sum(
        row["truncated"] or row["problem"] == "no response" for row in rows
    )
    # The paper's figure belongs to the default protocol only.
    summary["paper"] = {} if args.variant else module.PAPER
    summary["note"] = "" if args.variant else vars(module).get("NOTE", "")
    summary["settings"] = settings
    summary["file"] = str(path.with_suffix(".json"))
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    write_whole(path.with_suffix(".json"), text + "\n")
    return summary


def results_path(bench: str, settings: dict, args) -> Path:
    """Return the file of a run's responses; another model, option or data set gets another file."""
    source = Path(args.model).name if args.model else Path(args.responses).stem
    parts = [bench, args.variant, source, digest(settings)[:10]]
    return Path(args.out) / f"{'-'.join(filter(None, parts))}.jsonl"


def respond(bench: str, todo: list, policy, answers, settings: dict, args):
    """Return an iterator of rows for (record, prompt) pairs, generated or read."""
    if answers is not None:
        return (row_of(r, p, answers.get(r["id"]), "no response") for r, p in todo)
    if args.variant == EPISODES:
        return play([r for r, _ in todo], policy, settings, args)
    return generate(todo, policy, settings, args, bench)


def digest(value) -> str:
    """Return the sha256 of a value's JSON text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def run_settings(bench: str, prompts: list, policy, answers, args) -> dict:
    """Return everything that decides the responses; its hash is part of the file names."""
    settings = {"benchmark": bench, "variant": args.variant, "model": args.model,
                "adapter": args.adapter, "quant": args.quant, "batch_size": args.batch_size,
                "chat_template_kwargs": args.chat_template_kwargs, "prompts": digest(prompts)}
    if policy is None:
        return settings | {"responses": digest(answers)}
    # Prompt and response share the context; positions beyond it were never trained.
    context = policy.lm.config.max_position_embeddings
    # Leave at least half of a small context for the prompt.
    new = min(args.max_new or MODULES[bench].MAX_NEW_TOKENS, context // 2)
    settings["max_new_tokens"] = new
    settings["max_prompt"] = min(args.max_prompt or context, context - new)
    # A model that was trained further in the same folder is a different model.
    settings["weights"] = [weights_of(args.model), args.adapter and weights_of(args.adapter)]
    settings["first_prompt"] = digest(policy.encode(prompts[0]))
    return settings


# ---------------------------------------------------------------------------------------------
# responses


def row_of(record, messages, text, problem="", truncated=False) -> dict:
    """Return a line of the results file, without a verdict. problem: why there is no response."""
    return {"id": record["id"], "prompt": messages, "response": text, "truncated": truncated,
            "problem": problem if text is None else ""}


def earlier_rows(path: Path) -> list:
    """Return the rows of an earlier run with the same settings. Drop a half-written last line."""
    if not path.is_file():
        return []
    whole, _, torn = path.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        write_whole(path, whole + "\n" if whole else "")
    return read_jsonl(path)


def greedy(policy, prompts: list, settings: dict) -> list:
    """Return greedy rollouts of token prompts, in one batch; None for a prompt that is too long.

    Raise UserError if memory runs out.
    """
    most = settings["max_prompt"]
    fits = [ids for ids in prompts if len(ids) <= most]
    adapter = "agent" if settings["adapter"] else None
    try:
        rollouts = iter(policy.sample(adapter, fits, G=1, temperature=0.0, max_rows=len(fits),
                                      max_new_tokens=settings["max_new_tokens"]))
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory with {len(fits)} prompts of up to {max(map(len, fits))} "
                        "tokens: lower --batch-size or --max-prompt; the responses so far are kept"
                        ) from None
    return [next(rollouts) if len(ids) <= most else None for ids in prompts]


def batches(items: list, args, label: str):
    """Yield --batch-size items at a time, and show a progress bar."""
    for start in tqdm(range(0, len(items), args.batch_size), desc=label, disable=None):
        yield items[start:start + args.batch_size]


def generate(todo: list, policy, settings: dict, args, label: str):
    """Yield rows of greedy responses to (record, prompt) pairs, batch by batch."""
    todo = [(record, messages, policy.encode(messages)) for record, messages in todo]
    # Batch prompts of similar length, so that little padding is needed. Begin with the longest:
    # if memory is too small, that shows at once.
    todo.sort(key=lambda item: -len(item[2]))
    for batch in batches(todo, args, label):
        rollouts = greedy(policy, [ids for _, _, ids in batch], settings)
        for (record, messages, ids), rollout in zip(batch, rollouts):
            if rollout is None:
                yield row_of(record, messages, None, f"prompt too long: {len(ids)} tokens")
            else:
                text = policy.decode(rollout.response)
                yield row_of(record, messages, text, truncated=bool(rollout.limit))


def play(games: list, policy, settings: dict, args):
    """Play whole ALFWorld episodes, a batch of games at a time, and yield rows with the outcome."""

    def respond(prompts):
        # The transcript grows with every step and may outgrow the context.
        rollouts = greedy(policy, list(map(policy.encode, prompts)), settings)
        return [None if rollout is None else policy.decode(rollout.response)
                for rollout in rollouts]

    for batch in batches(games, args, "alfworld episodes"):
        for game in alfworld.episodes(Path(args.data) / alfworld.NAME, respond, batch):
            yield {**row_of(game, None, "\n".join(game["commands"])), "problem": game["problem"]}


# ---------------------------------------------------------------------------------------------
# verdicts and scores


def verdict_of(module, record, row: dict, args) -> Verdict:
    """Return the verdict on one row. A missing response always fails."""
    if args.variant == EPISODES:
        return verdict(row["problem"], "won")
    options = variant(module.NAME, args.variant)[1]
    if row["problem"]:
        # Use the extras of an empty response, so that the metrics stay complete.
        return Verdict(False, 0.0, row["problem"], module.score(record, "", **options).extra)
    return module.score(record, row["response"], **options)


def print_scores(summaries: list):
    """Print a line for each benchmark: our score, its interval, and the paper's figures."""
    for s in summaries:
        low, high = s["interval_95"]
        name = f"{s['benchmark']} ({s['variant']})" if s["variant"] else s["benchmark"]
        failures = f"too long {s['prompts_too_long']}, cut or missing {s['cut_or_missing']}"
        paper = "".join(f"; paper, {system}: {value}" for system, value in s["paper"].items())
        print(f"{name:24} {s['score']:5.1f} % ({low:.1f} to {high:.1f}) of {s['n']} records; "
              f"{failures}{paper}")
    print("\nIn brackets: 95 % interval, bootstrap over records. The paper's protocols are partly "
          "unknown: see eval/README.md before comparing.")
    for s in summaries:
        print(f"{s['benchmark']}: " + "; ".join(filter(None, [s["note"], s["file"]])))


if __name__ == "__main__":
    sys.exit(main())

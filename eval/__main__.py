"""python -m eval: the paper's five benchmarks from one command.

What of the paper this is: its results table (API-Bank, ALFWorld, BFCL, Bamboogle, TravelPlanner);
the paper ships no evaluation code. How it is run, BENCH being one of the five or `all`:

    python -m eval BENCH --data DIR --model DIR [--adapter DIR] [--limit N] [--variant NAME]
    python -m eval BENCH --data DIR --responses FILE      # JSONL {"id", "response"}, no model
    python -m eval verify BENCH VERDICTS.jsonl --data DIR # re-score recorded verdicts
    python -m eval gold BENCH --data DIR                  # what gold responses score, and why
    python -m eval.make_base BENCH --data DIR --out FILE  # base tasks, see make_base.py

Responses are greedy. Each run writes NAME.jsonl (every prompt, response and verdict, as they come)
and NAME.json (the summary) below --out, NAME holding a hash of everything that decides the
responses. The same command run again takes up the responses that are there and only scores anew, so
an interrupted run is continued and no response is ever overwritten.

Where it differs on purpose: the paper's figures stand in the table for orientation. Its protocols
are partly unknown (eval/README.md lists what is), and a variant is shown without them.
"""
import argparse
import hashlib
import importlib.metadata
import json
import platform
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from support.options import Parser, at_least
from support.files import UserError, write_whole
from eval import alfworld, api_bank, bamboogle, bfcl, common, travelplanner
from eval.common import Verdict, exit_code, one_line
from worlds import one_line_for_templates

MODULES = {m.NAME: m for m in (api_bank, alfworld, bfcl, bamboogle, travelplanner)}
BENCHES = tuple(MODULES)
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "numpy")

WHOLE_GAMES = ("episodes", "dialogue")  # of alfworld: what is asked next depends on the responses
BATCH_TOKENS = 65_536  # prompts of a batch times its longest: long prompts go in smaller batches
RESPONSES_ONLY = ("searchr1",)  # reads what other systems wrote; our prompts ask for another form


def main(argv=None) -> int:
    """Run one command; returns the exit code: 0, 1 (verify: rate missed), 2 (bad input)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = {"verify": verify, "gold": gold}.get(argv[0] if argv else None)
    return exit_code(command, argv[1:]) if command else exit_code(run, argv)


def arguments() -> Parser:
    """The options of an evaluation run."""
    parser = Parser("python -m eval", description=__doc__.split("\n\n")[1], epilog=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", choices=BENCHES + ("all",))
    parser.add_argument("--data", required=True, metavar="DIR",
                        help="folder with a subfolder per benchmark (table in eval/README.md)")
    parser.add_argument("--model", metavar="DIR", help="chat model, local folder or hub name")
    parser.add_argument("--adapter", metavar="DIR", help="PEFT folder of a LoRA adapter")
    parser.add_argument("--quant", choices=("nf4",), help="load the model in 4 bit")
    parser.add_argument("--responses", metavar="FILE", help="score responses made elsewhere; with "
                        "`all` a folder that holds BENCH.jsonl files")
    parser.add_argument("--variant", help="other protocol or part of one benchmark: " + "; ".join(
        f"{bench}: {', '.join(m.VARIANTS)}" for bench, m in MODULES.items()))
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="N records, evenly spread")
    parser.add_argument("--batch-size", type=at_least(1), default=16, metavar="N")
    parser.add_argument("--max-prompt", type=at_least(1), metavar="TOKENS",
                        help="longer prompts fail (default: what the model's context leaves)")
    parser.add_argument("--max-new", type=at_least(1), metavar="TOKENS",
                        help="response length (default: that of the benchmark)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap intervals")
    parser.add_argument("--out", default="results", metavar="DIR")
    return parser


# ---------------------------------------------------------------------------------------------
# one evaluation run


def run(argv) -> int:
    """Evaluate, write the results, print one table."""
    args = arguments().parse_args(argv)
    if (args.model is None) == (args.responses is None):
        raise UserError("pass either --model DIR or --responses FILE")
    for name in ("adapter", "quant", "max_prompt", "max_new"):
        if getattr(args, name) is not None and not args.model:
            raise UserError(f"--{name.replace('_', '-')} needs the --model that it is for")
    benches = BENCHES if args.bench == "all" else (args.bench,)
    if args.variant and args.bench == "all":
        raise UserError("--variant belongs to one benchmark, not to `all`")
    if args.variant in RESPONSES_ONLY and args.model:
        raise UserError(f"--variant {args.variant} reads what others wrote: pass --responses FILE")
    # all data first: a missing file should not show up after hours of generation
    parts = {bench: chosen_records(bench, args) for bench in benches}
    answers = {bench: read_responses(bench, parts[bench], args) for bench in benches} \
        if args.responses else None
    folder = make_folder(args.out)
    policy = None if args.responses else load_policy(args)
    summaries = []
    for bench in benches:
        records = common.spread(parts[bench], args.limit)
        summaries.append(evaluate(bench, records, policy, answers and answers[bench], args, folder))
    print_table(summaries)
    return 0


def variant(bench: str, name):
    """(arguments of load, arguments of score) of a variant; the default protocol is ({}, {}).

    "scorer" among the arguments of score names another scoring function of the module.
    """
    variants = {None: ({}, {}), **MODULES[bench].VARIANTS}
    if name not in variants:
        raise UserError(f"{bench} has no variant {name!r}: it has "
                        f"{', '.join(MODULES[bench].VARIANTS)}")
    return variants[name]


def load_records(bench: str, data, **options) -> list:
    """The records of a benchmark module; UserError when there are none."""
    try:
        records = MODULES[bench].load(data, **options)
    except RecursionError:
        raise UserError(f"{bench}: a file in {data} is nested too deeply to be read") from None
    if not records:
        raise UserError(f"{bench}: no records in {data}")
    return records


def chosen_records(bench: str, args) -> list:
    """Records of the run before --limit; for whole episodes one record per game."""
    records = load_records(bench, args.data, **variant(bench, args.variant)[0])
    MODULES[bench].prompt(records[0])  # a prompt may need files that the records do not
    if args.variant in WHOLE_GAMES:
        records = [{**r, "id": r["game"]} for r in records if r["step"] == 0]
    return records


def make_folder(path) -> Path:
    """The output folder; UserError when it cannot be made."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: cannot make the folder ({error.strerror}): name another") from None
    return folder


def responses_path(bench: str, args) -> Path:
    """The file of --responses for one benchmark."""
    path = Path(args.responses)
    return path / f"{bench}.jsonl" if args.bench == "all" else path


def read_responses(bench: str, records: list, args) -> dict:
    """{id: text} from --responses. Unknown and repeated ids end the run, missing ones fail."""
    if args.variant in WHOLE_GAMES:
        raise UserError("whole episodes need a model: a response decides what is asked next")
    path, known, answers = responses_path(bench, args), {r["id"] for r in records}, {}
    rows = common.read_rows(path, {"id": str, "response": str}, nonempty=True)
    for number, row in enumerate(rows, 1):
        where = f"{path}, record {number}"
        if row["id"] in answers:
            raise UserError(f"{where}: a second response to {row['id']!r}")
        if row["id"] not in known:
            raise UserError(f"{where}: unknown id {row['id']!r}, {bench} has ids like "
                            f"{records[0]['id']!r}")
        answers[row["id"]] = row["response"]
    # a partial file is scored, since it may hold all that a cut-off run made, but not silently
    missing = [r["id"] for r in common.spread(records, args.limit) if r["id"] not in answers]
    if missing:
        print(f"eval: {path}: no response for {len(missing)} of {bench}'s records, first "
              f"{missing[0]!r}: they count as failed", file=sys.stderr)
    return answers


def load_policy(args):
    """The model, with --adapter as adapter "agent"."""
    from policy import Policy  # only here: scoring needs no torch
    if args.adapter is None:
        return Policy.load(args.model, adapters=(), quant=args.quant)
    if not (Path(args.adapter) / "adapter_config.json").is_file():
        raise UserError(f"--adapter {args.adapter}: no adapter_config.json, is it a PEFT folder?")
    return Policy.load(args.model, adapters=("agent",), quant=args.quant,
                       adapter_folder=args.adapter)


def evaluate(bench: str, records: list, policy, answers, args, folder: Path) -> dict:
    """Responses, verdicts, results of one benchmark; returns the summary that was written."""
    bench_module, began = MODULES[bench], time.perf_counter()
    # the name says which run it is: another model, option or data set is another file
    settings = run_settings(bench, policy, args)
    source = Path(args.responses).stem if args.responses else Path(args.model).name
    parts = [bench, args.variant, common.file_name(source), digest(settings)[:10]]
    name = "-".join(filter(None, parts))
    path = folder / f"{name}.jsonl"
    prompts = {} if args.variant in WHOLE_GAMES else {
        r["id"]: bench_module.prompt(r) for r in records}
    rows = earlier_rows(path, prompts, records)
    todo = [r for r in records if r["id"] not in rows]
    # one iterator of rows, wherever the responses come from
    if answers is not None:
        made = (response_row(r, prompts[r["id"]], answers.get(r["id"])) for r in todo)
    elif args.variant in WHOLE_GAMES:
        made = play(bench_module, todo, policy, settings, args)
    else:
        label = f"{bench}: {len(rows)} there, " if rows else bench
        made = generate(todo, prompts, policy, settings, args, label)
    # every response is on disk before the next batch: an interrupted run loses one batch at most
    with open(path, "a", encoding="utf-8") as file:
        for row in made:
            rows[row["id"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
    # scores are never taken from an earlier run: a corrected scorer must show
    verdicts = [verdict_of(bench_module, record, rows[record["id"]], args) for record in records]
    # the results file with verdicts, in the order of the records, replaced in one step
    write_whole(path, "".join(json.dumps({**rows[r["id"]], "verdict": vars(v)}) + "\n"
                              for r, v in zip(records, verdicts)))
    summary = summarise(bench, records, verdicts, rows, settings, args,
                        time.perf_counter() - began)
    write_whole(folder / f"{name}.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return {**summary, "file": str(folder / f"{name}.json")}


def digest(value) -> str:
    """sha256 of a value by its JSON text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def run_settings(bench: str, policy, args) -> dict:
    """Everything that decides the responses or the interval; its hash is part of the file names."""
    settings = {"benchmark": bench, "variant": args.variant, "limit": args.limit,
                "model": args.model, "adapter": args.adapter, "quant": args.quant,
                "batch_size": args.batch_size, "seed": args.seed,
                "data_sha256": common.folder_hash(common.data_dir(args.data, bench))}
    if policy is None:
        text = responses_path(bench, args).read_bytes()
        return settings | {"responses_sha256": hashlib.sha256(text).hexdigest()}
    # prompt and response share the context; beyond it positions were never trained
    context = policy.lm.config.max_position_embeddings
    # a small context still leaves half of itself to the prompt
    whole = args.variant == "dialogue"  # one response is all that follows the first prompt
    most = alfworld.DIALOGUE_TOKENS if whole else MODULES[bench].MAX_NEW_TOKENS
    new = min(args.max_new or most, context // 2)
    return settings | {"model_stamp": stamp(args.model), "device": policy.device.type,
                       "adapter_stamp": stamp(args.adapter), "max_new_tokens": new,
                       "max_prompt": min(args.max_prompt or context, context - new)}


def stamp(folder):
    """Tells one state of a model folder from another by file names, sizes and times; a retrained
    model at the same place is another model. None for hub names and None."""
    if folder is None or not Path(folder).is_dir():
        return None
    return digest([[p.name, p.stat().st_size, p.stat().st_mtime_ns]
                   for p in sorted(Path(folder).iterdir()) if p.is_file()])


# ---------------------------------------------------------------------------------------------
# responses


def response_row(record, messages, text, truncated=False, sizes=(None, None), problem="") -> dict:
    """One line of the results file before its verdict."""
    if text is None and not problem:
        problem = "no response"
    return {"id": record["id"], "category": record["category"], "prompt": messages,
            "response": text, "truncated": truncated, "prompt_tokens": sizes[0],
            "response_tokens": sizes[1], "problem": problem}


def earlier_rows(path: Path, prompts: dict, records: list) -> dict:
    """{id: row} of an earlier run with the same settings; rows with another prompt do not count.

    A half-written last line (the run was killed) is dropped, any other damage is a UserError.
    """
    if not path.is_file():
        return {}
    known, rows = {r["id"] for r in records}, {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is unfinished
        row = common.parse_row(line, f"{path}, record {number}",
                               ("id", "prompt", "response", "truncated", "problem"))
        if row["id"] in known and row["prompt"] == prompts.get(row["id"], row["prompt"]):
            rows[row["id"]] = row
    if lines[-1]:
        write_whole(path, "".join(line + "\n" for line in lines[:-1]))
    return rows


def encode(policy, record, messages) -> list:
    """Token ids of a chat prompt. Templates without a system role get its text in front."""
    import jinja2  # comes with transformers, which renders templates by it
    for attempt in (messages, folded(messages)):
        try:
            return policy.encode(attempt)
        except jinja2.exceptions.TemplateError as error:
            problem = one_line(error)
    raise UserError(f"the model's chat template refuses the prompt of {record['id']}: {problem}")


def folded(messages: list) -> list:
    """The system message put in front of the first user message."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return messages
    first = messages[1]
    text = messages[0]["content"] + "\n\n" + first["content"]
    return [{**first, "content": text}] + messages[2:]


def generate(records: list, prompts: dict, policy, settings: dict, args, label: str):
    """Greedy responses, batch by batch; yields rows. Prompts over the limit get none."""
    from tqdm import tqdm
    todo = []
    for record in records:
        ids = encode(policy, record, prompts[record["id"]])
        if len(ids) > settings["max_prompt"]:
            problem = f"prompt too long: {len(ids)} tokens, the limit is {settings['max_prompt']}"
            yield response_row(record, prompts[record["id"]], None, False, (len(ids), 0), problem)
        else:
            todo.append((record, ids))
    # similar lengths share a batch, so little is padded; the longest first, so that a batch that
    # does not fit in memory fails at once
    todo.sort(key=lambda pair: -len(pair[1]))
    with tqdm(total=len(todo), desc=label, unit="response", mininterval=1.0) as bar:
        for batch in batches(todo, args.batch_size):
            for (record, ids), rollout in zip(batch, sample(policy, [i for _, i in batch],
                                                            settings)):
                yield response_row(record, prompts[record["id"]], policy.decode(rollout.response),
                                   bool(rollout.limit), (len(ids), len(rollout.response)))
            bar.update(len(batch))


def batches(todo: list, size: int):
    """Lists of at most `size` (record, ids), longest first, within BATCH_TOKENS where possible."""
    start = 0
    while start < len(todo):
        room = max(1, BATCH_TOKENS // max(1, len(todo[start][1])))
        yield todo[start:start + min(size, room)]
        start += min(size, room)


def sample(policy, prompts: list, settings: dict) -> list:
    """Greedy rollouts of token prompts, all in one batch. UserError when memory does not do."""
    with one_line_for_memory(f"{len(prompts)} prompts of up to {max(map(len, prompts))} tokens"):
        return policy.sample("agent" if settings["adapter"] else None, prompts, G=1,
                             temperature=0.0, max_new_tokens=settings["max_new_tokens"],
                             max_rows=len(prompts))


@contextmanager
def one_line_for_memory(what: str):
    """Inside, too little memory is a UserError."""
    import torch
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory with {what}: lower --batch-size or --max-prompt; the "
                        "responses so far are kept") from None


def play(bench_module, records: list, policy, settings: dict, args):
    """Whole ALFWorld episodes, a batch of games at a time; yields rows with the outcome."""
    from tqdm import tqdm

    def respond(prompts):
        ids = [encode(policy, {"id": "an episode"}, p) for p in prompts]
        # the transcript grows with every step and may outgrow the context before the game ends
        fits = [i for i in ids if len(i) <= settings["max_prompt"]]
        texts = iter([policy.decode(r.response) for r in sample(policy, fits, settings)]
                     if fits else [])
        return [next(texts) if len(i) <= settings["max_prompt"] else None for i in ids]

    with tqdm(total=len(records), desc="alfworld episodes", unit="game") as bar:
        for start in range(0, len(records), args.batch_size):
            games = records[start:start + args.batch_size]
            if args.variant == "dialogue":
                adapter = "agent" if settings["adapter"] else None
                with one_line_for_memory(f"{len(games)} games"), \
                        one_line_for_templates(args.model):
                    played = bench_module.dialogues(args.data, policy, adapter, games,
                                                    settings["max_new_tokens"])
            else:
                played = bench_module.episodes(args.data, respond, games)
            for game in played:
                problem = "prompt too long" if "prompt too long" in game["reason"] else ""
                yield {**game, "prompt": None, "response": "\n".join(game["commands"]),
                       "truncated": False, "problem": problem}
                bar.update(1)


# ---------------------------------------------------------------------------------------------
# verdicts and summary


def verdict_of(bench_module, record, row: dict, args) -> Verdict:
    """The verdict on one row. A response that does not exist fails whatever the benchmark says."""
    if args.variant in WHOLE_GAMES:
        return Verdict(row["won"], float(row["won"]), row["reason"], {"steps": row["steps"]})
    options = dict(variant(bench_module.NAME, args.variant)[1])
    scorer = getattr(bench_module, options.pop("scorer", "score"))
    if row["problem"]:
        # the extras of an empty response keep the aggregates complete
        return Verdict(False, 0.0, row["problem"], scorer(record, "", **options).extra)
    return scorer(record, row["response"], **options)


def summarise(bench, records, verdicts, rows, settings, args, seconds) -> dict:
    """The summary of one benchmark: score, interval, categories, settings, versions."""
    bench_module = MODULES[bench]
    # the interval resamples records through the same aggregate that made the score
    aggregate = common.mean_score if args.variant in WHOLE_GAMES else bench_module.aggregate
    result = aggregate(records, verdicts)
    return {
        "benchmark": bench, "variant": args.variant, "model": args.model, "adapter": args.adapter,
        "responses": args.responses, "n": len(records), "score": result["score"],
        "interval_95": common.interval(records, verdicts, aggregate, result["score"], args.seed),
        "passed": sum(v.ok for v in verdicts), "categories": result["categories"],
        "metrics": {k: v for k, v in result.items() if k not in ("score", "n", "categories")},
        "prompts_too_long": sum("too long" in rows[r["id"]]["problem"] for r in records),
        "responses_missing": sum(rows[r["id"]]["problem"] == "no response" for r in records),
        "responses_truncated": sum(bool(rows[r["id"]]["truncated"]) for r in records),
        "paper": None if args.variant else bench_module.PAPER, "settings": settings,
        "note": "" if args.variant else vars(bench_module).get("NOTE", ""),
        "seconds": round(seconds, 1),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES}}


def version(package: str):
    """The installed version of a package or None; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(head: list, rows: list) -> str:
    """Aligned columns; the first is text, the others are numbers."""
    rows = [head] + [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                       for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0])] + lines[1:])


def print_table(summaries: list):
    """One table: ours with its interval, and the paper's figures beside it."""
    systems = ("Qwen2.5-7B", "GenEnv 7B")
    # a variant follows another protocol, so the paper's figure does not belong beside it
    rows = []
    for s in summaries:
        low, high = s["interval_95"]["low"], s["interval_95"]["high"]
        paper = s["paper"] or {}
        rows.append([s["benchmark"] + (f" ({s['variant']})" if s["variant"] else ""), s["n"],
                     f"{s['score']:.1f}", f"{low:.1f} to {high:.1f}", s["prompts_too_long"],
                     s["responses_truncated"] + s["responses_missing"]]
                    + [paper.get(name, "-") for name in systems])
    print(table(["benchmark", "n", "score %", "95 % interval", "too long", "cut/missing",
                 *(f"paper: {name}" for name in systems)], rows))
    print("\nInterval: " + "; ".join(dict.fromkeys(s["interval_95"]["method"] for s in summaries))
          + ". The paper's protocols are partly unknown: see eval/README.md before comparing.")
    for s in summaries:
        print(f"{s['benchmark']}: {s['note'] + '; ' if s['note'] else ''}{s['file']}")


# ---------------------------------------------------------------------------------------------
# recorded verdicts, gold responses


def verify(argv) -> int:
    """Re-score recorded verdicts: agreement per kind, every disagreement; 0 if the rate is met."""
    parser = Parser("python -m eval verify")
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("verdicts", metavar="VERDICTS.jsonl")
    parser.add_argument("--data", required=True, metavar="DIR")
    args = parser.parse_args(argv)
    rows = common.read_rows(args.verdicts, ("id", "official_verdict"), nonempty=True)
    for number, row in enumerate(rows, 1):
        if row.get("benchmark", args.bench) != args.bench:
            raise UserError(f"{args.verdicts}, record {number}: a verdict of {row['benchmark']!r}, "
                            f"not of {args.bench}")
    # disagreements are printed as they come: a long run should show them early
    bench_module, kinds = MODULES[args.bench], {}
    with common.one_line_for(f"{args.verdicts}: a recorded verdict"):
        for kind, agrees, detail in bench_module.verify(args.data, rows):
            kinds.setdefault(kind, []).append(agrees)
            if agrees is False:
                print(f"disagrees  {kind}  {one_line(detail, 1000)}")
    return print_agreement(kinds, bench_module.REQUIRED)


def print_agreement(kinds: dict, required: dict) -> int:
    """Table of agreement per kind; 0 if every required rate is met, else 1."""
    rows, met = [], True
    for kind, results in sorted(kinds.items()):
        # what cannot be decided is neither agreement nor disagreement
        decided = [r for r in results if r is not None]
        rate, need = sum(decided) / max(1, len(decided)), required.get(kind)
        short = need is not None and bool(decided) and rate < need
        met = met and not short
        rows.append([kind, len(decided), sum(decided), f"{100 * rate:.2f}" if decided else "-",
                     "-" if need is None else f"{100 * need:g}", len(results) - len(decided),
                     "MISSED" if short else "none decided" if not decided else "ok"])
    print(table(["kind", "verdicts", "agree", "rate %", "required %", "undecidable", ""], rows))
    return 0 if met and any(r is not None for results in kinds.values() for r in results) else 1


def gold(argv) -> int:
    """Score the gold response of every record, variant by variant, and say where it fails."""
    parser = Parser("python -m eval gold")
    parser.add_argument("bench", choices=BENCHES + ("all",))
    parser.add_argument("--data", required=True, metavar="DIR")
    args = parser.parse_args(argv)
    rows, benches = [], BENCHES if args.bench == "all" else (args.bench,)
    for bench in benches:
        for name in [None, *MODULES[bench].VARIANTS]:
            if name not in WHOLE_GAMES and name not in RESPONSES_ONLY:
                rows.append(gold_row(bench, name, args.data))
    print(table(["benchmark", "records", "without gold", "pass", "rate %"], rows))
    print("\nWhy some fail: eval/README.md, \"Where gold responses do not score 100 %\"")
    return 0


def gold_row(bench: str, name, data) -> list:
    """One row of the gold table; prints every gold response that fails."""
    bench_module, (loading, options) = MODULES[bench], variant(bench, name)
    records, options = load_records(bench, data, **loading), dict(options)
    title = bench + (f" ({name})" if name else "")
    scorer = getattr(bench_module, options.pop("scorer", "score"))
    rule = {"rule": options["rule"]} if "rule" in options else {}
    # records without a gold response are counted apart, not as failures
    absent = passed = 0
    for record in records:
        response = bench_module.gold(record, **rule)
        if response is None:
            absent += 1
            continue
        try:
            result = scorer(record, response, **options)
        except UserError as error:
            print(f"{title}: skipped, {one_line(error)}")
            return [title, len(records), "-", "-", "skipped"]
        passed += result.ok
        if not result.ok:
            print(f"{title}: gold of {record['id']} fails: {one_line(result.reason, 300)}")
    scored = len(records) - absent
    return [title, len(records), absent, passed, f"{100 * passed / scored:.1f}" if scored else "-"]


if __name__ == "__main__":
    sys.exit(main())

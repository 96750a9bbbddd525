"""Malformed input of every kind: one clear line on stderr, exit code 2, nothing half written.

    python -m pytest -q tests/test_bad_input.py

Options, run folders to resume (options, checkpoint, pools), files of tasks, benchmark files, and
the other command lines. Every case runs in this process; none gets as far as training.
"""
import dataclasses
import gzip
import json
import os
import shutil
import sys

import pytest
import torch

from conftest import MICRO, write_report
import eval.__main__
import eval.make_base
from scripts import experiments
import genenv
from support import checkpoint
from support.options import CHOICES, NAMED
from support import report
from worlds import ladder

pytestmark = pytest.mark.usefixtures("no_training")
measure_untrained = genenv.measure_untrained


@pytest.fixture(scope="module")
def done(quiet_run, small_ladder):
    """(run folder of three epochs, a policy of its base model, the folder of that model)."""
    return quiet_run, ladder.load_policy(genenv.Options(base_model=small_ladder, rank=4)), small_ladder


@pytest.fixture
def no_training(monkeypatch):
    """Whatever gets as far as an epoch was not refused. The report is the real one."""
    monkeypatch.setattr(report, "write", write_report)
    def begun(*args):
        raise AssertionError("this input was accepted")
    monkeypatch.setattr(genenv, "measure_untrained", begun)
    monkeypatch.setattr(genenv, "epoch", begun)


@pytest.fixture
def folder(done, tmp_path, monkeypatch):
    """A copy of the run to damage. The policy is not loaded anew, which is what takes long."""
    shutil.copytree(done[0], tmp_path / "run", ignore=shutil.ignore_patterns("figures", "*.html"))
    monkeypatch.setattr(ladder, "load_policy", lambda o: done[1])
    return tmp_path / "run"


def tree(root):
    """{path: bytes} of all files below a folder, but those that hold what was set aside."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*"))
            if p.is_file() and p.suffix != ".torn"}


def refused(capsys, root, main, argv, *words):
    """`main(argv)` says all of `words` in one line, returns 2, and changes nothing below `root`."""
    before = tree(root)
    capsys.readouterr()
    try:
        code = main([str(a) for a in argv])
    except SystemExit as error:
        code = error.code
    err = capsys.readouterr().err
    assert code == 2, err
    assert err.count("\n") == 1 and err.endswith("\n") and len(err) < 900, err
    assert "Traceback" not in err and all(str(w) in err for w in words), err
    after = tree(root)
    assert after.keys() == before.keys() and after == before


# ---------------------------------------------------------------------------------------------
# options of genenv.py


def wrong_values():
    """(flag, value) for every option: of the wrong type, missing, or outside its range."""
    for f in dataclasses.fields(genenv.Options):
        flag = "--" + f.name.replace("_", "-")
        if f.type is int:
            yield from ((flag, v) for v in ("1.5", "-1"))
        elif f.type is float:
            yield from ((flag, v) for v in ("x", "nan", "-0.5"))
        elif f.type is str:
            yield flag, None
    for flag, values in {
            "--alpha": ["0", "1", "2"], "--alpha-end": ["0", "1"], "--G": ["0", "1"],
            "--base-share": ["1.1"], "--seed": ["99999999999999999999"],
            "--threads": ["99999999"], "--resume": ["yes"], "--temperature": ["0"],
            "--device": ["gpu", "cuda:99", "cuda:"], "--agent-lr": ["0"], "--rank": ["0"], "--steps": ["0"]}.items():
        yield from ((flag, v) for v in values)
    yield from (("--" + name.replace("_", "-"), "moon") for name in (*CHOICES, *NAMED))


VALUES = list(wrong_values())


@pytest.mark.parametrize("flag, value", VALUES, ids=[f"{f} {v}" for f, v in VALUES])
def test_option(flag, value, tmp_path, capsys):
    """A wrong value of any option is refused by its name."""
    argv = ["--out", tmp_path / "r", flag, *([] if value is None else [value])]
    word = "yes" if value == "yes" else flag
    refused(capsys, tmp_path, genenv.main, argv, "genenv: ", word)


WARM = ["warm-start", "--out", "{tmp}/m", "--model", "m", "--base-tasks", "b"]
# the mistakes that users make most: (argv, what the line must say)
MISTAKES = {
    "unknown": (["--moon", "1"], "--moon"), "stray": (["--alpha", "0.5", "moon"], "moon"),
    "option misspelt": (["--epoch", "3"], "did you mean --epochs"),
    "option of another world": (["--tools", "list.json"], "--tools belongs to --world tool_calls"),
    **{f"{variant} without base tasks": (["--world", "tool_calls", "--model", "m", "--variant", variant, "--tools",
                                          "worlds/example_tools.json"], "give --base-tasks")
       for variant in ("base", "static")},
    "underscore": (["--seed_tasks=4"], "did you mean --seed-tasks"),
    "abbreviated": (["--alph", "0.5"], "did you mean --alpha"),
    "command misspelt": (["warmstart"], "did you mean warm-start"),
    "no command": (["moon"], "warm-start, ask, export, compare"),
    "choice misspelt": (["--alpha-schedule", "liner"], "did you mean linear"),
    "own schedule not there": (["--alpha-schedule", "mine"], "choose from constant"),
    "function without its prefix": (["--difficulty-reward", "reward_bell"], "did you mean bell"),
    "world misspelt": (["--world", "lader"], "did you mean ladder"),
    "fork not there": (["--world", "mine"], "choose from household"),
    "comma": (["--alpha", "0,5"], "--alpha"),
    "fast": (["--device", "gpu"], "choose from auto, cpu, cuda"),
    "config not there": (["--config", "{tmp}/none"], "none"),
    "config is no config": (["--config", "{tmp}/file"], "not a JSON object"),
    "config is a folder": (["--config", "{tmp}"], "directory"),
    "config of a run that goes on": (["--resume", "--out", "{run}", "--config", "c"], "leave one"),
    "no world": (["--world", ""], "world"), "traversal": (["--world", "../ladder"], "world"),
    "preset": (["--preset", "7b"], "did you mean 7b-24gb"), "preset value": (["--preset"], "--preset"),
    "preset of another world": (["--preset", "1.5b-16gb", "--world", "ladder"], "tool_calls"),
    "no alpha end": (["--alpha-end", "0.4"], "--alpha-schedule constant"),
    "no model": (["--world", "tool_calls"], "--model"),
    "model for the ladder": (["--model", "x"], "--model"),
    "base model of a chat model": (["--world", "household", "--model", "m", "--base-model", "b"],
                                   "--base-model"),
    "simulator's model alone": (["--world", "ladder", "--env-model", "m"], "--env-model"),
    "base model where is none": (["--world", "template", "--base-model", "b"], "--base-model"),
    "tasks for the ladder": (["--base-tasks", "x"], "--base-tasks"),
    "preset without a model folder": (["--preset", "7b-24gb", "--model", "{tmp}/none"], "none"),
    "model is empty": (["--world", "tool_calls", "--model", "{tmp}", "--max-task-tokens", "64",
                        "--max-response-tokens", "64"], "model"),
    "short": (["--world", "tool_calls", "--model", "x", "--max-task-tokens", "20"],
              "--max-task-tokens"),
    "teacher alone": (["--variant", "teacher"], "--teacher-tasks"),
    "teacher tasks alone": (["--teacher-tasks", "{tmp}/none"], "only --variant teacher"),
    "teacher missing": (["--variant", "teacher", "--teacher-tasks", "{tmp}/none"], "none"),
    "teacher folder": (["--variant", "teacher", "--teacher-tasks", "{tmp}"], "{tmp}"),
    "resume alone": (["--resume"], "--out"),
    "resume nothing": (["--resume", "--out", "{tmp}/none"], "nothing to resume"),
    "resume a file": (["--resume", "--out", "{tmp}/file"], "nothing to resume"),
    "out is a file": (["--out", "{tmp}/file"], "is a file"),
    "out below a file": (["--out", "{tmp}/file/run"], "file"),
    "out is not empty": (["--out", "{tmp}"], "not empty"),
    "export alone": (["export"], "run"), "export nothing": (["export", "{tmp}/none"], "none"),
    "export no run": (["export", "{tmp}"], "no run folder: it has no config.json"),
    "export a file": (["export", "{tmp}/file"], "file"),
    "export format": (["export", "{tmp}", "--format", "moon"], "moon"),
    "export unknown": (["export", "{tmp}", "--moon"], "--moon"),
    "export out": (["export", "{run}", "--out", "{tmp}/none/x.jsonl"], "no such folder"),
    "export to a folder": (["export", "{run}", "--out", "{tmp}"], "{tmp}"),
    "compare alone": (["compare"], "RUN"), "compare nothing": (["compare", "{tmp}/none"], "none"),
    "compare no run": (["compare", "{tmp}"], "metrics.jsonl"),
    "compare to nowhere": (["compare", "{run}", "--out", "{tmp}/none/x.html"], "folder that exists"),
    "compare too many": (["compare", *7 * ["{run}"]], "at most 6"),
    "warm-start alone": (["warm-start"], "--out"),
    "warm-start without a model": (["warm-start", "--out", "{tmp}/m"], "--model"),
    "warm-start option": (["warm-start", "--out", "{tmp}/m", "--model", "m", "--epoch", "3"],
                          "did you mean --epochs"),
    **{f"warm-start {flag} {value}": ([*WARM, flag, value], flag) for flag, value in (
        ("--passes", "-1"), ("--lr", "-1"), ("--lr", "nan"), ("--lr", "inf"), ("--batch", "x"),
        ("--rounds", "-1"), ("--call-format", "yaml"), ("--out", ""), ("--model", ""))},
    "warm-start in a world without": ([*WARM[:-2], "--world", "ladder"], "warm_start_pairs"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_usual_mistake(name, tmp_path, capsys, done):
    """Typing errors, combinations that make no sense, folders and files that are not there: one line
    with what to do, before any model is loaded."""
    (tmp_path / "file").write_text("x")
    fill = lambda a: a.replace("{tmp}", str(tmp_path)).replace("{run}", str(done[0]))
    argv, word = MISTAKES[name]
    out = ["--out", tmp_path / "r"] if argv[0][0] == "-" and not {"--out", "--resume"} & set(argv) \
        else []
    refused(capsys, tmp_path, genenv.main, [*map(fill, argv), *out], "genenv: ", fill(word))


# ---------------------------------------------------------------------------------------------
# files of tasks


JUNK = {  # file contents that are no JSONL at all
    "binary": b"\x00\xff\xfe\x80\n", "utf-16": '{"text": "1 s1 inc"}\n'.encode("utf-16"),
    "gzip": gzip.compress(b'{"text": "1 s1 inc"}\n'), "half": b'{"text": "1 s1', "list": b"[1]\n",
    "number": b"3\n", "text": b"1 s1 inc\n", "nested": b'{"text": ' + b"[" * 50_000 + b"\n",
    "two on a line": b'{"text": "1 s1 inc"} {"text": "2 s1 inc"}\n',
}
TEACHER = {
    **JUNK, "empty": b"", "blank": b"\n\n", "no text": b'{"task": "1 s1 inc"}\n',
    "null": b'{"text": null}\n', "tool": b'{"text": "1 s1 moon"}\n',
    "second": b'{"text": "1 s1 inc"}\n{"text": "x"}\n',
}


@pytest.mark.parametrize("name", TEACHER)
def test_teacher_file(name, tmp_path, capsys, done):
    """A teacher's tasks are read before anything is written."""
    path = tmp_path / "teacher.jsonl"
    path.write_bytes(TEACHER[name])
    refused(capsys, tmp_path, genenv.main,
            ["--out", tmp_path / "r", "--base-model", done[2], "--variant", "teacher",
             "--teacher-tasks", path], path)


ASK = {"task": "Who wrote the novel Dune?", "reference": "Frank Herbert"}
TOOL = {"name": "lamp", "description": "Switch it.", "parameters": {
    "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}}
CALL = {"task": "Switch the lamp on, please.", "tools": [TOOL],
        "calls": [{"name": "lamp", "arguments": {"on": True}}]}
RECORDS = {  # a line of --base-tasks or --validation-tasks
    "no task": {"reference": "x"}, "task is a number": {**ASK, "task": 3},
    "both": {**CALL, "reference": "x"}, "references": {**ASK, "reference": [1]},
    "schema keyword": {**CALL, "tools": [{**TOOL, "parameters": {"type": "object", "oneOf": []}}]},
    "call of another tool": {**CALL, "calls": [{"name": "door", "arguments": {}}]},
    "argument type": {**CALL, "calls": [{"name": "lamp", "arguments": {"on": "yes"}}]},
    "ordered": {**CALL, "ordered": "yes"},
}
TOOL_CALLS = ["--preset", "tiny", "--world", "tool_calls", "--model"]
TASK_FILES = {**JUNK, **{k: json.dumps(r).encode() + b"\n" for k, r in RECORDS.items()},
              "empty": b"", "one task": json.dumps(ASK).encode(),
              "twice": 2 * (json.dumps(ASK).encode() + b"\n"),
              "not a number": b'{"task": "Who wrote the novel Dune?", "reference": NaN}\n'}


@pytest.mark.parametrize("option, name", [*(("--base-tasks", name) for name in TASK_FILES),
                                          ("--validation-tasks", "half")])
def test_task_files(option, name, tmp_path, capsys):
    """The file of base tasks, or of held-out ones, is named, with its line, before the model is looked
    for."""
    path, more = tmp_path / "tasks.jsonl", ["line 1"] if name in {**JUNK, **RECORDS} else []
    path.write_bytes(TASK_FILES[name])
    refused(capsys, tmp_path, genenv.main, [*TOOL_CALLS, tmp_path / "none", "--out", tmp_path / "r",
                                            option, path], path, *more)


# ---------------------------------------------------------------------------------------------
# a run to be resumed: options


def changed(**fields):
    """Edit of a JSON object: None removes the field."""
    def edit(d):
        d.update(fields)
        return {k: v for k, v in d.items() if v is not None}
    return edit


CONFIG = {
    "list": lambda c: [], "text": lambda c: "run", "null": lambda c: None, "number": lambda c: 3,
    "unknown option": changed(moon=1), "G text": changed(G="8"), "G float": changed(G=8.0),
    "G one": changed(G=1), "G bool": changed(G=True), "alpha list": changed(alpha=[0.5]),
    "alpha 2": changed(alpha=2.0), "variant": changed(variant="moon"),
    "variant number": changed(variant=1), "world": changed(world="moon"),
    "resume text": changed(resume="no"), "schedule": changed(alpha_schedule="moon"),
}


@pytest.mark.parametrize("name", CONFIG)
def test_resumed_config(name, folder, tmp_path, capsys):
    """config.json of a run: not an object, unknown options, values that no option can have."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG[name](json.loads(path.read_text()))))
    refused(capsys, tmp_path, genenv.main, ["--resume", "--out", folder], "genenv: ")


RAW = {"empty": b"", "half": b'{"G": 8, "al', "binary": b"\xff\x00\x80", "gone": None,
       "folder": "folder"}


@pytest.mark.parametrize("file, name", [("config.json", name) for name in RAW] + [
    ("checkpoint", name) for name in RAW if name != "gone"])  # without it the one before takes over
def test_resumed_file_is_broken(file, name, folder, tmp_path, capsys):
    """Empty, cut off, binary, missing, or a folder."""
    path = last_checkpoint(folder) if file == "checkpoint" else folder / file
    path.unlink()
    if RAW[name] == "folder":
        path.mkdir()
    elif RAW[name] is not None:
        path.write_bytes(RAW[name])
    refused(capsys, tmp_path, genenv.main, ["--resume", "--out", folder], path.name)


def last_checkpoint(folder):
    """The newest checkpoint."""
    return checkpoint._checkpoints(folder)[-1]


@pytest.mark.parametrize("flag, value", [
    ("--G", "4"), ("--alpha", "0.4"), ("--seed", "5"), ("--variant", "random"), ("--beta", "1"),
    ("--agent-lr", "0.1"), ("--rank", "8"), ("--steps", "3"), ("--world", "tool_calls"),
    ("--k-min", "0.1"), ("--env-weights", "linear")])
def test_resumed_with_another_option(flag, value, folder, tmp_path, capsys):
    """A resumed run is the same run: what would change it is refused by name."""
    refused(capsys, tmp_path, genenv.main, ["--resume", "--out", folder, flag, value],
            flag, "cannot become")


def test_resumed_with_a_preset_of_another_world(folder, tmp_path, capsys):
    """Its options of that world are none here."""
    refused(capsys, tmp_path, genenv.main, ["--resume", "--out", folder, "--preset", "1.5b-16gb"],
            "--preset 1.5b-16gb is for --world tool_calls")


# ---------------------------------------------------------------------------------------------
# a run to be resumed: the checkpoint


def test_a_checkpoint_of_another_model(folder, tmp_path, capsys):
    """It is whole, but not what this run can have written."""
    path = last_checkpoint(folder)
    state = checkpoint._read(path)
    state["adapters"]["agent"].pop()
    path.write_bytes(checkpoint._packed(state))
    refused(capsys, tmp_path, genenv.main, ["--resume", "--out", folder], path, "remove it")


def test_a_checkpoint_that_would_run_code(folder, tmp_path, capsys):
    """A pickle of an object is refused; nothing of it is called."""
    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "touched"),)
    path = last_checkpoint(folder)
    path.write_bytes(checkpoint._packed(Touch()))
    refused(capsys, tmp_path, genenv.main, ["--resume", "--out", folder], path)
    assert not (tmp_path / "touched").exists()


# ---------------------------------------------------------------------------------------------
# a run to be resumed: append-only files


@pytest.mark.parametrize("file", checkpoint.FILES)
def test_an_edited_file_is_refused(file, folder, tmp_path, capsys):
    """Whatever was changed in it, at the same length: its hash is in the checkpoint. A record without
    replay_signal was a KeyError."""
    text = (folder / file).read_text()
    at = text.index("epoch")
    (folder / file).write_text(text[:at] + "xpoch" + text[at + 5:])
    refused(capsys, tmp_path, genenv.main, ["--resume", "--out", folder], folder / file,
            "not what this run")


def test_an_edited_file_of_tasks_is_refused(tmp_path, capsys, monkeypatch, done):
    """Held-out tasks would move into the base without a word."""
    tasks, run = tmp_path / "tasks.jsonl", tmp_path / "run"
    tasks.write_text('{"text": "1 s1 inc"}\n')
    with monkeypatch.context() as patch:  # one epoch, the one before training
        patch.setattr(genenv, "measure_untrained", measure_untrained)
        assert genenv.main(["--out", str(run), "--base-model", done[2], *MICRO, "--epochs", "0",
                            "--variant", "teacher", "--teacher-tasks", str(tasks)]) == 0
    tasks.write_text('{"text": "2 s1 inc"}\n')
    refused(capsys, tmp_path, genenv.main, ["--resume", "--out", run, "--epochs", "1"], tasks,
            "not what this run")


@pytest.mark.parametrize("file", checkpoint.FILES)
@pytest.mark.parametrize("keep", [0, 0.5, None])
def test_pool_is_shorter_than_the_checkpoint_knows(file, keep, folder, tmp_path, capsys):
    """Records that are gone are missed, and the other files are not cut."""
    path = folder / file
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[:int(keep * len(data))])
    refused(capsys, tmp_path, genenv.main, ["--resume", "--out", folder], path, "shorter")


# ---------------------------------------------------------------------------------------------
# the other command lines


TOOLS = {
    "report: nothing": (report.main, []), "report: two": (report.main, ["a", "b"]),
    "report: none": (report.main, ["{tmp}/none"]), "report: no run": (report.main, ["{tmp}"]),
    "experiments: nothing": (experiments.main, []),
    "experiments: suite": (experiments.main, ["moon"]),
    "experiments: seeds": (experiments.main, ["paper", "--seeds", "0", "--out", "{tmp}/e"]),
    "experiments: seeds text": (experiments.main, ["paper", "--seeds", "x"]),
    "experiments: jobs": (experiments.main, ["paper", "--jobs", "0", "--out", "{tmp}/e"]),
    "experiments: nothing to draw": (experiments.main, ["paper", "--only-draw", "--out",
                                                        "{tmp}/e"]),
    "experiments: option": (experiments.main, ["paper", "--moon", "1", "--out", "{tmp}/e"]),
    "experiments: value": (experiments.main, ["paper", "--alpha", "7", "--out", "{tmp}/e"]),
    "experiments: no base to train": (experiments.main, [
        "bases", "--world", "tool_calls", "--model", "m", "--out", "{tmp}/e"]),
    "experiments: variant": (experiments.main, ["paper", "--only", "moon", "--out", "{tmp}/e"]),
    "bench: nothing": (bench.main, []), "bench: suite": (bench.main, ["moon"]),
    "bench: value": (bench.main, ["trl", "--steps", "x"]),
    "bench: steps": (bench.main, ["trl", "--steps", "0"]),
    "bench: G": (bench.main, ["trl", "--G", "1"]), "bench: option": (bench.main, ["trl", "--moon"]),
    "bench: shape": (bench.main, ["gpu", "--tiny", "--prompt", "8"]),
    "bench: no GPU": (bench.main, ["gpu"]),
    "bench: no card": (bench.main, ["memory", "--card", "24"]), "bench: no TRL": (bench.main, ["trl"]),
    "bench: width": (bench.main, ["trl", "--hidden", "100"]),
    "bench: rows": (bench.main, ["trl", "--trl-rows", "5"]),
    "bench: no model": (bench.main, ["model", "--base-tasks", "x"]),
    "tools: no data": (tools.main, ["run", "--model", "m"]),
    "tools: nothing to draw": (tools.main, ["table", "--results", "none"]),
    "tools: option": (tools.main, ["table", "--nonsense"]),
    "make_base: nothing": (eval.make_base.main, []),
    "make_base: bench": (eval.make_base.main, ["moon", "--data", "{tmp}", "--out", "{tmp}/o"]),
    "make_base: exists": (eval.make_base.main, ["bfcl", "--data", "{tmp}", "--out", "{tmp}/file"]),
    "make_base: limit": (eval.make_base.main, ["bfcl", "--data", "{tmp}", "--tools", "0", "--out",
                                               "{tmp}/o"]),
    "make_base: none to make": (eval.make_base.main, ["bamboogle", "--data", "{tmp}/data", "--out",
                                                      "{tmp}/o"]),
    "ladder: number": (ladder.main, ["teacher", "x", "{tmp}/o"]),
    "ladder: nothing": (ladder.main, ["teacher"]),
    "ladder: zero": (ladder.main, ["teacher", "0", "{tmp}/o"]),
    "ladder: folder": (ladder.main, ["teacher", "3", "{tmp}/none/o"]),
    "ladder: command": (ladder.main, ["moon"]),
}


@pytest.mark.parametrize("name", TOOLS)
def test_other_command_lines(name, tmp_path, capsys, monkeypatch):
    """report, experiments, bench, make_base and the ladder's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main, argv = TOOLS[name]
    refused(capsys, tmp_path, main, [a.replace("{tmp}", str(tmp_path)) for a in argv], ": ")


REPORTED = {
    ("metrics.jsonl", "empty"): lambda t: "", ("metrics.jsonl", "half"): lambda t: t[:50],
    ("metrics.jsonl", "no alpha"): lambda t: t.replace('"alpha"', '"beta"'),
    ("metrics.jsonl", "text"): lambda t: t.replace('"validation": 0', '"validation": "x'),
    ("metrics.jsonl", "warnings"): lambda t: t.replace('"warnings": [', '"warnings": [3, '
                                                       ).replace(", ]", "]"),
    ("samples.jsonl", "no traces"): lambda t: t.replace('"traces"', '"paths"'),
    ("samples.jsonl", "task number"): lambda t: '{"epoch": 0, "task": 3, "origin": "", '
                                                '"p_hat": 0, "traces": []}\n',
    ("samples.jsonl", "half"): lambda t: t[:-20], ("config.json", "list"): lambda t: "[]",
    ("config.json", "no world"): lambda t: t.replace('"world"', '"planet"'),
    ("config.json", "half"): lambda t: t[:-20],
}


@pytest.mark.parametrize("file, name", REPORTED, ids=lambda x: x)
def test_report_of_a_damaged_run(file, name, folder, tmp_path, capsys):
    """python -m watch.report writes no page and no figure of what it cannot read."""
    path = folder / file
    path.write_text(REPORTED[file, name](path.read_text()))
    refused(capsys, tmp_path, report.main, [folder], "report: ")


@pytest.mark.parametrize("name", ["config", "train", "world"])
def test_export_of_a_damaged_run(name, folder, tmp_path, capsys):
    """genenv.py export writes no file from what it cannot read."""
    file, word = {"config": ("config.json", "not the options of a run"),
                  "train": ("train.jsonl", "train.jsonl"), "world": ("config.json", "moon")}[name]
    text = (folder / file).read_text()
    (tmp_path / "o.jsonl").write_text("a good file")
    (folder / file).write_text(text.replace('"ladder"', '"moon"') if name == "world" else text[:40])
    refused(capsys, tmp_path, genenv.main, ["export", folder, "--out", tmp_path / "o.jsonl"],
            word)

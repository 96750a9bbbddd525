"""The pages name commands, options and files that exist.

Run: python -m pytest tests/test_pages.py -q
"""
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from scripts import warm_start
from support.files import UserError
import curriculum
import genenv
from support.options import parse_options
from support.presets import PRESETS
from test_health import recorded
from test_report import save
from support import screen
from worlds import load_world, world_names

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "TROUBLESHOOTING.md", "run/README.md", "worlds/README.md",
         "bench/README.md"]
STUDY = ["EXPERIMENTS.md", *(f"experiments/results/{name}.md" for name in
                             ("ladder", "parts", "schedules", "household", "real-model",
                              "bring-your-tools", "bring-your-tools-bfcl",
                              "bring-your-tools-larger"))]
GONE = {"--seeds", "--env-probe", "--keep-tools", "--offer", "--exemplars", "--cache-dir", "--measured",
        "--random-weights", "--env-update", "--filter-scope", "--control", "--reward-noise",
        "--pool-age", "--env-age", "--env-fresh", "--success-at"}
OF_A_RUN = {"metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl", "config.json",
            "memory.json", "report.html", "tasks.jsonl", "base.jsonl", "mine.py",
            "SUITE.jsonl", "SUITE.md"}  # any suite of experiments


def commands(page) -> list[list[str]]:
    """The words of every `python ...` of a page, in blocks and in the text."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    for name, value in re.findall(r'^(\w+)="([^"$]*)"$', text, re.M):  # a variable of the shell
        text = text.replace(f"${name}", value)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = [part.strip() for block in blocks for line in block.splitlines()
             for part in re.sub(r"\s#.*|\[options.*", "", line).split("&&")]
    inline = re.findall(r"`(python [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [shlex.split(line) for line in [*lines, *inline] if line.startswith("python ")]


def check_run(words):
    """Parse the options of one `python genenv.py ...` as the program would."""
    words = ["template" if w == "mine" else w for w in words if w not in ("--resume", "RUN")]
    words = words[:-1] if words[-1:] == ["--out"] else words  # it was --out RUN
    if words[:1] == ["warm-start"]:
        paths = [] if "--out" in words else ["--out", "D"]
        paths += [] if "--model" in words else ["--model", "M"]
        return warm_start.parse([*words[1:], *paths])
    return parse_options(words)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_pages_are_understood(page, monkeypatch):
    """An option that was renamed, a preset or a schedule that is not there."""
    # the README's own example, which its reader has written by then
    monkeypatch.setattr(curriculum, "alpha_warmup", lambda c: 0.5, raising=False)
    found = commands(page)
    assert found
    for words in found:
        if words[1] == "-m":
            assert importlib.util.find_spec(words[2]), words
        elif words[1] != "genenv.py":
            assert (ROOT / words[1]).is_file(), words
        elif not {"--help", "export", "ask", "compare"} & set(words):
            check_run(words[2:])


def test_a_command_with_a_wrong_option_is_noticed():
    """The check itself."""
    for words in (["--seed_tasks", "4"], ["--preset", "moon"], ["warm-start", "--steps-back", "4"],
                  ["--alpha-schedule", "moon"]):
        with pytest.raises(UserError):
            check_run(words)


def known_options() -> set:
    """Every --option of the programs: of a run, its worlds, and of the commands beside it."""
    names = {"preset", "config", "help", *vars(genenv.Options()), *vars(warm_start.Settings()),
             *bench.NUMBERS}
    for world in world_names():
        names |= set(getattr(load_world(world), "OPTIONS", {}))
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("*/__main__.py")]
    sources += [(ROOT / name).read_text(encoding="utf-8") for name in
                ("eval/make_base.py", "commands/export.py", "commands/ask.py", "commands/compare.py",
                 "experiments/tools.py")]
    own = {flag for source in sources for flag in re.findall(r"\"(--[a-z][a-z-]*)\"", source)}
    # names come from Options: they are written as in Python, and a bool has its negation
    flags = {"--" + name.replace("_", "-") for name in names}
    return flags | {"--no-" + flag[2:] for flag in flags} | own | {"--no-deps", "--index-url"}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", *STUDY])
def test_options_on_the_pages_exist(page):
    """Those that were renamed stand in the changelog alone."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[A-Za-z][A-Za-z-]*[a-z]|--G\b", text))
    allowed = known_options() | (GONE if page == "CHANGELOG.md" else set())
    assert named <= allowed, sorted(named - allowed)


@pytest.mark.parametrize("page", [*PAGES, *STUDY])
def test_files_on_the_pages_exist(page):
    """A module that moved to another room."""
    text, here = (ROOT / page).read_text(encoding="utf-8"), (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    files = [name for name in re.findall(r"`([\w./]+\.(?:py|md|jsonl|json|txt|html))\b", text)
             if Path(name).name not in OF_A_RUN]
    missing = [name for name in [*links, *files]
               if not (here / name).exists() and not (ROOT / name).exists()]
    named = re.findall(r"`(\w+\.py): ([\w, ]+)`", text)  # file: functions in it
    for name, functions in named:
        source = (ROOT / name).read_text(encoding="utf-8")
        missing += [f for f in functions.split(", ")
                    if not re.search(rf"(def|class) {f}\b", source)]
    assert not missing


def test_the_first_page_is_short_and_has_one_block_for_the_real_model():
    """Under 180 lines; the block below its mark is what is pasted."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 180
    assert len(re.findall(r"^<!-- real model -->\n```bash\n", text, re.M)) == 1
    assert text.count("<!-- real model -->") == 1


def test_the_example_of_the_first_page_is_what_the_code_does():
    """Seed task, variation and answer stand in the output of the walkthrough; the world gives the
    answer the reward that the page names, and the variation lies in the default band."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    seed, task, answer = (re.search(rf"^{name} +(.*?)  ", text, re.M)[1] for name in
                          ("seed task", "the simulator varies it", "the agent answers"))
    made = (ROOT / "walkthroughs" / "1_one_epoch_by_hand.out.txt").read_text()
    assert f"> seed task {seed}  ->  {task}\n" in made
    tried = re.search(rf"p_hat ([\d.]+)  {task} =  {answer}  r (\d)", made)
    assert float(tried[1]) == 3 / 8 and "Three of the agent's eight attempts" in text
    assert curriculum.in_band(3 / 8, 0.5, genenv.Options().k_min)
    world = load_world("ladder")
    written = world.parse_task(task, world.base_tasks()[0], epoch=1)
    assert world.score(written, answer)[0] == float(tried[2]) == 1 and "reward 1\n" in text


def test_the_closing_lines_of_the_first_page_are_those_of_a_run(tmp_path):
    """What is printed at the end of the default run, which is on record."""
    records, options = recorded("genenv")
    save(tmp_path, records, vars(options), [])
    *printed, _ = screen.closing_words(tmp_path).strip().splitlines()  # the last names the folder
    assert "```\n" + "\n".join(printed) + "\n```\n" in (ROOT / "README.md").read_text()


def test_every_preset_stands_on_the_page_of_real_models():
    """A new preset without a word on what it is for."""
    text = (ROOT / "run" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in PRESETS)

"""The pages name files and options that exist.

Usage: python -m pytest -q tests/test_pages.py
"""
import re
from dataclasses import fields
from pathlib import Path

import pytest

from support.options import Options
from worlds import load_world, world_names

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README", "EXPERIMENTS", "TROUBLESHOOTING", "model/README", "support/README",
         "worlds/README", "worlds/TOOLS", "worlds/OWN_WORLD", "scripts/README", "results/notes"]
# options of pip, argparse and chromium
ELSEWHERE = {"--no-deps", "--index-url", "--help", "--headless", "--hide-scrollbars",
             "--window-size", "--screenshot"}
MADE = {"metrics.jsonl", "samples.jsonl", "train.jsonl", "env.jsonl", "config.json", "report.html",
        "mine.py", "tasks.jsonl", "verl.jsonl", "warm_start.json"}  # by a command, or by the reader


def known_options() -> set:
    """Return every --option of a run, of its worlds and of the project's other programs."""
    names = {f.name for f in fields(Options)}.union(*(load_world(w).OPTIONS for w in world_names()))
    sources = [
        path.read_text("utf-8") for path in ROOT.glob("*/*.py") if path.parent.name != "tests"
    ]
    flags = {flag for text in sources for flag in re.findall(r"\"(--[a-z][a-z-]*)\"", text)}
    return flags | ELSEWHERE | {"--" + name.replace("_", "-") for name in names}


@pytest.mark.parametrize("page", PAGES)
def test_options_and_files_exist(page):
    """Otherwise a page would name an option or a file that does not exist."""
    text, here = (ROOT / f"{page}.md").read_text(encoding="utf-8"), (ROOT / page).parent
    flags = {flag.replace("--no-", "--") for flag in
             re.findall(r"(?<![\w-])--[A-Za-z][A-Za-z-]*[a-z]|--G\b", text)} - {"--deps", "--to"}
    assert flags <= known_options(), sorted(flags - known_options())
    files = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    files += re.findall(r"`([\w./]+\.(?:py|md|jsonl|json|txt))\b", text)
    for file in files:
        if Path(file).name not in MADE:
            assert (here / file).exists() or (ROOT / file).exists(), file

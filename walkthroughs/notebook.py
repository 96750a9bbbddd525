"""The first walkthrough as a notebook: `python walkthroughs/notebook.py` writes it anew.

The program is the source, the notebook follows from it: the text above the first cell and the
comment that opens a cell become text, the rest of the cell becomes code. It has no outputs: what
it prints stands in 1_one_epoch_by_hand.out.txt.
"""
import json
from pathlib import Path

SCRIPT = Path(__file__).parent / "1_one_epoch_by_hand.py"


def cells(source: str) -> list[dict]:
    """The cells of a program whose parts begin with `# %% `."""
    text, *parts = source.split("\n# %% ")
    found = [_cell("markdown", text.strip().strip('"'))]
    for part in parts:
        lines = ["# " + line for line in part.split("\n")[:1]] + part.split("\n")[1:]
        n = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
        found.append(_cell("markdown", " ".join(line[1:].strip() for line in lines[:n])))
        code = "\n".join(lines[n:]).strip("\n")
        found += [_cell("code", code)] if code else []
    for i, cell in enumerate(found):
        cell["id"] = f"cell-{i}"
    return found


def _cell(kind, text) -> dict:
    cell = {"cell_type": kind, "id": "", "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(source: str) -> str:
    """A notebook (nbformat 4.5) of a program's source, as JSON."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps({"cells": cells(source), "metadata": {"kernelspec": kernel}, "nbformat": 4,
                       "nbformat_minor": 5}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCRIPT.with_suffix(".ipynb").write_text(notebook(SCRIPT.read_text(encoding="utf-8")),
                                            encoding="utf-8")

"""What a user meets first: the command line before torch is loaded, and what a run prints.

Run: python -m pytest tests/test_screen.py -q
"""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LIGHT = """
import sys
sys.path.insert(0, {root!r})
from commands import COMMANDS, dispatch
from worlds import world_names
def answer(*argv):
    try:
        return dispatch(list(argv), lambda o: 7)
    except SystemExit as done:
        return done.code
codes = [answer("--world", name, "--help") for name in (*world_names(), "template")]
codes += [answer(name, "--help") for name in COMMANDS]
codes += [answer("--epochs", "3"), answer("warm-start", "--model", "m")]
print(codes, {{"torch", "transformers", "peft"}} & set(sys.modules), file=sys.stderr)
"""


def test_help_and_parsing_need_no_torch():
    """--help of every world and command, and a run's options, are answered before it is loaded."""
    done = subprocess.run([sys.executable, "-c", LIGHT.format(root=str(ROOT))], text=True,
                          capture_output=True)
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 0, 0, 2] set()", done.stderr


def test_without_torch_there_is_one_line():
    """A first start in an empty environment."""
    hide = "import sys; sys.modules['torch'] = None; sys.argv = ['genenv.py']; import runpy; " \
           "runpy.run_path('genenv.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hide], text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "torch is not installed: pip install -r requirements.txt" in done.stderr

"""How fast, how much memory: against TRL on a CPU, and the real 7B shape on one GPU.

    python -m bench trl --prompt 256 --response 64 --steps 5     # needs bench/requirements.txt
    python -m bench trl --check                                  # only: same loss, same gradients?
    python -m bench model --model DIR --base-tasks FILE          # a real model on a CPU, beside TRL
    python -m bench episodes --turns 8                           # several turns beside one, and re-encoding
    python -m bench gpu                                          # the 7B shape on one CUDA device
    python -m bench memory --preset 7b-24gb                      # a preset's memory, simulated without a GPU
    python -m bench memory --preset 7b-24gb --card 24            # and measured, on 24 GB of one

What of the paper this is: nothing; it measures the two updates of Algorithm 1 as this project makes
them. `trl` and `gpu` build a random Qwen2 of a stated size, as speed does not depend on the weights.
How they measure: trl.py (trl), cpu.py (model, episodes), gpu.py, and simulation.py (memory).
"""
import sys

from bench.cpu import bench_episodes, bench_model
from bench.gpu import bench_gpu
from bench.simulation import bench_memory
from bench.trl import bench_trl
from common.cli import Parser, at_least, exit_code

NUMBERS = {  # whole numbers of several benches: (default, least, what it is)
    "prompt": (256, 1, "prompt tokens"), "response": (64, 2, "response tokens"),
    "prompts": (4, 1, "prompts per step"), "G": (8, 2, "rollouts per prompt"),
    "steps": (5, 1, "timed pairs of steps"), "hidden": (256, 64, "hidden size, a multiple of 64"),
    "layers": (4, 1, "layers"), "threads": (1, 1, "torch threads"),
    "vocab": (1600, 1, "1600 gives the output head 8 %% of the weights, as in the 7B; 32000 63 %%"),
    "token_budget": (16384, 1, "tokens per micro-batch of ours"),
    "trl_rows": (8, 0, "rows per micro-batch of TRL; 8 is its own default; 0 = all"),
    "turns": (8, 1, "turns of an episode"), "turn": (8, 2, "tokens of a turn, on average"),
    "observation": (16, 1, "tokens of an observation"), "rounds": (5, 1, "measured rounds")}


def parser() -> Parser:
    """One subcommand for each bench."""
    p = Parser(prog="python -m bench", description="Speed and memory of the two updates, measured.")
    sub = p.add_subparsers(dest="bench", required=True)

    def bench(name, run, text, numbers, **defaults):
        command = sub.add_parser(name, help=text)
        for number in numbers.split():
            default, least, what = NUMBERS[number]
            default = defaults.get(number, default)  # of gpu it may be 0: three lengths of its own
            command.add_argument("--" + number.replace("_", "-"), default=default, help=what,
                                 type=at_least(min(least, default)))
        command.set_defaults(run=run)
        return command

    t = bench("trl", bench_trl, "one GRPO step beside TRL's, on a CPU",
              "prompt response steps prompts G hidden layers vocab threads trl_rows token_budget")
    t.add_argument("--check", action="store_true", help="compare loss and gradients, time nothing")
    m = bench("model", bench_model, "a real model on a CPU: share of its peak, and beside TRL",
              "prompts G response steps threads token_budget trl_rows",
              prompts=8, token_budget=1024)
    m.add_argument("--model", required=True, help="local folder, hub name or .gguf file")
    m.add_argument("--base-tasks", required=True, help="JSONL, see eval.make_base")
    m.add_argument("--dtype", default="auto", help="auto, bf16 or fp32")
    m.add_argument("--no-trl", dest="trl", action="store_false", help="only our own speed")
    for command in (t, m):
        command.add_argument("--trl-head", choices=("response", "stock"), default="response",
                             help="positions that TRL projects to the vocabulary, see trl.py")
    bench("episodes", bench_episodes, "rollouts of several turns beside single answers, on a CPU",
          "prompt prompts G turns turn observation hidden layers vocab rounds threads")
    g = bench("gpu", bench_gpu, "the 7B shape on one GPU, an epoch of both updates",
              "prompt response prompts G token_budget", prompt=0, response=0, prompts=1,
              token_budget=8192)
    g.add_argument("--tiny", action="store_true", help="a small model on the CPU: tests the script")
    g.add_argument("--out", default="", help="JSON file; default in bench/results")
    s = bench("memory", bench_memory, "a preset's peaks, estimated and simulated", "")
    s.add_argument("--preset", choices=("7b-24gb", "7b-80gb", "7b-9k", "1.5b-16gb"),
                   default="7b-24gb")
    s.add_argument("--dtype", choices=("auto", "fp32"), default="auto", help="auto: bf16")
    s.add_argument("--card", type=float, default=0, help="measure on a CUDA device, so many GB of "
                   "it; 0: simulate one")
    s.add_argument("--capability", type=int, default=8, help="compute capability of the card")
    return p


def main(argv=None) -> int:
    """Run one bench. What the user can mend ends in one line and exit code 2."""
    def command():
        o = parser().parse_args(argv)
        o.run(o)
    return exit_code(command, "bench", "nothing was kept")


if __name__ == "__main__":
    sys.exit(main())

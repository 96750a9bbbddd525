"""The paper's five benchmarks, scored as their official checkers do: `python -m eval BENCH`.

    __main__.py  the command: predict, score, verify
    BENCH.py     one benchmark each: records, prompts, scoring rules
    common.py    what they share
    make_base.py base tasks for genenv.py from benchmark data
"""

"""What measures the method: ablations and schedules over seeds, `python -m experiments SUITE`.

    suites.py    what is compared: names of variants and their options
    __main__.py  running them and collecting what they measured
    tables.py    means, intervals, tables, figures
    results/     a line per run, the table and the figures of each suite
"""

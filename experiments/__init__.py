"""What measures the method: ablations and schedules over seeds, `python -m experiments SUITE`.

    __main__.py  the suites, their runs, tables and figures
    results/     a line per run, the table and the figures of each suite
"""

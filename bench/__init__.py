"""What measures speed and memory: `python -m bench trl` and `python -m bench gpu`.

    __main__.py       both benches
    requirements.txt  the trainer that `trl` compares with
    results/          what was measured
"""

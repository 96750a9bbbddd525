"""What a run shows of itself.

    measure.py  validation, the metrics record of an epoch, proof of training, peak memory
    health.py   the gate before training, and warnings in plain words
    screen.py   what a run prints: banner, a line an epoch, closing words
    report.py   figures and the page of a run
"""

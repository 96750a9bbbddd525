"""What a run shows of itself.

    measure.py  validation, the metrics record of an epoch, proof of training, peak memory
    health.py   the gate before training, and warnings in plain words
    report.py   figures and the page of a run
"""

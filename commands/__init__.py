"""Commands beside a run: `python genenv.py NAME ...`.

    warm_start.py  a small model learns the form of both roles before the first epoch
    ask.py         a trained agent answers a request
    export.py      D_train for veRL
"""

"""The frame around Algorithm 1; nothing here is part of the paper's method.

    frame.py       what a run consists of; how it begins, how an epoch and the whole of it end
    options.py     the command line: from argv to Options
    presets.py     ready-made sets of options
    memory.py      how much memory a run will need, before a model is loaded
    checkpoint.py  run folders, exact resume, signals
"""

"""What a run needs beside the algorithm; nothing here is part of the paper's method.

    run.py         what a run consists of; how it begins, how an epoch and the whole of it end
    options.py     the command line: from argv to Options
    presets.py     ready-made sets of options
    loading.py     from a folder, a hub name or a GGUF file to a model
    gguf.py        a .gguf file unpacked to a model folder
    dtypes.py      bf16 or fp32: in which numbers the base computes
    warm_start.py  a small model learns the form of both roles before the first epoch
    gate.py        is there anything to learn? a look at the batch of epoch 0
    memory.py      what a run will need, before a model is loaded, and what it took
    checkpoint.py  run folders, exact resume, signals
    controls.py    rewards made blind on purpose, for studies
    measure.py     validation and the metrics record of an epoch
    health.py      warnings in plain words
    report.py      figures and the page of a run
    export.py      D_train for veRL
    jsonl.py       JSON lines that nothing tears
"""

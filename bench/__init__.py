"""What measures speed and memory: `python -m bench trl`, `gpu`, `memory` and others.

    __main__.py       the command line
    trl.py            a step beside TRL's, on a CPU: values first, then time
    cpu.py            a real model beside the machine's peak; episodes of several turns
    gpu.py            the 7B shape on one GPU, or one short epoch of it on a CPU
    simulation.py     the GPU path on torch's meta device: peaks, host reads, kernels
    models.py         random models, prompts and rewards
    requirements.txt  the trainer that `trl` compares with
    results/          what was measured
"""

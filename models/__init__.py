"""What stands between a user's model and policy.py.

    loading.py    from a folder, a hub name or a GGUF file to a model; bf16 or fp32
    gguf.py       a .gguf file unpacked to a model folder
    attention.py  packed groups: layouts, masks, attention, LoRA's forward pass, the cache
"""

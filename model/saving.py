"""Merge an adapter into a base model, and write a folder that other programs can load.

Paper: does not cover this.

Usage: `save_merged("Qwen/Qwen2.5-7B-Instruct", "runs/000-genenv/adapters/agent", "merged")`. A
warm start ends with such a call.

Deviations: transformers 5 saves config.json and tokenizer_config.json in a form that version 4
misreads: it would assume a rope_theta of 10,000, and refuse the tokenizer. Servers and converters
still use version 4, so everything but the weights is copied from the base.
"""
import shutil
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from peft import PeftModel

from errors import one_line
from model.loading import check_base, load_model

# files that describe a model and its tokenizer; a folder has only some of them
DESCRIPTIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
                "merges.txt", "chat_template.jinja", "chat_template.json")


def save_merged(base: str, adapter, out, dtype=torch.bfloat16):
    """Merge an adapter into a base (a folder or hub name) and write the model to the folder `out`.

    Raise UserError if the two do not fit together, or if `out` cannot be written.
    """
    check_base(adapter, base)
    # start from the weights before any quantisation, add in fp32 and round only once
    lm, _ = load_model(base, None, "fp32", "cpu")
    merged = PeftModel.from_pretrained(lm, str(adapter)).merge_and_unload()
    # safetensors raises its own error on a full disk
    with one_line(out, "cannot be written"):
        merged.to(dtype).save_pretrained(out)
        copy_descriptions(base, Path(out))


def copy_descriptions(base: str, out: Path):
    """Copy the base's own files over those that transformers wrote."""
    folder = Path(base)
    if not folder.is_dir():
        folder = Path(snapshot_download(base, allow_patterns=DESCRIPTIONS))
    for name in DESCRIPTIONS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)

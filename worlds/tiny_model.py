"""A stand-in for an instruct model: a tiny word-level Qwen2, trained from scratch in a minute.

What of the paper this is: "both initialised from the same instruct model". A world that needs no
download shows a model of its own some examples of both roles, imperfect ones, and the loop starts
from what it made of them.

How it is run: `load_policy` of such a world calls `train_tiny_model`, or `cached` with a
`pretrain` of its own; worlds/template.py does so in a few lines.

Where it differs on purpose: the model has seen its two roles and nothing else, one token is one
word, and the same examples, settings and machine give the same bits.
"""
import hashlib
import json
import random
import shutil
import tempfile
from pathlib import Path

import torch

SPECIAL = ["<pad>", "<eos>"]  # the first two words of every vocabulary; unknown words become <pad>
MODEL = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=64, rope_theta=10000.0)


def word_tokenizer(words):
    """One token per word, words apart by blanks: a plain transformers tokenizer, can be saved."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    if list(words[:2]) != SPECIAL or len(set(words)) != len(words):
        raise ValueError(f"a vocabulary is {SPECIAL} and then words, none of them twice")
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>",
                                   clean_up_tokenization_spaces=False)


def encode_pairs(tokenizer, pairs):
    """(prompt, response) texts -> ids (B, L), labels (B, L) with -100 on prompts and padding.

    The end of a response is part of what is learnt.
    """
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    rows = [(encode(p), encode(r) + [tokenizer.eos_token_id]) for p, r in pairs]
    B, L = len(rows), max(len(p) + len(r) for p, r in rows)
    ids, labels = torch.zeros(B, L, dtype=torch.long), torch.full((B, L), -100)
    for b, (p, r) in enumerate(rows):
        ids[b, :len(p) + len(r)] = torch.tensor(p + r)
        labels[b, len(p):len(p) + len(r)] = torch.tensor(r)
    return ids, labels


def pretrain(folder, words, pairs_fn, model_config, steps, batch, lr, seed):
    """Train a model from scratch on `steps` batches of pairs_fn(rng, batch); save it to `folder`.

    pairs_fn: (random.Random, how many) -> list of (prompt, response) texts. lr is the peak of a
    one-cycle schedule.
    """
    from tqdm import tqdm
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging
    logging.disable_progress_bar()  # of saving one small file
    rng, tokenizer = random.Random(seed), word_tokenizer(words)
    with torch.random.fork_rng():  # transformers initialises weights from the global generator
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), eos_token_id=1, pad_token_id=0,
                                             bos_token_id=None, **model_config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    for _ in tqdm(range(steps), desc="base model (once)", disable=None, leave=False):
        ids, labels = encode_pairs(tokenizer, pairs_fn(rng, batch))
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def cached(cache_dir, name: str, key, build) -> Path:
    """The folder cache_dir/NAME-HASH of `key` (JSON); build(folder) fills it if it is not there."""
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]
    folder = Path(cache_dir) / f"{name}-{digest}"
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # train beside it and rename: a build that is interrupted leaves no half of a model
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            build(scratch)
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another run was faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def train_tiny_model(words, pairs_fn, folder_key, cache_dir, model_config=MODEL, steps=800,
                     batch=64, lr=4e-3, seed=0) -> Path:
    """Folder of a base model for Policy.load, trained unless it is cached under these settings.

    words: the vocabulary, `SPECIAL` first. pairs_fn: (random.Random, how many) -> list of (prompt,
    response) texts of both roles. folder_key: (name, ...), the name of the world and whatever else
    of JSON pairs_fn depends on, with a number that its author raises when its code changes.
    Two minutes at most for the default settings on one core.
    """
    settings = dict(steps=steps, batch=batch, lr=lr, seed=seed)
    return cached(cache_dir, folder_key[0], [list(words), model_config, settings, *folder_key[1:]],
                  lambda folder: pretrain(folder, words, pairs_fn, model_config, **settings))

"""Train a stand-in for an instruct model: a tiny word-level decoder, from scratch in minutes.

Paper: "both initialised from the same instruct model". A world that needs no download trains its
own small model on imperfect examples of both roles, and the loop starts from that model.

Usage: the ladder's and the household's base models are in worlds/base, so that a run starts from
the same bits on every machine. `python -m worlds.household train SEED FOLDER` trains another one,
for `genenv.py --world household --model FOLDER`. Seed 0 makes the shipped one, up to rounding,
which depends on the processor; the household's was made at commit 6eb4f27, before its planner was
simplified. worlds/template.py trains its model at the first start and keeps it in runs/base.

Deviations: the model has seen only its two roles, and one token is one word. Its layers are those
of Qwen2, but its type is Seed-OSS, which has the same layers: for the type qwen2, transformers'
AutoTokenizer ignores the rules of tokenizer.json and splits text by those of Qwen2.
"""
import hashlib
import inspect
import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import PreTrainedTokenizerFast, SeedOssConfig, SeedOssForCausalLM

from errors import UserError, exit_code
import worlds

SPECIAL = ["<pad>", "<eos>"]  # the first two words of every vocabulary; unknown words become <pad>
MODEL = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=64, rope_theta=10000.0)
BUCKETS = [*(f"b{i}" for i in range(9)), "b?"]  # recent success in eighths, or unknown
SEED = 20251219  # task sets are the same for every --seed of a run
# the options that a TinyWorld reads, for use without a run
NO_RUN = SimpleNamespace(model="", base_tasks="", validation_tasks="", world_options={})
BASES = Path(__file__).parent / "base"  # holds a folder for each base model that is shipped


def word_tokenizer(words):
    """Make a tokenizer that can be saved, with one token per word; blanks separate words.

    words: SPECIAL, then others, none twice.
    """
    vocabulary = {word: i for i, word in enumerate(words)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>",
                                   clean_up_tokenization_spaces=False)


def bucket(success) -> str:
    """Write a success rate in [0, 1], or None if it is unknown, as one of BUCKETS."""
    return "b?" if success is None else BUCKETS[round(8 * success)]


def in_words(success) -> str:
    """Write a success rate in [0, 1], or None if it is unknown, in eighths for a chat model."""
    return "not tried" if success is None else f"solved {round(8 * success)} of 8"


def chat(system: str, user: str):
    """Make chat messages."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def encode_pairs(tokenizer, pairs):
    """Encode (prompt, response) texts as ids (B, L) and labels (B, L).

    Labels are -100 on prompts and padding. The end of a response is learnt too.
    """
    ids, labels = [], []
    for prompt, response in pairs:
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        response_ids = tokenizer.encode(response, add_special_tokens=False)
        response_ids.append(tokenizer.eos_token_id)
        ids.append(torch.tensor(prompt_ids + response_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + response_ids))
    return pad_sequence(ids, True), pad_sequence(labels, True, padding_value=-100)


def tiny_lm(vocabulary: int, shape: dict, seed: int):
    """Make a fresh causal LM of the shape MODEL, with the changes in `shape`.

    vocabulary: its number of words.
    """
    shape = {**MODEL, **shape}
    config = SeedOssConfig(
        vocab_size=vocabulary, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        attention_dropout=0.0, residual_dropout=0.0, **shape)
    with torch.random.fork_rng():  # transformers draws weights from the global generator
        torch.manual_seed(seed)
        return SeedOssForCausalLM(config)


def train(words, pairs_fn, model_config=MODEL, steps=800, batch=64, lr=4e-3, seed=0):
    """Train a model from scratch and return (model, tokenizer), ready for `save`.

    words: the vocabulary, `SPECIAL` first. pairs_fn: (random.Random, how many) -> list of (prompt,
    response) texts of both roles. model_config: what differs from MODEL. lr: the peak of a
    one-cycle schedule. The default settings take at most two minutes on one core.

    Before training, check_texts raises UserError for texts that cannot work.
    """
    rng, tokenizer = random.Random(seed), word_tokenizer(words)
    model = tiny_lm(len(words), model_config, seed)
    # a separate generator: the check must not change what rng draws during training
    check_texts(words, pairs_fn(random.Random(seed), batch), model.config.max_position_embeddings)
    print(f"training the base model of this world, {steps} steps ...", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    # disable=None: show the bar only on a terminal
    for _ in trange(steps, desc="base model", leave=False, disable=None):
        ids, labels = encode_pairs(tokenizer, pairs_fn(rng, batch))
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model, tokenizer


def check_texts(words, pairs, context: int):
    """Raise UserError for what would silently spoil the training.

    That is an empty answer, a word that is read as padding or listed twice, or a pair with more
    words than the model can read.
    """
    if not all(response.strip() for _, response in pairs):
        raise UserError("pairs gave an empty answer: is `gold` missing?")
    counts = Counter(words)
    needed = {*SPECIAL, *(word for pair in pairs for text in pair for word in text.split())}
    wrong = [word for word in sorted({*needed, *counts}) if counts[word] != 1]
    if wrong:
        raise UserError("WORDS must name each word, and SPECIAL, once; missing or repeated: "
                        f"{wrong[:9]}")
    longest = max(len(f"{prompt} {response} <eos>".split()) for prompt, response in pairs)
    if longest > context:
        raise UserError(f"pairs gave {longest} words in a prompt with its answer, but the model "
                        f"reads {context}: shorten them, or set max_position_embeddings")


def save(model, tokenizer, folder):
    """Write a trained model to a folder that Policy.load reads, in fp16 to halve its size."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_trained(world, words, **recipe):
    """Load the policy of a world's own base model.

    It is trained once and kept in runs/base until the file of the world, or this one, changes.
    recipe: more arguments of `train`.
    """
    files = inspect.getfile(type(world)), __file__
    code = b"".join(Path(file).read_bytes() for file in files)
    digest = hashlib.sha256(code).hexdigest()[:8]
    folder = Path("runs/base", f"{world.o.world}-{digest}")
    if not folder.is_dir():
        scratch = Path(f"{folder}.{random.random()}")
        save(*train(words, world.pairs, **recipe), scratch)
        if not folder.is_dir():  # another run may have made the same one meanwhile
            scratch.rename(folder)  # all of it or nothing
    return worlds.open_policy(str(folder), world.o)


class TinyWorld(worlds.World):
    """Define a world that brings its own tasks and a base model whose vocabulary is WORDS.

    A subclass has pairs(rng, n), from which a base model is trained. `chat`: whether --model names
    another model, which needs a chat template. A world accepts one only if it has CHAT_DEFAULTS,
    its defaults for such a model.
    """
    NAME, WORDS, RECIPE, CHAT_DEFAULTS = "", (), {}, {}

    def __init__(self, o):
        super().__init__(o)
        self.chat = self.is_chat(o.model)
        if self.chat and not self.CHAT_DEFAULTS:
            raise UserError(f"--world {self.NAME} takes only its own small models, and {o.model} "
                            f"is not one: python -m worlds.{self.NAME} train SEED FOLDER makes one")

    @classmethod
    def defaults(cls, asked: dict) -> dict:
        """Return CHAT_DEFAULTS for a chat model, or else DEFAULTS and one thread.

        More threads slow such a small model down.
        """
        if cls.is_chat(asked.get("model", "")):
            return cls.CHAT_DEFAULTS
        return {"threads": 1, **cls.DEFAULTS}

    @classmethod
    def is_chat(cls, model: str) -> bool:
        """Return whether --model names anything that isn't a tiny model of this world."""
        if not model:
            return False
        file = Path(model, "tokenizer.json")
        if not file.is_file():
            return True
        return list(json.loads(file.read_text())["model"]["vocab"]) != list(cls.WORDS)

    def load_policy(self):
        """Load the model of --model, or else the shipped base model, with fresh adapters."""
        return worlds.open_policy(self.o.model or str(BASES / self.NAME), self.o)


def main(world, argv=None) -> int:
    """Run `python -m worlds.NAME train SEED FOLDER` and return the exit code.

    world: a subclass of TinyWorld.
    """
    argv = sys.argv[1:] if argv is None else argv

    def run():
        if len(argv) != 3 or argv[0] != "train" or not argv[1].isdecimal():
            raise UserError(f"usage: python -m worlds.{world.NAME} train SEED FOLDER")
        torch.set_num_threads(1)  # another number of threads rounds differently
        seed = SEED + 100 * int(argv[1])
        save(*train(world.WORDS, world(NO_RUN).pairs, seed=seed, **world.RECIPE), argv[2])
    return exit_code(run)

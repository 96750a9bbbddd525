"""A stand-in for an instruct model: a tiny word-level Qwen2, trained from scratch in minutes.

What of the paper this is: "both initialised from the same instruct model". A world that needs no
download shows a model of its own some examples of both roles, imperfect ones, and the loop starts
from what it made of them.

How it is run: the ladder's and the household's base models are in worlds/base, so that a run starts
from the same bits on every machine. `python -m worlds.household` prints what that model can do;
`python -m worlds.household train SEED FOLDER` trains one anew, for `genenv.py --base-model FOLDER`,
and with seed 0 and worlds/base/household it makes the one that is there. A training rounds
otherwise on another processor. worlds/template.py trains its own at every start.

Where it differs on purpose: the model has seen its two roles and nothing else, and one token is one
word.
"""
import json
import random
import tempfile
from pathlib import Path

from support.cli import exit_code
from support.files import UserError
from worlds import open_policy

SPECIAL = ["<pad>", "<eos>"]  # the first two words of every vocabulary; unknown words become <pad>
MODEL = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=64, rope_theta=10000.0)
BASES = Path(__file__).parent / "base"  # a folder for each world whose base model is shipped


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
    import torch
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    rows = [(encode(p), encode(r) + [tokenizer.eos_token_id]) for p, r in pairs]
    B, L = len(rows), max(len(p) + len(r) for p, r in rows)
    ids, labels = torch.zeros(B, L, dtype=torch.long), torch.full((B, L), -100)
    for b, (p, r) in enumerate(rows):
        ids[b, :len(p) + len(r)] = torch.tensor(p + r)
        labels[b, len(p):len(p) + len(r)] = torch.tensor(r)
    return ids, labels


def train(words, pairs_fn, model_config=MODEL, steps=800, batch=64, lr=4e-3, beta2=0.999, seed=0):
    """Train a model from scratch -> (model, tokenizer), for `save`.

    words: the vocabulary, `SPECIAL` first. pairs_fn: (random.Random, how many) -> list of (prompt,
    response) texts of both roles. lr: the peak of a one-cycle schedule. beta2: of AdamW, lower where
    steps are few. Two minutes at most for the default settings on one core.

    Raises UserError if the texts have words that the vocabulary lacks.
    """
    import torch
    from tqdm import tqdm
    from transformers import Qwen2Config, Qwen2ForCausalLM
    rng, tokenizer = random.Random(seed), word_tokenizer(words)
    # an unknown word would be read as padding, silently; a generator of its own: rng is not moved
    texts = " ".join(text for pair in pairs_fn(random.Random(seed), batch) for text in pair)
    if unknown := sorted(set(texts.split()) - set(words)):
        raise UserError(f"tasks or answers of this world have words that its WORDS lacks: "
                        f"{' '.join(unknown[:9])}: add them")
    print(f"training the base model of this world, {steps} steps ...", flush=True)
    with torch.random.fork_rng():  # transformers initialises weights from the global generator
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), eos_token_id=1, pad_token_id=0,
                                             bos_token_id=None, **model_config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    for _ in tqdm(range(steps), desc="base model", disable=None, leave=False):
        ids, labels = encode_pairs(tokenizer, pairs_fn(rng, batch))
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model, tokenizer


def save(model, tokenizer, folder):
    """Write a trained model as a folder that Policy.load reads, in fp16: half the size."""
    from transformers.utils import logging
    logging.disable_progress_bar()  # of saving one small file
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_trained(model, tokenizer, o):
    """The policy of a model that has just been trained."""
    with tempfile.TemporaryDirectory() as folder:
        save(model, tokenizer, folder)
        return open_policy(folder, o)


def base_folder(o, world: str, words) -> str:
    """The folder of a world's base model: --base-model, else the one in worlds/base.

    Raises UserError if there is none, or if it was trained with another vocabulary.
    """
    folder = Path(o.base_model or BASES / world)
    again = f"`python -m worlds.{world} train 0 {folder}` trains one"
    try:
        vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise UserError(f"no base model in {folder}: {again}") from None
    if list(vocab) != list(words):  # an unknown word would be read as padding, silently
        raise UserError(f"the base model in {folder} does not know the words of this world: {again}")
    return str(folder)


def program(world: str, argv, train_base, show, **more) -> int:
    """What `python -m worlds.NAME` does with its arguments; returns the exit code.

    train_base(seed) -> (model, tokenizer). show(folder): print what a base model can do. more:
    further commands of the world, NAME N FILE each, as functions of N and FILE.
    """
    def train_and_save(seed, folder):
        import torch
        torch.set_num_threads(1)  # another number of threads rounds differently
        save(*train_base(seed), folder)  # nothing is written before it is trained

    commands = {"train": train_and_save, **more}

    def run():
        if len(argv) == 3 and argv[0] in commands and argv[1].isdecimal():
            commands[argv[0]](int(argv[1]), argv[2])
        elif not argv or len(argv) == 1 and Path(argv[0]).is_dir():
            show(argv[0] if argv else BASES / world)
        else:
            others = "".join(f" | {name} N FILE" for name in more)
            raise UserError(f"usage: python -m worlds.{world} [FOLDER | train SEED FOLDER{others}]")
    return exit_code(run, world, "nothing was kept")

"""A stand-in for an instruct model: a tiny word-level Qwen2, trained from scratch in minutes.

Paper: "both initialised from the same instruct model". A world that needs no download shows a model
of its own imperfect examples of both roles, and the loop starts from what it made of them.

Usage: the ladder's and the household's base models are in worlds/base, so that a run starts from
the same bits on every machine. `python -m worlds.household train SEED FOLDER` trains another one, for
`genenv.py --world household --model FOLDER`; seed 0 makes the shipped one. Rounding depends on the
processor. worlds/template.py trains its model at the first start and keeps it in runs/base.

Deviations: the model has seen its two roles and nothing else, and one token is one word.
"""
import ast
import hashlib
import inspect
import json
import random
import sys
from contextlib import suppress
from copy import copy
from pathlib import Path
from types import SimpleNamespace

from model.files import UserError, exit_code
import worlds

SPECIAL = ["<pad>", "<eos>"]  # the first two words of every vocabulary; unknown words become <pad>
MODEL = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=64, rope_theta=10000.0)
BUCKETS = [*(f"b{i}" for i in range(9)), "b?"]  # recent success in eighths, or unknown
SEED = 20251219  # task sets are the same for every --seed of a run
# what such a world reads of the options, where there is no run
NO_RUN = SimpleNamespace(model="", base_tasks="", validation_tasks="", world_options={})
BASES = Path(__file__).parent / "base"  # a folder for each world whose base model is shipped


def word_tokenizer(words):
    """One token per word, words apart by blanks: a plain transformers tokenizer, can be saved.

    words: SPECIAL, then others, none of them twice.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>",
                                   clean_up_tokenization_spaces=False)


def bucket(success) -> str:
    """A success rate in [0, 1], or None if it is unknown, as one of BUCKETS."""
    return "b?" if success is None else BUCKETS[round(8 * success)]


def chat(system: str, user: str) -> list[dict]:
    """Chat messages."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def encode_pairs(tokenizer, pairs):
    """(prompt, response) texts -> ids (B, L), labels (B, L) with -100 on prompts and padding.

    The end of a response is part of what is learnt.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    rows = [(encode(p), encode(r) + [tokenizer.eos_token_id]) for p, r in pairs]
    ids = pad_sequence([torch.tensor(p + r) for p, r in rows], batch_first=True)
    labels = [torch.tensor([-100] * len(p) + r) for p, r in rows]
    return ids, pad_sequence(labels, batch_first=True, padding_value=-100)


def train(words, pairs_fn, model_config=MODEL, steps=800, batch=64, lr=4e-3, seed=0):
    """Train a model from scratch -> (model, tokenizer), for `save`.

    words: the vocabulary, `SPECIAL` first. pairs_fn: (random.Random, how many) -> list of (prompt,
    response) texts of both roles. model_config: what differs from MODEL. lr: the peak of a one-cycle
    schedule. Two minutes at most for the default settings on one core.

    Raises UserError if the texts have words that the vocabulary lacks, or one stands there twice.
    """
    import torch
    from tqdm import trange
    from transformers import Qwen2Config, Qwen2ForCausalLM
    rng, tokenizer = random.Random(seed), word_tokenizer(words)
    # an unknown word would be read as padding, silently; a generator of its own: rng is not moved
    texts = " ".join(text for pair in pairs_fn(random.Random(seed), batch) for text in pair)
    if wrong := sorted({*texts.split(), *SPECIAL} - {*words} | {w for w in words if words.count(w) > 1}):
        raise UserError(f"WORDS must name each word, and SPECIAL, once; missing or doubled: {wrong[:9]}")
    print(f"training the base model of this world, {steps} steps ...", flush=True)
    with torch.random.fork_rng():  # transformers initialises weights from the global generator
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), eos_token_id=1, pad_token_id=0,
                                             bos_token_id=None, **MODEL | model_config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    for _ in trange(steps, desc="base model", leave=False, disable=None):  # None: in a terminal alone
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
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_pairs(world, limit):
    """Try what a base model would be trained on, a model that reads `limit` words: the mistakes named here
    would cost the training, and then look like a model that cannot do its task. Raises UserError."""
    trial, asked, varied, rng = copy(world), {}, {}, random.Random(SEED)
    note = lambda tasks, task, prompt: tasks.update({prompt: task}) or prompt  # what a prompt was made for
    trial.agent_prompt = lambda task: note(asked, task, world.agent_prompt(task))
    trial.env_prompt = lambda task, *rest: note(varied, task, world.env_prompt(task, *rest))
    pairs = [pair for _ in range(16) for pair in trial.pairs(rng, 64) or ()]  # one call may be of one role
    tasks = list(asked.values())
    said = [(varied[prompt], text) for prompt, text in pairs if prompt in varied]
    for seed, text in said:
        with suppress(worlds.InvalidTask):
            tasks += [new for new in [world.parse_task(text, seed, 0)] if new.id != seed.id]
    answers = [(asked[prompt], text) for prompt, text in pairs if prompt in asked]
    # without this a constant prompt, shuffled answers or a score that pays any form would train, to 0 or 1
    single = lambda task: world.start(task) is None  # not an episode, whose answers score does not take
    earned = sum(not single(task) or world.score(task, text)[0] for task, text in answers)
    by_chance = sum(single(a) and world.score(a, b)[0] for (a, _), (_, b) in zip(answers, answers[::-1]))
    held_out = worlds.held_out_keys(world)
    seen = [task for task in tasks if not held_out.isdisjoint(worlds.task_keys(world, task))]
    longest = max((len(" ".join(pair).split()) for pair in pairs), default=0)
    # 5 % of answers right, and more than by luck, are what it takes to call them answers
    if fault := f"{len(asked)} agent_prompts in all" if len(asked) <= len(answers) / 12 else \
            "answers no better than another task's" if earned <= 1.1 * by_chance + len(answers) / 20 else \
            f"no new task for env_prompt: {[text for _, text in said[:2]]}" if len(tasks) == len(asked) else \
            f"{longest} words in a prompt with its answer, the model reads {limit}" if longest > limit else \
            f"the held-out task {seen[0].text!r:.80}" if seen else "":
        raise UserError(f"{inspect.getfile(type(world))}: pairs must give fresh (prompt, answer) texts, "
                        f"prompts by agent_prompt and env_prompt, no held-out tasks; it gave {fault}")


def load_trained(world, words, **recipe):
    """The policy of a world's own base model, which is trained once and kept in runs/base until the code of
    the world, or of this module, changes. recipe: more arguments of `train`."""
    # without comments and blanks: to write one should not cost a training
    key = "".join(ast.dump(ast.parse(Path(f).read_bytes())) for f in (inspect.getfile(type(world)), __file__))
    folder = Path("runs/base", f"{world.o.world}-{hashlib.sha256(key.encode()).hexdigest()[:8]}")
    if not folder.is_dir():
        check_pairs(world, (MODEL | recipe.get("model_config", {}))["max_position_embeddings"])
        save(*train(words, world.pairs, **recipe), new := f"{folder}.{random.random()}")
        if not folder.is_dir():  # another run may have made the same meanwhile
            Path(new).rename(folder)  # whole or not at all
    return worlds.open_policy(str(folder), world.o)


class TinyWorld(worlds.World):
    """A world that brings its tasks and a base model of WORDS; `chat` where --model names another
    model, which has to have a chat template. A subclass has pairs(rng, n) to train a base model from."""
    NAME, WORDS, RECIPE, CHAT_DEFAULTS = "", (), {}, {}

    def __init__(self, o):
        super().__init__(o)
        self.chat = self.is_chat(o.model)
        if o.base_tasks or o.validation_tasks:
            raise UserError(f"the world {self.NAME} makes its tasks: no --base-tasks or --validation-tasks")

    @classmethod
    def defaults(cls, asked: dict) -> dict:
        """DEFAULTS and one thread, as more slow such a small model down; or CHAT_DEFAULTS."""
        return cls.CHAT_DEFAULTS if cls.is_chat(asked.get("model", "")) else {"threads": 1, **cls.DEFAULTS}

    @classmethod
    def is_chat(cls, model: str) -> bool:
        """Whether --model names something else than a tiny model of this world."""
        file = Path(model) / "tokenizer.json"
        vocabulary = json.loads(file.read_text())["model"]["vocab"] if model and file.is_file() else ()
        return bool(model) and list(vocabulary) != list(cls.WORDS)

    def load_policy(self):
        """The chat model of --model, or the tiny base model, with two fresh adapters."""
        return worlds.open_policy(self.o.model or str(BASES / self.NAME), self.o)


def main(world, argv=None) -> int:
    """`python -m worlds.NAME train SEED FOLDER`; returns the exit code. world: a subclass of TinyWorld."""
    argv = sys.argv[1:] if argv is None else argv

    def run():
        if len(argv) != 3 or argv[0] != "train" or not argv[1].isdecimal():
            raise UserError(f"usage: python -m worlds.{world.NAME} train SEED FOLDER")
        import torch
        torch.set_num_threads(1)  # another number of threads rounds differently
        seed = SEED + 100 * int(argv[1])
        save(*train(world.WORDS, world(NO_RUN).pairs, seed=seed, **world.RECIPE), argv[2])
    return exit_code(run, world.NAME)

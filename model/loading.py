"""Load a model and its tokenizer from a folder or hub name, or report why they are refused.

Paper: does not cover this. The checks protect a run from models that policy.py cannot handle.

Usage: Policy.load calls `load_model` and `check_paths`; a run's checkpoint holds a hash of each of
its models (`weights_of`).

Deviations: there is no list of supported families. Instead, a model must *behave* as policy.py
assumes: its files hold all of its weights, and the sampler and the scorer of policy.py agree with
the forward pass of transformers.

Models compute in bf16 or fp32. Either way, adapters, their gradients, AdamW's moments and log-probs
are fp32. bf16 still shifts log-probs: the sampler decodes one token at a time and the scorer reads
whole groups, so they round differently (logits near 20 are 0.125 apart in bf16). On a 135M Llama
with random adapters, whose text is far from certain, sampler and scorer differed by 0.04 nats on
average, and by 0.3 for the worst of 288 tokens. TOLERANCE is what tests/test_real_model.py allows;
`check_paths` allows three times that mean. In a run, whose text is more certain, the mean stays
below 0.013 on a GPU; on a CPU with AVX512-BF16 but no AMX, 0.02 is normal.
"""
import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub import file_exists, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as messages

from errors import UserError, one_line

# {dtype: (limit of the mean, of the maximum)} of |sampler - scorer|, in nats, for text sampled at a
# temperature of 1
TOLERANCE = {torch.bfloat16: (0.08, 1.0), torch.float32: (1e-5, 1e-3)}
REAL = 256  # models of this hidden size or more count as real; the toy worlds' are smaller
BASE_NOTE = "base.json"  # a file beside a saved adapter: which weights the adapter was trained on
PIECES, PIECE = 16, 512  # a tensor's hash reads PIECE numbers at each of PIECES places
SHORT, STEPS = 32, 6  # tokens of the shorter prompt and of each response in `check_paths`
LONGEST = 8192  # it assumes texts of at most this many tokens if it does not know a run's limit


# ---------------------------------------------------------------------------------------------
# loading


def check_model(model: str):
    """Raise UserError unless a folder, or a name on the hub, appears to hold a model.

    Without this check, transformers would retry for half a minute when the hub is unreachable.
    """
    path = Path(model)
    if path.exists():
        for name in ("config.json", "tokenizer.json"):
            if not (path / name).is_file():
                raise UserError(f"{model}: not a model folder: it has no {name} (to unpack a GGUF: "
                                "python -m scripts.unpack_gguf FILE FOLDER)")
        return
    with one_line(f"{model}: no such folder, and as a name on the hub it"):
        # transformers explains a gated model better than the hub does
        with suppress(GatedRepoError):
            file = "config.json"
            if not (try_to_load_from_cache(model, file) or file_exists(model, file)):
                raise UserError(f"{model} is neither a folder here nor a model on the hub")


def load_model(model: str, quant=None, dtype="auto", device=None, max_tokens=None):
    """Return (causal LM, tokenizer) of a folder or hub name. Raise UserError if one is unusable.

    quant: None, or "nf4" for 4-bit weights with double quantisation. dtype: "auto", "bf16" or
    "fp32", see choose_dtype. device: None means a GPU if there is one. max_tokens: the most tokens
    that a prompt and its response may have together, which a chat model must be able to read; None
    skips this check.
    """
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = model_config(model)
    if getattr(config, "quantization_config", None):  # no adapter could be merged into it
        raise UserError(f"{model} is quantised already: name the 16-bit model, "
                        "and add --quant nf4 for four bits")
    dtype, packed = choose_dtype(dtype, device, config), None
    if quant == "nf4":
        packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                    bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    with one_line(model):
        # use tokenizer.json as it is: a class chosen by model type may split text differently
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model, trust_remote_code=False)
        if tokenizer.chat_template:  # check before loading the weights, which may take minutes
            check_context(config, max_tokens)
        # trust_remote_code=False keeps transformers from asking whether to run a folder's code;
        # use_safetensors=True is needed because weights_of reads no other files
        lm, info = AutoModelForCausalLM.from_pretrained(
            model, output_loading_info=True, ignore_mismatched_sizes=True, dtype=dtype,
            device_map={"": device}, quantization_config=packed, trust_remote_code=False,
            use_safetensors=True)
        check_weights(model, lm, info, tokenizer)
    return lm, tokenizer


def check_weights(model, lm, info, tokenizer):
    """Raise UserError unless the files hold exactly the model's weights, and an embedding for every
    token of the tokenizer.

    info: what transformers reports after loading. It does not raise an error for missing weights,
    but fills them with random numbers.
    """
    for fault in ("missing", "unexpected", "mismatched"):
        keys = sorted(map(str, info[f"{fault}_keys"]))
        if keys:
            raise UserError(f"the weights in {model} are not those of a {type(lm).__name__}: "
                            f"{keys[0]} is {fault} ({len(keys)} in all)")
    tokens, embeddings = len(tokenizer), len(lm.get_input_embeddings().weight)
    if tokens > embeddings:
        raise UserError(f"{model} has no tokenizer that fits: {tokens} tokens, but only "
                        f"{embeddings} embeddings")


def context_of(config):
    """Return how many tokens a model can read; None if its configuration sets no limit."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_context(config, max_tokens):
    """Raise UserError if a prompt and its response may be longer than the model can read.

    Positions beyond its limit were never trained, so the model would silently answer with noise.
    """
    limit = context_of(config)
    if limit and max_tokens and max_tokens > limit:
        raise UserError(f"the model reads {limit} tokens at most, but a prompt with its response "
                        f"may have {max_tokens}: lower --max-prompt-tokens, --max-response-tokens "
                        "or --max-task-tokens")


def model_config(model: str):
    """Return the transformers configuration of a folder or hub name. Raise UserError if there is
    none."""
    check_model(model)
    with one_line(model):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)


def choose_dtype(dtype, device, config):
    """Return the torch dtype for "bf16", "fp32" or "auto".

    "auto" is bf16 on a GPU of compute capability 8.0 or more, and for a real model on a CPU with
    AMX or AVX512-BF16. Otherwise it is fp32, so that the toy worlds, whose models are small, give
    the same results on every CPU.
    """
    if dtype != "auto":
        fast = dtype == "bf16"
    elif device.startswith("cuda"):
        fast = not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = torch.cpu._is_avx512_bf16_supported()  # a CPU with AMX supports this, too
        fast = fast and config.get_text_config(decoder=True).hidden_size >= REAL
    return torch.bfloat16 if fast else torch.float32


def weights_of(model: str) -> str:
    """Return a hash of the weights in a folder or a downloaded hub model; "" if there are none.

    The folder may hold an adapter instead. The same weights have the same hash in whatever folder,
    number of files or number type they are stored.
    """
    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (OSError, ValueError):  # never downloaded, or not a hub name
            return ""
    lines = []
    with one_line(model):
        files = list(folder.glob("model*.safetensors"))
        # an adapter's file, or those of a model whose index gives them other names
        for path in files or folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    lines.append(f"{name} {tensor_digest(file.get_tensor(name))}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() if lines else ""


def tensor_digest(tensor) -> str:
    """Return a tensor's shape and a hash of some of its numbers: PIECE at each of PIECES places.

    Only these are read from the file. All numbers of a small tensor are hashed.
    """
    parts = tensor.flatten().tensor_split(PIECES)
    numbers = torch.cat([part[:PIECE] for part in parts]).float()
    return f"{tuple(tensor.shape)} {hashlib.sha256(numbers.numpy().tobytes()).hexdigest()}"


# ---------------------------------------------------------------------------------------------
# adapters


def add_adapters(model, names, rank: int, seed: int, folder=None):
    """Return the model with a LoRA adapter for each name.

    folder: where the first one was saved, or None to start with new adapters only. Raise UserError
    unless the saved adapter fits the model completely.
    """
    if not names:
        return model
    # PEFT draws the A matrices from the global generator: seed it here and restore it afterwards
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if folder:
            config = LoraConfig.from_pretrained(str(folder))
        else:
            config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear",
                                task_type="CAUSAL_LM")
        model = get_peft_model(model, config, adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, config)
        if folder:
            read_adapter(model, folder, names[0])
    return model


def read_adapter(model, folder, name):
    """Replace the weights of the adapter `name` with saved ones.

    Raise UserError unless they fit the model completely.
    """
    with one_line(folder):
        keys = model.load_adapter(str(folder), name)
    if keys.missing_keys or keys.unexpected_keys:  # PEFT would only warn
        raise UserError(f"the adapter {folder} was trained on another model: its layers differ")


def note_base(folder, names, model: str):
    """Write a file beside each saved adapter that names the weights it was trained on."""
    base = {"model": model, "digest": weights_of(model)}
    for name in names:
        Path(folder, name, BASE_NOTE).write_text(json.dumps(base))


def check_base(folder, model: str):
    """Raise UserError if the adapter in `folder` was trained on weights other than `model`'s.

    Such an adapter would load without an error and make the model's answers worse. If the weights
    cannot be compared and the two models' names differ, print a line.
    """
    note, config = Path(folder) / BASE_NOTE, Path(folder) / "adapter_config.json"
    file = note if note.is_file() else config
    with one_line(file):
        base = json.loads(file.read_text())
    if file == note:
        name, trained_on = base["model"], base.get("digest")
    else:  # an adapter made by another program gives only the name of its base
        name = base.get("base_model_name_or_path") or model
        trained_on = weights_of(name)
    present = weights_of(model)
    if not (trained_on and present):
        if name != model:
            print(f"the adapter {folder} was trained on {name}, whose weights cannot be compared "
                  f"with those of {model}")
    elif trained_on != present:
        raise UserError(f"the adapter {folder} was trained on other weights ({name}) than "
                        f"those of {model}: name its base as the model")


# ---------------------------------------------------------------------------------------------
# the check


@torch.no_grad()
def check_paths(policy, max_tokens):
    """Raise UserError unless sampler, scorer and the library's own forward pass agree.

    Models with anything but full causal attention and a linear head would silently be scored
    wrongly. The check samples two responses to each of two prompts of random tokens: one is short,
    the other has `telling_length` tokens. Then it checks the gradient on the responses to the short
    one.
    """
    lm = policy.lm
    length = telling_length(lm.config, max_tokens)
    vocabulary = lm.get_input_embeddings().num_embeddings
    seeded = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocabulary, (length,), generator=seeded).tolist()
    adapter = next(iter(policy.params), None)
    prompts, generator = [prompt[:SHORT], prompt], policy.generator(0)
    rollouts = policy.sample(adapter, prompts, 2, STEPS, generator=generator)
    with policy.use(adapter):
        scored, mask = policy.logprobs(rollouts)
        lm.set_attn_implementation("eager_fp32")  # use transformers' plain attention
        plain = policy.plain_logprobs(rollouts)[0][mask]
        lm.set_attn_implementation("prompt_once")
    sampled = plain.new_tensor([logp for r in rollouts for logp in r.logps])
    mean, worst = TOLERANCE[lm.dtype]
    for name, logps in (("sampler", sampled), ("scorer", scored[mask])):
        gap = (logps - plain).abs()
        # predictions after random tokens are less certain than in text: allow three times the mean
        if not (gap.mean() <= 3 * mean and gap.max() <= worst):
            raise UserError(f"{lm.config.model_type} models do more than full causal attention and "
                            f"a linear head: on {length} tokens the {name} differs by up to "
                            f"{gap.max():.2g} nats from the library's own forward pass")
    if adapter:
        check_gradient(policy, adapter, rollouts[:2])


def telling_length(config, max_tokens):
    """Return the length of a prompt that would reveal a limit on attention or positions.

    It is longer than every window, chunk or number of positions in the configuration that a run of
    max_tokens can exceed.
    """
    reach = max_tokens or min(LONGEST, context_of(config) or LONGEST)
    numbers = re.findall(r'(?:window|chunk|position)[^"]*": (\d+)', config.to_json_string(False))
    limits = [limit for limit in map(int, numbers) if limit < reach]
    return max(limits, default=0) + SHORT


@torch.enable_grad()
def check_gradient(policy, adapter, rollouts):
    """Raise UserError if gradient checkpointing changes the gradient by more than 5 %.

    On a GPU it is switched on by default.
    """
    both = []
    for grad_checkpoint in (False, True):
        with policy.use(adapter):
            logp, _ = policy.logprobs(rollouts, 1.0, grad_checkpoint)
            gradient = torch.autograd.grad(logp.sum(), policy.params[adapter], allow_unused=True)
        both.append(torch.cat([g.flatten() for g in gradient if g is not None]))
    plain, again = both
    if not (again - plain).norm() <= 0.05 * plain.norm():
        raise UserError(f"{policy.lm.config.model_type} models compute something different in "
                        "train mode: gradient checkpointing changes their gradient")

"""Load a model and its tokenizer from a folder or hub name, or explain why it is refused.

Paper: does not cover this; it checks a user's model before policy.py uses it.

Usage: Policy.load calls `load_model` and `check_paths`; a run keeps `weights_of` its models with
its checkpoint.

Deviations: there is no list of supported families. A model must *behave* as policy.py assumes: its
files hold all of its weights, and sampler, scorer and the library's own forward pass agree.

Models compute in bf16 or fp32. Either way, adapters, their gradients, AdamW's moments, logits and
log-probs are fp32. bf16 still shifts log-probs: the sampler decodes one token at a time and the
scorer reads whole groups, so the same log-prob is rounded in two ways (logits near 20 are 0.125
apart in bf16). On a 135M Llama with random adapters, whose text is far from certain, the difference
was 0.04 nats on average and 0.3 for the worst of 288 tokens; `check_paths` and
tests/test_real_model.py allow TOLERANCE. In a run, whose text is more certain, the mean stays below
0.013 on a GPU; on a CPU with AVX512-BF16 but no AMX, 0.02 is healthy.
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

# limits of the mean and the largest |sampler - scorer|, in nats, on text sampled at T = 1
TOLERANCE = {torch.bfloat16: (0.08, 1.0), torch.float32: (1e-5, 1e-3)}
REAL = 256  # a model of this hidden size or more counts as a real one
BASE_NOTE = "base.json"  # beside a saved adapter: the weights that it was trained on
PIECES, PIECE = 16, 512  # a tensor's hash reads PIECE numbers at each of PIECES places
SHORT, STEPS = 32, 6  # `check_paths` tries a prompt and responses of this many tokens
LONGEST = 8192  # it assumes this many tokens if the real number is unknown


# ---------------------------------------------------------------------------------------------
# loading


def check_model(model: str):
    """Raise UserError unless a folder, or a name on the hub, appears to hold a model.

    Without this check, transformers would try for half a minute if the hub cannot be reached.
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
    """Return (causal LM, tokenizer) of a local folder or hub name. Raise UserError if it fails.

    quant: None or "nf4": 4-bit weights with double quantisation. dtype: "auto", "bf16" or "fp32",
    see choose_dtype. device: None = a GPU if there is one. max_tokens: the most tokens of a prompt
    and its response together, for a chat model; None skips this check.
    """
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = model_config(model)
    if getattr(config, "quantization_config", None):  # a warm start could not merge into it
        raise UserError(f"{model} is quantised already: name the 16-bit model, "
                        "with --quant nf4 for four bits")
    dtype, packed = choose_dtype(dtype, device, config), None
    if quant == "nf4":
        packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                    bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    with one_line(model):
        # take tokenizer.json literally: a class guessed from the model's type splits differently
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model, trust_remote_code=False)
        if tokenizer.chat_template:  # check before loading the weights, which may take minutes
            check_context(config, max_tokens)
        # trust_remote_code=False keeps transformers from asking whether to run a folder's code.
        # weights_of reads only safetensors
        lm, info = AutoModelForCausalLM.from_pretrained(
            model, output_loading_info=True, ignore_mismatched_sizes=True, dtype=dtype,
            device_map={"": device}, quantization_config=packed, trust_remote_code=False,
            use_safetensors=True)
        check_weights(model, lm, info, tokenizer)
    return lm, tokenizer


def check_weights(model, lm, info, tokenizer):
    """Raise UserError unless the files hold exactly the model's weights, for every token.

    info: what transformers reports after loading. It silently fills missing weights with random
    numbers.
    """
    for fault in ("missing", "unexpected", "mismatched"):
        keys = sorted(map(str, info[f"{fault}_keys"]))
        if keys:
            raise UserError(f"the weights in {model} are not those of a {type(lm).__name__}: "
                            f"{keys[0]} is {fault} ({len(keys)} in all)")
    tokens, embeddings = len(tokenizer), len(lm.get_input_embeddings().weight)
    if tokens > embeddings:
        raise UserError(f"{model}: no tokenizer that fits: {tokens} tokens, "
                        f"{embeddings} embeddings")


def context_of(config):
    """Return how many tokens a model can read; None if its configuration sets no limit."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_context(config, max_tokens):
    """Raise UserError if prompt and response may be longer than the model reads.

    Positions beyond its limit were never trained: the model would silently answer with noise.
    """
    limit = context_of(config)
    if limit and max_tokens and max_tokens > limit:
        raise UserError(f"the model reads {limit} tokens at most, but prompt and response may "
                        f"have {max_tokens}: lower --max-prompt-tokens, --max-response-tokens or "
                        "--max-task-tokens")


def model_config(model: str):
    """Return the transformers configuration of a folder or hub name. Raise UserError if there is
    none."""
    check_model(model)
    with one_line(model):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)


def choose_dtype(dtype, device, config):
    """Return the torch dtype of "bf16" or "fp32"; "auto" depends on the hardware and the model.

    "auto" is bf16 on a GPU of compute capability 8.0 or more, and for a real model on a CPU with
    AMX or AVX512-BF16. Elsewhere it is fp32, so that the embedded worlds give the same results on
    every CPU.
    """
    if dtype != "auto":
        fast = dtype == "bf16"
    elif device.startswith("cuda"):
        fast = not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = torch.cpu._is_avx512_bf16_supported()  # a CPU with AMX has it too
        fast = fast and config.get_text_config(decoder=True).hidden_size >= REAL
    return torch.bfloat16 if fast else torch.float32


def weights_of(model: str) -> str:
    """Return a hash of the weights in a folder or a downloaded hub model; "" if there are none.

    The folder may hold an adapter. The same weights have the same hash in any folder, number of
    files or number type.
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
        for path in files or folder.glob("adapter_model.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    lines.append(f"{name} {tensor_digest(file.get_tensor(name))}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest() if lines else ""


def tensor_digest(tensor) -> str:
    """Return a tensor's shape, and a hash of PIECE numbers at each of PIECES places (all numbers of
    a small tensor). Only these are read from the file."""
    parts = tensor.flatten().tensor_split(PIECES)
    numbers = torch.cat([part[:PIECE] for part in parts]).float()
    return f"{tuple(tensor.shape)} {hashlib.sha256(numbers.numpy().tobytes()).hexdigest()}"


# ---------------------------------------------------------------------------------------------
# adapters


def add_adapters(model, names, rank: int, seed: int, folder=None):
    """Return the model with a LoRA adapter for each name; `folder`, if given, holds the first.

    Raise UserError unless all of the saved adapter fits the model.
    """
    if not names:
        return model
    # PEFT draws the A matrices from the global generator
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
    """Replace the weights of the adapter `name` with saved ones. Raise UserError unless all of them
    fit the model."""
    with one_line(folder):
        keys = model.load_adapter(str(folder), name)
    if keys.missing_keys or keys.unexpected_keys:  # PEFT would only warn
        raise UserError(f"the adapter {folder} was trained on another model: its layers differ")


def note_base(folder, names, model: str):
    """Note beside each saved adapter which weights it was trained on."""
    base = {"model": model, "digest": weights_of(model)}
    for name in names:
        Path(folder, name, BASE_NOTE).write_text(json.dumps(base))


def check_base(folder, model: str):
    """Raise UserError if the adapter in `folder` was trained on weights other than `model`'s.

    Such an adapter would load silently and make the model's answers worse. Print a line if the
    weights cannot be compared.
    """
    note, config = Path(folder) / BASE_NOTE, Path(folder) / "adapter_config.json"
    if note.is_file():
        base = json.loads(note.read_text())
        name, trained_on = base["model"], base.get("digest")
    else:  # an adapter made elsewhere only names its base
        name = json.loads(config.read_text()).get("base_model_name_or_path") or model
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

    Anything but full causal attention and a linear head would silently be scored wrongly. The check
    uses two prompts of random tokens: a short one, and one longer than any window or number of
    positions in the configuration that a run of max_tokens can reach. It samples two responses to
    each. check_gradient computes the gradient of the short ones, with and without gradient
    checkpointing.
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
        # random tokens are less certain than text: allow three times the mean
        if not (gap.mean() <= 3 * mean and gap.max() <= worst):
            raise UserError(f"{lm.config.model_type} models do more than full causal attention and "
                            f"a linear head: on {length} tokens the {name} is {gap.max():.2g} nats "
                            "off the library's own forward pass")
    if adapter:
        check_gradient(policy, adapter, rollouts[:2])


def telling_length(config, max_tokens):
    """Return a length beyond every number in the configuration at which attention or positions may
    change and that a run of max_tokens can reach."""
    reach = max_tokens or min(LONGEST, context_of(config) or LONGEST)
    numbers = re.findall(r'(?:window|chunk|position)[^"]*": (\d+)', config.to_json_string(False))
    limits = [limit for limit in map(int, numbers) if limit < reach]
    return max(limits, default=0) + SHORT


@torch.enable_grad()
def check_gradient(policy, adapter, rollouts):
    """Raise UserError unless gradient checkpointing, which is usual on a GPU, leaves the gradient
    the same."""
    both = []
    for grad_checkpoint in (False, True):
        with policy.use(adapter):
            logp, _ = policy.logprobs(rollouts, 1.0, grad_checkpoint)
            gradient = torch.autograd.grad(logp.sum(), policy.params[adapter], allow_unused=True)
        both.append(torch.cat([g.flatten() for g in gradient if g is not None]))
    plain, again = both
    if not (again - plain).norm() <= 0.05 * plain.norm():
        raise UserError(f"{policy.lm.config.model_type} models compute something else in train "
                        "mode: their gradient changes under gradient checkpointing")

"""From a folder or hub name to a model and its tokenizer, or one clear line why not; bf16 or fp32.

Paper: not in it; this is what stands between a user's model and policy.py.

Usage: Policy.load calls `load_model` and `check_paths`; a run keeps `model_digest` with its
checkpoint.

Deviations: a model must *behave* as policy.py takes it to: its files hold all of its weights, and
sampler, scorer and the library's own forward pass agree. There is no list of families.

Adapters, their gradients and AdamW's moments are fp32 either way; so are logits and log-probs.
What bf16 moves: the sampler decodes a token at a time and the scorer reads whole groups, so the
same log-prob is rounded in two ways (logits near 20 are 0.125 apart in bf16). On a 135M Llama with
random adapters, whose text is far from certain, that came to 0.04 nats on average and 0.3 for the
worst of 288 tokens; TOLERANCE is what `check_paths` and tests/test_real_model.py allow. In a run,
whose text is more certain, the mean stays below 0.013 on a GPU; on a CPU that has AVX512-BF16 but
no AMX 0.02 is healthy.
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

# mean and largest |sampler - scorer| of a log-prob, nats, on text that the model wrote at T = 1
TOLERANCE = {torch.bfloat16: (0.08, 1.0), torch.float32: (1e-5, 1e-3)}
REAL = 256  # hidden size from which a model counts as a real one
BASE_NOTE = "base.json"  # beside a saved adapter: the weights that it was trained on
PIECES, PIECE = 16, 512  # numbers of a tensor that its hash is made of
SHORT, STEPS = 32, 6  # tokens of the prompt and of the responses that `check_paths` tries
LONGEST = 8192  # tokens that it counts with where nobody says how many there will be


# ---------------------------------------------------------------------------------------------
# loading


def check_model(model: str):
    """Raise UserError where there is no model in a folder, as far as its files say, or none of
    this name on the hub. If the hub cannot be reached transformers would try for half a minute."""
    path = Path(model)
    if path.exists():
        if not (path / "config.json").is_file():
            raise UserError(f"{model}: not a model's folder: it has no config.json (a GGUF is "
                            "unpacked by python -m scripts.unpack_gguf FILE FOLDER)")
        return
    with one_line(f"{model}: no such folder, and as a name on the hub it"):
        # what transformers says of a gated model is better than the hub's words
        with suppress(GatedRepoError):
            cached = try_to_load_from_cache(model, "config.json")
            if not cached and not file_exists(model, "config.json"):
                raise UserError(f"{model} is neither a folder here nor a model on the hub")


def load_model(model: str, quant=None, dtype="auto", device=None, max_tokens=None):
    """(causal LM, tokenizer) of a local folder or hub name. Raises UserError with one line.

    quant: None or "nf4": 4-bit weights with double quantisation. dtype: "auto", "bf16" or "fp32",
    see choose_dtype. device: None = a GPU if there is one. max_tokens: the most that a prompt of a
    chat model and its response will have together; None: not known, then nothing is checked.
    """
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    config = model_config(model)
    if getattr(config, "quantization_config", None):  # a warm start could not merge into it
        raise UserError(f"{model} is quantised already: name the 16-bit model, "
                        "--quant nf4 for four bits")
    dtype, packed = choose_dtype(dtype, device, config), None
    if quant == "nf4":
        packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                    bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    with one_line(model):
        # tokenizer.json at its word: a class that is guessed from the model's type splits otherwise
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model, trust_remote_code=False)
        if tokenizer.chat_template:  # before the weights: they may take minutes
            check_context(config, max_tokens)
        # without the last word transformers would ask whether to run the code in a folder
        lm, info = AutoModelForCausalLM.from_pretrained(
            model, output_loading_info=True, ignore_mismatched_sizes=True, dtype=dtype,
            device_map={"": device}, quantization_config=packed, trust_remote_code=False)
        check_weights(model, lm, info)
        check_tokenizer(model, lm, tokenizer)
    return lm, tokenizer


def check_weights(model, lm, info):
    """Raises UserError unless the files hold all of the model's weights, and no others. info: what
    transformers says of the loading; what is missing it fills with random numbers, without a
    word."""
    for fault in ("missing", "unexpected", "mismatched"):
        keys = sorted(map(str, info[f"{fault}_keys"]))
        if keys:
            raise UserError(f"the weights in {model} are not those of a {type(lm).__name__}: "
                            f"{keys[0]} is {fault} ({len(keys)} in all)")
    some = lm.get_input_embeddings().weight[:99]
    if some.equal(some.round()):  # int8 without its scales: it was cast without a word
        raise UserError(f"{model} has whole numbers as weights: name the 16-bit model")


def check_tokenizer(model, lm, tokenizer):
    """Raises UserError unless the tokenizer can read a text, and has no more tokens than the
    model."""
    tokens, embeddings = len(tokenizer), len(lm.get_input_embeddings().weight)
    readable = tokenizer.encode("1", add_special_tokens=False)
    if not readable or tokens > embeddings:
        raise UserError(f"{model}: no tokenizer that fits: {tokens} tokens, "
                        f"{embeddings} embeddings")


def context_of(config):
    """How many tokens a model reads at most; None if its configuration sets no limit."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_context(config, max_tokens):
    """Raises UserError if prompt and response may be longer than the model reads: its positions
    beyond that were never trained, and it would answer noise without a word."""
    limit = context_of(config)
    if limit and max_tokens and max_tokens > limit:
        raise UserError(f"the model reads {limit} tokens at most, prompt and response may have "
                        f"{max_tokens}: lower --max-prompt-tokens, --max-response-tokens or "
                        "--max-task-tokens")


def model_config(model: str):
    """The transformers configuration of a folder or hub name. Raises UserError if there is none."""
    check_model(model)
    with one_line(model):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)


def choose_dtype(dtype, device, config):
    """The compute type: "bf16", "fp32", or for "auto" bf16 where the hardware multiplies it.

    auto: bf16 on a GPU of compute capability 8.0 or more, and for a real model on a CPU with AMX or
    AVX512-BF16; else fp32, so that the embedded worlds give the same results on every CPU.
    """
    if dtype != "auto":
        fast = dtype == "bf16"
    elif device.startswith("cuda"):
        fast = not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        fast = fast and config.get_text_config(decoder=True).hidden_size >= REAL
    return torch.bfloat16 if fast else torch.float32


def weights_of(model: str) -> str:
    """Return a hash of the weights of a folder, or of a hub name that was downloaded; "" where
    there are none. Another folder, format or number type of the same weights has the same hash."""
    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (OSError, ValueError):  # it was never downloaded, or is no name of the hub
            return ""
    with one_line(model):
        tensors = list(tensors_in(folder))
    return tensors_digest(tensors) if tensors else ""


def hub_commit(name: str) -> str:
    """Return the commit at which a model of the hub was loaded last; "" if it never was."""
    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent.name if isinstance(cached, str) else ""


def tensors_in(folder: Path):
    """Yield (name, tensor) of a model's safetensors. Of a tensor only those numbers are read from
    the disk that somebody looks at."""
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def tensors_digest(tensors) -> str:
    """Return a hash of (name, tensor) pairs in any order: of each its name, its shape and PIECE
    numbers at each of PIECES places, which is all of a small one."""
    lines = []
    for name, tensor in tensors:
        parts = tensor.detach().flatten().tensor_split(PIECES)
        numbers = torch.cat([part[:PIECE] for part in parts]).float()
        digest = hashlib.sha256(numbers.cpu().numpy().tobytes()).hexdigest()
        lines.append(f"{name} {tuple(tensor.shape)} {digest}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def model_digest(model: str) -> str:
    """Return what identifies a model: the commit of a hub name, a hash of a folder's weights."""
    if Path(model).is_dir():
        return weights_of(model)
    model_config(model)  # afterwards its commit is known
    return hub_commit(model)


# ---------------------------------------------------------------------------------------------
# adapters


def add_adapters(model, names, rank: int, seed: int, folder=None):
    """The model with a LoRA adapter for each name; the first one is read from `folder`, if given.

    Raises UserError if not all of it fits the model.
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
    """Put an adapter's saved weights in the place of those of the adapter `name`. Raises UserError
    if not all of it fits the model."""
    with one_line(folder):
        keys = model.load_adapter(str(folder), name)
    if keys.missing_keys or keys.unexpected_keys:  # PEFT only warns of what does not fit
        raise UserError(f"the adapter {folder} was trained on another model: its layers are others")


def note_base(folder, names, model: str):
    """Write beside each saved adapter on which weights it was trained."""
    base = {"model": model, "digest": weights_of(model)}
    for name in names:
        Path(folder, name, BASE_NOTE).write_text(json.dumps(base))


def check_base(folder, model: str):
    """Raise UserError if the adapter in `folder` was trained on other weights than those of
    `model`: it would load silently, and the model's answers would be worse for it. Print a line
    where the weights cannot be compared."""
    note, config = Path(folder) / BASE_NOTE, Path(folder) / "adapter_config.json"
    if note.is_file():
        base = json.loads(note.read_text())
        name, trained_on = base["model"], base.get("digest")
    else:  # an adapter that was made elsewhere names its base, and no more
        name = json.loads(config.read_text()).get("base_model_name_or_path") or model
        trained_on = weights_of(name)
    present = weights_of(model)
    if trained_on and present:
        if trained_on != present:
            raise UserError(f"the adapter {folder} was trained on other weights ({name}) than "
                            f"those of {model}: give those as the model")
    elif name != model:
        print(f"the adapter {folder} was trained on {name}, whose weights cannot be compared with "
              f"those of {model}")


# ---------------------------------------------------------------------------------------------
# the check


@torch.no_grad()
def check_paths(policy, max_tokens):
    """Raises UserError unless sampler, scorer and the library's own forward pass agree.

    Two responses each to a short prompt of random tokens and to one that is longer than any window
    or number of positions that the configuration names and a run of max_tokens can reach: what is
    not full causal attention with a linear head after it would be scored wrongly, and silently.
    The short ones are also learned from, with and without gradient checkpointing.
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
        lm.set_attn_implementation("eager_fp32")  # transformers' plain attention
        plain = policy.plain_logprobs(rollouts)[0][mask]
        lm.set_attn_implementation("prompt_once")
    sampled = plain.new_tensor([logp for r in rollouts for logp in r.logps])
    mean, worst = TOLERANCE[lm.dtype]
    for name, logps in (("sampler", sampled), ("scorer", scored[mask])):
        gap = (logps - plain).abs()
        # random tokens are less certain than text: three times the mean
        if not (gap.mean() <= 3 * mean and gap.max() <= worst):
            raise UserError(f"{lm.config.model_type} models do more than full causal attention and "
                            f"a linear head: on {length} tokens the {name} is {gap.max():.2g} nats "
                            "off the library's own forward pass")
    if adapter:
        check_gradient(policy, adapter, rollouts[:2])


def telling_length(config, max_tokens):
    """A length beyond every number of the configuration at which attention or positions may change,
    as far as max_tokens reach."""
    reach = max_tokens or min(LONGEST, context_of(config) or LONGEST)
    numbers = re.findall(r'(?:window|chunk|position)[^"]*": (\d+)', config.to_json_string(False))
    limits = [int(number) for number in numbers if int(number) < reach]
    return max(limits, default=0) + SHORT


@torch.enable_grad()
def check_gradient(policy, adapter, rollouts):
    """Raises UserError unless blocks that are computed again in the backward pass, as is usual on a
    GPU, give the gradient of those that keep what they hold."""
    both = []
    for grad_checkpoint in (False, True):
        with policy.use(adapter):
            logp, _ = policy.logprobs(rollouts, 1.0, grad_checkpoint)
            gradient = torch.autograd.grad(logp.sum(), policy.params[adapter], allow_unused=True)
        both.append(torch.cat([g.flatten() for g in gradient if g is not None]))
    plain, again = both
    if not (again - plain).norm() <= 0.05 * plain.norm():
        raise UserError(f"{policy.lm.config.model_type} models compute something else in train "
                        "mode: their gradient is another one under gradient checkpointing")

"""From a folder or hub name to a model and its tokenizer, or one clear line why not; bf16 or fp32.

What of the paper this is: nothing; it is what stands between a user's model and policy.py.

How it is run: Policy.load calls `load_model`; memory.py checks a folder before it reads its config.

Where it differs on purpose: models whose logits or attention are not the plain kind are refused
rather than scored wrongly.

Adapters, their gradients and AdamW's moments are fp32 either way; so are logits and log-probs. What
bf16 moves: the sampler decodes a token at a time and the scorer reads whole groups, so the same
log-prob is rounded in two ways (logits near 20 are 0.125 apart in bf16). On a 135M Llama with
random adapters, whose text is far from certain, that came to 0.04 nats on average and 0.3 for the
worst of 288 tokens; TOLERANCE is what tests/test_real_model.py holds every release to.
"""
import json
import logging
import time
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError

from support.files import UserError, first_line
from support import gguf

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its missing optional kernels

NAMES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# mean and largest |sampler - scorer| of a log-prob, nats, on text that the model wrote at T = 1
TOLERANCE = {torch.bfloat16: (0.08, 1.0), torch.float32: (1e-5, 1e-3)}
REAL = 256  # hidden size from which a model counts as a real one: smaller products gain nothing


def load_model(model: str, quant=None, dtype="auto", device="auto"):
    """(causal LM, tokenizer) of a local folder or hub name. Raises UserError with one line.

    A .gguf file is unpacked first. quant: None or "nf4": 4-bit weights with double quantisation.
    dtype: "auto", "bf16" or "fp32", see choose_dtype. device: "auto", "cpu", "cuda".
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils import logging as transformers_logging
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = choose_dtype(dtype, device, model)
    if gguf.is_gguf(model):
        with gguf.as_folder(model, dtype) as folder:
            return load_model(folder, quant, dtype, device)
    check_model_folder(model)
    options = dict(dtype=dtype, device_map={"": device}, trust_remote_code=False)
    if quant == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype)
    elif quant:
        raise UserError(f"unknown quantisation {quant!r}: use nf4 or leave it out")
    try:
        tokenizer = load_tokenizer(model)  # first: it fails fast
        return AutoModelForCausalLM.from_pretrained(model, **options), tokenizer
    except (OSError, ValueError, KeyError) as error:
        refuse_own_code(model, error)
        raise UserError(f"cannot load the model {model}: {first_line(error)}") from None
    except (SafetensorError, RuntimeError) as error:  # a broken download, another model's weights
        raise UserError(f"the weights of {model} do not load ({first_line(error):.160}): are they "
                        "whole, and do they belong to the config.json beside them?") from None


def policy_options(o) -> dict:
    """What Policy.load takes of a run's Options."""
    return dict(rank=o.rank, quant=o.quant or None, dtype=o.dtype, seed=o.seed,
                chat_template_kwargs={**json.loads(o.chat_template_kwargs or "{}"), "date": o.date})


def check_adapter_folder(path, name: str, rank=None):
    """UserError unless `path` is a folder with a LoRA adapter in PEFT format, and of this rank if
    one is given. name: "agent" or "env", for the message."""
    folder = Path(path)
    missing = [f for f in ("adapter_config.json", "adapter_model.safetensors")
               if not (folder / f).is_file()]
    if not folder.is_dir():
        what = "there is no such folder"
    elif missing:
        what = f"it has no {missing[0]}"
    else:
        what = _unfit(folder / "adapter_config.json", rank)
    if what:
        raise UserError(f"--{name}-adapter {path}: {what}; name a folder in PEFT format, as a run "
                        f"writes it to adapters/{name}")


def _unfit(config: Path, rank) -> str:
    """Why the adapter of a PEFT configuration cannot be a policy's, or ""."""
    try:
        saved = json.loads(config.read_text())
        if saved["peft_type"] != "LORA":
            return f"it holds {saved['peft_type']}, not LORA"
        return "" if rank in (None, saved["r"]) else \
            f"its rank is {saved['r']} and --rank is {rank}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return f"{config.name} is damaged"


def add_adapter(model, path, name: str):
    """The model with the adapter in a PEFT folder. Raises UserError unless all of it fits: PEFT only
    warns where an adapter of another model has other layers."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open
    try:
        with safe_open(Path(path) / "adapter_model.safetensors", "pt") as file:  # its header alone
            given = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
        if isinstance(model, PeftModel):
            model.load_adapter(path, name)
        else:
            model = PeftModel.from_pretrained(model, path, adapter_name=name)
    # cut short, of other shapes, of layers that the model has not
    except (SafetensorError, OSError, RuntimeError, LookupError, ValueError) as error:
        raise UserError(f"the adapter {path} does not load on this model: is it whole, and was it "
                        f"trained on it? ({first_line(error):.160})") from None
    own = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    if given != {key: tuple(w.shape) for key, w in own.items()}:
        raise UserError(f"the adapter {path} was trained on another model: its layers are others")
    return model


def load_tokenizer(model):
    """The tokenizer of a model; one saved as a plain tokenizer.json is taken at its word.

    The automatic class would be guessed from the model's type, whose own splitting rules would then
    replace those in the file.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    config = Path(model) / "tokenizer_config.json"
    kind = json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else None
    plain = kind in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(
        model, trust_remote_code=False)


def refuse_own_code(model, error):
    """Raises UserError if transformers failed because the model brings code: it is never run.

    Without `trust_remote_code=False` transformers would ask on the terminal, and run it after a y.
    """
    if "trust_remote_code" in str(error):
        raise UserError(f"{model} needs Python code of its own (auto_map in its configuration), "
                        "which is never run here: choose a model that transformers knows") from None


def find_eos_ids(lm, tokenizer) -> list[int]:
    """Every id that ends a response: some chat models stop on several."""
    ids = lm.generation_config.eos_token_id if lm.generation_config else None
    ids = ids if isinstance(ids, list) else [ids]
    ids = [i for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]
    if not ids:
        raise UserError("the model names no end-of-sequence token: set eos_token in its tokenizer")
    return ids


def refuse_unlike_heads(config):
    """Models that do more than a linear head and full causal attention would be scored wrongly."""
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UserError(f"this model changes its logits after the head ({name}): not supported")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError("this model uses sliding-window attention: not supported, "
                        "choose one with full attention (Qwen2.5, Llama)")


def check_model_folder(model):
    """A local folder must hold a model and a tokenizer; anything else is taken as a hub name."""
    folder = Path(model)
    if not folder.exists():
        if folder.is_absolute() or str(model).startswith("."):
            raise UserError(f"model folder {model} does not exist")
        return
    if not (folder / "config.json").is_file():
        packed = next(folder.glob("*.gguf"), None)
        what = f"name the file itself, --model {packed}" if packed else \
            "is it a transformers model?"
        raise UserError(f"model folder {model} has no config.json: {what}")
    if not any((folder / name).is_file() for name in
               ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")):
        raise UserError(f"model folder {model} has no tokenizer: save one beside the model "
                        "with tokenizer.save_pretrained")


def model_config(model: str):
    """The transformers configuration of a folder or hub name. Raises UserError if there is none."""
    from transformers import AutoConfig
    if gguf.is_gguf(model):
        return gguf.config(model)
    check_model_folder(model)
    # without a network the hub's client announces every retry; the error at the end is enough
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        refuse_own_code(model, error)
        what = "the model" if Path(model).is_dir() else "the hub model (there is no such folder)"
        raise UserError(f"cannot read the configuration of {what} {model}: "
                        f"{first_line(error)}") from None


# ---------------------------------------------------------------------------------------------
# the numbers it computes in


def choose_dtype(dtype, device: str, model: str = "", config=None) -> torch.dtype:
    """The compute type: `dtype` itself ("bf16", "fp32", a torch.dtype), or what "auto" stands for.

    auto: bf16 on a GPU, fp32 below compute capability 8.0, where no fused attention takes bf16. On
    a CPU bf16 where its products are faster there and the model is a real one, else fp32; so the
    embedded worlds, whose results must not move, get fp32 on every CPU.
    device: "cpu" or "cuda..."; model or config: what to look at. Raises UserError.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        if dtype not in NAMES:
            raise UserError(f"--dtype is {dtype!r}: choose from auto, {', '.join(NAMES)}")
        return NAMES[dtype]
    if device.startswith("cuda"):
        old = torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)
        return torch.float32 if old else torch.bfloat16
    if config is None:
        config = model_config(model)
    hidden = getattr(config.get_text_config(decoder=True), "hidden_size", 0) or 0
    return torch.bfloat16 if hidden >= REAL and bf16_is_faster() else torch.float32


@lru_cache
def bf16_is_faster() -> bool:
    """Whether a product takes clearly less time in bf16 than in fp32 on this CPU.

    Tens of milliseconds; the best of eight counts, as a busy machine only ever adds time. CPUs are
    either several times as fast in bf16 or several times as slow: 1.5 lies between the two.
    """
    def best(dtype):
        a, times = torch.ones(512, 512, dtype=dtype), []
        for _ in range(8):
            started = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - started)
        return min(times)
    return best(torch.float32) > 1.5 * best(torch.bfloat16)

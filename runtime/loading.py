"""From a folder or hub name to a model and its tokenizer, or one clear line why not.

What of the paper this is: nothing; it is what stands between a user's model and policy.py.

How it is run: Policy.load calls `load_model`; memory.py checks a folder before it reads its config.

Where it differs on purpose: models whose logits or attention are not the plain kind are refused
rather than scored wrongly.
"""
import json
import logging
from pathlib import Path

import torch
from safetensors import SafetensorError

from runtime import gguf
from runtime.dtypes import choose_dtype
from runtime.jsonl import UserError, first_line

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its missing optional kernels


def load_model(model: str, quant=None, dtype="auto", device="auto"):
    """(causal LM, tokenizer) of a local folder or hub name. Raises UserError with one line.

    A .gguf file is unpacked first. quant: None or "nf4": 4-bit weights with double quantisation.
    dtype: "auto", "bf16" or "fp32", see runtime/dtypes.py. device: "auto", "cpu", "cuda".
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
        raise UserError(f"the weights of {model} do not load ({first_line(error):.160}): are they whole, "
                        "and do they belong to the config.json beside them?") from None


def policy_options(o) -> dict:
    """What Policy.load takes of a run's Options."""
    return dict(rank=o.rank, quant=o.quant or None, dtype=o.dtype, device=o.device, seed=o.seed,
                # a run that goes on has its adapters in its checkpoint
                adapter_paths={} if o.resume else {"agent": o.agent_adapter, "env": o.env_adapter},
                chat_template_kwargs=json.loads(o.chat_template_kwargs or "{}"))


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
        what = f"name the file itself, --model {packed}" if packed else "is it a transformers model?"
        raise UserError(f"model folder {model} has no config.json: {what}")
    if not any((folder / name).is_file() for name in
               ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")):
        raise UserError(f"model folder {model} has no tokenizer: save one beside the model "
                        "with tokenizer.save_pretrained")

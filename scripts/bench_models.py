"""Random models of a stated size, prompts and rewards: speed does not depend on the weights.

What of the paper this is: nothing. How it is run: it is not; the benches build their models here.
"""
import copy
import logging
import warnings

import torch

QWEN_7B = dict(hidden=3584, layers=28, vocab=152064, heads=28, kv_heads=4, intermediate=18944)


def qwen2_config(hidden, layers, vocab, heads, kv_heads, intermediate, tied=False):
    """A Qwen2 shape whose end-of-sequence id is one past the vocabulary: it is never sampled."""
    from transformers import Qwen2Config
    return Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=intermediate, max_position_embeddings=32768,
        tie_word_embeddings=tied, bos_token_id=None, pad_token_id=None, eos_token_id=vocab)


def small_config(hidden, layers, vocab):
    """Qwen2 with the 7B's MLP width (5.3 x hidden); heads of 64, four queries per key head."""
    heads = max(1, hidden // 64)
    return qwen2_config(hidden, layers, vocab, heads, max(1, heads // 4), hidden * 21 // 256 * 64)


def random_nf4(config, device, dtype, nf4=True):
    """A random Qwen2, its linear layers NF4 or in `dtype`: one layer is drawn, the others are copies.

    It is never whole in 16 bits. On the meta device nothing is stored and nothing is drawn.
    """
    from transformers import Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
    layers, config.num_hidden_layers = config.num_hidden_layers, 0
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), torch.random.fork_rng():
            torch.manual_seed(0)
            lm = Qwen2ForCausalLM(config)  # embeddings, final norm and head only
            config.num_hidden_layers = layers
            layer = Qwen2DecoderLayer(config, 0).requires_grad_(False)
            for name, module in list(layer.named_modules()):
                if nf4 and isinstance(module, torch.nn.Linear):
                    layer.set_submodule(name, nf4_linear(module, device, dtype))
            for i in range(layers):
                # all layers look into one configuration: which attention to call stands there
                one = copy.deepcopy(layer, {id(config): config}) if i else layer
                lm.model.layers.append(one)
                one.self_attn.layer_idx = i
    finally:
        torch.set_default_dtype(former)
    lm.is_loaded_in_4bit = nf4  # as the library's loader marks it; PEFT asks
    return lm


def nf4_linear(linear, device, dtype):
    """The 4-bit copy of a linear layer, with double quantisation."""
    import bitsandbytes as bnb
    settings = dict(quant_type="nf4", compress_statistics=True)
    out = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                            compute_dtype=dtype, device="meta", **settings)
    weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **settings)
    # the library keeps the table that it makes here for good: on meta it would be an empty one
    with torch.device("cpu"):
        bnb.functional.name2qmap.setdefault("dynamic", bnb.functional.create_dynamic_map())
    # by name: moving a weight to a device quantises it too, but not on meta
    out.weight, out.bias = weight._quantize(device), linear.bias
    return out


def word_tokenizer(vocab):
    """One word per id, so that prompts of an exact length can be handed over as text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = {f"w{i}": i for i in range(vocab)} | {"<eos>": vocab}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="w0")


def random_prompts(count, length, vocab, seed=0):
    """count lists of `length` ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


def rewards_of(rollouts, G):
    """(B, G) rewards of B groups of G rollouts, one group after the other."""
    return torch.tensor([reward_of(r.response) for r in rollouts]).view(-1, G)


def reward_of(ids) -> float:
    """Share of even ids: cheap, and hardly ever the same for all of a group."""
    return sum(i % 2 == 0 for i in ids) / len(ids)


def quiet():
    """No warnings and no progress bars from the libraries: the table is the output."""
    import transformers
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()

"""How fast, how much memory: against TRL on a CPU, and the real 7B shape on one GPU.

    python bench.py trl --prompt 256 --response 64 --steps 5     # needs requirements-bench.txt
    python bench.py trl --check                                  # only: same loss, same gradients?
    python bench.py gpu --random-weights                         # one CUDA device, no download
    python bench.py gpu --random-weights --tiny                  # the same script, small, on a CPU

What of the paper this is: nothing; it measures the two updates of Algorithm 1 as this project makes
them. Both benches build a random Qwen2 of a stated size, as speed does not depend on the weights.

How `trl` measures: one step is rollouts, reference log-probs, loss, backward and optimiser, of 4
prompts and G = 8. TRL's GRPOTrainer and ours take turns within one run, on the same base weights,
prompts, LoRA and optimiser. The end-of-sequence id lies outside the vocabulary, so every response
has full length in both. No logging, no checkpointing of activations, fp32. Before that, the loss and
the LoRA gradients of one step on the same completions and rewards are compared.

How `gpu` measures: the training pass and the rollouts with each prompt once per group, then with the
prompt repeated in every row (what TRL and most peers do), both through the same code; then a full
epoch of both updates. The repeated layout has no prompt shared and is plain causal attention.
"""
import argparse
import contextlib
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from data_pool import UserError
from grpo import group_advantages, grpo_loss, grpo_update, subset
from policy import Policy, split_groups
from rwr import rwr_update

LEARNING_RATE, CLIP, KL_COEF, RANK, TRL_ADAPTER = 1e-5, 0.2, 0.04, 16, "default"


# ---------------------------------------------------------------------------------------------
# random models


def qwen2_config(hidden, layers, vocab, heads, kv_heads, intermediate):
    """A Qwen2 shape whose end-of-sequence id is one past the vocabulary: it is never sampled."""
    from transformers import Qwen2Config
    return Qwen2Config(
        hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=intermediate, max_position_embeddings=32768,
        tie_word_embeddings=False, bos_token_id=None, pad_token_id=None, eos_token_id=vocab)


def small_config(hidden, layers, vocab):
    """Qwen2 with the 7B's MLP width (5.3 x hidden); heads of 64, four queries per key head."""
    heads = max(1, hidden // 64)
    return qwen2_config(hidden, layers, vocab, heads, max(1, heads // 4), hidden * 21 // 4)


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


def reward_of(ids) -> float:
    """Share of even ids: cheap, and never the same for a whole group."""
    return sum(i % 2 == 0 for i in ids) / len(ids)


def rewards_of(groups):
    """(B, G) rewards of B groups (prompt ids, G response ids)."""
    return torch.tensor([[reward_of(r) for r in responses] for _, responses in groups])


def grouped(rollouts, G):
    """Rollouts in prompt order -> list of (prompt ids, list of G response ids)."""
    return [(rollouts[i].prompt, [r.response for r in rollouts[i:i + G]])
            for i in range(0, len(rollouts), G)]


# ---------------------------------------------------------------------------------------------
# against TRL


def bench_trl(o):
    """Compare one step with TRL's: values first, then time. The last line printed is the ratio."""
    if o.prompt < 1 or o.response < 2 or o.steps < 1 or o.hidden % 64:
        raise UserError("--prompt and --steps need 1 or more, --response 2, --hidden a multiple of 64")
    with contextlib.suppress(ImportError):
        import trl
    if "trl" not in sys.modules:
        raise UserError("TRL is not installed: pip install -r requirements-bench.txt")
    from transformers import Qwen2ForCausalLM
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(small_config(o.hidden, o.layers, o.vocab))
    print(f"random Qwen2: hidden {o.hidden}, {o.layers} layers, vocabulary {o.vocab}, "
          f"{sum(p.numel() for p in base.parameters()) / 1e6:.1f} M parameters (head "
          f"{100 * head_share(base):.0f} % of the matrix weights); LoRA r={RANK} on all linear layers; "
          f"fp32, {o.threads} thread(s); trl {trl.__version__}, torch {torch.__version__}")
    print(f"{o.prompts} prompts x G = {o.G}; prompt {o.prompt}, response {o.response} tokens", flush=True)
    policy = Policy(copy.deepcopy(base), word_tokenizer(o.vocab), ("agent",), RANK)
    check_against_trl(o, copy.deepcopy(base), policy)
    if o.check:
        return
    pairs = time_against_trl(o, base, policy)
    ratios = sorted(theirs / ours for theirs, ours in pairs)
    print("pairs " + " ".join(f"{r:.2f}" for r in ratios))
    print(f"median seconds per step: TRL {statistics.median(t for t, _ in pairs):.2f}, "
          f"ours {statistics.median(t for _, t in pairs):.2f}")
    print(f"ratio {statistics.median(ratios):.2f}")


def head_share(model) -> float:
    """Weights of the output head over all weights that a response token is multiplied with."""
    head = model.lm_head.weight.numel()
    return head / (head + sum(p.numel() for p in model.model.layers.parameters()))


def trl_trainer(o, base, steps, prompts, callbacks=()):
    """GRPOTrainer on token-exact prompts, set to the objective of grpo.py and to no side work."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    rows = o.prompts * o.G
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=o.trl_rows or rows,
        gradient_accumulation_steps=rows // (o.trl_rows or rows), num_generations=o.G,
        max_completion_length=o.response, temperature=1.0, top_p=1.0, top_k=0,
        # the objective: token-level loss, k3 with the plain gradient, std-scaled advantages
        loss_type="dapo", beta=KL_COEF, use_bias_correction_kl=False, scale_rewards="group",
        epsilon=CLIP, num_iterations=1, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=1.0, shuffle_dataset=False,
        # no side work
        gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True)
    data = Dataset.from_list([{"prompt": " ".join(f"w{i}" for i in p)} for p in prompts])
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear",
                      task_type="CAUSAL_LM")

    def reward(completion_ids, **_):
        return [reward_of(ids) for ids in completion_ids]

    return GRPOTrainer(base, reward_funcs=reward, args=config, train_dataset=data, peft_config=lora,
                       processing_class=word_tokenizer(o.vocab), callbacks=list(callbacks))


def callback(**hooks):
    """A Trainer callback made of the given functions, each called without arguments."""
    from transformers import TrainerCallback
    methods = {name: (lambda *_, f=f, **__: f()) for name, f in hooks.items()}
    return type("Hooks", (TrainerCallback,), methods)()


def check_against_trl(o, base, policy):
    """Same LoRA weights, completions and rewards to both: print how far loss and gradients differ.

    The LoRA B matrices are set to noise first: at zero the KL term would vanish from the test.
    Raises UserError if they differ by more than fp32 rounding (relative 1e-3 of the gradient norm).
    """
    generator, saved = torch.Generator().manual_seed(1), _clone(policy.params["agent"])
    with torch.no_grad():
        for p in policy.params["agent"]:
            p += 0.01 * torch.randn(p.shape, generator=generator)
    prompts = random_prompts(o.prompts, o.prompt, o.vocab, seed=1)
    groups = grouped(policy.sample("agent", prompts, o.G, o.response, 1.0, generator), o.G)
    seen = {}

    def capture():
        seen["grads"] = {n: p.grad.clone() for n, p in trainer.model.named_parameters()
                         if p.grad is not None}

    trainer = trl_trainer(o, base, 1, prompts, [callback(on_pre_optimizer_step=capture)])
    trainer.args.max_grad_norm = 0.0  # compare gradients before clipping
    names = {n: n.replace(".agent.", f".{TRL_ADAPTER}.") for n, _ in policy.model.named_parameters()}
    theirs = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            theirs[names[name]].copy_(p)
    completions = [r for _, responses in groups for r in responses]
    trainer._generate_single_turn = lambda *_: (completions, None)
    losses, step = [], trainer.training_step
    trainer.training_step = lambda *a, **k: losses.append(step(*a, **k)) or losses[-1]
    trainer.train()
    loss, grads = our_gradients(policy, groups)
    difference = max(float((g - seen["grads"][names[n]]).abs().max()) for n, g in grads.items())
    norm = torch.cat([g.flatten() for g in grads.values()]).norm()
    gap = torch.cat([(g - seen["grads"][names[n]]).flatten() for n, g in grads.items()]).norm()
    print(f"one step on the same completions: loss ours {loss:.7f}, TRL {float(sum(losses)):.7f}; LoRA "
          f"gradients: {len(grads)} tensors, norm {norm:.4f}, largest difference {difference:.1e}, "
          f"relative {gap / norm:.1e}", flush=True)
    with torch.no_grad():
        for p, old in zip(policy.params["agent"], saved):
            p.copy_(old)
            p.grad = None
    if not gap / norm < 1e-3:
        raise UserError("the gradients differ from TRL's by more than rounding: do not trust a ratio")


def _clone(params):
    return [p.detach().clone() for p in params]


def our_gradients(policy, groups):
    """Loss and {name: gradient} of one GRPO step on given rollouts, before clipping."""
    with policy.use("agent"):
        with policy.use(None), torch.no_grad():
            ref, _ = policy.logprobs(groups)
        logp, mask = policy.logprobs(groups)
        advantages = group_advantages(rewards_of(groups)).flatten()
        loss, _ = grpo_loss(logp, logp.detach(), ref, advantages, mask, int(mask.sum()), len(mask),
                            clip=CLIP, kl_coef=KL_COEF)
        loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in policy.model.named_parameters()
                                  if p.grad is not None}


def time_against_trl(o, base, policy):
    """Steps in turns: TRL's as its own training loop makes it, then ours. Returns [(TRL s, our s)].

    Ours runs inside the callback that TRL's loop calls at the end of its step. The first pair warms
    both up and is not counted.
    """
    prompts = random_prompts(o.prompts * (o.steps + 1), o.prompt, o.vocab)
    optimizer, generator = policy.optimizer("agent", LEARNING_RATE), policy.generator(0)
    pairs, clock = [], {}

    def begin():
        clock["begin"] = time.perf_counter()

    def end():
        theirs = time.perf_counter() - clock["begin"]
        k, started = len(pairs) * o.prompts, time.perf_counter()
        groups = grouped(policy.sample("agent", prompts[k:k + o.prompts], o.G, o.response, 1.0,
                                       generator), o.G)
        sampled = time.perf_counter()
        grpo_update(policy, "agent", optimizer, groups, rewards_of(groups), clip=CLIP,
                    kl_coef=KL_COEF, token_budget=o.token_budget)
        ours = time.perf_counter() - started
        pairs.append((theirs, ours))
        print(f"{'warm-up' if len(pairs) == 1 else f'pair {len(pairs) - 1}'}: TRL {theirs:.2f} s "
              f"(rollout {clock['rollout']:.2f}), ours {ours:.2f} s (rollout {sampled - started:.2f}), "
              f"ratio {theirs / ours:.2f}", flush=True)

    trainer = trl_trainer(o, base, o.steps + 1, prompts,
                          [callback(on_step_begin=begin, on_step_end=end)])
    generate = trainer._generate_single_turn

    def timed_generate(*args, **kwargs):
        started = time.perf_counter()
        out = generate(*args, **kwargs)
        clock["rollout"] = time.perf_counter() - started
        return out

    trainer._generate_single_turn = timed_generate
    trainer.train()
    return pairs[1:]


# ---------------------------------------------------------------------------------------------
# command line


def parser():
    """Subcommands trl and gpu; a wrong argument is a UserError, so that it ends in one line."""
    p = argparse.ArgumentParser(description="Speed and memory of the two updates, measured.")
    sub = p.add_subparsers(dest="bench", required=True)
    t = sub.add_parser("trl", help="one GRPO step beside TRL's, on a CPU")
    t.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    t.add_argument("--response", type=int, default=64, help="response tokens")
    t.add_argument("--steps", type=int, default=5, help="timed pairs of steps")
    t.add_argument("--prompts", type=int, default=4, help="prompts per step")
    t.add_argument("--G", type=int, default=8, help="rollouts per prompt")
    t.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64")
    t.add_argument("--layers", type=int, default=4)
    t.add_argument("--vocab", type=int, default=32000)
    t.add_argument("--threads", type=int, default=1, help="torch threads")
    t.add_argument("--trl-rows", type=int, default=0, help="rows per micro-batch of TRL; 0 = all")
    t.add_argument("--token-budget", type=int, default=16384, help="tokens per micro-batch of ours")
    t.add_argument("--check", action="store_true", help="compare loss and gradients, time nothing")
    t.set_defaults(run=bench_trl)

    def error(message):
        raise UserError(f"{message}; see python bench.py --help")

    for each in (p, t):
        each.error = error
    return p


def main(argv=None):
    """Run one bench. What the user can mend ends in one line and exit code 2."""
    try:
        o = parser().parse_args(argv)
        o.run(o)
    except UserError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

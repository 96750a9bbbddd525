"""A GRPO step next to TRL's: first the same loss and gradients, then the time of both.

Usage:
    pip install trl==1.16.0 datasets==5.2.0 accelerate==1.15.0
    OMP_NUM_THREADS=1 python -m scripts.bench_trl --prompt 256 --response 64 --steps 5
    OMP_NUM_THREADS=1 python -m scripts.bench_trl --prompt 1024 --response 64 --steps 5

A step is rollouts, reference log-probs, loss, backward pass and optimiser, of 4 prompts with G = 8
on a random Qwen2 in fp32. Both take turns within one run, on the same weights, prompts, LoRA and
optimiser; the end-of-sequence id lies outside of the vocabulary, so every response has full length.
The clock is the CPU time of this process. TRL runs at the fastest setting that we found: its KL
gradient is the plain k3 one, and its head projects responses only, as it does by itself on a GPU.
"""
import copy
import statistics
import sys
import tempfile
import time
from functools import partial

import torch

from grpo import CLIP, grpo_update
from policy import Policy
from scripts.bench_gpu import LEARNING_RATE, RANK, G, qwen2_config, random_prompts, reward_of, \
    rewards_of, tokenizer_for
from model.files import UserError, exit_code
from support.options import Options, Parser, at_least

KL_COEF, PROMPTS = 0.04, 4
VOCAB = 1600  # gives the head 8 % of the weights, as in the 7B
SHAPE = dict(hidden=256, layers=4, vocab=VOCAB, heads=4, kv_heads=1, intermediate=1344)


def main(argv) -> int:
    """Compare one step with TRL's: values first, then time. The last line printed is the ratio."""
    p = Parser(prog="python -m scripts.bench_trl", description=__doc__)
    for name, default in (("prompt", 256), ("response", 64), ("steps", 5)):
        p.add_argument(f"--{name}", type=at_least(2), default=default)
    args = p.parse_args(argv)
    try:
        import trl.trainer.utils
    except ImportError:
        raise UserError("TRL is not installed: see the head of scripts/bench_trl.py") from None
    # as on a GPU, where TRL projects responses only
    trl.trainer.utils._use_triton = use_triton
    from transformers import Qwen2ForCausalLM
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(qwen2_config(**SHAPE))
    check(args, copy.deepcopy(base), new_policy(base))
    ratios = [them / us for them, us in timed(args, base, new_policy(base))]
    print(f"ratio {statistics.median(ratios):.2f}")
    return 0


def use_triton(device) -> bool:
    """In place of TRL's own: always."""
    return True


def new_policy(base):
    """Our policy on a copy of the base model."""
    return Policy(copy.deepcopy(base), tokenizer_for(VOCAB), ("agent",), RANK)


def trainer_of(args, base, tokenizer, steps, prompts, hooks):
    """TRL's GRPOTrainer on token-exact prompts, set to the objective of grpo.py and to no side
    work. hooks: {name of a Trainer callback: function without arguments}."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, num_generations=G,
        temperature=1.0, top_p=1.0, top_k=0, per_device_train_batch_size=PROMPTS * G,
        max_completion_length=args.response,
        # the objective: token-level loss, k3 with the plain gradient, std-scaled advantages
        loss_type="dapo", beta=KL_COEF, use_bias_correction_kl=False, scale_rewards="group",
        epsilon=CLIP, num_iterations=1, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=1.0, shuffle_dataset=False,
        # no side work
        gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, task_type="CAUSAL_LM",
                      target_modules="all-linear")

    def rewards(completion_ids, **_):
        return [reward_of(ids) for ids in completion_ids]

    callback = TrainerCallback()
    for name, hook in hooks.items():
        setattr(callback, name, partial(without_arguments, hook))
    records = [{"prompt": tokenizer.decode(p)} for p in prompts]
    trainer = GRPOTrainer(
        base, reward_funcs=rewards, args=config, processing_class=tokenizer, callbacks=[callback],
        train_dataset=Dataset.from_list(records), peft_config=lora)
    trainer.remove_callback(PrinterCallback)
    return trainer


def without_arguments(hook, *_, **__):
    """Call a hook, whatever the trainer hands over."""
    hook()


def check(args, base, policy):
    """Same LoRA weights, completions and rewards to both. Raises UserError if the LoRA gradients
    differ by more than rounding in fp32. B is set to noise first: at zero the KL term would not
    count. Both sides clip at a norm of 1, which these gradients do not reach."""
    prompts, generator = random_prompts(PROMPTS, args.prompt, VOCAB, seed=1), policy.generator(1)
    with torch.no_grad():
        for p in policy.params["agent"]:
            p += 0.01 * torch.randn(p.shape, generator=generator)
    rollouts, theirs = policy.sample("agent", prompts, G, args.response, 1.0, generator), {}

    def keep():
        for name, p in trainer.model.named_parameters():
            if p.grad is not None:
                theirs[name] = p.grad.clone()

    def same_completions(*_):
        return [r.response for r in rollouts], None

    hooks = {"on_pre_optimizer_step": keep}
    trainer = trainer_of(args, base, policy.tokenizer, 1, prompts, hooks)
    same = {name.replace(".agent.", ".default."): p for name, p in policy.model.named_parameters()}
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p.copy_(same[name])
    trainer._generate_single_turn = same_completions
    trainer.train()
    # the gradients stay with the parameters
    optimizer, o = policy.optimizer("agent", LEARNING_RATE), Options(agent_kl=KL_COEF)
    grpo_update(policy, "agent", optimizer, rollouts, rewards_of(rollouts, G), o)
    differences = [(gradient - same[name].grad).flatten() for name, gradient in theirs.items()]
    gradients = [gradient.flatten() for gradient in theirs.values()]
    gap = float(torch.cat(differences).norm() / torch.cat(gradients).norm())
    print(f"LoRA gradients of one step on the same completions: relative difference {gap:.1e}",
          flush=True)
    if not gap < 1e-3:
        raise UserError("gradients differ from TRL's by more than rounding: trust no ratio")


def timed(args, base, policy) -> list:
    """[(TRL's CPU seconds, ours)] of steps in turns: ours runs inside the callback that TRL's loop
    calls at the end of its step. The first pair warms both up and is not counted."""
    optimizer, generator = policy.optimizer("agent", LEARNING_RATE), policy.generator(0)
    prompts = random_prompts(PROMPTS * (args.steps + 1), args.prompt, VOCAB)
    o, pairs, clock = Options(agent_kl=KL_COEF), [], {}

    def begin():
        clock["begin"] = time.process_time()

    def end():
        theirs, started = time.process_time() - clock["begin"], time.process_time()
        first = len(pairs) * PROMPTS
        mine = prompts[first:first + PROMPTS]
        rollouts = policy.sample("agent", mine, G, args.response, 1.0, generator)
        grpo_update(policy, "agent", optimizer, rollouts, rewards_of(rollouts, G), o)
        ours = time.process_time() - started
        pairs.append((theirs, ours))
        print(f"TRL {theirs:.2f} s, ours {ours:.2f} s", flush=True)

    hooks = {"on_step_begin": begin, "on_step_end": end}
    trainer_of(args, base, policy.tokenizer, args.steps + 1, prompts, hooks).train()
    return pairs[1:]


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:]), "bench_trl"))

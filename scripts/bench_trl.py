"""Compare a GRPO step with TRL's: first the gradients, then the time.

Usage:
    pip install trl==1.16.0 datasets==5.2.0 accelerate==1.15.0
    OMP_NUM_THREADS=1 python -m scripts.bench_trl --prompt 256
    OMP_NUM_THREADS=1 python -m scripts.bench_trl --prompt 1024

A step consists of rollouts, reference log-probs, loss, backward pass and optimiser, for 4 prompts
with G = 8 on a random Qwen2 in fp32. TRL and we use the same weights, prompts, LoRA settings and
optimiser; the end-of-sequence id is outside the vocabulary, so every response has full length. Time
is the CPU time of this process. TRL runs with the fastest settings that we found: its KL gradient
is plain k3, and its head projects only responses, as it does on a GPU.
"""
import copy
import math
import sys
import tempfile
import time

import torch
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForCausalLM

from errors import UserError, exit_code
from grpo import CLIP, grpo_update
from policy import Policy
from support.options import Options, Parser, at_least
from worlds.tiny_model import word_tokenizer

LEARNING_RATE, RANK, G, KL_COEF = 1e-5, 16, 8, 0.04
PROMPTS, RESPONSE, STEPS = 4, 64, 5
VOCAB = 1600  # gives the head 8 % of the weights, as in the 7B
SIZES = dict(hidden_size=256, num_hidden_layers=4, vocab_size=VOCAB, num_attention_heads=4,
             num_key_value_heads=1, intermediate_size=1344)


def main(argv) -> int:
    """Compare one step with TRL's: gradients first, then time. Return 0.

    The last line printed ends with the ratio.
    """
    p = Parser(prog="python -m scripts.bench_trl", description=__doc__)
    p.add_argument("--prompt", type=at_least(2), default=256, help="tokens of a prompt")
    args = p.parse_args(argv)
    import trl.trainer.utils
    # as on a GPU, where TRL projects only responses
    trl.trainer.utils._use_triton = use_triton
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False, eos_token_id=None,
                                        bos_token_id=None, pad_token_id=None))
    # a word for each id, because TRL takes prompts as text; <eos> is one past the vocabulary
    tokenizer = word_tokenizer(["<pad>", *(f"w{i}" for i in range(1, VOCAB)), "<eos>"])
    for measure in (check, compare_time):
        # each trains its own copy
        policy = Policy(copy.deepcopy(base), tokenizer, ("agent",), RANK)
        measure(args.prompt, copy.deepcopy(base), policy)
    return 0


def use_triton(device) -> bool:
    """Return True always; this replaces TRL's test of whether Triton can be used."""
    return True


def random_prompts(count, length):
    """Return `count` lists of `length` random ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCAB, (count, length), generator=generator).tolist()


def reward_of(ids) -> float:
    """Return the share of even ids: quick to compute, and rarely equal within a group."""
    return sum(i % 2 == 0 for i in ids) / len(ids)


def update(policy, optimizer, rollouts):
    """Make our GRPO update on sampled rollouts."""
    rewards = torch.tensor([reward_of(r.response) for r in rollouts]).view(-1, G)
    grpo_update(policy, "agent", optimizer, rollouts, rewards, Options(agent_kl=KL_COEF))


def trainer_of(base, tokenizer, steps, prompts, **optimizer):
    """Return TRL's GRPOTrainer with the objective of grpo.py and no extra work.

    prompts: lists of ids, whose text TRL encodes to the same ids. optimizer: the optimiser's
    settings.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, num_generations=G,
        temperature=1.0, top_p=1.0, top_k=0, per_device_train_batch_size=PROMPTS * G,
        max_completion_length=RESPONSE,
        # the objective: token-level loss, k3 with the plain gradient, std-scaled advantages
        loss_type="dapo", beta=KL_COEF, use_bias_correction_kl=False, scale_rewards="group",
        epsilon=CLIP, num_iterations=1, lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=1.0, shuffle_dataset=False, **optimizer,
        # no extra work
        gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, task_type="CAUSAL_LM",
                      target_modules="all-linear")

    def rewards(completion_ids, **_):
        return [reward_of(ids) for ids in completion_ids]

    records = [{"prompt": tokenizer.decode(p)} for p in prompts]
    return GRPOTrainer(base, reward_funcs=rewards, args=config, processing_class=tokenizer,
                       train_dataset=Dataset.from_list(records), peft_config=lora)


def check(prompt_tokens, base, policy):
    """Raise UserError if the gradients differ by more than rounding in fp32.

    Both get the same LoRA weights, completions and rewards, and take one step of gradient descent
    at a rate of 1, which moves the weights by their gradients. The LoRA weights get noise first:
    with B = 0 the KL term would have no gradient. Both clip at a norm of 1, which these gradients
    do not reach.
    """
    prompts, params = random_prompts(PROMPTS, prompt_tokens), policy.params["agent"]
    for p in params:
        p.data += 0.01 * torch.randn(p.shape)
    rollouts = policy.sample("agent", prompts, G, RESPONSE, 1.0, policy.generator(1))

    def same_completions(*_):
        return [r.response for r in rollouts], None

    trainer = trainer_of(base, policy.tokenizer, 1, prompts, optim="sgd",
                         learning_rate=1.0)
    ours = {name.replace(".agent.", ".default."): p for name, p in policy.model.named_parameters()}
    theirs = dict(trainer.model.named_parameters())
    for name, p in theirs.items():
        p.data.copy_(ours[name])
    trainer._generate_single_turn = same_completions
    before = {name: p.detach().clone() for name, p in theirs.items()}
    trainer.train()
    update(policy, torch.optim.SGD(params, lr=1.0), rollouts)
    apart = moved = 0.0
    for name, p in theirs.items():
        apart += float((p - ours[name]).detach().square().sum())
        moved += float((p - before[name]).detach().square().sum())
    gap = math.sqrt(apart / moved)
    print(f"LoRA gradients of one step on the same completions: relative difference {gap:.1e}",
          flush=True)
    if not gap < 1e-3:
        raise UserError("gradients differ from TRL's by more than rounding: repair that first")


def compare_time(prompt_tokens, base, policy):
    """Print the CPU time of the same steps, TRL's first.

    `check` has loaded all libraries before, so loading does not count.
    """
    optimizer, generator = policy.optimizer("agent", LEARNING_RATE), policy.generator(0)
    prompts = random_prompts(PROMPTS * STEPS, prompt_tokens)
    trainer = trainer_of(base, policy.tokenizer, STEPS, prompts,
                         learning_rate=LEARNING_RATE)
    began = time.process_time()
    trainer.train()
    turn = time.process_time()
    for first in range(0, len(prompts), PROMPTS):
        step = prompts[first:first + PROMPTS]
        update(policy, optimizer, policy.sample("agent", step, G, RESPONSE, 1.0, generator))
    theirs, ours = turn - began, time.process_time() - turn
    print(f"{STEPS} steps: TRL {theirs:.2f} s, ours {ours:.2f} s, ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))

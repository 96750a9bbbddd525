"""One step beside TRL's GRPOTrainer: first the same loss and gradients, then the time of both.

What of the paper this is: nothing; it measures the agent's update of Algorithm 1 as this project
makes it. How it is run: `python -m bench trl`, and within `python -m bench model`.

How `trl` measures: one step is rollouts, reference log-probs, loss, backward and optimiser, of 4
prompts and G = 8. TRL's GRPOTrainer and ours take turns within one run, on the same base weights,
prompts, LoRA and optimiser. The end-of-sequence id lies outside the vocabulary, so every response
has full length in both. No logging, no checkpointing of activations, fp32. With one thread the
clock is the CPU time of this process, so that neighbours on the machine do not count; with more it
is the wall clock. Before that, the loss and the LoRA gradients of one step on the same completions
and rewards are compared.
Two settings of TRL 1.16 are chosen: its KL gradient is the plain k3 one (`use_bias_correction_kl`
off), and its head projects responses only. On a CPU the trainer as installed projects the prompts'
positions too, which it does not do on a GPU; `--trl-head stock` measures that.
"""
import copy
import os
import statistics
import tempfile
import time

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from bench.gpu import LEARNING_RATE, RANK
from bench.models import quiet, random_prompts, reward_of, rewards_of, small_config, word_tokenizer
from common.files import UserError
from grpo import group_advantages, grpo_loss, grpo_update
from policy import Policy
from run.options import Options

CLIP, KL_COEF = 0.2, 0.04


def clock_of(o):
    """CPU time of this process with one thread, as neighbours do not count; else wall-clock time."""
    return time.process_time if o.threads == 1 else time.perf_counter


def random_base(o):
    """The random Qwen2 of --hidden, --layers and --vocab; torch's threads and seed are set."""
    from transformers import Qwen2ForCausalLM
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(small_config(o.hidden, o.layers, o.vocab))


def bench_trl(o):
    """Compare one step with TRL's: values first, then time. The last line printed is the ratio."""
    if o.hidden % 64:
        raise UserError("--hidden must be a multiple of 64")
    if o.trl_rows and o.prompts * o.G % o.trl_rows:
        raise UserError("--trl-rows must divide --prompts times --G")
    trl = installed_trl(o)
    quiet()
    base = random_base(o)
    print(f"random Qwen2: hidden {o.hidden}, {o.layers} layers, vocabulary {o.vocab}, "
          f"{sum(p.numel() for p in base.parameters()) / 1e6:.1f} M parameters (head "
          f"{100 * head_share(base):.0f} % of the matrix weights); LoRA r={RANK} on all linear "
          f"layers; fp32, {o.threads} thread(s); trl {trl.__version__} (head: {o.trl_head}), "
          f"torch {torch.__version__}")
    print(f"{o.prompts} prompts x G = {o.G}; prompt {o.prompt}, response {o.response} tokens",
          flush=True)
    policy = Policy(copy.deepcopy(base), word_tokenizer(o.vocab), ("agent",), RANK)
    check_against_trl(o, copy.deepcopy(base), policy,
                      random_prompts(o.prompts, o.prompt, o.vocab, seed=1))
    if o.check:
        return
    prompts = random_prompts(o.prompts * (o.steps + 1), o.prompt, o.vocab)
    report_pairs(time_against_trl(o, base, policy, prompts))


def report_pairs(pairs):
    """Print ratios and medians of [(TRL s, our s)]."""
    ratios = sorted(theirs / ours for theirs, ours in pairs)
    print("pairs " + " ".join(f"{r:.2f}" for r in ratios))
    print(f"median seconds per step: TRL {statistics.median(t for t, _ in pairs):.2f}, "
          f"ours {statistics.median(t for _, t in pairs):.2f}")
    print(f"ratio {statistics.median(ratios):.2f}")


def installed_trl(o):
    """The package, its head set as --trl-head says. Raises UserError where it is missing."""
    try:
        import trl
    except ImportError:
        raise UserError("TRL is not installed: pip install -r bench/requirements.txt") from None
    if o.trl_head == "response":
        # TRL decides by the device whether to project responses only; the kernel itself stays torch
        import trl.trainer.utils
        trl.trainer.utils._use_triton = lambda device: True
    return trl


def head_share(model) -> float:
    """Weights of the output head over all weights that a response token is multiplied with."""
    head = model.lm_head.weight.numel()
    return head / (head + sum(p.numel() for p in model.model.layers.parameters()))


def trl_trainer(o, base, tokenizer, steps, prompts, callbacks=()):
    """GRPOTrainer on token-exact prompts, set to the objective of grpo.py and to no side work."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer
    rows = o.prompts * o.G
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, num_generations=o.G,
        per_device_train_batch_size=o.trl_rows or rows,
        gradient_accumulation_steps=rows // (o.trl_rows or rows),
        max_completion_length=o.response, temperature=1.0, top_p=1.0, top_k=0,
        # the objective: token-level loss, k3 with the plain gradient, std-scaled advantages
        loss_type="dapo", beta=KL_COEF, use_bias_correction_kl=False, scale_rewards="group",
        epsilon=CLIP, num_iterations=1, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=1.0, shuffle_dataset=False,
        # no side work
        gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True)
    data = Dataset.from_list([{"prompt": tokenizer.decode(p)} for p in prompts])
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear",
                      task_type="CAUSAL_LM")

    def reward(completion_ids, **_):
        return [reward_of(ids) for ids in completion_ids]

    trainer = GRPOTrainer(base, reward_funcs=reward, args=config, train_dataset=data,
                          peft_config=lora, processing_class=tokenizer,
                          callbacks=list(callbacks))
    trainer.remove_callback(PrinterCallback)
    return trainer


def callback(**hooks):
    """A Trainer callback made of the given functions, each called without arguments."""
    from transformers import TrainerCallback
    methods = {name: (lambda *_, f=f, **__: f()) for name, f in hooks.items()}
    return type("Hooks", (TrainerCallback,), methods)()


def check_against_trl(o, base, policy, prompts, tolerance=1e-3):
    """Same LoRA weights, completions and rewards to both: print how far loss and gradients differ.

    The LoRA B matrices are set to noise first: at zero the KL term would vanish from the test.
    Raises UserError if they differ by more than `tolerance` times the gradient norm: fp32 rounding.
    """
    generator, saved = torch.Generator().manual_seed(1), [
        p.detach().clone() for p in policy.params["agent"]]
    with torch.no_grad():
        for p in policy.params["agent"]:
            p += 0.01 * torch.randn(p.shape, generator=generator)
    rollouts = policy.sample("agent", prompts, o.G, o.response, 1.0, generator)
    seen = {}

    def capture():
        seen["grads"] = {n: p.grad.clone() for n, p in trainer.model.named_parameters()
                         if p.grad is not None}

    trainer = trl_trainer(o, base, policy.tokenizer, 1, prompts,
                          [callback(on_pre_optimizer_step=capture)])
    trainer.args.max_grad_norm = 0.0  # compare gradients before clipping
    names = {n: n.replace(".agent.", ".default.")
             for n, _ in policy.model.named_parameters()}
    theirs = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            theirs[names[name]].copy_(p)
    completions = [r.response for r in rollouts]
    trainer._generate_single_turn = lambda *_: (completions, None)
    losses, step = [], trainer.training_step
    trainer.training_step = lambda *a, **k: losses.append(step(*a, **k)) or losses[-1]
    trainer.train()
    loss, grads = our_gradients(policy, rollouts, o.G)
    difference = max(float((g - seen["grads"][names[n]]).abs().max()) for n, g in grads.items())
    norm = torch.cat([g.flatten() for g in grads.values()]).norm()
    gap = torch.cat([(g - seen["grads"][names[n]]).flatten() for n, g in grads.items()]).norm()
    print(f"one step on the same completions: loss ours {loss:.7f}, TRL {float(sum(losses)):.7f}; "
          f"LoRA gradients: {len(grads)} tensors, norm {norm:.4f}, "
          f"largest difference {difference:.1e}, relative {gap / norm:.1e}", flush=True)
    with torch.no_grad():
        for p, old in zip(policy.params["agent"], saved):
            p.copy_(old)
            p.grad = None
    if not gap / norm < tolerance:
        raise UserError("gradients differ from TRL's by more than rounding: trust no ratio")


def our_gradients(policy, rollouts, G):
    """Loss and {name: gradient} of one GRPO step on given rollouts, before clipping."""
    with policy.use("agent"):
        with policy.use(None), torch.no_grad():
            ref, _ = policy.logprobs(rollouts)
        logp, mask = policy.logprobs(rollouts)
        advantages = group_advantages(rewards_of(rollouts, G)).flatten()
        loss, _ = grpo_loss(logp, logp.detach(), ref, advantages, mask, int(mask.sum()), len(mask),
                            clip=CLIP, kl_coef=KL_COEF)
        loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in policy.model.named_parameters()
                                  if p.grad is not None}


def time_against_trl(o, base, policy, prompts):
    """Steps in turns: TRL's as its own training loop makes it, then ours. Returns [(TRL s, our s)].

    Ours runs inside the callback that TRL's loop calls at the end of its step. The first pair warms
    both up and is not counted.
    """
    optimizer, generator = policy.optimizer("agent", LEARNING_RATE), policy.generator(0)
    settings = Options(clip=CLIP, agent_kl=KL_COEF, token_budget=o.token_budget)
    now = clock_of(o)
    pairs, clock = [], {}

    def begin():
        clock["begin"] = now()

    def end():
        theirs = now() - clock["begin"]
        k, started = len(pairs) * o.prompts, now()
        rollouts = policy.sample("agent", prompts[k:k + o.prompts], o.G, o.response, 1.0, generator)
        sampled = now()
        grpo_update(policy, "agent", optimizer, rollouts, rewards_of(rollouts, o.G), settings)
        ours = now() - started
        pairs.append((theirs, ours))
        print(f"{'warm-up' if len(pairs) == 1 else f'pair {len(pairs) - 1}'}: TRL {theirs:.2f} s "
              f"(rollout {clock['rollout']:.2f}), ours {ours:.2f} s "
              f"(rollout {sampled - started:.2f}), ratio {theirs / ours:.2f}", flush=True)

    trainer = trl_trainer(o, base, policy.tokenizer, o.steps + 1, prompts,
                          [callback(on_step_begin=begin, on_step_end=end)])
    generate = trainer._generate_single_turn

    def timed_generate(*args, **kwargs):
        started = now()
        out = generate(*args, **kwargs)
        clock["rollout"] = now() - started
        return out

    trainer._generate_single_turn = timed_generate
    trainer.train()
    return pairs[1:]

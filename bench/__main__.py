"""How fast, how much memory: against TRL on a CPU, and the real 7B shape on one GPU.

    python -m bench trl --prompt 256 --response 64 --steps 5     # needs bench/requirements.txt
    python -m bench trl --check                                  # only: same loss, same gradients?
    python -m bench model --model DIR --base-tasks FILE          # a real model on a CPU, beside TRL
    python -m bench episodes --turns 8                           # several turns beside one, and re-encoding
    python -m bench gpu                                          # the 7B shape on one CUDA device
    python -m bench memory --preset 7b-24gb                      # its memory, simulated without one

What of the paper this is: nothing; it measures the two updates of Algorithm 1 as this project makes
them. `trl` and `gpu` build a random Qwen2 of a stated size, as speed does not depend on the weights.

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

How `model` measures: the same step of a real model on the prompts of base tasks, in its own dtype;
responses end where the model ends them, so both sides draw their own lengths.
Before it, tokens/s of rollouts and of a training pass, the latter also as a share of what this
machine reaches in one large matrix product in the same dtype, measured just before. Counted are
the products with weights (2 per weight and token forward, 2 backward for the frozen base, 4 for
LoRA; the head at response positions), not attention or element-wise work.

How `episodes` measures: rollouts of several turns (policy.sample with `respond`) on a random Qwen2, a
turn ending at any of so many ids that it has --turn tokens on average, each answered by --observation
tokens; beside them answers without turns of the same mean length, and the same episodes with all that
was said so far encoded anew at each turn, as a loop around a generate call would. Tokens/s count
what was drawn and what was read. The three take turns, the medians of --rounds are printed.

`gpu` and `memory` are described in gpu.py and simulation.py.
"""
import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from bench.gpu import LEARNING_RATE, RANK, bench_gpu, training_pass
from bench.models import quiet, random_prompts, reward_of, rewards_of, small_config, \
    word_tokenizer
from bench.simulation import bench_memory
from common.files import UserError
from grpo import group_advantages, grpo_loss, grpo_update
from models.loading import load_model
from policy import Policy
from run.options import Options

CLIP, KL_COEF, TRL_ADAPTER = 0.2, 0.04, "default"


# ---------------------------------------------------------------------------------------------
# shared by the benches on a CPU


def clock_of(o):
    """CPU time of this process with one thread, as neighbours do not count; else wall-clock time."""
    return time.process_time if o.threads == 1 else time.perf_counter


def random_base(o):
    """The random Qwen2 of --hidden, --layers and --vocab; torch's threads and seed are set."""
    from transformers import Qwen2ForCausalLM
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(small_config(o.hidden, o.layers, o.vocab))


# ---------------------------------------------------------------------------------------------
# against TRL


def bench_trl(o):
    """Compare one step with TRL's: values first, then time. The last line printed is the ratio."""
    if o.prompt < 1 or o.response < 2 or o.steps < 1 or o.hidden % 64:
        raise UserError("--prompt and --steps need 1 or more, --response 2, "
                        "--hidden a multiple of 64")
    if o.G < 2 or o.prompts < 1 or (o.trl_rows and o.prompts * o.G % o.trl_rows):
        raise UserError("--G needs 2 or more, --prompts 1, and "
                        "--trl-rows must divide their product")
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
    generator, saved = torch.Generator().manual_seed(1), _clone(policy.params["agent"])
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
    names = {n: n.replace(".agent.", f".{TRL_ADAPTER}.")
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


def _clone(params):
    return [p.detach().clone() for p in params]


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


# ---------------------------------------------------------------------------------------------
# a real model on a CPU


def bench_model(o):
    """Speed of rollouts and training as a share of the machine's peak, then beside TRL."""
    if min(o.prompts, o.steps, o.threads, o.response - 1, o.G - 1) < 1:
        raise UserError("--prompts, --steps and --threads need 1 or more, --response and --G 2")
    if o.trl and o.trl_rows and o.prompts * o.G % o.trl_rows:
        raise UserError("--trl-rows must divide --prompts times --G")
    trl = installed_trl(o) if o.trl else None
    quiet()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    base, tokenizer = load_model(o.model, None, o.dtype, "cpu")
    policy = Policy(copy.deepcopy(base) if trl else base, tokenizer, ("agent",), RANK)
    prompts = task_prompts(o, policy)
    dtype = policy.lm.get_input_embeddings().weight.dtype
    print(f"{Path(o.model).name}: {sum(p.numel() for p in base.parameters()) / 1e6:.0f} M parameters, "
          f"{str(dtype).removeprefix('torch.')}; LoRA r={RANK}; {o.prompts} prompts x G = {o.G}, at most "
          f"{o.response} tokens; {o.threads} thread(s), torch {torch.__version__}", flush=True)
    own_speed(o, policy, prompts, dtype)
    if trl:
        print(f"beside TRL {trl.__version__} (head: {o.trl_head})", flush=True)
        # in bf16 the two layouts round differently: the exact comparison is that of `trl --check`
        check_against_trl(o, copy.deepcopy(base), policy, prompts[:o.prompts],
                          1e-3 if dtype == torch.float32 else 0.2)
        report_pairs(time_against_trl(o, base, policy, prompts))


def task_prompts(o, policy) -> list:
    """Prompts of base tasks as the agent of a run gets them: ids, --prompts for each step."""
    from genenv import parse_options
    from worlds import load_world
    options = parse_options(["--preset", "135m-cpu", "--model", o.model,
                             "--base-tasks", o.base_tasks])
    world = load_world(options.world)
    world.prepare(options)
    tasks, n = world.base_tasks(options), o.prompts * (o.steps + 1)
    return [policy.encode(world.agent_prompt(tasks[i % len(tasks)])) for i in range(n)]


def own_speed(o, policy, prompts, dtype):
    """Print tokens/s of rollouts and of a training pass, and the latter's share of the peak."""
    clock = clock_of(o)
    for _ in range(2):  # the first time is a warm-up
        peak, started = product_peak(dtype, clock), clock()
        rollouts = policy.sample("agent", prompts[:o.prompts], o.G, o.response, 1.0,
                                 policy.generator(0))
        sampled = clock()
        training_pass(policy, rollouts, o.token_budget, checkpoint=False)
        trained = clock()
    drawn = sum(len(r.response) for r in rollouts)
    tokens = drawn + sum(len(r.prompt) for r in rollouts[::o.G])
    done = weight_products(policy, tokens, drawn) / (trained - sampled)
    print(f"rollouts: {drawn} tokens, {drawn / (sampled - started):.0f} tokens/s; training pass: {tokens} "
          f"tokens in micro-batches of {o.token_budget}, {tokens / (trained - sampled):.0f} tokens/s, "
          f"{done / 1e9:.0f} of {peak / 1e9:.0f} GFLOPS: {100 * done / peak:.0f} % of the peak",
          flush=True)


def product_peak(dtype, clock, size=2048) -> float:
    """Operations per second of one (size, size) matrix product, the best of five."""
    a, best = torch.randn(size, size, dtype=dtype), float("inf")
    for _ in range(5):
        started = clock()
        a @ a
        best = min(best, clock() - started)
    return 2 * size ** 3 / best


def weight_products(policy, tokens: int, responses: int) -> float:
    """Operations of the products with weights in one training pass: see the docstring of bench."""
    lora = sum(p.numel() for p in policy.params["agent"])
    head = policy.lm.get_output_embeddings().weight.numel()
    layers = sum(m.base_layer.weight.numel() for m in policy.lora_layers)
    return tokens * (4 * layers + 6 * lora) + responses * 4 * head


# ---------------------------------------------------------------------------------------------
# episodes


def bench_episodes(o):
    """Tokens/s of episodes, of single answers, and of episodes that are encoded anew each turn."""
    if min(o.prompt, o.observation, o.rounds, o.prompts, o.G, o.turns, o.turn - 1) < 1 or o.hidden % 64:
        raise UserError("--turn needs 2 or more, the other numbers 1, --hidden a multiple of 64")
    quiet()
    base = random_base(o)
    policy = Policy(base, word_tokenizer(o.vocab), ("agent",), RANK)
    prompts = random_prompts(o.prompts, o.prompt, o.vocab)
    clock = clock_of(o)
    speeds = {"episodes": [], "single answers": [], "encoded anew": []}
    print(f"random Qwen2: hidden {o.hidden}, {o.layers} layers; {o.prompts} prompts of {o.prompt} tokens x "
          f"G = {o.G}; {o.turns} turns of {o.turn} tokens on average, observations of {o.observation}; "
          f"fp32, {o.threads} thread(s), torch {torch.__version__}", flush=True)
    for number in range(o.rounds + 1):
        generator, length = policy.generator(number), 0
        for name, play in (("episodes", episodes), ("single answers", single_answers),
                           ("encoded anew", encoded_anew)):
            started = clock()
            tokens = play(o, policy, prompts, generator, length)
            length = length or tokens // (o.prompts * o.G)
            if number:  # the first round is a warm-up
                speeds[name].append(tokens / (clock() - started))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        print(f"{name}: {medians[name]:.0f} tokens/s ({min(values):.0f} - {max(values):.0f})")
    print(f"single answers / episodes {medians['single answers'] / medians['episodes']:.2f}; "
          f"episodes / encoded anew {medians['episodes'] / medians['encoded anew']:.2f}")


def observation(o) -> list:
    """What every turn is answered with: ids."""
    return random_prompts(1, o.observation, o.vocab, seed=1)[0]


def episodes(o, policy, prompts, generator, _) -> int:
    """Play the episodes as policy.sample does; returns how many tokens there were."""
    policy.eos_ids = list(range(o.vocab // o.turn))
    reading = observation(o)
    rollouts = policy.sample("agent", prompts, o.G, 64 * o.turns * (o.turn + o.observation), 1.0,
                             generator, respond=lambda i, ids: reading, max_turns=o.turns,
                             max_turn_tokens=20 * o.turn)
    return sum(len(r.response) for r in rollouts)


def single_answers(o, policy, prompts, generator, length) -> int:
    """Answers of `length` tokens without turns."""
    policy.eos_ids = [o.vocab]  # never drawn
    rollouts = policy.sample("agent", prompts, o.G, length, 1.0, generator)
    return sum(len(r.response) for r in rollouts)


def encoded_anew(o, policy, prompts, generator, _) -> int:
    """The same episodes by one call per turn, each with all that was said before as its prompt."""
    policy.eos_ids = list(range(o.vocab // o.turn))
    reading = observation(o)
    said, before = [list(p) for p in prompts for _ in range(o.G)], o.prompts * o.G * o.prompt
    for turn in range(o.turns):
        rollouts = policy.sample("agent", said, 1, 20 * o.turn, 1.0, generator)
        said = [text + r.response + reading * (turn + 1 < o.turns)
                for text, r in zip(said, rollouts)]
    return sum(map(len, said)) - before


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
    t.add_argument("--vocab", type=int, default=1600,
                   help="1600 gives the output head 8 %% of the weights, as in the 7B; 32000 63 %%")
    t.add_argument("--threads", type=int, default=1, help="torch threads")
    t.add_argument("--trl-rows", type=int, default=8,
                   help="rows per micro-batch of TRL; 8 is its own default; 0 = all")
    t.add_argument("--token-budget", type=int, default=16384, help="tokens per micro-batch of ours")
    t.add_argument("--trl-head", choices=("response", "stock"), default="response",
                   help="positions that TRL projects to the vocabulary, see the docstring of bench")
    t.add_argument("--check", action="store_true", help="compare loss and gradients, time nothing")
    t.set_defaults(run=bench_trl)

    m = sub.add_parser("model", help="a real model on a CPU: share of its peak, and beside TRL")
    m.add_argument("--model", required=True, help="local folder, hub name or .gguf file")
    m.add_argument("--base-tasks", required=True, help="JSONL, see eval.make_base")
    m.add_argument("--prompts", type=int, default=8, help="prompts per step")
    m.add_argument("--G", type=int, default=8, help="rollouts per prompt")
    m.add_argument("--response", type=int, default=64, help="most tokens of a response")
    m.add_argument("--steps", type=int, default=5, help="timed pairs of steps")
    m.add_argument("--dtype", default="auto", help="auto, bf16 or fp32")
    m.add_argument("--threads", type=int, default=1, help="torch threads")
    m.add_argument("--token-budget", type=int, default=1024, help="tokens per micro-batch of ours")
    m.add_argument("--trl-rows", type=int, default=8, help="rows per micro-batch of TRL; 0 = all")
    m.add_argument("--trl-head", choices=("response", "stock"), default="response")
    m.add_argument("--no-trl", dest="trl", action="store_false", help="only our own speed")
    m.set_defaults(run=bench_model)

    e = sub.add_parser("episodes", help="rollouts of several turns beside single answers, on a CPU")
    e.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    e.add_argument("--prompts", type=int, default=4, help="prompts")
    e.add_argument("--G", type=int, default=8, help="rollouts per prompt")
    e.add_argument("--turns", type=int, default=8, help="turns of an episode")
    e.add_argument("--turn", type=int, default=8, help="tokens of a turn, on average")
    e.add_argument("--observation", type=int, default=16, help="tokens of an observation")
    e.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64")
    e.add_argument("--layers", type=int, default=4)
    e.add_argument("--vocab", type=int, default=1600)
    e.add_argument("--rounds", type=int, default=5, help="measured rounds")
    e.add_argument("--threads", type=int, default=1, help="torch threads")
    e.set_defaults(run=bench_episodes)

    g = sub.add_parser("gpu", help="the 7B shape on one GPU, an epoch of both updates")
    g.add_argument("--cpu", action="store_true", help="the 7B shape on a CPU, one short epoch")
    g.add_argument("--tiny", action="store_true", help="a small model on the CPU: tests the script")
    g.add_argument("--prompt", type=int, default=0, help="one shape instead of all")
    g.add_argument("--response", type=int, default=0)
    g.add_argument("--prompts", type=int, default=1, help="prompts per step at other lengths")
    g.add_argument("--G", type=int, default=8, help="rollouts per prompt")
    g.add_argument("--token-budget", type=int, default=8192, help="tokens per micro-batch")
    g.add_argument("--out", default="", help="JSON file; default bench/results/gpu-7b.json")
    g.set_defaults(run=bench_gpu)

    s = sub.add_parser("memory", help="a preset's peaks, estimated and simulated, without a GPU")
    s.add_argument("--preset", choices=("7b-24gb", "7b-80gb", "7b-9k", "1.5b-16gb"),
                   default="7b-24gb")
    s.add_argument("--dtype", choices=("auto", "fp32"), default="auto", help="auto: bf16")
    s.add_argument("--capability", type=int, default=8, help="compute capability of the card")
    s.set_defaults(run=bench_memory)

    def error(message):
        raise UserError(f"{message}; see python -m bench --help")

    for each in (p, t, m, e, g, s):
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

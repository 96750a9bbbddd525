"""How fast, how much memory: against TRL on a CPU, and the real 7B shape on one GPU.

    python -m bench trl --prompt 256 --response 64 --steps 5     # needs bench/requirements.txt
    python -m bench trl --check                                  # only: same loss, same gradients?
    python -m bench model --model DIR --base-tasks FILE          # a real model on a CPU, beside TRL
    python -m bench episodes --turns 8                           # several turns beside one, and re-encoding
    python -m bench gpu --random-weights                         # one CUDA device, no download
    python -m bench gpu --random-weights --tiny                  # the same script, small, on a CPU

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

How `gpu` measures: an epoch of both updates, phase by phase; then the rollouts and the training
pass once more with the prompt repeated in every row (what TRL and most peers do), through the same
code. Rows that share no prompt are plain causal attention.
"""
import argparse
import copy
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from data_pool import UserError
from grpo import group_advantages, grpo_loss, grpo_update, subset
from policy import Policy, split_groups
from runtime.loading import load_model
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
    return qwen2_config(hidden, layers, vocab, heads, max(1, heads // 4), hidden * 21 // 256 * 64)


def word_tokenizer(vocab):
    """One word per id, so that prompts of an exact length can be handed over as text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = {f"w{i}": i for i in range(vocab)} | {"<eos>": vocab}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="w0")


def clock_of(o):
    """CPU time of this process with one thread, as neighbours do not count; else wall-clock time."""
    return time.process_time if o.threads == 1 else time.perf_counter


def random_base(o):
    """The random Qwen2 of --hidden, --layers and --vocab; torch's threads and seed are set."""
    from transformers import Qwen2ForCausalLM
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(small_config(o.hidden, o.layers, o.vocab))


def random_prompts(count, length, vocab, seed=0):
    """count lists of `length` ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count, length), generator=generator).tolist()


def reward_of(ids) -> float:
    """Share of even ids: cheap, and hardly ever the same for all of a group."""
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


def quiet():
    """No warnings and no progress bars from the libraries: the table is the output."""
    import transformers
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()


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
    groups = grouped(policy.sample("agent", prompts, o.G, o.response, 1.0, generator), o.G)
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
    completions = [r for _, responses in groups for r in responses]
    trainer._generate_single_turn = lambda *_: (completions, None)
    losses, step = [], trainer.training_step
    trainer.training_step = lambda *a, **k: losses.append(step(*a, **k)) or losses[-1]
    trainer.train()
    loss, grads = our_gradients(policy, groups)
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


def time_against_trl(o, base, policy, prompts):
    """Steps in turns: TRL's as its own training loop makes it, then ours. Returns [(TRL s, our s)].

    Ours runs inside the callback that TRL's loop calls at the end of its step. The first pair warms
    both up and is not counted.
    """
    optimizer, generator = policy.optimizer("agent", LEARNING_RATE), policy.generator(0)
    now = clock_of(o)
    pairs, clock = [], {}

    def begin():
        clock["begin"] = now()

    def end():
        theirs = now() - clock["begin"]
        k, started = len(pairs) * o.prompts, now()
        groups = grouped(policy.sample("agent", prompts[k:k + o.prompts], o.G, o.response, 1.0,
                                       generator), o.G)
        sampled = now()
        grpo_update(policy, "agent", optimizer, groups, rewards_of(groups), clip=CLIP,
                    kl_coef=KL_COEF, token_budget=o.token_budget)
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
        groups = grouped(rollouts, o.G)
        training_pass(policy, groups, o.token_budget, checkpoint=False)
        trained = clock()
    own = sum(len(r.response) for r in rollouts)
    tokens = own + sum(len(prompt) for prompt, _ in groups)
    done = weight_products(policy, tokens, own) / (trained - sampled)
    print(f"rollouts: {own} tokens, {own / (sampled - started):.0f} tokens/s; training pass: {tokens} "
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
# the 7B shape on one GPU

QWEN_7B = dict(hidden=3584, layers=28, vocab=152064, heads=28, kv_heads=4, intermediate=18944)
SHAPES_7B = [(1024, 256), (4096, 512), (8488, 512)]  # prompt, response; the last is 9,000 in all
SHAPES_TINY = [(32, 8), (64, 16), (96, 8)]
PROMPT_ROWS = {1024: 8, 4096: 2}  # prompts per step at a prompt length, else --prompts


def bench_gpu(o):
    """An epoch of both updates per shape, and both layouts side by side. Writes a JSON file."""
    if not o.random_weights:
        raise UserError("say --random-weights: the bench builds its model and reads no other")
    if not o.tiny and not torch.cuda.is_available():
        raise UserError("no CUDA device: the 7B shape needs one; --tiny runs the script on a CPU")
    if (o.prompt == 0) != (o.response == 0) or min(o.prompt, o.response) < 0 or o.prompts < 1:
        raise UserError("give --prompt and --response together, both positive, or neither")
    quiet()
    shapes = [(o.prompt, o.response)] if o.prompt else SHAPES_TINY if o.tiny else SHAPES_7B
    device, dtype = ("cpu", torch.float32) if o.tiny else ("cuda", torch.bfloat16)
    config = small_config(128, 2, 512) if o.tiny else qwen2_config(**QWEN_7B)
    policy = Policy(random_nf4(config, device, dtype), word_tokenizer(config.vocab_size), rank=RANK)
    out = Path(o.out or f"bench/results/gpu-{'tiny' if o.tiny else '7b'}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {**machine(device), "model": "tiny" if o.tiny else "Qwen2.5-7B shape, random weights",
              "quantisation": "NF4, double", "rank": RANK, "G": o.G, "shapes": []}
    run_shape(policy, o, 16, 4)  # warm-up: kernels are chosen and buffers made outside the clock
    for P, R in shapes:
        result["shapes"].append(run_shape(policy, o, P, R))
        out.write_text(json.dumps(result, indent=1) + "\n")  # after every shape: nothing gets lost
        print(markdown(result).splitlines()[-1], flush=True)
    print("\n" + markdown(result, [] if not o.tiny else SHAPES_7B) + f"\n\nwritten to {out}")


def machine(device) -> dict:
    """What a number depends on: device, versions, date."""
    import bitsandbytes
    import peft
    import transformers
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    modules = (torch, transformers, peft, bitsandbytes)
    return {"device": name, "date": date.today().isoformat(),
            "versions": {m.__name__: m.__version__ for m in modules}}


def random_nf4(config, device, dtype):
    """A random Qwen2 whose linear layers are NF4, made layer by layer: never whole in bf16."""
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
            for i in range(layers):
                layer = Qwen2DecoderLayer(config, i).requires_grad_(False)
                for name, module in list(layer.named_modules()):
                    if isinstance(module, torch.nn.Linear):
                        layer.set_submodule(name, nf4_linear(module, device, dtype))
                lm.model.layers.append(layer)
    finally:
        torch.set_default_dtype(former)
    lm.is_loaded_in_4bit = True  # as the library's loader marks it; PEFT asks
    return lm


def nf4_linear(linear, device, dtype):
    """The 4-bit copy of a linear layer, with double quantisation."""
    import bitsandbytes as bnb
    settings = dict(quant_type="nf4", compress_statistics=True)
    out = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                            compute_dtype=dtype, device="meta", **settings)
    out.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **settings)
    out.bias = linear.bias
    return out.to(device)  # moving is what quantises


def run_shape(policy, o, P, R) -> dict:
    """All phases at one prompt and response length -> {phase: seconds, tokens/s, peak}, ratios."""
    B, G, V = PROMPT_ROWS.get(P, o.prompts), o.G, policy.lm.config.vocab_size
    prompts, budget = random_prompts(B, P, V), max(o.token_budget, P + G * R)
    train = dict(token_budget=budget, grad_checkpoint=True)
    optimizers = {name: policy.optimizer(name, LEARNING_RATE) for name in policy.params}
    measure = meter(policy.device)
    # an epoch: the simulator writes, the agent tries, both learn
    sample = lambda name, prompts, G: policy.sample(name, prompts, G, R, 1.0, policy.generator(0))
    written = measure("simulator rollouts", B * G * R, lambda: sample("env", prompts, G))
    tries = measure("agent rollouts", B * G * R, lambda: sample("agent", prompts, G))
    groups = grouped(tries, G)
    measure("agent update (GRPO)", B * G * R, lambda: grpo_update(
        policy, "agent", optimizers["agent"], groups, rewards_of(groups), **train))
    records = [SimpleNamespace(prompt=r.prompt, response=r.response) for r in written]
    kl_sample = [(r.prompt, [r.response]) for r in written[:2]]
    measure("simulator update (RWR)", B * G * R, lambda: rwr_update(
        policy, "env", optimizers["env"], records, torch.ones(len(records)),
        [list(range(len(records)))], kl_sample, **train))
    # the two layouts beside each other
    measure("rollouts, prompt repeated", B * G * R, lambda: sample(
        "agent", [p for p in prompts for _ in range(G)], 1))
    single = [(p, [r]) for p, responses in groups for r in responses]
    for name, layout in (("once", groups), ("repeated", single)):
        measure(f"training pass, prompt {name}", B * G * R,
                lambda: training_pass(policy, layout, budget))
    phases = measure.phases
    seconds = {name: phase["seconds"] for name, phase in phases.items()}
    speed_up = seconds["training pass, prompt repeated"] / seconds["training pass, prompt once"]
    limit = G * (P + R) / (P + G * R)
    return {"prompt": P, "response": R, "prompts": B, "phases": phases,
            "rollout_speed_up": seconds["rollouts, prompt repeated"] / seconds["agent rollouts"],
            "training_speed_up": speed_up, "token_count_limit": limit,
            "efficiency": speed_up / limit}


def meter(device):
    """A function measure(name, tokens, f) that runs f and notes time, tokens/s and peak memory."""
    def measure(name, tokens, f):
        on_gpu = device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        out = f()
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        measure.phases[name] = {
            "seconds": seconds, "response_tokens_per_s": tokens / seconds,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None}
        return out

    measure.phases = {}
    return measure


def training_pass(policy, groups, token_budget, checkpoint=True):
    """Forward and backward over all groups, gradients thrown away: what the layouts differ in."""
    with policy.use("agent"):
        for batch in split_groups(groups, token_budget):
            logp, mask = policy.logprobs(subset(groups, batch), 1.0, checkpoint)
            (logp * mask).sum().backward()
    for p in policy.params["agent"]:
        p.grad = None


def markdown(result, missing=()) -> str:
    """The table of bench/README.md; shapes in `missing` are named as not measured yet."""
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    phases = list(result["shapes"][0]["phases"])
    lines = [f"{result['model']}, {result['quantisation']}, two adapters r={result['rank']}, "
             f"G = {result['G']}; {result['device']}; {versions}; {result['date']}. "
             "Each phase: response tokens/s (peak GB).", "",
             "| prompt / response | prompts | " + " | ".join(phases) +
             " | rollouts: once vs repeated | training: once vs repeated | token-count limit | "
             "share of the limit |", "|" + "---|" * (len(phases) + 6)]
    for s in result["shapes"]:
        cells = [f"{p['response_tokens_per_s']:.0f} ({p['peak_gb']:.1f})" if p["peak_gb"] else
                 f"{p['response_tokens_per_s']:.0f}" for p in s["phases"].values()]
        lines.append(f"| {s['prompt']} / {s['response']} | {s['prompts']} | " + " | ".join(cells) +
                     f" | {s['rollout_speed_up']:.2f}x | {s['training_speed_up']:.2f}x | "
                     f"{s['token_count_limit']:.2f}x | {100 * s['efficiency']:.0f} % |")
    lines += [f"| {P} / {R}, 7B shape | | " + "not measured yet | " * (len(phases) + 4)
              for P, R in missing]
    return "\n".join(lines)


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
    g.add_argument("--random-weights", action="store_true", help="required: no weights are loaded")
    g.add_argument("--tiny", action="store_true", help="a small model on the CPU: tests the script")
    g.add_argument("--prompt", type=int, default=0, help="one shape instead of the three")
    g.add_argument("--response", type=int, default=0)
    g.add_argument("--prompts", type=int, default=1, help="prompts per step at other lengths")
    g.add_argument("--G", type=int, default=8, help="rollouts per prompt")
    g.add_argument("--token-budget", type=int, default=8192, help="tokens per micro-batch")
    g.add_argument("--out", default="", help="JSON file; default bench/results/gpu-7b.json")
    g.set_defaults(run=bench_gpu)

    def error(message):
        raise UserError(f"{message}; see python -m bench --help")

    for each in (p, t, m, e, g):
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

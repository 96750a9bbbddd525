"""Speed on a CPU: a real model as a share of the machine's peak, and episodes of several turns.

What of the paper this is: nothing. How it is run: `python -m bench model`, or `episodes`.

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
"""
import copy
import statistics
from pathlib import Path

import torch

from bench.gpu import RANK, training_pass
from bench.models import quiet, random_prompts, word_tokenizer
from bench.trl import check_against_trl, clock_of, installed_trl, random_base, report_pairs, \
    time_against_trl
from common.files import UserError
from models.loading import load_model
from policy import Policy


# ---------------------------------------------------------------------------------------------
# a real model


def bench_model(o):
    """Speed of rollouts and training as a share of the machine's peak, then beside TRL."""
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
    from run.options import parse_options
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
    """Operations of the products with weights in one training pass: see the head of this file."""
    lora = sum(p.numel() for p in policy.params["agent"])
    head = policy.lm.get_output_embeddings().weight.numel()
    layers = sum(m.base_layer.weight.numel() for m in policy.lora_layers)
    return tokens * (4 * layers + 6 * lora) + responses * 4 * head


# ---------------------------------------------------------------------------------------------
# episodes


def bench_episodes(o):
    """Tokens/s of episodes, of single answers, and of episodes that are encoded anew each turn."""
    if o.hidden % 64:
        raise UserError("--hidden must be a multiple of 64")
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

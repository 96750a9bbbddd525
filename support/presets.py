"""Ready-made sets of options: `python genenv.py --preset 7b-24gb --base-tasks FILE`.

Plain dictionaries of option names (run/options.py) to values; every option not named keeps its
default, and what stands on the command line wins over the preset.

Where the 7B presets differ from the paper, on purpose:

* Learning rates. The paper trains all weights with 1e-6 (agent) and 5e-7 (simulator). Low-rank
  adapters start at B = 0 and move a layer by (alpha/r) B A, so the same rate moves the function far
  less; rates for LoRA are commonly 10 to 100 times those of full fine-tuning. We take 20 times and
  keep the paper's ratio of 2 between the two players. They are starting points, not tuned values.
* The caps of the simulator's KL: the paper names a penalty and a cap but gives no value.
* beta and lam are the paper's, and with its k_min they do nothing: G = 8 lets only tasks solved
  exactly 4 times of 8 through, so all weights are equal (rwr.py has the ratios). For weights that
  tell records apart add `--k-min 1 --lam 6 --beta 8`, which needs no filter, or raise --G.
* Batches: 64 written tasks per agent step (and 8 replayed) and 64 generations per simulator step,
  as in the paper; an epoch is 8 steps, about as many tasks as its base set of 544. The official
  configuration also has an entropy bonus of 0.001, which grpo.py leaves out.
"""

# What all 7B presets share: the paper's method on one NF4 base.
_7B = {
    "world": "tool_calls",
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "quant": "nf4",              # 5.6 GB once for both policies and the reference
    "rank": 16,                  # all linear layers: 40 M parameters per policy
    "grad_checkpoint": True,     # training only; rollouts keep their KV cache
    # the loop: 16 seed tasks x 4 variations = the paper's batch of 64
    "epochs": 10,
    "steps": 8,
    "seed_tasks": 16,
    "variations": 4,
    "G": 8,
    "temperature": 1.0,
    # agent, as in the official configuration but for the learning rate
    "agent_lr": 2e-5,
    "clip": 0.2,
    "agent_kl": 0.001,
    "kl_estimator": "k3",
    "mini_batch": 16,            # groups per optimiser step: five steps per rollout batch
    # environment: the paper's alpha, beta, k_min and lambda
    "alpha": 0.5,
    "alpha_end": 0.5,
    "beta": 2.0,
    "k_min": 0.1,                # with G = 8 only exactly 4 of 8 passes: all weights are equal,
    "lam": 1.0,                  # whatever beta and lam are
    "env_lr": 1e-5,
    "env_batch": 64,
    "env_kl": 0.05,
    "env_kl_cap": 0.05,          # nats per token; texts of hundreds of tokens need a tight one
    # lengths in tokens
    "max_prompt_tokens": 4096,
    "max_response_tokens": 512,
    "max_task_tokens": 768,      # one JSON object with two or three tool specs
}

PRESETS = {
    # The whole loop in seconds, in any world: to try an installation, a model or a task file.
    "tiny": {
        "epochs": 2,
        "steps": 1,
        "seed_tasks": 4,
        "variations": 2,
        "G": 4,
        "env_updates": 2,
        "env_batch": 8,
        "env_kl_sample": 16,
        "max_task_tokens": 256,      # the defaults suit the ladder, whose tasks are a dozen words
        "max_response_tokens": 64,
        "token_budget": 4096,
        "max_rows": 64,
    },
    # SmolLM2-135M-Instruct after a warm start, on a CPU. Tasks as python text for given
    # functions, which is what such a small model can write and read. An epoch takes three to
    # seven minutes of one core (EXPERIMENTS.md). Micro-batches of 1024 tokens are twice as fast as
    # of 4096: larger tensors go back to the system after each use.
    "135m-cpu": {
        "world": "tool_calls",
        "call_format": "python",
        "tools": "base",             # or a list of functions, with a few examples as base tasks
        "G": 8,
        "k_min": 0.26,               # p_hat from 2/8 to 6/8
        "max_prompt_tokens": 640,
        "max_response_tokens": 64,
        "max_task_tokens": 160,
        "epochs": 12,
        "steps": 4,
        "seed_tasks": 8,
        "variations": 1,             # a small simulator often writes the same variation twice
        "val_samples": 8,            # with two attempts a task chance hid what half a run gains
        "val_every": 6,
        "env_batch": 16,
        "env_kl_sample": 8,
        "agent_lr": 5e-4,
        "env_lr": 5e-4,               # with full batches the simulator kept the form at this rate
        "token_budget": 1024,
        "max_rows": 256,
    },
    # Qwen2.5-1.5B-Instruct in 16 bits on a card of 16 GB. Tasks and calls as above, which leaves
    # room for more of them; rates between those of the two neighbours. Only its memory is known:
    # 7.4 GB by estimate, and 13.1 GB with --dtype fp32, for cards that have no bf16 (T4).
    "1.5b-16gb": {
        "world": "tool_calls",
        "model": "Qwen/Qwen2.5-1.5B-Instruct",
        "call_format": "python",
        "tools": "base",
        "grad_checkpoint": True,
        "epochs": 12,
        "steps": 6,
        "seed_tasks": 16,
        "variations": 2,
        "G": 8,
        "k_min": 0.26,
        "max_prompt_tokens": 1024,
        "max_response_tokens": 128,
        "max_task_tokens": 192,
        "val_samples": 4,
        "agent_lr": 1e-4,
        "env_lr": 1e-4,
        "env_batch": 32,
        "token_budget": 8192,
        "max_rows": 288,             # a batch of 36 tasks at once
    },
    # One RTX 3090 / 4090 / A10: what grows with the batch is kept narrow.
    "7b-24gb": {
        **_7B,
        "token_budget": 8192,    # one group of 4096 + 8 x 512 tokens
        "max_rows": 144,         # 18 groups: a batch of 72 tasks is four equal passes
    },
    # One A100 / H100: four times as wide, for the same updates.
    "7b-80gb": {
        **_7B,
        "token_budget": 32768,
        "max_rows": 576,         # all 72 groups at once
    },
    # 9,000 tokens in all, the paper's limit, still on 24 GB: fewer rows at once, and a group's
    # responses go through training four at a time.
    "7b-9k": {
        **_7B,
        "max_prompt_tokens": 7976,
        "max_response_tokens": 1024,
        "max_task_tokens": 1024,
        "token_budget": 12288,
        "max_rows": 32,          # the simulator's 8 prompts are the widest: a cache of 8 GB
    },
}

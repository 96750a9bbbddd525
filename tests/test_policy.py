"""The policy: scoring, sampling and switching adapters, each against a naive reference.

Run: python -m pytest tests/test_policy.py -q
"""
import io
import json
import math
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig

from helpers import (BOS, ENDINGS, EOS, STOP, TINY, UNEVEN_GROUPS, clear, equal_bits, gradients,
                     naive_row, nearly_equal, random_groups, randomise, rollouts_of, tiny_lm,
                     tiny_policy, toy_tokenizer, user_error)
from model import decoding
import policy as policy_module
from model.decoding import draw
from model.packing import by_group, pack, split_groups
from policy import Policy
from support.options import Options
from worlds import open_policy

ROLLOUTS = rollouts_of(random_groups(UNEVEN_GROUPS))


@pytest.fixture(scope="module")
def shared():
    """Return one policy with non-zero adapters, for the tests that change nothing."""
    return tiny_policy()


@pytest.fixture
def folder(tmp_path):
    """Save a tiny chat model, and return its folder."""
    return save(tiny_lm(), tmp_path / "model")


def save(lm, path) -> str:
    """Save the model and the toy chat tokenizer to a folder, and return its path."""
    lm.save_pretrained(path)
    toy_tokenizer(chat=True).save_pretrained(path)
    return str(path)


load = partial(Policy.load, device="cpu")


def refused(words, folder, **options):
    """Assert that a model folder is refused with one line that has these words."""
    user_error(words, load, folder, **options)


def scored(policy, *adapters):
    """Return the log-probs of ROLLOUTS under each adapter."""
    logps = []
    for adapter in adapters:
        with policy.use(adapter), torch.no_grad():
            logps.append(policy.logprobs(ROLLOUTS)[0])
    return logps


def learned(policy, grad_checkpoint=None):
    """Return the log-probs of ROLLOUTS under the agent, and the gradients of their sum."""
    clear(policy)
    with policy.use("agent"):
        logp, _ = policy.logprobs(ROLLOUTS, 1.0, grad_checkpoint)
        logp.sum().backward()
    return [logp.detach(), *gradients(policy, "agent")]


def assert_scored_as_sampled(policy, adapter, rollouts, temperature):
    """Assert that the log-probs of sampling are those of a plain forward pass, which has one row
    per rollout and no cache."""
    with policy.use(adapter), torch.no_grad():
        logps, _ = policy.plain_logprobs(rollouts, temperature)
    sampled = pad_sequence([torch.tensor(r.logps) for r in rollouts], True)
    torch.testing.assert_close(sampled, logps, atol=3e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------
# scoring


@pytest.mark.parametrize("temperature, chunk", [(1.0, 10_000), (0.7, 3)])
def test_shared_prompt_logprobs_equal_a_token_by_token_loop(shared, temperature, chunk,
                                                            monkeypatch):
    """Otherwise an index off by one, wrong positions, a leaking mask or chunks of logits would make
    packed rows give the scores of another model."""
    monkeypatch.setattr(policy_module, "LOGIT_CHUNK", chunk)
    for adapter in ("agent", "env", None):
        with shared.use(adapter), torch.no_grad():
            logp, mask = shared.logprobs(ROLLOUTS, temperature)
            for r, row, m in zip(ROLLOUTS, logp, mask):
                expected = naive_row(shared, adapter, r, temperature)
                torch.testing.assert_close(row[m], expected, atol=3e-5, rtol=1e-5)
                assert m[:len(r.response)].all()  # the mask has no holes
            assert (logp[~mask] == 0).all()  # padding does not count


@contextmanager
def shapes_into(module):
    """Yield a list that collects the output shapes of a module's calls without the last dimension.
    """
    seen = []
    hook = module.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape[:-1])))
    try:
        yield seen
    finally:
        hook.remove()


def test_logits_exist_for_response_tokens_only_and_one_chunk_at_a_time(shared, monkeypatch):
    """Otherwise logits of shape (B, L, V) instead of (chunk, V) would fill the memory, or a prompt
    would be encoded once per response instead of once per group."""
    monkeypatch.setattr(policy_module, "LOGIT_CHUNK", 4)
    groups, made = random_groups([(9, [4, 4, 4, 4])] * 2), []
    for limit, calls in ((2 ** 25, 8), (0, 16)):  # 0: computed again in the backward pass
        monkeypatch.setattr(policy_module, "KEPT_LOGITS", limit)
        with shared.use("agent"), shapes_into(shared.lm.get_output_embeddings()) as logits, \
                shapes_into(shared.lm.get_input_embeddings()) as inputs:
            logp, _ = shared.logprobs(rollouts_of(groups))
            made.append(torch.autograd.grad(logp.sum(), shared.params["agent"]))
        assert set(logits) == {(4,)} and len(logits) == calls
        assert inputs == [(2, 9 + 4 * 3)]
    assert equal_bits(*made)


def test_half_precision_logits_are_normalised_in_fp32():
    """Otherwise log-probs would carry the rounding noise of bf16, a few per cent."""
    head = torch.nn.Linear(16, 500, bias=False, dtype=torch.bfloat16)
    hidden, target = torch.randn(64, 16, dtype=torch.bfloat16), torch.randint(500, (64,))
    logp = policy_module.token_logprobs(hidden, head, target, 0.7)
    exact = (head(hidden).double() / 0.7).log_softmax(-1)
    expected = exact[range(64), target].float()
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [9, 16, 40])
def test_micro_batches_respect_the_budget(budget):
    """Otherwise memory would exceed the budget. (test_grpo.py checks that no response is lost.)"""
    for rows in split_groups(ROLLOUTS, budget):
        groups = by_group([ROLLOUTS[i] for i in rows])
        assert len(rows) == 1 or pack(groups).ids.numel() <= budget


# ---------------------------------------------------------------------------------------------
# sampling


LONG = [p for p, _ in random_groups([(P, [1]) for P in (5, 1, 9, 3, 14, 2, 2, 7)])]


@pytest.mark.parametrize("adapter, temperature, columns", [
    ("agent", 1.0, 14), ("agent", 0.7, 3), (None, 0.7, 1)])
def test_sampled_logprobs_equal_scored_ones(ending, monkeypatch, adapter, temperature, columns):
    """Otherwise cache, positions, compaction or temperature would make the sampler another policy,
    or long prompts, which are read in several calls, would change."""
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", columns * len(LONG))
    with shapes_into(ending.lm.get_input_embeddings()) as shapes:
        out = ending.sample(adapter, LONG, G=3, max_new_tokens=24, temperature=temperature,
                            generator=ending.generator(0))
    starts = range(0, 14, columns)
    assert shapes[:len(starts)] == [(8, min(columns, 14 - start)) for start in starts]
    # this tests compaction only if both whole groups and single rollouts end early
    assert {rows for rows, _ in shapes} > {8} and {slots for _, slots in shapes[-20:]} >= {1, 3}
    assert [r.prompt for r in out] == [p for p in LONG for _ in range(3)]
    assert_scored_as_sampled(ending, adapter, out, temperature)


def places(*objects):
    """Return what a CUDA graph keeps of objects: addresses of tensors, values of everything else.
    """
    entries = []
    for x in objects:
        for name, value in vars(x).items():
            for part in value if isinstance(value, tuple) else (value,):
                entries.append((name, part.data_ptr() if torch.is_tensor(part) else part))
    return entries


@pytest.mark.parametrize("turns", [1, 6])
def test_recorded_steps_of_a_gpu_give_what_computed_ones_do(shared, ending, monkeypatch, turns):
    """Otherwise a GPU would silently replay a step with an old Python number or the old address of
    a tensor, or would see a key too early or never write it."""
    policy, recorded = shared if turns == 1 else ending, []

    def record(step, device):
        """Replay the step with no access to what `GraphDecoder.step` changes between replays."""
        decoder, steps = step.__self__, []
        recorded.append(steps)

        def replay():
            if not steps:
                steps.append(step())
                return steps[0]
            with pytest.MonkeyPatch.context() as patch:
                for name in ("fed", "left", "stage_left", "calls", "owner"):
                    patch.setattr(decoder, name, None)
                before = places(decoder, *decoder.cache.layers)
                hidden = step()
                assert places(decoder, *decoder.cache.layers) == before
            steps.append(hidden)
            return steps[0].copy_(hidden)  # the result of a graph stays in one place

        return replay

    def respond(i, ids, count={}):
        count[i] = count.get(i, 0) + 1
        return None if count[i] % turns == 0 else [30, 31, EOS][i % 3:]

    def responses(kind):
        monkeypatch.setattr(policy, "decoder", kind)
        return policy.sample("agent", LONG, 6, 80, 0, max_turns=9,
                             respond=respond if turns > 1 else None)

    plain = responses(policy_module.Decoder)
    monkeypatch.setattr(decoding, "cuda_graph_of", record)
    replayed = responses(policy_module.GraphDecoder)
    assert len(recorded) > 1 and len(recorded[0]) > 9
    assert [r.response for r in replayed] == [r.response for r in plain]
    assert_scored_as_sampled(policy, "agent", replayed, 1)


def test_every_eos_id_of_the_model_ends_a_response(ending):
    """Otherwise chat models with several end ids would run to the limit, tokens would follow the
    end, or a response that ends exactly at the limit would lose its reward."""
    out = ending.sample("agent", [[20, 21]], G=300, max_new_tokens=6, generator=ending.generator(2))
    for r in out:
        assert not set(r.response[:-1]) & set(ENDINGS)
        assert bool(r.limit) == (r.response[-1] not in ENDINGS)
    assert {r.limit for r in out if len(r.response) == 6} == {"too many tokens", ""}


def test_draw_draws_as_often_as_the_softmax_says():
    """Otherwise tokens would be drawn at wrong rates, or log-probs would belong to other tokens."""
    logits = torch.linspace(-1, 1, 8).expand(2, 10_000, 8)
    ids, logps = draw(logits, 0.7, torch.Generator().manual_seed(3))
    expected = (logits / 0.7).log_softmax(-1)
    torch.testing.assert_close(logps, expected.gather(-1, ids[..., None])[..., 0])
    # within five standard deviations
    shares = ids.flatten().bincount(minlength=8) / 20_000
    torch.testing.assert_close(shares, expected[0, 0].exp(), atol=0.016, rtol=0)
    greedy, _ = draw(logits[0, :2], 0, None)
    assert greedy.tolist() == [7, 7]


def test_draw_gives_no_token_of_probability_0(monkeypatch):
    """Otherwise a random number of exactly 0, or just below 1, would draw an impossible token."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0]])
    for number, token in ((0.0, 1), (1 - 2 ** -53, 3)):
        monkeypatch.setattr(torch, "rand", lambda *shape, dtype, **_: torch.full(
            shape, number, dtype=dtype))
        ids, logps = draw(logits, 1.0, None)
        assert ids.tolist() == [token] and torch.isfinite(logps).all()


def test_a_model_without_finite_numbers_is_one_line():
    """Otherwise rollouts of arbitrary tokens would be scored as answers."""
    policy = tiny_policy(adapters=())
    policy.lm.get_output_embeddings().weight.data[7] = float("nan")
    user_error("not all finite", policy.sample, None, [[4, 5]])


# ---------------------------------------------------------------------------------------------
# adapters


def test_fresh_adapters_are_the_reference_bit_for_bit(shared):
    """Otherwise the KL to the initial policy would not start at zero, a switched-off adapter would
    still act, or both adapters would be the same."""
    bare, = scored(tiny_policy(adapters=()), None)
    fresh = scored(tiny_policy(live=False), "agent", "env", None)
    agent, env, off = scored(shared, "agent", "env", None)
    assert all(torch.equal(bare, x) for x in (*fresh, off))
    assert not torch.allclose(agent, off) and not torch.allclose(agent, env)


def test_active_adapter_is_restored_after_an_exception(shared):
    """Otherwise one failed pass of the reference policy would leave the agent untrained from then
    on."""
    with shared.use("agent"):
        with pytest.raises(KeyError), shared.use(None):
            raise KeyError
        assert shared.active == "agent"
    assert shared.active is None


def test_gradients_survive_a_switch_of_adapters_before_the_backward_pass():
    """Otherwise PEFT would freeze the inactive adapter, and autograd would drop its gradient."""
    policy = tiny_policy()
    _, *expected = learned(policy)
    clear(policy)
    with policy.use("agent"):
        loss = policy.logprobs(ROLLOUTS)[0].sum()
        scored(policy, "env", None)
        loss.backward()
    assert all(p.requires_grad for params in policy.params.values() for p in params)
    assert nearly_equal(gradients(policy, "agent"), expected)
    assert all(g is None for g in gradients(policy, "env"))


def test_only_adapters_are_trainable_and_each_optimiser_has_its_own():
    """Otherwise the other adapter, or the base, would be trained."""
    policy = tiny_policy()
    owned = {name: {id(p) for p in params} for name, params in policy.params.items()}
    trainable = {id(p) for p in policy.model.parameters() if p.requires_grad}
    assert not owned["agent"] & owned["env"]
    assert trainable == owned["agent"] | owned["env"]
    with policy.use("agent"):  # it must not matter which adapter is active
        [group] = policy.optimizer("env", 1e-3).param_groups
    # weight decay would pull each policy towards the base at every step
    assert {id(p) for p in group["params"]} == owned["env"] and group["weight_decay"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cast_weights_are_gone_after_sampling(dtype):
    """Otherwise training would read stale weights and give the adapters no gradient."""
    policy = tiny_policy(dtype=dtype)

    def sample():
        return policy.sample("agent", [[4, 5, 6]], G=8, generator=policy.generator(0))

    first = sample()
    assert len(policy.lora_layers) == 14 and all(m.cast is None for m in policy.lora_layers)
    assert all(g.abs().max() > 0 for g in learned(policy)[1:])
    randomise(policy, seed=5)  # in place, like an optimiser's step
    assert sample() != first


@pytest.mark.parametrize("quant", [None, "nf4"])
def test_lora_layers_compute_what_peft_computes(folder, quant):
    """Otherwise the hand-written LoRA product would differ from the library's, in values or
    gradients."""
    policy = load(folder, quant=quant, rank=4, dtype="fp32")
    randomise(policy)
    assert len(policy.lora_layers) == 7 * 2
    logp, *ours = learned(policy)
    for layer in policy.lora_layers:
        del layer.forward  # this leaves the library's own forward
    expected, *librarys = learned(policy)
    torch.testing.assert_close(logp, expected)
    assert nearly_equal(ours, librarys) and all(g.abs().max() > 0 for g in ours)


def test_rollouts_keep_their_cache_after_gradient_checkpointing():
    """Otherwise transformers would drop the cache in training mode, and decoding would silently
    become quadratic."""
    policy = tiny_policy()

    def sample():
        return policy.sample("agent", [[4, 5, 6]], G=2, max_new_tokens=6, temperature=0)

    plain = sample()
    assert equal_bits(learned(policy, grad_checkpoint=True), learned(policy, grad_checkpoint=False))
    differentiable = []
    policy.lm.get_output_embeddings().register_forward_hook(
        lambda m, args, out: differentiable.append(out.requires_grad))
    with shapes_into(policy.lm.get_input_embeddings()) as inputs:
        assert sample() == plain
    assert not any(differentiable)  # or every token would keep its activations
    widths = [tokens for _, tokens in inputs]
    assert widths[0] == 3 and max(widths[1:]) <= 2  # one token per rollout
    assert not policy.model.training


def test_saved_adapter_is_read_by_load(folder, tmp_path):
    """Otherwise a run's adapters could not be used, or another model's would be read in part."""
    policy = tiny_policy(chat=True)
    policy.save_adapters(tmp_path)
    options = dict(adapters=("env",), adapter_folder=tmp_path / "env", dtype="fp32")
    loaded = load(folder, **options)
    assert equal_bits(scored(loaded, "env"), scored(policy, "env"))
    assert all(p.requires_grad for p in loaded.params["env"])
    weights = tmp_path / "env" / "adapter_model.safetensors"
    layer_0 = {name: t for name, t in load_file(weights).items() if "layers.1" not in name}
    save_file(layer_0, weights)
    refused("another model", folder, **options)


# ---------------------------------------------------------------------------------------------
# text


def test_chat_messages_become_the_golden_ids():
    """Otherwise a model would have to write its own header, read a second BOS, or miss a message
    that its template leaves out."""
    messages = [{"role": "user", "content": "w9 w8"}]
    policy = tiny_policy(adapters=(), chat=True, bos=True)
    assert policy.encode(messages) == [BOS, 4, 13, 12, EOS, 5]
    user_error("chat template", tiny_policy(adapters=()).encode, messages)  # a base model
    # with a template that drops a message, the agent would answer without seeing its functions
    policy.tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}{{ m.content }} <eos> {% endfor %}")
    user_error("leaves out", policy.encode, [{"role": "system", "content": "w3"}, *messages])


def test_chat_template_gets_its_options_and_one_date(folder):
    """Otherwise a model's thinking could not be switched off, or prompts would change at midnight.
    """
    tokenizer = toy_tokenizer(chat=True)
    tokenizer.chat_template += ("{% if enable_thinking is false %} w2{% endif %}"
                                "{% if strftime_now('%Y-%d') == '2020-07' %} w7{% endif %}")
    tokenizer.save_pretrained(folder)
    chat = [{"role": "user", "content": "w9"}]
    options = {"date": "2020-01-07", "enable_thinking": False}
    policy = load(folder, (), chat_template_kwargs=options)
    assert policy.encode(chat) == [BOS, 4, 13, EOS, 5, 6, 11]


def test_a_turn_ends_as_the_template_writes_it():
    """Otherwise a model whose EOS differs from its template's end of turn would not stop at the
    latter, and would learn to end turns as no prompt does."""
    policy = tiny_policy(adapters=(), chat=True, eos_token_id=STOP)
    assert policy.end_of_turn == [EOS] and policy.eos_ids == [STOP, EOS]
    assert tiny_policy(adapters=(), eos_token_id=STOP).end_of_turn == [STOP]  # without a template


def test_control_tokens_within_a_response_are_seen(shared):
    """Otherwise an answer with tokens that `decode` drops would earn a reward and be imitated."""
    assert shared.decode([4, STOP, 5, EOS]) == "w0 w1"
    assert shared.has_control_tokens([4, STOP, 5, EOS]) and shared.has_control_tokens([EOS, EOS])
    assert not shared.has_control_tokens([4, 5, EOS]) and not shared.has_control_tokens([4, 5])


# ---------------------------------------------------------------------------------------------
# models that cannot be used


@pytest.mark.parametrize("name, weight, message", [
    ("model.layers.1.mlp.up_proj.weight", None, "1.mlp.up_proj.weight is missing"),
    ("score", torch.ones(2), "score is unexpected"),
    ("lm_head.weight", torch.ones(9, 32), "lm_head.weight.* is mismatched")])
def test_weights_that_are_not_the_models_are_refused(folder, name, weight, message):
    """Otherwise missing or mismatched weights would silently be random."""
    path = f"{folder}/model.safetensors"
    tensors = {**load_file(path), name: weight}
    save_file({k: v for k, v in tensors.items() if v is not None}, path, {"format": "pt"})
    refused(message, folder)


def test_model_folders_of_other_kinds_are_one_line(folder, tmp_path):
    """Otherwise such a model would end in a traceback of the library, perhaps after hours."""
    tokenizer = toy_tokenizer(chat=True)
    tokenizer.add_tokens(["one more"])
    tokenizer.save_pretrained(folder)
    refused("no tokenizer that fits: 41 tokens", folder)
    config = tmp_path / "model" / "config.json"
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": packed}))
    refused("quantised already", folder)


@pytest.mark.parametrize("family, options, fault", [
    ("mistral", {"sliding_window": 16}, "full causal"), ("mistral", {"sliding_window": 400}, ""),
    ("granite", {"logits_scaling": 8.0}, "full causal"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "cannot be used"),
    # opt's block applies dropout in train mode, which gradient checkpointing switches on
    ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5}, "cannot be used")])
def test_models_whose_three_paths_differ_are_refused(tmp_path, family, options, fault):
    """Otherwise a run would silently sample from one model and score another."""
    options = {**TINY, "max_position_embeddings": 512, **options}
    path = save(tiny_lm(config=AutoConfig.for_model(family, **options)), tmp_path)
    if fault:
        refused(fault, path, max_tokens=300)
    else:
        assert load(path, max_tokens=300).params


def test_rounding_of_large_scores_is_not_taken_for_another_model(tmp_path):
    """Otherwise the real Qwen2.5 of 0.5B and 1.5B would be refused, because bf16 attention rounds
    their scores."""
    lm = tiny_lm()
    for layer in lm.model.layers:
        seeded = torch.Generator().manual_seed(0)
        layer.self_attn.k_proj.bias.data.normal_(std=300, generator=seeded)
    assert load(save(lm, tmp_path), dtype="bf16").encode("w1") == [5]


def test_model_without_any_end_token_is_refused():
    """Otherwise every response would run to the limit of tokens."""
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = None
    user_error("end-of-sequence", Policy, tiny_lm(eos_token_id=None), tokenizer, adapters=())


def test_code_in_a_model_folder_is_neither_asked_for_nor_run(folder, tmp_path, monkeypatch):
    """Otherwise transformers would ask whether to run custom code and take a piped y as consent."""
    (tmp_path / "model" / "custom.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    foreign = {"model_type": "foreign", "auto_map": {"AutoConfig": "custom.Own"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(foreign))
    stdin = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", stdin)
    refused("custom code", folder)
    assert not (tmp_path / "executed").exists() and stdin.tell() == 0


def test_more_tokens_than_a_model_reads_are_refused(folder):
    """Otherwise tokens would silently lie at positions that the model cannot tell apart."""
    refused("reads 128 tokens at most", folder, max_tokens=129)


def test_a_block_that_computes_something_else_in_train_mode_is_refused(folder, monkeypatch):
    """Otherwise the gradient of such a model on a GPU, where these tests do not run, would be that
    of another model."""
    block = sys.modules[type(tiny_lm()).__module__].Qwen2DecoderLayer
    forward = block.forward

    def doubled(self, x, *args, **kwargs):
        if self.training:
            x = 2 * x
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(block, "forward", doubled)
    refused("train mode", folder)


def test_what_the_options_say_reaches_the_model(monkeypatch):
    """Otherwise a run would train with another rank, or a resumed run would show another date."""
    o = Options(rank=3, seed=7, quant="nf4", dtype="fp32", date="2026-01-07", model="m",
                chat_template_kwargs='{"enable_thinking": false}', max_prompt_tokens=100,
                max_response_tokens=20, max_task_tokens=30)
    monkeypatch.setattr(Policy, "load", lambda *args, **kwargs: (args, kwargs))
    args, options = open_policy("m", o)
    assert args == ("m",) and options == dict(
        adapters=("agent", "env"), rank=3, seed=7, quant="nf4", dtype="fp32", max_tokens=130,
        chat_template_kwargs={"enable_thinking": False, "date": "2026-01-07"})


def test_an_empty_prompt_is_refused(shared):
    """Otherwise the first token of its response would be drawn from padding."""
    with pytest.raises(ValueError, match="empty prompt"):
        shared.sample("agent", [[4], []])

"""The policy handle: scoring, sampling and adapter switching, each against a naive reference.

Run: python -m pytest tests/test_policy.py -q
"""
import io
import json
from contextlib import contextmanager

import pytest
import torch
from transformers import Qwen2ForCausalLM

from scripts import bench_models as bench
from helpers import (BOS, EOS, MIXED, clear, close, flat, gradients, naive_logps, raised, random_groups,
                     randomise, tiny_lm, tiny_policy, toy_tokenizer, user_error)
from support import attention
from support.attention import pack
from support.loading import model_config
import policy as policy_module
from policy import Policy, by_group, draw, split_groups
from support import memory
from support.metrics import movement

ENDINGS = [EOS, *range(4, 12)]  # many ways to end: responses of all lengths, rows leave early


@pytest.fixture(scope="module")
def shared():
    """One live policy for the tests that change nothing."""
    return tiny_policy()


@pytest.fixture(scope="module")
def ending():
    """One live policy whose rollouts end early, at different times."""
    return tiny_policy(eos=ENDINGS)


# ---------------------------------------------------------------------------------------------
# scoring


@pytest.mark.parametrize("temperature, chunk", [(1.0, 10_000), (0.7, 3)])
def test_shared_prompt_logprobs_equal_a_token_by_token_loop(shared, temperature, chunk,
                                                            monkeypatch):
    """Off-by-one, wrong positions or a leaking mask: the packed path would score another model. So
    would logits that are cut into chunks; test_grpo.py has the gradients of both."""
    monkeypatch.setattr(policy_module, "LOGIT_CHUNK", chunk)
    groups = random_groups(MIXED)
    for adapter in ("agent", "env", None):
        with shared.use(adapter), torch.no_grad():
            logp, mask = shared.logprobs(flat(groups), temperature)
            rows = [(p, r) for p, rs in groups for r in rs]
            for (prompt, response), row, m in zip(rows, logp, mask):
                expected = torch.stack(naive_logps(shared, prompt, response, temperature))
                torch.testing.assert_close(row[m], expected, atol=3e-5, rtol=1e-5)
                assert m[:len(response)].all()  # no holes
            assert (logp[~mask] == 0).all()  # the token denominator would count padding


def test_siblings_and_later_tokens_do_not_reach_a_rollout(shared):
    """A response would see its siblings, or its own future."""
    [(prompt, (a, b, c))] = random_groups([(6, [5, 5, 5])])
    with torch.no_grad():
        before = shared.logprobs(flat([(prompt, [a, b, c])]))[0]
        changed = b[:3] + [4 if b[3] != 4 else 5] + b[4:]
        after = shared.logprobs(flat([(prompt, [a, changed, c])]))[0]
    torch.testing.assert_close(before[0], after[0])
    torch.testing.assert_close(before[2], after[2])
    torch.testing.assert_close(before[1, :3], after[1, :3])
    assert (before[1, 3:] != after[1, 3:]).all()


@contextmanager
def shapes_into(module):
    """Yields the list of how many rows came out of the calls of a module."""
    seen = []
    hook = module.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape[:-1])))
    try:
        yield seen
    finally:
        hook.remove()


def test_logits_exist_for_response_tokens_only_and_one_chunk_at_a_time(shared, monkeypatch):
    """The memory promise: (chunk, V) logits, never (B, L, V). The speed promise: each prompt is
    encoded once for its group, P + sum(R - 1) tokens instead of G * (P + R)."""
    monkeypatch.setattr(policy_module, "LOGIT_CHUNK", 4)
    groups = random_groups([(9, [4, 4, 4, 4])] * 2)
    for grad in (False, True):
        with shared.use("agent"), torch.set_grad_enabled(grad), \
                shapes_into(shared.lm.get_output_embeddings()) as logits, \
                shapes_into(shared.lm.get_input_embeddings()) as inputs:
            shared.logprobs(flat(groups))
        assert logits == [(4,)] * 8 and inputs == [(2, 9 + 4 * 3)]
    with shapes_into(shared.lm.get_input_embeddings()) as inputs:
        shared.sample(None, [p for p, _ in groups], G=4, max_new_tokens=1)
    assert inputs == [(2, 9)]


def test_half_precision_logits_are_normalised_in_fp32():
    """A log-softmax in bf16 is noise of a few per cent."""
    head = torch.nn.Linear(16, 500, bias=False).to(torch.bfloat16)
    hidden, target = torch.randn(64, 16).to(torch.bfloat16), torch.randint(500, (64,))
    logp = policy_module.token_logprobs(hidden, head, target, 0.7)
    expected = (head(hidden).double() / 0.7).log_softmax(-1).gather(-1, target[:, None])[:, 0]
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads, key_heads", [(4, 1), (4, 2), (7, 7)])
def test_few_queries_attend_as_with_a_copy_of_the_keys_for_each_head(heads, key_heads):
    """Heads in the wrong order would read each other's keys."""
    generator = torch.Generator().manual_seed(0)
    draw_ = lambda *shape: torch.randn(*shape, generator=generator)
    query, key, value = draw_(3, heads, 5, 8), draw_(3, key_heads, 9, 8), draw_(3, key_heads, 9, 8)
    mask = torch.rand(3, 1, 5, 9, generator=generator) < 0.6
    mask[..., 0] = True
    copies = [x.repeat_interleave(heads // key_heads, dim=1) for x in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, *copies, attn_mask=mask, scale=0.3).transpose(1, 2)
    out, _ = attention.few_queries_attention(None, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("budget", [1, 9, 16, 40, 10_000])
def test_micro_batches_hold_every_response_once_and_respect_the_budget(budget):
    """A response would be trained twice, or never, or memory would exceed the budget."""
    rollouts = flat(random_groups(MIXED))
    batches = list(split_groups(rollouts, budget))
    assert sorted(i for rows in batches for i in rows) == list(range(len(rollouts)))
    for rows in batches:
        groups = by_group([rollouts[i] for i in rows])
        assert len(rows) == 1 or pack(groups, 0)["ids"].numel() <= budget
    assert len(batches) == 1 if budget == 10_000 else len(batches) > 1


# ---------------------------------------------------------------------------------------------
# sampling


LONG = [p for p, _ in random_groups([(P, [1]) for P in (5, 1, 9, 3, 14, 2, 2, 7)])]


@pytest.mark.parametrize("adapter, temperature, columns", [
    ("agent", 1.0, 14), ("agent", 0.7, 1), ("agent", 0.7, 3), (None, 0.7, 7)])
def test_sampled_logprobs_equal_scored_ones(ending, monkeypatch, adapter, temperature, columns):
    """Cache, positions, compaction or temperature: the sampler would be another policy; or it would
    read long prompts, of which a forward call takes so many columns, as other prompts."""
    monkeypatch.setattr(policy_module, "PREFILL_TOKENS", columns * len(LONG))
    dropped, compact = [], policy_module._compact

    def spy(done, rollout):
        keep, new = compact(done, rollout)
        dropped.append((len(keep) < len(done), new.shape[1] < rollout.shape[1]))
        return keep, new

    monkeypatch.setattr(policy_module, "_compact", spy)
    with shapes_into(ending.lm.get_input_embeddings()) as shapes:
        out = ending.sample(adapter, LONG, G=3, max_new_tokens=24, temperature=temperature,
                            generator=ending.generator(0))
    assert shapes[:-(-14 // columns)] == [(8, min(columns, 14 - start))
                                          for start in range(0, 14, columns)]
    # the case is only worth something if whole groups and single rollouts left on the way
    assert any(rows for rows, _ in dropped) and any(slots for _, slots in dropped)
    assert len({len(r.response) for r in out}) > 5
    groups = [(p, [r.response for r in out[3 * b:3 * b + 3]]) for b, p in enumerate(LONG)]
    with ending.use(adapter), torch.no_grad():
        logp, mask = ending.logprobs_dense(flat(groups), temperature)  # a row each, no cache
    for rollout, row, m in zip(out, logp, mask):
        torch.testing.assert_close(torch.tensor(rollout.logps), row[m], atol=3e-5, rtol=1e-5)


def test_greedy_equals_the_argmax_of_the_dense_path(ending):
    """Temperature 0 would not be the mode, or its log-probs not those at temperature 1; a smaller
    GPU would give other evaluation results."""
    prompts = LONG[:4]
    out, *others = [ending.sample("env", prompts, max_new_tokens=8, temperature=0, max_rows=rows)
                    for rows in (256, 2, 1)]
    assert all([r.response for r in other] == [r.response for r in out] for other in others)
    with ending.use("env"), torch.no_grad():
        for prompt, rollout in zip(prompts, out):
            ids = list(prompt)
            for token, logp in zip(rollout.response, rollout.logps):
                row = ending.lm(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                assert token == int(row.argmax())
                assert logp == pytest.approx(float(row.max()), abs=3e-5)
                ids.append(token)


def test_every_eos_id_of_the_model_ends_a_response(ending):
    """Chat models that stop on several ids would run on to the limit; or tokens follow the end; or
    a response that ends at the very limit would lose its reward."""
    assert ending.eos_ids == ENDINGS
    out = ending.sample("agent", [[20, 21]], G=300, max_new_tokens=6,
                        generator=ending.generator(2))
    assert len({r.response[-1] for r in out if not r.limit}) > 5
    for r in out:
        assert not set(r.response[:-1]) & set(ENDINGS) and len(r.response) == len(r.logps) <= 6
        assert bool(r.limit) == (r.response[-1] not in ENDINGS)
    assert {r.limit for r in out if len(r.response) == 6} == {"too many tokens", ""}


def test_truncated_flag_and_length_limit(shared, monkeypatch):
    """A response cut off by the limit would pass as finished."""
    for token, length, limit in ((20, 5, "too many tokens"), (EOS, 1, "")):
        monkeypatch.setattr(policy_module, "draw", lambda logits, *a: (
            torch.full(logits.shape[:-1], token), torch.zeros(logits.shape[:-1])))
        out = shared.sample(None, [[4], [5, 6]], G=2, max_new_tokens=5)
        assert all((len(r.response), r.limit) == (length, limit) for r in out)


def test_rollouts_come_in_prompt_order_with_their_prompt(shared):
    """Rewards would be given to the wrong task."""
    prompts = [p for p, _ in random_groups([(P, [1]) for P in (9, 1, 5, 7, 2)])]
    for max_rows in (4, 256):
        out = shared.sample("agent", prompts, G=3, max_new_tokens=2, max_rows=max_rows,
                            generator=shared.generator(0))
        assert [r.group for r in out] == [b for b in range(5) for _ in range(3)]
        assert [r.prompt for r in out] == [prompts[b] for b in range(5) for _ in range(3)]


def test_same_seed_same_bits_and_the_global_generator_is_untouched(shared):
    """Runs would not reproduce."""
    def run(seed):
        return [(r.response, r.logps) for r in shared.sample(
            "agent", [[4, 5], [6]], G=4, max_new_tokens=6, generator=shared.generator(seed))]
    state = torch.random.get_rng_state()
    first = run(0)
    torch.manual_seed(123)
    assert run(0) == first and run(1) != first
    torch.random.set_rng_state(state)
    run(0)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_draw_takes_any_shape_and_never_an_impossible_token():
    """Impossible tokens would be drawn, or log-probs belong to other tokens."""
    never = float("-inf")
    logits = torch.tensor([[[never, 0.0, never, 1.0, never]] * 500] * 2)
    for T in (0.0, 0.3, 1.0):
        ids, logps = draw(logits, T, torch.Generator().manual_seed(0))
        assert ids.shape == logps.shape == (2, 500) and set(ids.flatten().tolist()) <= {1, 3}
        expected = (logits / (T or 1)).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        torch.testing.assert_close(logps, expected)
    # and as often as the softmax says: a chi-square at temperature 0.7
    logits, n = torch.linspace(-1, 1, 8), 20_000
    ids, _ = draw(logits.expand(n, 8), 0.7, torch.Generator().manual_seed(3))
    expected = n * (logits / 0.7).softmax(-1)
    chi_square = float(((ids.bincount(minlength=8) - expected) ** 2 / expected).sum())
    assert chi_square < 7 + 5 * 14 ** 0.5  # 7 degrees of freedom, five standard deviations


@pytest.mark.parametrize("number, token", [(0.0, 1), (1 - 2 ** -53, 3)])
def test_draw_at_both_ends_of_its_random_number(monkeypatch, number, token):
    """A random number of exactly 0, or the last below 1, would give a word of probability 0."""
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype=None, **k: torch.full(
        shape, number, dtype=dtype))
    never = float("-inf")
    ids, logps = draw(torch.tensor([[never, 0.0, never, 1.0]]), 1.0, None)
    assert ids.tolist() == [token] and torch.isfinite(logps).all()


def test_empty_prompt_is_refused_and_no_prompt_gives_nothing(shared):
    """An empty prompt would be scored from a padding token."""
    raised(ValueError, "empty prompt", shared.sample, "agent", [[4], []])
    assert shared.sample("agent", []) == []


# ---------------------------------------------------------------------------------------------
# adapters


def test_fresh_adapters_are_the_reference_bit_for_bit(shared):
    """The KL to the initial policy would not start at zero; or adapters 'off' would leave a part of
    them on, or be one and the same."""
    def scores(policy, *adapters):
        out = []
        for adapter in adapters:
            with policy.use(adapter), torch.no_grad():
                out.append(policy.logprobs(flat(random_groups(MIXED)))[0])
        return out
    bare, = scores(tiny_policy(adapters=()), None)
    fresh = scores(tiny_policy(live=False), "agent", "env", None)
    agent, env, off = scores(shared, "agent", "env", None)
    assert all(torch.equal(bare, x) for x in (*fresh, off))
    assert not torch.allclose(agent, off) and not torch.allclose(agent, env)


def test_active_adapter_is_restored_after_an_exception(shared):
    """One failed reference pass would leave the agent untrained from then on."""
    with pytest.raises(RuntimeError):
        with shared.use("agent"):
            with pytest.raises(KeyError):
                with shared.use(None):
                    raise KeyError
            assert shared.active == "agent"
            with shared.use("env"):
                assert shared.active == "env"
            assert shared.active == "agent"
            raise RuntimeError
    assert shared.active is None
    with pytest.raises(ValueError, match="no adapter 'judge'"):  # else the base would be trained
        with shared.use("judge"):
            pass
    groups = random_groups(MIXED)
    with torch.no_grad():
        after = shared.logprobs(flat(groups))[0]
        with shared.use(None):
            assert torch.equal(shared.logprobs(flat(groups))[0], after)


def test_gradients_survive_a_switch_of_adapters_before_the_backward_pass():
    """PEFT freezes the inactive adapter and autograd then drops its pending gradient."""
    policy, groups = tiny_policy(), random_groups(MIXED)
    with policy.use("agent"):
        policy.logprobs(flat(groups))[0].sum().backward()
        expected = gradients(policy, "agent")
        clear(policy)
        loss = policy.logprobs(flat(groups))[0].sum()
        for other in ("env", None):
            with policy.use(other), torch.no_grad():
                policy.logprobs(flat(groups))
        loss.backward()
    assert all(p.requires_grad for params in policy.params.values() for p in params)
    assert close(gradients(policy, "agent"), expected)
    assert all(g is None for g in gradients(policy, "env"))


def test_only_adapters_are_trainable_and_each_optimiser_has_its_own():
    """The wrong adapter, or the base, would be trained."""
    policy = tiny_policy()
    owned = {name: {id(p) for p in params} for name, params in policy.params.items()}
    assert owned["agent"] and len(owned["agent"]) == len(owned["env"])
    assert not owned["agent"] & owned["env"]
    trainable = {id(p) for p in policy.model.parameters() if p.requires_grad}
    assert trainable == owned["agent"] | owned["env"]
    for active in (None, "agent", "env"):  # whatever is in force while it is built
        with policy.use(active):
            optimizer = policy.optimizer("env", 1e-3)
        assert {id(p) for g in optimizer.param_groups for p in g["params"]} == owned["env"]


def test_cast_weights_are_gone_after_sampling(monkeypatch):
    """Training would read stale weights, and pass them no gradient."""
    policy, groups = tiny_policy(dtype=torch.bfloat16), random_groups(MIXED)
    sample = lambda: policy.sample("agent", [[4, 5, 6]], G=8, generator=policy.generator(0))
    first = sample()
    with monkeypatch.context() as patch:
        patch.setattr(policy_module, "draw", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sample()
    assert len(policy.lora_layers) == 14 and all(m.cast is None for m in policy.lora_layers)
    with policy.use("agent"):
        policy.logprobs(flat(groups))[0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in policy.params["agent"])
    randomise(policy, seed=5)  # as an optimiser's step does: in place
    assert sample() != first


def test_the_proof_of_movement_tells_which_adapter_moved():
    """A change of one bit, or of the other adapter alone, must be told apart."""
    policy = tiny_policy()
    first = policy.params["agent"][3].view(-1)
    def proofs(change):
        with torch.no_grad(), movement(policy.params, "agent") as agent, \
                movement(policy.params, "env") as env:
            change()
        return agent, env
    agent, env = proofs(lambda: first[:1].copy_(torch.nextafter(first[:1], torch.tensor(9.0))))
    assert env["other_moved"] and not agent["other_moved"] and not env["moved"]
    def undone():
        saved = first.clone()
        first.add_(3).copy_(saved)
    assert proofs(undone) == ({"moved": 0, "other_moved": False},) * 2
    def far():
        first[0] += 3
        policy.params["agent"][0].view(-1)[1] -= 4
    agent, env = proofs(far)
    assert agent["moved"] == pytest.approx(5, rel=1e-5) and env["other_moved"]
    agent, env = proofs(lambda: None)
    assert agent == env == {"moved": 0, "other_moved": False}


@pytest.mark.parametrize("quant", ["", "nf4"])
def test_lora_layers_compute_what_peft_computes(quant):
    """The hand-written LoRA product: same values and gradients as the library's own forward."""
    config = bench.small_config(64, 2, 32)
    lm = bench.random_nf4(config, "cpu", torch.float32) if quant else Qwen2ForCausalLM(config)
    policy = Policy(lm, bench.word_tokenizer(32), rank=4)
    randomise(policy)
    layers = [m for m in policy.model.modules() if attention.is_plain_lora(m)]
    assert len(layers) == 7 * 2
    groups, results = random_groups([(5, [4, 4, 4]), (5, [4, 4, 4])], vocab=32), []
    for _ in range(2):
        clear(policy)
        with policy.use("agent"):
            logp, mask = policy.logprobs(flat(groups))
            (logp * mask).sum().backward()
        results.append((logp.detach(), gradients(policy, "agent")))
        for layer in layers:
            layer.__dict__.pop("forward", None)  # the second time round: the library's
    torch.testing.assert_close(results[0][0], results[1][0])
    assert close(results[0][1], results[1][1])
    assert all(g.abs().max() > 0 for g in results[0][1])


@pytest.mark.parametrize("kind", [dict(target_modules=["q_proj", "v_proj"]),
                                  dict(use_dora=True, target_modules="all-linear")], ids=str)
def test_adapters_of_a_user_compute_what_they_did(kind, tmp_path):
    """One on the attention alone beside a fresh one on everything; a DoRA adapter, which would
    silently be scored as a plain one."""
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(tiny_lm(), LoraConfig(r=4, init_lora_weights=False, **kind))
    model.save_pretrained(tmp_path)
    policy = Policy(tiny_lm(), toy_tokenizer(), rank=4, paths={"agent": tmp_path})
    with policy.use("agent"), torch.no_grad():
        ours = policy.lm(torch.tensor([[4, 5, 6]])).logits
        torch.testing.assert_close(ours, model(torch.tensor([[4, 5, 6]])).logits)


def test_rollouts_keep_their_cache_after_gradient_checkpointing():
    """transformers drops the cache in training mode: decoding would become quadratic, silently."""
    policy, groups, widths = tiny_policy(), random_groups(MIXED), []
    plain = policy.sample("agent", [[4, 5, 6]], G=2, max_new_tokens=6, temperature=0)
    with policy.use("agent"):
        policy.logprobs(flat(groups), 1.0, True)[0].sum().backward()
    hook = policy.lm.get_input_embeddings().register_forward_hook(
        lambda m, args, out: widths.append(args[0].shape[1]))
    after = policy.sample("agent", [[4, 5, 6]], G=2, max_new_tokens=6, temperature=0)
    hook.remove()
    assert after == plain and widths[0] == 3 and max(widths[1:]) <= 2  # one token per rollout
    assert not policy.model.training


def test_saved_adapter_is_read_by_load(tmp_path):
    """A run's adapters could not be used afterwards; test_tool_calls.py reads one with PEFT."""
    policy, groups = tiny_policy(), random_groups(MIXED)
    with policy.use("env"), torch.no_grad():
        expected = policy.logprobs(flat(groups))[0]
    policy.save_adapter("env", tmp_path / "env")
    tiny_lm().save_pretrained(tmp_path / "base")
    toy_tokenizer().save_pretrained(tmp_path / "base")
    for adapters in (("agent", "env"), ("env", "agent"), ("env",)):
        loaded = Policy.load(str(tmp_path / "base"), adapters, device="cpu",
                             adapter_paths={"env": str(tmp_path / "env")})
        with loaded.use("env"), torch.no_grad():
            assert torch.equal(loaded.logprobs(flat(groups))[0], expected)
        assert all(p.requires_grad for ps in loaded.params.values() for p in ps)
        assert loaded.encode("w1 w2") == [5, 6] and loaded.eos_ids == [EOS]


# ---------------------------------------------------------------------------------------------
# text, and what a user may get wrong


def test_chat_messages_become_the_golden_ids():
    """No generation prompt: the model writes its own header. BOS twice: another prompt."""
    messages = [{"role": "user", "content": "w9 w8"}]
    policy = tiny_policy(adapters=(), chat=True, bos=True)
    assert policy.encode(messages) == [BOS, 4, 13, 12, EOS, 5]
    user_error("chat template", tiny_policy(adapters=()).encode, messages)  # a base model


def test_chat_template_gets_the_options_of_the_model(tmp_path):
    """A model that thinks by default would think, whatever the user asks for."""
    tiny_lm().save_pretrained(tmp_path)
    tokenizer = toy_tokenizer(chat=True)
    tokenizer.chat_template += "{% if enable_thinking is false %} w2{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    asked, chat = {"enable_thinking": False}, [{"role": "user", "content": "w9"}]
    for options, ids in ((None, []), (asked, [6]), ({"enable_thinking": True}, [])):
        policy = Policy.load(str(tmp_path), (), device="cpu", chat_template_kwargs=options)
        assert policy.chat_template_kwargs == (options or {})
        assert policy.encode(chat) == [BOS, 4, 13, EOS, 5, *ids]
    user_error("leave them out", Policy.load, str(tmp_path), (), device="cpu",
               chat_template_kwargs={"tokenize": True})


@pytest.mark.parametrize("content", ["{", json.dumps({"model_type": "nothing"})])
def test_broken_model_files_are_one_clear_line(tmp_path, content):
    """A half-copied model would end in a traceback of the library; test_tool_loop.py has files that
    are missing or cut."""
    tiny_lm().save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    user_error("unknown quantisation 'int3'", Policy.load, str(tmp_path), quant="int3")
    (tmp_path / "config.json").write_text(content)
    user_error("cannot (load|read)", Policy.load, str(tmp_path), device="cpu")


@pytest.mark.parametrize("owner, file, entry", [
    ("config", "config.json", "AutoConfig"), ("model", "config.json", "AutoModelForCausalLM"),
    ("tokenizer", "tokenizer_config.json", "AutoTokenizer")])
def test_code_in_a_model_folder_is_neither_asked_for_nor_run(tmp_path, monkeypatch, owner, file,
                                                              entry):
    """transformers asks "Do you wish to run the custom code?" and takes a piped y for an answer."""
    tiny_lm().save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "custom.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    content = json.loads((tmp_path / file).read_text())
    content["auto_map"] = {entry: ["custom.Own", None] if owner == "tokenizer" else "custom.Own"}
    kinds = {"config": {"model_type": "foreign"}, "model": {"model_type": "vit"},
             "tokenizer": {"tokenizer_class": "Own"}}
    (tmp_path / file).write_text(json.dumps({**content, **kinds[owner]}))
    stdin = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", stdin)
    if owner == "tokenizer":  # its tokenizer.json is read without the class
        assert Policy.load(str(tmp_path), (), device="cpu").encode("w1 w2") == [5, 6]
    else:
        user_error("code of its own.*never run", Policy.load, str(tmp_path), device="cpu")
        user_error("code of its own|no causal language model",
                   lambda: memory.count_parameters(model_config(str(tmp_path))))
    assert not (tmp_path / "executed").exists() and stdin.tell() == 0


def test_model_without_any_end_token_is_refused():
    """Every response would run to the limit."""
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = None
    user_error("end-of-sequence", Policy, tiny_lm(eos=None), tokenizer, adapters=())

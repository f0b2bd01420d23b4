"""Decode steps of vLLM's FlashAttention backend by fp4.paged_attention: which steps, which layers, which engines. The kernel runs on a CPU as its reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp4_inductor.integrations.vllm import attention, engine
from fp4_inductor.integrations.vllm.attention import Attention, Backend, Builder
from fp4_inductor.integrations.vllm.config import Common
from fp4_inductor.ops import paged_attention as contract

B, H, KV, D = 3, 8, 2, 64


@pytest.fixture
def layer(monkeypatch):
    """As vLLM makes one, without its kernels, which a CPU lacks."""
    monkeypatch.setattr(attention, "_device", lambda: torch.device("cpu"))
    made = object.__new__(Attention)
    plain = dict(num_heads=H, num_kv_heads=KV, head_size=D, scale=0.2, alibi_slopes=None, sliding_window=(-1, -1), kv_cache_dtype="auto", logits_soft_cap=0)
    plain |= dict(rounds_queries=False)
    rest = dict(kv_sharing_target_layer_name=None, attn_type="decoder", sinks=None, dcp_world_size=1, batch_invariant_enabled=False, dtype=torch.bfloat16)
    vars(made).update(plain, **rest, compilation=SimpleNamespace())
    return made


def step_of(**options):
    """(query, key, value, KV cache, metadata) of a step of one token each, and the call that it is."""
    c = contract.call(torch.device("cpu"), (20, 33, 1), 16, H, KV, D, torch.bfloat16, scale=0.2, **options)
    metadata = SimpleNamespace(
        num_actual_tokens=B, max_query_len=1, use_cascade=False, causal=True, seq_lens=c.lengths, block_table=c.table, slot_mapping=c.slots
    )  # fmt: skip
    planes = (c.keys, c.values) if c.key_scale is None else (c.keys.view(torch.uint8), c.values.view(torch.uint8))  # as vLLM has codes
    return (c.query, c.key, c.value, torch.stack(planes), metadata), c


@pytest.fixture
def step():
    return step_of()


@pytest.fixture
def flash(monkeypatch):
    """What reaches vLLM's own backend."""
    seen: list[str] = []
    monkeypatch.setattr(engine.FlashAttentionImpl, "forward", lambda self, *args, **options: seen.append("forward"))
    monkeypatch.setattr(engine.FlashAttentionImpl, "do_kv_cache_update", lambda self, *args: seen.append("append"))
    return seen


def appended(layer, monkeypatch, given) -> None:
    monkeypatch.setattr(engine, "get_attention_context", lambda name: (given[4], None, None, None), raising=False)
    layer.do_kv_cache_update(SimpleNamespace(layer_name="layers.0"), given[1], given[2], given[3], given[4] and given[4].slot_mapping)


def test_one_token_each(layer, step, flash, monkeypatch):
    """One call appends and attends; rows behind those of the step are left alone."""
    layer.why_not = ""
    given, c = step
    out = torch.full((B + 2, H * D), 7.0, dtype=torch.bfloat16)
    appended(layer, monkeypatch, given)
    assert layer.forward(None, *given, out) is out
    contract.CONTRACT.reference(*c)
    assert torch.equal(out[:B], c.out.flatten(1)) and (out[B:] == 7.0).all()
    assert torch.equal(given[3].nan_to_num(9.0), torch.stack([c.keys, c.values]).nan_to_num(9.0))
    assert not flash


@pytest.mark.parametrize("change", [dict(max_query_len=2), dict(use_cascade=True), dict(causal=False), None, "scale", "cache"])
def test_all_else_is_flash_attention(layer, step, flash, monkeypatch, change):
    """Prompts and mixtures, cascades, encoders, the run that measures memory, a rounded result, a cache in FP8: append and attention alike."""
    layer.why_not = ""
    (*tensors, metadata), _ = step
    scales = (torch.ones(1),) if change == "scale" else ()
    if change == "cache":
        tensors[3] = tensors[3].to(torch.float8_e4m3fn)
    metadata = None if change is None else SimpleNamespace(**vars(metadata) | (change if isinstance(change, dict) else {}))
    if not scales:  # asked for of the attention alone, by a layer whose append is one of ours
        appended(layer, monkeypatch, (*tensors, metadata))
    layer.forward(None, *tensors, metadata, torch.empty(B, H * D), *scales)
    assert flash == (["forward"] if scales else ["append", "forward"])


@pytest.fixture
def coded(layer):
    """A layer over a cache in FP8 that the kernel serves, and a step of it."""
    layer.kv_cache_dtype, layer.why_not, layer.rounds_queries, layer.supports_quant_query_input = "fp8", "", True, False
    return layer, *step_of(codes=KV)


def test_one_token_each_over_codes(coded, flash, monkeypatch):
    layer, given, c = coded
    out = torch.empty(B, H * D, dtype=torch.bfloat16)
    appended(layer, monkeypatch, given)
    layer.forward(SimpleNamespace(_k_scale=c.key_scale, _v_scale=c.value_scale), *given, out)
    contract.CONTRACT.reference(*c)
    assert torch.equal(out, c.out.flatten(1)) and not flash
    assert torch.equal(given[3], torch.stack([c.keys.view(torch.uint8), c.values.view(torch.uint8)]))


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5, 2.0])])
def test_queries_are_rounded_for_flash_attention(coded, monkeypatch, scale):
    """Of a prompt, over a cache in FP8: by vLLM's own function, and FlashAttention is told that they have a scale."""
    layer, (query, *rest, metadata), _ = coded
    seen = []

    def rounded(x, scale):
        seen.append((tuple(x.shape), tuple(scale.shape)))
        return x.to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(engine, "scaled_fp8_quant", rounded, raising=False)
    monkeypatch.setattr(engine.FlashAttentionImpl, "forward", lambda self, layer, query, *_: seen.append((query.dtype, self.supports_quant_query_input)))
    prompt = SimpleNamespace(**vars(metadata) | dict(max_query_len=2))
    layer.forward(SimpleNamespace(_q_scale=scale), query, *rest, prompt, torch.empty(B, H * D))
    layer.forward(SimpleNamespace(_q_scale=scale), query, *rest, None, torch.empty(B, H * D))  # the run that measures memory
    assert seen == [((B, H * D), (1, 2) if scale.dim() else ()), (torch.float8_e4m3fn, True), (torch.bfloat16, False)]
    assert layer.supports_quant_query_input is False


@pytest.mark.parametrize(("cache", "version", "rounds"), [("fp8", "0.22.1", True), ("auto", "0.22.1", False), ("fp8", "0.32.0", False)])
def test_who_rounds_queries(layer, monkeypatch, cache, version, rounds):
    """vLLM, but for layers over codes whose decode steps the kernel serves."""
    monkeypatch.setattr(engine, "version", lambda: version)
    theirs = vars(layer) | dict(kv_cache_dtype=cache, supports_quant_query_input=True)
    monkeypatch.setattr(engine.FlashAttentionImpl, "__init__", lambda self: vars(self).update(theirs))
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16), compilation_config=SimpleNamespace())
    monkeypatch.setattr(attention, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(attention.select, "compile_ahead", lambda calls: None)
    for described in ("describe", "expect"):
        monkeypatch.setattr(attention.select, described, lambda *args, form=(): attention._call(made, 90))
    made = object.__new__(Attention)
    vars(made).update(vars(layer) | dict(kv_cache_dtype=cache))
    made.__init__()
    assert (made.rounds_queries, made.supports_quant_query_input) == (rounds, not rounds)
    assert made.why_not == ("" if version == "0.22.1" else "vLLM 0.32.0, with which it has not run")


def test_layers_that_are_not_served(layer, flash, step, monkeypatch):
    monkeypatch.setattr(engine, "version", lambda: engine.ATTENTION_VERSIONS[0])
    for change, told in (
        (dict(head_size=80), "heads of width 80"), (dict(num_heads=34), "17 heads that share"), (dict(kv_cache_dtype="fp8_e5m2"), 'a KV cache in "fp8_e5m2"'),
        (dict(alibi_slopes=torch.ones(H)), "ALiBi"), (dict(attn_type="encoder_only"), "not a decoder's"), (dict(dcp_world_size=2), "that ranks share"),
        (dict(kv_sharing_target_layer_name="layers.0"), "another layer's cache"), (dict(batch_invariant_enabled=True), "VLLM_BATCH_INVARIANT"),
    ):  # fmt: skip
        other = object.__new__(Attention)
        vars(other).update(vars(layer) | change)
        assert told in other.why_not
        assert not other.serves(step[0][4], step[0][3])
    monkeypatch.setattr(engine, "version", lambda: "0.32.0")
    assert layer.why_not == "vLLM 0.32.0, with which it has not run"


def test_a_kernel_that_is_switched_off_or_not_there(layer, monkeypatch):
    """The reason is that of the plan: here that of a CPU."""
    monkeypatch.setattr(engine, "version", lambda: engine.ATTENTION_VERSIONS[0])
    assert "CPU" in layer.why_not or "cpu" in layer.why_not, layer.why_not


def test_only_engines_with_our_layers(monkeypatch):
    ours, other = SimpleNamespace(quant_config=object.__new__(Common)), SimpleNamespace(quant_config=None)
    for config, kind in ((ours, Attention), (other, engine.FlashAttentionImpl), (None, engine.FlashAttentionImpl)):
        monkeypatch.setattr(attention, "get_current_vllm_config_or_none", lambda config=config: config)
        assert Backend.get_impl_cls() is kind
    support = engine.AttentionCGSupport
    monkeypatch.setattr(engine.FlashAttentionMetadataBuilder, "get_cudagraph_support", classmethod(lambda *args: support.ALWAYS))
    assert Builder.get_cudagraph_support(ours, None) == support.UNIFORM_BATCH and Builder.get_cudagraph_support(other, None) == support.ALWAYS
    monkeypatch.setattr(engine.FlashAttentionMetadataBuilder, "get_cudagraph_support", classmethod(lambda *args: support.NEVER))
    assert Builder.get_cudagraph_support(ours, None) == support.NEVER
    assert Backend.get_name() == engine.FlashAttentionBackend.get_name() == "FLASH_ATTN"


def test_the_schedule_is_left_out_where_nobody_reads_it(layer, monkeypatch):
    built = []
    monkeypatch.setattr(engine.FlashAttentionMetadataBuilder, "build", lambda self, prefix, common, fast: built.append(fast))
    layer.why_not = ""
    theirs = SimpleNamespace(impl=object.__new__(engine.FlashAttentionImpl))
    other = object.__new__(Attention)
    other.why_not = "a reason"
    for impls, prefix, queries, fast in (
        ("a", 0, 1, True), ("a", 0, 2, False), ("a", 16, 1, False), ("ab", 0, 1, False), ("ac", 0, 1, False),
    ):  # fmt: skip
        builder = object.__new__(Builder)
        builder.layer_names = list(impls)
        context = dict(a=SimpleNamespace(impl=layer), b=theirs, c=SimpleNamespace(impl=other))
        builder.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
        builder.build(prefix, SimpleNamespace(max_query_len=queries, num_reqs=3))
        assert built.pop() == fast


@pytest.mark.parametrize(
    ("queries", "tokens", "drafts", "in_a_graph"), [(1, 600, 0, True), (512, 512, 0, True), (600, 601, 0, False), (3, 600, 0, False), (3, 600, 2, True)]
)
def test_a_prompt_of_a_large_graph_has_no_buffers_of_a_whole_one(monkeypatch, queries, tokens, drafts, in_a_graph):
    """FlashAttention is asked for a fixed number of parts up to ``max_cudagraph_size`` tokens: 1 GiB of sums for a prompt of 2,048."""
    seen = []

    def init(self, vllm_config):
        self.vllm_config, self.max_cudagraph_size = vllm_config, 2048

    monkeypatch.setattr(engine.FlashAttentionMetadataBuilder, "__init__", init)
    monkeypatch.setattr(engine.FlashAttentionMetadataBuilder, "build", lambda self, *args: seen.append(self.max_cudagraph_size))
    speculative = SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    step = SimpleNamespace(max_query_len=queries, num_actual_tokens=tokens)
    for ours in (True, False):
        builder = Builder(SimpleNamespace(quant_config=SimpleNamespace(of_fp4_inductor=ours), speculative_config=speculative))
        builder._are_all_served = False
        builder.build(0, step)
        builder.build(0, SimpleNamespace(max_query_len=1, num_actual_tokens=8))
        assert seen == [2048 if in_a_graph or not ours else None, 2048]
        seen.clear()


def test_replaced_once():
    backend = engine.AttentionBackendEnum.FLASH_ATTN
    for _ in range(2):
        engine.replace_flash_attention(f"{attention.__name__}.Backend")
    try:
        assert backend.get_class() is Backend
    finally:
        backend.clear_override()
    assert backend.get_class() is engine.FlashAttentionBackend

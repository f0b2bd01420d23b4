"""fp4.decode_attention on a GPU: against float64 on fresh data, masks of every kind, unread memory, CUDA graphs; a Transformers model through its backend."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import fp4_inductor
from fp4_inductor import NVFP4Config, explain
from fp4_inductor.kernels import registry
from fp4_inductor.kernels.decode_attention import split as split_file
from fp4_inductor.kernels.decode_attention.split import AttentionConfig, split
from fp4_inductor.ops import decode_attention as contract
from fp4_inductor.passes import matches, reset_matches
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, FP32, error

pytestmark = pytest.mark.gpu
attention = torch.ops.fp4.decode_attention


def operands(b, h, kv, q, s, d, dtype=BF16):
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in ((b, h, q, d), (b, kv, s, d), (b, kv, s, d))]


def filled(b, q, s, length):
    """Transformers' mask of a StaticCache that holds ``length`` positions, the last ``q`` of them the queries' own."""
    at = torch.arange(s, device=DEVICE)
    return (at <= length - q + torch.arange(q, device=DEVICE)[:, None]).expand(b, 1, q, s)


def masks(b, h, q, s):
    at = torch.arange(s, device=DEVICE)
    half = filled(b, q, s, s // 2 + 1)
    holes = torch.rand(b, 1, q, s, device=DEVICE) < 0.5
    holes[0, :, 0] = False
    yield from (None, half, half & (at >= s // 4), holes, torch.rand(b, h, q, s, device=DEVICE) < 0.5, torch.zeros(1, 1, 1, s, dtype=torch.bool, device=DEVICE))
    yield torch.randn(b, 1, q, s, device=DEVICE).masked_fill(holes, float("-inf"))
    yield torch.randn(b, 1, q, s, device=DEVICE).masked_fill(holes, torch.finfo(FP32).min)


def exact(query, key, value, mask=None, scale=None):
    """float64 arithmetic; the result in float32."""
    return contract.reference(query.float(), key.float(), value.float(), mask, scale).double()


def check(query, key, value, mask=None, scale=None):
    got = attention(query, key, value, mask, scale)
    assert error(got, exact(query, key, value, mask, scale)) <= contract.CONTRACT.tolerance[query.dtype], (query.shape, key.shape)
    return got


@pytest.mark.parametrize(("b", "h", "kv", "q", "s", "d"), [
    (1, 32, 8, 2048, 2064, 128), (3, 14, 2, 333, 1027, 64), (2, 8, 8, 130, 300, 80), (1, 8, 4, 700, 700, 256), (2, 4, 1, 17, 9000, 128), (1, 6, 3, 64, 40, 96),
])  # fmt: skip
def test_many_queries_over_a_shared_mask(b, h, kv, q, s, d):
    """Against float64, 100 times the same bits, and whatever lies where nobody attends."""
    at, row = torch.arange(s, device=DEVICE), torch.arange(q, device=DEVICE)[:, None]
    behind = at <= max(s - q, 0) + row
    holes = torch.rand(b, 1, q, s, device=DEVICE) < 0.5
    padded = behind & (at >= torch.arange(b, device=DEVICE)[:, None, None, None] * 7)
    for mask in ((at <= row).expand(1, 1, q, s), padded, (behind & (at > s - q + row - 100)).expand(b, 1, q, s), holes, holes[:, :, :1], holes & False):
        query, key, value = operands(b, h, kv, q, s, d)
        shown = slice(None) if q * s < 1 << 20 else slice(-70, None)  # float64 of all would take long
        got = attention(query, key, value, mask)
        want = exact(query[:, :, shown], key, value, mask.expand(-1, 1, q, s)[:, :, shown])
        assert error(got[:, shown], want) <= contract.CONTRACT.tolerance[BF16], (q, s, d)
        unseen = ~mask.expand(b, 1, q, s).any(2)[:, 0, :, None]
        dirty = (t.masked_fill(unseen[:, None], float("nan")) for t in (key, value))
        assert torch.equal(attention(query, *dirty, mask), got)
        assert all(torch.equal(attention(query, key, value, mask), got) for _ in range(100))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_shapes_and_masks_against_float64(dtype):
    shapes = (
        (1, 32, 8, 1, 520, 128), (8, 32, 4, 1, 520, 128), (32, 32, 8, 1, 520, 128), (3, 14, 2, 1, 1027, 64), (2, 8, 8, 1, 300, 80), (1, 8, 1, 2, 65, 96),
        (2, 4, 2, 8, 4104, 128), (1, 8, 4, 1, 700, 256), (5, 7, 1, 1, 1, 64), (1, 64, 8, 2, 130, 64), (1, 2, 2, 1, 20000, 128),
    )  # fmt: skip
    for b, h, kv, q, s, d in shapes if dtype == BF16 else shapes[::4]:  # every length is a kernel of its own, a second to compile
        for mask in masks(b, h, q, s):
            check(*operands(b, h, kv, q, s, d, dtype), mask)
    check(*operands(2, 71, 1, 1, 100, 64, dtype))  # more heads than the kernel's rows: the library
    check(*operands(2, 4, 2, 40, 100, 64, dtype), filled(2, 40, 100, 80))
    check(*operands(1, 4, 2, 1, 50, 512, dtype), scale=0.1)


@pytest.mark.parametrize("tile", [(b, s, w, st) for b in (32, 64, 128) for s in (1, 16) for w, st in ((4, 3), (8, 2))], ids=str)
def test_every_tile(tile):
    block, splits, warps, stages = tile
    query, key, value = operands(2, 32, 8, 1, 777, 128)
    for mask in (None, filled(2, 1, 777, 400)):
        got = split(query, key, value, mask, 128**-0.5, AttentionConfig(block, splits, warps, stages))
        assert error(got, exact(query, key, value, mask)) <= contract.CONTRACT.tolerance[BF16]


def test_what_no_query_attends_to_may_hold_anything():
    for b, h, kv, q, s, d in ((2, 32, 8, 1, 1000, 128), (1, 8, 2, 4, 300, 64)):
        query, key, value = operands(b, h, kv, q, s, d)
        for mask in masks(b, h, q, s):
            if mask is None:
                continue
            seen = (mask if mask.dtype == torch.bool else mask > float("-inf")).expand(b, h, q, s)
            seen = seen.unflatten(1, (kv, h // kv)).any(2).any(2)
            clean = attention(query, key, value, mask)
            dirty = [t.masked_fill(~seen[..., None], float("nan")) for t in (key, value)]
            assert torch.equal(attention(query, *dirty, mask), clean)


def test_a_cache_is_read_where_it_lies():
    """Slices and transposed caches: the bits of the contiguous ones, and no memory but the result and the parts of it."""
    query, key, value = operands(4, 32, 8, 1, 400, 128)
    want = attention(query, key, value)
    longer = torch.full((4, 8, 8192, 128), float("nan"), device=DEVICE, dtype=BF16)
    longer[:, :, :400] = key
    turned = value.transpose(1, 2).contiguous().transpose(1, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = attention(query.transpose(1, 2).contiguous().transpose(1, 2), longer[:, :, :400], turned)
    assert torch.cuda.max_memory_allocated() - before < 4 << 20
    assert torch.equal(got, want)


def test_more_than_two_to_the_31_elements():
    key = torch.empty(1, 1, 2**24 + 640, 128, device=DEVICE, dtype=FP16).normal_()
    assert key.numel() > 2**31
    query = torch.randn(1, 4, 1, 128, device=DEVICE, dtype=FP16)
    mask = torch.zeros(1, 1, 1, key.shape[2], dtype=torch.bool, device=DEVICE)
    mask[..., -500:] = True
    got = attention(query, key, key, mask)
    assert error(got, exact(query, key[:, :, -500:], key[:, :, -500:])) <= contract.CONTRACT.tolerance[FP16]


def test_replay_has_the_bits_of_eager():
    query, key, value = operands(8, 32, 8, 1, 520, 128)
    mask = filled(8, 1, 520, 300).clone()
    want, graph = attention(query, key, value, mask), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(query, key, value, mask)
    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
    mask[..., 300:450] = True  # a longer cache, the same graph
    graph.replay()
    assert torch.equal(out, attention(query, key, value, mask))


# --- codes of 8 bits --------------------------------------------------------------------------------------------

KINDS = contract.CODES
NAME = "triton_codes_attention"
CANDIDATES = (NAME,) if any(on.off for on in registry.named("decode_attention")[NAME].on) else ()


def coded(b, kv, s, d, kind, lead=None, dtype=BF16):
    """Codes, and scales ``[*lead, 1]``, by default one for each token and head."""
    codes = (40 * torch.randn(b, kv, s, d, device=DEVICE)).clamp(-127, 127).to(kind)
    return codes, (torch.rand(*(lead or (b, kv, s)), 1, device=DEVICE) / 30 + 0.01).to(dtype)


@pytest.mark.parametrize("kinds", [(KINDS[0], KINDS[0]), (KINDS[1], KINDS[1]), (KINDS[0], KINDS[1])], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_codes_against_float64(kinds, dtype):
    shapes = (
        (1, 32, 8, 1, 8200, 128, None),
        (8, 32, 8, 1, 520, 128, (1, 8, 1)),
        (3, 14, 2, 2, 1027, 64, (1, 1, 1)),
        (2, 8, 8, 1, 300, 80, None),
        (1, 8, 4, 4, 700, 256, None),
    )
    for b, h, kv, q, s, d, lead in shapes:
        (key, ks), (value, vs) = (coded(b, kv, s, d, kind, lead, dtype) for kind in kinds)
        query = torch.randn(b, h, q, d, device=DEVICE).to(dtype)
        for mask in masks(b, h, q, s):
            with fp4_inductor.dispatch(candidates=CANDIDATES), mock.patch.object(split_file, "constants", wraps=split_file.constants) as asked:
                got = attention(query, key, value, mask, None, ks, vs)
            assert asked.called, "another kernel ran"
            want = contract.reference(query.float(), key, value, mask, None, ks, vs).double()
            assert error(got, want) <= contract.CONTRACT.tolerance[dtype], (b, h, q, s, d)
    key.view(torch.uint8)[0, 0, 5] = 0x7F
    with fp4_inductor.dispatch(candidates=CANDIDATES):
        dirty = attention(query, key, value, filled(1, 4, 700, 300).flip(-1), None, ks, vs)  # nobody attends to it
    assert torch.isfinite(dirty).all()


def of_query_heads(x, group):
    b, kv, s, d = x.shape
    return x.unsqueeze(2).expand(b, kv, group, s, d).reshape(b, kv * group, s, d)


@pytest.mark.parametrize("form", ["a mask", "no mask", "a mask that adds", "grouped heads without a mask"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.no_grad()
def test_a_dequantized_cache_in_a_compiled_graph(kind, form):
    """Whichever operator torch makes of the attention here, the graph attends to the codes, and gives what eager code does."""
    b, h, kv, s, d = 2, 32, 8, 1024, 128
    (key, ks), (value, vs) = (coded(b, kv, s, d, kind) for _ in range(2))
    query = torch.randn(b, h, 1, d, device=DEVICE, dtype=BF16)
    mask = {
        "a mask": filled(b, 1, s, 700),
        "a mask that adds": torch.zeros(b, 1, 1, s, device=DEVICE, dtype=BF16).masked_fill(~filled(b, 1, s, 700), float("-inf")),
    }.get(form)
    grouped = form.startswith("grouped")

    def step(query, key, value, ks, vs, mask):
        key, value = key.to(BF16) * ks, value.to(BF16) * vs
        if not grouped:
            key, value = of_query_heads(key, h // kv), of_query_heads(value, h // kv)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)

    reset_matches()
    with fp4_inductor.dispatch(candidates=CANDIDATES):
        got = torch.compile(step, fullgraph=True)(query, key, value, ks, vs, mask)
    assert matches().get("quantized_cache") == 1
    assert error(got, step(query, key, value, ks, vs, mask).double()) <= 2 * contract.CONTRACT.tolerance[BF16]


def tiny(attention):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_hidden_layers=2)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, max_position_embeddings=1024)).to(DEVICE, BF16).eval()
    return fp4_inductor.quantize_model(model, NVFP4Config("amax", attention=attention), progress=False)


@torch.no_grad()
def steps(model, prompt, count, mode):
    """Logits of a prompt and of ``count`` steps after it, each fed a fixed token."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=200)
    out = [model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1:].float()]
    step = torch.compile(model, mode=mode, fullgraph=True) if mode else model
    for i in range(count):
        position = torch.tensor([prompt.shape[1] + i], device=DEVICE)
        token = (prompt[:, :1] + i) % 512
        out.append(step(input_ids=token, past_key_values=cache, position_ids=position[None], use_cache=True).logits.float().clone())
    return torch.cat(out, 1)


@pytest.mark.parametrize("mode", ["", "default", "reduce-overhead"])
def test_a_model_decodes_as_with_sdpa(mode):
    ours, theirs = tiny("auto"), tiny("keep")
    assert ours.config._attn_implementation == "fp4_inductor" and theirs.config._attn_implementation == "sdpa"
    prompt = torch.randint(0, 512, (3, 40), device=DEVICE)
    want, got = steps(theirs, prompt, 6, mode), steps(ours, prompt, 6, mode)
    assert torch.equal(got[:, 0], want[:, 0])  # the prompt is sdpa's in both
    assert error(got[:, 1:], want[:, 1:].double()) <= 0.02
    kernels = [row.kernel for row in explain(ours, input_ids=prompt[:, :1]).rows if row.op == "fp4.decode_attention"]
    assert kernels == ["triton_decode_attention"] * 2

"""fp4.cached_attention over caches in 8 and 4 bits: attention over keys and values that are quantized apart, however the tokens come; refusals."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor import errors
from fp4_inductor.config import DispatchConfig
from fp4_inductor.formats import kv
from fp4_inductor.kernels import select
from fp4_inductor.kernels.cached_attention import composed
from fp4_inductor.kernels.kernel import Call
from fp4_inductor.ops.cached_call import CachedCall, Stored
from lowering_tests.ops.test_cached_attention import CONTRACT, relative, straight, tokens

DEVICES = ["cpu", "blind", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = tuple(kv.FORMATS)


@pytest.fixture
def device(request, monkeypatch):
    if request.param == "blind":  # as CUDA is served: the position is not read
        monkeypatch.setattr(composed, "known", lambda c: 0 if c.empty else None)
        return "cpu"
    return request.param


def nothing(f: kv.Format, batch: int, heads: int, slots: int, width: int, device="cpu", dtype=torch.float32, rollback=0, length=1000):
    """``(keys, values, rest)`` of a cache in which everything is NaN, but for codes that have none, which are not zero."""
    rows = []
    for kind in (f.key, f.value):
        codes, scale, blocks = kv.empty(kind, (batch, heads, slots), width, torch.device(device))
        codes.view(torch.uint8).fill_(0x7F)
        rows.append((codes, scale.fill_(float("nan")), None if blocks is None else blocks.view(torch.uint8).fill_(0x7F).view(blocks.dtype)))
    exact = [torch.full((batch, heads, kv.exact_slots(length, rollback), width), float("nan"), dtype=dtype, device=device) if f.exact else None for _ in "kv"]
    mean = torch.full((batch, heads, width), float("nan"), device=device)
    return rows[0][0], rows[1][0], Stored(rows[0][1], rows[1][1], mean, rows[1][2], rows[0][2], *exact)


class Steps:
    """A cache in a format, and its counter; ``step(count)`` appends the next tokens."""

    def __init__(self, name, q, k, v, slots, window=None, rollback=0):
        self.qkv, self.window, self.format = (q, k, v), window, kv.FORMATS[name]
        self.keys, self.values, self.stored = nothing(self.format, *k.shape[:2], slots, k.shape[3], k.device, k.dtype, rollback)
        self.position = torch.zeros((), dtype=torch.int64, device=q.device)

    def call(self, q, k, v, **options):
        c = CachedCall(q, k, v, self.keys, self.values, self.position, window=self.window, stored=self.stored, **options)
        return torch.ops.fp4.cached_attention(*c.flat())

    def step(self, count, **options):
        at = int(self.position)
        out = self.call(*(t[:, :, at : at + count] for t in self.qkv), **options)
        self.position += count
        return out


def apart(name, q, k, v, first, window=None):
    """float64: K and V of the whole text rounded at once, with the mean of the first call, and plain causal attention over them, ``[B, Q, H, D]``."""
    f, mean = kv.FORMATS[name], k[:, :, : min(first, 128)].float().mean(2)
    rounded = kv.dequantize(kv.quantize(k, f.key, mean), f.key, mean), kv.dequantize(kv.quantize(v, f.value), f.value)
    if not f.exact:
        return straight(q, *rounded, window)
    at, out, group = torch.arange(q.shape[2], device=q.device), [], q.shape[1] // k.shape[1]
    for i in range(q.shape[2]):  # each query has a text of its own: the first 4 and the last 64 tokens as they are
        begin = max(0, i + 1 - (window or i + 1))
        kept = ((at < 4) | (at > i - 64))[begin : i + 1, None]
        both = (torch.where(kept, t[:, :, begin : i + 1], r[:, :, begin : i + 1]) for t, r in zip((k, v), rounded, strict=True))
        keys, values = (t.double().repeat_interleave(group, 1) for t in both)
        weights = (q[:, :, i : i + 1].double() @ keys.mT * q.shape[3] ** -0.5).softmax(-1)
        out.append((weights @ values).transpose(1, 2))
    return torch.cat(out, 1)


TOTAL = 90
SPLITS = [[1] * TOTAL, [TOTAL], [17, 1, 1, 5, 50, 1, 15], [72, 18]]


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize(("window", "slots"), [(None, TOTAL), (7, 9), (70, 75)])
@pytest.mark.parametrize("name", NAMES)
def test_any_way_to_feed_tokens_is_attention_over_what_was_quantized_apart(name, window, slots, device):
    """A fresh cache holds NaN: nothing that was not written is read. The result tells how far away the next format would be."""
    q, k, v = tokens(TOTAL, device, batch=1, width=16)
    exact = straight(q, k, v, window)
    for counts in SPLITS:
        want, cache = apart(name, q, k, v, counts[0], window), Steps(name, q, k, v, slots, window)
        got = torch.cat([cache.step(count) for count in counts], 1)
        assert relative(got, want) <= CONTRACT.tolerance[torch.float32], (counts[:4], relative(got, want))
        if name != "nvfp4" or window != 7:  # of which all 7 tokens are exact
            assert relative(got, exact) > 1e-3


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_and_wide_heads(name, device):
    q, k, v = tokens(90, device, width=128, dtype=torch.bfloat16)
    cache = Steps(name, q, k, v, 96)
    got = torch.cat([cache.step(70), *(cache.step(1) for _ in range(20))], 1)
    assert relative(got, apart(name, q, k, v, 70)) <= CONTRACT.tolerance[torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_are_taken_back_are_forgotten(name, window, device):
    """As speculation does: five tokens more, four of them taken back; the ring of exact tokens has four more for that."""
    q, k, v = tokens(TOTAL, device, batch=1)
    want = apart(name, q, k, v, 20, window)
    cache = Steps(name, q, k, v, 11 if window else TOTAL, window, rollback=4)
    cache.step(20)
    while int(cache.position) < TOTAL - 5:
        at = int(cache.position)
        cache.call(q[:, :, at : at + 5], *(torch.full_like(t[:, :, :5], 1e4) for t in (k, v)))
        got = cache.step(1)
        assert relative(got, want[:, at : at + 1]) <= CONTRACT.tolerance[torch.float32], at


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("name", NAMES)
def test_masks_soft_caps_and_sinks(name, device):
    """Against the float64 reference of the op, which other tests hold to attention that is written apart."""
    q, k, v = tokens(80, device)
    padding = (torch.arange(90, device=device) >= torch.tensor([[0], [11]], device=device))[:, None, None]
    added = torch.randn(2, 4, 1, 90, device=device)
    for options in (dict(mask=padding), dict(mask=added, softcap=2.0), dict(sinks=torch.randn(4, device=device), mask=padding)):
        ours, theirs = (Steps(name, q, k, v, 96) for _ in range(2))
        theirs.call = lambda *new, cache=theirs, **more: CONTRACT.reference(  # type: ignore[method-assign]
            *CachedCall(*new, cache.keys, cache.values, cache.position, stored=cache.stored, **more).flat()
        )
        for count in (71, 1, 1, 3):
            assert relative(ours.step(count, **options), theirs.step(count, **options)) <= CONTRACT.tolerance[torch.float32], options


@pytest.mark.parametrize("name", NAMES)
def test_nan_in_a_token_stays_in_its_head(name):
    q, k, v = tokens(80)
    clean = Steps(name, q, k, v, 80).step(80)
    for spoiled in (0, 1):
        kv_ = [k.clone(), v.clone()]
        kv_[spoiled][1, 1, 40, 3] = float("nan")
        got = Steps(name, q, *kv_, 80).step(80)
        hit = torch.zeros_like(got, dtype=torch.bool)
        hit[1, :, 2:] = True  # heads 2 and 3 share KV head 1
        assert got[1, 40:, 2:].isnan().any(-1).all()
        assert torch.equal(got[0], clean[0]) and torch.equal(got[1, :, :2], clean[1, :, :2]) and not got[~hit].isnan().any()


@pytest.mark.parametrize("name", NAMES)
def test_a_constant_in_all_keys_changes_little(name):
    """K of Qwen 2.5's kind: exact attention does not see the constant. Without a mean "nvfp4" and "fp8" would see nothing else."""
    q, k, v = tokens(200, width=64)
    biased = k.clone()
    biased[..., 17] += 600
    biased[..., 40] -= 437
    exact = straight(q, k, v)
    plain, got = (relative(Steps(name, q, keys, v, 200).step(200), exact) for keys in (k, biased))
    assert got < 1.15 * plain, (plain, got)


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_of_one_launch_for_dense_caches_does_not_take_it_and_why(name):
    q, k, v = tokens(1, width=64, dtype=torch.bfloat16)
    keys, values, stored = nothing(kv.FORMATS[name], 2, 2, 40, 64, dtype=torch.bfloat16)
    c = CachedCall(q, k, v, keys, values, torch.tensor(7), arrivals=torch.zeros(4, dtype=torch.int32), stored=stored)
    form = select.cached_form(c)
    assert f"a cache in {name}" in form
    plan = select.plan(Call("cached_attention", 90, torch.bfloat16, 4, 64, form=form), DispatchConfig())
    assert plan.pick(2).kernel == ("cuda_quantized_attention" if name == "nvfp4" else "cuda_step_attention_codes")
    assert [r.reason for r in plan.refused if r.kernel.name == "triton_cached_attention"] == [f"does not take {', '.join(form)}"]


# --- refusals -----------------------------------------------------------------------------------------------------


def arguments(name, change):
    q, k, v = tokens(2)
    f = kv.FORMATS[name]
    key, value = (kv.empty(kind, (2, 2, 8), 16, torch.device("cpu")) for kind in (f.key, f.value))
    exact = [torch.zeros(2, 2, 12, 16) if f.exact else None for _ in range(2)]
    given = CachedCall(q, k, v, key.codes, value.codes, torch.tensor(3))._asdict()
    given |= Stored(key.scale, value.scale, torch.zeros(2, 2, 16), value.blocks, key.blocks, *exact)._asdict()
    given.pop("prologue"), given.pop("stored")
    return given | change(given)


REFUSED = {
    "no scales": ("k8v4", errors.ConfigError, "without scales", lambda a: {n: None for n in Stored._fields}),
    "scales of a dense cache": ("k8v4", errors.ConfigError, "with scales", lambda a: dict(keys=torch.zeros(2, 2, 8, 16), values=torch.zeros(2, 2, 8, 16))),
    "no mean": ("fp8", errors.ConfigError, "key_mean", lambda a: dict(key_mean=None)),
    "a mean of another dtype": ("fp8", errors.ShapeError, "key_mean", lambda a: dict(key_mean=a["key_mean"].half())),
    "no blocks": ("k8v4", errors.ShapeError, "blocks of nvfp4", lambda a: dict(value_blocks=None)),
    "blocks": ("k8v4", errors.ShapeError, "blocks of int8", lambda a: dict(key_blocks=a["value_blocks"])),
    "scale of another dtype": ("fp8", errors.DTypeError, "scale of fp8", lambda a: dict(key_scale=a["key_scale"].float())),
    "no exact tokens": ("nvfp4", errors.ConfigError, "exact_values", lambda a: dict(exact_values=None)),
    "exact tokens": ("k8v4", errors.ConfigError, "none in k8v4", lambda a: dict(exact_keys=torch.zeros(2, 2, 12, 16), exact_values=torch.zeros(2, 2, 12, 16))),
    "few exact tokens": ("nvfp4", errors.ShapeError, "12 or more", lambda a: {n: torch.zeros(2, 2, 11, 16) for n in ("exact_keys", "exact_values")}),
    "exact tokens of another dtype": ("nvfp4", errors.ShapeError, "float32", lambda a: dict(exact_keys=a["exact_keys"].half())),
    "width of codes": ("nvfp4", errors.ShapeError, "belong together", lambda a: dict(keys=torch.zeros(2, 2, 8, 16, dtype=torch.uint8))),
    "formats that are mixed": ("k8v4", errors.DTypeError, "k8v4", lambda a: dict(keys=a["values"], values=a["keys"])),
    "values of another width": ("fp8", errors.ShapeError, "another width",
                                lambda a: dict(value=torch.zeros(2, 2, 2, 32), values=torch.zeros(2, 2, 8, 32).to(torch.float8_e4m3fn))),
    "full": ("k8v4", errors.ShapeError, "7 + 2 tokens", lambda a: dict(position=torch.tensor(7))),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_has_written_nothing(case):
    name, error, message, change = REFUSED[case]
    given = arguments(name, change)
    with pytest.raises(error) as caught:
        torch.ops.fp4.cached_attention(**given)
    assert message in str(caught.value)
    written = [given[n] for n in ("keys", "values", *Stored._fields) if given[n] is not None]
    assert not any(t.float().any() for t in written)
    torch.ops.fp4.cached_attention(**arguments(name, lambda a: {}))  # the call that it would be


def test_heads_that_have_no_blocks_of_16():
    q, k, v = tokens(1, width=24)
    codes = torch.zeros(2, 2, 8, 24, dtype=torch.float8_e4m3fn)
    scale = torch.zeros(2, 2, 8, dtype=torch.float16)
    with pytest.raises(errors.ShapeError, match=r"24.*multiples of 16"):
        torch.ops.fp4.cached_attention(q, k, v, codes, codes.clone(), torch.tensor(0), key_scale=scale, value_scale=scale, key_mean=torch.zeros(2, 2, 24))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_replays_append_and_attend(name):
    """A CUDA graph of one step, replayed, has the bits of eager calls."""
    q, k, v = tokens(100, "cuda", width=64, dtype=torch.bfloat16)
    eager, graphed = (Steps(name, q, k, v, 100, rollback=1) for _ in range(2))
    want = [eager.step(60), *(eager.step(1) for _ in range(40))]
    graphed.step(60)
    now = [t[:, :, 60:61].clone() for t in (q, k, v)]
    graphed.call(*now)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graphed.call(*now)
        graphed.position.add_(1)
    for step in range(40):
        for buffer, t in zip(now, (q, k, v), strict=True):
            buffer.copy_(t[:, :, 60 + step : 61 + step])
        graph.replay()
        assert torch.equal(out, want[1 + step]), step
    assert relative(torch.cat(want, 1), apart(name, q, k, v, 60)) <= 2 * CONTRACT.tolerance[torch.bfloat16]

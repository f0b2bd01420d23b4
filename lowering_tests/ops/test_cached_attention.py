"""fp4.cached_attention against float64: rings before, at and after their turn, what lies where nobody looks, tokens taken back, refusals."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor import errors
from fp4_inductor.kernels.cached_attention import composed
from fp4_inductor.ops import CONTRACTS

CONTRACT = CONTRACTS["cached_attention"]
# "blind": on a CPU, as if the position could not be read, which is how CUDA is served.
DEVICES = ["cpu", "blind", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def device(request, monkeypatch):
    if request.param == "blind":
        monkeypatch.setattr(composed, "known", lambda c: 0 if c.empty else None)
        return "cpu"
    return request.param


def op(*args, **options):
    return torch.ops.fp4.cached_attention(*args, **options)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def copies(args) -> tuple:
    return tuple(a.clone() if i in CONTRACT.written and a is not None else a for i, a in enumerate(args))


def written_alike(ours, theirs, got) -> bool:
    """What a call has written: bit for bit the new tokens; after a prologue, which is computed in float32, to one rounding. Counters are zero again."""
    caches = zip((ours[3], ours[4]), (theirs[3], theirs[4]), strict=True)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[got.dtype]
    same = all(torch.equal(a, b) or (len(ours) > 15 and relative(a, b) < rounding) for a, b in caches)
    return same and (len(ours) < 14 or ours[13] is None or not ours[13].any())


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_the_contract_in_float64(device):
    torch.manual_seed(0)
    for description, args in CONTRACT.inputs(torch.device(device)):
        theirs, ours = copies(args), copies(args)
        want, got = CONTRACT.reference(*theirs), op(*ours)
        assert relative(got, want) <= CONTRACT.tolerance[got.dtype], description
        assert written_alike(ours, theirs, got), description


def straight(query, key, value, window=None):
    """float64 causal attention without a cache, [B, Q, H, D]."""
    group = query.shape[1] // key.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (key, value))
    at = torch.arange(query.shape[2], device=query.device)
    seen = (at <= at[:, None]) & (at > at[:, None] - (window or len(at)))
    scores = (query.double() @ k.mT * query.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def tokens(total: int, device="cpu", batch=2, heads=4, kv=2, width=16, dtype=torch.float32):
    return tuple(torch.randn(batch, n, total, width, device=device).to(dtype) for n in (heads, kv, kv))


class Steps:
    """A cache filled with NaN, and its counter; ``step(count)`` appends the next tokens."""

    def __init__(self, q, k, v, slots, window=None):
        self.qkv, self.window = (q, k, v), window
        self.keys, self.values = (torch.full((*t.shape[:2], slots, t.shape[3]), float("nan"), dtype=t.dtype, device=t.device) for t in (k, v))
        self.position = torch.zeros((), dtype=torch.int64, device=q.device)

    def step(self, count, **options):
        at = int(self.position)
        q, k, v = (t[:, :, at : at + count] for t in self.qkv)
        out = op(q, k, v, self.keys, self.values, self.position, window=self.window, **options)
        self.position += count
        return out


SPLITS = [[1] * 40, [17, 1, 1, 5, 1, 15], [40], [3, 37], [9, 1, 21, 1, 8], [8, 8, 8, 8, 8]]


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize(("window", "slots"), [(None, 40), (None, 64), (7, 7), (7, 11), (7, 40), (1, 1), (39, 40)])
def test_any_way_to_feed_tokens_is_attention_without_a_cache(window, slots, device):
    """A fresh cache holds NaN: nothing that was not written is read, or 0 * NaN would show."""
    q, k, v = tokens(40, device)
    want = straight(q, k, v, window)
    for counts in SPLITS:
        cache = Steps(q, k, v, slots, window)
        got = torch.cat([cache.step(count) for count in counts], 1)
        assert relative(got, want) <= CONTRACT.tolerance[torch.float32], (counts, relative(got, want))


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("window", [None, 7])
def test_tokens_that_are_taken_back_are_forgotten(window, device):
    """As speculation does: five tokens more, four of them taken back; a ring of W + 4 slots still has the window."""
    q, k, v = tokens(40, device)
    want, cache = straight(q, k, v, window), Steps(q, k, v, 11 if window else 40, window)
    cache.step(20)
    while int(cache.position) < 35:
        at = int(cache.position)
        wrong = tuple(torch.full_like(t[:, :, :5], 1e4) for t in (k, v))
        op(q[:, :, at : at + 5], *wrong, cache.keys, cache.values, cache.position, window=window)
        got = cache.step(1)
        assert relative(got, want[:, at : at + 1]) <= CONTRACT.tolerance[torch.float32], at


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_empty_attends_to_the_new_tokens_only(device):
    q, k, v = tokens(40, device)
    for window, slots in ((None, 64), (7, 9)):
        cache, other = Steps(q, k, v, slots, window), Steps(q, k, v, slots, window)
        assert relative(cache.step(33, empty=True), other.step(33)) <= CONTRACT.tolerance[torch.float32]
        assert torch.equal(cache.keys.nan_to_num(9.0), other.keys.nan_to_num(9.0))
        assert relative(torch.cat([cache.step(1)], 1), straight(q, k, v, window)[:, 33:34]) <= CONTRACT.tolerance[torch.float32]


def test_softcap_and_sinks_are_theirs():
    """By the formulas of Gemma 2 and gpt-oss, written here once more."""
    q, k, v = tokens(6, kv=4)
    scores = (q.double() @ k.double().mT / 4).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf"))
    cache = Steps(q, k, v, 8)
    capped = (torch.tanh(q.double() @ k.double().mT / 4 / 0.5) * 0.5).masked_fill(scores == float("-inf"), float("-inf"))
    assert relative(cache.step(6, softcap=0.5), (capped.softmax(-1) @ v.double()).transpose(1, 2)) < 1e-6
    sinks = torch.tensor([0.0, 3.0, -2.0, 1.0])
    weights = torch.cat([scores, sinks.double()[None, :, None, None].expand(2, 4, 6, 1)], -1).softmax(-1)[..., :-1]
    cache = Steps(q, k, v, 8)
    assert relative(cache.step(6, sinks=sinks), (weights @ v.double()).transpose(1, 2)) < 1e-6


def test_in_parts_as_at_once(monkeypatch):
    """Scores that would not fit are computed for some queries at a time."""
    q, k, v = tokens(40)
    sinks = torch.randn(4)
    whole = Steps(q, k, v, 40).step(40, sinks=sinks)
    monkeypatch.setattr(composed, "_SCORES", 2 * 4 * 40 * 7)
    parts = Steps(q, k, v, 40).step(40, sinks=sinks)
    assert relative(parts, whole) < 1e-6


# --- refusals -----------------------------------------------------------------------------------------------------


def arguments(**changed):
    q, k, v = tokens(2)
    given = dict(query=q, key=k, value=v, keys=torch.zeros(2, 2, 8, 16), values=torch.zeros(2, 2, 8, 16), position=torch.tensor(3))
    return given | {name: make(given) if callable(make) else make for name, make in changed.items()}


REFUSED = {
    "dtype of the cache": (errors.DTypeError, "bfloat16", dict(keys=lambda a: a["keys"].bfloat16())),
    "float64": (errors.DTypeError, "float64", {n: lambda a, n=n: a[n].double() for n in ("query", "key", "value", "keys", "values")}),
    "batch": (errors.ShapeError, "belong together", dict(keys=torch.zeros(3, 2, 8, 16))),
    "heads of the cache": (errors.ShapeError, "belong together", dict(values=torch.zeros(2, 1, 8, 16))),
    "lengths that differ": (errors.ShapeError, "belong together", dict(values=torch.zeros(2, 2, 9, 16))),
    "heads": (errors.ShapeError, "multiple", dict(query=torch.zeros(2, 3, 2, 16))),
    "position": (errors.ShapeError, "int64", dict(position=torch.tensor(3, dtype=torch.int32))),
    "two positions": (errors.ShapeError, "one number", dict(position=torch.tensor([3, 3]))),
    "window": (errors.ShapeError, "1 to 8", dict(window=9)),
    "no window": (errors.ShapeError, "1 to 8", dict(window=0)),
    "softcap": (errors.ConfigError, "above 0", dict(softcap=0.0)),
    "sinks": (errors.ShapeError, "one for each head", dict(sinks=torch.zeros(2))),
    "neither": (errors.ConfigError, "causal", dict(causal=False)),
    "integer mask": (errors.DTypeError, "bool or floating", dict(mask=torch.ones(1, 1, 1, 8, dtype=torch.int64))),
    "mask of three": (errors.ShapeError, "4 dimensions", dict(mask=torch.ones(1, 3, 2, 8, dtype=torch.bool))),
    "device": (errors.DeviceError, "meta", dict(sinks=torch.zeros(4, device="meta"))),
}
# What only the number in position says: a fake call cannot know it.
AT = {
    "full": (errors.ShapeError, r"7 \+ 2 tokens.*8", dict(position=torch.tensor(7))),
    "negative": (errors.ShapeError, "-1", dict(position=torch.tensor(-1))),
    "not empty": (errors.ShapeError, "empty", dict(empty=True)),
    "short mask": (errors.ShapeError, "5 positions or more", dict(mask=torch.ones(1, 1, 1, 4, dtype=torch.bool))),
}


@pytest.mark.parametrize("case", REFUSED | AT)
def test_a_refused_call_has_written_nothing(case):
    error, message, changed = (REFUSED | AT)[case]
    given = arguments(**changed)
    with pytest.raises(error, match=message):
        op(**given)
    assert not given["keys"].any() and not given["values"].any()


@pytest.mark.parametrize("case", [case for case in REFUSED if case != "device"])
def test_the_fake_refuses_it_too(case):
    error, message, changed = REFUSED[case]
    with pytest.raises(error, match=message):
        op(**{name: a.to("meta") if isinstance(a, torch.Tensor) else a for name, a in arguments(**changed).items()})


def test_a_gradient_is_refused():
    given = arguments(query=lambda a: a["query"].requires_grad_())
    with pytest.raises(errors.UnsupportedOpError, match=r"no_grad"):
        op(**given)
    assert not given["keys"].any()
    with torch.no_grad():
        op(**given)
    assert given["keys"].any()


def test_inference_mode():
    q, k, v = tokens(9)
    want = Steps(q, k, v, 9).step(9)
    with torch.inference_mode():
        assert torch.equal(Steps(*(t.clone() for t in (q, k, v)), 9).step(9), want)


@pytest.mark.gpu
def test_replays_append_and_attend():
    """A CUDA graph of one step, replayed: each replay appends at the next position, and has the bits of an eager call."""
    q, k, v = tokens(64, "cuda", width=64, dtype=torch.bfloat16)
    for window, slots in ((None, 64), (16, 20)):
        eager, graphed = Steps(q, k, v, slots, window), Steps(q, k, v, slots, window)
        want = [eager.step(20), *(eager.step(1) for _ in range(44))]
        graphed.step(20)
        now = [t[:, :, 20:21].clone() for t in (q, k, v)]
        op(*now, graphed.keys, graphed.values, graphed.position, window=window)  # compiles what is compiled at the first call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = op(*now, graphed.keys, graphed.values, graphed.position, window=window)
            graphed.position.add_(1)
        for step in range(44):
            for buffer, t in zip(now, (q, k, v), strict=True):
                buffer.copy_(t[:, :, 20 + step : 21 + step])
            graph.replay()
            assert torch.equal(out, want[1 + step]), step
        exact = straight(q, k, v, window)
        assert relative(torch.cat(want, 1), exact) <= 2 * CONTRACT.tolerance[torch.bfloat16]

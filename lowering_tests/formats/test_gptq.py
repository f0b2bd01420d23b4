"""GPTQ for NVFP4: against a float64 reference, against a search of all scales, and against the sweep it has to beat."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp4_inductor.errors import NonFiniteError, ShapeError
from fp4_inductor.formats import e2m1, gptq, nvfp4, pruning, sparse24
from fp4_inductor.formats.hessian import damped

SCALES = torch.arange(1, 127, dtype=torch.uint8).view(nvfp4.SCALE_DTYPE).double()
GRID = torch.tensor(e2m1.VALUES, dtype=torch.float64)


def inputs(rows: int, k: int, seed: int = 0) -> Tensor:
    """Correlated channels of very different sizes, as activations are."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, k, generator=random) @ (torch.eye(k) + torch.randn(k, k, generator=random) / k**0.5)
    return mixed * torch.exp(torch.randn(k, generator=random))


def hessian(rows: int, k: int, seed: int = 0) -> Tensor:
    x = inputs(rows, k, seed)
    return x.T @ x / rows


def weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed + 100)) * 0.05


def dense(parts) -> Tensor:
    return nvfp4.dequantize(*parts, torch.float32)


def damped_of(h: Tensor) -> Tensor:
    return damped(h, gptq.DAMPING, gptq.DAMPING_OWN)


def nearest(x: Tensor) -> Tensor:
    """float64 to the nearest E2M1 value."""
    return GRID[(x[..., None] - GRID).abs().argmin(-1)]


def reference(w: Tensor, h: Tensor) -> Tensor:
    """The rounding without the refinement, in float64, one row after the other, by the definition: whatever is not yet rounded is set to
    the best answer to what is (an inverse for each column, where the code has one Cholesky factor). ``[N, K]``."""
    h, g = damped_of(h).double(), float(w.abs().amax() / torch.tensor(6.0 * 256.0))
    k = w.shape[1]
    blocks = sorted(range(k // 16), key=lambda b: -float(h.diagonal()[16 * b : 16 * b + 16].sum()))
    order = [16 * b + i for b in blocks for i in range(16)]
    inverses = []
    for i in range(k):
        left = order[i:]
        inverses.append(torch.linalg.inv(h[left][:, left]))

    def rounded(rest: Tensor, i: int, scale: float) -> tuple[Tensor, float]:
        """``rest`` with column ``order[i]`` rounded and the others, those left over, moved; and what that costs."""
        c, left, inverse = order[i], order[i:], inverses[i]
        q = nearest(rest[c] / scale) * scale
        error = (rest[c] - q) / inverse[0, 0]
        rest = rest.clone()
        rest[left] -= error * inverse[0]
        rest[c] = q
        return rest, float(error**2 * inverse[0, 0])

    out = []
    for row in w.double():
        for start in range(0, k, 16):
            largest = float(row[order[start : start + 16]].abs().max())
            base = int((SCALES - largest / 6 / g).abs().argmin())
            best, chosen = float("inf"), row
            for code in range(max(base - 7, 0), min(base + 7, 125) + 1):
                tried, cost = row, 0.0
                for i in range(start, start + 16):
                    tried, more = rounded(tried, i, float(SCALES[code]) * g)
                    cost += more
                if cost < best:
                    best, chosen = cost, tried
            row = chosen
        out.append(row)
    return torch.stack(out)


@pytest.mark.parametrize("seed", range(3))
def test_rounding_is_that_of_the_definition_in_float64(seed, monkeypatch):
    monkeypatch.setattr(gptq, "SWEEPS", 0)
    w, h = weight(3, 48, seed), hessian(200, 48, seed)
    torch.testing.assert_close(dense(gptq.quantize(w, h)), reference(w, h).float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_without_correlations_every_block_gets_the_best_of_all_scales(seed):
    w = weight(8, 32, seed)
    h = torch.diag(torch.exp(torch.randn(32)))
    got = gptq.quantize(w, h)
    g, d = float(got[2]), damped_of(h).diagonal().double()
    for row, q in zip(w.double(), dense(got).double(), strict=True):
        for b in range(2):
            block = slice(16 * b, 16 * b + 16)
            all_scales = torch.stack([(row[block] - nearest(row[block] / s) * s).square() @ d[block] for s in SCALES * g])
            assert float((row[block] - q[block]).square() @ d[block]) == pytest.approx(float(all_scales.min()), rel=1e-4)


def test_a_correlated_pair_gets_the_best_of_all_codes_and_scales():
    """Two channels that go together and 14 by themselves: all 15 * 15 codes of the pair with all 126 scales can be tried. Descent by single
    codes may stop at a pair that only both together could leave: in few rows, and not far away."""
    w = weight(24, 16)
    h = torch.eye(16)
    h[0, 1] = h[1, 0] = 0.9
    got = gptq.quantize(w, h)
    g, damp = float(got[2]), damped_of(h)
    pairs = torch.tensor(list(itertools.product(e2m1.VALUES, repeat=2)), dtype=torch.float64)
    above = []
    for row, q in zip(w.double(), dense(got).double(), strict=True):
        least = float("inf")
        for s in (SCALES * g).tolist():
            alone = float((row[2:] - nearest(row[2:] / s) * s).square().sum() * damp[2, 2])
            off = row[:2] - pairs * s
            least = min(least, alone + float(((off @ damp[:2, :2]) * off).sum(-1).min()))
        above.append(float(gptq.objective(row[None], q[None], damp)) / least)
    assert sum(ratio < 1 + 1e-4 for ratio in above) >= 20
    assert max(above) < 1.1


def gradients(n: int, seed: int = 0) -> Tensor:
    """Of few directions, as those at a layer's output are."""
    return hessian(24, n, seed + 7)


def error_of_both(w: Tensor, q: Tensor, h: Tensor, outputs: Tensor) -> float:
    d = (w - q).double()
    return float((d.T @ damped(outputs, gptq.OUTPUT_DAMPING, gptq.OUTPUT_DAMPING_OWN) @ d @ damped_of(h)).diagonal().sum())


@pytest.mark.parametrize("n", [64, 128, 300])
def test_rows_make_good_what_is_done_to_others(n):
    w, h, outputs = weight(n, 64), hessian(200, 64), gradients(n)
    together, alone = dense(gptq.quantize(w, h, outputs=outputs)), dense(gptq.quantize(w, h))
    assert error_of_both(w, together, h, outputs) < 0.985 * error_of_both(w, alone, h, outputs)


def test_rows_that_have_nothing_to_do_with_each_other_are_rounded_one_by_one():
    w, h = weight(150, 64), hessian(200, 64)
    for got, want in zip(gptq.quantize(w, h, outputs=torch.diag(torch.rand(150))), gptq.quantize(w, h), strict=True):
        assert torch.equal(got.view(torch.uint8) if got.element_size() == 1 else got, want.view(torch.uint8) if want.element_size() == 1 else want)


def peak(call: Callable[[], object], folder: Path) -> int:
    """Bytes of tensors that ``call`` holds at once, beside what there is already."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    profiled.export_chrome_trace(str(folder / "trace.json"))
    events = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e.get("name") == "[memory]"]
    first = min(events, key=lambda e: e["ts"])["args"]
    return max(e["args"]["Total Allocated"] for e in events) - (first["Total Allocated"] - first["Bytes"])


@pytest.mark.parametrize(("n", "k"), [(1024, 64), (64, 1024)])
def test_three_large_matrices_at_once(n, k, tmp_path):
    """In float64, of inputs and of outputs alike; those of outputs are made where they are needed, and used up."""
    w, h, outputs = weight(n, k), hessian(100, k), gradients(n)
    assert 2.5 < peak(lambda: gptq.quantize(w, h, outputs=outputs.double), tmp_path) / (8 * 1024**2) < 3.5
    for got, want in zip(gptq.quantize(w, h, outputs=outputs.double), gptq.quantize(w, h, outputs=outputs), strict=True):
        assert torch.equal(got.float(), want.float())


def test_what_rows_are_rounded_to_is_the_best_answer_to_those_before():
    w, outputs, seen = weight(150, 32).double(), gradients(150), []

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(rows.clone())
        return (rows * 50).round() / 50, torch.zeros(rows.shape[0], 2, dtype=torch.uint8)

    q, _ = gptq._rows_in_turn(w.float(), outputs, rounded)
    m = damped(outputs, gptq.OUTPUT_DAMPING, gptq.OUTPUT_DAMPING_OWN)
    order = m.diagonal().argsort(descending=True, stable=True)
    m, w, q = m[order][:, order], w[order], q[order].double()
    assert [len(rows) for rows in seen] == [32, 32, 32, 32, 22]
    done = 0
    for rows in seen:
        best = w[done:] + torch.linalg.solve(m[done:, done:], m[done:, :done] @ (w[:done] - q[:done]))
        torch.testing.assert_close(rows.double(), best[: len(rows)], rtol=1e-4, atol=1e-6)
        done += len(rows)


@pytest.mark.parametrize("shape", [(24, 48), (16, 160), (5, 272), (1, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_less_error_than_the_sweep_over_scales(shape, dtype):
    w, h = weight(*shape).to(dtype), hessian(300, shape[1])
    ours, sweep = gptq.quantize(w, h), nvfp4.quantize(w, "activation", None, h.diagonal())
    assert torch.equal(ours[2], sweep[2])
    errors = [float(gptq.objective(w, dense(parts), h).sum()) for parts in (ours, sweep)]
    # One block is nothing but the sweep, then the refinement, which may find nothing.
    assert errors[0] < 0.9 * errors[1] if shape[1] > 16 else errors[0] <= errors[1]


def test_refinement_never_raises_the_error_of_a_row():
    w, h = weight(32, 160), damped_of(hessian(300, 160))
    _, scale, g = nvfp4.quantize(w, "mse")
    codes = scale.view(torch.uint8)
    start = dense((_, scale, g))
    q, after = gptq._refine(w, h, start.clone(), codes.clone(), g)
    before, now = gptq.objective(w, start, h), gptq.objective(w, q, h)
    assert bool((now <= before).all())
    assert float(now.sum()) < 0.8 * float(before.sum())
    # What it returns is on the grid of the scales that it returns.
    steps = q.unflatten(-1, (-1, 16)) / (after.view(nvfp4.SCALE_DTYPE).float() * g)[..., None]
    torch.testing.assert_close(steps, e2m1.round_to_grid(steps), rtol=1e-5, atol=1e-6)
    # A row that is as good as it can be made stays: nothing is left for another run.
    again, _ = gptq._refine(w, h, q.clone(), after.clone(), g)
    assert bool((gptq.objective(w, again, h) <= now * (1 + 1e-6)).all())


def test_a_shared_global_scale_is_used():
    w, h = weight(8, 32), hessian(100, 32)
    g = w.abs().amax() / (6 * 200)
    assert torch.equal(gptq.quantize(w, h, g)[2], g)


def test_channels_and_rows_that_are_dead():
    w, h = weight(6, 64), hessian(100, 64)
    h[:, 20:40] = 0
    h[20:40] = 0
    w[2] = 0
    q = dense(gptq.quantize(w, h))
    assert torch.isfinite(q).all()
    assert not q[2].any()
    # A channel that nothing excited is rounded as well as the scale of its block allows.
    assert float((q - w)[:, 20:40].norm()) < 0.2 * float(w[:, 20:40].norm())


@pytest.mark.parametrize("h", [torch.zeros(32, 32), torch.ones(32, 32), hessian(3, 32)], ids=["no input", "one input", "three inputs"])
def test_singular_hessians(h):
    w = weight(4, 32)
    assert float((dense(gptq.quantize(w, h)) - w).norm()) < 0.2 * float(w.norm())


# --- 2:4-sparse ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_dropped_weights_of_dead_channels_change_nothing(seed):
    """Where channels that are dropped excite nothing, what they hold changes no bit of what is kept."""
    w, h = weight(3, 64, seed), hessian(200, 64, seed)
    keep = torch.tensor([False, False, True, True]).repeat(16).expand(3, 64)
    dropped = ~keep[0]
    h[dropped] = 0
    h[:, dropped] = 0
    other = torch.where(keep, w, weight(3, 64, seed + 9))
    q, same = (sparse24.dequantize_sparse24(*gptq.quantize_sparse24(m, h, sparse24.quantize_sparse24(m, keep)), torch.float32) for m in (w, other))
    assert not q[:, dropped].any() and q.any()
    assert torch.equal(q, same)


@pytest.mark.parametrize(("method", "ratio"), [("wanda", 0.97), ("sparsegpt", 0.95), ("admm", 0.95)])
def test_less_error_than_the_pruner(method, ratio):
    """On its pattern: of wanda, which makes nothing good, and of those whose scales are chosen before what is left."""
    w, h = weight(24, 160), hessian(400, 160)
    before = getattr(pruning, method)(w, h, "activation")
    after = gptq.quantize_sparse24(w, h, before)
    sparse24.check_parts(*after)
    assert torch.equal(after.meta, before.meta) and torch.equal(after.global_scale, before.global_scale)
    h = damped_of(h).float()
    was, now = (gptq.objective(w, sparse24.dequantize_sparse24(*p, torch.float32), h) for p in (before, after))
    assert bool((now <= was * (1 + 1e-6)).all())
    assert float(now.sum()) < ratio * float(was.sum())


def test_sparse_refusals():
    w = weight(4, 32)
    start = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w))
    with pytest.raises(NonFiniteError, match="weight"):
        gptq.quantize_sparse24(w.index_fill(1, torch.tensor([3]), float("nan")), torch.eye(32), start)
    with pytest.raises(ShapeError, match="second moments of its inputs"):
        gptq.quantize_sparse24(w, torch.eye(16), start)
    none = torch.empty(0, 32)
    assert gptq.quantize_sparse24(none, torch.eye(32), sparse24.quantize_sparse24(none, none.bool())).values.shape == (0, 8)


def test_nothing_to_quantize():
    qdata, scale, _ = gptq.quantize(torch.empty(0, 32), torch.eye(32))
    assert qdata.shape == (0, 16)
    assert scale.shape == (0, 2)


def test_refusals():
    w = weight(4, 32)
    with pytest.raises(ShapeError, match="second moments of its inputs"):
        gptq.quantize(w, torch.eye(16))
    with pytest.raises(ShapeError, match="gradients G"):
        gptq.quantize(w, torch.eye(32), outputs=torch.eye(32))
    with pytest.raises(ShapeError, match="gradients G"):
        gptq.quantize(w, torch.eye(32), outputs=lambda: torch.eye(32))
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        gptq.quantize(w, torch.eye(32), outputs=torch.full((4, 4), float("inf")))
    with pytest.raises(ShapeError, match="multiple of 16"):
        gptq.quantize(weight(4, 24), torch.eye(24))
    with pytest.raises(NonFiniteError, match="Hessian"):
        gptq.quantize(w, torch.full((32, 32), float("nan")))
    with pytest.raises(NonFiniteError, match="weight"):
        gptq.quantize(torch.full((4, 32), float("inf")), torch.eye(32))

"""Pruning against calibration data: what is kept, what it costs, and inputs that are degenerate."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4_inductor import errors
from fp4_inductor.formats import nvfp4, pruning, sparse24
from fp4_inductor.formats.hessian import damped, output_error

METHODS = {"magnitude": pruning.magnitude, "wanda": pruning.wanda, "sparsegpt": pruning.sparsegpt, "admm": pruning.admm}


def _problem(n: int = 24, k: int = 160, rows: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and the Hessian of correlated inputs of uneven size, as a layer of a language model has them."""
    generator = torch.Generator().manual_seed(5)
    mix = torch.randn(k, k, generator=generator) * torch.logspace(0, -2, k)
    x = torch.randn(rows, k, generator=generator) @ mix.t() * torch.logspace(-1, 0.5, k)[torch.randperm(k, generator=generator)]
    return torch.randn(n, k, generator=generator), x.t() @ x / rows


def _dense(parts: sparse24.Sparse24Parts) -> torch.Tensor:
    return sparse24.dequantize_sparse24(*parts, dtype=torch.float32)


@pytest.mark.parametrize("method", METHODS)
def test_two_of_four_are_kept_in_fp4(method):
    w, h = _problem()
    parts = METHODS[method](w, h)
    sparse24.check_parts(*parts)
    sparse24.validate_meta(parts.meta)
    q = _dense(parts)
    assert sparse24.is_24(q)
    assert not q[~sparse24.mask_of(parts.meta)].any()
    assert (q[sparse24.mask_of(parts.meta)] != 0).float().mean() > 0.8  # what is kept is used


def test_each_method_is_better_than_the_one_before():
    w, h = _problem()
    found = [output_error(w, _dense(prune(w, h, "activation")), h) for prune in METHODS.values()]
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.75 * found[1]  # making good what was dropped is worth more than choosing it well
    assert found[3] < 0.95 * found[2]


def test_the_mask_of_wanda_weighs_the_inputs():
    w = torch.ones(1, 32)
    h = torch.diag(torch.tensor([1.0, 4.0, 2.0, 3.0]).repeat(8))
    assert sparse24.mask_of(pruning.wanda(w, h).meta).view(8, 4).int().tolist() == [[0, 1, 0, 1]] * 8


@pytest.mark.parametrize("method", ["sparsegpt", "admm"])
def test_a_weight_that_is_sparse_fp4_already_comes_back(method):
    _, h = _problem()
    w = _dense(sparse24.quantize_sparse24(torch.randn(24, 160), sparse24.magnitude_mask(torch.randn(24, 160)), "activation", None, h.diagonal()))
    q = _dense(METHODS[method](w, h))
    assert output_error(w, q, h) < 0.03


def test_refine_finds_the_best_value_of_one_entry():
    """With one entry free, coordinate descent must find what trying all fifteen values finds."""
    w, h = _problem(4, 32)
    h = damped(h).float()
    scale = torch.full((4, 2), 0.31)
    free = torch.zeros(4, 32, dtype=torch.bool)
    free[:, 7] = True
    q = pruning.refine(w, h, torch.zeros(4, 32), free, scale)
    grid = 0.31 * torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    tried = torch.zeros(4, 15, 32)
    tried[:, :, 7] = torch.cat((grid, -grid[1:]))
    d = w[:, None] - tried
    best = tried[torch.arange(4), torch.einsum("nck,kl,ncl->nc", d, h, d).argmin(1)]
    torch.testing.assert_close(q, best)


@pytest.mark.parametrize("scale", [None, torch.full((24, 10), 0.4)])
def test_refine_never_raises_the_error(scale):
    w, h = _problem()
    h = damped(h).float()
    mask = sparse24.magnitude_mask(w)
    q = w * mask if scale is None else nvfp4.dequantize(*nvfp4.quantize(w * mask, global_scale=torch.tensor(0.1)), torch.float32) * 0
    found = []
    for _ in range(5):
        found.append(((w - q) @ h * (w - q)).sum().item())
        q = pruning.refine(w, h, q, mask, scale, sweeps=1)
        assert not q[~mask].any()
    assert all(b <= a * (1 + 1e-5) for a, b in itertools.pairwise(found))
    assert found[-1] < 0.7 * found[0]


def _zero_row(w, h):
    w[3] = 0
    return w, h


def _zero_block(w, h):
    w[:, 16:48] = 0
    return w, h


def _dead_channels(w, h):
    h[16:80] = 0
    h[:, 16:80] = 0
    return w, h


def _zero_hessian(w, h):
    return w, h * 0


def _one_row(w, h):
    x = torch.randn(1, w.shape[1])
    return w, x.t() @ x


def _tiny(w, h):
    return w * 1e-30, h * 1e-12


def _huge(w, h):
    return w * 1e30, h * 1e6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degenerate", [_zero_row, _zero_block, _dead_channels, _zero_hessian, _one_row, _tiny, _huge])
def test_degenerate_inputs(method, degenerate):
    w, h = degenerate(*_problem())
    parts = METHODS[method](w, h)
    sparse24.validate_meta(parts.meta)
    assert not (parts.scale.view(torch.uint8) & 0x7F == 0x7F).any()
    q = _dense(parts)
    assert torch.isfinite(q).all()
    assert sparse24.is_24(q)
    if degenerate is _zero_row:
        assert not q[3].any()
    if degenerate is _dead_channels:  # nothing is known about them: kept by magnitude, and no worse than FP4
        dead = w[:, 16:80]
        assert output_error(dead, q[:, 16:80], None) < 0.6


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "admm"])
def test_refused(method):
    w, h = _problem()
    with pytest.raises(errors.ShapeError, match="Hessian of its inputs"):
        METHODS[method](w, h[:32, :32])
    with pytest.raises(errors.ShapeError, match="Pad K"):
        METHODS[method](w[:, :48], h[:48, :48])
    bad = h.clone()
    bad[3, 3] = torch.nan
    with pytest.raises(errors.NonFiniteError):
        METHODS[method](w, bad)
    with pytest.raises(errors.NonFiniteError):
        METHODS[method](torch.full_like(w, torch.inf), h)


def test_a_hessian_that_is_none_is_refused():
    _, h = _problem()
    with pytest.raises(errors.NonFiniteError, match="positive semi-definite"):
        damped(-h - 1e6 * torch.ones_like(h))


def test_output_error():
    w, h = _problem()
    x = torch.linalg.cholesky(damped(h)).t()
    q = w + 0.1 * torch.randn_like(w)
    want = ((w - q).double() @ x.t()).norm() / (w.double() @ x.t()).norm()
    assert output_error(w, q, damped(h).float()) == pytest.approx(float(want), rel=1e-4)
    assert output_error(w, q, None) == pytest.approx(float((w - q).norm() / w.norm()), rel=1e-5)
    assert output_error(w * 0, w * 0, h) == 0.0

"""10^5 random and adversarial tensors: finite in, finite out, whatever the magnitude.

One 3-D call quantizes many tensors, each with its own global scale.
"""

import functools

import pytest
import torch

from fp4_inductor.formats import nvfp4

PER_KIND = 2_000
SHAPE = (2, 32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _signs(generator):
    return torch.randint(0, 2, (PER_KIND, *SHAPE), generator=generator) * 2.0 - 1


def _log_uniform(low, high, shape, generator):
    """Magnitudes 10 ** uniform(low, high), saturated to float32's range."""
    exponent = torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=generator)
    return (10.0**exponent).clamp(max=torch.finfo(torch.float32).max).float()


def _one_hot(generator):
    w = torch.zeros(PER_KIND, SHAPE[0] * SHAPE[1])
    w.scatter_(1, torch.randint(0, w.shape[1], (PER_KIND, 1), generator=generator), _log_uniform(-45, 38.5, (PER_KIND, 1), generator))
    return w.view(PER_KIND, *SHAPE)


def _zero_blocks(generator):
    w = torch.randn(PER_KIND, *SHAPE, generator=generator)
    return w * (torch.rand(PER_KIND, SHAPE[0], SHAPE[1] // 16, 1, generator=generator) < 0.5).expand(-1, -1, -1, 16).flatten(-2)


def _extremes(generator):
    """Only the values at which something happens: zeros, the smallest and largest numbers, one ulp around code limits."""
    info = torch.finfo(torch.float32)
    pool = torch.tensor([0.0, 1e-45, info.smallest_normal, 1e-38, 1e-30, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 2688.0, 448.0, 1e30, 3e38, info.max])
    return pool[torch.randint(0, len(pool), (PER_KIND, *SHAPE), generator=generator)] * _signs(generator)


KINDS = {
    "gaussian": lambda g: torch.randn(PER_KIND, *SHAPE, generator=g),
    "gaussian at every scale": lambda g: torch.randn(PER_KIND, *SHAPE, generator=g) * _log_uniform(-44, 37, (PER_KIND, 1, 1), g),
    "huge": lambda g: _log_uniform(37, 38.53, (PER_KIND, *SHAPE), g) * _signs(g),
    "tiny": lambda g: _log_uniform(-38, -30, (PER_KIND, *SHAPE), g) * _signs(g),
    "denormal": lambda g: _log_uniform(-45, -38, (PER_KIND, *SHAPE), g) * _signs(g),
    "mixed magnitudes": lambda g: _log_uniform(-38, 38.5, (PER_KIND, *SHAPE), g) * _signs(g),
    "one hot": _one_hot,
    "constant": lambda g: _log_uniform(-45, 38.5, (PER_KIND, 1, 1), g).expand(-1, *SHAPE),
    "alternating signs": lambda g: _log_uniform(-45, 38.5, (PER_KIND, 1, 1), g) * torch.tensor([1.0, -1.0]).repeat(SHAPE[1] // 2).expand(SHAPE),
    "zero blocks": _zero_blocks,
    "extremes": _extremes,
    "all zero": lambda g: torch.zeros(PER_KIND, *SHAPE) * _signs(g),
}


@functools.cache
def tensors(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    w = torch.cat([make(generator) for make in KINDS.values()])
    return w.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def test_the_count():
    calls = len(DTYPES) * 3
    assert calls * PER_KIND * len(KINDS) >= 100_000
    w = tensors(torch.float32)
    assert torch.isfinite(w).all()
    assert (w.abs().amax((-2, -1)) == torch.finfo(torch.float32).max).sum() > PER_KIND // 2
    assert ((w != 0) & (w.abs() < torch.finfo(torch.float32).smallest_normal)).any((-2, -1)).sum() > PER_KIND


@pytest.mark.parametrize("search", ["amax", "four_over_six", "mse"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_in_finite_out(dtype, search):
    w = tensors(dtype)
    qdata, scale, g = nvfp4.quantize(w, search)
    back = nvfp4.dequantize(qdata, scale, g, dtype)
    byte = scale.view(torch.uint8)

    assert (torch.isfinite(g) & (g > 0)).all()
    assert not (byte >= 0x7F).any()  # no NaN byte, no negative scale
    assert torch.isfinite(back).all()
    # Zero stays zero, and a zero block keeps scale byte 0.
    assert not back[w == 0].any()
    blocks = w.unflatten(-1, (-1, 16))
    assert torch.equal(byte == 0, (blocks == 0).all(-1))
    # No sign is ever flipped, and no element is off by more than the coarsest step allows.
    assert not (torch.sign(back) * torch.sign(w) < 0).any()
    unit = g[:, None, None, None].double()
    amax = blocks.double().abs().amax(-1, keepdim=True)
    # Half the step from 4 to 6 is amax / 6, or amax / 4 under amax/4; a block just below 9 units of the smallest scale 2^-9
    # saturates at 6 of them: amax / 3.
    allowed = (amax / 3).maximum(unit * 2.0**-8)
    assert ((back.unflatten(-1, (-1, 16)).double() - blocks.double()).abs() <= allowed).all()


@pytest.mark.parametrize("search", ["amax", "four_over_six", "mse"])
@pytest.mark.parametrize("g", [1e-45, 1e-38, 1.0, 3e38])
def test_a_given_global_scale_of_any_size_saturates_and_stays_finite(search, g):
    w = tensors(torch.float32)[::7]
    qdata, scale, given = nvfp4.quantize(w, search, torch.full((w.shape[0],), g))
    assert (given == torch.tensor(g)).all()
    assert not (scale.view(torch.uint8) >= 0x7F).any()
    largest = 2688 * float(torch.tensor(g))
    back = nvfp4.dequantize(qdata, scale, given, torch.float32)
    assert not torch.isnan(back).any()
    assert (back.abs().double() <= largest).all() or largest > torch.finfo(torch.float32).max

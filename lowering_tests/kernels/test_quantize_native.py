"""fp4.quantize on a CPU: the C routine against the definition in ATen, bit for bit, with every instruction set that runs here."""

from __future__ import annotations

import platform
import subprocess

import pytest
import torch

from fp4_inductor import errors
from fp4_inductor.formats import e2m1, nvfp4
from fp4_inductor.kernels import build
from fp4_inductor.kernels.quantize import cpu

FLAGS = {"generic": ("-fopenmp",)}
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS["avx2"] = ("-march=native", "-mno-avx512f", "-fopenmp")
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
ALL_BF16 = ALL_BF16[torch.isfinite(ALL_BF16)]
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@pytest.fixture(params=("native", *FLAGS), autouse=True)
def path(request, monkeypatch):
    if request.param != "native":
        library = cpu.opened(build.shared_library(cpu.SOURCE, (*cpu.FLAGS, *FLAGS[request.param])))
        assert library.fp4_quantize_isa() != b"avx512"
        monkeypatch.setattr(cpu, "_library", lambda: library)
    else:
        assert cpu._library() is not None
    return request.param


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)


def _same(w: torch.Tensor, search: str, global_scale=None, channel_weight=None) -> None:
    got = torch.ops.fp4.quantize(w, search, global_scale, channel_weight)
    want = nvfp4.quantize(w, search, global_scale, channel_weight)
    for g, t in zip(got, want, strict=True):
        assert g.dtype == t.dtype
        assert g.shape == t.shape
        assert torch.equal(_bits(g), _bits(t))


def _channels(search: str, k: int):
    return torch.rand(k).square() if search == "activation" else None


@pytest.mark.parametrize("search", nvfp4.SCALE_SEARCHES)
@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
@pytest.mark.parametrize("shape", [(16, 64), (37, 48), (3, 20, 32), (1, 16), (2, 1, 16), (33, 1040)])
def test_random_weights(shape, dtype, search):
    w = torch.randn(shape)
    for values in (w, w * torch.exp(4 * torch.randn(shape)), (w * 4).round() / 4, w * 1e-37, torch.where(w > 0, w, -0.0)):
        values = values.to(dtype)
        if torch.isfinite(values).all():
            _same(values, search, None, _channels(search, shape[-1]))


@pytest.mark.parametrize("search", nvfp4.SCALE_SEARCHES)
def test_every_bfloat16(search):
    """In order of magnitude, so that blocks hold neighbours, and shuffled, so that they hold all magnitudes; whole and cut to one binade range."""
    for values in (ALL_BF16, ALL_BF16[torch.randperm(len(ALL_BF16))], ALL_BF16[(ALL_BF16.abs() < 16) & (ALL_BF16.abs() > 2**-12)]):
        w = values[: len(values) // 480 * 480].reshape(-1, 480)
        _same(w, search, None, _channels(search, 480))
        _same(w, search, torch.tensor(0.37), _channels(search, 480))


def test_both_sides_of_every_tie_with_every_scale():
    """The block's maximum 6 s asks for the scale s; the others lie up to three ulps beside each tie."""
    s = torch.arange(1, 127, dtype=torch.uint8).view(nvfp4.SCALE_DTYPE).float()
    exact = torch.tensor(TIES)[None, :] * s[:, None]
    near = (exact.view(torch.int32)[..., None] + torch.arange(-3, 4, dtype=torch.int32)).view(torch.float32).reshape(126, -1)
    near = torch.cat([near, torch.zeros(126, 60 - near.shape[1])], 1).reshape(126, 4, 15)
    for sign in (1.0, -1.0):
        w = torch.cat([near * sign, (6 * s)[:, None, None].expand(126, 4, 1)], -1).reshape(126, 64)
        _same(w, "amax", torch.tensor(1.0))
        assert torch.equal(torch.ops.fp4.quantize(w, "amax", torch.tensor(1.0))[1][:, 0].float(), s)


@pytest.mark.parametrize("search", nvfp4.SCALE_SEARCHES)
def test_outliers_zeros_and_scales_that_overflow(search):
    w = torch.randn(40, 96)
    w[3, 5], w[7], w[9, 32:48] = 1e30, 0.0, 0.0
    w[11] *= 1e-42
    channels = _channels(search, 96)
    _same(w, search, None, channels)
    _same(w, search, torch.tensor(1e-20), channels)  # everything saturates, and the largest overflows float32
    _same(w, search, torch.tensor(1e20), channels)  # everything becomes zero
    _same(w[:, ::2], search, None, None if channels is None else channels[::2])
    _same(w.t().contiguous().t(), search, None, channels)
    _same(w[:0], search, None, channels)


def test_the_number_of_threads_changes_nothing():
    w, before = torch.randn(65, 256), torch.get_num_threads()
    want = torch.ops.fp4.quantize(w, "mse")
    try:
        torch.set_num_threads(3)
        assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(torch.ops.fp4.quantize(w, "mse"), want, strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("w", "search", "error"),
    [
        (torch.full((4, 32), float("nan")), "amax", errors.NonFiniteError),
        (torch.zeros(4, 24), "amax", errors.ShapeError),
        (torch.zeros(4, 32).double(), "amax", errors.DTypeError),
        (torch.zeros(4, 32), "best", errors.ConfigError),
        (torch.zeros(4, 32), "activation", errors.ConfigError),
    ],
)
def test_bad_input_is_the_definitions_error(w, search, error):
    with pytest.raises(error):
        torch.ops.fp4.quantize(w, search)


def test_without_a_compiler_the_definition_runs(monkeypatch):
    monkeypatch.setattr(cpu, "_library", lambda: None)
    _same(torch.randn(5, 32), "mse")


def _round_by_steps(x: torch.Tensor) -> torch.Tensor:
    """The grid by its definition: the step is 1/2 below 2, 1 below 4, else 2."""
    a = x.abs().clamp(max=6.0)
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x)


def test_round_to_grid_is_the_definition():
    ties = torch.tensor(TIES).view(torch.int32)[:, None] + torch.arange(-4096, 4097, dtype=torch.int32)
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3e38, float("inf"), -float("inf")])
    for x in (ALL_BF16.float(), ties.view(torch.float32), -ties.view(torch.float32), extremes, torch.randn(1 << 16) * 3):
        kept = x.clone()
        assert torch.equal(e2m1.round_to_grid(x).view(torch.int32), _round_by_steps(x).view(torch.int32))
        assert torch.equal(x.view(torch.int32), kept.view(torch.int32))


def test_a_weight_is_quantized_by_the_routine(monkeypatch):
    """The definition takes twenty times as long: it must not run where the routine does."""

    def definition(*args):
        raise AssertionError("the definition ran")

    monkeypatch.setattr(cpu.contract, "reference", definition)
    monkeypatch.setattr(nvfp4, "quantize", definition)
    for search in ("amax", "four_over_six", "mse"):
        torch.ops.fp4.quantize(torch.randn(64, 128).bfloat16(), search)


def test_the_source_compiles_without_warnings(path, tmp_path):
    flags = cpu.FLAGS + (FLAGS.get(path) or ("-march=native", "-fopenmp"))
    source = build.csrc_dir() / cpu.SOURCE
    command = [build.compiler(), "-O2", "-Wall", "-Wextra", "-Wno-psabi", "-shared", "-fPIC", *flags, str(source), "-o", str(tmp_path / "q.so"), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""

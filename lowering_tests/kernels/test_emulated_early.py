"""Programmatic dependent launch on a CPU (emulator.py): nothing but weights is touched before the kernel before has finished."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.kernels.params import LinearParams
from fp4_inductor.ops import linear, quantize_rows_fp8
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, linear_fields
from lowering_tests.kernels.test_emulated_linear import BF16, TABLE, WIDE, error, weight

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
WIDE_FP8 = "gemm/linear_wide_fp8.cu"
CODES_AND_SCALES = ("codes", "scale")


def run(kernel: Emulated, x, w, bias, tile, constants=CODES_AND_SCALES) -> torch.Tensor:
    out = torch.full((x.shape[0], w[0].shape[0]), float("nan"), dtype=x.dtype)
    return kernel.run(LinearParams, dict(linear_fields(x, w, bias, tile), early=1), out, constants=constants)


@pytest.mark.parametrize(
    ("source", "tile"), [(TABLE, (2, 2, 4, 1)), (TABLE, (2, 2, 4, 4)), (TABLE, (0, 0, 0, 0)), (WIDE, (128, 32, 2, 1)), (WIDE, (256, 32, 1, 0))], ids=str
)
def test_only_codes_and_block_scales_are_read_early(source, tile):
    for m, n, k in ((3, 70, 768), (9, 33, 2304)) if tile != (2, 2, 4, 4) else ((3, 70, 1024), (9, 33, 5120)):
        x, w, bias = torch.randn(m, k).to(BF16), weight(n, k), torch.randn(n).to(BF16)
        y = run(emulated(source), x, w, bias, tile)
        assert error(y, x, w, bias) <= 2 * linear.CONTRACT.tolerance[BF16]


def test_weights_are_fetched_early():
    x, w = torch.randn(3, 768).to(BF16), weight(70, 768)
    with pytest.raises(EmulatorError, match="read of global memory before the previous kernel"):
        run(emulated(TABLE), x, w, None, (2, 2, 4, 1), constants=())


def test_activations_in_e4m3_and_their_scales_are_read_behind_the_kernel_before():
    kernel, x, w = emulated(WIDE_FP8), quantize_rows_fp8.reference(torch.randn(20, 512)), weight(40, 512)
    out = torch.empty(20, 40, dtype=BF16)
    given = dict(linear_fields(x[0], w, None, (128, 1)), x_scale=x[1])
    calls = [kernel.run(LinearParams, dict(given, early=early), out, constants=CODES_AND_SCALES) for early in (1, 0)]
    assert torch.equal(*calls)


EARLY = "global memory before the previous"
CAUGHT = [
    (TABLE, "FETCH_BEFORE_PDL_WAIT", f"read of {EARLY}"),
    (TABLE, "STORE_BEFORE_PDL_WAIT", f"(read|write) of {EARLY}"),
    (TABLE, "TRIGGER_BEFORE_PDL_WAIT", "before this one has waited"),
    (WIDE, "CLEAR_FLAGS_BEFORE_PDL_WAIT", f"write of {EARLY}"),
    (WIDE, "FETCH_BEFORE_PDL_WAIT", f"read of {EARLY}"),
    (WIDE, "STORE_BEFORE_PDL_WAIT", f"(read|write) of {EARLY}"),
]


@pytest.mark.parametrize(("source", "fault", "words"), CAUGHT)
def test_a_missing_wait_is_caught(source, fault, words):
    x, w, kernel = torch.randn(8, 768).to(BF16), weight(33, 768), emulated(source)
    tile = (2, 2, 4, 1) if source == TABLE else (256, 32, 1, 0) if "FLAGS" in fault else (128, 32, 2, 1)
    emulator.check_caught(kernel, fault, words, lambda: error(run(kernel, x, w, None, tile), x, w, None))

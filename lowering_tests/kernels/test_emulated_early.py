"""Programmatic dependent launch on a CPU (emulator.py): nothing but weights is touched before the kernel before has finished."""

from __future__ import annotations

import shutil

import pytest
import torch

from fp4_inductor._sources import csrc_dir
from fp4_inductor.ops import linear
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated
from lowering_tests.kernels.test_emulated_linear import BF16, MID, SMALL, error, weight

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
EARLY = ("-DFP4_PDL=1",)
# x, q, scale, global_scale, bias: what belongs to the layer
CODES_AND_SCALES = (1, 2)


def run(kernel: Emulated, x, w, bias, tile, constants=CODES_AND_SCALES) -> torch.Tensor:
    (m, k), n = x.shape, w[0].shape[0]
    out = torch.full((m, n), float("nan"), dtype=x.dtype)
    return kernel.call(kernel.function, (x, *w, bias, None, None), out, m, n, k, 0, 0, 0, 0, *tile, constants=constants)


@pytest.mark.parametrize(("source", "tile"), [(SMALL, (4, 8, 2)), (MID, (2, 64, 2, 4, 2))], ids=["small", "mid"])
def test_only_codes_and_block_scales_are_read_early(source, tile):
    for m, n, k in ((3, 70, 576), (9, 33, 1088)):
        x, w, bias = torch.randn(m, k).to(BF16), weight(n, k), torch.randn(n).to(BF16)
        y = run(emulated(source, 90, EARLY), x, w, bias, tile)
        assert error(y, x, w, bias) <= 2 * linear.CONTRACT.tolerance[BF16]
        with pytest.raises(EmulatorError, match="read of global memory before the previous kernel"):
            run(emulated(source, 90, EARLY), x, w, bias, tile, constants=())  # it does prefetch


def test_sm_80_has_no_such_launch():
    x, w = torch.randn(3, 576).to(BF16), weight(40, 576)
    assert error(run(emulated(SMALL, 80, EARLY), x, w, None, (2, 16, 2), constants=()), x, w, None) <= 2 * linear.CONTRACT.tolerance[BF16]


LINE = "  wait_for_previous();  // it may have written x, and may still read y; it does not write weights\n"
BROKEN = {
    "nobody waits": (LINE, "", "read of global memory"),
    "one warp does not wait": (LINE, "  if (warp) wait_for_previous();\n", "read of global memory"),
    "activations are read before": (LINE + "  let_next_begin();\n  if (kAhead == 2 && exists(warp)) fetch_x(warp, xs[0]);\n",
                                    "  if (kAhead == 2 && exists(warp)) fetch_x(warp, xs[0]);\n" + LINE, "read of global memory"),
    "no activations, no wait": (LINE, "  if (exists(warp)) wait_for_previous();\n", "(read|write) of global memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_missing_wait_is_caught(case, tmp_path):
    old, new, words = BROKEN[case]
    shutil.copytree(csrc_dir(), tmp_path / "csrc")
    path = tmp_path / "csrc" / SMALL
    text = path.read_text()
    assert text.count(old) == 1, "the line to break is gone"
    path.write_text(text.replace(old, new).replace(": run(__half())", ": cudaErrorInvalidValue"))
    x, w = torch.randn(8, 576).to(BF16), weight(33, 576)
    with pytest.raises(EmulatorError, match=f"{words} before the previous kernel"):
        run(Emulated(path, 90, EARLY), x, w, None, (2, 16, 2))

"""bounds(): the numbers of rows at which kernels change, for shapes and for models, with no GPU."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Experts, FP4Linear, FP8Linear, Sparse24Linear, bounds, dispatch
from fp4_inductor.config import DispatchConfig
from fp4_inductor.errors import ConfigError
from fp4_inductor.kernels.select import Call, plan
from fp4_inductor.modules import pack_siblings
from fp4_inductor.modules.experts import FP4ExpertWeight
from fp4_inductor.ops.activation import Activation

BF16 = torch.bfloat16
QWEN3_8B = [(6144, 4096), (4096, 4096), ("linear_glu", 24576, 4096), (24576, 4096), (4096, 12288)]


def test_an_8b_model_on_an_h100():
    assert bounds(QWEN3_8B, device="sm_90") == [1, 32, 64, 128, 8192]
    assert bounds(QWEN3_8B, device=90) == bounds(list(reversed(QWEN3_8B)) * 2, device="sm_90a")
    assert bounds([(4096, 4096)], device="sm_90", dtype=torch.float16) != bounds([(4096, 4096)], device="sm_90")
    assert bounds([(4096, 4096)], device="sm_90", prefill="bf16") == [1, 32, 256]


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_between_two_bounds_one_kernel_serves(arch):
    ends = bounds(QWEN3_8B, device=arch)
    assert ends == sorted(set(ends)) and ends[0] >= 1
    for op, n, k in (layer if len(layer) == 3 else ("linear", *layer) for layer in QWEN3_8B):
        found = plan(Call(op, arch, BF16, n, k), DispatchConfig())
        for low, high in zip([0, *ends], [*ends, 1 << 20], strict=True):
            assert found.pick(low + 1) is found.pick(high), (op, n, k, low, high)


def test_no_bound_at_which_nothing_changes():
    """cuda_small's two rows, to 16 and to 32, were a bound between a kernel and itself: a guard, and a compilation, for nothing."""
    assert bounds([(4096, 2880)], device="sm_90") == [1, 32, 128]
    for n, k in ((4096, 2880), (151936, 64), (512, 256), (8192, 8208)):
        for op in ("linear", "sparse_linear"):
            rows = plan(Call(op, 90, BF16, n, k), DispatchConfig()).rows
            assert not [a for a, b in itertools.pairwise(rows) if a.csrc and a.kernel == b.kernel]


def test_it_follows_the_config_in_force():
    with dispatch(thresholds={"gemv": 2, "small": 0, "wide": 0, "wide_fp8": 0, "mid": 100}):
        assert bounds([(4096, 4096)], device="sm_90") == [1, 2, 100]  # cuda_gemv serves one row, whatever the threshold


def test_a_cpu_has_one_kernel():
    assert bounds(QWEN3_8B, device="cpu") == bounds(QWEN3_8B, device=torch.device("cpu")) == []
    assert bounds([(4096, 4096)], device="cpu", prefill="nvfp4") != []


class Block(nn.Module):
    def __init__(self, device="meta"):
        super().__init__()
        options = dict(dtype=BF16, device=device)
        self.o_proj = FP4Linear(4096, 4096, **options)
        self.odd = Sparse24Linear(4090, 4096, **options)
        self.head = FP8Linear(4096, 151936, **options)
        self.norm = nn.LayerNorm(4096)


def test_a_model_is_asked_for_all_that_its_layers_may_become():
    shapes = [("linear", 4096, 4096), ("linear_epilogue", 4096, 4096), ("sparse_linear", 4096, 4096 // 32 * 32), ("linear_fp8", 151936, 4096)]
    assert bounds(Block(), device="sm_90") == bounds(shapes, device="sm_90")
    assert bounds(Block(), device="sm_90", prefill="bf16") == bounds(shapes, device="sm_90", prefill="bf16")
    assert bounds(nn.Linear(4, 4), device="sm_90") == []


def test_siblings_are_merged_and_their_own_prefill_counts():
    layers = [FP4Linear(256, 512, dtype=BF16, prefill="bf16") for _ in range(2)]
    model = nn.ModuleList(layers)
    pack_siblings(layers)
    shapes = [(op, n, 256) for n in (512, 1024) for op in ("linear", "linear_epilogue")] + [("linear_glu", 1024, 256)]
    assert bounds(model, device="sm_90") == bounds(shapes, device="sm_90", prefill="bf16")
    assert 256 in bounds(model, device="sm_90") and 8192 not in bounds(model, device="sm_90")


def test_experts_choose_at_each_call():
    weights = FP4ExpertWeight(4, 256, 128, device="meta"), FP4ExpertWeight(4, 128, 128, device="meta")
    assert bounds(nn.ModuleList([FP4Experts(*weights, Activation())]), device="sm_90") == []


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ([(64,)], {}, "not the shape of a layer; got .64,."),
        ([("conv", 64, 64)], {}, "not the shape of a layer.*linear_glu"),
        ([(0, 64)], {}, "not the shape of a layer"),
        ([(64.0, 64)], {}, "not the shape of a layer"),
        ([(64, 64)], {"device": "sm_75"}, "no such architecture; got 'sm_75'; accepted: sm_80 to sm_129"),
        ([(64, 64)], {"device": 900}, "no such architecture"),
        ([(64, 64)], {"device": "xpu"}, 'no kernels for this device; got .xpu.. accepted: "cpu", "cuda"'),
        ([(64, 64)], {"device": "h100"}, "no kernels for this device"),
        ([(64, 64)], {"device": "sm_90", "prefill": "fp4"}, "prefill is not a known choice"),
    ],
)
def test_what_it_refuses(layers, options, message):
    with pytest.raises(ConfigError, match=message):
        bounds(layers, **options)


def test_it_imports_no_inductor_and_starts_no_compiler():
    code = (
        "import sys, fp4_inductor; from fp4_inductor.kernels import csrc; csrc.start = lambda *a: 1 / 0; "
        f"assert fp4_inductor.bounds({QWEN3_8B!r}, device='sm_90'); "
        "assert 'torch._inductor.compile_fx' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_example_of_the_docstring():
    assert fp4_inductor.bounds([(6144, 4096), (4096, 4096), ("linear_glu", 28672, 4096), (4096, 14336)], device="sm_90") == [1, 32, 64, 128, 8192]

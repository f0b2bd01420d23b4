"""A kernel from outside of the package: CONTRIBUTING.md, "A kernel from outside"."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.config import DispatchConfig
from fp4_inductor.errors import ConfigError
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import registry
from fp4_inductor.kernels.kernel import ANY, IN_CI, Kernel, On
from fp4_inductor.kernels.select import Call, plan

calls = []


def product(x, qdata, scale, global_scale, bias=None):
    """``x [M, K] @ W.T + bias``: what a launcher of fp4.linear is given, and returns."""
    calls.append(x.shape[0])
    return torch.nn.functional.linear(x, nvfp4.dequantize(qdata, scale, global_scale, x.dtype), bias)


MINE = Kernel(
    "linear", "my_kernel", "mine", (On(0, 129, IN_CI, "a product of dequantized weights, for this test"),), ANY,
    k_multiple=32, until=lambda call: 4, launch=product,
)  # fmt: skip


@pytest.fixture
def registered():
    registry.register(MINE)
    yield
    registry.unregister(MINE)


def test_a_registered_kernel_serves_the_calls_that_it_asks_for(registered):
    calls.clear()
    weight = nvfp4.quantize(torch.randn(48, 64) / 8)
    for m, mine in ((1, True), (4, True), (5, False)):
        x = torch.randn(m, 64)
        y = torch.ops.fp4.linear(x, *weight)
        torch.testing.assert_close(y, x @ nvfp4.dequantize(*weight, torch.float32).T, rtol=1e-4, atol=1e-4)
        assert (calls == [m]) is mine
        calls.clear()
    compiled = torch.compile(lambda x: torch.ops.fp4.linear(x, *weight) * 2, fullgraph=True)
    compiled(torch.randn(3, 64))
    assert calls == [3]
    for arch in (0, 80, 90, 120):
        found = plan(Call("linear", arch, torch.float32, 48, 64), DispatchConfig())
        assert found.pick(4).kernel == "my_kernel" != found.pick(5).kernel
        refused = {r.kernel.name: r.reason for r in plan(Call("linear", arch, torch.float32, 48, 48), DispatchConfig()).refused}
        assert refused["my_kernel"] == "K = 48 is not a multiple of 32"
    assert plan(Call("linear", 0, torch.float32, 48, 64), DispatchConfig(thresholds={"mine": 0})).pick(1).kernel == "cpu"


def test_what_register_refuses(registered):
    with pytest.raises(ConfigError, match="my_kernel"):
        registry.register(MINE)
    with pytest.raises(ConfigError, match="until"):
        registry.register(Kernel("linear", "another", "mine", MINE.on, launch=product))
    with pytest.raises(ConfigError, match="launch"):
        registry.register(Kernel("linear", "another", "mine", MINE.on, until=lambda call: 1))
    assert plan(Call("linear", 0, torch.float32, 48, 64), DispatchConfig()).pick(1).kernel == "my_kernel"


def test_nothing_is_left_of_it():
    assert "my_kernel" not in {kernel.name for kernel in registry.kernels()}

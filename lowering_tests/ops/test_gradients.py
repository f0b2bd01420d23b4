"""Gradients of the activation and the bias equal those of F.linear on the dequantised weight; all others are refused."""

import pytest
import torch
import torch.nn.functional as F

import fp4_inductor  # noqa: F401
from fp4_inductor import errors
from fp4_inductor.formats import nvfp4
from fp4_inductor.ops.contract import CONTRACTS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def leaf(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


def close(a: torch.Tensor, b: torch.Tensor, dtype=torch.float32) -> None:
    assert a is not None
    assert (a.shape, a.dtype) == (b.shape, dtype)
    a, b = a.detach(), b.detach()
    assert float((a.double() - b.double()).norm()) <= RELATIVE[dtype] * float(b.double().norm()) + 1e-12


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(RELATIVE))
@pytest.mark.parametrize("lead", [(), (1,), (0,), (5,), (9,), (17,), (2, 3), (2, 1, 4)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(lead, dtype, with_bias, device):
    w = nvfp4.quantize(torch.randn(33, 80, device=device) / 9)
    x, bias = leaf(*lead, 80, dtype=dtype, device=device), leaf(33, dtype=dtype, device=device) if with_bias else None
    y = torch.ops.fp4.linear(x, *w, bias)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    x32, b32 = x.detach().float().requires_grad_(), None if bias is None else bias.detach().float().requires_grad_()
    F.linear(x32, nvfp4.dequantize(*w, torch.float32), b32).backward(upstream.float())
    close(x.grad, x32.grad, dtype)
    if with_bias:
        close(bias.grad, b32.grad, dtype)


@pytest.mark.parametrize("needs", ["x", "bias"])
def test_one_gradient_at_a_time(needs):
    w = nvfp4.quantize(torch.randn(16, 32))
    x, bias = torch.randn(3, 32).requires_grad_(needs == "x"), torch.randn(16).requires_grad_(needs == "bias")
    torch.ops.fp4.linear(x, *w, bias).sum().backward()
    assert (x.grad is not None, bias.grad is not None) == (needs == "x", needs == "bias")


def test_second_derivative():
    w = nvfp4.quantize(torch.randn(16, 32))
    x = leaf(3, 32)
    y = torch.ops.fp4.linear(x, *w)
    upstream = torch.randn_like(y).requires_grad_()
    (grad_x,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    (second,) = torch.autograd.grad(grad_x.square().sum(), upstream)
    dense = nvfp4.dequantize(*w, torch.float32)
    close(second, 2 * (upstream @ dense) @ dense.t())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(RELATIVE))
@pytest.mark.parametrize("shape", [(3, 5, 17, 48), (1, 1, 8, 16), (2, 0, 8, 32)])
def test_bmm(shape, dtype, device):
    e, m, n, k = shape
    w = nvfp4.quantize(torch.randn(e, n, k, device=device) / 7)
    x = leaf(e, m, k, dtype=dtype, device=device)
    y = torch.ops.fp4.bmm(x, *w)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    close(x.grad, upstream.float() @ nvfp4.dequantize(*w, torch.float32), dtype)


@pytest.mark.parametrize("name", ["linear", "linear_fp8", "sparse_linear", "bmm", "moe"])
def test_a_result_can_be_written_into(name):
    """``y += residual`` and ``y[mask] = 0`` in training: to autograd a result is no view."""
    contract = CONTRACTS[name]
    for _, args in contract.inputs(torch.device("cpu")):
        x = args[0].detach().clone().requires_grad_()
        y = contract.op(x, *args[1:])
        mask = torch.arange(y.shape[-1]) > 0
        (want,) = torch.autograd.grad(((y + 1) * mask).sum(), x)
        y = contract.op(x, *args[1:])
        y += 1
        y[..., :1] = 0
        (got,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(got, want)


def test_gradient_under_no_grad_and_inference_mode_is_not_recorded():
    w, x = nvfp4.quantize(torch.randn(16, 32)), leaf(3, 32)
    with torch.no_grad():
        assert not torch.ops.fp4.linear(x, *w).requires_grad
    with torch.inference_mode():
        assert not torch.ops.fp4.linear(x, *w).requires_grad
    assert torch.ops.fp4.linear(x, *w).requires_grad
    assert not torch.ops.fp4.linear(x.detach(), *w).requires_grad


Q, S, G = nvfp4.quantize(torch.ones(2, 8, 32))
FROZEN = {
    "linear, global_scale": (r"fp4.linear.*global_scale.*detach", lambda f: f.linear(torch.ones(3, 32), Q[0], S[0], G[0].clone().requires_grad_())),
    "linear, scale": (r"fp4.linear.*for scale", lambda f: f.linear(torch.ones(3, 32), Q[0], S[0].clone().requires_grad_(), G[0])),
    "bmm, global_scale": (r"fp4.bmm.*global_scale", lambda f: f.bmm(torch.ones(2, 3, 32), Q, S, G.clone().requires_grad_())),
    "dequantize, global_scale": (r"fp4.dequantize.*global_scale", lambda f: f.dequantize(Q, S, G.clone().requires_grad_(), torch.float32)),
    "quantize, w": (r"fp4.quantize.*for w", lambda f: f.quantize(torch.ones(8, 32, requires_grad=True))),
}


@pytest.mark.parametrize("case", FROZEN)
def test_a_gradient_that_cannot_be_given_is_refused_in_the_forward(case):
    """Never a silent None: the error comes before any result."""
    message, call = FROZEN[case]
    with pytest.raises(errors.UnsupportedOpError, match=message):
        call(torch.ops.fp4)
    with torch.no_grad():
        call(torch.ops.fp4)


@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", False), ("inductor", True)])
def test_compiled_training_step(backend, dynamic):
    """With dynamic=True the weight's own sizes are symbols, too."""
    w = nvfp4.quantize(torch.randn(24, 48) / 7)

    def step(x, bias, scale):
        return torch.ops.fp4.linear(torch.relu(x) * scale, *w, bias).square().mean()

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for m in (5, 9):
        x, bias, scale = leaf(m, 48), leaf(24), leaf(48)
        compiled(x, bias, scale).backward()
        got = [t.grad for t in (x, bias, scale)]
        want = torch.autograd.grad(F.linear(torch.relu(x) * scale, nvfp4.dequantize(*w, torch.float32), bias).square().mean(), (x, bias, scale))
        for a, b in zip(got, want, strict=True):
            close(a, b)

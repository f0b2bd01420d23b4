"""fp4.router and fp4.norm_router without a GPU: csrc/moe/router.cu on a CPU against float64, which calls it serves."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from fp4_inductor.config import DispatchConfig
from fp4_inductor.errors import KernelError
from fp4_inductor.kernels import csrc, params
from fp4_inductor.kernels.kernel import Call
from fp4_inductor.kernels.router import cuda
from fp4_inductor.kernels.router.cuda import Norm
from fp4_inductor.kernels.select import plan
from fp4_inductor.ops import router as contract
from fp4_inductor.ops.norm_linear import rms_norm_reference
from lowering_tests.kernels.emulator import EmulatorError, check_caught, compiler, emulated

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
needs_emulator = pytest.mark.skipif(compiler() is None, reason="needs g++")


def call(t: int, h: int, e: int, k: int, form: str = "normalized", dtype: torch.dtype = BF16, out: torch.dtype = F32, biased: bool = False) -> tuple:
    x, weight = torch.randn(t, h).to(dtype), (torch.randn(e, h) / h**0.5).to(dtype)
    return x, weight, torch.randn(e).to(dtype) if biased else None, k, form, out


def norm(x: torch.Tensor, offset: float = 0.0) -> Norm:
    return Norm(torch.randn(x.shape[1]).to(x.dtype), 1e-3, offset)


def run(args: tuple, given: Norm | None = None, early: bool = False) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """What the kernel writes: x normalised, weights, ids."""
    fields = cuda.fields(*args, early=early, norm=given)
    t, k = args[0].shape[0], args[3]
    ids = torch.full((t, k), -7)
    changed = [ids] if given is None else [ids, fields["normed"]]
    weights = emulated(cuda.LIBRARY.source, 90).run(
        params.RouterParams, fields | dict(ids=ids), torch.empty(t, k, dtype=args[5]), changed=changed, constants=("weight", "norm_weight") if early else ()
    )
    return fields.get("normed"), weights, ids


def check(args: tuple, given: Norm | None = None) -> float:
    """The chosen scores are the largest, best first; the weights are those of the chosen scores. Begun early: the same bits. The error of the weights."""
    x, weight, bias, k, form, _ = args
    normed, weights, ids = run(args, given)
    again = run(args, given, early=True)
    assert torch.equal(weights, again[1]) and torch.equal(ids, again[2])
    if given is not None:
        want = rms_norm_reference(x, given.weight, given.eps, given.offset)
        assert (normed.double() - want.double()).norm() <= 4e-3 * want.double().norm()
        x = normed
    scores = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    assert all(len(set(row)) == k and min(row) >= 0 and max(row) < weight.shape[0] for row in ids.tolist())
    near = 2.0 ** (-8 if x.dtype == BF16 else -11) * 2 * scores.abs().max()  # a score is rounded to the dtype of x
    chosen = scores.gather(1, ids)
    assert (chosen.sort(1, descending=True).values - scores.topk(k, 1).values).abs().max() <= near
    assert (chosen[:, 1:] <= chosen[:, :-1] + near).all()
    wide = scores.to(x.dtype).double()
    wide = wide.gather(1, ids).softmax(1) if form != "softmax" else wide.softmax(1).gather(1, ids)
    return ((weights.double() - wide).norm() / wide.norm()).item()


@needs_emulator
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("t", "h", "e", "k"),
    [
        *((1, 64, 8, 2), (3, 512, 16, 1), (8, 1056, 33, 5), (9, 2048, 128, 8), (17, 96, 60, 4)),
        *((8, 544, 112, 8), (2, 1000, 100, 32), (4, 8, 1, 1)),
    ],
)
def test_shapes(t, h, e, k, normed):
    """One expert to 128, one token to three clusters, K of less than a chunk, of no multiple of one, and of more than a lane has at once."""
    for form, dtype, out in (("normalized", BF16, F32), ("softmax", F16, F16), ("chosen", BF16, BF16)):
        args = call(t, h, e, k, form, dtype, out, biased=form == "chosen")
        assert check(args, norm(args[0], float(form == "softmax")) if normed else None) <= (1e-2 if dtype == BF16 else 2e-3)


@needs_emulator
def test_ties_and_order():
    """Of equal scores the lower index comes first, -0 as 0; the ids are those of a stable sort."""
    x, weight = torch.ones(8, 32, dtype=BF16), torch.zeros(128, 32, dtype=BF16)
    weight[:, 0] = torch.randint(-3, 4, (128,)).to(BF16)
    weight[5] = -0.0
    args = (x, weight, None, 8, "normalized", F32)
    _, weights, ids = run(args)
    want = contract.reference(*args)
    assert torch.equal(ids, want[1]) and torch.allclose(weights, want[0])


@needs_emulator
@pytest.mark.parametrize("form", contract.FORMS)
def test_nan_stays_in_its_token(form):
    x, weight, *rest = call(9, 64, 40, 4, form)
    x[2, 7], x[4, 9] = float("nan"), float("inf")
    for given in (None, norm(x)):
        _, weights, ids = run((x, weight, *rest), given)
        bad = [2, 4]
        assert weights[bad].isnan().all() and not weights[[0, 1, 3, 5, 6, 7, 8]].isnan().any()
        assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 40 for row in ids.tolist())


@needs_emulator
def test_infinite_scores():
    """A score of plus infinity makes its token's weights NaN; one of minus infinity is chosen last."""
    x, weight = torch.eye(8, 16).to(F16), torch.randn(24, 16).to(F16)
    bias = torch.zeros(24, dtype=F16)
    bias[3] = float("-inf")
    _, weights, ids = run((x, weight, bias, 24 - 1, "chosen", F32))
    assert (ids != 3).all() and not weights.isnan().any()
    bias[3] = float("inf")
    _, weights, ids = run((x, weight, bias, 2, "chosen", F32))
    assert (ids[:, 0] == 3).all() and weights.isnan().all()


@needs_emulator
def test_nothing_is_read_early():
    """Before its PDL wait the kernel reads weights if the call allows it, and nothing else."""
    kernel = emulated(cuda.LIBRARY.source, 90)
    check_caught(kernel, "STORE_BEFORE_PDL_WAIT", "before the previous kernel has finished", lambda: check(call(4, 64, 32, 4)))


@needs_emulator
@pytest.mark.parametrize(
    ("fault", "words"), [("SKIP_CLUSTER_BARRIER_BEFORE_CHOICE", ".*"), ("SKIP_BARRIER_BEFORE_WEIGHTS", ".*"), ("HALF_OF_THE_SQUARES", None)]
)
def test_a_broken_line_is_caught(fault, words):
    def error() -> float:
        x, *rest = call(8, 512, 128, 8)
        given = norm(x)
        got, *_ = run((x, *rest), given)
        want = rms_norm_reference(x, given.weight, given.eps, given.offset).double()
        return ((got.double() - want).norm() / want.norm()).item()

    check_caught(emulated(cuda.LIBRARY.source, 90), fault, words, error)


@needs_emulator
def test_refused_by_the_library():
    args = call(4, 64, 32, 4)
    kernel, fields = emulated(cuda.LIBRARY.source, 90), cuda.fields(*args)
    ids = torch.zeros(4, 4, dtype=torch.int64)
    for name, values in dict(tokens=(0, 1 << 16), experts=(129, 3), K=(60, 8200), top_k=(0, 33), form=(3,), weights_type=(3,)).items():
        for wrong in values:
            with pytest.raises(EmulatorError, match="status 1"):
                kernel.run(params.RouterParams, fields | {name: wrong, "ids": ids}, torch.empty(4, 4))


def test_a_launch_that_is_refused(monkeypatch):
    """What the library is given, and the error that names it, the call and the switch."""
    seen: list = []
    monkeypatch.setattr(csrc, "library", lambda name, arch: name)
    monkeypatch.setattr(params, "call", lambda library, function, filled, device: seen.append((library, function, filled.tokens)) or len(seen) - 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    args = call(4, 64, 32, 4)
    assert cuda.launch(*args)[0] is None
    with pytest.raises(KernelError, match=r"fp4_router was not launched; got cudaError 1 for x \(4, 64\), 32 experts, k = 4.*\{\"router\": 0\}"):
        cuda.launch(*args)
    assert seen == [("moe_router", "fp4_router", 4)] * 2


def test_which_calls_the_kernel_serves():
    def kernel(e: int = 128, h: int = 2048, tokens: int = 8, arch: int = 90, dtype: torch.dtype = BF16, **config) -> str:
        return plan(Call("router", arch, dtype, e, h), DispatchConfig(**config)).pick(tokens).kernel

    assert {kernel(), kernel(1), kernel(h=8192), kernel(dtype=F16), kernel(tokens=64)} == {cuda.NAME}
    others = kernel(129), kernel(h=8208), kernel(h=40), kernel(tokens=7), kernel(tokens=65), kernel(arch=80), kernel(arch=120), kernel(thresholds={"router": 0})
    assert set(others) == {"scores + choice"}

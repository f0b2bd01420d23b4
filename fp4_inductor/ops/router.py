"""``fp4.router(x [T, H], weight [E, H], bias [E]?, k, form, dtype, early) -> (weights [T, k] of dtype, ids int64 [T, k])``: which experts each token goes to.

The scores are ``x @ weight.T + bias``, rounded to the dtype of ``x`` as a linear layer rounds them. What follows is computed in float32; :data:`FORMS`:

- ``"softmax"``: of a softmax over all experts, the ``k`` largest;
- ``"normalized"``: those, divided by their sum (Mixtral, Qwen3-MoE, Qwen3-Next);
- ``"chosen"``: a softmax over the ``k`` largest scores (gpt-oss).

The best expert comes first; of equal ones the lower index, no index twice. A token with a NaN among its scores has NaN weights and distinct ids in range.
``early``: the kernel before on the stream does not write ``weight``, which may be read while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ConfigError, DTypeError, ShapeError
from ..formats import nvfp4
from . import topk
from .contract import OpContract, no_gradient, refuse_gradient

FORMS = ("softmax", "normalized", "chosen")
HALF = (torch.bfloat16, torch.float16)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, form: str, dtype: torch.dtype, early: bool = False) -> tuple[Tensor, Tensor]:
    check(x, weight, bias, k, form, dtype)
    del early
    return chosen(torch.nn.functional.linear(x, weight, bias), k, form, dtype)


def chosen(scores: Tensor, k: int, form: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The choice among ``scores`` ``[T, E]``."""
    wide = scores.double() if scores.dtype == torch.float64 else scores.float()
    if form != "chosen":
        wide = wide.softmax(-1)
    order = wide.sort(stable=True, dim=-1, descending=True).indices[:, :k].clone(memory_format=torch.contiguous_format)
    weights = wide.gather(-1, order)
    if form == "normalized":
        weights = weights / weights.sum(-1, keepdim=True)
    elif form == "chosen":
        weights = weights.softmax(-1)
    return weights.to(dtype), order


def check(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, form: str, dtype: torch.dtype) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes and dtypes only."""
    experts = weight.shape[0] if weight.dim() == 2 else -1
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or experts > topk.MOST_SCORES:
        raise ShapeError(
            "fp4.router: tokens and the router's weight",
            value=(tuple(x.shape), tuple(weight.shape)),
            limit=f"[T, H] and [E, H], E up to {topk.MOST_SCORES}",
            remedy="Call F.linear and torch.topk.",
        )
    if bias is not None and tuple(bias.shape) != (experts,):
        raise ShapeError("fp4.router: bias", value=tuple(bias.shape), limit=f"[{experts}]", remedy="Pass one number for each expert, or None.")
    if not 1 <= k <= min(experts, topk.MOST_CHOSEN):
        raise ShapeError("fp4.router: k", value=k, limit=f"1 to E = {experts}, at most {topk.MOST_CHOSEN}", remedy="Call F.linear and torch.topk.")
    if form not in FORMS:
        raise ConfigError("fp4.router: form", value=repr(form), limit=list(FORMS), remedy="See fp4_inductor.ops.router.")
    operands = [x, weight] if bias is None else [x, weight, bias]
    for name, given, limit in (
        ("x", x.dtype, HALF), ("weight, bias", operands[-1].dtype, (x.dtype,)), ("weight", weight.dtype, (x.dtype,)), ("dtype", dtype, nvfp4.HIGH_PRECISION),
    ):  # fmt: skip
        if given not in limit and not (given == torch.float64 == x.dtype):
            raise DTypeError(f"fp4.router: {name}", value=given, limit=list(limit), remedy="Cast with .to(dtype), or call F.linear and torch.topk.")


def fake(x: Tensor, weight: Tensor, bias: Tensor | None, k: int, form: str, dtype: torch.dtype, early: bool = False) -> tuple[Tensor, Tensor]:
    check(x, weight, bias, k, form, dtype)
    return x.new_empty((x.shape[0], k), dtype=dtype), x.new_empty((x.shape[0], k), dtype=torch.int64)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for dtype, (t, h, e), k, biased, out in (
        (bf16, (1, 64, 8), 2, False, bf16), (fp16, (4, 96, 33), 5, True, fp32), (bf16, (0, 32, 4), 1, False, fp32), (bf16, (17, 40, 60), 4, True, bf16),
        (bf16, (8, 128, 128), 8, False, bf16), (fp16, (9, 33, 20), 4, True, fp16), (bf16, (2, 7, 3), 3, False, fp32), (bf16, (1, 100, 1), 1, True, bf16),
        (bf16, (3, 17, 300), 32, False, fp32),
    ):  # fmt: skip
        x, weight = torch.randn(t, h, device=device).to(dtype), torch.randn(e, h, device=device).to(dtype)
        for form in FORMS:
            bias = torch.randn(e, device=device).to(dtype) if biased else None
            yield f"{(t, h, e)} k = {k} {form}", (x, weight, bias, k, form, out)


def _setup_context(ctx, inputs, output):
    refuse_gradient("router", ctx, x=0, weight=1, bias=2)


CONTRACT = OpContract(
    name="router",
    schema="(Tensor x, Tensor weight, Tensor? bias, int k, str form, ScalarType dtype, bool early=False) -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance={torch.bfloat16: 4e-3, torch.float16: 5e-4},
)
CONTRACT.implement("CPU", reference)
CONTRACT.differentiate(no_gradient, _setup_context)

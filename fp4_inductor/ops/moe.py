"""``fp4.moe``: a mixture-of-experts layer on NVFP4 experts, dense or 2:4-sparse, from routed tokens to the weighted sum.

    y[t] = sum_j w[t, j] * (act(x[t] @ GateUp[e].T + b1[e]) @ Down[e].T + b2[e]),   e = expert_ids[t, j]

    hidden           [T, H]       bfloat16, float16 or float32
    expert_ids       [T, k]       int32 or int64
    expert_weights   [T, k]       bfloat16, float16 or float32
    gate_up_*        qdata [E, G, H/2], scale [E, G, H/16], global_scale [E];  G = 2 * I with a gate, I without. Where gate and up
                     of an expert have a global scale each, global_scale [E, 2]: of the gate's rows and of up's (the halves of G,
                     or, interleaved, the even and the odd rows)
    down_*           qdata [E, N, I/2], scale [E, N, I/16], global_scale [E];  N = H in every model known
    gate_up_bias     [E, G] or None,  down_bias [E, N] or None
    activation, alpha, limit, interleaved: see :class:`fp4_inductor.ops.activation.Activation`
    weight_on_input  the router's weight multiplies x instead of the expert's output (Llama 4)
    expert_map       [number of global experts] int32 or int64 or None: global id -> local id, negative for "not here"
    prefill          path for many tokens, as in :class:`fp4_inductor.NVFP4Config`
    gate_up_meta     uint8 [E, G, H/8] where gate_up is 2:4-sparse, and down_meta [E, N, I/8] where down is; None: dense.
                     ``*_qdata`` is then the kept codes, [E, G, H/4] or [E, N, I/4], as in :mod:`fp4_inductor.formats.sparse24`
    result           [T, N] in hidden's dtype

Ids. A (token, expert) assignment (t, j) whose id (after ``expert_map``) is not in [0, E) contributes exactly zero, whatever its weight, NaN
included: that is what expert parallelism's sentinels (-1, or E) mean, and no id can make a kernel read outside its
weights. An id may occur twice in a token (a NaN router's top-k does that): it counts twice. k may exceed E. Experts
without tokens are not read. A NaN or Inf in a token or its router weights stays in that token's row.

Sums are float32 at least, and deterministic: equal arguments give equal bits.

Metadata of 2:4-sparse experts is not checked per call on a GPU, as in :mod:`.sparse_linear`; a CPU checks that of the experts it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import ConfigError, DeviceError, DTypeError, ShapeError
from ..formats import nvfp4, sparse24
from .activation import Activation
from .contract import OpContract, refuse_gradient
from .linear import WEIGHT_ONLY
from .moe_call import NAMES, ExpertWeight, MoeBackwardCall, MoeCall, positions

ID_DTYPES = (torch.int32, torch.int64)


def reference(call: MoeCall) -> Tensor:
    """float64 arithmetic on the dequantised experts, rounded once to ``hidden.dtype``."""
    check(call)
    act, gate_up, down = call.activation, call.gate_up, call.down
    local = local_ids(call.expert_ids, call.expert_map, call.experts)
    weights = call.expert_weights.double()
    out = call.hidden.new_zeros((call.hidden.shape[0], call.width), dtype=torch.float64)
    for e in used_experts(local):
        token, slot = torch.where(local == e)
        x, w = call.hidden[token].double(), weights[token, slot, None]
        x = x * w if call.weight_on_input else x
        z = x @ _exact(e, gate_up, act.interleaved).mT
        h = act(z if gate_up.bias is None else z + gate_up.bias[e].double(), call.inner)
        y = h @ _exact(e, down).mT
        y = y if down.bias is None else y + down.bias[e].double()
        out.index_add_(0, token, y if call.weight_on_input else y * w)
    return out.to(call.hidden.dtype)


def has_two_scales(global_scale: Tensor) -> bool:
    """Is this ``[E, 2]``, of gate and of up?"""
    return global_scale.dim() == 2


def scale_of_rows(global_scale: Tensor, n: int, interleaved: bool) -> Tensor:
    """``[E, n]``: the global scale of every row, from ``[E, 2]``."""
    e, half = global_scale.shape[0], n // 2
    pairs = global_scale[:, None].expand(e, half, 2) if interleaved else global_scale[:, :, None].expand(e, 2, half)
    return pairs.reshape(e, n)


def dense_expert(decode: Callable[..., Tensor], e: int, weight: ExpertWeight, interleaved: bool = False) -> Tensor:
    """float32 ``[N, K]`` of one expert; ``decode(*packed, scale, global_scale, dtype)`` of dense codes, or with metadata of 2:4-sparse ones."""
    packed, global_scale = tuple(t[e] for t in (*weight.packed, weight.scale)), weight.global_scale
    if not has_two_scales(global_scale):
        return decode(*packed, global_scale.reshape(-1)[e], torch.float32)
    halves = [t.unflatten(0, (-1, 2)).transpose(0, 1) if interleaved else t.unflatten(0, (2, -1)) for t in packed]  # of gate and of up
    both = decode(*halves, global_scale[e], torch.float32)
    return (both.transpose(0, 1) if interleaved else both).flatten(0, 1)


def _exact(e: int, weight: ExpertWeight, interleaved: bool = False) -> Tensor:
    """float64 ``[N, K]`` of one expert."""
    decode = nvfp4.dequantize if weight.meta is None else sparse24.dequantize_sparse24
    return dense_expert(decode, e, weight, interleaved).double()


def local_ids(expert_ids: Tensor, expert_map: Tensor | None, experts: int) -> Tensor:
    """int64 ids of the same shape: the local expert in [0, ``experts``), or -1 for an assignment that contributes zero."""
    ids = expert_ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = torch.where(known, expert_map.long()[torch.where(known, ids, 0)], -1) if expert_map.shape[0] else torch.full_like(ids, -1)
    return torch.where((ids >= 0) & (ids < experts), ids, -1)


def add_rows(out: Tensor, token: Tensor, y: Tensor) -> None:
    """``out[token] += y``, in one order: a token that chose an expert twice occurs twice, and ``index_add_`` on a GPU would add in any."""
    if out.is_cuda:
        out.index_put_((token,), y, accumulate=True)
    else:
        out.index_add_(0, token, y)


def used_experts(local: Tensor) -> list[int]:
    """Ascending ids that occur in ``local``, -1 left out. Reads values: not for a compiled graph."""
    return [e for e in torch.unique(local).tolist() if e >= 0]


def check(call: MoeCall) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    hidden, expert_ids, expert_weights, expert_map, act = call.hidden, call.expert_ids, call.expert_weights, call.expert_map, call.activation
    gate_up, down = call.gate_up, call.down
    _check_weight(gate_up, _one_each(gate_up))
    _check_weight(down, down.global_scale)
    _check_dtypes(call)
    if hidden.dim() != 2 or expert_ids.dim() != 2 or expert_ids.shape != expert_weights.shape or expert_ids.shape[0] != hidden.shape[0]:
        raise ShapeError(
            "fp4.moe: tokens and routing do not belong together",
            value=f"hidden {tuple(hidden.shape)}, expert_ids {tuple(expert_ids.shape)}, expert_weights {tuple(expert_weights.shape)}",
            limit="hidden [T, H], expert_ids and expert_weights [T, k]",
            remedy="Flatten batch and sequence; gather full [T, E] scores at the chosen experts.",
        )
    experts, width, inner = gate_up.experts, gate_up.k, down.k
    if gate_up.qdata.dim() != 3 or down.qdata.dim() != 3 or down.qdata.shape[0] != experts:
        raise ShapeError(
            "fp4.moe takes 3-D experts",
            value=f"gate_up {tuple(gate_up.qdata.shape)}, down {tuple(down.qdata.shape)}",
            limit="qdata [E, G, H/2] and [E, N, I/2], 2:4-sparse values [E, G, H/4] and [E, N, I/4]",
            remedy="Stack the experts; one expert is E = 1.",
        )
    if hidden.shape[1] != width:
        raise ShapeError(
            "fp4.moe: tokens and gate_up disagree on H",
            value=f"hidden {tuple(hidden.shape)}",
            limit=f"[T, {width}]",
            remedy="Pad the tokens if H of the weight was padded.",
        )
    rows = (inner * 2,) if act.needs_gate or act.interleaved else (inner * 2, inner)
    if gate_up.n not in rows:
        raise ShapeError(
            "fp4.moe: gate_up and down disagree on I",
            value=f"gate_up has {gate_up.n} rows, down takes {inner}",
            limit=" or ".join(map(str, rows)) + " rows",
            remedy="gate_up has 2 * I rows with a gate and I without; pad I with zero rows if down's K was padded.",
        )
    if has_two_scales(gate_up.global_scale) and gate_up.n != 2 * inner:
        raise ShapeError(
            "fp4.moe: two global scales an expert without a gate",
            value=f"gate_up_global_scale {tuple(gate_up.global_scale.shape)}, {gate_up.n} rows",
            limit=f"({experts},), or {2 * inner} rows",
            remedy="Layers without a gate have one global scale an expert.",
        )
    for name, bias, n in (("gate_up_bias", gate_up.bias, gate_up.n), ("down_bias", down.bias, down.n)):
        if bias is not None and tuple(bias.shape) != (experts, n):
            raise ShapeError(
                f"fp4.moe: {name} does not fit", value=tuple(bias.shape), limit=f"({experts}, {n})", remedy="It has one row per expert, one entry per output."
            )
    if expert_map is not None and expert_map.dim() != 1:
        raise ShapeError("fp4.moe: expert_map", value=tuple(expert_map.shape), limit="[global experts]", remedy="It gives the local id of each global id.")
    if call.prefill not in WEIGHT_ONLY:
        raise ConfigError("fp4.moe: unknown prefill", value=repr(call.prefill), limit=list(WEIGHT_ONLY), remedy="NVFP4Config describes them.")
    tensors = (hidden, expert_ids, expert_weights, gate_up.qdata, down.qdata, gate_up.bias, down.bias, expert_map)
    devices = {t.device for t in tensors if t is not None}
    if len(devices) > 1:
        raise DeviceError(
            "fp4.moe: tensors on different devices",
            value=sorted(map(str, devices)),
            limit="one device",
            remedy="Move the layer, the tokens or the routing with .to(device).",
        )


def _one_each(weight: ExpertWeight) -> Tensor:
    """Of two global scales an expert one; others as they are, for the checks of a weight."""
    two = weight.qdata.dim() == 3 and tuple(weight.global_scale.shape) == (weight.qdata.shape[0], 2)
    return weight.global_scale[:, 0] if two else weight.global_scale


def _check_weight(weight: ExpertWeight, global_scale: Tensor) -> None:
    if weight.meta is None:
        nvfp4.check_parts(weight.qdata, weight.scale, global_scale)
    else:
        sparse24.check_parts(weight.qdata, weight.meta, weight.scale, global_scale)


def _check_dtypes(call: MoeCall) -> None:
    for name, t, accepted in (
        ("hidden", call.hidden, nvfp4.HIGH_PRECISION),
        ("expert_weights", call.expert_weights, nvfp4.HIGH_PRECISION),
        ("expert_ids", call.expert_ids, ID_DTYPES),
        ("expert_map", call.expert_map, ID_DTYPES),
        ("gate_up_bias", call.gate_up.bias, nvfp4.HIGH_PRECISION),
        ("down_bias", call.down.bias, nvfp4.HIGH_PRECISION),
    ):
        if t is not None and t.dtype not in accepted:
            raise DTypeError(f"fp4.moe: dtype of {name}", value=t.dtype, limit=list(accepted), remedy="Cast it with .to(dtype).")


def fake(call: MoeCall) -> Tensor:
    check(call)
    return call.hidden.new_empty((call.hidden.shape[0], call.width))


_FROZEN = ("gate_up_scale", "gate_up_global_scale", "down_scale", "down_global_scale", "gate_up_bias", "down_bias")


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("moe", ctx, **positions(*_FROZEN))
    ctx.save_for_backward(*(a if isinstance(a, Tensor) else None for a in inputs))
    ctx.plain = [None if isinstance(a, Tensor) else a for a in inputs]


def _backward(ctx, grad: Tensor):
    """Gradients of the tokens and of the router's weights; the quantized experts and their biases are frozen."""
    args = [t if t is not None else a for t, a in zip(ctx.saved_tensors, ctx.plain, strict=True)]
    grads = dict(zip(("hidden", "expert_weights"), torch.ops.fp4.moe_backward(*MoeBackwardCall(grad, MoeCall.of(*args)).flat()), strict=True))
    return tuple(grads.get(name) for name in NAMES)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (T, H, I, E, k, activation, with biases): T in {0, 1}, k > E, one expert, H and I multiples of 16 only
    cases = (
        (4, 64, 32, 8, 2, Activation(), False),
        (1, 48, 80, 5, 3, Activation("gelu"), False),
        (0, 32, 16, 4, 2, Activation(), True),
        (7, 80, 48, 3, 5, Activation("swiglu_oai", 1.702, 7.0, True), True),
        (33, 16, 112, 4, 1, Activation("gelu_tanh"), False),
        (3, 208, 16, 6, 2, Activation("relu2"), True),
        (17, 96, 64, 1, 1, Activation("silu", 1.702, 0.5), False),
        (5, 272, 144, 9, 4, Activation("relu", limit=1.0), False),
    )
    for i, (t, h, inner, e, k, act, biased) in enumerate(cases):
        rows = inner if act.name == "relu2" else 2 * inner
        for dtype in (torch.float32, torch.bfloat16):
            gate_up = nvfp4.quantize(torch.randn(e, rows, h, device=device) / h**0.5)
            down = nvfp4.quantize(torch.randn(e, h, inner, device=device) / inner**0.5)
            ids = torch.randint(0, e, (t, k), device=device, dtype=torch.int32)
            if t > 4:
                ids[0, 0], ids[1, -1] = -1, e  # sentinels
            biases = (torch.randn(e, rows, device=device).to(dtype), torch.randn(e, h, device=device).to(dtype)) if biased else (None, None)
            expert_map = torch.arange(e, device=device, dtype=torch.int32).roll(1) if i % 3 == 1 else None
            x = torch.randn(t, h, device=device).to(dtype)
            weights = torch.rand(t, k, device=device)
            yield f"T{t} H{h} I{inner} E{e} k{k} {act} {dtype}", (x, ids, weights, *gate_up, *down, *biases, *act.arguments(), i == 6, expert_map)
    yield from _sparse_inputs(device)
    yield from _inputs_with_two_scales(device)


def _inputs_with_two_scales(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (T, H, I, E, k, interleaved, 2:4-sparse)
    for t, h, inner, e, k, interleaved, sparse in ((4, 64, 32, 3, 2, False, False), (1, 48, 16, 2, 1, True, False), (0, 32, 16, 2, 2, False, False),
                                                   (11, 96, 48, 3, 2, False, True), (33, 32, 64, 2, 1, True, False)):  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            w = torch.randn(e, 2 * inner, h, device=device) / h**0.5
            *packed, g = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w)) if sparse else nvfp4.quantize(w)
            first = (*packed, g[:, None] * torch.tensor([1.0, 3.0], device=device))
            down = nvfp4.quantize(torch.randn(e, h, inner, device=device) / inner**0.5)
            ids = torch.randint(-1, e, (t, k), device=device)
            x = torch.randn(t, h, device=device).to(dtype)
            act = Activation(interleaved=interleaved)
            weights = torch.rand(t, k, device=device)
            args = MoeCall(x, ids, weights, ExpertWeight.of_parts(first), ExpertWeight.of_parts(down), act).flat()
            yield f"two scales T{t} H{h} I{inner} E{e} k{k} {act} 2:4 {sparse} {dtype}", args


def _sparse_inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (T, H, I, E, k, gate_up sparse, down sparse): K a multiple of 32 where it is sparse, of 16 where not
    for t, h, inner, e, k, *sparse in ((4, 64, 32, 8, 2, True, True), (0, 32, 32, 4, 2, True, True), (19, 96, 160, 3, 4, True, True),
                                       (1, 160, 48, 5, 3, True, False), (5, 48, 32, 2, 1, False, True)):  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            weights = []
            for is_sparse, shape in zip(sparse, ((e, 2 * inner, h), (e, h, inner)), strict=True):
                w = torch.randn(shape, device=device) / shape[-1] ** 0.5
                weights.append(sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w)) if is_sparse else nvfp4.quantize(w))
            ids = torch.randint(-1, e + 1, (t, k), device=device, dtype=torch.int32)
            x = torch.randn(t, h, device=device).to(dtype)
            gate_up, down = map(ExpertWeight.of_parts, weights)
            call = MoeCall(x, ids, torch.rand(t, k, device=device), gate_up, down)
            yield f"2:4 {sparse} T{t} H{h} I{inner} E{e} k{k} {dtype}", call.flat()


CONTRACT = OpContract(
    name="moe",
    schema="(Tensor hidden, Tensor expert_ids, Tensor expert_weights, "
    "Tensor gate_up_qdata, Tensor gate_up_scale, Tensor gate_up_global_scale, Tensor down_qdata, Tensor down_scale, Tensor down_global_scale, "
    "Tensor? gate_up_bias=None, Tensor? down_bias=None, "
    'str activation="silu", float alpha=1.0, float? limit=None, bool interleaved=False, '
    'bool weight_on_input=False, Tensor? expert_map=None, str prefill="auto", Tensor? gate_up_meta=None, Tensor? down_meta=None) -> Tensor',
    reference=reference,
    fake=fake,
    inputs=inputs,
    # float32 sums; in half precision the intermediate is rounded once more than in the reference.
    tolerance={torch.float32: 4e-6, torch.bfloat16: 7e-3, torch.float16: 1.5e-3},
    struct=MoeCall,
)
CONTRACT.differentiate(_backward, _setup_context)

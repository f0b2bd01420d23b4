"""``fp4.decode_attention(query, key, value, mask, scale, key_scale, value_scale)``: attention of queries over a cache, grouped by KV head.

    out[b, q, h] = softmax(scale * query[b, h, q] @ key[b, h // G].T + mask[b, h, q]) @ value[b, h // G],   G = H / Hkv

    query       [B, H, Q, D]       bfloat16, float16 or float32
    key, value  [B, Hkv, S, D]     the dtype of query; any strides: a cache is read where it lies
    mask        bool (True: attend) or floating (added), broadcastable to [B, H, Q, S]; None: every query attends to everything
    scale       None: D ** -0.5
    key_scale, value_scale         floating, 4 dimensions, broadcastable to [B, Hkv, S, 1]; None: key and value are no codes
    out         [B, Q, H, D]       contiguous

With scales key and value are codes of 8 bits, int8 or float8_e4m3fn each for itself, and ``codes * scale`` takes their place; it is not rounded to the dtype
of query in between. A cache of :class:`fp4_inductor.KVCache` has means, exact tokens or codes of 4 bits, too: that is ``fp4.cached_attention``.

No causal flag: the mask says it all. A row that attends to nothing is zero, where ``F.scaled_dot_product_attention``
gives zeros or NaN, depending on its backend. What lies at a position that none of the queries of one KV head attends to
(mask False or -inf) changes nothing, NaN and Inf included. Source: Ainslie et al., "GQA" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError, DeviceError, DTypeError, ShapeError
from ..formats import nvfp4
from .contract import OpContract, no_gradient, refuse_gradient

CODES = (torch.int8, torch.float8_e4m3fn)


def reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """float64 arithmetic, rounded once to ``query.dtype``."""
    check(query, key, value, mask, scale, key_scale, value_scale)
    group = query.shape[1] // max(key.shape[1], 1)
    key, value = (t.double() if s is None else t.double() * s.double() for t, s in ((key, key_scale), (value, value_scale)))
    k, v = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = query.double() @ k.mT * scale_of(query, scale)
    if mask is not None:
        added = torch.zeros_like(mask, dtype=torch.float64).masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else mask.double()
        added = added.expand(scores.shape)
        scores = torch.where(added == float("-inf"), added, scores + added)
        unseen = (added == float("-inf")).unflatten(1, (key.shape[1], group)).all(2).all(2)  # by no query of the KV head
        v = v.masked_fill(unseen.repeat_interleave(group, 1)[..., None], 0.0)
    nothing = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(nothing, 0.0)
    return (weights @ v).transpose(1, 2).to(query.dtype).contiguous()


def scale_of(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None and query.shape[-1] else scale or 0.0


def check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None
) -> None:  # fmt: skip
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    coded = key_scale is not None and value_scale is not None
    if not coded and (key_scale is not None or value_scale is not None):
        raise ConfigError("fp4.decode_attention: key_scale and value_scale", value="one of them", limit="both or none", remedy="Pass both of them.")
    fits = {key.dtype, value.dtype} <= (set(CODES) if coded else {query.dtype})
    if query.dtype not in nvfp4.HIGH_PRECISION or not fits:
        raise DTypeError(
            "fp4.decode_attention: dtypes of query, key and value",
            value=[query.dtype, key.dtype, value.dtype],
            limit=f"one of {list(nvfp4.HIGH_PRECISION)}; with scales key and value in {list(CODES)}",
            remedy="Cast them with .to(dtype).",
        )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    fits = query.dim() == key.dim() == value.dim() == 4
    fits = fits and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3] and all(a == b for a, b in zip(key.shape, value.shape, strict=True))
    if not fits or (query.shape[1] % key.shape[1] if key.shape[1] else query.shape[1]):
        raise ShapeError(
            "fp4.decode_attention: query, key and value do not belong together",
            value=shapes,
            limit="query [B, H, Q, D], key and value [B, Hkv, S, D], H a multiple of Hkv",
            remedy="Call F.scaled_dot_product_attention, which takes values of another width.",
        )
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise DTypeError("fp4.decode_attention: dtype of mask", value=mask.dtype, limit="bool or floating", remedy="Compare it with zero, or cast it.")
        full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        if mask.dim() != 4 or any(have != want and have != 1 for have, want in zip(mask.shape, full, strict=True)):
            raise ShapeError("fp4.decode_attention: mask does not fit", value=tuple(mask.shape), limit=f"4 dimensions, each 1 or that of {full}", remedy=shapes)
    for name, given in (("key_scale", key_scale), ("value_scale", value_scale)):
        rows = (*key.shape[:3], 1)
        if given is None:
            continue
        if given.dim() != 4 or not given.is_floating_point() or any(have != want and have != 1 for have, want in zip(given.shape, rows, strict=True)):
            got = f"{tuple(given.shape)} {given.dtype}"
            limit = f"floating, 4 dimensions, each 1 or that of {rows}"
            raise ShapeError(f"fp4.decode_attention: {name}", value=got, limit=limit, remedy="Reshape it: one number for each head and token, or fewer.")
    tensors = {"query": query, "key": key, "value": value, "mask": mask, "key_scale": key_scale, "value_scale": value_scale}
    devices = {name: str(t.device) for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        raise DeviceError("fp4.decode_attention: tensors on different devices", value=devices, limit="one device", remedy="Move them with .to(device).")


def fake(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    check(query, key, value, mask, scale, key_scale, value_scale)
    batch, heads, queries, width = query.shape
    return query.new_empty((batch, queries, heads, width))


def without_unseen(key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """K and V with zeros where no row of a KV head attends, for what lies there may be NaN. ``seen``: bool ``[B, H, Q, S]``."""
    kv_heads = key.shape[1]
    unseen = ~seen.unflatten(1, (kv_heads, seen.shape[1] // kv_heads)).any(2).any(2)[..., None]
    return key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)


def by_library(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scale: float | None = None, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """``F.scaled_dot_product_attention``, made to keep this op's promises: what every device can do, however many queries there are.

    Codes are dequantized first.
    """
    check(query, key, value, mask, scale, key_scale, value_scale)
    key, value = (t if s is None else (t.float() * s.float()).to(query.dtype) for t, s in ((key, key_scale), (value, value_scale)))
    batch, heads, queries, width = query.shape
    if not (query.numel() and key.numel()):
        return query.new_zeros((batch, queries, heads, width))
    nothing = None
    if mask is not None:
        seen = (mask if mask.dtype == torch.bool else mask != float("-inf")).expand(batch, heads, queries, key.shape[2])
        nothing = ~seen.any(-1, keepdim=True)
        key, value = without_unseen(key, value, seen)
        mask = (mask if mask.dtype == torch.bool else mask.to(query.dtype)).contiguous()
    # Some backends of the library want a contiguous last dimension, of the mask too; the others would sum in another order without.
    query, key, value = (t.contiguous() for t in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=heads != key.shape[1])
    if nothing is not None:
        out = out.masked_fill(nothing, 0.0)
    return query.new_empty((batch, queries, heads, width)).copy_(out.transpose(1, 2))


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (B, H, Hkv, Q, S, D, mask): one query, none, several; one KV head, one for each head; S and D off every tile, S in {0, 1}
    cases = (
        (2, 8, 2, 1, 70, 64, "bool"),
        (1, 4, 4, 1, 33, 80, "none"),
        (3, 7, 1, 1, 130, 96, "float"),
        (1, 2, 1, 0, 16, 64, "none"),
        (2, 4, 2, 3, 65, 128, "causal"),
        (0, 4, 2, 1, 16, 64, "none"),
        (1, 6, 3, 1, 0, 32, "none"),
        (1, 16, 2, 2, 1, 128, "bool"),
        (2, 14, 2, 1, 257, 64, "nothing"),
        (1, 5, 5, 1, 40, 256, "heads"),
    )
    for b, h, kv, q, s, d, kind in cases:
        for dtype in (torch.float32, torch.bfloat16):
            query, key, value = (torch.randn(shape, device=device).to(dtype) for shape in ((b, h, q, d), (b, kv, s, d), (b, kv, s, d)))
            mask: Tensor | None = None
            if kind in ("bool", "nothing"):
                mask = torch.rand(b, 1, 1, s, device=device) < (0.7 if kind == "bool" else torch.arange(b, device=device)[:, None, None, None])
            if kind == "causal":
                mask = (torch.arange(s, device=device) <= torch.arange(s - q, s, device=device)[:, None])[None, None]
            if kind == "float":
                mask = torch.randn(b, 1, q, s, device=device).masked_fill(torch.rand(b, 1, q, s, device=device) < 0.3, float("-inf")).to(dtype)
            if kind == "heads":
                mask = torch.rand(b, h, q, s, device=device) < 0.5
            yield f"B{b} H{h} Hkv{kv} Q{q} S{s} D{d} mask {kind} {dtype}", (query, key, value, mask, 0.3 if kind == "float" else None)
    # codes: (B, H, Hkv, Q, S, D, dtype of keys, of values, which dimensions the scales have)
    int8, fp8 = CODES
    coded = (
        (2, 8, 2, 1, 70, 64, int8, int8, (2, 2, 70)),
        (1, 6, 2, 2, 33, 80, fp8, fp8, (1, 1, 1)),
        (1, 4, 4, 1, 40, 128, int8, fp8, (1, 4, 1)),
        (1, 4, 2, 1, 0, 32, int8, int8, (1, 2, 0)),
    )
    for b, h, kv, q, s, d, of_key, of_value, lead in coded:
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.randn(b, h, q, d, device=device).to(dtype)
            codes = [(40 * torch.randn(b, kv, s, d, device=device)).clamp(-127, 127).to(of) for of in (of_key, of_value)]
            scales = [(torch.rand(*lead, 1, device=device) / 30).to(dtype) for _ in codes]
            mask = torch.rand(b, 1, 1, s, device=device) < 0.8
            yield f"B{b} H{h} Hkv{kv} Q{q} S{s} D{d} {of_key} {of_value} {dtype}", (query, *codes, mask, None, *scales)


CONTRACT = OpContract(
    name="decode_attention",
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask=None, float? scale=None, Tensor? key_scale=None, Tensor? value_scale=None) -> Tensor",
    reference=reference,
    fake=fake,
    inputs=inputs,
    # In half precision the weights of the softmax are rounded once before they meet the values.
    tolerance={torch.float32: 4e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3},
    any_strides=True,
)
CONTRACT.implement("CPU", by_library)
# For decoding; whoever wants gradients has F.scaled_dot_product_attention, which the Transformers backend calls then.
CONTRACT.differentiate(
    no_gradient, lambda ctx, inputs, output: refuse_gradient("decode_attention", ctx, query=0, key=1, value=2, mask=3, key_scale=5, value_scale=6)
)

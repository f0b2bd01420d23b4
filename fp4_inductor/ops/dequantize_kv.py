"""``fp4.dequantize_kv``: keys and values of a layer's cache in 8 or 4 bits, as numbers.

    keys, values, key_scale, value_scale, key_mean, value_blocks, key_blocks   as of :mod:`fp4_inductor.ops.cached_attention`
    dtype     bfloat16, float16 or float32
    slots     None: all of them. Else the first ``slots`` of each head
    returns   two tensors [B, Hkv, slots, D] in ``dtype``, contiguous: codes times block scales times scales, of keys plus mean, in float32, then rounded

Slots are not positions: in a ring the token at position p lies in slot p mod S. A slot that was never written gives any number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DeviceError, DTypeError, ShapeError
from ..formats import kv, nvfp4
from .contract import OpContract, no_gradient, refuse_gradient

NAME = "fp4.dequantize_kv"


class DequantizeCall(NamedTuple):
    """The arguments of one call."""

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    value_scale: Tensor
    key_mean: Tensor
    dtype: torch.dtype
    slots: int | None = None
    value_blocks: Tensor | None = None
    key_blocks: Tensor | None = None

    @classmethod
    def of(cls, *args, **kwargs) -> DequantizeCall:
        return cls(*args, **kwargs)

    @property
    def format(self) -> kv.Format:
        """Of the cache."""
        found = kv.of_dtypes(self.keys.dtype, self.values.dtype)
        if found is None:
            limit = {f.name: (f.key.dtype, f.value.dtype) for f in kv.FORMATS.values()}
            raise DTypeError(f"{NAME}: dtypes of keys and values", value=(self.keys.dtype, self.values.dtype), limit=limit, remedy=_REMEDY)
        return found

    @property
    def taken(self) -> int:
        """How many slots are asked for."""
        return self.keys.shape[2] if self.slots is None else self.slots

    @property
    def width(self) -> int:
        return self.keys.shape[3] * self.format.key.packed

    def rows(self, slots: slice) -> tuple[kv.Rows, kv.Rows]:
        key, value = kv.Rows(self.keys, self.key_scale, self.key_blocks), kv.Rows(self.values, self.value_scale, self.value_blocks)
        return key.each(lambda t: t[:, :, slots]), value.each(lambda t: t[:, :, slots])


_REMEDY = "Pass the tensors of one layer of a fp4_inductor.KVCache(model, max_length, kv=...)."


def check(c: DequantizeCall) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    f = c.format
    if c.dtype not in nvfp4.HIGH_PRECISION:
        raise DTypeError(f"{NAME}: dtype", value=c.dtype, limit=list(nvfp4.HIGH_PRECISION), remedy="Cast the result with .to(dtype).")
    shapes = (tuple(c.keys.shape), tuple(c.values.shape))
    if c.keys.dim() != 4 or c.values.dim() != 4 or shapes[0][:3] != shapes[1][:3] or c.values.shape[3] * f.value.packed != c.width:
        raise ShapeError(f"{NAME}: codes of keys and values", value=shapes, limit="[B, Hkv, S, D], or D/2 of two a byte, of one width", remedy=_REMEDY)
    for kind, rows in zip((f.key, f.value), c.rows(slice(None)), strict=True):
        kv.check_rows(kind, rows, c.width)
    want = (*shapes[0][:2], c.width)
    if tuple(c.key_mean.shape) != want or c.key_mean.dtype != torch.float32:
        got = f"{tuple(c.key_mean.shape)} {c.key_mean.dtype}"
        raise ShapeError(f"{NAME}: key_mean", value=got, limit=f"{want} float32", remedy=_REMEDY)
    if c.slots is not None and not 0 <= c.slots <= c.keys.shape[2]:
        raise ShapeError(f"{NAME}: slots", value=c.slots, limit=f"0 to {c.keys.shape[2]}, those of the cache", remedy="Leave it out for all of them.")
    devices = {name: str(t.device) for name, t in c._asdict().items() if isinstance(t, Tensor)}
    if len(set(devices.values())) > 1:
        raise DeviceError(f"{NAME}: tensors on different devices", value=devices, limit="one device", remedy="Move them with .to(device).")


def reference(c: DequantizeCall) -> tuple[Tensor, Tensor]:
    """By ``formats.kv``."""
    check(c)
    key, value = c.rows(slice(c.taken))
    f = c.format
    dense = kv.dequantize(key, f.key, c.key_mean, c.dtype), kv.dequantize(value, f.value, None, c.dtype)
    return dense[0].clone(memory_format=torch.contiguous_format), dense[1].clone(memory_format=torch.contiguous_format)


def fake(c: DequantizeCall) -> tuple[Tensor, Tensor]:
    check(c)
    shape = (*c.keys.shape[:2], c.taken, c.width)
    return c.keys.new_empty(shape, dtype=c.dtype), c.keys.new_empty(shape, dtype=c.dtype)


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (B, Hkv, S, D, slots)
    cases: tuple[tuple[int, int, int, int, int | None], ...] = (
        (2, 2, 24, 32, None), (1, 1, 90, 64, 80), (1, 3, 11, 48, 11), (2, 1, 160, 16, 3), (1, 2, 1, 128, None), (1, 2, 0, 32, None), (3, 1, 65, 256, 0),
    )  # fmt: skip
    for f in kv.FORMATS.values():
        for b, heads, s, d, slots in cases:
            for dtype in (torch.float32, torch.bfloat16):
                mean = torch.randn(b, heads, d, device=device)
                key, value = (
                    kv.quantize(torch.randn(b, heads, s, d, device=device), f.key, mean),
                    kv.quantize(torch.randn(b, heads, s, d, device=device), f.value),
                )
                rest = [blocks for blocks in (value.blocks, key.blocks) if blocks is not None]
                yield f"{f.name} B{b} Hkv{heads} S{s} D{d} slots {slots} {dtype}", (key.codes, value.codes, key.scale, value.scale, mean, dtype, slots, *rest)


def _setup_context(ctx, inputs, output) -> None:
    refuse_gradient("dequantize_kv", ctx, key_scale=2, value_scale=3, key_mean=4)


CONTRACT = OpContract(
    name="dequantize_kv",
    schema="(Tensor keys, Tensor values, Tensor key_scale, Tensor value_scale, Tensor key_mean, ScalarType dtype, SymInt? slots=None, "
    "Tensor? value_blocks=None, Tensor? key_blocks=None) -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    inputs=inputs,
    tolerance=dict.fromkeys(nvfp4.HIGH_PRECISION, 0.0),
    any_strides=True,
    struct=DequantizeCall,
)
CONTRACT.implement("CPU", reference)
CONTRACT.differentiate(no_gradient, _setup_context)

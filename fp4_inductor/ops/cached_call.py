"""The arguments of ``fp4.cached_attention`` as structs, and what is no call: the only place that knows their flat order.

The schema stays flat, because torch's do not nest. :mod:`fp4_inductor.ops.cached_attention` says what each of them means.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, DeviceError, DTypeError, FP4Error, ShapeError
from ..formats import kv, nvfp4

NAME = "fp4.cached_attention"


class Prologue(NamedTuple):
    """What is done to query and key first: RMSNorm over each head, then the rotation of positions."""

    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    norm_offset: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    rotary: int | None = None

    @property
    def turning(self) -> int:
        """R, how many elements of a head are rotated."""
        return 0 if self.cos is None else self.cos.shape[-1] if self.rotary is None else self.rotary

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.q_norm, self.k_norm, self.cos, self.sin) if t is not None)

    def of_query(self, x: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
        """``x [B, H, Q, D]`` after it, computed in ``wide`` and rounded once to its own dtype."""
        return self._applied(x, self.q_norm, wide)

    def of_key(self, x: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
        return self._applied(x, self.k_norm, wide)

    def _applied(self, x: Tensor, norm: Tensor | None, wide: torch.dtype) -> Tensor:
        y = x.to(wide).contiguous()  # or the mean would be summed in another order
        if norm is not None:
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * (self.norm_offset + norm.to(wide))
        if self.cos is not None and self.sin is not None:
            first, second = y[..., : self.turning].chunk(2, -1)
            cos, sin = (torch.cat([t] * (self.turning // t.shape[-1]), -1).to(wide)[:, None] for t in (self.cos, self.sin))
            turned = torch.cat([first, second], -1) * cos + torch.cat([-second, first], -1) * sin
            y = torch.cat([turned, y[..., self.turning :]], -1)
        return y.to(x.dtype)


class Stored(NamedTuple):
    """The rest of a cache in 8 or 4 bits, besides the codes ``keys`` and ``values``. What a format lacks comes last."""

    key_scale: Tensor
    value_scale: Tensor
    key_mean: Tensor
    value_blocks: Tensor | None = None
    key_blocks: Tensor | None = None
    exact_keys: Tensor | None = None
    exact_values: Tensor | None = None


class CachedCall(NamedTuple):
    """The arguments of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor
    position: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    window: int | None = None
    causal: bool = True
    softcap: float | None = None
    sinks: Tensor | None = None
    empty: bool = False
    arrivals: Tensor | None = None
    early: bool = False
    prologue: Prologue | None = None
    stored: Stored | None = None

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> CachedCall:
        """From the op's own arguments, the last of which are those of :class:`Prologue` and of :class:`Stored`."""
        last = dict(zip((*Prologue._fields, *Stored._fields), args[len(OWN) :], strict=False))
        last |= {name: kwargs.pop(name) for name in (*Prologue._fields, *Stored._fields) if name in kwargs}
        asked = any(last.get(name) is not None for name in ("q_norm", "k_norm", "cos", "sin"))
        prologue = Prologue(**{name: x for name, x in last.items() if name in Prologue._fields}) if asked else None
        rest: dict[str, Any] = {name: last.get(name) for name in Stored._fields}
        held = Stored(**rest) if any(x is not None for x in rest.values()) else None
        return cls(*args[: len(OWN)], **kwargs)._replace(prologue=prologue, stored=held)

    def flat(self) -> tuple[Any, ...]:
        """The op's own arguments, without what the format of the cache lacks: torch 2.11 to 2.13 refuse None for an argument that is written, in a region."""
        own = tuple(getattr(self, name) for name in OWN)
        if self.stored is not None:
            return (*own, *(self.prologue or Prologue()), *(x for x in self.stored if x is not None))
        return (*own, *(self.prologue or ()))

    def prepared(self, wide: torch.dtype = torch.float32) -> CachedCall:
        """The call after its prologue."""
        if self.prologue is None:
            return self
        return self._replace(query=self.prologue.of_query(self.query, wide), key=self.prologue.of_key(self.key, wide), prologue=None)

    @property
    def slots(self) -> int:
        return self.keys.shape[2]

    @property
    def format(self) -> kv.Format | None:
        """Of the cache; None: it has the dtype of query."""
        return kv.of_dtypes(self.keys.dtype, self.values.dtype)

    def rows(self, slots: slice | None = None) -> tuple[kv.Rows, kv.Rows]:
        """What a cache in 8 or 4 bits has of keys and of values, in all slots or in a slice of them."""
        s: Any = self.stored
        key, value = kv.Rows(self.keys, s.key_scale, s.key_blocks), kv.Rows(self.values, s.value_scale, s.value_blocks)
        return (key, value) if slots is None else (key.each(lambda t: t[:, :, slots]), value.each(lambda t: t[:, :, slots]))


OWN = tuple(name for name in CachedCall._fields if name not in ("prologue", "stored"))


def check(c: CachedCall) -> None:
    """Raise the typed error of any call that has no meaning. Reads shapes, dtypes and devices only."""
    dtypes = {name: getattr(c, name).dtype for name in ("query", "key", "value", "keys", "values")}
    alike = set(dtypes.values()) if c.format is None else {dtypes[name] for name in ("query", "key", "value")}
    if c.query.dtype not in nvfp4.HIGH_PRECISION or len(alike) > 1:
        limit = f"one of {list(nvfp4.HIGH_PRECISION)}; a cache also in {list(kv.FORMATS)}"
        raise DTypeError(f"{NAME}: dtypes of tokens and cache", value=dtypes, limit=limit, remedy="Cast them with .to(dtype).")
    shapes = {name: tuple(getattr(c, name).shape) for name in dtypes}
    for name, kind in (("keys", c.format.key), ("values", c.format.value)) if c.format else ():
        shapes[name] = (*shapes[name][:-1], shapes[name][-1] * kind.packed)  # numbers, not bytes
    if not _belong_together(**shapes):
        raise ShapeError(
            f"{NAME}: the new tokens and the cache do not belong together",
            value=shapes,
            limit="query [B, H, Q, D], key [B, Hkv, Q, D], value [B, Hkv, Q, Dv], keys [B, Hkv, S, D], values [B, Hkv, S, Dv], H a multiple of Hkv",
            remedy="Make the cache for this model and this batch.",
        )
    if c.position.dtype != torch.int64 or c.position.numel() != 1:
        got = f"{tuple(c.position.shape)} {c.position.dtype}"
        raise ShapeError(f"{NAME}: position", value=got, limit="one number, int64", remedy="Pass torch.zeros((), dtype=torch.int64, device=...).")
    _check_options(c)
    if c.prologue is not None:
        _check_prologue(c, c.prologue)
    _check_stored(c)
    given = c._asdict() | (c.prologue._asdict() if c.prologue is not None else {}) | (c.stored._asdict() if c.stored is not None else {})
    tensors = {name: t for name, t in given.items() if isinstance(t, Tensor)}
    devices = {name: str(t.device) for name, t in tensors.items()}
    if len(set(devices.values())) > 1:
        raise DeviceError(f"{NAME}: tensors on different devices", value=devices, limit="one device", remedy="Move them with .to(device).")


def _belong_together(query: tuple, key: tuple, value: tuple, keys: tuple, values: tuple) -> bool:
    if {len(shape) for shape in (query, key, value, keys, values)} != {4}:
        return False
    batch, heads, queries, width = query
    kv_heads = key[1]
    fits = key == (batch, kv_heads, queries, width) and value[:3] == key[:3]
    fits = fits and keys == (batch, kv_heads, keys[2], width) and values == (*keys[:3], value[3])
    return fits and not (heads % kv_heads if kv_heads else heads)


def _check_options(c: CachedCall) -> None:
    batch, heads, queries, _ = c.query.shape
    if c.window is not None and not 1 <= c.window <= c.slots:
        raise ShapeError(f"{NAME}: window", value=c.window, limit=f"1 to {c.slots}, the slots of the cache", remedy="Give the ring at least as many slots.")
    if c.softcap is not None and not c.softcap > 0:
        raise ConfigError(f"{NAME}: softcap", value=c.softcap, limit="above 0, or None", remedy="Pass None if scores are not capped.")
    if c.sinks is not None and (c.sinks.shape != (heads,) or not c.sinks.is_floating_point()):
        got = f"{tuple(c.sinks.shape)} {c.sinks.dtype}"
        raise ShapeError(f"{NAME}: sinks", value=got, limit=f"({heads},), floating: one for each head", remedy="Pass the module's own sinks.")
    least = c.query.shape[0] * c.key.shape[1]
    if c.arrivals is not None and (c.arrivals.dtype != torch.int32 or c.arrivals.numel() < least):
        got = f"{tuple(c.arrivals.shape)} {c.arrivals.dtype}"
        remedy = f"Pass torch.zeros({least}, dtype=torch.int32, device=...)."
        raise ShapeError(f"{NAME}: arrivals", value=got, limit=f"int32, {least} numbers or more", remedy=remedy)
    if c.mask is None:
        if not c.causal:
            raise ConfigError(
                f"{NAME}: neither causal nor masked", value="causal=False, mask=None", limit="a mask if causal is False", remedy="Pass a mask, or causal=True."
            )
        return
    if c.mask.dtype != torch.bool and not c.mask.is_floating_point():
        raise DTypeError(f"{NAME}: dtype of mask", value=c.mask.dtype, limit="bool or floating", remedy="Compare it with zero, or cast it.")
    full = (batch, heads, queries)
    if c.mask.dim() != 4 or any(have not in (want, 1) for have, want in zip(c.mask.shape, full, strict=False)) or c.mask.shape[3] < queries:
        raise ShapeError(
            f"{NAME}: mask does not fit",
            value=tuple(c.mask.shape),
            limit=f"4 dimensions, the first three 1 or those of {full}, the last for every position so far and the new ones",
            remedy="Broadcast the other dimensions, never the last.",
        )


def _check_prologue(c: CachedCall, p: Prologue) -> None:
    batch, _, queries, width = c.query.shape
    for name, norm in (("q_norm", p.q_norm), ("k_norm", p.k_norm)):
        if norm is not None and (norm.shape != (width,) or not norm.is_floating_point()):
            got = f"{tuple(norm.shape)} {norm.dtype}"
            raise ShapeError(f"{NAME}: {name}", value=got, limit=f"({width},), floating: the width of a head", remedy="Pass the weight of the head's own norm.")
    if (p.cos is None) != (p.sin is None):
        raise ConfigError(f"{NAME}: cos and sin", value="one of them", limit="both or none", remedy="Pass both of them.")
    if p.cos is None or p.sin is None:
        return
    shape, r = tuple(p.cos.shape), p.turning
    fits = shape == tuple(p.sin.shape) and len(shape) == 3 and shape[0] in (1, batch) and shape[1] == queries and p.cos.dtype == p.sin.dtype
    if not fits or not p.cos.is_floating_point() or r not in (shape[2], 2 * shape[2]) or r % 2 or not 0 < r <= width:
        raise ShapeError(
            f"{NAME}: cos and sin",
            value=f"{shape} {p.cos.dtype}, {tuple(p.sin.shape)} {p.sin.dtype}, rotary {p.rotary}",
            limit=f"(1 or {batch}, {queries}, C), floating; C is rotary or half of it, rotary is even and at most {width}",
            remedy="Pass those of the model's rotary embedding.",
        )


def _check_stored(c: CachedCall) -> None:
    f, s = c.format, c.stored
    if f is None or s is None:
        if f is not None or s is not None:
            got = f"codes of {f.name} without scales" if f else f"{c.keys.dtype} with scales"
            raise ConfigError(f"{NAME}: the parts of a cache", value=got, limit="all or none", remedy="Pass codes with key_scale, value_scale, key_mean.")
        return
    width, batch, heads = c.query.shape[3], *c.keys.shape[:2]
    if c.value.shape[3] != width:
        raise ShapeError(f"{NAME}: values of another width in {f.name}", value=c.value.shape[3], limit=width, remedy="Use a cache in the dtype of query.")
    if s.key_scale is None or s.value_scale is None or s.key_mean is None or (f.exact and (s.exact_keys is None or s.exact_values is None)):
        missing = [name for name, x in s._asdict().items() if x is None and "blocks" not in name and (f.exact or "exact" not in name)]
        raise ConfigError(f"{NAME}: parts of a cache in {f.name} are missing", value=missing, limit="none missing", remedy="Pass all of one KVCache.")
    for kind, rows in zip((f.key, f.value), c.rows(), strict=True):
        kv.check_rows(kind, rows, width)
    if tuple(s.key_mean.shape) != (batch, heads, width) or s.key_mean.dtype != torch.float32:
        got = f"{tuple(s.key_mean.shape)} {s.key_mean.dtype}"
        raise ShapeError(f"{NAME}: key_mean", value=got, limit=f"({batch}, {heads}, {width}) float32", remedy="Pass torch.zeros of that shape.")
    least = kv.FIRST + min(kv.LAST, c.slots if c.window is None else c.window)
    for name, exact in (("exact_keys", s.exact_keys), ("exact_values", s.exact_values)):
        if (exact is not None) != f.exact:
            raise ConfigError(f"{NAME}: {name}", value="given", limit=f"none in {f.name}", remedy="Only nvfp4 has exact tokens.")
        if exact is None or s.exact_keys is None:
            continue
        fits = exact.dim() == 4 and exact.shape == (batch, heads, s.exact_keys.shape[2], width) and exact.shape[2] >= max(least, kv.FIRST + 1)
        if not fits or exact.dtype != c.query.dtype:
            got, limit = f"{tuple(exact.shape)} {exact.dtype}", f"({batch}, {heads}, {least} or more, {width}) {c.query.dtype}"
            raise ShapeError(f"{NAME}: {name}", value=got, limit=limit, remedy="formats.kv.exact_slots says how many there are.")


def check_room(c: CachedCall, at: int) -> None:
    """What only the number in ``position`` says. Where it cannot be read (CUDA), whoever advances it answers for it."""
    end = at + c.query.shape[2]
    error: FP4Error | None = None
    if at < 0 or (c.empty and at):
        limit = "0 where the caller says that the cache is empty" if c.empty else "0 or more"
        error = ShapeError(f"{NAME}: position", value=at, limit=limit, remedy="Reset the cache.")
    elif c.window is None and end > c.slots:
        error = ShapeError(f"{NAME}: the cache is full", value=f"{at} + {end - at} tokens", limit=c.slots, remedy="Make the cache longer, or reset it.")
    elif c.mask is not None and c.mask.shape[3] < end:
        error = ShapeError(f"{NAME}: mask is too short", value=c.mask.shape[3], limit=f"{end} positions or more", remedy="Pass one for every position.")
    if error is not None:
        raise error

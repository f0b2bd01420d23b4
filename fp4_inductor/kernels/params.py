"""The arguments of a call of a CUDA kernel: the structs of ``csrc/common/call.h``, field by field, and calls through ctypes.

``lowering_tests/kernels/test_params.py`` compares sizes and offsets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from .. import _exchange

_Fields = Sequence[tuple[str, Any]]
FLOATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # dtypes as ``dtype`` and ``sinks_type`` have them


def _fields(kind: Any, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


class Struct(ctypes.Structure):
    @classmethod
    def of(cls, **values: Any) -> Self:
        """Fields by name; the others are null or 0. A tensor gives its address, and has to live on until the call; a dictionary gives a struct's fields.

        Raises:
            TypeError: there is no such field.
        """
        made: Any = cls()
        kinds: dict[str, Any] = {name: kind for name, kind, *_ in cls._fields_}
        for name, value in values.items():
            if name not in kinds:
                raise TypeError(f"{cls.__name__} has no field {name}")
            kind = kinds[name]
            if isinstance(value, Tensor):
                value = value.data_ptr()
            elif isinstance(value, dict):
                value = kind.of(**value)
            elif isinstance(value, Sequence):
                value = kind(*value)
            setattr(made, name, value)
        if "size" in kinds:
            made.size = ctypes.sizeof(cls)
        return made


class LinearParams(Struct):
    _fields_ = [
        *_fields(ctypes.c_int64, "size"),
        *_fields(ctypes.c_void_p, "x x_scale row_scale codes meta scale global_scale bias mul residual norm_weight z squares y scratch"),
        *_fields(ctypes.c_int64, "scratch_bytes"),
        *_fields(ctypes.c_void_p, "stream"),
        *_fields(ctypes.c_int, "M N K dtype second third act early"),
        *_fields(ctypes.c_float, "eps norm_offset"),
        *_fields(ctypes.c_int * 4, "tile"),
    ]


class ChainParams(Struct):
    _fields_ = [
        *_fields(ctypes.c_int64, "size"),
        *_fields(LinearParams * 4, "products"),
        *_fields(ctypes.c_void_p, "arrivals"),
        *_fields(ctypes.c_int64, "arrivals_count"),
        *_fields(ctypes.c_void_p, "router"),
        *_fields(ctypes.c_void_p * _exchange.MOST_RANKS, "memory"),
        *_fields(ctypes.c_int, "count"),
        *_fields(ctypes.c_int * 4, "finish"),
        *_fields(ctypes.c_int, "routed experts top_k units form rounded"),
        *_fields(ctypes.c_int * 4, "summed"),
        *_fields(ctypes.c_int, "ranks rank"),
    ]


class ExpertParams(Struct):
    _fields_ = _fields(ctypes.c_void_p, "codes meta scale global_scale bias")


class MoeParams(Struct):
    _fields_ = [
        *_fields(ctypes.c_int64, "size"),
        *_fields(ctypes.c_void_p, "x ids weights map"),
        *_fields(ExpertParams, "gate_up down"),
        *_fields(ctypes.c_void_p, "y scratch"),
        *_fields(ctypes.c_int64, "scratch_bytes"),
        *_fields(ctypes.c_void_p, "stream"),
        *_fields(ctypes.c_int, "tokens top_k E K I N ids_type map_type weights_type map_size"),
        *_fields(ctypes.c_float, "alpha limit"),
        *_fields(ctypes.c_int, "more interleaved"),
        *_fields(ctypes.c_int * 7, "tile"),
    ]


class RouterParams(Struct):
    _fields_ = [
        *_fields(ctypes.c_int64, "size"),
        *_fields(ctypes.c_void_p, "x weight bias norm_weight normed y ids stream"),
        *_fields(ctypes.c_int, "tokens experts K top_k dtype weights_type form early"),
        *_fields(ctypes.c_float, "eps norm_offset"),
    ]


class CacheParams(Struct):
    _fields_ = _fields(ctypes.c_void_p, "codes scale blocks exact")


class AttentionParams(Struct):
    _fields_ = [
        *_fields(ctypes.c_int64, "size"),
        *_fields(ctypes.c_void_p, "query key value"),
        *_fields(CacheParams, "keys values"),
        *_fields(ctypes.c_void_p, "key_mean position mask sinks q_norm k_norm cos sin arrivals y scratch"),
        *_fields(ctypes.c_int64, "scratch_bytes"),
        *_fields(ctypes.c_void_p, "stream"),
        *_fields(ctypes.c_int64 * 3, "query_strides key_strides value_strides"),
        *_fields(ctypes.c_int64 * 2, "mask_strides angle_strides"),
        *_fields(ctypes.c_int, "batch heads kv_heads queries D slots exact_slots window mask_length rotary angles"),
        *_fields(ctypes.c_int, "dtype sinks_type wide_norms wide_angles format early"),
        *_fields(ctypes.c_float, "scale softcap eps norm_offset"),
        *_fields(ctypes.c_int * 2, "tile"),
    ]


class PagedParams(Struct):
    _fields_ = [
        *_fields(ctypes.c_int64, "size"),
        *_fields(ctypes.c_void_p, "query key value keys values table lengths slots sinks key_scale value_scale y stream"),
        *_fields(ctypes.c_int64 * 2, "query_strides key_strides value_strides"),
        *_fields(ctypes.c_int64 * 3, "keys_strides values_strides"),
        *_fields(ctypes.c_int64, "table_stride"),
        *_fields(ctypes.c_int, "batch heads kv_heads D page_size pages window cache_pages dtype sinks_type format scale_stride early"),
        *_fields(ctypes.c_float, "scale softcap"),
        *_fields(ctypes.c_int * 2, "tile"),
    ]


Params = LinearParams | ChainParams | MoeParams | RouterParams | AttentionParams | PagedParams


def address(library: ctypes.CDLL, function: str, scratch: bool) -> int | None:
    """Of a kernel's function, or of the one that tells how many bytes of scratch memory a call takes. None: there is no such function."""
    found = getattr(library, f"{function}_scratch" if scratch else function, None)
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value


def scratch_bytes(library: ctypes.CDLL, function: str, params: Params) -> int:
    """How many bytes of scratch memory a call takes."""
    told = getattr(library, f"{function}_scratch", None)
    if told is None:
        return 0
    told.restype = ctypes.c_int64
    return told(ctypes.byref(params))


def call(library: ctypes.CDLL, function: str, params: Params, device: torch.device) -> int:
    """Call a kernel, with as much scratch memory of ``device`` as it asks for; returns a cudaError_t."""
    size = scratch_bytes(library, function, params)
    if size > 0:
        scratch = torch.empty(size, dtype=torch.uint8, device=device)  # lives on until the kernel is launched
        params.scratch, params.scratch_bytes = scratch.data_ptr(), size
    return getattr(library, function)(ctypes.byref(params))

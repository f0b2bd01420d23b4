"""2:4-sparse FP4 weights of other projects: tensors in their layouts to a :class:`Sparse24NVFP4Tensor`, and back.

Neither project defines a file format, only how the tensors of one weight lie in memory; so whoever calls has the tensors, under any names.
:mod:`..formats.sparse24_layouts` says what the layouts are and converts the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import ConfigError, DTypeError
from ..formats import sparse24_layouts
from ..formats.sparse24 import Sparse24Parts
from .sparse24 import Sparse24NVFP4Tensor

_TENSORS = {"dgx-vllm-v7": ("values", "meta", "scale", "global_scale"), "metal-marlin": ("values", "metadata", "scales")}
_READERS: dict[str, Callable[..., Sparse24Parts]] = {"dgx-vllm-v7": sparse24_layouts.from_dgx_v7, "metal-marlin": sparse24_layouts.from_metal_marlin}


def read_sparse24(tensors: Mapping[str, Tensor], layout: str, dtype: torch.dtype = torch.bfloat16) -> Sparse24NVFP4Tensor:
    """A 2:4-sparse FP4 weight that another project wrote. Codes, metadata and scales keep their bits; nothing is quantized again.

    Args:
        tensors: the tensors of one weight, by the names that ``layout`` gives them; W is ``[N, K]``, K a multiple of 32.
        layout: how they lie in memory.

            * ``"dgx-vllm-v7"`` (Avarok's sparse MoE kernel): ``values`` uint8 ``[.., K/4, N]``, ``meta`` uint8 ``[.., K/8, N]``, ``scale``
              float8_e4m3fn ``[.., K/8, N]`` or ``[.., K/16, N]``, ``global_scale`` float32 ``[..]``, which multiplies. ``..`` is nothing or E experts.
            * ``"metal-marlin"``: ``values`` uint32 or int32 ``[K/16, N]``, ``metadata`` uint32 or int32 ``[K/32, N]``, ``scales`` float16
              ``[K/G, N]``, G a multiple of 16.
        dtype: bfloat16, float16 or float32: the dtype that the weight presents.

    Returns:
        The weight, ``[.., N, K]``, in memory of its own. ``torch.nn.functional.linear(x, weight)`` multiplies by it.

    Raises:
        ConfigError: an unknown layout, missing or unknown tensors.
        SparsityError: metadata that is not 2:4.
        ShapeError, DTypeError: the tensors do not belong together, or NVFP4 cannot hold their scales exactly: one E4M3 scale for 16 k.
    """
    _check_layout(layout)
    names = _TENSORS[layout]
    if set(tensors) != set(names):
        raise ConfigError(
            f"read_sparse24: not the tensors of {layout}", value=sorted(tensors), limit=list(names), remedy="Pass those of one weight, under these names."
        )
    values, meta, scale, global_scale = _READERS[layout](*(tensors[name] for name in names))
    return Sparse24NVFP4Tensor(values, meta, scale, global_scale, dtype)


def write_sparse24(weight: Tensor, layout: str, *, k_per_scale: int | None = None) -> dict[str, Tensor]:
    """The tensors of a 2:4-sparse weight in another project's layout: what :func:`read_sparse24` takes.

    Args:
        weight: a :class:`Sparse24NVFP4Tensor` ``[.., N, K]``; of a :class:`Sparse24Linear` its ``weight``. It is not modified.
        layout: as in :func:`read_sparse24`. ``"metal-marlin"`` holds one matrix, and has float16 scales: block scale times global scale is rounded.
        k_per_scale: how many k have a scale, 8 (the default) or 16; of ``"dgx-vllm-v7"`` only. Its published kernel reads one for 8.

    Returns:
        By the names of :func:`read_sparse24`; 32-bit words are int32.

    Raises:
        ConfigError: an unknown layout or ``k_per_scale``.
        DTypeError: no 2:4-sparse weight, or a scale that float16 cannot hold. ShapeError: experts in a layout of one matrix.
    """
    _check_layout(layout)
    if not isinstance(weight, Sparse24NVFP4Tensor):
        raise DTypeError(
            "write_sparse24 takes a 2:4-sparse weight",
            value=type(weight).__name__,
            limit="Sparse24NVFP4Tensor",
            remedy='Sparse24NVFP4Tensor.from_dense(w, "existing") makes one of a dense weight with the pattern.',
        )
    parts = Sparse24Parts(*weight.parts())
    if layout == "metal-marlin":
        if k_per_scale is not None:
            raise ConfigError("write_sparse24: k_per_scale has no effect", value=k_per_scale, limit="dgx-vllm-v7", remedy="Leave it out.")
        written: tuple[Tensor, ...] = sparse24_layouts.to_metal_marlin(parts)
    else:
        written = sparse24_layouts.to_dgx_v7(parts, 8 if k_per_scale is None else k_per_scale)
    return dict(zip(_TENSORS[layout], written, strict=True))


def _check_layout(layout: str) -> None:
    if layout not in _TENSORS:
        raise ConfigError("no such layout of 2:4-sparse weights", value=repr(layout), limit=list(_TENSORS), remedy="read_sparse24 describes them.")

"""The NVFP4 decoding of other libraries, restated operation by operation, and graphs that look like it and are not NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

# compressed-tensors keeps its table in the module, so that it reaches the graph as an input.
TABLE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
OTHER_TABLE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0])
CHANGED_TABLE = TABLE.clone()


def torchao_codes(packed: Tensor) -> Tensor:
    """torchao 0.18 ``unpack_uint4``."""
    low, high = (packed & 0b1111).to(torch.uint8), (packed >> 4).to(torch.uint8)
    return torch.stack([low, high], dim=-1).view(*packed.shape[:-1], packed.shape[-1] * 2)


def torchao_values(codes: Tensor, bias: int = 1) -> Tensor:
    """torchao 0.18 ``f4_unpacked_to_f32``: the float32 bit pattern is put together from the fields."""
    sign = codes & 8
    rest = codes ^ sign
    zero, subnormal = rest == 0, torch.logical_and(rest > 0, (rest >> 1) == 0)
    exponent = ((rest >> 1) - bias + 127).to(torch.int32) << 23
    result = exponent | ((rest & 1).to(torch.int32) << 22)
    result[zero] = 0
    result[subnormal] = (126) << 23
    return (result | (sign.to(torch.int32) << 28)).view(torch.float32)


def torchao_unswizzle(scale: Tensor, rows: int, cols: int) -> Tensor:
    """torchao 0.18 ``from_blocked``."""
    row_blocks, col_blocks = -(-rows // 128), -(-cols // 4)
    blocks = scale.view(row_blocks * col_blocks, 32, 16).reshape(-1, 32, 4, 4).transpose(1, 2)
    blocks = blocks.reshape(row_blocks, col_blocks, 128, 4).permute(0, 2, 1, 3)
    return blocks.reshape(row_blocks * 128, col_blocks * 4)[:rows, :cols]


def swizzle(scale: Tensor) -> Tensor:
    """Inverse of :func:`torchao_unswizzle`, padded with zero scales."""
    rows, cols = scale.shape
    row_blocks, col_blocks = -(-rows // 128), -(-cols // 4)
    padded = torch.zeros(row_blocks * 128, col_blocks * 4, dtype=torch.uint8)
    padded[:rows, :cols] = scale.view(torch.uint8)
    blocks = padded.view(row_blocks, 128, col_blocks, 4).permute(0, 2, 1, 3).reshape(-1, 4, 32, 4)
    return blocks.transpose(1, 2).reshape(row_blocks * 32, col_blocks * 16).view(scale.dtype)


def torchao(packed: Tensor, scale: Tensor, g: Tensor | None, dtype, *, group=16, codes=torchao_codes, bias=1, swizzled=False) -> Tensor:
    """torchao 0.18 ``NVFP4Tensor.dequantize``."""
    n, k = packed.shape[0], packed.shape[1] * 2
    if swizzled:
        scale = torchao_unswizzle(scale, n, k // group)
    scale32 = scale.to(torch.float32) if g is None else g * scale.to(torch.float32)
    blocks = torchao_values(codes(packed), bias).view(n, k // group, group)
    return (blocks * scale32.view(n, k // group, 1)).view(n, k).to(dtype)


def compressed_tensors(packed: Tensor, scale: Tensor, g: Tensor, dtype, *, table=None, multiply=False) -> Tensor:
    """compressed-tensors 0.20 ``unpack_fp4_from_uint8`` and ``dequantize``: the global scale divides."""
    table = (TABLE if table is None else table).to(device=packed.device)
    n, k = packed.shape[0], packed.shape[1] * 2
    flat = packed.flatten()
    codes = torch.stack((flat & 0x0F, (flat & 0xF0) >> 4), dim=1).flatten()
    negative = (codes & 8).to(torch.bool)
    values = table[(codes & 7).to(torch.long)] * torch.where(negative, -1.0, 1.0)
    x = values.reshape(n, k).to(dtype).unflatten(-1, (k // 16, 16))
    s = scale.to(dtype).unsqueeze(-1)
    s = s * g if multiply else s / g
    return (x.to(s.dtype) * s).flatten(start_dim=-2).to(dtype)


def swapped_nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed >> 4, packed & 15], dim=-1).view(packed.shape[0], -1)


def halves_of_a_row(packed: Tensor) -> Tensor:
    """All low nibbles of a row, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def halves_of_a_group(packed: Tensor) -> Tensor:
    """GGUF's order: low nibbles are the first 8 of each 16."""
    p = packed.view(packed.shape[0], -1, 8)
    return torch.cat([p & 15, p >> 4], dim=-1).view(packed.shape[0], -1)


def rows_shifted_by_one(packed: Tensor) -> Tensor:
    """One row of codes, the last, taken from elsewhere."""
    return torch.cat([torchao_codes(packed)[:-1], torchao_codes(packed)[:1]], dim=0)

"""Host side of ``fp4.quantize_rows_fp8`` and ``fp4.quantize_glu_rows_fp8`` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import quantize_glu_rows_fp8 as glu_contract
from ...ops import quantize_rows_fp8 as contract
from ...ops.activation import activation_code
from .. import host
from .triton_glu_rows import quantize_glu_rows
from .triton_rows import quantize_rows


def quantize_rows_fp8(x: Tensor, lane_order: bool = False) -> tuple[Tensor, Tensor]:
    """E4M3 ``[M, K]`` and float32 ``[M, 1]``."""
    contract.check(x, lane_order)
    m, k = x.shape
    out, scale = _results(x, k)
    if out.numel():
        with torch.cuda.device_of(x):
            quantize_rows[(m,)](x.contiguous(), out, scale, k, contract.E4M3_MAX, LANE_ORDER=lane_order, **tile(m, k), **_begins(x))
    return out, scale


def quantize_glu_rows_fp8(gate_up: Tensor, act: str = "silu", lane_order: bool = False) -> tuple[Tensor, Tensor]:
    """E4M3 ``[M, I]`` and float32 ``[M, 1]`` of ``gate_up [M, 2 I]``."""
    glu_contract.check(gate_up, act, lane_order)
    m, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out, scale = _results(gate_up, inner)
    if out.numel():
        with torch.cuda.device(gate_up.device):
            quantize_glu_rows[(m,)](
                gate_up.contiguous(),
                out,
                scale,
                inner,
                contract.E4M3_MAX,
                ACT=activation_code(act),
                LANE_ORDER=lane_order,
                **glu_tile(inner),
                **_begins(gate_up),
            )
    return out, scale


def _results(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Uninitialised; the scales of rows without numbers are 1."""
    out = torch.empty(x.shape[0], k, dtype=torch.float8_e4m3fn, device=x.device)
    return out, (torch.empty if out.numel() else torch.ones)(x.shape[0], 1, dtype=torch.float32, device=x.device)


def _begins(x: Tensor) -> dict[str, bool]:
    """Early, and lets the next kernel, where the architecture can."""
    pdl = host.arch(x.device) >= 90
    return {"PDL": pdl, **host.launched_early(pdl)}


def tile(m: int, k: int) -> dict[str, int]:
    """Rows of up to 32768 stay in registers; figures in benchmarks/NOTES.md, "Larger M"."""
    whole = k <= 32768
    block = max(256, 1 << (k - 1).bit_length()) if whole else 4096
    return {"BLOCK": block, "WHOLE": whole, "num_warps": 8 if block < 2048 or (m > 512 and block <= 16384) else 16}


def glu_tile(inner: int) -> dict[str, int]:
    """Rows of up to 16384 products stay in registers; measured on an H200: at 2048 x 12288 37 us, where Inductor's kernel takes 64."""
    block = min(max(256, 1 << (inner - 1).bit_length()), 4096)
    blocks = -(-inner // block)
    return {"BLOCK": block, "BLOCKS": blocks if blocks <= 4 else 0, "num_warps": 16 if blocks == 4 else 8}

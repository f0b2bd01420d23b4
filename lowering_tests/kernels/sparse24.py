"""Random 2:4-sparse NVFP4 weights in the canonical layout, and what they mean, by the definition."""

from __future__ import annotations

import torch

from fp4_inductor.formats import e2m1, nvfp4

LEGAL = torch.tensor([4, 8, 12, 9, 13, 14], dtype=torch.uint8)  # pos0 | pos1 << 2 with pos0 < pos1
BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3}


def weight(n: int, k: int, nibbles: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Every code, every scale, and every pattern unless ``nibbles [N, K/4]`` are given."""
    values = torch.randint(0, 256, (n, k // 4), dtype=torch.uint8)
    nibbles = LEGAL[torch.randint(0, 6, (n, k // 4))] if nibbles is None else nibbles
    scale = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return values, nibbles[:, ::2] | nibbles[:, 1::2] << 4, scale, torch.tensor(0.37)


def dense(values, meta, scale, g) -> torch.Tensor:
    """float64 ``[N, K]``, by the definition of the canonical layout."""
    n, groups = values.shape
    nibbles = torch.stack((meta & 15, meta >> 4), -1).reshape(n, groups).long()
    w = torch.zeros(n, groups, 4, dtype=torch.float64)
    table = e2m1.decode(torch.arange(16, dtype=torch.uint8)).double()
    for place, code in ((nibbles & 3, values & 15), (nibbles >> 2, values >> 4)):
        w.scatter_(2, place[..., None], table[code.long()][..., None])
    return w.reshape(n, -1) * scale.double().repeat_interleave(16, 1) * g.double()

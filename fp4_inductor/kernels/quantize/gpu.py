"""Host side of the loops over columns of :mod:`...formats.gptq` on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats import gptq, nvfp4
from .triton_gptq import refine_panel, round_panel

# Rows of a program of two warps, which has a thread for each of a row's 16 or 8 trials.
ROUND_ROWS, REFINE_ROWS = 4, 8
# Every product and every difference is rounded by itself, as the definition's operators are.
OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}


def _rounded(w: Tensor, u: Tensor, g: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    n, width = w.shape
    q, error = torch.empty_like(w), torch.empty_like(w)
    codes = torch.empty(n, width // nvfp4.GROUP, dtype=torch.uint8, device=w.device)
    with torch.cuda.device(w.device):
        grid = (-(-n // ROUND_ROWS),)
        round_panel[grid](w, u, g, w if keep is None else keep, q, error, codes, n, width, KEPT=keep is not None, ROWS=ROUND_ROWS, **OPTIONS)
    return q, codes, error


def _refined(pull: Tensor, q: Tensor, codes: Tensor, h: Tensor, g: Tensor, keep: Tensor | None) -> Tensor:
    n, width = q.shape
    change = torch.empty_like(q)
    with torch.cuda.device(q.device):
        refine_panel[(-(-n // REFINE_ROWS),)](
            pull,
            q,
            codes,
            h,
            g,
            q if keep is None else keep,
            change,
            n,
            width,
            gptq.GAIN,
            PASSES=gptq.PASSES,
            KEPT=keep is not None,
            ROWS=REFINE_ROWS,
            **OPTIONS,
        )
    return change


PANELS = gptq.Panels(_rounded, _refined)

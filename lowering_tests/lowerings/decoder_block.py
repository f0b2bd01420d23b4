"""The model that the tests of merged calls and epilogues compile."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import FP4Linear
from fp4_inductor.modules import SiblingWeight, pack_siblings


class Block(nn.Module):
    """q, k, v and a gated feed-forward layer on one normalised input, with a residual; on fake CUDA tensors. ``shared``: one global scale for siblings."""

    K, N, KV, INNER = 1024, 1024, 256, 1536
    dtype = torch.bfloat16

    def __init__(self, prefill: str = "auto", shared: bool = False):
        super().__init__()
        options = dict(dtype=self.dtype, device="cuda", prefill=prefill)
        # Values of fake tensors cannot be compared.
        with mock.patch.object(SiblingWeight, "refresh", lambda self: setattr(self, "shared", shared)):
            self.register_buffer("w", torch.ones(self.K, dtype=self.dtype, device="cuda"))
            self.q, self.k, self.v = (FP4Linear(self.K, n, bias=b, **options) for n, b in ((self.N, True), (self.KV, False), (self.KV, True)))
            self.gate, self.up = (FP4Linear(self.K, self.INNER, **options) for _ in range(2))
            self.down = FP4Linear(self.INNER, self.K, **options)
            pack_siblings([self.q, self.k, self.v])
            pack_siblings([self.gate, self.up])

    def forward(self, x):
        h = F.rms_norm(x, (self.K,), self.w)
        heads = torch.cat([self.q(h) * 2, self.k(h) + 1, self.v(h)], -1)
        return heads, x + self.down(F.silu(self.gate(h)) * self.up(h))

"""FP8 weights: E4M3, one float32 scale per row (output)."""

from __future__ import annotations

import torch

from .storage import ROW, Part, Storage

NAME = "fp8"
DTYPE = torch.float8_e4m3fn
STORAGE = Storage(NAME, (Part("qdata", DTYPE, 1), Part("scale", torch.float32, ROW)), 1, 8.0)

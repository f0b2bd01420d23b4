"""AMX tiles of Intel processors: Linux lets a process use them after it has asked once."""

from __future__ import annotations

import torch


def ask_for_tiles() -> None:
    """Ask, if the processor has tiles."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()

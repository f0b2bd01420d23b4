"""gpt-oss MXFP4: ``*_blocks`` uint8 ``[E, N, K/32, 16]`` and ``*_scales`` uint8 ``[E, N, K/32]``; the model keeps ``[E, K, N]``.

Source: openai/gpt-oss model cards and transformers.integrations.mxfp4 (which calls the method "mxfp4").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...formats import mxfp4
from ..shards import Shards
from .mx import decode
from .weight import Found, StoredWeight, need

METHOD = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"


def check(config: Mapping[str, Any]) -> None:
    """Every checkpoint of this method has the one layout; what differs shows in the tensors."""


def find(shards: Shards, config: Mapping[str, Any]) -> Found:
    found = Found()
    for name, entry in shards.entries.items():
        if not name.endswith(_BLOCKS):
            continue
        base = name.removesuffix(_BLOCKS)
        known = len(entry.shape) == 4 and entry.shape[-1] == mxfp4.GROUP // 2
        need(entry, name, entry.shape if known else ("E", "N", "K/32", 16), torch.uint8)  # type: ignore[arg-type]
        e, n, groups, _ = entry.shape
        scales = need(shards.entries.get(base + _SCALES), base + _SCALES, (e, n, groups), torch.uint8)
        found.add(StoredWeight(base, (e, groups * mxfp4.GROUP, n), (entry, scales), _flat, transposed=True, format=mxfp4.NAME))
    return found


def _flat(blocks: Tensor, scales: Tensor):
    return decode(blocks.flatten(-2), scales)

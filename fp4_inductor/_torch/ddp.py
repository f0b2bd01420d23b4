"""DistributedDataParallel and frozen tensors that it cannot, or should not, send.

DDP broadcasts a module's tensors when it wraps it, and all buffers again before every forward pass. Gloo has no float8, and the
packed weights of a model never change while it is trained. So they are sent once, as bytes, and DDP is told to leave them alone.
DDP reads that list off the module that it is given, which may be a wrapper that nobody has seen before (PEFT's, a user's own), so
the list is extended when DDP takes the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

# Given the whole module: the name of every tensor to leave alone, and the tensors in memory that it consists of.
Frozen = Callable[[nn.Module], Iterable[tuple[str, tuple[Tensor, ...]]]]


def send_once(frozen: Frozen) -> None:
    """From now on DDP sends what ``frozen(module)`` names once, when it wraps the module."""
    if not dist.is_available():
        return

    def on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        # DDP sets its `module` after its process group and its list of names, and before it sends anything.
        if name == "module" and isinstance(parent, nn.parallel.DistributedDataParallel) and child is not None:
            _take(parent, child, frozen)

    register_module_module_registration_hook(on_registration)


def _take(ddp: Any, module: nn.Module, frozen: Frozen) -> None:
    found = dict(frozen(module))
    ddp.parameters_to_ignore.update(found)
    seen: set[int] = set()
    for t in (t for tensors in found.values() for t in tensors):
        if t.device.type == "meta" or not t.numel() or t.data_ptr() in seen:
            continue
        seen.add(t.data_ptr())
        whole = t.detach().contiguous()
        dist.broadcast(whole.view(-1).view(torch.uint8), group=ddp.process_group, group_src=0)
        if whole.data_ptr() != t.data_ptr():
            t.detach().copy_(whole)

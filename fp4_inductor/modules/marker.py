"""The entry ``weight`` in the ``state_dict`` of a packed layer: a text, whose shape fits no dense weight.

A reader that does not know FP4 looks for ``weight``. If there were no such entry, a reader that is not strict (Transformers,
diffusers, accelerate, ``load_state_dict(strict=False)``) would keep the random values that the layer was made with. It finds
this entry, of another shape, and refuses. Readers of this package know the layer's components and ignore it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# A part of the format: readers know a marker by its length.
_TEXT = b"Packed by fp4_inductor: pip install fp4_inductor, import it, then load this model."
_DENSE = "{} is a dense weight, and this layer is packed: load dense weights first, then call quantize_model"


class Marked(nn.Module):
    """Writes the entries of :meth:`_markers` to a ``state_dict``, and takes them out of one that is loaded.

    A dense weight in their place is an error of ``load_state_dict``, strict or not.
    """

    def _markers(self) -> Iterable[tuple[str, Any]]:
        """(what the dense weight is called in this module, the module that holds its components)."""
        return (("weight", self),)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, held in self._markers():
            if held.storage().names[0] not in held._non_persistent_buffers_set:
                destination[f"{prefix}{name}"] = torch.frombuffer(bytearray(_TEXT), dtype=torch.uint8).to(held.scale.device)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        names = {f"{prefix}{name}" for name, _ in self._markers()}
        error_msgs += [_DENSE.format(name) for name in sorted(names & state_dict.keys()) if not is_marker(state_dict[name].dtype, state_dict[name].shape)]
        rest = {name: t for name, t in state_dict.items() if name not in names}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


def is_marker(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Is an entry of this dtype and shape a marker?"""
    return dtype == torch.uint8 and tuple(shape) == (len(_TEXT),)


def markers_of(model: nn.Module) -> set[str]:
    """The names of all markers in ``model.state_dict()``."""
    modules = ((path, m) for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, Marked))
    return {f"{path}.{name}" if path else name for path, m in modules for name, _ in m._markers()}

"""huggingface_hub's ``PyTorchModelHubMixin``: saving a model with packed layers is refused, for its ``from_pretrained`` could not read it.

That builds a dense model and loads what fits. Importing this imports huggingface_hub's mixin; it registers itself when that is imported.
"""

from __future__ import annotations

import functools
from typing import Any

from huggingface_hub.hub_mixin import ModelHubMixin
from torch import nn

from ..errors import CheckpointError
from .whole import is_packed


def register() -> None:
    """Extend ``ModelHubMixin.save_pretrained``. May be called again."""
    original = ModelHubMixin.save_pretrained
    if hasattr(original, "_fp4_inductor"):
        return

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, nn.Module) and is_packed(self):
            raise CheckpointError(
                f"{type(self).__name__}.from_pretrained could not read back the packed layers of this model",
                value="save_pretrained of huggingface_hub's mixin",
                limit="dense models",
                remedy="Write it with fp4_inductor.save(model, folder), and read it with fp4_inductor.load(lambda: Model(...), folder).",
            )
        return original(self, save_directory, *args, **kwargs)

    save_pretrained._fp4_inductor = True  # type: ignore[attr-defined]
    ModelHubMixin.save_pretrained = save_pretrained  # type: ignore[method-assign]


register()

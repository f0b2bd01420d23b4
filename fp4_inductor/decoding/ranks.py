"""Which of several processes this is, where Transformers distributed a model by tensor parallelism, and what of its K and V is here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ShapeError

if TYPE_CHECKING:  # Transformers, while it is imported, has this package register with it, which imports this module
    from transformers import PreTrainedModel

LOCAL_ROWS = "colwise"  # the style whose results stay parts; those of other styles by rows are put together


@dataclass(frozen=True)
class Ranks:
    """This process among those that share a weight."""

    rank: int
    size: int
    group: Any
    plan: dict[str, str]

    def style(self, name: str) -> str | None:
        """What the plan says about a module or weight, its layer numbers replaced by stars."""
        return self.plan.get(name) or self.plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def ranks_of(model: PreTrainedModel) -> Ranks | None:
    """None unless transformers distributed this model by tensor parallelism."""
    mesh, size = getattr(model, "_device_mesh", None), getattr(model, "_tp_size", None)
    if mesh is None or not size or size <= 1:
        return None
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    return Ranks(mesh.get_local_rank(), mesh.size(), mesh.get_group(), dict(model.tp_plan))


def heads_here(model: PreTrainedModel, heads: int) -> int:
    """Of ``heads`` K and V heads those of this rank.

    Raises:
        ShapeError: they cannot be divided among the ranks.
    """
    ranks = ranks_of(model)
    if ranks is None or not any(re.search(r"\bk_proj$", name) and style == LOCAL_ROWS for name, style in ranks.plan.items()):
        return heads
    if heads % ranks.size:
        raise ShapeError(
            f"{heads} heads of K and V cannot be divided among {ranks.size} ranks",
            value=heads,
            limit=f"a multiple of {ranks.size}",
            remedy="Use fewer ranks, or a tp_plan that leaves the attention out.",
        )
    return heads // ranks.size

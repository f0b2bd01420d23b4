"""The experts backend of Transformers: ``config._experts_implementation = "fp4_inductor"``.

``quantize_model`` selects it for a Transformers model whose experts it packed. From then on

* ``FP4Experts`` (what ``quantize_model`` installs) call ``fp4.moe`` themselves;
* an experts module of the model's own class that holds ``NVFP4Tensor`` or ``Sparse24NVFP4Tensor`` Parameters calls the same op through
  this backend, or, if that op does not compute what the module does, the products alone (:mod:`.experts`);
* experts that were left in high precision run Transformers' ``grouped_mm``, as they would have without this package;
* ``generate()`` leaves the name alone, so that prefill and decode are one implementation and one compiled graph.

Source: transformers.integrations.moe (5.17 to 5.24), ``ALL_EXPERTS_FUNCTIONS``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GatingError
from ..models.experts import ExpertsSpec, describe_experts, interface_weights
from ..models.stacks import stack_of
from ..modules import FP4Experts
from ..ops import cast_for_autocast
from ..ops.moe_call import fields_of_parts, flat
from ..tensors.base import FP4Tensor
from . import experts

NAME = "fp4_inductor"
_SPEC = "_fp4_experts_spec"


def register() -> None:
    """Make ``"fp4_inductor"`` an experts implementation of Transformers. Imports transformers; may be called again."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def use_experts_backend(model: Any) -> bool:
    """Select the backend for a Transformers model that has packed experts; False if it is none, or has none.

    Raises:
        GatingError: a module with packed experts computes what ``fp4.moe`` does not.
    """
    if "transformers" not in sys.modules or not callable(getattr(model, "set_experts_implementation", None)):
        return False
    packed = any(isinstance(m, FP4Experts) for m in model.modules())
    for name, module in model.named_modules():
        if any(isinstance(p, FP4Tensor) and p.dim() == 3 and stack_of((name,), module, n, p) is None for n, p in module._parameters.items()):
            setattr(module, _SPEC, _spec(module, name))
            packed = True
    if not packed:
        return False
    register()
    try:
        model.set_experts_implementation(NAME)
    except ValueError:  # a model whose experts are outside the interface (Llama 4): nothing would ask for the backend
        return False
    return True


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Transformers' experts interface: hidden ``[T, H]``, ids and weights ``[T, k]`` -> ``[T, H]``."""
    spec: ExpertsSpec | tuple[str, str] | None = getattr(self, _SPEC, None)
    if spec is None:
        if not isinstance(self.down_proj, FP4Tensor):
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
        spec = _spec(self, type(self).__name__)
    if isinstance(spec, tuple):
        return experts.forward(self, spec, hidden_states, top_k_index, top_k_weights)
    x, _ = cast_for_autocast(hidden_states)
    first, down = getattr(self, spec.first), self.down_proj
    # The layout these are stored in is [E, N, K]; gpt-oss presents it transposed.
    biases = (getattr(self, f"{spec.first}_bias"), self.down_proj_bias) if spec.bias else (None, None)
    products = fields_of_parts(first.parts(), biases[0]), fields_of_parts(down.parts(), biases[1])
    return torch.ops.fp4.moe.default(*flat((x, top_k_index, top_k_weights), *products, spec.activation))


def _spec(module: nn.Module, name: str) -> ExpertsSpec | tuple[str, str]:
    """What ``fp4.moe`` computes for ``module``, or the names of its two weights if its own functions go on computing."""
    spec, names = describe_experts(module), interface_weights(module)
    held = (spec.first, "down_proj") if isinstance(spec, ExpertsSpec) else names or ()
    weights = tuple(module.get_parameter(n) for n in held)
    transposed = spec.transposed if isinstance(spec, ExpertsSpec) else bool(getattr(module, "is_transposed", False))
    stored = len(weights) == 2 and all(isinstance(w, FP4Tensor) and w.transposed == transposed for w in weights)
    if stored and isinstance(spec, ExpertsSpec) and not spec.dense:
        return spec
    if stored and names is not None and not isinstance(spec, ExpertsSpec):
        return names
    raise GatingError(
        f"the experts of {name} cannot run packed",
        value=spec if isinstance(spec, str) else f"{type(module).__name__} {[type(w).__name__ for w in weights]}",
        limit="Transformers' experts interface, both weights NVFP4Tensor or Sparse24NVFP4Tensor with K contiguous",
        remedy="Let quantize_model pack them, or keep both weights dense.",
    )

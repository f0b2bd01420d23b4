"""Prompts of few tokens: padded to one of a few lengths, so that one CUDA graph serves all that are not longer.

The host takes longer to launch the kernels of such a prompt than the GPU to run them (``benchmarks/NOTES.md``), and a graph for each length would be
captured for one prompt alone. What a prompt is padded with are copies of its last token, at its position. Attention is causal, so that no token sees those
behind it; their keys and values lie behind the cache's counter, where nobody reads them, and are written over. In the ring of a sliding window they may take
no place of old tokens: a prompt is padded only as far as the ring has not come round.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._replay import Host, Runner
from .._torch.static import may_vary
from ..decoding.naming import cache_name
from . import caches
from .record import GenerationRecord

# Up to 32 tokens products are decode kernels, exact in the activations; above, prompts are multiplied in FP8 where ``prefill`` says so.
LENGTHS = (32, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
MOST = 4096  # tokens of all rows together: beyond that the GPU takes longer than the host, whose work is not waited for then


def length_for(tokens: int, rows: int, room: int) -> int | None:
    """What ``rows`` prompts of ``tokens`` tokens are padded to, if ``room`` tokens fit the cache; None: nothing."""
    return next((length for length in LENGTHS if tokens <= length <= room and rows * length <= MOST), None)


@dataclass
class _Captured:
    """A prompt of one length. ``inputs``: of the model, tensors that stay where they are. ``logits``: of the last run."""

    inputs: dict[str, Any]
    runner: Runner
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


class ShortPrompts:
    """Runs prompts over ``cache`` by ``forward(inputs)``, which gives logits ``[B, V]`` of the token ``inputs["logits_to_keep"]``."""

    def __init__(self, forward: Callable[[dict[str, Any]], Tensor], cache: Any, device: Host, model: Any, accepts: set[str]):
        self.forward, self.cache, self.device = forward, cache, device
        self.by_index = _takes_index(model)
        self.never = _why_never(cache, device, accepts if self.by_index else accepts - {"logits_to_keep"})
        self.order = ("input_ids", "position_ids", cache_name(), "use_cache", "logits_to_keep")  # of the model's inputs: one graph, one order
        self._captured: dict[tuple[int, bool], _Captured] = {}

    def length_of(self, inputs: dict[str, Any], past: int) -> tuple[int, str]:
        """What a prompt with these ``inputs`` behind ``past`` tokens is padded to, and nothing; or 0, and why it runs as it is."""
        if self.never:
            return 0, self.never
        others = sorted(name for name, value in inputs.items() if value is not None and name not in self.order)
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        if others or ids is None:
            return 0, f"the model is given {', '.join(others) or 'no tokens'}"
        if positions is not None and positions.shape != ids.shape:
            return 0, f"positions of shape {tuple(positions.shape)}"
        if self.cache.format is not None and past == 0:
            return 0, f"tokens behind the first prompt would count in the mean of K that {self.cache.format.name} keeps"
        rows, tokens = ids.shape
        room = self._room(past)
        length = length_for(tokens, rows, room)
        if length is None:
            return 0, f"{rows} x {tokens} tokens, with room for {room} in the cache; padded are up to {MOST}"
        return length, ""

    def _room(self, past: int) -> int:
        """How many tokens can be written behind ``past`` others so that no layer loses one."""
        return min(self.cache.max_length, *(layer.keys.shape[2] for layer in self.cache.layers)) - past

    def __call__(self, inputs: dict[str, Any], past: int, length: int, record: GenerationRecord) -> Tensor:
        """The logits behind a prompt, padded to the ``length`` of :meth:`length_of`. They are those of the next call after it."""
        ids, positions = inputs["input_ids"], inputs.get("position_ids")
        rows, tokens = ids.shape
        captured = self._captured.get((length, past == 0))
        if captured is None:
            captured = self._captured[length, past == 0] = self._make(rows, length, ids.device)
        if positions is None:
            positions = torch.arange(past, past + tokens, device=ids.device).expand(rows, tokens)
        for name, given in (("input_ids", ids), ("position_ids", positions)):
            held = captured.inputs[name]
            held[:, :tokens].copy_(given)
            held[:, tokens:].copy_(given[:, -1:].expand(rows, length - tokens))
        captured.inputs["logits_to_keep"].fill_(tokens - 1)
        how = captured.runner()
        self.cache.counter.position.fill_(past + tokens)
        record.prompt = f"padded to {length} tokens, " + {"run": "not replayed", "capture": "captured", "replay": "replayed"}[how]
        if captured.runner.note:
            self.never = captured.runner.note
            record.notes.append(captured.runner.note)
        return captured.logits

    def inputs_of(self, given: dict[str, Any]) -> dict[str, Any]:
        """The inputs ``given`` of a prompt so that one compiled graph serves all lengths, padded or not.

        That of a prompt alone is told by a tensor which token's logits are wanted.
        """
        for value in given.values():
            if isinstance(value, Tensor) and value.dim() == 2:  # [B, tokens]
                may_vary(value, 1)
        if not self.by_index or set(given) != set(self.order) or given["logits_to_keep"] != 1:
            return given
        ids = given["input_ids"]
        return {name: given[name] for name in self.order} | {"logits_to_keep": torch.full((1,), ids.shape[1] - 1, dtype=torch.int64, device=ids.device)}

    def _make(self, rows: int, length: int, device: torch.device) -> _Captured:
        with caches.allocating():
            ids, positions = (torch.zeros((rows, length), dtype=torch.int64, device=device) for _ in range(2))
            inputs = self.inputs_of(dict(zip(self.order, (ids, positions, self.cache, True, 1), strict=True)))

        def run() -> None:
            captured.logits = self.forward(inputs)

        # One plain run comes before the capture: it compiles, if anything does.
        captured = _Captured(inputs, Runner(self.device, run, lambda: None, lambda: lambda: None, name="the prompt", warm=1))
        return captured


def _takes_index(model: Any) -> bool:
    """Does the model's code tell an index of the tokens whose logits are wanted from their number? Other code would take one for the other."""
    owner = next(cls for cls in type(model).__mro__ if "forward" in vars(cls))
    try:
        source = inspect.getsource(sys.modules[owner.__module__])
    except (KeyError, OSError, TypeError):  # no file
        return False
    return any(told in source for told in ("isinstance(logits_to_keep, int)", "slice_logits_to_keep(hidden_states, logits_to_keep)"))


def _why_never(cache: Any, device: Host, accepts: set[str]) -> str:
    if not device.captures:
        return "the device captures no graphs"
    if not caches.is_ours(cache):
        return f"a {type(cache).__name__}"
    if cache.others:
        return f"the cache has layers of {', '.join(cache.others)}"
    if cache.format is not None and cache.format.exact:
        return f"tokens behind the prompt would take the place of exact ones that {cache.format.name} keeps"
    if missing := sorted({"position_ids", "logits_to_keep"} - accepts):
        return f"the model takes no {' and no '.join(missing)}" + (" by index" if missing == ["logits_to_keep"] else "")
    return ""

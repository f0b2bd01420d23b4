"""vLLM's compilation: its ranges follow our kernels, its range proves M, and its cache knows our sources.

vLLM traces a model once and drops every guard, then compiles the graph once for each range of numbers of tokens. So "guarded" must
never be chosen (the range decides, or the op at run time), a range must not straddle two kernels, and a graph in vLLM's own cache must
not outlive the lowerings that made it: no key of vLLM's knows torch's ``cache_key_tag``, but all of them hash ``additional_config``.

A graph stands between two attentions, which are vLLM's own. vLLM launches all of a model's graphs on one stream, and nothing in a step writes a weight
(:mod:`..._engines`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from ..._engines import add_provider
from ..._salt import cache_salt
from ..._torch.compiling import merge_untimed
from ..._torch.fx import whole_graph
from ...config import dispatch_config, set_dispatch
from ...kernels import select
from ...kernels.select import Call, plan
from ...passes.operators import add_norms
from ...ranges import add_range_provider
from . import ranks
from .engine import ADD_NORM, NORM, CompilationMode, get_current_vllm_config_or_none, leave_untuned, range_of_compilation
from .settings import KEY, SALT, Settings

_ENDS = "_fp4_inductor_ends"
# vLLM has Inductor merge neighbouring kernels (norm and rotation of query and key) where that is faster, by compiling and timing both forms in each graph.
# Steps of 1, 8 and 32 requests take the same time without that, and the start of Qwen3-8B 98 s for 110 (H200). A prompt of 2,048 tokens takes 34.9 ms for 30.6.
_UNTIMED = 512
_registered = False
_compilation: Any = None  # of the engine whose layers were built last in this process
_prefetches = False  # weights of that engine to the GPU, during a step


def register() -> None:
    """Let vLLM's range prove M, its norms and its sums over ranks be known, and what it promises. May be called again."""
    global _registered
    if not _registered:
        add_range_provider(range_of_graph)
        add_provider(promises)
        add_norms(NORM, ADD_NORM)
        whole_graph(0, _merge_few_tokens_untimed)
        ranks.register()
        _registered = True


def promises() -> bool:
    """Is a graph of vLLM's compiled now, whose steps write no weights? They do where vLLM prefetches offloaded weights."""
    return range_of_compilation() is not None and not _prefetches


def range_of_graph() -> tuple[int, int | None] | None:
    """(least, largest) number of tokens that the graph which vLLM compiles now is run with; None if it compiles none.

    A range begins at 1 also where 1 is a size with a graph of its own, which vLLM asks first.
    """
    found = range_of_compilation()
    if found is not None and found[0] == 1 != found[1] and 1 in (getattr(_compilation, "compile_sizes", None) or ()):
        return 2, found[1]
    return found


def _merge_few_tokens_untimed(graph: Any) -> None:
    """A pass that changes no node: it is where code runs within the compilation of one graph, and vLLM's patch of Inductor's config ends with that."""
    found = range_of_compilation()
    if found is not None and found[1] is not None and found[1] <= _UNTIMED:
        merge_untimed()


def set_fields(settings: Settings) -> None:
    """Put the user's :class:`fp4_inductor.DispatchConfig` into force in this process, which compiles the engine's graphs and runs its eager calls."""
    config = dispatch_config()
    if any(getattr(config, name) != value for name, value in settings.dispatch):
        set_dispatch(**dict(settings.dispatch))


def mark_cache(vllm_config: Any) -> None:
    """Put the salt into the key of vLLM's compile cache, and note whether vLLM prefetches weights, which that key has anyhow."""
    global _prefetches
    offload = getattr(vllm_config, "offload_config", None)
    _prefetches = getattr(offload, "offload_backend", "") == "prefetch" or getattr(getattr(offload, "prefetch", None), "offload_group_size", 0) > 0
    additional = getattr(vllm_config, "additional_config", None)
    if isinstance(additional, dict):
        additional[KEY] = {**additional.get(KEY, {}), SALT: cache_salt()}


def add_layer(op: str, n: int, k: int, settings: Settings, glu: bool = False) -> None:
    """A layer of ``[n, k]`` is about to be built: vLLM's ranges end where other kernels serve the model.

    Args:
        op: of torch.ops.fp4. glu: it is gate and up, which a graph fuses with the activation between them.
    """
    _add([(op, n, k), *([("linear_glu", n, k)] if glu else [])], n * k, settings)


def add_experts(settings: Settings) -> None:
    """Experts run inside an op of vLLM's that is not traced on a GPU: only the user's own bounds count."""
    _add([], 0, settings)


class Ends:
    """Where the ranges of one engine end: ``given`` by vLLM, and at bounds since the last of which a third of the weights change kernels.

    Each end is at least twice the one before it. Each range is compiled on its own, which takes seconds. Where a range holds a bound
    of a few layers, these layers are left to the op, which chooses at each call; under a CUDA graph that costs nothing.
    """

    def __init__(self, given: list[int]):
        self.given = list(given)
        self.weights = 0
        self.changing: Counter[int] = Counter()

    def add(self, bounds: Iterable[int], weights: int) -> None:
        self.weights += weights
        for bound in set(bounds):
            self.changing[bound] += weights

    def kept(self) -> list[int]:
        kept: list[int] = []
        since = 0
        for bound, weights in sorted(self.changing.items()):
            since += weights
            if 3 * since >= self.weights and (not kept or bound >= 2 * kept[-1]):
                kept.append(bound)
                since = 0
        return kept


def _add(layers: list[tuple[str, int, int]], weights: int, settings: Settings) -> None:
    vllm_config = get_current_vllm_config_or_none()
    if vllm_config is None:
        return
    global _compilation
    _compilation = compilation = vllm_config.compilation_config
    if compilation.mode != CompilationMode.VLLM_COMPILE or not compilation.compile_ranges_endpoints:
        return
    if settings.bounds is not None:
        set_ranges(compilation, compilation.compile_ranges_endpoints, settings.bounds)
    elif layers:
        ends = vars(compilation).setdefault(_ENDS, Ends(compilation.compile_ranges_endpoints))
        ends.add(_bounds(tuple(layers), vllm_config.device_config.device_type, vllm_config.model_config.dtype, settings.prefill), weights)
        set_ranges(compilation, ends.given, ends.kept())


@functools.lru_cache(maxsize=64)
def _bounds(layers: tuple[tuple[str, int, int], ...], device: str, dtype: torch.dtype, prefill: str) -> tuple[int, ...]:
    """The numbers of tokens at which a layer changes its kernel, ascending; ``layers``: the calls that it may become.

    As :func:`fp4_inductor.bounds`, which stands on a floor above, for a device that is here.
    """
    place, found = torch.device(device), [0]
    _compile_ahead(layers, select.arch_of(place), dtype, prefill)
    for op, n, k in sorted(layers, key=lambda layer: layer[0] != "linear_glu"):  # the product alone counts from where it is not fused
        if op == "linear_glu" and select.arch_of(place) == 0:  # it is made for CUDA only
            continue
        call = select.expect(op, place, dtype, n, k, prefill)
        found += [bound for bound in plan(call, dispatch_config()).bounds if bound > found[-1]]
    return tuple(found[1:])


def _compile_ahead(layers: tuple[tuple[str, int, int], ...], arch: int, dtype: torch.dtype, prefill: str) -> None:
    """Begin to compile the CUDA sources of all that a graph may make of these layers, while the model is built and loaded; nothing if they are compiled."""
    if arch:
        select.compile_ahead(
            Call(op, arch, dtype, n, k, prefill, "", triton=select.triton_version()) for layer, n, k in layers for op in select.BECOMES.get(layer, (layer,))
        )


def set_ranges(compilation: Any, given: Iterable[int], bounds: Iterable[int]) -> None:
    """End ranges at ``given`` and at those of ``bounds`` below the last one; 1 becomes a size, for vLLM drops an end there."""
    given, bounds = set(given), set(bounds)
    compilation.compile_ranges_endpoints = sorted(given | {b for b in bounds if 1 < b < max(given)})
    if 1 in bounds:
        if not compilation.compile_sizes:
            leave_untuned()
        compilation.compile_sizes = sorted({*(compilation.compile_sizes or ()), 1})

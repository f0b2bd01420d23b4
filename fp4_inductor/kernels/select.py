"""Selection as a pure function: a description of a call -> which kernel serves which M, and why the others do not.

The questions to the machine are asked in :func:`describe`, once, while the description is made.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import DispatchConfig, dispatch_config
from ..errors import ConfigError, KernelError
from ..formats import kv
from ..formats.packing import MAX_SCALES
from ..ops.cached_call import CachedCall, Prologue
from . import choose, registry
from .asked import (
    CODES,
    EMPTY,
    NO_COUNTERS,
    NOT_CONTIGUOUS,
    NOT_PLAIN,
    ODD_SLOTS,
    OTHER_MASK,
    OTHER_ROTATION,
    OTHER_SIZE,
    OVERWRITTEN,
    SEVERAL_QUERIES,
    TURNS,
    WIDE_PROLOGUE,
    cache_in,
    suits_clusters,
)
from .choose.common import ONE_LAUNCH as ONE_LAUNCH
from .forms import Options
from .kernel import LOST, Call, Kernel, Span


def csrc_door(name: str, arch: int) -> str:
    """How calls reach the kernel ``name`` of ``csrc/``: a torch operator, or ctypes and why."""
    from . import csrc

    return csrc.door(name, arch)


def csrc_arguments(name: str, options: Options) -> tuple:
    """Of ``torch.ops.fp4_csrc.<name>`` behind ``arch``."""
    from . import csrc

    return csrc.extra_arguments(name, options)


def moe_op(gate_up_meta: object, down_meta: object) -> str:
    """The op whose kernels serve a call of ``fp4.moe`` with this metadata: one 2:4-sparse weight makes it sparse."""
    return "moe" if gate_up_meta is None and down_meta is None else "sparse_moe"


def moe_form(activation: str, gated: bool, inner: int, experts: int, on_input: bool, biases: Iterable[torch.dtype], op: str = "moe") -> tuple[str, ...]:
    """What a call of ``fp4.moe`` asks for besides a SwiGLU layer (``"silu"`` and ``"swiglu_oai"``) of common sizes, which is all that ``plain`` kernels serve.

    ``biases``: the dtypes of those that it has. ``op``: of :func:`moe_op`.
    """
    multiple = 256 if op == "sparse_moe" else 64
    asked = {
        f'activation="{activation}"': activation not in ("silu", "swiglu_oai"),
        "no gate": not gated,
        f"I = {inner}, no multiple of {multiple}": inner % multiple != 0,
        f"{experts} experts, more than 1024": experts > 1024,
        "weight_on_input": on_input,
        "biases that are not bfloat16": any(dtype != torch.bfloat16 for dtype in biases),
    }
    return tuple(what for what, is_asked in asked.items() if is_asked)


def scales_of(global_scale: Sequence[Any]) -> int:
    """How many global scales an expert's first weight has, from their shape: ``[E, 2]``, or one for each expert."""
    return 2 if len(global_scale) == 2 else 1


def of_scales(count: int, arch: int, apart: bool = False) -> str:
    """How ``count`` global scales of one product are served, for ``explain()``; empty of one. ``apart``: the kernel does not take them together."""
    if count < 2:
        return ""
    calls = -(-count // MAX_SCALES)
    if arch == 0 or (calls == 1 and not apart):
        return f"{count} global scales"
    return f"{count} global scales: {calls} calls, whose results are put together" if calls > 1 else f"{count} global scales: a call each, put together"


def attention_form(d: int, codes: bool = False, shared_mask: bool = True) -> tuple[str, ...]:
    """What a call of ``fp4.decode_attention`` with heads of width ``d`` asks for besides what ``plain`` kernels serve.

    codes: it has scales. shared_mask: it has a bool mask for all heads (:func:`is_shared`).
    """
    asked = {f"heads of width {d}, more than 256": d > 256, CODES: codes, OTHER_MASK: not shared_mask}
    return tuple(what for what, is_asked in asked.items() if is_asked)


def is_shared(mask: Tensor | None) -> bool:
    """Is it a bool mask ``[B, 1, Q, S]`` that all heads share?"""
    return mask is not None and mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1] == 1


def _turns_by_lanes(p: Prologue) -> bool:
    """Is its rotation, if there is one, that of the first 64 or 128 channels, by angles for all of them or for a half?"""
    return p.cos is None or (p.turning in (64, 128) and p.turning in (p.cos.shape[-1], 2 * p.cos.shape[-1]))


def cached_form(c: CachedCall) -> tuple[str, ...]:
    """What a call of ``fp4.cached_attention`` asks for besides a decode step over a cache that counts arrivals. Reads shapes, strides and dtypes only."""
    width, mask, queries = c.query.shape[3], c.mask, c.query.shape[2]
    quantized = () if c.stored is None else (c.keys, c.values, *(t for t in c.stored if t is not None))
    exact = None if c.stored is None else c.stored.exact_keys
    plain = c.format is None and not c.empty
    asked = {
        cache_in(c.format.name if c.format else ""): c.format is not None,
        OVERWRITTEN: exact is not None and exact.shape[2] < kv.FIRST + kv.LAST - 1 + queries,
        "parts of a cache that are not contiguous": not all(t.is_contiguous() for t in quantized),
        NO_COUNTERS: c.arrivals is None or not c.arrivals.is_contiguous(),
        EMPTY: c.empty,
        NOT_PLAIN: c.empty and not (mask is None and c.softcap is None and c.sinks is None and (c.window is None or queries <= c.window)),
        f"values of another width, {c.value.shape[3]}": c.value.shape[3] != width,
        "a mask that adds numbers": mask is not None and mask.dtype != torch.bool,
        "a mask for each query or head": mask is not None and tuple(mask.shape[1:3]) != (1, 1),
        "attention that is not causal": not c.causal,
        SEVERAL_QUERIES: not c.empty and queries != 1,
        OTHER_ROTATION: not c.empty and c.prologue is not None and not _turns_by_lanes(c.prologue),
        WIDE_PROLOGUE: not c.empty and c.prologue is not None and any(t.dtype != c.query.dtype for t in c.prologue.tensors),
        ODD_SLOTS: not c.empty and c.format is not None and c.slots % kv.SLOTS != 0,
        NOT_CONTIGUOUS: plain and not (c.keys.is_contiguous() and c.values.is_contiguous()),
        OTHER_SIZE: not c.empty and queries == 1 and not suits_clusters(c.query.shape[0] * c.key.shape[1], c.slots, c.format.name if c.format else ""),
        TURNS: c.window is not None and queries > c.slots - c.window + 1,
        "a cache whose channels are apart": c.keys.stride(3) != 1 or c.values.stride(3) != 1,
    }
    return attention_form(width) + tuple(what for what, is_asked in asked.items() if is_asked)


ATTENTION_NOTE = "attention: M is queries times heads that share a KV head, N heads, K the width of a head"


@functools.cache
def triton_version() -> tuple[int, int]:
    """(major, minor) of the installed Triton, which is not imported; (0, 0) if there is none."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0, 0


def arch_of(device: torch.device) -> int:
    """Compute capability times ten; 0 for anything but CUDA."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


class Counts(NamedTuple):
    """How many matrices ``[N, K]`` a token's are chosen from (of ``fp4.moe`` :attr:`.MoeCall.chosen_from`, else 1), and how many global scales one has."""

    experts: int = 1
    scales: int = 1


ONE = Counts()


def describe(
    op: str, device: torch.device | int, dtype: torch.dtype, n: int, k: int, prefill: str = "auto", form: tuple[str, ...] = (), counts: Counts = ONE,
    eager: bool = False,
) -> Call:  # fmt: skip
    """The :class:`Call` for a weight ``[n, k]`` on ``device``, or a device of that architecture; ``form``, ``eager``: as of :class:`Call`."""
    arch = device if isinstance(device, int) else arch_of(device)
    call = Call(op, arch, dtype, n, k, prefill, "", counts.experts, triton_version() if arch else (99, 0), form, counts.scales, eager)
    return replace(call, csrc=csrc_status(call))


def expect(op: str, device: torch.device, dtype: torch.dtype, n: int, k: int, prefill: str = "auto", form: tuple[str, ...] = ()) -> Call:
    """As :func:`describe`, but nobody waits: CUDA kernels that are still being compiled count as there. For what may be wrong if one fails to compile."""
    call = Call(op, arch_of(device), dtype, n, k, prefill, "", 1, triton_version() if device.type == "cuda" else (99, 0), form)
    return replace(call, csrc=csrc_status(call, wait=False))


def csrc_names(call: Call) -> list[str]:
    """The CUDA kernels that serve ``call`` for some M. Where only kernels that are switched off have CUDA for its op, what fp4.linear has; none of those for
    half an RMSNorm, for which a pass asks at every norm."""
    candidates = dispatch_config().candidates
    own = [(kernel, on) for kernel in registry.kernels(call.op) if kernel.csrc and (on := kernel.at(call.arch))]
    if own and all(on.off and kernel.name not in candidates for kernel, on in own):
        return [] if all(kernel.library and kernel.library.half for kernel, _ in own) else ["linear_small"]
    try:
        spans = plan(replace(call, csrc=""), DispatchConfig(candidates=candidates)).rows
    except KernelError:
        return []
    return sorted({span.csrc for span in spans if span.csrc})


def csrc_status(call: Call, wait: bool = True) -> str:
    """Empty if the CUDA kernels that serve ``call`` are compiled; else why not. They are compiled now, together, if they are not: some seconds, once.

    Without ``wait`` it is also empty while they are being compiled.
    """
    from . import csrc

    names = csrc_names(call)
    csrc.start(names, call.arch)
    why_not = csrc.why_not if wait else csrc.why_never
    return next(filter(None, (why_not(name, call.arch) for name in names)), "")


# The ops that a graph may make of a linear layer, and of gate and up with the activation between them.
BECOMES = {
    "linear": ("linear", "linear_epilogue", "linear_chain", "linear_residual_squares", "rms_scaled_linear"),
    "linear_glu": ("linear_glu", "rms_scaled_linear_glu"),
}


def compile_ahead(calls: Iterable[Call]) -> None:
    """Begin to compile, in the background, the CUDA kernels that serve these calls."""
    from . import csrc

    names: dict[int, set[str]] = {}
    for call in calls:
        names.setdefault(call.arch, set()).update(csrc_names(call))
    for arch, needed in names.items():
        csrc.start(sorted(needed), arch)


@dataclass(frozen=True)
class Refused:
    """A kernel of the op that does not serve the call, and why."""

    kernel: Kernel
    reason: str


@dataclass(frozen=True)
class Plan:
    """Spans in ascending order of ``max_m``; the last one has no limit. ``refused`` says why other kernels of the op are absent."""

    call: Call
    rows: tuple[Span, ...]
    refused: tuple[Refused, ...]

    @property
    def bounds(self) -> tuple[int, ...]:
        """The M at which one kernel gives way to the next."""
        return tuple(row.max_m for row in self.rows[:-1] if row.max_m is not None)

    def pick(self, m: int) -> Span:
        """The span for a concrete number of rows."""
        return self.rows[sum(m > bound for bound in self.bounds)]


def plan(call: Call, config: DispatchConfig, kernels: Iterable[Kernel] | None = None) -> Plan:
    """The kernels that serve ``call``, by M: those that can (:meth:`Kernel.refusal`) and are switched on, as :mod:`.choose` prefers them.

    ``kernels``: those that there are; None: the registered ones.

    Raises:
        KernelError: no kernel serves every M; the message lists every reason.
        ConfigError: a threshold names an unknown regime, or a candidate a kernel that is not one.
    """
    limits = dict(config.thresholds)
    _check(config, limits)
    of_op = {kernel.name: kernel for kernel in (registry.kernels() if kernels is None else kernels) if kernel.op == call.op}
    reasons = {name: _why_not(kernel, call, config) for name, kernel in of_op.items()}
    able = {name: on for name, kernel in of_op.items() if reasons[name] is None and (on := kernel.at(call.arch)) is not None}
    off = frozenset(name for name in able if limits.get(of_op[name].regime) == 0)
    can = choose.Can(frozenset(able), off)
    wanted: list[tuple[int | None, str]] = [
        (kernel.until(call), name) for name, kernel in of_op.items() if kernel.until is not None and can(name) and call.scales == 1
    ]
    wanted += choose.spans(call, can)
    last = next((name for most, name in wanted if most is None), None)
    if last is None:
        raise KernelError(
            f"no kernel serves fp4.{call.op}",
            value=call,
            limit=[f"{name}: {reason}" for name, reason in reasons.items() if reason],
            remedy="Remove one of these reasons, or move the model to the CPU.",
        )
    limited = [(_limit(of_op[name], most, limits, call.arch) if name != last else most, name) for most, name in wanted if most is not None]
    spans: list[Span] = []
    for most, name in [*sorted(limited, key=lambda span: span[0]), (None, last)]:
        kernel = of_op[name]
        before = spans[-1] if spans else None
        if most is not None and most <= (before.max_m or 0 if before else 0):
            continue  # never reached
        if before and before.kernel == name and not kernel.tile_by_bound:
            spans.pop()
        spans.append(Span(kernel, most, able[name], kernel.library.for_scales(call.scales) if kernel.library else None))
    chosen = {span.kernel for span in spans}
    preferred = f"{choose.place(call.arch)} prefers {', '.join(dict.fromkeys(span.kernel for span in spans))} for N = {call.n}, K = {call.k}"
    reasons |= dict.fromkeys(off, "switched off by DispatchConfig.thresholds")
    refused = tuple(Refused(kernel, reasons[name] or preferred) for name, kernel in of_op.items() if name not in chosen)
    return Plan(call, tuple(spans), refused)


def _limit(kernel: Kernel, most: int, limits: dict[str, int], arch: int) -> int:
    """The largest M of a kernel that is preferred up to ``most``: a threshold moves it; a kernel for one row leaves more to others of its regime."""
    limit = limits.get(kernel.regime, most)
    return min(limit, 1) if kernel.library and kernel.library.most_rows(arch) == 1 else limit


def _check(config: DispatchConfig, limits: dict[str, int]) -> None:
    """Are the names in ``config`` those of regimes and of kernels that are off somewhere?"""
    regimes = registry.regimes() if limits else ()
    if unknown := set(limits) - set(regimes):
        raise ConfigError(
            "a threshold names an unknown regime", value=sorted(unknown), limit=list(regimes), remedy="Correct the names in DispatchConfig(thresholds=...)."
        )
    off = {kernel.name for kernel in registry.kernels() if any(on.off for on in kernel.on)} if config.candidates else set()
    if strangers := set(config.candidates) - off:
        raise ConfigError(
            "a candidate is not a kernel that waits to be switched on",
            value=sorted(strangers),
            limit=sorted(off),
            remedy="Correct the names in DispatchConfig(candidates=...).",
        )


def _why_not(kernel: Kernel, call: Call, config: DispatchConfig) -> str | None:
    """Why ``kernel`` cannot serve ``call``, or waits to be switched on."""
    reason, on = kernel.refusal(call), kernel.at(call.arch)
    if reason is None and on is not None and on.off and kernel.name not in config.candidates:
        state = f"{on.status} ({on.why})" if on.status == LOST else f"{on.status} on a GPU"
        return f'{state}: switch it on with fp4_inductor.dispatch(candidates=("{kernel.name}",))'
    return reason

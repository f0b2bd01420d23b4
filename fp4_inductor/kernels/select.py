"""Selection as a pure function: a description of a call -> an ordered plan of regimes, and why rows were refused.

The questions to the machine are asked in :func:`describe`, once, while the description is made.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config import DispatchConfig
from ..errors import ConfigError, KernelError
from ..formats.packing import MAX_SCALES
from .linear.configs import Epilogue
from .table import LOST, REGIMES, ROWS, Row, for_scales


def csrc_door(name: str, arch: int) -> str:
    """How calls reach the kernel ``name`` of ``csrc/``: a torch operator, or ctypes and why."""
    from . import csrc

    return csrc.door(name, arch)


def csrc_arguments(name: str, then: Epilogue, early: bool) -> tuple:
    """Of ``torch.ops.fp4_csrc.<name>`` behind ``arch``: its own choice of a tile, what it does besides the product, whether it begins early."""
    from . import csrc

    return csrc.extra_arguments(name, then=then, early=early)


def csrc_begins_early(name: str) -> bool:
    """Can the kernel ``name`` of ``csrc/`` begin while the kernel before it is still running?"""
    from . import csrc

    return csrc.KERNELS[name].early


def moe_op(gate_up_meta: object, down_meta: object) -> str:
    """The key of the rows that serve a call of ``fp4.moe`` with this metadata: one 2:4-sparse weight makes it sparse."""
    return "moe" if gate_up_meta is None and down_meta is None else "sparse_moe"


def moe_form(activation: str, gated: bool, inner: int, experts: int, on_input: bool, biases: Iterable[torch.dtype], op: str = "moe") -> tuple[str, ...]:
    """What a call of ``fp4.moe`` asks for besides a SwiGLU layer (``"silu"`` and ``"swiglu_oai"``) of common sizes, which is all that ``plain`` rows serve.

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


def attention_form(d: int) -> tuple[str, ...]:
    """What a call of ``fp4.decode_attention`` with heads of width ``d`` asks for besides what ``plain`` rows serve."""
    return (f"heads of width {d}, more than 256",) if d > 256 else ()


ATTENTION_NOTE = "fp4.decode_attention: M is queries times heads that share a KV head, N heads, K the width of a head"


@dataclass(frozen=True)
class Call:
    """What selection may look at. M is not part of it: it may be symbolic.

    Args:
        op: ``torch.ops.fp4`` name, or ``"sparse_moe"``: ``fp4.moe`` with 2:4-sparse experts.
        arch: compute capability times ten, 0 for CPU.
        dtype: activation dtype.
        n, k: weight shape; of ``fp4.decode_attention`` the number of heads and their width.
        prefill: as in :class:`fp4_inductor.NVFP4Config`.
        csrc: empty if the CUDA sources are compiled for this GPU, else why they are not.
        experts: E of ``fp4.moe``, whose M is T * k; 1 elsewhere.
        triton: the version of Triton here; (0, 0): there is none.
        form: of ``fp4.moe``, :func:`moe_form`; of ``fp4.decode_attention``, :func:`attention_form`.
        scales: how many global scales the weight has; of ``fp4.moe`` an expert's first one.
    """

    op: str
    arch: int
    dtype: torch.dtype
    n: int
    k: int
    prefill: str = "auto"
    csrc: str = ""
    experts: int = 1
    triton: tuple[int, int] = (99, 0)
    form: tuple[str, ...] = ()
    scales: int = 1


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


def describe(
    op: str, device: torch.device, dtype: torch.dtype, n: int, k: int, prefill: str = "auto", experts: int = 1, form: tuple[str, ...] = (), scales: int = 1
) -> Call:  # fmt: skip
    """The :class:`Call` for a weight ``[n, k]`` on ``device``, or for ``experts`` of them."""
    return describe_for(op, arch_of(device), dtype, n, k, prefill, experts, form, scales)


def describe_for(
    op: str, arch: int, dtype: torch.dtype, n: int, k: int, prefill: str = "auto", experts: int = 1, form: tuple[str, ...] = (), scales: int = 1
) -> Call:  # fmt: skip
    """As :func:`describe`, for the architecture of a device of this machine."""
    call = Call(op, arch, dtype, n, k, prefill, "", experts, triton_version() if arch else (99, 0), form, scales)
    return replace(call, csrc=csrc_status(call))


def csrc_names(call: Call) -> list[str]:
    """The CUDA kernels that serve ``call`` by default, for some M. Where candidates alone serve its op there, what fp4.linear has."""
    rows = [row for row in ROWS if row.op == call.op and row.csrc and row.arch[0] <= call.arch <= row.arch[1]]
    if rows and all(row.off for row in rows):
        return ["linear_small"]
    return sorted({for_scales(row.csrc, call.scales) for row in rows if not row.off and _refusal(row, call) is None})


def csrc_status(call: Call) -> str:
    """Empty if the CUDA kernels that serve ``call`` are compiled; else why not. They are compiled now, together, if they are not: some seconds, once."""
    from . import csrc

    names = csrc_names(call)
    csrc.start(names, call.arch)
    return next(filter(None, (csrc.why_not(name, call.arch) for name in names)), "")


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
    row: Row
    reason: str


@dataclass(frozen=True)
class Plan:
    """Rows in ascending order of ``max_m``; the last one has no limit. ``refused`` says why the others are absent."""

    call: Call
    rows: tuple[Row, ...]
    refused: tuple[Refused, ...]

    @property
    def bounds(self) -> tuple[int, ...]:
        """The M at which one regime gives way to the next."""
        return tuple(row.max_m for row in self.rows[:-1] if row.max_m is not None)

    def pick(self, m: int) -> Row:
        """The row for a concrete number of rows."""
        return self.rows[sum(m > bound for bound in self.bounds)]


def plan(call: Call, config: DispatchConfig, rows: Iterable[Row] = ROWS) -> Plan:
    """Filter and order the rows for ``call``.

    Raises:
        KernelError: no row without a limit on M accepts the call; the message lists every reason.
        ConfigError: a threshold names an unknown regime, or a candidate a kernel that is not one.
    """
    rows = tuple(rows)
    overrides = dict(config.thresholds)
    unknown = set(overrides) - set(REGIMES)
    if unknown:
        raise ConfigError(
            "a threshold names an unknown regime", value=sorted(unknown), limit=list(REGIMES), remedy="Correct the names in DispatchConfig(thresholds=...)."
        )
    off = {row.kernel for row in (*ROWS, *rows) if row.off}
    strangers = set(config.candidates) - off
    if strangers:
        raise ConfigError(
            "a candidate is not a kernel that waits to be switched on",
            value=sorted(strangers),
            limit=sorted(off),
            remedy="Correct the names in DispatchConfig(candidates=...).",
        )
    accepted, refused = [], []
    for row in rows:
        if row.op != call.op:
            continue
        why = _refusal(row, call)
        if row.m_per_expert and row.max_m is not None:
            row = replace(row, max_m=max(row.max_m, int(row.m_per_expert * call.experts)))
        if why is None and row.off and row.kernel not in config.candidates:
            state = f"{row.status} ({row.reason})" if row.status == LOST else f"{row.status} on a GPU"
            why = f'{state}: switch it on with fp4_inductor.dispatch(candidates=("{row.kernel}",))'
        if why is None and row.regime in overrides:
            if row.max_m is None:
                pass  # the last resort has no bound to override
            elif overrides[row.regime] == 0:
                why = "switched off by DispatchConfig.thresholds"
            else:
                row = replace(row, max_m=overrides[row.regime])
                if overrides[row.regime] < row.min_m:
                    why = f"serves M >= {row.min_m}, DispatchConfig.thresholds ends the regime before"
        if call.scales > 1:
            row = replace(row, csrc=for_scales(row.csrc, call.scales))
        if why is None:
            accepted.append(row)
        else:
            refused.append(Refused(row, why))
    candidates = {row.regime: row.kernel for row in accepted if row.off}
    for row in [r for r in accepted if not r.off and r.regime in candidates]:
        accepted.remove(row)
        refused.append(Refused(row, f"the candidate {candidates[row.regime]} is switched on in its place"))
    for row in [r for r in accepted if r.without in {other.regime for other in accepted}]:
        accepted.remove(row)
        refused.append(Refused(row, f"the {row.without} regime serves this range"))
    accepted.sort(key=lambda row: float("inf") if row.max_m is None else row.max_m)
    unlimited = [row for row in accepted if row.max_m is None]
    if not unlimited:
        raise KernelError(
            f"no kernel serves fp4.{call.op}",
            value=call,
            limit=[f"{r.row.kernel}: {r.reason}" for r in refused],
            remedy="Remove one of these reasons, or move the model to the CPU.",
        )
    # Several rows without a limit: table order is preference. A row whose bound does not exceed the one before is unreachable.
    chosen: list[Row] = []
    for row in [*[r for r in accepted if r.max_m is not None], unlimited[0]]:
        if chosen and row.max_m is not None and chosen[-1].max_m is not None and row.max_m <= chosen[-1].max_m:
            refused.append(Refused(row, f"{chosen[-1].kernel} already serves M <= {chosen[-1].max_m}"))
        else:
            below = (chosen[-1].max_m or 0) if chosen else 0
            if row.min_m > below + 1:
                chosen.append(replace(unlimited[0], max_m=row.min_m - 1))
            chosen.append(row)
    refused += [Refused(row, f"{unlimited[0].kernel} is preferred") for row in unlimited[1:]]
    return Plan(call, _merged(chosen), tuple(refused))


def _merged(rows: list[Row]) -> tuple[Row, ...]:
    """``rows`` without bounds at which nothing changes: a kernel of ``csrc/`` picks its tile by M itself."""
    out: list[Row] = []
    for row in rows:
        before = out[-1] if out else None
        if before and row.csrc and (before.regime, before.kernel, before.csrc, before.one_scale) == (row.regime, row.kernel, row.csrc, row.one_scale):
            out.pop()
        out.append(row)
    return tuple(out)


def _refusal(row: Row, call: Call) -> str | None:
    low, high = row.arch
    if not low <= call.arch <= high:
        return "needs a CPU" if high == 0 else f"needs sm_{low} to sm_{high}, this is {'a CPU' if call.arch == 0 else f'sm_{call.arch}'}"
    if call.dtype not in row.dtypes:
        return f"takes {', '.join(str(d).removeprefix('torch.') for d in row.dtypes)} activations, these are {str(call.dtype).removeprefix('torch.')}"
    if call.prefill not in row.prefill:
        return f'prefill="{call.prefill}"'
    if row.csrc and call.csrc:
        return call.csrc
    if row.plain and call.form:
        return f"does not take {', '.join(call.form)}"
    if row.triton > call.triton:
        return f"needs Triton {row.triton[0]}.{row.triton[1]} or later, this is {call.triton[0]}.{call.triton[1]}"
    if call.k % row.k_multiple:
        return f"K = {call.k} is not a multiple of {row.k_multiple}"
    if row.not_k_multiple and call.k % row.not_k_multiple == 0:
        return f"K = {call.k} is a multiple of {row.not_k_multiple}"
    if not row.n[0] <= call.n <= row.n[1]:
        return f"N = {call.n} is not in {row.n[0]} to {row.n[1]}"
    if row.max_weights is not None and call.n * call.k > row.max_weights:
        return f"N * K = {call.n * call.k} is more than {row.max_weights}"
    if call.n * call.k < row.min_weights:
        return f"N * K = {call.n * call.k} is less than {row.min_weights}"
    if call.n % row.n_multiple:
        return f"N = {call.n} is not a multiple of {row.n_multiple}"
    return None

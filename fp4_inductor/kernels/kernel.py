"""What a kernel is: which calls it can serve (correctness), where it has run, and how its results depend on the batch.

Which of the kernels that can serve a call does serve it is another question: :mod:`fp4_inductor.kernels.choose` answers it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..ops.linear import PREFILL
from .forms import Form, Launches, Library

BF16 = (torch.bfloat16,)
HALF = (torch.bfloat16, torch.float16)
ANY = (torch.bfloat16, torch.float16, torch.float32)

# A kernel that is only emulated, or that lost where it was measured, never serves a call by itself: DispatchConfig(candidates=...) switches it on.
Status = Literal[
    "measured on H200", "measured on H100", "right on H200, not timed; elsewhere compiled", "compiled, not run", "runs in CI", "emulated, not timed",
    "measured, off",
]  # fmt: skip
EMULATED: Status = "emulated, not timed"
LOST: Status = "measured, off"
MEASURED: Status = "measured on H200"
MEASURED_H100: Status = "measured on H100"
RIGHT: Status = "right on H200, not timed; elsewhere compiled"  # lowering_tests/gpu compares it with float64 there
COMPILED: Status = "compiled, not run"
IN_CI: Status = "runs in CI"

# What many kernels have in common: the values of ``prefill`` that allow FP8 products, and why results depend on how many rows share a call.
FP8 = ("auto", "fp8")
BY_LIBRARY = (1, "the library chooses its algorithm by M")
SPLITS = (1, "the tile and the number of blocks that share K follow M")
CPU_ROWS = (8, "up to 8 rows are summed in another order than more")


@dataclass(frozen=True)
class Call:
    """What selection may look at. M is not part of it: it may be symbolic.

    Args:
        op: ``torch.ops.fp4`` name, or ``"sparse_moe"``: ``fp4.moe`` with 2:4-sparse experts (one of the two weights is enough).
        arch: compute capability times ten, 0 for CPU.
        dtype: activation dtype.
        n, k: weight shape; of ``fp4.decode_attention`` the number of heads and their width.
        prefill: as in :class:`fp4_inductor.NVFP4Config`.
        csrc: empty if the CUDA sources are compiled for this GPU, else why they are not.
        experts: of ``fp4.moe``, whose M is T * k, how many a token's are chosen from, those of other ranks included; 1 elsewhere.
        triton: the version of Triton here; (0, 0): there is none.
        form: of ``fp4.moe``, :func:`fp4_inductor.kernels.select.moe_form`; of ``fp4.decode_attention``, ``select.attention_form``.
        scales: how many global scales the weight has; of ``fp4.moe`` an expert's first one.
        eager: a call outside of a compiled graph. Nothing proves there that the kernel may begin while the one before it runs.
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
    eager: bool = False

    @property
    def weights(self) -> int:
        """N * K."""
        return self.n * self.k


@dataclass(frozen=True)
class On:
    """Compute capabilities times ten (0: a CPU), both ends included, for which a kernel is written, what has been run there, and why it is used there.

    ``why``: one sentence, at most 200 characters: the measurement or the hardware fact. Further figures stand in ``benchmarks/NOTES.md``.
    ``triton``: the oldest Triton that compiles it there.
    """

    first: int
    last: int
    status: Status
    why: str
    triton: tuple[int, int] = (0, 0)

    def holds(self, arch: int) -> bool:
        return self.first <= arch <= self.last

    @property
    def off(self) -> bool:
        """It serves only where ``DispatchConfig(candidates=...)`` names it."""
        return self.status in (EMULATED, LOST)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One way to serve one op. ``refusal`` decides whether it can serve a call; it knows nothing of speed.

    Args:
        op: as of :class:`Call`.
        name: as in ``explain()``, the journal and ``DispatchConfig.candidates``.
        regime: the name of ``DispatchConfig.thresholds`` that moves or ends its range of M.
        on: where it runs; the first range that holds an architecture counts.
        dtypes: activation dtypes.
        prefill: the values of ``prefill`` that allow its arithmetic.
        k_multiple, n_multiple: what K and N have to be multiples of.
        most_k: the largest K that it takes; None: any.
        only_k: every K that it takes; none: any.
        least_n, most_n: the fewest and the most outputs that it takes; None: any.
        one_scale: it takes a weight with one global scale only; others also several layers of one call, each with a global scale of its own.
        plain: it takes only calls whose ``form`` is empty.
        forms: it takes only calls whose ``form`` has one of these, and besides it nothing but ``serves``.
        serves: it takes only calls whose ``form`` has nothing but these.
        batch: (up to this M all calls sum a row in one order, what changes above).
        tile_by_bound: its tile follows the largest M of its range, so two neighbouring ranges of it are not one.
        form: what runs; None: the op computes the call itself, or another op does.
        until: for a kernel from outside of this package: the largest M that it should serve of a call, or None for all; 0 for none.
        launch: for a kernel from outside: ``launch(x, *parts of the weight, global_scale, bias) -> y``, x ``[M, K]`` contiguous, y ``[M, N]`` of
            its dtype. It is given one global scale.
    """

    op: str
    name: str
    regime: str
    on: tuple[On, ...]
    dtypes: tuple[torch.dtype, ...] = HALF
    prefill: tuple[str, ...] = PREFILL
    k_multiple: int = 16
    n_multiple: int = 1
    most_k: int | None = None
    only_k: tuple[int, ...] = ()
    least_n: int = 1
    most_n: int | None = None
    one_scale: bool = False
    plain: bool = False
    forms: tuple[str, ...] = ()
    serves: tuple[str, ...] = ()
    batch: tuple[int, str] = (1, "")
    tile_by_bound: bool = False
    form: Form | None = None
    until: Callable[[Call], int | None] | None = None
    launch: Callable[..., torch.Tensor] | None = None

    def source(self) -> Callable[..., Any]:
        """The Python function of a kernel of form :class:`Launches`."""
        if not isinstance(self.form, Launches):
            raise TypeError(f"{self.name} is no Python function: {self.form}")
        return self.form.source()

    @functools.cached_property
    def library(self) -> Library | None:
        """The library of ``csrc/`` behind it."""
        return self.form.library if isinstance(self.form, Launches) else self.form if isinstance(self.form, Library) else None

    @property
    def csrc(self) -> str:
        """The name of :attr:`library`; empty: there is none."""
        return self.library.name if self.library else ""

    def at(self, arch: int) -> On | None:
        """What is known of it on ``arch``; None: it is not written for it."""
        return next((on for on in self.on if on.holds(arch)), None)

    def refusal(self, call: Call) -> str | None:
        """Why it cannot serve ``call``, with the value and the limit; None: it can."""
        here = self.at(call.arch)
        if here is None:
            if all(on.last == 0 for on in self.on):
                return "needs a CPU"
            ranges = " or ".join(f"sm_{max(on.first, 80)} to sm_{on.last}" for on in self.on if on.last)
            return f"needs {ranges}, this is {'a CPU' if call.arch == 0 else f'sm_{call.arch}'}"
        if call.dtype not in self.dtypes:
            return f"takes {', '.join(_short(d) for d in self.dtypes)} activations, these are {_short(call.dtype)}"
        if call.prefill not in self.prefill:
            return f'prefill="{call.prefill}"'
        if self.csrc and call.csrc:
            return call.csrc
        if self.plain and call.form:
            return f"does not take {', '.join(call.form)}"
        if self.serves or self.forms:
            if others := [asked for asked in call.form if asked not in self.serves + self.forms]:
                return f"does not take {', '.join(others)}"
            if self.forms and not set(self.forms) & set(call.form):
                return f"takes {' or '.join(self.forms)} only"
        if here.triton > call.triton:
            return f"needs Triton {here.triton[0]}.{here.triton[1]} or later, this is {call.triton[0]}.{call.triton[1]}"
        if call.k % self.k_multiple:
            return f"K = {call.k} is not a multiple of {self.k_multiple}"
        if self.most_k is not None and call.k > self.most_k:
            return f"K = {call.k} is more than {self.most_k}"
        if self.only_k and call.k not in self.only_k:
            return f"K = {call.k} is none of {', '.join(map(str, self.only_k))}"
        if call.n % self.n_multiple:
            return f"N = {call.n} is not a multiple of {self.n_multiple}"
        if call.n < self.least_n:
            return f"N = {call.n} is less than {self.least_n}"
        if self.most_n is not None and call.n > self.most_n:
            return f"N = {call.n} is more than {self.most_n}"
        return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Span:
    """A kernel and the largest M that it serves of one call; None: no limit. The span before it ends where it begins."""

    implementation: Kernel
    max_m: int | None
    on: On
    library: Library | None = None

    @property
    def csrc(self) -> str:
        """The name of the library of ``csrc/`` that serves the call; empty: none does."""
        return self.library.name if self.library else ""

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.implementation.name

    @property
    def op(self) -> str:
        return self.implementation.op

    @property
    def regime(self) -> str:
        return self.implementation.regime

    @property
    def one_scale(self) -> bool:
        return self.implementation.one_scale

    @property
    def status(self) -> Status:
        return self.on.status

    @property
    def reason(self) -> str:
        """Why the kernel is used on this architecture."""
        return self.on.why

    @property
    def batch(self) -> str:
        """Why the last bits of a result may depend on how many rows the call has, within this span; empty: they do not."""
        together, why = self.implementation.batch
        return why if self.max_m is None or self.max_m > together else ""

"""What a kernel runs: a library of ``csrc/``, one Triton kernel, or torch operators. Eager calls (:mod:`.run`) and lowerings read the same description."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ..formats.packing import MAX_SCALES
from ..ops.activation import activation_code

# FP4_FINISH of csrc/common/epilogue.cuh: what a library is compiled to do behind its products.
FINISHES = ("plain", "pointwise", "glu")
# FP4_RMS of it: the half of an RMSNorm that a library has, and its suffix in the names of operators.
HALVES = ("", "squares", "rms")
SEVERAL_SCALES = "_scales"
ASM = True  # Triton kernels use inline PTX; Triton's interpreter cannot


def many_rows(arch: int) -> int:
    """Of a kernel that divides rows among blocks."""
    return 1 << 20


@dataclass(frozen=True)
class Library:
    """``csrc/<source>``, compiled for what stands here.

    Args:
        weight: the weight's parts, all ``[N, ...]``; none: the operator has a signature of its own (``kernels/moe/on_csrc.py``).
        tile: the integers that describe a tile; all 0 stands for the kernel's own choice, ``best()`` in the source.
        finish: one of :data:`FINISHES`; None: the library takes no ``Epilogue``.
        early: it takes whether it may begin, and fetch weights, while the kernel before it still runs (programmatic dependent launch). Nothing but
            a proof that this one does not write the weight may ask for it: ``_torch/order.py``.
        activations: the activations' parts, all ``[M, ...]``. Codes, two a byte, carry no dtype: ``half`` in place of a tile says it. E4M3
            activations have bfloat16 results.
        most_rows: the most activation rows of one call on an architecture, as the source itself and ``csrc/binding/ops.cpp`` have it.
        lane_order: E4M3 activations have their K in the order of ``fp4.quantize_rows_fp8(lane_order=True)``.
        norm: it normalises its activations first, if a call has a :class:`Norm`.
        half: one of :data:`HALVES`. ``"squares"``: it has three results, y, y times the weight of the norm that reads y, and sums of squares of y.
            ``"rms"``: its activations are the second of these, and it multiplies its sums by the inverse root mean square of the rows, from the third.
        siblings: it takes the rows where the second and the third global scale begin, where it has no ``Epilogue`` that says so.
        apart: several global scales (of an expert: two) need a library of their own, so that the one for one scale carries nothing of it.
        several: it is that library.
        metas: of ``fp4.moe``: its operator takes the metadata of 2:4-sparse experts, and no tile.
    """

    source: str
    weight: tuple[str, ...] = ()
    tile: tuple[str, ...] = ()
    finish: str | None = "plain"
    early: bool = False
    activations: tuple[str, ...] = ("x",)
    most_rows: Callable[[int], int] = many_rows
    lane_order: bool = False
    norm: bool = False
    half: str = ""
    siblings: bool = False
    apart: bool = False
    several: bool = False
    metas: bool = False

    @functools.cached_property
    def name(self) -> str:
        """Of its operator in ``torch.ops.fp4_csrc``."""
        path = PurePath(self.source)
        finish = f"_{self.finish}" if self.finish in FINISHES[1:] else ""
        half = f"_{self.half}" if self.half else ""
        return ("moe_" if path.parts[0] == "moe" else "") + path.stem + finish + half + (SEVERAL_SCALES if self.several else "")

    @property
    def function(self) -> str:
        """The C function of the library."""
        return f"fp4_{PurePath(self.source).stem}"

    @property
    def codes(self) -> bool:
        return "half" in self.tile

    @property
    def fp8(self) -> bool:
        """Are its activations E4M3, with a scale a row?"""
        return self.activations == ("x8", "x_scale")

    @property
    def more(self) -> tuple[str, ...]:
        """What the operator takes behind the tile."""
        both = ("int second=0", "int third=0") if self.finish or self.siblings else ()
        rest = ("int act=0", "Tensor? mul=None", "Tensor? residual=None") if self.finish else ()
        norm = ("Tensor? norm_weight=None", "float eps=0.0", "float norm_offset=0.0") if self.norm else ()
        half = {"squares": ("Tensor? norm_weight=None", "float norm_offset=0.0"), "rms": ("Tensor? squares=None", "float eps=0.0")}.get(self.half, ())
        return (*both, *rest, *(("int early=0",) if self.early else ()), *norm, *half)

    @property
    def defaults(self) -> tuple:
        """Of :attr:`more`."""
        kinds = {"int": 0, "float": 0.0}
        return tuple(kinds.get(declared.split()[0]) for declared in self.more)

    def arguments(self, options: Options) -> tuple:
        """Of the operator, behind ``arch``: the tile, then those that :attr:`more` declares; without defaults at the end."""
        more = options.then.arguments() if options.then else ()
        if options.early or options.norm or options.half:
            ahead = len(self.more) - self.early - len(Norm._fields) * self.norm - 2 * bool(self.half)  # those of ``then``
            early = (int(options.early),) if self.early else ()
            more = (*more, *self.defaults[len(more) : ahead], *early, *(options.norm or ()), *options.half)
        return (*(options.tile or [0] * len(self.tile)), *more) if more else tuple(options.tile)

    @property
    def defines(self) -> tuple[str, ...]:
        """nvcc's flags besides those of the architecture."""
        finish = (f"-DFP4_FINISH={FINISHES.index(self.finish)}",) if self.finish in FINISHES[1:] else ()
        half = (f"-DFP4_RMS={HALVES.index(self.half)}",) if self.half else ()
        return (*finish, *half, *(("-DFP4_SEVERAL_SCALES=1",) if self.several else ()))

    def for_scales(self, count: int) -> Library:
        """The library that takes ``count`` global scales."""
        return self._for_several if count > 1 and self.apart else self

    @functools.cached_property
    def _for_several(self) -> Library:  # eager calls ask for it
        return replace(self, several=True)


class Problem(NamedTuple):
    """What the tile of a Triton kernel may follow.

    ``m``: the rows of the call; in a compiled graph the largest or a likely number of them. ``bounds``: the rows at which the second and the third
    global scale begin.
    """

    m: int
    n: int
    k: int
    arch: int
    dtype: torch.dtype
    bounds: tuple[int, ...] = ()


class Size(NamedTuple):
    """A number that a Triton kernel takes, and what it is: ``tensor.shape[dim] * times // over``."""

    name: str
    tensor: str
    dim: int
    times: int = 1
    over: int = 1


class Grid(Protocol):
    def __call__(self, m: Any, n: Any, meta: Mapping[str, Any], *, cdiv: Callable[[Any, Any], Any]) -> tuple[Any, Any, Any]: ...


@dataclass(eq=False)
class Triton:
    """A kernel that is one Triton launch. Its source is launched by eager calls and is the template of compiled ones.

    Args:
        function: ``module:name`` below ``kernels/``. It takes the inputs, the result, the sizes, and constexprs.
        template: the name of the kernel in generated code.
        inputs: names of its tensors, activations first; a name in ``absent`` is None in an eager call and left out of the template.
        sizes: what it takes behind the result.
        tile: its tile for a problem, a pure function, so that eager and compiled calls agree.
        others: what max-autotune times besides.
        constants: its constexprs, ``num_warps`` and ``num_stages`` for a tile and a problem.
        variant: of an op with arguments that change its constexprs: ``variant(arguments)`` is the form for them.
        likely: the M that a compiled graph assumes if it knows none; 0: the tile holds for the largest M of the graph's range.
    """

    function: str
    template: str
    inputs: tuple[str, ...]
    sizes: tuple[Size, ...]
    grid: Grid
    tile: Callable[[Problem], Any]
    others: Callable[[Problem], list[Any]]
    constants: Callable[[Any, Problem], dict[str, Any]]
    likely: int = 0
    absent: tuple[str, ...] = ()
    variant: Callable[..., Triton] | None = None

    def source(self) -> Any:
        """The Triton function. Triton is imported here."""
        return source(self.function)

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int, int, int], ...]:
        """Where an eager call reads its sizes: the number of an input, a dimension, times, over."""
        return tuple((self.inputs.index(size.tensor), size.dim, size.times, size.over) for size in self.sizes)

    @functools.cached_property
    def missing(self) -> tuple[None, ...]:
        return (None,) * len(self.absent)

    def given(self, *arguments: Any) -> Triton:
        """The form for these arguments of the op."""
        return self.variant(*arguments) if self.variant else self

    def options(self, problem: Problem, autotune: bool) -> list[dict[str, Any]]:
        """Constants of the tile, or with ``autotune`` of all tiles worth timing, the tile first."""
        first = self.tile(problem)
        tiles = [first, *(t for t in self.others(problem) if t != first)] if autotune else [first]
        return [self.constants(t, problem) for t in tiles]


@functools.cache
def source(function: str) -> Any:
    """``module:name`` below ``kernels/``."""
    module, name = function.split(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)


def rows_grid(m, n, meta, *, cdiv):
    """A program for BLOCK_N outputs of BLOCK_M rows."""
    return (cdiv(n, meta["BLOCK_N"]), cdiv(m, meta["BLOCK_M"]), 1)


def tiles_grid(m, n, meta, *, cdiv):
    """A program for each tile, numbered by the kernel itself."""
    return (cdiv(n, meta["BLOCK_N"]) * cdiv(m, meta["BLOCK_M"]), 1, 1)


@dataclass(frozen=True)
class Composed:
    """Torch operators around a library's product: the same function in eager calls and, traced, in compiled graphs.

    Args:
        product: ``product(activations, weight, problem, bias) -> [M, N]``; activations and weight are tuples of tensors, m of ``problem`` is unknown.
        rounded: activations are ``(x,)``, or x rounded to ``"fp8"`` (codes and a scale a row) or ``"nvfp4"`` (codes, scales, a scale a row).
    """

    product: Callable[..., torch.Tensor]
    rounded: Literal["", "fp8", "nvfp4"] = ""


@dataclass(frozen=True)
class Launches:
    """A Python function that launches what it needs: several kernels, or a library's.

    Args:
        function: ``module:name`` below ``kernels/``; it takes the op's call and returns its result.
        library: the library of ``csrc/`` that it calls.
    """

    function: str
    library: Library | None = None

    def source(self) -> Callable[..., torch.Tensor]:
        return source(self.function)


Form = Library | Triton | Composed | Launches


class Norm(NamedTuple):
    """What a kernel does with its activations first: ``x * rsqrt(mean(x ** 2) + eps) * (offset + weight)`` in float32, rounded once to the dtype of x.

    ``weight``: ``[K]``, in the dtype of x, contiguous; a compiler passes its own kind of tensor. ``offset``: 1 for Gemma, 0 for most others.
    """

    weight: Any
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class Epilogue:
    """What a kernel does with its sums besides the bias: ``act(sums) * mul + residual``, or ``act(gate) * up``.

    Args:
        starts: the rows of W at which the second and the third global scale begin.
        act: ``""`` or an activation of ``fp4.linear_glu``.
        mul, residual: as the result, contiguous; a compiler passes its own kind of tensor.
    """

    starts: tuple[int, ...] = ()
    act: str = ""
    mul: Any = None
    residual: Any = None

    def arguments(self) -> tuple:
        """Of the operator, behind its tile, without defaults at the end."""
        given = [*self.starts, *[0] * (MAX_SCALES - 1 - len(self.starts)), activation_code(self.act), self.mul, self.residual]
        while given and (given[-1] is None or (isinstance(given[-1], int) and given[-1] == 0)):
            given.pop()
        return tuple(given)


class Options(NamedTuple):
    """What a library of ``csrc/`` is asked for besides its product.

    Args:
        tile: a tile that the source instantiates; empty: the kernel's choice.
        then: what it does with the sums; None: nothing.
        early: it may begin while the kernel before it is still running, which must write neither the weight nor that of the norm.
        norm: what it does with x first, of a library that takes it (``Library.norm``); None: nothing.
        half: of a library that has half of an RMSNorm (``Library.half``), its operands: ``(norm_weight, norm_offset)``, or ``(squares, eps)``.
    """

    tile: Sequence[int] = ()
    then: Epilogue | None = None
    early: bool = False
    norm: Norm | None = None
    half: tuple[Any, ...] = ()


PLAIN = Options()


def scale_bounds(bounds: tuple[int, ...]) -> dict[str, int]:
    """Constexprs for the rows at which the second and the third of up to :data:`MAX_SCALES` global scales begin; none: one scale for all rows."""
    b1, b2 = (*bounds, *(2**31 - 1 if bounds else 0,) * 2)[:2]
    return dict(B1=b1, B2=b2)

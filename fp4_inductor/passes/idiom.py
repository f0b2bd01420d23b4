"""Other libraries' NVFP4 decoding: found by the parts it reads, then proven by evaluation.

torchao and compressed-tensors decode a weight with thirty to forty elementwise operations, different ones, and the next
release reorders them. So no literal pattern: the candidates for the parts are found by dtype and shape, and the graph
between them and the matmul must then reproduce ``e2m1(code) * scale * global_scale`` for all 256 bytes times all 254
finite scale bytes, both nibbles, at positions that touch every n and every k, reading exactly ``qdata[n, k // 2]`` and
``scale[n, k // 16]`` each time. A graph of another format fails that, whatever it looks like.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from .._torch.fx import constant_of, without_modes
from ..formats import e2m1, nvfp4
from .pointwise import Evaluator, NotPointwise, Position, sizes, understood

_MAX_NODES = 400
_FINITE_SCALES = [b for b in range(256) if b & 0x7F != 0x7F]
# Powers of two: every product is exact in any of the dtypes a library may compute in, so the comparison is bit for bit.
_EXACT = (2.0**-3, 2.0**2)
# Stored global scales lie out here (amax/2688, or its reciprocal); float16 would leave its range.
_EXACT_WIDE = (2.0**-17, 2.0**14)
# Then a value that rounds: libraries round scale * global_scale once more than nvfp4.dequantize does.
_ROUNDING, _ROUNDING_EPS = 1.0 / 3.0, 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoding:
    """A proven decoding: the nodes of its parts, whether the global scale divides, and the nodes it consists of."""

    qdata: Node
    scale: Node
    global_scale: Node | None
    divides: bool
    path: tuple[Node, ...]


@dataclass(frozen=True)
class _Verdict:
    scalar: int | None  # which candidate is the global scale
    divides: bool


# By structure, since a model has few distinct weight shapes; None: proven not to be NVFP4.
_verdicts: dict[tuple, _Verdict | None] = {}


def decoding_of(operand: Node, dtype: torch.dtype) -> Decoding | None:
    """What ``operand`` ``[K, N]`` decodes, if it is an NVFP4 weight ``[N, K]`` in ``dtype`` or exact float32."""
    nodes = _above(operand)
    if nodes is None:
        return None
    try:
        k, n = sizes(operand)
    except (NotPointwise, ValueError):
        return None
    # The deepest node of its kind: above it is only what brings a stored layout (swizzled, padded) into this one.
    qdata = next(_of_kind(nodes, torch.uint8, (n, k // 2)), None)
    scale = next(_of_kind(nodes, nvfp4.SCALE_DTYPE, (n, k // nvfp4.GROUP)), None)
    if qdata is None or scale is None or not n * k or k % nvfp4.GROUP:
        return None
    scalars = [node for node in nodes if _is_scalar(node)]
    key = _structure(nodes, (qdata, scale), dtype)
    if key not in _verdicts:
        with without_modes(), torch.no_grad():
            _verdicts[key] = _judge(operand, qdata, scale, scalars, dtype)
    verdict = _verdicts[key]
    if verdict is None:
        return None
    return Decoding(qdata, scale, None if verdict.scalar is None else scalars[verdict.scalar], verdict.divides, tuple(nodes))


def _above(operand: Node) -> list[Node] | None:
    """The graph above ``operand`` down to what the evaluator does not look through, inputs first; None if too large."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(operand, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            if len(seen) > _MAX_NODES:
                return None
            stack.append((node, True))
            if understood(node):
                stack.extend((n, False) for n in node.all_input_nodes)
    return order


def _of_kind(nodes: Iterable[Node], dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[Node]:
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dtype == dtype and tuple(value.shape) == shape and node.op != "get_attr":
            yield node


def _is_scalar(node: Node) -> bool:
    """A float32 node with one element that is not a constant of the graph."""
    value = node.meta.get("val")
    one = isinstance(value, Tensor) and value.dtype == torch.float32 and all(s == 1 for s in value.shape)
    return one and not _is_constant(node)


def _is_constant(node: Node) -> bool:
    return node.op == "get_attr" or (node.op == "call_function" and understood(node) and all(map(_is_constant, node.all_input_nodes)))


def _structure(nodes: list[Node], parts: tuple[Node, Node], dtype: torch.dtype) -> tuple:
    """A key that is equal for two graphs exactly when the proof would run the same."""
    number = {node: i for i, node in enumerate(nodes)}

    def describe(arg: object) -> object:
        if isinstance(arg, Node):
            return ("node", number[arg])
        if isinstance(arg, (list, tuple)):
            return tuple(describe(a) for a in arg)
        return (type(arg).__name__, str(arg))

    lines: list[tuple] = [(str(dtype),)]
    for node in nodes:
        value = node.meta.get("val")
        shape = (str(value.dtype), tuple(map(str, value.shape))) if isinstance(value, Tensor) else ()
        if node in parts or not understood(node):
            lines.append(("leaf", node in parts, shape))
        elif (table := constant_of(node)) is not None:
            lines.append(("table", shape, tuple(table.flatten().tolist())))
        else:
            lines.append((str(node.target), describe(node.args), describe(tuple(node.kwargs.items())), shape))
    return tuple(lines)


# --- the proof --------------------------------------------------------------------------------------------------------


def _judge(operand: Node, qdata: Node, scale: Node, scalars: list[Node], dtype: torch.dtype) -> _Verdict | None:
    samples = Samples(*reversed(sizes(operand)))
    for index in range(len(scalars)) if scalars else [None]:
        g = None if index is None else scalars[index]
        for divides in (False, True) if g is not None else (False,):
            try:
                if _holds(operand, qdata, scale, g, divides, samples, dtype):
                    return _Verdict(index, divides)
            except NotPointwise as reason:
                log.debug("%s does not decode %s, %s, %s: %s", operand, qdata, scale, g, reason)
    return None


def _holds(operand: Node, qdata: Node, scale: Node, g: Node | None, divides: bool, samples: Samples, dtype: torch.dtype) -> bool:
    row, col = samples.position
    leaves: dict = {qdata: Checked((row, col // 2), samples.byte), scale: Checked((row, col // nvfp4.GROUP), samples.scale)}
    if g is None:
        return _agrees(operand, leaves, samples, samples.exact, dtype, 0.0)
    exact = _EXACT if dtype == torch.float16 else _EXACT + _EXACT_WIDE
    for number, tolerance in (*((e, 0.0) for e in exact), (_ROUNDING, _ROUNDING_EPS)):
        factor = torch.tensor(number)
        leaves[g] = Scalar(factor.reshape(sizes(g)))
        if not _agrees(operand, leaves, samples, samples.exact / factor if divides else samples.exact * factor, dtype, tolerance):
            return False
    return True


def _agrees(operand: Node, leaves: dict, samples: Samples, exact: Tensor, dtype: torch.dtype, tolerance: float) -> bool:
    """Whether ``operand`` at the samples is ``exact`` rounded once to ``dtype``, or not rounded at all in float32."""
    row, col = samples.position
    try:
        got = Evaluator(leaves)(operand, (col, row))
    except (RuntimeError, TypeError) as e:  # an operation that has no CPU implementation for its dtypes
        raise NotPointwise(str(e)) from e
    for rounded in {dtype, torch.float32} if got.dtype == torch.float32 else {dtype}:
        want = exact.to(rounded).to(got.dtype).double()
        if got.dtype in (dtype, torch.float32) and bool(((got.double() - want).abs() <= tolerance * torch.finfo(rounded).eps * want.abs()).all()):
            return True
    return False


class Samples:
    """Positions ``(n, k)`` of a weight with the codes there: every (byte, finite scale, nibble), every n, every k, shuffled."""

    def __init__(self, n: int, k: int):
        combinations = 2 * 256 * len(_FINITE_SCALES)
        count = combinations * -(-max(n, k) // combinations)
        index = torch.arange(count)
        parity = index % 2
        self.byte = (index // 2 % 256).to(torch.uint8)
        self.scale = torch.tensor(_FINITE_SCALES, dtype=torch.uint8)[index // 512 % len(_FINITE_SCALES)].view(nvfp4.SCALE_DTYPE)
        self.exact = e2m1.decode(torch.where(parity == 0, self.byte & 15, self.byte >> 4)) * self.scale.float()
        shuffle = torch.Generator().manual_seed(0)
        rows, pairs = (torch.randperm(count, generator=shuffle) for _ in range(2))
        self.position: Position = (rows % n, pairs % (k // 2) * 2 + parity)


class Checked:
    """A leaf that must be read at the positions its samples stand for."""

    def __init__(self, want: Position, values: Tensor):
        self.want, self.values = want, values

    def __call__(self, at: Position) -> Tensor:
        if len(at) != len(self.want) or not all(bool((a == w).all()) for a, w in zip(at, self.want, strict=True)):
            raise NotPointwise("a part is read at another position than NVFP4 stores the value at")
        return self.values

    def restricted(self, rows: Tensor) -> Checked:
        return Checked(tuple(w[rows] for w in self.want), self.values[rows])


class Scalar:
    """A leaf with one element."""

    def __init__(self, value: Tensor):
        self.value = value.reshape(-1) if value.dim() else value

    def __call__(self, at: Position) -> Tensor:
        return self.value

    def restricted(self, rows: Tensor) -> Scalar:
        return self

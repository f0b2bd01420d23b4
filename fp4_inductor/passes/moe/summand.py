"""One summand of a node's value: is it an expert layer, and of which tensors?"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
from torch.fx import Node

from ...ops.activation import Activation
from ..layout import is_call
from . import index as ix
from .activation import Formula, Literal, Operation, OutputNumber, Tree, call_of, identify
from .index import Const, Index, Unproven, Value, Var
from .read import Read, aten, dtype_of, shape_of
from .routing import masks_left, one_bias, same_expert
from .sums import PRODUCTS, Delta, ExpertEntry, Mask, Sum2, Sums, Term, filled

_DEEPEST_CHOICE = 8


@dataclass
class ProvenLayer:
    """A proven layer: what to call ``fp4.moe`` with, as reads of the graph's nodes.

    Args:
        tokens, slots: the variables that x and, in addition, the routing run over.
        channel: the variable of x's columns.
        masks: conditions under which a pair is left out.
        kind: how it was written, for the counters.
        products: the nodes of the first products; everything between them and the result belongs to the layer.
    """

    tokens: list[Var]
    slots: list[Var]
    channel: Var
    x: Read
    ids: Value
    weights: Read
    gate_up: ExpertEntry
    down: ExpertEntry
    gate_up_bias: Read | None
    down_bias: Read | None
    activation: Activation
    weight_on_input: bool
    constant: float
    masks: list[Mask]
    kind: str
    products: list[Node] = field(default_factory=list)


@dataclass
class _Output:
    """One output of the first product, as the activation reads it."""

    weight: ExpertEntry
    x: Read
    pair: list[Read]
    bias: Read | None
    channel: Var
    matmuls: list[Node]


class Proof:
    """Proves one summand.

    Args:
        tokens, n: the variables of the result's rows and channels.
    """

    def __init__(self, sums: Sums, tokens: list[Var], n: Var):
        self.sums, self.tokens, self.n = sums, tokens, n
        self.outputs: list[_Output] = []
        self.inner_masks: list[Mask] = []
        self.kind = ""

    def layer(self, start: Term) -> ProvenLayer:
        """The layer whose result ``start`` is, or one expert's or one slot's share of it."""
        n = self.n
        term = self.sums.term(start, lambda f: n in f.variables)
        down, bias, inner = self._down(term, n)
        i, expert = down.k, down.expert
        bound = [v for v in (*term.bound, *inner.bound) if v is not i]
        pairs = [f for f in (*term.factors, *inner.factors) if f is not down and not isinstance(f, Sum2) and i not in f.variables]
        acts = [f for f in inner.factors if f is not down and i in f.variables]
        constant = term.constant * inner.constant
        if bias is not None and (inner.constant != 1 or any(f is not down and i not in f.variables for f in inner.factors)):
            raise Unproven("the router's weight is applied before the bias is added", 2)
        if isinstance(expert, Var):
            down, bias, acts, pairs, bound = self._chosen(expert, down, bias, acts, pairs, bound)
        ids = down.expert
        if isinstance(ids, Const):
            ids, pairs, bound = self._named(ids, pairs, bound)
        if not isinstance(ids, Value) or dtype_of(ids.node).is_floating_point:
            raise Unproven("experts that are not chosen by an index", 2)
        formula = Formula([self._tree(a, i, down.expert) for a in self._flat(acts, i, pairs)])
        return self._layer(bound, ids, down, bias, pairs, formula, constant)

    # --- the second product -------------------------------------------------------------------------------------

    def _down(self, term: Term, n: Var) -> tuple[ExpertEntry, Read | None, Term]:
        """The second product's weight, its bias, and the sum it stands in."""
        sums = [f for f in term.factors if isinstance(f, Sum2)]
        weights = [f for f in term.factors if isinstance(f, ExpertEntry)]
        if len(sums) + len(weights) != 1:
            raise Unproven("not one product by an expert weight")
        if weights:
            inner, bias = Term([f for f in term.factors], [], 1.0), None
            term.factors, found = [], weights[0]
        else:
            inner, bias = self._product_and_bias(sums[0], n)
            found = next(f for f in inner.factors if isinstance(f, ExpertEntry))
        if found.n is not n or not isinstance(found.k, Var) or found.k not in (*term.bound, *inner.bound):
            raise Unproven("an expert weight that is not contracted over its last dimension", 1)
        _, rows, columns = found.shape
        if not ix.equal(found.n.size, rows) or not ix.equal(found.k.size, columns):
            raise Unproven("a part of an expert weight", 1)
        return found, bias, inner

    def _product_and_bias(self, both: Sum2, n: Index) -> tuple[Term, Read]:
        """Which side of an addition is the product: the one that has a weight in it."""
        wanted = ix.variables(n)

        def one_weight(start: Term) -> Term | None:
            try:
                term = self.sums.term(start, lambda f: bool(wanted & f.variables))
            except Unproven:
                return None
            return term if sum(isinstance(f, ExpertEntry) for f in term.factors) == 1 and not any(isinstance(f, Sum2) for f in term.factors) else None

        found = one_weight(both.product)
        if found is not None:
            return found, both.bias
        found = one_weight(Term([both.bias]))
        if found is not None and len(both.product.factors) == 1 and isinstance(both.product.factors[0], Read):
            return found, both.product.factors[0]
        raise Unproven("an addition without a product by an expert weight")

    def _chosen(self, e: Var, down: ExpertEntry, bias: Read | None, acts: list, pairs: list, bound: list[Var]):
        """A sum over all experts in which all but the chosen ones are multiplied by zero."""
        term = self.sums.term(Term([f for f in pairs if not isinstance(f, (Delta, Mask))]), lambda f: e in f.variables)
        factors = [f for f in pairs if isinstance(f, (Delta, Mask))] + term.factors
        for delta in (f for f in factors if isinstance(f, Delta)):
            other = delta.right if delta.left is e else delta.left if delta.right is e else None
            if isinstance(other, Value):
                break
        else:
            raise Unproven("a sum over experts whose weights are not known to be those of chosen ids", 2)
        new = {e: other}
        self.kind = "one_hot"
        factors = [f for f in factors if f is not delta]
        if any(e in f.variables for f in factors):
            raise Unproven("a sum over experts with another factor per expert", 2)
        down = self._replaced(down, new)
        return (
            down,
            None if bias is None else self.sums.again(bias, new),
            [self.sums.again(a, new) for a in acts],
            factors,
            [v for v in (*bound, *term.bound) if v is not e],
        )

    def _named(self, expert: Const, pairs: list, bound: list[Var]) -> tuple[Index, list, list[Var]]:
        """One expert's share, multiplied by zero for the pairs that have not chosen it: the ids it is compared with."""
        for position, factor in enumerate(pairs):
            found = self._comparison(factor, expert, 0)
            if found is not None:
                ids, term = found
                self.kind = "loop"
                return ids, [*pairs[:position], *term.factors, *pairs[position + 1 :]], [*bound, *term.bound]
        raise Unproven("one expert whose weight is not known to be that of chosen ids", 2)

    def _comparison(self, factor: object, expert: Const, depth: int) -> tuple[Value, Term] | None:
        """``factor`` without the ``ids == expert`` in it."""
        if isinstance(factor, Delta):
            other = factor.left if factor.right == expert else factor.right if factor.left == expert else None
            return (other, Term([])) if isinstance(other, Value) else None
        term = self.sums.expanded(factor) if isinstance(factor, Read) and depth < _DEEPEST_CHOICE else None
        for position, inner in enumerate(term.factors if term is not None else ()):
            found = self._comparison(inner, expert, depth + 1)
            if found is not None and term is not None:
                ids, below = found
                return ids, Term([*term.factors[:position], *below.factors, *term.factors[position + 1 :]], term.bound + below.bound)
        return None

    def _replaced(self, weight: ExpertEntry, new: dict[Var, Index]) -> ExpertEntry:
        return ExpertEntry(weight.parts, self.sums.replaced(weight.expert, new), weight.n, weight.k)

    # --- the activation -----------------------------------------------------------------------------------------

    def _flat(self, acts: list, i: Var, pairs: list) -> list[Read]:
        """Factors of the activation; what does not depend on ``i`` goes to the pair's factors."""
        out = []
        todo = list(acts)
        while todo:
            a = todo.pop(0)
            if not isinstance(a, Read):
                raise Unproven("a product of two expert weights", 2)
            found = self.sums.expanded(a) if a.node.target in (aten.mul.Tensor, aten.where.self) else None
            if found is None or found.constant != 1 or any(i in f.variables for f in found.factors if not isinstance(f, Read)):
                out.append(a)
                continue
            todo = [f for f in found.factors if i in f.variables] + todo
            for f in found.factors:
                if i not in f.variables:
                    self.inner_masks.append(f) if isinstance(f, Mask) else pairs.append(f)
        return out

    def _tree(self, read: Read, i: Var, expert: Index) -> Tree:
        """``read`` as a function of the first product's outputs."""
        value = filled(read.node)
        if value is not None:
            return Literal(value, tensor=True)
        output = self._output(read, i)
        if output is not None:
            return OutputNumber(self._number(output))
        if is_call(read.node, aten.where.self):
            masked = self.sums.expanded(read)
            kept = [f for f in masked.factors if isinstance(f, Read)] if masked else []
            masks = [f for f in masked.factors if isinstance(f, Mask)] if masked else []
            if len(kept) == 1 and len(masks) == 1 and i not in masks[0].variables:
                self.inner_masks.append(masks[0])
                return self._tree(kept[0], i, expert)

        def operand(node: Node) -> Tree:
            at = read.at[len(read.at) - len(shape_of(node)) :]
            return self._tree(self.sums.read(node, at), i, expert)

        tree = call_of(read.node, operand)
        if tree is None and read.node.target in PRODUCTS:
            raise Unproven("a first product that is not rows of tokens times one expert weight", 2)
        if tree is None:
            raise Unproven(f"between the products: {getattr(read.node.target, '_opname', read.node)}, which is not elementwise", 2 if self.outputs else 1)
        return tree

    def _number(self, output: _Output) -> int:
        for number, known in enumerate(self.outputs):
            if known.weight == output.weight:
                if known.x != output.x or known.bias != output.bias or known.pair != output.pair:
                    raise Unproven("one product of different tokens or biases", 2)
                known.matmuls += output.matmuls
                return number
        self.outputs.append(output)
        return len(self.outputs) - 1

    def _output(self, read: Read, i: Var) -> _Output | None:
        """``read`` as an output of the first product, or None: then it is something computed from such."""
        try:
            term = self.sums.term(Term([read]), lambda f: i in f.variables)
            bias = None
            both = next((f for f in term.factors if isinstance(f, Sum2)), None)
            outer: list = [f for f in term.factors if f is not both]
            if both is not None:
                if outer and not all(isinstance(f, Mask) for f in outer):
                    return None
                product, bias = self._product_and_bias(both, i)
                if not self._is_bias(bias, next(f for f in product.factors if isinstance(f, ExpertEntry))):
                    return None
                term = Term(product.factors + outer, term.bound + product.bound, term.constant * product.constant, term.matmuls + product.matmuls)
        except Unproven as refused:
            if refused.stage >= 1:
                raise
            return None
        weights = [f for f in term.factors if isinstance(f, ExpertEntry)]
        if len(weights) != 1 or term.constant != 1 or len(term.bound) != 1 or weights[0].k is not term.bound[0]:
            return None
        h = term.bound[0]
        factors = [f for f in term.factors if f is not weights[0]]
        return None if any(i in f.variables for f in factors) else self._of_tokens(weights[0], factors, bias, h, term.matmuls)

    def _is_bias(self, bias: Read, weight: ExpertEntry) -> bool:
        """One row per expert, as opposed to anything else that may be added."""
        return len(bias.at) == 2 and bias.at[1] == weight.n and same_expert(self.sums, bias.at[0], weight.expert, weight.shape[0])

    def _of_tokens(self, weight: ExpertEntry, factors: list, bias: Read | None, h: Var, matmuls: list[Node]) -> _Output | None:
        x = [f for f in factors if isinstance(f, Read) and h in f.variables]
        pair = [f for f in factors if f not in x]
        if len(x) != 1:
            return None
        # a mask or a weight may have been multiplied in before the product
        while (found := self.sums.expanded(x[0]) if x[0].node.target in (aten.mul.Tensor, aten.where.self) else None) is not None:
            inside = [f for f in found.factors if h in f.variables]
            token_only = all(not (f.variables - x[0].variables) for f in found.factors)
            if len(inside) != 1 or not isinstance(inside[0], Read) or found.constant != 1 or not token_only or self._plain(x[0], h):
                break
            pair += [f for f in found.factors if f is not inside[0]]
            x = [inside[0]]
        self.inner_masks += [f for f in pair if isinstance(f, Mask)]
        return _Output(weight, x[0], [f for f in pair if not isinstance(f, Mask)], bias, h, matmuls)

    def _plain(self, x: Read, h: Var) -> bool:
        """Already a matrix of tokens: no slot, no permutation."""
        return all(v is h or v.origin[0] == "out" for v in x.variables) and not any(isinstance(i, (Value, ix.Inverse, ix.Div)) for i in x.at)

    # --- all together -------------------------------------------------------------------------------------------

    def _layer(self, bound: list[Var], ids: Value, down: ExpertEntry, bias: Read | None, pairs: list, formula: Formula, constant: float) -> ProvenLayer:
        if not self.outputs:
            raise Unproven("no first product", 2)
        first, i = self.outputs[0], down.k
        experts, rows, columns = first.weight.shape
        for o in self.outputs:
            if o.weight.parts != first.weight.parts:
                raise Unproven("gate and up are two weights; fp4.moe takes one [E, 2 * I, H]", 2)
            if o.x.node is not first.x.node or self._renamed(o, first) != first.x.at:
                raise Unproven("gate and up are products of different tokens", 2)
            if not same_expert(self.sums, o.weight.expert, down.expert, experts):
                raise Unproven("the two products take different experts", 2)
            if o.pair != first.pair:
                raise Unproven("gate and up are weighted differently", 2)
        if not ix.equal(experts, down.shape[0]) or not ix.equal(columns, first.channel.size):
            raise Unproven("weights of different numbers of experts", 2)
        order, interleaved = self._order(i, rows)
        gate_up_bias = one_bias(self.sums, [self.outputs[o].bias for o in order], [self.outputs[o].weight.n for o in order], down.expert, rows, experts)
        down_bias = one_bias(self.sums, [bias], [self.n], down.expert, self.n.size, experts)
        activation = identify(_in_order(formula, order), len(order), interleaved)
        tokens, slots = self.tokens, bound
        if set(first.x.variables) - {first.channel} != set(tokens):
            raise Unproven("the first product's rows are not the tokens of the result", 2)
        masks = masks_left(self.sums, [f for f in pairs if isinstance(f, Mask)], self.inner_masks, ids, experts)
        weights = [f for f in pairs if not isinstance(f, Mask)]
        on_input = not weights
        weights += first.pair
        if len(weights) != 1:
            raise Unproven("router weights are applied twice" if weights else "no router weights are applied", 3)
        (weight,) = weights
        allowed, by = {*tokens, *slots}, ix.variables(ids)
        if not isinstance(weight, Read) or not weight.variables <= allowed or not set(slots) <= by <= allowed:
            raise Unproven("routing that does not have one expert and one weight per token and slot", 3)
        return ProvenLayer(
            tokens, slots, first.channel, first.x, ids, weight, first.weight, down, gate_up_bias, down_bias,
            activation, on_input, constant, masks, self._kind(), [m for o in self.outputs for m in o.matmuls],
        )  # fmt: skip

    def _renamed(self, output: _Output, first: _Output) -> tuple[Index, ...]:
        return tuple(self.sums.replaced(i, {output.channel: first.channel}) for i in output.x.at)

    def _order(self, i: Var, rows: sympy.Expr) -> tuple[list[int], bool]:
        """Which output is the gate and which is up, and whether they alternate."""
        at = [ix.affine(o.weight.n, i) for o in self.outputs]
        inner = i.size
        if at == [(1, 0)] and ix.equal(rows, inner):
            return [0], False
        if len(at) == 2 and None not in at and inner.is_Integer and ix.equal(rows, inner * 2):
            for interleaved, wanted in ((False, [(1, 0), (1, int(inner))]), (True, [(2, 0), (2, 1)])):
                if sorted(at) == wanted:  # type: ignore[type-var]
                    return sorted(range(2), key=lambda o: at[o]), interleaved  # type: ignore[arg-type, return-value]
        raise Unproven("gate and up are not halves, or every other row, of the first weight", 2)

    def _kind(self) -> str:
        if self.kind:
            return self.kind
        return "grouped_mm" if any("grouped" in str(m.target) for o in self.outputs for m in o.matmuls) else "batched_mm"


def _in_order(formula: Formula, order: list[int]) -> Formula:
    """The formula with its outputs renumbered: gate 0, up 1."""
    new = {old: number for number, old in enumerate(order)}

    def walk(tree: Tree) -> Tree:
        if isinstance(tree, OutputNumber):
            return OutputNumber(new[tree.number])
        return Operation(tree.op, tuple(map(walk, tree.args)), tree.kwargs) if isinstance(tree, Operation) else tree

    return Formula([walk(f) for f in formula.factors])

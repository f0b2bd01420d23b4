"""explain() and decisions(): which quantized call runs which kernel, in which regime, decided how, and why nothing faster was taken."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ._journal import LEFT_DENSE, LOWERED
from ._text import join_names, tabulate, terminal_width, wrap
from .config import dispatch_config
from .errors import ConfigError
from .formats import fp8, nvfp4, sparse24
from .formats.packing import MAX_SCALES
from .kernels import select
from .kernels.kernel import Span
from .kernels.select import Refused, describe, plan
from .ops.cached_call import CachedCall
from .ops.moe_call import MoeCall
from .passes.missed import SPOKEN, Missed

_NAMED = 6  # groups of modules beside one line of the table


@dataclass(frozen=True)
class ExplainRow:
    """One quantized call.

    Args:
        op: ``fp4.linear`` and so on.
        module: path of the module, where torch knows it.
        m: number of activation rows (of fp4.moe: tokens times choices): a number, or the symbolic expression of the compiled graph.
        n, k: weight shape.
        regime, kernel: of the kernel that serves the call, as ``kernels/choose`` prefers; ``"any"`` and ``"by M"`` when the op decides at run time.
        decision: ``"proven"``, ``"guard"`` or ``"runtime"``.
        epilogue: operations fused behind the kernel.
        refused: ``(kernel, reason)`` of each row that does not apply.
        note: what else a reader should know.
        batch: why the last bits of a row's result depend on how many rows the call has, within this regime; empty: they do not.
    """

    op: str
    module: str
    m: str
    n: int
    k: int
    dtype: str
    regime: str
    kernel: str
    decision: str
    epilogue: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    note: str = ""
    batch: str = ""


@dataclass
class Explanation:
    """The rows, how much each graph pass rewrote into quantized calls, and what no pass could keep quantized.

    ``missed`` has one entry (``.node .shape .reason .what``) per weight of several experts that the compiled graph dequantizes, per norm that the
    kernel of a linear layer could have computed and does not, per attention over a cache whose query is normed and rotated by kernels of its own, per
    run of linear layers that read each other's results and are not one launch, and per attention over a cache in 8 bits that the graph dequantizes.
    """

    rows: list[ExplainRow] = field(default_factory=list)
    matches: dict[str, int] = field(default_factory=dict)
    missed: list[Missed] = field(default_factory=list)
    nothing: ClassVar[str] = "explain: no quantized call was reached."

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None, hint: str = "print(explanation.not_taken())") -> str:
        """Table and remarks in lines of at most ``width`` columns; None: those of the terminal, 80 if the output is none.

        Equal calls are one line with the modules that make them, repeated layers grouped; ``rows`` has each call. What was not
        taken is counted only, and ``hint`` says how to see it: :meth:`not_taken`.
        """
        width = terminal_width() if width is None else width
        lines = self._table(width) if self.rows else [self.nothing]
        remarks = [("note", note) for note in sorted({r.note for r in self.rows if r.note})]
        remarks += [("batch", f"{kernel}: {why}") for kernel, why in sorted({(r.kernel, r.batch) for r in self.rows if r.batch})]
        if refused := {refusal for r in self.rows for refusal in r.refused}:
            kernels, reasons = ({refusal[i] for refusal in refused} for i in (0, 1))
            remarks.append(("not taken", f"{_counted(kernels, 'kernel')}, {_counted(reasons, 'reason')}: {hint}"))
        if self.matches:
            remarks.append(("patterns", ", ".join(f"{name} x{count}" for name, count in sorted(self.matches.items()))))
        left: dict[tuple[str, str, str], list[str]] = {}
        for m in self.missed:
            left.setdefault((m.shape, m.reason, m.what), []).append(m.node)
        for (shape, reason, what), nodes in left.items():
            kind, several = SPOKEN[what]
            named = f"{nodes[0]} {shape} is" if len(nodes) == 1 else f"{len(nodes)} {several} {shape} ({join_names(nodes, _NAMED)}) are"
            remarks.append((kind, f"{named} {what}: {reason}"))
        return "\n".join([*lines, *(line for kind, remark in remarks for line in wrap(remark, width, f"{kind}: ", "    "))])

    def not_taken(self, width: int | None = None) -> str:
        """Which kernels were not taken, by reason, in lines of at most ``width`` columns (None: as :meth:`text`); empty: each was."""
        width = terminal_width() if width is None else width
        reasons: dict[str, dict[str, int]] = {}
        for r in self.rows:
            for kernel, reason in r.refused:
                calls = reasons.setdefault(reason, {})
                calls[kernel] = calls.get(kernel, 0) + 1
        lines = []
        for reason, kernels in sorted(reasons.items(), key=lambda item: (-max(item[1].values()), item[0])):
            named = ", ".join(f"{kernel} ({calls})" for kernel, calls in sorted(kernels.items()))
            lines += wrap(f"{reason}: {named}", width, "not taken: ", "    ")
        return "\n".join([*lines, "In brackets: the calls that a kernel was not taken for."] if lines else lines)

    def _table(self, width: int) -> list[str]:
        groups: dict[tuple, list[str]] = {}
        for r in self.rows:
            key = (r.op, r.m, str(r.n), str(r.k), r.dtype, r.regime, r.kernel, r.decision, " ".join(r.epilogue) or "-", r.note)
            groups.setdefault(key, []).append(r.module)
        header = ("calls", "op", "M", "N", "K", "dtype", "regime", "kernel", "decision", "epilogue", "modules")
        table = [(str(len(modules)), *key[:-1], join_names(filter(None, modules), _NAMED) or "-") for key, modules in groups.items()]
        optional = ("modules", "epilogue", "dtype", "decision", "regime", "M")
        return tabulate(header, table, width, optional, right=("calls", "M", "N", "K"))


def _counted(items: Collection[str], what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"


def explain(model: Any, *example_inputs: Any, **example_kwargs: Any) -> Explanation:
    """Say what runs when ``model`` is called with these inputs.

    Args:
        model: a module, or what ``torch.compile`` returned for it. A compiled model is compiled once more, past the
            caches of graphs (its own are left alone), from the kernels that it has built, and run once; a plain one is run once, eagerly.
        example_inputs, example_kwargs: arguments of the call. Mark dynamic dimensions on them as usual.

    Returns:
        :class:`Explanation`: ``print`` it, or read ``.rows`` (``.op .m .regime .kernel .decision`` ...).
    """
    if not callable(model):
        raise ConfigError(
            "explain() takes a module or a function",
            value=type(model).__name__,
            limit="a callable",
            remedy="Pass the model, or what torch.compile(model) returned, followed by example inputs.",
        )
    from ._torch.capture import original

    explained = _explain_compiled if original(model)[1] else _explain_eager
    return explained(model, example_inputs, example_kwargs)


def _explain_compiled(model: Any, args: tuple, kwargs: dict) -> Explanation:
    from ._torch.capture import compile_again
    from .lowerings.journal import listen
    from .passes import matches, missed

    before = matches()
    done = 0
    with listen() as entries, missed.listen() as left:

        def fused(found: dict[str, list[str]]) -> None:
            nonlocal done
            for entry in entries[done:]:
                if entry.buffer in found:
                    entry.epilogue = found[entry.buffer]
            done = len(entries)

        compile_again(model, args, kwargs, fused)
    rows = [row for entry in entries for row in _rows_of(entry)]
    rewritten = {name: count - before.get(name, 0) for name, count in matches().items() if count > before.get(name, 0)}
    return Explanation(rows, rewritten, left)


def _rows_of(e: Any) -> Iterator[ExplainRow]:
    """Of an entry of ``lowerings/journal.py``, one for each layer that it stands for."""
    row = e.decision.row
    for module in e.modules:
        yield ExplainRow(
            e.op, module, e.m, e.n, e.k, e.dtype,
            row.regime if row else "any", row.kernel if row else "by M", e.decision.how,
            tuple(e.epilogue), _news(e.refused, e.arch),
            _joined(e.note, _w4a4(row, e.arch, e.dtype, e.n, e.k), _note(row, e.arch, e.decision.note, e.experts)),
            row.batch if row else "",
        )  # fmt: skip


@dataclass
class Decisions(Explanation):
    """What :func:`fp4_inductor.decisions` returns: as of :class:`Explanation`, of all graphs; ``.dropped`` of the oldest calls are left out."""

    dropped: int = 0
    nothing: ClassVar[str] = "decisions: no quantized call was lowered in this process (a graph from a compile cache is not)."

    def text(self, width: int | None = None, hint: str = "print(decisions.not_taken())") -> str:
        """As :meth:`Explanation.text`, and how many of the oldest calls are left out."""
        left_out = f"\n{self.dropped} earlier calls are left out." if self.dropped else ""
        return super().text(width, hint) + left_out


def decisions(clear: bool = False) -> Decisions:
    """What was decided while graphs were compiled in this process: the quantized calls, in the order in which they were lowered.

    It needs no model: a server that compiles in a worker process prints it there. Nothing has to be switched on, and a call costs no time when it
    runs. The last 4,096 calls are kept, as they were lowered (a region that is compiled once for all layers is one). Not among them are calls
    in eager code, and graphs that came out of a compile cache, which are not lowered. ``epilogue`` is empty, unless :func:`fp4_inductor.explain`
    compiled the graph.

    Args:
        clear: forget them afterwards.

    Returns:
        :class:`fp4_inductor.explain.Decisions`: ``print`` it, or read ``.rows`` as those of :func:`fp4_inductor.explain`.
    """
    entries, left, dropped = list(LOWERED.kept), list(LEFT_DENSE.kept), LOWERED.dropped
    if clear:
        LOWERED.forget()
        LEFT_DENSE.forget()
    if not entries and not left:
        return Decisions()
    from .passes import matches

    return Decisions([row for entry in entries for row in _rows_of(entry)], matches(), left, dropped)


def _explain_eager(model: Any, args: tuple, kwargs: dict) -> Explanation:
    from ._torch.capture import WatchOps

    explanation = Explanation()
    path: list[str] = []
    hooks = []

    def seen(op, op_args) -> None:
        call = _described(op, op_args)
        if call is None:
            return
        name, m, x, n, k, prefill, form, (experts, scales) = call
        counts = select.Counts(experts, min(scales, MAX_SCALES))
        options = plan(describe(name, x.device, x.dtype, n, k, prefill, form, counts, eager=True), dispatch_config())
        remark = select.of_scales(scales, options.call.arch) if op is not torch.ops.fp4.moe.default else ""
        row = options.pick(m)
        dtype = str(x.dtype).removeprefix("torch.")
        explanation.rows.append(
            ExplainRow(
                f"fp4.{op._opname}",
                path[-1] if path else "",
                str(m),
                n,
                k,
                dtype,
                row.regime,
                row.kernel,
                "runtime",
                (),
                _news(options.refused, options.call.arch),
                _joined(remark, _w4a4(row, options.call.arch, dtype, n, k), _note(row, options.call.arch, experts=experts)),
                row.batch,
            )
        )

    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: path.pop() and None, always_call=True))
    try:
        with torch.no_grad(), WatchOps(seen):
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return explanation


def _described(op: Any, args: tuple) -> tuple[str, int, torch.Tensor, int, int, str, tuple[str, ...], select.Counts] | None:
    """``(op of the kernels, M, activation, N, K, prefill, form, counts)`` of a call that kernels are chosen for, or None."""
    fp4 = torch.ops.fp4
    storage = {fp4.linear.default: nvfp4.STORAGE, fp4.sparse_linear.default: sparse24.STORAGE, fp4.linear_fp8.default: fp8.STORAGE}.get(op)
    if storage is not None:
        x, after_bias = args[0], len(storage.parts) + 2
        n, k = storage.logical(args[1].shape)
        rows = args[after_bias + 1] if len(args) > after_bias + 1 else None
        prefill, counts = args[after_bias] if len(args) > after_bias else "auto", select.Counts(scales=len(rows or (0,)))
        return op._opname, x.numel() // max(k, 1), x, n, k, prefill, (), counts
    if op is torch.ops.fp4.moe.default:
        call = MoeCall.of(*args)
        gate_up, down, x = call.gate_up, call.down, call.hidden
        biases = (b.dtype for b in (gate_up.bias, down.bias) if b is not None)
        moe_op = select.moe_op(gate_up.meta, down.meta)
        form = select.moe_form(call.activation.name, call.gated, call.inner, call.experts, call.weight_on_input, biases, moe_op)
        counts = select.Counts(call.chosen_from, select.scales_of(gate_up.global_scale.shape))
        return moe_op, call.assignments, x, call.width, x.shape[1], call.prefill, form, counts
    if op in (fp4.decode_attention.default, fp4.cached_attention.default):
        (_, heads, queries, d), kv_heads = args[0].shape, args[1].shape[1]
        if op is fp4.cached_attention.default:
            form = select.cached_form(CachedCall.of(*args))
        else:
            form = select.attention_form(d, len(args) > 5, len(args) > 3 and select.is_shared(args[3]))
        return op._opname, queries * (heads // max(kv_heads, 1)), args[0], heads, d, "auto", form, select.ONE
    return None


def _news(refused: Collection[Refused], arch: int) -> tuple[tuple[str, str], ...]:
    """``(kernel, reason)`` of each refusal; no news are rows of other architectures, and rows that only a request for them would take."""
    unasked = {r for r in refused if r.reason.startswith("prefill=") and "auto" not in r.kernel.prefill}
    return tuple((r.kernel.name, r.reason) for r in refused if r.kernel.at(arch) and r not in unasked)


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _w4a4(row: Span | None, arch: int, dtype: str, n: int, k: int) -> str:
    """What serves the product of a call that rounds its activations, and why."""
    if row is None or row.regime != "large_nvfp4":
        return ""
    product = plan(select.describe("linear_w4a4", arch, getattr(torch, dtype), n, k), dispatch_config()).rows[-1]
    return f"activations rounded to NVFP4 per token; linear_w4a4: {product.kernel} ({product.status}): {product.reason}"


def _note(row: Span | None, arch: int, note: str = "", experts: int = 1) -> str:
    if row is not None and row.csrc:
        called = f"{row.kernel}: {select.csrc_door(row.csrc, arch)}"
        note = f"{note}; {called}" if note else called
    if row is not None and row.regime == "cpu":
        from .kernels.linear.cpu_native import status

        native, text = status()
        note = f"C kernels ({text})" if native else f"ATen path, slower: {text}"
    if row is not None and row.op in ("decode_attention", "cached_attention") and not note:
        note = select.ATTENTION_NOTE
    kind = "2:4-sparse experts" if row is not None and row.op == "sparse_moe" else "experts"
    return note if experts == 1 else f"fp4.moe, {experts} {kind}: M is tokens times choices{f'; {note}' if note else ''}"

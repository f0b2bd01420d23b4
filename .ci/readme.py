"""Write the dispatch rows of kernels/table.py into fp4_inductor/kernels/README.md: ``make readme``. lowering_tests/test_docs.py compares."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch

from fp4_inductor.kernels.table import HALF, ROWS, Row

README = Path(__file__).resolve().parent.parent / "fp4_inductor" / "kernels" / "README.md"
BEGIN, END = "<!-- dispatch rows: begin (make readme) -->", "<!-- dispatch rows: end -->"
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
NAMES = {"sparse_moe": "`fp4.moe` with 2:4-sparse experts"}


def sm(arch: tuple[int, int]) -> str:
    low, high = arch
    gpus = f"sm_{max(low, 80)} - {high}" if low < high else f"sm_{low}"
    return "CPU" if high == 0 else f"CPU, {gpus}" if low == 0 else gpus


def number(n: int) -> str:
    """2^25 rather than 33554432."""
    return f"2^{n.bit_length() - 1}" if n >= 2**20 and n & (n - 1) == 0 else f"{n:,}"


def between(name: str, least: int, most: int) -> str:
    """``least <= name <= most``, where 0 and 2**31 are no limits, by round numbers."""
    from_, to = ("<", least - 1) if number(least - 1).startswith("2^") else ("<=", least)
    until, end = ("<=", most) if number(most).startswith("2^") else ("<", most + 1)
    if most >= 2**31:
        return "" if least <= 1 else f"{name} {'>' if from_ == '<' else '>='} {number(to)}"
    return f"{f'{number(to)} {from_} ' if least > 1 else ''}{name} {until} {number(end)}"


def rows_served(row: Row) -> str:
    if row.max_m is None:
        return "any M"
    if row.m_per_expert:
        return f"M <= {row.m_per_expert:g} E, or {row.max_m}"
    least = f"{row.min_m} <= " if row.min_m > 1 else ""
    return f"{least}M <= {row.max_m:,}" if row.max_m > 1 else "M = 1"


def serves(row: Row) -> str:
    """Which calls: M, then what else a call must be."""
    what = [
        rows_served(row),
        "" if row.dtypes == HALF else "any dtype" if len(row.dtypes) == 3 else " or ".join(DTYPES[d] for d in row.dtypes),
        f"`prefill` {' or '.join(row.prefill)}" if len(row.prefill) < 3 else "",
        f"K % {row.k_multiple} = 0" if row.k_multiple > 16 else "",
        f"K % {row.not_k_multiple} > 0" if row.not_k_multiple else "",
        f"N % {row.n_multiple} = 0" if row.n_multiple > 1 else "",
        between("N", *row.n),
        between("N K", row.min_weights, row.max_weights or 2**31),
        "plain" if row.plain else "",
        "nvcc" if row.csrc else "",
        f"no {row.without} kernel" if row.without else "",
        f"Triton {row.triton[0]}.{row.triton[1]}" if any(row.triton) else "",
    ]
    return ", ".join(filter(None, what))


def lines(rows: list[Row]) -> Iterator[str]:
    """Neighbours that differ only in the calls they serve, or only in the architecture, are one line; a reason is said once."""
    merged: list[tuple[str, str, str, str, str]] = []
    for (arch, kernel, status, reason), same in groupby(rows, lambda row: (row.arch, row.kernel, row.status, row.reason)):
        calls = "<br>".join(map(serves, same))
        if merged and merged[-1][1:] == (calls, kernel, status, reason):
            merged[-1] = (f"{merged[-1][0]}, {sm(arch)}", *merged[-1][1:])
        else:
            merged.append((sm(arch), calls, kernel, status, reason))
    before = None
    for gpus, calls, kernel, status, reason in merged:
        yield f"| {gpus} | {calls} | {kernel} | {status} | {'as above' if before == (kernel, reason) else reason} |"
        before = (kernel, reason)


def table() -> str:
    """A heading and a table for each op."""
    ops = dict.fromkeys(row.op for row in ROWS)
    head = ("", "| for | serves | kernel | status | why |", "|---|---|---|---|---|")
    return "\n\n".join("\n".join((f"### {NAMES.get(op, f'`fp4.{op}`')}", *head, *lines([row for row in ROWS if row.op == op]))) for op in ops)


def block() -> str:
    return f"{BEGIN}\n{table()}\n{END}"


def main() -> None:
    text = README.read_text()
    README.write_text(f"{text.split(BEGIN)[0]}{block()}{text.split(END)[1]}")


if __name__ == "__main__":
    main()

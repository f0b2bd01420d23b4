"""Write the dispatch rows of kernels/table.py into README.md: ``make readme``."""

from __future__ import annotations

from pathlib import Path

from fp4_inductor.kernels.table import ROWS

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- dispatch rows: begin (make readme) -->", "<!-- dispatch rows: end -->"


def sm(arch: tuple[int, int]) -> str:
    low, high = arch
    gpus = f"sm_{max(low, 80)} - {high}" if low < high else f"sm_{low}"
    return "CPU" if high == 0 else f"CPU, {gpus}" if low == 0 else gpus


def table() -> str:
    lines = ["| op | for | M | kernel | with | status | why |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        needs = f"Triton {row.triton[0]}.{row.triton[1]}" if any(row.triton) else "nvcc" if row.csrc else f"no {row.without} kernel" if row.without else ""
        size = f"N K < {row.max_weights + 1}" if row.max_weights else f"N K >= {row.min_weights}" if row.min_weights else ""
        divides = f"K % {row.k_multiple} = 0" if row.k_multiple > 64 else f"K % {row.not_k_multiple} > 0" if row.not_k_multiple else ""
        early = "" if row.early is None else "begun early" if row.early else "not begun early"
        options = "" if len(row.large_m) >= 3 else f"`large_m` {' or '.join(row.large_m)}"
        with_ = ", ".join(filter(None, (needs, divides, size, early, options)))
        upto = "any" if row.max_m is None else f"<= {row.max_m}"
        upto = f"<= {row.m_per_expert:g} E, or {row.max_m}" if row.m_per_expert else upto
        lines.append(f"| {row.op} | {sm(row.arch)} | {upto} | {row.kernel} | {with_} | {row.status} | {row.reason} |")
    return "\n".join(lines)


def main() -> None:
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

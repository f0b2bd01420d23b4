"""Plots from ``benchmarks/results/*.csv``: ``python benchmarks/plots.py [--results DIR] [--out DIR]`` (needs matplotlib).

``roofline.svg``   time over what the hardware needs, by M
``speedup.svg``    speed-up over bf16 cuBLAS, by M
``decode.svg``     tokens per second of a whole model

Each title says on what and from which commit and date its figures are; nothing is drawn that was not measured.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib
from timing import RESULTS, read_csv

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "fp4_inductor"  # the same data give the same file
matplotlib.rcParams["svg.fonttype"] = "none"
import matplotlib.pyplot as plt  # noqa: E402

OURS = "fp4_inductor"


def provenance(rows: list[dict]) -> str:
    """GPU, versions, commits and dates of ``rows``."""

    def values(key: str) -> str:
        return ", ".join(sorted({row[key] for row in rows}))

    return f"{values('gpu')}, torch {values('torch')}, commit {values('commit')}, {values('date')}"


def _save(figure, out: Path, name: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / name, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return out / name


def _by_m(axes, ylabel: str, title: str, rows: list[dict]) -> None:
    ticks = sorted({int(row["m"]) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks([t for t in ticks if t & (t - 1) == 0], [str(t) for t in ticks if t & (t - 1) == 0])
    axes.set_xlabel("M: rows of the activation")
    axes.set_ylabel(ylabel)
    axes.set_title(f"{title}\n{provenance(rows)}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def roofline(rows: list[dict], out: Path) -> Path | None:
    """Time over the floor by M, one line a contender and shape; None if nothing has a floor."""
    rows = [row for row in rows if row["floor_ratio"]]
    lines: dict[tuple, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        lines[row["who"], int(row["k"]), int(row["n"])].append((int(row["m"]), float(row["floor_ratio"])))
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(8, 4.5))
    colors: dict[tuple, str] = {}
    styles = dict(zip(dict.fromkeys(who for who, _, _ in lines), ("-", ":", "--", "-.", (0, (1, 3)), (0, (5, 5))), strict=False))
    for (who, k, n), points in lines.items():
        color = colors.setdefault((k, n), f"C{len(colors)}")
        axes.plot(*_line(points), styles.get(who, "-"), color=color, marker=".", label=f"{who} {k}x{n}", linewidth=1.2)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    _by_m(axes, "time / floor (cold read of the weight,\nor its products at the FP8 rate)", "Distance from the hardware's limit (1 = the limit)", rows)
    axes.legend(fontsize=6, ncols=2)
    return _save(figure, out, "roofline.svg")


def speedup(rows: list[dict], out: Path) -> Path | None:
    """Speed-up over bf16 in the same run by M: one line a shape for us, the geometric mean for each peer."""
    base = {(row["k"], row["n"], row["m"]): float(row["us"]) for row in rows if row["who"] == "bf16"}
    lines: dict[tuple, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        key = (row["k"], row["n"], row["m"])
        if row["who"] != "bf16" and key in base:
            lines[row["who"], int(row["k"]), int(row["n"])].append((int(row["m"]), base[key] / float(row["us"])))
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(8, 4.5))
    peers = sorted({who for who, _, _ in lines} - {OURS})
    for (who, k, n), points in lines.items():
        if who == OURS:
            axes.plot(*_line(points), marker=".", label=f"{k}x{n}", linewidth=1.2)
    for peer in peers:
        by_m: dict[int, list[float]] = defaultdict(list)
        for (who, _, _), points in lines.items():
            for m, ratio in points if who == peer else ():
                by_m[m].append(ratio)
        means = [(m, _geometric(by_m[m])) for m in sorted(by_m)]
        axes.plot(*_line(means), "k--", marker=".", label=f"{peer} (geometric mean)", linewidth=1)
    axes.axhline(1.0, color="black", linewidth=1)
    _by_m(axes, "times faster than bf16 cuBLAS", "fp4.linear against bf16 cuBLAS in the same run (below 1: slower), K x N", rows)
    return _save(figure, out, "speedup.svg")


def _line(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """x and y, with a break where more than a factor of eight in M was not measured."""
    x: list[float] = []
    y: list[float] = []
    for m, value in sorted(points):
        if x and m > 8 * x[-1]:
            x.append(m)
            y.append(float("nan"))
        x.append(m)
        y.append(value)
    return x, y


def _geometric(values: list[float]) -> float:
    product = 1.0
    for value in values:
        product *= value
    return product ** (1 / len(values))


def decode(rows: list[dict], out: Path) -> Path | None:
    """Tokens per second of decoding by model and batch size, one bar a kind of weights and compile mode."""
    rows = [row for row in rows if int(row["tokens"]) == 1]
    if not rows:
        return None
    kinds = list(dict.fromkeys((row["weights"], row["mode"]) for row in rows))
    groups = sorted({(row["model"], int(row["batch"])) for row in rows})
    figure, axes = plt.subplots(figsize=(max(6.5, 1.3 * len(groups)), 3.5))
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        mine = [row for row in rows if (row["weights"], row["mode"]) == kind]
        rate = {(row["model"], int(row["batch"])): int(row["batch"]) * 1e3 / float(row["ms"]) for row in mine}
        places = [j + (i - (len(kinds) - 1) / 2) * width for j, group in enumerate(groups) if group in rate]
        bars = axes.bar(places, [rate[group] for group in groups if group in rate], width, label=", ".join(kind))
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(groups)), [f"{model}\nbatch {batch}".replace("-shape x", ",\n") for model, batch in groups], fontsize=7)
    axes.set_ylabel("tokens/s")
    axes.set_title(f"Decoding, models of these shapes\n{provenance(rows)}", fontsize=9)
    axes.legend(fontsize=8)
    return _save(figure, out, "decode.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    dense, whole = read_csv(args.results / "dense.csv"), read_csv(args.results / "decode.csv")
    for path in (roofline(dense, args.out), speedup(dense, args.out), decode(whole, args.out)):
        print(f"wrote {path}" if path else "no data for one plot")


if __name__ == "__main__":
    main()

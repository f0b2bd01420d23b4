"""Plots from ``benchmarks/results/*.csv``: ``python benchmarks/plots.py [--results DIR] [--out DIR]`` (needs matplotlib).

``roofline.svg``   time over what the hardware needs, by M
``speedup.svg``    speed-up over bf16 cuBLAS, by M
``decode.svg``     tokens per second of a whole model
``sparse.svg``     time of 2:4-sparse layers over that of dense ones, by M
``moe.svg``        time of MoE layers by tokens, with other libraries (``moe_peers.csv``)
``serve.svg``      time of vLLM with this package's plugin over that with Marlin
``sparse_quality_*.svg``  what bits a weight cost, of models that mix sparse and dense layers
``kv_step.svg``    attention of a decode step by tokens in the cache, a line a format of the cache
``kv_prompt.svg``  attention of a prompt behind tokens that the cache holds, by format
``kv_quality.svg`` what bits of a cache cost
``quality_bits_*.svg``  what bits a weight cost, of models whose layers with the largest shares of the loss stay in FP8 or bfloat16

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
    drawn = [row for row in rows if (row["k"], row["n"], row["m"]) in base]
    _by_m(axes, "times faster than bf16 cuBLAS", "fp4.linear against bf16 cuBLAS in the same run (below 1: slower), K x N", drawn)
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


def sparse(rows: list[dict], out: Path) -> Path | None:
    """Time of 2:4-sparse layers over that of dense NVFP4 ones in the same run, by M."""
    if not rows:
        return None
    lines: dict[tuple, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        lines[int(row["k"]), int(row["n"])].append((int(row["m"]), float(row["to_dense"])))
    figure, axes = plt.subplots(figsize=(8, 4))
    for (k, n), points in lines.items():
        axes.plot(*_line(points), marker=".", label=f"{k}x{n}", linewidth=1.2)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.axhline(3.5 / 4.5, color="black", linewidth=1, linestyle=":", label="bits a weight: 3.5 / 4.5")
    axes.set_ylim(0.6, None)
    _by_m(axes, "time, 2:4-sparse / dense NVFP4", "fp4.sparse_linear against fp4.linear in the same run (above 1: slower), K x N", rows)
    axes.legend(fontsize=8, loc="lower left", ncols=3)
    return _save(figure, out, "sparse.svg")


def moe(rows: list[dict], peers: list[dict], out: Path) -> Path | None:
    """Time of a layer by tokens, a panel a layer: ours, dense and 2:4-sparse, and each peer's fastest variant."""
    if not rows:
        return None
    names = list(dict.fromkeys(row["layer"] for row in rows))
    figure, panels = plt.subplots(1, len(names), figsize=(4 * len(names), 3.8), squeeze=False, sharey=True)
    for panel, name in zip(panels[0], names, strict=True):
        lines: dict[str, dict[int, float]] = defaultdict(dict)
        for row in rows:
            if row["layer"] == name:
                lines["fp4.moe, 2:4-sparse" if "sparse" in row["weights"] else "fp4.moe"][int(row["tokens"])] = float(row["us"])
        for row in peers:
            if row["layer"] == name:
                fastest = lines[row["peer"] + (" bf16" if row["peer"] == "transformers" else "")]
                fastest[int(row["tokens"])] = min(float(row["us"]), fastest.get(int(row["tokens"]), float("inf")))
        colors = dict(zip(sorted({row["peer"] for row in peers}), ("C7", "C1", "C2", "C3", "C4", "C5"), strict=False))
        for label, line in lines.items():
            ours = {"fp4.moe": "C0", "fp4.moe, 2:4-sparse": "C9"}.get(label)
            style = dict(marker="o", color=ours, linewidth=2, zorder=3) if ours else dict(marker=".", color=colors[label.removesuffix(" bf16")], linewidth=1)
            panel.plot(*zip(*sorted(line.items()), strict=True), label=label, **style)
        panel.set(title=name, xlabel="tokens", xscale="log", yscale="log")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("us a layer")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=7, fontsize=8)
    figure.suptitle(f"fp4.moe ({provenance(rows)}); other libraries: the same kind of GPU and protocol, another day", fontsize=9, y=1.02)
    return _save(figure, out, "moe.svg")


def serve(rows: list[dict], out: Path) -> Path | None:
    """Time of vLLM with the plugin over that with its own kernels, one bar a row; the start, which is no answer to a request, is left out."""
    rows = [row for row in rows if not row["row"].startswith("start")]
    names = list(dict.fromkeys((row["gpu"], row["model"], row["row"]) for row in rows if row["ratio"]))
    if not names:
        return None
    ms = {(row["gpu"], row["model"], row["row"], row["who"]): float(row["ms"]) for row in rows}
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.35 * len(names)))
    ratios = [ms[(*name, OURS)] / ms[(*name, "marlin")] for name in names]
    bars = axes.barh([f"{gpu.split()[1]}, {model}, {row}" for gpu, model, row in names], ratios)
    axes.bar_label(
        bars, [f" {ratio:.2f} ({ms[(*name, OURS)]:.4g} ms, {ms[(*name, 'marlin')]:.4g} ms)" for name, ratio in zip(names, ratios, strict=True)], fontsize=7
    )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.0, *ratios) * 1.25)
    axes.tick_params(labelsize=7)
    axes.set_xlabel("time / time with Marlin (below 1: faster)", fontsize=8)
    axes.set_title(f"vLLM {rows[0]['vllm']} with the plugin against vLLM with Marlin\n{provenance(rows)}", fontsize=9)
    return _save(figure, out, "serve.svg")


def quality(path: Path, out: Path) -> Path | None:
    """KL by bits a weight of the rows of ``sparse_quality_*.csv``; None if a model has too few."""
    rows = [row for row in read_csv(path) if row["weights"] != "bf16"]
    figure, axes = plt.subplots(figsize=(6, 4))
    for text in sorted({row["text"] for row in rows}):
        mixed = [row for row in rows if row["text"] == text and (row["weights"] in ("dense", "sparsegpt") or "mixed" in row["weights"])]
        curve = sorted((float(row["bits"]), float(row["kl"])) for row in mixed)
        if len(curve) < 3:
            continue
        (line,) = axes.plot(*zip(*curve, strict=True), marker="o", label=f"sparsegpt, mixed with dense: {text}")
        axes.plot(*zip(curve[0], curve[-1], strict=True), linestyle=":", color=line.get_color(), label="straight line between the ends")
    for row in rows:
        if row["weights"] in ("admm", "recovered"):
            axes.plot(float(row["bits"]), float(row["kl"]), marker="s", linestyle="", label=f"{row['weights']}: {row['text']}")
    if not axes.lines:
        plt.close(figure)
        return None
    axes.set(
        xlabel="bits a weight",
        ylabel="KL from bf16, nats a token",
        title=f"{rows[0]['model']}, {', '.join(sorted({row['date'] for row in rows}))}",
        ylim=(0, None),
    )
    axes.legend(fontsize=7)
    return _save(figure, out, f"{path.stem}.svg")


_KV = {"bf16": "tab:gray", "fp8": "tab:blue", "k8v4": "tab:orange", "nvfp4": "tab:green"}
_KV_KERNELS = ("cuda_step_attention", "cuda_step_attention_codes", "triton_cached_attention", "cuda_quantized_attention")


def kv_step(rows: list[dict], out: Path) -> Path | None:
    """Microseconds of a layer by tokens in the cache, a panel a batch, by the fastest kernel; dotted: the bytes of the cache at the rate of a copy."""
    known = sorted((row for row in rows if row["kernel"] in _KV_KERNELS), key=lambda row: -float(row["us"]))
    rows = list({(row["kv"], row["batch"], row["at"]): row for row in known}.values())
    batches = sorted({int(row["batch"]) for row in rows})
    if not rows:
        return None
    figure, panels = plt.subplots(1, len(batches), figsize=(3.4 * len(batches), 3.4), squeeze=False)
    for axes, batch in zip(panels[0], batches, strict=True):
        for kv, color in _KV.items():
            mine = sorted((int(row["at"]), float(row["us"]), float(row["floor_us"])) for row in rows if (row["kv"], int(row["batch"])) == (kv, batch))
            if mine:
                at, us, floor = zip(*mine, strict=True)
                axes.plot(at, us, marker="o", markersize=3, color=color, label=kv)
                axes.plot(at, floor, linestyle=":", linewidth=1, color=color)
        ticks = sorted({int(row["at"]) for row in rows})
        axes.set(xscale="log", yscale="log", xlabel="tokens in the cache", title=f"batch {batch}")
        axes.set_xticks(ticks, list(map(str, ticks)), fontsize=7)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("us a layer")
    panels[0][0].legend(fontsize=7)
    figure.suptitle(
        f"Attention of a decode step, {rows[0]['heads']} heads, {rows[0]['kv_heads']} KV heads of {rows[0]['d']}\n{provenance(rows)}", fontsize=8, y=1.06
    )
    return _save(figure, out, "kv_step.svg")


def kv_prompt(rows: list[dict], out: Path) -> Path | None:
    """Microseconds of a layer for new tokens behind old ones, append and reading of old codes included, one bar a format."""
    rows = [row for row in rows if row["who"] == "triton_prefill_attention" and int(row["filled"])]
    cases = sorted({(int(row["tokens"]), int(row["filled"]), int(row["batch"])) for row in rows}, key=lambda case: (case[1], case[0], case[2]))
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(max(5.0, 1.7 * len(cases)), 3.2))
    for i, (kv, color) in enumerate(_KV.items()):
        us = {(int(row["tokens"]), int(row["filled"]), int(row["batch"])): float(row["whole_us"]) for row in rows if row["kv"] == kv}
        bars = axes.bar(
            [j + 0.2 * (i - 1.5) for j, case in enumerate(cases) if case in us], [us[case] for case in cases if case in us], 0.2, color=color, label=kv
        )
        axes.bar_label(bars, fmt="%.0f", fontsize=6)
    axes.set_xticks(range(len(cases)), [f"{tokens} behind {filled}" + (f"\nbatch {batch}" if batch > 1 else "") for tokens, filled, batch in cases], fontsize=7)
    axes.set_ylabel("us a layer")
    axes.set_title(f"Attention of new tokens behind a text, {rows[0]['heads']} heads of {rows[0]['d']}\n{provenance(rows)}", fontsize=8)
    axes.legend(fontsize=7)
    return _save(figure, out, "kv_prompt.svg")


def kv_quality(rows: list[dict], out: Path) -> Path | None:
    """KL by bits of a number of a key and one of a value; the model's keys as they are."""
    rows = [row for row in rows if row["kv"] != "bf16" and float(row["bias"]) == 0]
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(5, 3.2))
    markers = dict(zip(sorted({row["text"] for row in rows}), "osv^", strict=False))
    for row in rows:
        axes.plot(
            float(row["bits_a_pair"]), float(row["kl"]), marker=markers[row["text"]], linestyle="", color=_KV[row["kv"]], label=f"{row['kv']}, {row['text']}"
        )
    title = f"{rows[0]['model']}, torch {rows[0]['torch']}, {', '.join(sorted({row['date'] for row in rows}))}"
    axes.set(xlabel="bits a pair of numbers (heads of 64; exact tokens not counted)", ylabel="KL, nats a token", ylim=(0, None))
    axes.set_title(title, fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return _save(figure, out, "kv_quality.svg")


def mixed_bits(path: Path, out: Path) -> Path | None:
    """KL by bits a weight of the rows of ``quality_bits_*.csv``; None if there are none."""
    rows = read_csv(path)
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(6, 3.6))
    styles = dict(zip(sorted({row["kept_in"] for row in rows}), ("--", "-"), strict=False))
    colours = dict(zip(sorted({row["text"] for row in rows}), ("tab:blue", "tab:orange"), strict=False))
    for text, colour in colours.items():
        for kept_in, style in styles.items():
            line = sorted((float(row["bits"]), float(row["kl"])) for row in rows if (row["text"], row["kept_in"]) == (text, kept_in))
            axes.plot([b for b, _ in line], [kl for _, kl in line], marker="o", markersize=3, linestyle=style, color=colour, label=f"{kept_in}, {text}")
    title = f"{rows[0]['model']}, torch {rows[0]['torch']}, {', '.join(sorted({row['date'] for row in rows}))}"
    axes.set(xlabel="bits a weight on average", ylabel="KL, nats a token", ylim=(0, None))
    axes.set_title(title, fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, title="the other layers' format, text", title_fontsize=7)
    return _save(figure, out, f"{path.stem}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    data = {name: read_csv(args.results / f"{name}.csv") for name in ("dense", "decode", "sparse", "moe", "moe_peers", "serve")}
    drawn = [roofline(data["dense"], args.out), speedup(data["dense"], args.out), decode(data["decode"], args.out), sparse(data["sparse"], args.out)]
    drawn += [moe(data["moe"], data["moe_peers"], args.out), serve(data["serve"], args.out)]
    of_h100 = args.results / "h100"
    drawn += [kv_step(read_csv(of_h100 / "cached_attention.csv"), args.out), kv_prompt(read_csv(of_h100 / "cached_prompt.csv"), args.out)]
    drawn += [kv_quality(read_csv(args.results / "quality_kv_smollm2.csv"), args.out)]
    drawn += [*(quality(path, args.out) for path in sorted(args.results.glob("sparse_quality_*.csv")))]
    drawn += [*(mixed_bits(path, args.out) for path in sorted(args.results.glob("quality_bits_*.csv")))]
    for path in drawn:
        print(f"wrote {path}" if path else "no data for one plot")


if __name__ == "__main__":
    main()

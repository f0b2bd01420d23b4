"""The benchmarks run end to end: tiny shapes on a CPU, every file they write, the plots of what is in the repository."""

from __future__ import annotations

import csv
import os
import sys
import tarfile
from pathlib import Path

import pytest

from lowering_tests import forked

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def run(script: str, *args: str) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = forked.run(BENCHMARKS / script, *args, OMP_NUM_THREADS="1", PYTHONPATH=path, PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rows_of(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_dense(tmp_path):
    run("dense.py", "--smoke", "--out", str(tmp_path / "dense.csv"))
    rows = rows_of(tmp_path / "dense.csv")
    assert {row["who"] for row in rows} == {"fp4_inductor", "fp4_inductor_eager", "bf16"}
    assert {row["m"] for row in rows} == {"1", "3", "33"}
    assert all(float(row["us"]) > 0 for row in rows)
    assert all(float(row["error"]) < 4e-3 for row in rows if row["who"] != "bf16")
    assert {*rows[0]} == {*rows_of(BENCHMARKS / "results" / "dense.csv")[0]}


def test_decode(tmp_path):
    pytest.importorskip("transformers")
    said = run("decode.py", "--smoke", "--layers", "1", "--lm-head", "fp8", "--out", str(tmp_path / "decode.csv"))
    rows = rows_of(tmp_path / "decode.csv")
    assert {(row["weights"], row["tokens"]) for row in rows} == {(w, t) for w in ("bf16", "nvfp4, fp8 head") for t in "1"}
    assert "x bf16" in said


def test_turns(tmp_path):
    """Two trees, of which the second is named by its folder."""
    pytest.importorskip("transformers")
    (tmp_path / "other").symlink_to(ROOT)
    kinds = ["dense", "sparse", "moe", "eager", "generate"]
    said = run("turns.py", str(ROOT), str(tmp_path / "other"), "--smoke", "--only", *kinds, "--rounds", "2", "--out", str(tmp_path / "turns.csv"))
    rows = rows_of(tmp_path / "turns.csv")
    assert {row["kind"] for row in rows} == {*kinds} and {row["tree"] for row in rows} == {"other"}
    assert all(row["sum"] == "equal" and float(row["old"]) > 0 and float(row["new"]) > 0 for row in rows)
    assert said.count("geometric mean") == len(kinds)


def test_attention(tmp_path):
    run("attention.py", "--smoke", "--out", str(tmp_path / "attention.csv"))
    rows = rows_of(tmp_path / "attention.csv")
    assert [row["who"] for row in rows[:3]] == ["fp4_inductor", "sdpa", "sdpa_gqa"]
    assert {(row["model"], row["filled"]) for row in rows} == {(m, f) for m in ("qwen3-8b", "qwen3-30b") for f in ("20", "40")}
    assert all(float(row["us"]) > 0 and float(row["error"]) < 1e-6 for row in rows)


def test_masked_attention(tmp_path):
    run("masked_attention.py", "--smoke", "--out", str(tmp_path / "masked.csv"))
    rows = rows_of(tmp_path / "masked.csv")
    assert [row["who"] for row in rows] == ["sdpa", "fp4_inductor"] * 2
    assert all(float(row["error"]) < 1e-6 for row in rows)
    assert {*rows[0]} == {*rows_of(BENCHMARKS / "results" / "masked_attention.csv")[0]}


def test_cached_attention(tmp_path):
    run("cached_attention.py", "--smoke", "--apart", "--out", str(tmp_path / "cached.csv"))
    rows = rows_of(tmp_path / "cached.csv")
    assert [row["kv"] for row in rows] == ["bf16"] * 2 + ["fp8"] * 2 + ["k8v4"] * 2 + ["nvfp4"] * 2, "what serves the op, and torch's operators"
    assert [row["kernel"] for row in rows] == ["append + attention", "apart"] * 4, "no kernel of one launch runs on a CPU"
    assert all(float(row["us"]) > 0 for row in rows) and float(rows[0]["floor_us"]) > float(rows[2]["floor_us"])


def test_paged_attention(tmp_path):
    run("paged_attention.py", "--smoke", "--out", str(tmp_path / "paged.csv"))
    rows = rows_of(tmp_path / "paged.csv")
    assert [(row["heads"], row["kv_heads"], row["kernel"]) for row in rows] == [("32", "8", "reference"), ("32", "4", "reference")]
    assert all(float(row["us"]) > 0 for row in rows) and float(rows[0]["floor_us"]) > float(rows[1]["floor_us"])


def test_router(tmp_path):
    run("router.py", "--smoke", "--out", str(tmp_path / "router.csv"))
    rows = rows_of(tmp_path / "router.csv")
    assert [(row["kernel"], row["norm"]) for row in rows] == [("scores + choice", "False"), ("scores + choice", "True")], "a CPU has no kernel of one launch"
    assert all(float(row["us"]) > 0 for row in rows)


def test_chain(tmp_path):
    run("chain.py", "--smoke", "--out", str(tmp_path / "chain.csv"))
    rows = rows_of(tmp_path / "chain.csv")
    assert [row["shape"] for row in rows] == ["dense", "experts"] and all(float(row["error"]) < 2e-2 for row in rows)


def test_first_token(tmp_path):
    pytest.importorskip("transformers")
    run("first_token.py", "--smoke", "--forward", "7", "--out", str(tmp_path / "first.csv"))
    rows = rows_of(tmp_path / "first.csv")
    assert [(row["held"], row["prompt"]) for row in rows] == [(held, how) for held in "05" for how in ("as it is", "padded")]
    assert all(float(row["ms"]) > 0 and float(row["forward_ms"]) > 0 for row in rows) and {row["gap"] for row in rows} == {"", "0.0"}
    assert {*rows[0]} == {*rows_of(BENCHMARKS / "results" / "first_token.csv")[0]}


def test_cached_prompt(tmp_path):
    for window in ((), ("--window", "30")):
        run("cached_prompt.py", "--smoke", *window, "--out", str(tmp_path / "prompt.csv"))
        rows = rows_of(tmp_path / "prompt.csv")
        assert {(row["kv"], row["tokens"], row["filled"]) for row in rows} == {
            (k, *sizes) for k in ("bf16", "fp8", "k8v4", "nvfp4") for sizes in (("40", "0"), ("20", "70"))
        }
        assert {row["who"] for row in rows} == {"append + attention", *(() if window else ("sdpa",))}, "no Triton kernel runs on a CPU"
        assert all(float(row["whole_us"]) > 0 and float(row["error"]) < 1e-6 for row in rows)


def test_quality_time(tmp_path):
    run("quality_time.py", "--smoke", "--weights", "gptq", "activation", "--out", str(tmp_path / "time.csv"))
    rows = rows_of(tmp_path / "time.csv")
    assert [row["weights"] for row in rows] == ["gptq", "activation"]
    assert {*rows[0]} == {*rows_of(BENCHMARKS / "results" / "quality_time.csv")[0]}
    parts = ("text", "means", "fisher", "rounding", "kl")
    taken = [sum(float(row[p]) for p in parts) for row in rows]
    assert taken[0] > taken[1]
    assert all(t <= float(row["seconds"]) + 0.3 for t, row in zip(taken, rows, strict=True))


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    run("plots.py", "--out", str(tmp_path))
    for name in ("roofline", "speedup", "decode", "sparse", "moe"):
        text = (tmp_path / f"{name}.svg").read_text()
        assert "H200" in text, "a plot says where its figures come from"
        rows = rows_of(BENCHMARKS / "results" / f"{name if name in ('decode', 'sparse', 'moe') else 'dense'}.csv")
        drawn = [row for row in rows if row.get("tokens", row.get("m")) == "1"]  # every plot draws a step; some neither prompts nor M in between
        assert drawn and all(row["commit"] in text for row in drawn), "a plot says of which commit it is"
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (BENCHMARKS / "results").glob("*.svg")}, "every plot has its script"
    assert "humming" in (tmp_path / "moe.svg").read_text()
    served = (tmp_path / "serve.svg").read_text()
    for name, table in (("kv_step", "cached_attention"), ("kv_prompt", "cached_prompt")):
        text, rows = (tmp_path / f"{name}.svg").read_text(), rows_of(BENCHMARKS / "results" / "h100" / f"{table}.csv")
        assert "NVIDIA H100" in text and any(row["commit"] in text for row in rows) and all(f">{kv}<" in text for kv in ("bf16", "fp8", "k8v4", "nvfp4"))
    assert "nvfp4, northanger_abbey" in (tmp_path / "kv_quality.svg").read_text()
    assert "NVIDIA H100" in served and all(row["commit"] in served for row in rows_of(BENCHMARKS / "results" / "serve.csv"))


def test_floor_and_comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decode
    import dense

    assert dense.floor_us(8192, 8192, 1) == pytest.approx(10.4, abs=0.3)  # 37.7 MB
    assert dense.floor_us(8192, 8192, 8192) == pytest.approx(797, abs=1)  # products at the FP8 rate
    assert dense.floor_us(16384, 65536, 1) == pytest.approx(604e6 / 4.58e6, rel=0.05)
    rows = [dict(weights=w, batch=1, tokens=1, ms=ms) for w, ms in (("bf16", 6.0), ("bf16", 5.0), ("nvfp4", 2.5), ("nvfp4", 3.0))]
    assert decode.compare(rows) == ["nvfp4 batch 1 tokens 1: 2.00x bf16, each in its better mode"]


def test_candidates(monkeypatch, tmp_path):
    """The loop over candidates on a CPU, the references in place of the kernels; one of them wrong; and every tile is one that is compiled."""

    import torch

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import candidates

    from lowering_tests.kernels.emulator import tiles_of

    def right(x, *weight):
        return torch.ops.fp4.linear(x, *weight)

    def product(op, kernel, x, weight, tile=None):
        if op == "sparse_linear":
            return candidates.sparse_reference(x, *weight).to(x.dtype)
        return right(x, *weight) * (2 if kernel == "cuda_wide" else 1)

    monkeypatch.setattr(candidates, "product", product)

    def stand_in(name, x, weight, global_scale, bias, arch, options):
        if name.startswith("sparse"):
            return candidates.sparse_reference(x, *weight, global_scale).to(x.dtype)
        if options.early:
            return right(x, *weight, global_scale)
        then = options.then
        if name.endswith("glu"):
            return torch.ops.fp4.linear_glu(x, *weight, global_scale, None, then.act)
        if then.starts:
            (a, b), n = then.starts, weight[0].shape[0]
            return torch.cat(torch.ops.fp4.linear_siblings(x, *weight, global_scale, None, [0, a, a, b, b, n]), -1)
        return torch.ops.fp4.linear_epilogue(x, *weight, global_scale, None, then.act, then.mul, then.residual)

    monkeypatch.setattr(candidates.csrc, "call", stand_in)
    monkeypatch.setattr(candidates, "BOUND", 8e-3)  # the stand-ins round on the way
    monkeypatch.setattr(candidates.run, "by_triton", lambda form, inputs, p, tile: torch.ops.fp4.linear_w4a4(*inputs, None, p.dtype))
    monkeypatch.setattr(candidates.cuda_w4a4, "by_form", lambda form, codes, weight, p, bias: torch.ops.fp4.linear_w4a4(*codes, *weight, bias, p.dtype))
    rows = list(candidates.shape(256, 64, (1, 4, 40), candidates.KINDS, "cpu"))
    kinds = {row["kernel"] for row in rows}
    fused = {f"{size} {what}" for size in ("gemv", "small", "table", "wide") for what in ("glu", "residual")}
    fused |= {"w4a4", "cuda_w4a4", "w4a4 whole", "rounding"}
    apart = {"current", "small", "table", "table early", "wide early", "wide", "sparse", "sparse gemv", "sparse triton", "sparse table", "sparse table early"}
    apart |= {"gemv", "gemv early", "current K+16", "any_k K+16", "siblings apart", "siblings", "glu apart", "residual apart"}
    assert kinds == apart | fused
    for row in rows:
        assert (row["us"] != row["us"]) == (row["kernel"] == "wide"), "what is wrong is not timed"
    compiled = {}
    for kernel in candidates.csrc.LIBRARIES.values():
        compiled[kernel.source] = {tile[-3:] for tile in tiles_of(kernel.source)}
        compiled[kernel.source] |= {(*tile, 1) for tile in tiles_of(kernel.source, "STREAMED")}
    for k, n in candidates.SHAPES:
        tiles = [tile for tile in candidates.sparse_table_tiles(n, k) if tile]
        assert {(tile.sets_a_warp, tile.substeps) for tile in tiles} <= set(tiles_of("sparse/sparse_linear_table.cu"))
        assert len(tiles) > 10
    assert {(tile.rows,) for tile in candidates.gemv_tiles() if tile} == set(tiles_of("gemm/linear_gemv.cu"))
    for m in candidates.ROWS:
        for source, tiles in (
            ("gemm/linear_small.cu", candidates.small_tiles(m) if m <= 32 else ()),
            ("gemm/linear_wide.cu", candidates.wide_tiles(m)),
            ("sparse/sparse_linear_small.cu", candidates.sparse_tiles(m)),
        ):
            for tile in tiles:
                sizes = tuple(v for name, v in tile._asdict().items() if name != "splits") if tile else None
                assert sizes is None or sizes in compiled[source], (source, tile)


def test_sparse(tmp_path):
    run("sparse.py", "timing", "--smoke", "--out", str(tmp_path / "sparse.csv"))
    rows = rows_of(tmp_path / "sparse.csv")
    assert [(r["k"], r["m"]) for r in rows] == [("64", "1"), ("64", "2"), ("256", "1"), ("256", "2")]
    assert all(float(r["us"]) > 0 and float(r["dense_us"]) > 0 and float(r["error"]) < 0.01 for r in rows)


def test_on_gpu(tmp_path, monkeypatch):
    """Every step names what exists, a failed one is told and kept, and one that does not fit the budget is not begun."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import on_gpu

    for step in on_gpu.STEPS:
        named = [a for a in step.command if a.endswith(".py") or a.startswith("lowering_tests")]
        assert named
        assert all((ROOT / a).exists() for a in named), step
    steps = (on_gpu.Step("good", 1, ("-c", "print('fine')")), on_gpu.Step("bad", 1, ("-c", "raise SystemExit(3)")), on_gpu.Step("long", 10**6, ("-c", "")))
    monkeypatch.setattr(on_gpu, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--budget", "600", "--out", str(tmp_path)])
    assert on_gpu.main() == 1
    summary = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.split()[:2] for line in summary] == [["good", "passed,"], ["bad", "failed"], ["long", "not"]]
    with tarfile.open(tmp_path / "on_gpu.tar.gz") as archive:
        assert {"good.log", "bad.log", "summary.txt"} <= set(archive.getnames())


def test_on_gpu_without_test_packages(tmp_path, monkeypatch):
    """A machine with torch and pytest only: what needs more is left out by name, and nothing is called a failure for it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import on_gpu

    whole = on_gpu.tests()
    assert whole.notes == ()
    assert "lowering_tests/passes/test_idiom.py" in whole.command
    monkeypatch.setattr(on_gpu, "is_missing", lambda module: module in ("expecttest", "hypothesis", "transformers"))
    step = on_gpu.tests()
    left_out = {note.split()[2].rstrip(":"): note.partition("pip install ")[2] for note in step.notes}
    assert left_out["lowering_tests/passes/test_idiom.py"] == "expecttest"
    assert left_out["lowering_tests/formats/test_nvfp4.py"] == "hypothesis"
    assert {*whole.command} - {*step.command} == {*left_out}
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "lowering_tests" / "gpu").glob("test_*.py")} <= {*step.command}
    fine = on_gpu.Step("fine", 1, ("-c", ""), notes=step.notes)
    monkeypatch.setattr(on_gpu, "STEPS", (fine, on_gpu.Step("lacks", 1, ("-c", "raise SystemExit(3)"), needs=("transformers",))))
    monkeypatch.setattr(sys, "argv", ["on_gpu.py", "--out", str(tmp_path)])
    assert on_gpu.main() == 0
    summary = (tmp_path / "summary.txt").read_text()
    assert "left out lowering_tests/passes/test_idiom.py: pip install expecttest" in summary
    assert "skipped: pip install transformers" in summary


@pytest.mark.slow  # integrations/test_parallel.py has two ranks, too
def test_two_processes_and_one_generate_the_same_tokens(tmp_path):
    """The two of them compiled."""
    pytest.importorskip("transformers")
    said = run("on_gpus.py", "--smoke", "--parts", "generate", "--budget", "280", "--out", str(tmp_path / "gpus.csv"))
    one, two = rows_of(tmp_path / "gpus.csv")
    assert (one["parallel"], two["parallel"]) == ("one", "tp") and float(two["ms"]) > 0 and float(two["of_one"]) > 0
    assert "2 of 2 rows have the tokens of one GPU" in said
    assert "generate tiny tp:" not in said, "no note: a KVCache, and one graph"


def test_on_gpus(tmp_path, monkeypatch):
    """Multicast is off in whatever is started; what runs beside what; which tokens are a tie."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import on_gpus

    monkeypatch.setattr(on_gpus, "measure_generate", lambda *_: int(os.environ["NCCL_NVLS_ENABLE"]))
    monkeypatch.setattr(sys, "argv", ["on_gpus.py", "--smoke", "--parts", "generate", "--out", str(tmp_path / "none.csv")])
    assert on_gpus.main() == 0
    every = [on_gpus.Case(model, parallel, who) for model in ("8b", "30b", "70b") for parallel in ("one", "tp") for who in on_gpus.serve.WHO]
    assert on_gpus.ROWS.keys() <= on_gpus.serve.ROWS.keys(), "a worker knows the rows of serve.py"
    groups = on_gpus.groups_of(every)
    assert [case for group in groups for case in group] == every, "each once, in order"
    assert all(sum(map(on_gpus.gib_of, group)) <= on_gpus.MEMORY for group in groups) and len(groups) < len(every)
    assert on_gpus.gib_of(every[-1], cache=8) == on_gpus.gib_of(every[-1]) - (22 - 8) / 2, "of half of a 70B model's cache"
    tokens = {"one": {"1": {"tokens": [[1, 2], [3, 4]]}}, "tp": {"1": {"tokens": [[1, 2], [3, 5]]}}}
    assert [on_gpus.tell_tokens("tiny", "1", tokens, {"1": 0.01, "logits": error}) for error in (0.01, 0.9)] == [0, 1], "a tie, and something else"


def test_on_gpu_expects_what_decode_took(monkeypatch):
    """The first calls alone, which compile, of the configurations that the step measures: as the data say."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import on_gpu

    [step] = [s for s in on_gpu.STEPS if s.name == "decode"]
    modes = step.command[step.command.index("--modes") + 1 :]
    rows = [row for row in rows_of(BENCHMARKS / "results" / "decode.csv") if row["model"] == "qwen3-8b-shape x36 layers" and row["mode"] in modes]
    first = {(row["gpu"], row["weights"], row["batch"], row["tokens"]): float(row["compile_s"]) for row in rows}
    for gpu in {row["gpu"] for row in rows}:
        assert sum(seconds for key, seconds in first.items() if key[0] == gpu) < step.seconds

"""vLLM compiles a graph for each range of tokens and drops guards: the kernel that runs is the one for its M; its cache knows our sources."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import vllm
from torch._inductor import config

import fp4_inductor
from fp4_inductor import passes
from fp4_inductor.integrations.vllm import compiling
from lowering_tests.vllm import piecewise
from lowering_tests.vllm.served import PROMPTS, assert_same, engine, in_process

INSIDE = pytest.mark.skipif(not in_process(), reason="the worker is another process")
PIECEWISE = {
    "enforce_eager": False,
    # of the passes that fuse vLLM's own FP8 operators some have no such operator on a CPU
    "compilation_config": {"mode": 3, "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False, "eliminate_noops": True}},
}


@pytest.fixture
def caches(monkeypatch, tmp_path):
    """An empty cache, but for what vLLM knows of its own models, which it learns from a process that imports them."""
    (tmp_path / "vllm").mkdir()
    known = Path(vllm.envs.VLLM_CACHE_ROOT, "modelinfos")
    known.mkdir(parents=True, exist_ok=True)
    (tmp_path / "vllm" / "modelinfos").symlink_to(known)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "0")
    for name in ("VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE", "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING"):
        monkeypatch.setenv(name, "1")  # so that it is put back
        monkeypatch.delenv(name)
    return tmp_path / "vllm"


def hashes(cache) -> set[str]:
    """Folders of vLLM's compile cache: one for each key."""
    return {p.name for p in cache.glob("torch_compile_cache/*") if p.name != "torch_aot_compile"} | {
        p.name for p in cache.glob("torch_compile_cache/torch_aot_compile/*")
    }


@INSIDE
def test_each_call_runs_the_kernel_of_its_rows(folders, monkeypatch, caches):
    folder = folders("llama-modelopt-nvfp4")
    fp4_inductor.decisions(clear=True)
    with piecewise.kept(monkeypatch), piecewise.three_kernels(monkeypatch) as (ran, decisions):
        with engine(folder, quantization="fp4_inductor", **PIECEWISE) as llm:
            compilation = llm.llm.llm_engine.vllm_config.compilation_config
            assert 1 in compilation.compile_sizes
            assert compilation.compile_ranges_endpoints == [16, 96]
            assert os.environ["VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE"] == "0"
            got = [llm.ask([prompt], 6)[0] for prompt in PROMPTS]
        assert {(decision.how, decision.note) for decision in decisions if decision.how != "proven"} == set()
        assert {(regime, m) for regime, m in ran if not piecewise.SPAN[regime][0] <= m <= piecewise.SPAN[regime][1]} == set()
        assert ran["gemv", 1]
        assert ran["mid", len(PROMPTS[2])]
        assert ran["cpu", 96]  # the largest batch, which vLLM runs once at the start
    with engine(folder, quantization="fp4_inductor") as llm:
        want = [llm.ask([prompt], 6)[0] for prompt in PROMPTS]
    assert sum(a[0] == b[0] for a, b in zip(got, want, strict=True)) >= 3


@INSIDE
def test_cache_knows_sources_and_options(folders, monkeypatch, caches):
    """The same again loads what was compiled; another source of this package, or another dispatch, compiles anew."""
    folder = folders("llama-modelopt-nvfp4")

    def lowered() -> tuple[int, set[str]]:
        fp4_inductor.decisions(clear=True)
        before = hashes(caches)
        with engine(folder, quantization="fp4_inductor", **PIECEWISE) as llm:
            llm.ask([[5, 6, 7]], 2)
        return len(fp4_inductor.decisions().rows), hashes(caches) - before

    with piecewise.kept(monkeypatch):
        first, made = lowered()
        assert first > 0
        assert made
        again, more = lowered()
        assert (again, more) == (0, set())
        monkeypatch.setattr(compiling, "cache_salt", lambda: "another source")
        third, new = lowered()
        assert third > 0
        assert new
    assert passes.matches().get("linear_glu", 0) > 0


@INSIDE
def test_a_token_is_one_launch_between_two_attentions(folders, monkeypatch, caches):
    """A graph keeps its counters, of its own in each engine and each process that loads it from the cache; a layer's graph is stored once."""
    from vllm.compilation.counter import compilation_counter

    folder, one = folders("llama-modelopt-nvfp4"), {**PIECEWISE["compilation_config"], "compile_sizes": [1]}
    passes.reset_matches()
    fp4_inductor.decisions(clear=True)
    answers, buffers = [], []
    with piecewise.as_for_a_gpu(monkeypatch) as runs:
        for _ in range(2):  # the second one loads what the first one has compiled
            saved = compilation_counter.num_compiled_artifacts_saved
            runs.clear()
            with engine(folder, quantization="fp4_inductor", **PIECEWISE | {"compilation_config": one}) as llm:
                answers.append([llm.ask([prompt], 6)[0] for prompt in PROMPTS])
                buffers.append({place for _, place in runs})
            assert {rows for rows, _ in runs} == {1}
            if len(answers) == 1:
                text = fp4_inductor.decisions().text(400)
                found = passes.matches()
                assert compilation_counter.num_compiled_artifacts_saved - saved == 2 * 3  # of one token and of more: the first, a middle, and the last piece
                # Behind an attention: o + residual, norm + gate_up, down + residual, norm + q/k/v; in the last piece all but q/k/v.
                assert (found["linear_chain"], found["norm_linear_glu"], found["norm_linear"]) == (2, 2, 1)
    assert text.count("cuda_gemv_chain") >= 4 and "its blocks meet in a constant of the graph" in text and "begins while the kernel before it runs" in text
    assert [len(places) for places in buffers] == [2, 2]
    with engine(folder, quantization="fp4_inductor") as llm:
        want = [llm.ask([prompt], 6)[0] for prompt in PROMPTS]
    for got in answers:
        assert_same(got, want, 0.02)


@INSIDE
@pytest.mark.parametrize("reason", ["", "no way between them"])
def test_a_token_is_summed_over_ranks_in_the_launch(folders, monkeypatch, caches, reason):
    """The sums by vLLM's operator behind o and down are inside of a launch where the ranks share memory; else they end it, and it is said why."""
    folder = folders("llama-modelopt-nvfp4")
    passes.reset_matches()
    fp4_inductor.decisions(clear=True)
    options = PIECEWISE | {"compilation_config": {**PIECEWISE["compilation_config"], "compile_sizes": [1]}}
    with piecewise.as_for_a_gpu(monkeypatch) as runs, piecewise.divided(monkeypatch, reason):
        with engine(folder, quantization="fp4_inductor", **options) as llm:
            got = [llm.ask([prompt], 6)[0] for prompt in PROMPTS]
            [salt] = llm.llm.llm_engine.vllm_config.additional_config["fp4_inductor"].values()
        text = fp4_inductor.decisions().text(400)
        assert salt == fp4_inductor.cache_salt(), "the key of vLLM's cache knows the ranks that share memory"
    assert (salt == fp4_inductor.cache_salt()) == bool(reason)
    assert {rows for rows, _ in runs} == {1}
    assert passes.matches()["linear_chain"] == 2
    assert ("summed over the ranks in the kernel" in text) == (not reason)
    if reason:
        assert f"its result is summed over ranks: {reason}" in text
    with engine(folder, quantization="fp4_inductor") as llm:
        want = [llm.ask([prompt], 6)[0] for prompt in PROMPTS]
    assert_same(got, want, 0.02)


@pytest.mark.parametrize(("found", "timed"), [((1, 32), False), ((129, 8192), True), ((513, None), True), (None, True)])
def test_kernels_of_few_tokens_are_merged_untimed(found, timed, monkeypatch):
    """In the compilation of such a graph alone, whose options ask for timing."""
    seen = []
    monkeypatch.setattr(compiling, "range_of_compilation", lambda: found)
    compiling.register()
    torch._dynamo.reset()
    options = {"benchmark_combo_kernel": True, "post_grad_custom_post_pass": lambda graph: seen.append(config.benchmark_combo_kernel)}
    with config.patch(force_disable_caches=True):
        torch.compile(lambda x: x + 1, options=options)(torch.ones(3))
    assert seen == [timed]
    assert not config.benchmark_combo_kernel, "which is torch's default"

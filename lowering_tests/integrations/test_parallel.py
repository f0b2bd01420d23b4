"""Tensor parallel on two processes, on a CPU by gloo or on two GPUs by NCCL: each holds its part of a weight, and the logits are those of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.decoding import ranks
from fp4_inductor.decoding.ranks import Ranks
from fp4_inductor.integrations.pretrained.parallel import part_of
from fp4_inductor.tensors import NVFP4Tensor
from lowering_tests.foreign import MIXTRAL, MODELOPT, logits, relative
from lowering_tests.models.conftest import BASE

SCRIPT = Path(__file__).parent / "parallel_ranks.py"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_ranks(script: Path, *args: str, device: str = "cpu") -> None:
    """``script`` on two ranks."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"} | (
        {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), str(script), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks(tmp_path, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    # One pair of processes for both models: starting them takes longer than all they do.
    run_ranks(SCRIPT, str(tmp_path / "r"), str(MODELOPT), str(MIXTRAL), device=device)
    for i, path in enumerate((MODELOPT, MIXTRAL)):
        model = fp4_inductor.load_pretrained(path)
        held = []
        for rank in range(2):
            got = torch.load(tmp_path / f"r.{i}.{rank}.pt", weights_only=True)
            assert relative(got.double(), logits(model)) < 2.0**-7
            said = json.loads((tmp_path / f"r.{i}.{rank}.json").read_text())
            assert torch.device(said["device"]) == (torch.device("cpu") if device == "cpu" else torch.device("cuda", rank))
            assert said["saved"] is False  # a part of a model is not a model
            held.append(said["held"])
        for name, (shape, *sums) in held[0].items():
            whole = model.get_submodule(name)
            total = [int(whole.qdata.int().sum()), int(whole.scale.view(torch.uint8).int().sum())]
            assert [a + b for a, b in zip(sums, held[1][name][1:], strict=True)] == total, name
            assert 2 * torch.Size(shape).numel() == whole.qdata.numel(), name


@pytest.mark.parametrize("style", ["colwise", "rowwise", "packed_colwise"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(64, 96), (3, 64, 96)])
def test_parts_are_slices_of_the_dense_weight(style, interleaved, shape):
    w = NVFP4Tensor.from_dense(torch.randn(shape))
    dense = w.dequantize()
    parts = [part_of(w, style, Ranks(r, 2, None, {}), "w", interleaved).dequantize() for r in range(2)]
    if style == "rowwise":
        assert torch.equal(torch.cat(parts, -1), dense)
    elif style == "colwise" or interleaved:
        assert torch.equal(torch.cat(parts, -2), dense)
    else:
        n = shape[-2] // 4
        halves = [torch.cat([p[..., :n, :] for p in parts], -2), torch.cat([p[..., n:, :] for p in parts], -2)]
        assert torch.equal(torch.cat(halves, -2), dense)


@pytest.mark.parametrize(("style", "shape", "match"), [("rowwise", (64, 48), r"a multiple of 32 \(blocks of 16\)"), ("colwise", (33, 32), "a multiple of 2")])
def test_what_cannot_be_divided(style, shape, match):
    w = NVFP4Tensor.from_dense(torch.randn(shape))
    with pytest.raises(errors.ShapeError, match=match):
        part_of(w, style, Ranks(0, 2, None, {}), "layer")


def test_heads_of_a_rank(monkeypatch):
    """A KVCache has the heads that this rank's projections make: those of the plan, or all where the plan leaves them or puts them together."""
    plans = ({"model.layers.*.self_attn.k_proj": "colwise"}, {"layers.*.self_attn.k_proj": "colwise_gather_output"}, {"layers.*.mlp.up_proj": "colwise"})
    found = []
    for plan in plans:
        monkeypatch.setattr(ranks, "ranks_of", lambda model, plan=plan: Ranks(0, 2, None, plan))
        found.append(ranks.heads_here(None, 8))
    assert found == [4, 8, 8]
    monkeypatch.setattr(ranks, "ranks_of", lambda model: Ranks(0, 2, None, plans[0]))
    with pytest.raises(errors.ShapeError, match="3 heads of K and V cannot be divided among 2 ranks"):
        ranks.heads_here(None, 3)
    monkeypatch.setattr(ranks, "ranks_of", lambda model: None)
    assert ranks.heads_here(None, 3) == 3


def test_a_launch_goes_on_across_the_sums_of_ranks(tmp_path):
    """A decode step of a model that Transformers divided, compiled as for two GPUs that share memory: no all-reduce is left but in the launches."""
    import transformers

    torch.manual_seed(0)
    fields = BASE | dict(intermediate_size=128, head_dim=32)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**fields), dtype=torch.bfloat16).eval()
    fp4_inductor.quantize_model(model, progress=False).save_pretrained(tmp_path / "model")
    run_ranks(SCRIPT.with_name("chain_ranks.py"), str(tmp_path / "r"), str(tmp_path / "model"))
    for rank in range(2):
        apart, together = json.loads((tmp_path / f"r.{rank}.json").read_text())
        assert (apart["sums"], apart["summed"]) == (4, ["[]"] * 2) and all("compute capability 9.0" in reason for reason in apart["left"])
        assert (together["sums"], together["summed"], together["left"]) == (0, ["[0, 2]"] * 2, [])
        assert max(apart["apart"], together["apart"]) < 1e-2

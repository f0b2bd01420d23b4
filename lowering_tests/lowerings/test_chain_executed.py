"""Decode steps of a model over a KVCache whose graphs are those of a GPU, run on a CPU: the CUDA kernels of one row are emulated."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config, _exchange
from fp4_inductor._torch.collectives import all_reduce
from fp4_inductor.decoding import regions
from fp4_inductor.kernels import build
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.ops.linear_chain import ARRIVALS, ChainCall, Product
from lowering_tests.kernels import emulator
from lowering_tests.kernels.bound import binding
from lowering_tests.kernels.test_binding import ops  # noqa: F401
from lowering_tests.lowerings.of_a_gpu import linear_layers_of_a_gpu
from lowering_tests.models.conftest import BASE
from lowering_tests.ranks import group_of_one

pytestmark = pytest.mark.skipif(emulator.compiler() is None or build.cxx() is None, reason="no C++ compiler")
BF16 = torch.bfloat16


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "layers", "least", "whole", "products"),
    [
        ("Qwen3Config", 2, 4, False, 4 + 3), ("LlamaConfig", 3, 2, True, 4 + 4 + 3), pytest.param("LlamaConfig", 3, 2, False, 3 + 3, marks=SLOW),
        pytest.param("LlamaConfig", 2, 4, False, 4 + 3, marks=SLOW), pytest.param("Qwen3Config", 3, 4, False, 4 + 4 + 3, marks=SLOW),
        pytest.param("LlamaConfig", 5, 4, False, 3 + 3, marks=SLOW), pytest.param("LlamaConfig", 5, 4, True, 4 * 4 + 3, marks=SLOW),
    ],
)  # fmt: skip
def test_decode_steps(ops, family, layers, least, whole, products, monkeypatch):  # noqa: F811
    """``least`` layers, all but the last, are one region, but where a step is one graph (``whole``).

    Counters are zero again after each step, and a step reads what the one before it left in the cache.
    """
    import transformers

    monkeypatch.setattr(regions, "LEAST", least)
    torch.manual_seed(0)
    fields = BASE | dict(num_hidden_layers=layers, intermediate_size=128, head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family)(**fields), dtype=BF16).eval()
    model = fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    tokens = torch.randint(3, 128, (4,)).tolist()

    def steps(call, cache):
        with torch.no_grad():
            return torch.cat([call(torch.tensor([[token]]), cache) for token in tokens])

    def step(ids, cache):
        return model(input_ids=ids, past_key_values=cache).logits

    want, cache = steps(step, KVCache(model, 32, 1)), KVCache(model, 32, 1)
    torch._dynamo.reset()
    options = {"force_disable_caches": True}
    undivided = regions.undivided(cache) if whole else contextlib.nullcontext()
    with linear_layers_of_a_gpu("linear_chain"), undivided, listen() as entries, torch._inductor.config.patch(options):
        got = steps(torch.compile(step, fullgraph=True), cache)
    served = [e.decision.row.kernel for e in entries if e.op == "fp4.linear_chain"]
    assert served == ["cuda_gemv_chain"] * products
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 3e-2


@pytest.fixture
def group(tmp_path, monkeypatch):
    yield from group_of_one(tmp_path, monkeypatch)


def test_sums_over_ranks(ops, group):  # noqa: F811
    """Of one rank, in the launch: seven steps, because memory is used again after three launches."""
    import transformers

    torch.manual_seed(0)
    fields = BASE | dict(num_hidden_layers=2, intermediate_size=128, head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**fields), dtype=BF16).eval()
    model = fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    for layer in model.model.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda module, args, y: all_reduce(y, group))
    memory = torch.zeros(_exchange.size(1), dtype=torch.uint8)
    _exchange.add(group.group_name, _exchange.Exchange((memory.data_ptr(),), 0, memory))
    _exchange.tell(binding(), _exchange.number_of(group.group_name), _exchange.of(group.group_name))

    def step(ids, cache):
        return model(input_ids=ids, past_key_values=cache).logits

    def steps(call, cache):
        with torch.no_grad():
            return torch.cat([call(torch.tensor([[token]]), cache) for token in range(5, 12)])

    want, cache = steps(step, KVCache(model, 32, 1)), KVCache(model, 32, 1)
    torch._dynamo.reset()
    with linear_layers_of_a_gpu("linear_chain"), regions.undivided(cache), listen() as entries, torch._inductor.config.patch(force_disable_caches=True):
        got = steps(torch.compile(step, fullgraph=True), cache)
    served = [e for e in entries if e.op == "fp4.linear_chain"]
    assert [e.decision.row.kernel for e in served] == ["cuda_gemv_chain"] * (4 + 3)
    assert sum("summed over the ranks in the kernel" in e.note for e in served) == 4
    assert memory[:4].view(torch.int32).item() == 7 * 2 % _exchange.SETS, "two launches a step"
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 3e-2


def test_sums_over_ranks_one_by_one(group):
    """Where no launch does all of it, the graph has the sums between the products."""
    w = [fp4_inductor.formats.nvfp4.quantize(torch.randn(64, 64)) for _ in range(2)]
    norm = torch.randn(64).to(BF16)
    products = [Product(*w[0], residual=torch.randn(1, 64).to(BF16), summed=True), Product(*w[1], norm_weight=norm, eps=1e-6)]
    x, arrivals = torch.randn(1, 64).to(BF16), torch.zeros(ARRIVALS, dtype=torch.int32)

    def run(x):
        return torch.ops.fp4.linear_chain(*ChainCall.made(x, products, arrivals, group=group.group_name))[:2]

    torch._dynamo.reset()
    with torch.no_grad():
        results, [code] = run_and_get_code(torch.compile(run, fullgraph=True), x)
        assert "_c10d_functional.all_reduce" in code
        for got, want in zip(results, run(x), strict=True):
            assert float((got.double() - want.double()).norm() / want.double().norm()) < 1e-2

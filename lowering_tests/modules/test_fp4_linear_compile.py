"""FP4Linear compiled: one graph per regime and torch's own for M = 0 and 1, no breaks, eager's bits; one artifact ahead of time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from fp4_inductor import FP4Linear, NVFP4Tensor

N, K = 64, 96
ROWS = (0, 1, 2, 3, 5, 16, 17, 33, 64, 512, 4096)
# A CPU has one regime: the op picks its kernel itself. torch specialises M = 0 and M = 1.
CPU_GRAPHS = 1 + 2


class BothDoors(nn.Module):
    """The same weight as FP4Linear and as an NVFP4Tensor parameter, and a layer whose K is padded."""

    def __init__(self):
        super().__init__()
        self.layer = FP4Linear.from_weight(torch.randn(N, K) / 9, torch.randn(N))
        self.weight = nn.Parameter(NVFP4Tensor(*self.layer.weight.parts(), torch.float32), requires_grad=False)
        self.padded = FP4Linear.from_weight(torch.randn(N, 40) / 6)

    def forward(self, x):
        return self.layer(x), F.linear(x, self.weight, self.layer.bias), self.padded(x[..., :40])


@pytest.mark.parametrize("order", [ROWS, ROWS[::-1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_m_with_one_graph_per_regime(order, dtype):
    layer = FP4Linear.from_weight(torch.randn(N, K).to(dtype) / 9, torch.randn(N).to(dtype))
    weight = layer.weight
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    counters.clear()
    for m in order:
        x = torch.randn(m, K).to(dtype)
        got = compiled(x)
        assert got.shape == (m, N)
        assert torch.equal(got, layer(x))
        assert torch.equal(got, F.linear(x, weight, layer.bias))
    assert counters["stats"]["unique_graphs"] <= CPU_GRAPHS
    assert not counters["graph_break"]


def test_automatic_dynamic_adds_one_static_graph():
    layer = FP4Linear.from_weight(torch.randn(N, K) / 9)
    compiled = torch.compile(layer, fullgraph=True)
    counters.clear()
    for m in ROWS:
        x = torch.randn(m, K)
        assert torch.equal(compiled(x), layer(x))
    assert counters["stats"]["unique_graphs"] <= CPU_GRAPHS + 1
    assert not counters["graph_break"]


def test_marked_range_compiles_once():
    layer = FP4Linear.from_weight(torch.randn(N, K) / 9)
    compiled = torch.compile(layer, fullgraph=True)
    counters.clear()
    for m in (3, 2, 16, 17, 4096):
        x = torch.randn(m, K)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)
        assert torch.equal(compiled(x), layer(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_batch_times_sequence():
    layer = FP4Linear.from_weight(torch.randn(N, K) / 9, torch.randn(N))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    counters.clear()
    for lead in ((2, 3), (5, 7), (3, 2), (64, 9)):
        x = torch.randn(*lead, K)
        assert torch.equal(compiled(x), layer(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_training_step():
    layer, before = FP4Linear.from_weight(torch.randn(N, 90) / 9, torch.randn(N)), nn.Linear(7, 90)
    compiled = torch.compile(lambda x: layer(before(x)).square().mean(), fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 7)
    got = torch.autograd.grad(compiled(x), tuple(before.parameters()))
    want = torch.autograd.grad(layer(before(x)).square().mean(), tuple(before.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_autocast_and_casts_recompile():
    layer, x = FP4Linear.from_weight(torch.randn(N, K) / 9, torch.randn(N)), torch.randn(5, K)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert compiled(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), layer(x))
        assert compiled(x).dtype == torch.bfloat16
    layer.half()
    assert compiled(x.half()).dtype == torch.float16
    assert torch.equal(compiled(x.half()), layer(x.half()))


def test_new_weights_of_the_same_shape_need_no_new_graph():
    layer, x = FP4Linear.from_weight(torch.randn(N, K) / 9), torch.randn(5, K)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x)
    counters.clear()
    layer.load_state_dict(FP4Linear.from_weight(torch.randn(N, K) / 9).state_dict())
    assert torch.equal(compiled(x), layer(x))
    assert counters["stats"]["unique_graphs"] == 0


@pytest.fixture(scope="module")
def exported():
    torch.manual_seed(0)
    model = BothDoors()
    return model, torch.export.export(model, (torch.randn(5, K),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


def test_export_emits_the_op(exported):
    model, program = exported
    lowered = program.run_decompositions()
    called = [n.target for n in lowered.graph.nodes if n.op == "call_function" and n.target.namespace == "fp4"]
    assert called == [torch.ops.fp4.linear.default] * 3
    assert {"layer.qdata", "layer.scale", "layer.global_scale", "padded.qdata"} <= set(lowered.state_dict)
    for m in (2, 3, 64):
        x = torch.randn(m, K)
        for got, want in zip(program.module()(x), model(x), strict=True):
            assert torch.equal(got, want)


def test_strict_export(exported):
    model, _ = exported
    program = torch.export.export(model, (torch.randn(5, K),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=True)
    x = torch.randn(17, K)
    for got, want in zip(program.module()(x), model(x), strict=True):
        assert torch.equal(got, want)


def test_aot_inductor_one_artifact_for_every_m(exported, tmp_path):
    model, program = exported
    fast = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # the wrapper's C++ is half of the test's time
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"), inductor_configs=fast)
    run = torch._inductor.aoti_load_package(path)
    for m in ROWS:
        x = torch.randn(m, K)
        got, want = run(x), model(x)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(got[0], got[1])

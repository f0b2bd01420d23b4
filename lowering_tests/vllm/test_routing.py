"""``fp4.router`` in place of a gate and of vLLM's router: the same experts, the same weights, the same tokens; and why a layer keeps vLLM's."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from fp4_inductor.errors import ConfigError
from fp4_inductor.integrations.vllm import engine as names
from fp4_inductor.integrations.vllm import log, routing
from fp4_inductor.integrations.vllm.settings import Settings
from lowering_tests.vllm import served
from lowering_tests.vllm.test_compiled import PIECEWISE
from lowering_tests.vllm.test_refusals import parallel

VLLM = {"fp4_inductor": {"router": "vllm"}}
PROMPTS = [list(b"It is a truth universally acknowledged"), list(b"Mr. Darcy"), list(b"She was not")]
H, E, K = 64, 128, 8


@pytest.fixture
def said(monkeypatch):
    """What is logged of routers."""
    lines: list[str] = []
    monkeypatch.setattr(log, "init_logger", lambda name: SimpleNamespace(info=lines.append))
    return lines


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Gates keep their weights, which vLLM packs for its own kernels on a CPU, and its router computes in float32, as its CUDA kernel does."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    def keep(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    rounded = cpu_router._softmax_topk
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep)
    monkeypatch.setattr(cpu_router, "_softmax_topk", lambda scores, k, renormalize: rounded(scores.float(), k, renormalize))


def answers(folder, **options):
    """(answers, why vLLM's router chose in each layer, kinds of gates) of an engine."""
    with served.engine(folder, quantization="fp4_inductor", **options) as llm:
        runners = [m for m in llm.model.modules() if hasattr(m, "routed_experts")]
        return llm.ask(PROMPTS, 12), [r.routed_experts.quant_method.own_router for r in runners], {type(r.gate).__name__ for r in runners}


@pytest.mark.skipif(not served.in_process(), reason="the worker is another process")
def test_tokens_are_those_of_vllms_router(folders, as_on_a_gpu, said):
    """Bit for bit: nothing but gate and router is different."""
    folder = folders("moe-modelopt")
    got, reasons, gates = answers(folder)
    assert (reasons, gates, said) == ([""] * 4, {"_NoGate"}, ["fp4_inductor: fp4.router chooses experts"])
    want, reasons, gates = answers(folder, additional_config=VLLM)
    assert (len({*reasons}), gates) == (1, {"GateLinear"})
    assert said[1:] == ['fp4_inductor: vLLM\'s router chooses experts: additional_config has "router": "vllm"']
    assert got == want


@pytest.mark.parametrize(("name", "rows", "dense"), [("gate", E // 4, True), ("gate", 4 * H, False), ("o_proj", E // 4, False)])
def test_a_router_of_a_dense_checkpoint_is_not_quantized(name, rows, dense):
    """vLLM asks for the method of a layer that has sizes and no weight yet."""
    from fp4_inductor.integrations.vllm.own import OwnConfig

    module = names.ReplicatedLinear.__new__(names.ReplicatedLinear)
    torch.nn.Module.__init__(module)
    module.input_size, module.output_size = H, rows
    assert OwnConfig()._stays_dense(module, f"model.layers.0.mlp.{name}", Settings()) is dense


@pytest.mark.slow
@pytest.mark.skipif(not served.in_process(), reason="the worker is another process")
def test_compiled(folders, as_on_a_gpu):
    """On a CPU vLLM traces through the router."""
    folder = folders("moe-modelopt")
    got, reasons, _ = answers(folder, **PIECEWISE)
    assert reasons == [""] * 4
    served.assert_same(got, answers(folder)[0], 0.4)  # as test_models.test_bfloat16_within_ties


def routed(kind, name: str, **options):
    """A layer whose experts :func:`choose_experts` chooses, as its runner sees it, and its gate's product."""
    torch.manual_seed(0)
    module = importlib.import_module(names.names()[name])
    router = getattr(module, name)(top_k=K, global_num_experts=E, **options)
    gate = SimpleNamespace(weight=torch.randn(E, H).to(kind), bias=torch.randn(E).to(kind), skip_bias_add=False)
    runner = SimpleNamespace(gate=gate, router=router)
    form = routing.form_of(router)
    names.choose_experts(runner, lambda x, weight, bias: torch.ops.fp4.router(x, weight, bias, K, form, torch.float32))
    return runner, lambda x: torch.nn.functional.linear(x, gate.weight, gate.bias)


def choose(router, x: torch.Tensor, scores: torch.Tensor):
    weights, ids = router.select_experts(x, scores)
    ids, order = ids.long().sort()
    return weights.gather(1, order), ids


@pytest.mark.skipif(not served.in_process(), reason="vLLM 0.22 chooses experts by a CUDA kernel alone")
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_choice_is_that_of_vllms_router(kind, renormalize):
    """Ids are equal and weights to float32's rounding, of scores that the gate rounds to the tokens' dtype."""
    runner, product = routed(kind, "CPURouter", renormalize=renormalize)
    x = torch.randn(33, H).to(kind)
    tokens, _ = runner.gate(x)
    weights, ids = choose(runner.router, x, tokens)
    del runner.router._compute_routing  # the class has vLLM's
    scores = product(x).float()
    scores -= torch.arange(E) * 1e-5  # equal scores: the lower index
    want_weights, want_ids = choose(runner.router, x, scores)
    assert torch.equal(ids, want_ids)
    assert torch.allclose(weights, want_weights, rtol=3e-3)
    exact = product(x).float().softmax(-1).gather(1, ids)
    assert torch.allclose(weights, exact / exact.sum(-1, keepdim=True) if renormalize else exact, rtol=1e-5)


def test_what_vllm_does_behind_the_choice(monkeypatch):
    """Ids are recorded, and tokens that only fill a CUDA graph up have no experts."""
    runner, _ = routed(torch.bfloat16, "FusedTopKRouter")
    recorded: list[torch.Tensor] = []
    runner.router.set_capture_fn(recorded.append)
    x = torch.randn(4, H).to(torch.bfloat16)
    _, ids = runner.router.select_experts(x, x)
    assert recorded[0] is ids and bool((ids >= 0).all())
    if "_get_padding_mask" in names.names():
        module = importlib.import_module(names.names()["_get_padding_mask"])
        monkeypatch.setattr(module, "_get_padding_mask", lambda tokens: torch.arange(4)[:tokens] >= 3)
        masked, _ = routed(torch.bfloat16, "FusedTopKRouter")
        _, fewer = masked.router.select_experts(x, x)
        assert torch.equal(fewer[:3], ids[:3]) and bool((fewer[3] == -1).all())


def layer(**changes):
    """(runner, FusedMoEConfig) of a layer that :func:`routing.why_not` has nothing against, but for ``changes``: ``gate__bias`` is the gate's attribute."""
    made = [kind.__new__(kind) for kind in (names.MoERunner, names.ReplicatedLinear)]
    for module in made:
        torch.nn.Module.__init__(module)
    runner, gate = made
    gate.weight, gate.bias, gate.skip_bias_add, gate.cpu_linear = torch.zeros(E, H, dtype=torch.bfloat16), None, False, print
    gate.quant_method = names.UnquantizedLinearMethod()
    runner.gate, runner.shared_expert_gate, runner.routed_input_transform = gate, None, None
    runner.router = router = names.FusedTopKRouter(top_k=K, global_num_experts=E)
    ranks = parallel(dp_size=1, pcp_size=1, is_sequence_parallel=False)
    moe = SimpleNamespace(moe_parallel_config=ranks, hidden_dim=H, in_dtype=torch.bfloat16)
    parts = {"gate": gate, "runner": runner, "router": router, "ranks": ranks, "moe": moe}
    for path, value in changes.items():
        part, _, field = path.partition("__")
        setattr(parts[part], field, value)
    return runner, moe


def kind_of_router(name: str, **options):
    """A router that says it is of that class of vLLM's."""
    return type(name, (SimpleNamespace,), {})(**{"scoring_func": "softmax", "eplb_state": None, "top_k": K, "global_num_experts": E} | options)


CPU = {"use_grouped_topk": False, "custom_routing_function": None, "e_score_correction_bias": None, "_hash_indices_table": None, "routed_scaling_factor": 1.0}
REFUSED = [
    ({"runner__gate": None}, "outside of the layer"),
    ({"runner__router": kind_of_router("GroupedTopKRouter")}, "in groups"),
    ({"runner__router": kind_of_router("FusedTopKBiasRouter")}, "correction bias"),
    ({"runner__router": kind_of_router("CustomRoutingRouter")}, "routing function of its own"),
    ({"runner__router": kind_of_router("ZeroExpertRouter")}, "zero experts"),
    ({"runner__router": kind_of_router("RoutingSimulatorRouter")}, "SIMULATION"),
    ({"runner__router": kind_of_router("Another")}, "the router is a Another"),
    ({"runner__router": kind_of_router("CPURouter", **CPU | {"use_grouped_topk": True})}, "in groups"),
    ({"runner__router": kind_of_router("CPURouter", **CPU | {"custom_routing_function": print})}, "of its own"),
    ({"runner__router": kind_of_router("CPURouter", **CPU | {"e_score_correction_bias": torch.ones(E)})}, "correction bias"),
    ({"runner__router": kind_of_router("CPURouter", **CPU | {"_hash_indices_table": torch.ones(E)})}, "table"),
    ({"runner__router": kind_of_router("CPURouter", **CPU | {"routed_scaling_factor": 2.5})}, "scales its weights"),
    ({"router__scoring_func": "sigmoid"}, "sigmoid"),
    ({"router__eplb_state": object()}, "balanced"),
    ({"ranks__dp_size": 2}, "exchange tokens"),
    ({"ranks__pcp_size": 2}, "exchange tokens"),
    ({"ranks__is_sequence_parallel": True}, "exchange tokens"),
    ({"runner__shared_expert_gate": torch.nn.Linear(H, 1)}, "gate of the shared experts"),
    ({"runner__routed_input_transform": torch.nn.Linear(H, H)}, "input is transformed"),
    ({"runner__gate": torch.nn.Linear(H, E)}, "the gate is a Linear"),
    ({"gate__quant_method": object()}, "quantized"),
    ({"gate__out_dtype": torch.float32}, "torch.float32"),
    ({"gate__weight": torch.zeros(E, H)}, "fp4.router: weight"),
    ({"moe__in_dtype": torch.float32}, "fp4.router: x"),
    ({"moe__hidden_dim": 2 * H}, "fp4.router: tokens"),
    ({"router__top_k": 33}, "fp4.router: k"),
    ({"router__global_num_experts": 96}, "128 scores for 96 experts"),
    ({"gate__weight": torch.zeros(0, dtype=torch.bfloat16)}, "packs the gate's weight"),
]


@pytest.mark.parametrize(("changes", "part"), REFUSED, ids=[f"{next(iter(c))}-{part}" for c, part in REFUSED])
def test_a_layer_that_keeps_vllms_router_says_why(changes, part):
    assert part in routing.why_not(*layer(**changes), Settings())


def test_plain_layers_are_taken(monkeypatch):
    plain = layer()
    assert routing.why_not(*plain, Settings()) == ""
    assert routing.why_not(*layer(runner__router=kind_of_router("CPURouter", renormalize=True, **CPU)), Settings()) == ""
    assert routing.why_not(*layer(gate__bias=torch.zeros(E, dtype=torch.bfloat16)), Settings()) == ""
    assert '"vllm"' in routing.why_not(*plain, Settings(router="vllm"))
    plain[0].__class__ = type("OfAModel", (names.MoERunner,), {})
    assert "OfAModel" in routing.why_not(*plain, Settings())
    monkeypatch.setattr(importlib.import_module("vllm.envs"), "VLLM_BATCH_INVARIANT", True, raising=False)
    assert "BATCH_INVARIANT" in routing.why_not(*layer(), Settings())


def test_a_router_that_does_not_exist():
    with pytest.raises(ConfigError, match="router"):
        Settings(router="other")

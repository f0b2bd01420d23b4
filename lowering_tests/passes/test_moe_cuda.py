"""The forms a CUDA graph has: integer histogram, decomposed bmm under coordinate_descent_tuning, torch's or Transformers' grouped product."""

from __future__ import annotations

import pytest
import torch
from conftest import Recorder
from torch import nn

from fp4_inductor import passes
from fp4_inductor.passes.missed import listen
from lowering_tests.fake_cuda import call, code_generation

transformers = pytest.importorskip("transformers")
E, H, INNER, K = 8, 128, 64, 2


def experts(family, implementation, dtype):
    """The family's experts module on fake CUDA tensors, its weights packed."""
    if family == "gpt_oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts

        config = transformers.GptOssConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=E, num_experts_per_tok=K)
    else:
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts as Experts

        config = transformers.MixtralConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=E, num_experts_per_tok=K)
    config._experts_implementation = implementation
    with torch.device("cuda"):
        module = Experts(config).requires_grad_(False)
    for name, p in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=dtype, device="cuda"), requires_grad=False))
    dense = {}
    for name, (n, k) in {"gate_up_proj": (2 * INNER, H), "down_proj": (H, INNER)}.items():
        for part, shape, kind in (("q", (E, n, k // 2), torch.uint8), ("s", (E, n, k // 16), torch.float8_e4m3fn), ("g", (E,), torch.float32)):
            module.register_buffer(f"{name}_{part}", torch.empty(shape, dtype=kind, device="cuda"))
        delattr(module, name)
        dense[name] = property(lambda self, name=name: _dense(self, name, dtype))
    # torch.compile cannot index a fake subclass tensor of a device this torch is built without
    module.__class__ = type(Experts.__name__, (Experts,), dense)
    return module


def _dense(module, name, dtype):
    w = torch.ops.fp4.dequantize(*(getattr(module, f"{name}_{part}") for part in "qsg"), dtype)
    return w.mT if module.is_transposed else w


@pytest.fixture
def indexing(monkeypatch):
    """``x[ids]``, ``x[..., ::2]`` and ``x[ids] = y`` as operators: torch's own entry asks for a CUDA device that is not there."""
    get, set_ = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def read(x, index):
        if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice) and index[1].step:
            return torch.ops.aten.slice.Tensor(x, -1, index[1].start, index[1].stop, index[1].step)
        return torch.ops.aten.index.Tensor(x, [index]) if isinstance(index, torch.Tensor) else get(x, index)

    def write(x, index, value):
        return torch.ops.aten.index_put_(x, [index], value) if isinstance(index, torch.Tensor) else set_(x, index, value)

    monkeypatch.setattr(torch.Tensor, "__getitem__", read)
    monkeypatch.setattr(torch.Tensor, "__setitem__", write)


@pytest.mark.parametrize(("tokens", "decomposed"), [(1, True), (64, False)])
@pytest.mark.parametrize(("implementation", "dtype"), [("batched_mm", torch.bfloat16), ("grouped_mm", torch.bfloat16), ("grouped_mm", torch.float16)])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_cuda_forms(indexing, family, implementation, dtype, tokens, decomposed):
    recorder = Recorder()
    passes.reset_matches()
    # constant folding would execute Transformers' torch.empty on the device
    options = {"post_grad_custom_post_pass": recorder, "coordinate_descent_tuning": decomposed, "joint_graph_constant_folding": False}
    with code_generation(config=options), listen() as missed:
        module = experts(family, implementation, dtype)
        x = torch.empty(tokens, H, dtype=dtype, device="cuda")
        ids = torch.empty(tokens, K, dtype=torch.int64, device="cuda")
        weights = torch.empty(tokens, K, dtype=dtype, device="cuda")
        if tokens > 1 and implementation == "batched_mm":  # the other's clamp_ of a symbolic size asks for the device
            for t in (x, ids, weights):
                torch._dynamo.mark_dynamic(t, 0)
        call(torch.compile(module, fullgraph=True), x, ids, weights)
    assert passes.matches() == {f"moe_{implementation}": 1}
    assert not missed and "fp4.dequantize" not in recorder.texts[-1]

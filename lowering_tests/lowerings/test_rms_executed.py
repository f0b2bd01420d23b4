"""A step of several sequences whose graph is that of a GPU, with RMSNorms as halves of products, run on a CPU: the CUDA kernels are emulated."""

from __future__ import annotations

import pytest
import torch

import fp4_inductor
from fp4_inductor import NVFP4Config, dispatch
from fp4_inductor.kernels import build
from fp4_inductor.lowerings.journal import listen
from lowering_tests import norm_kernels
from lowering_tests.kernels import emulator
from lowering_tests.kernels.test_binding import ops  # noqa: F401
from lowering_tests.lowerings.of_a_gpu import linear_layers_of_a_gpu
from lowering_tests.models.conftest import BASE

pytestmark = pytest.mark.skipif(emulator.compiler() is None or build.cxx() is None, reason="no C++ compiler")
BF16 = torch.bfloat16
HALVES = ("linear_residual_squares", "rms_scaled_linear", "rms_scaled_linear_glu")


def test_a_step_of_five_sequences(ops):  # noqa: F811
    import transformers

    torch.manual_seed(0)
    fields = BASE | dict(num_hidden_layers=2, hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**fields), dtype=BF16).eval()
    for norm in (module for name, module in model.named_modules() if name.endswith("layernorm")):
        norm.weight.data.uniform_(0.2, 3)
    model = fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    ids = torch.randint(3, 128, (5, 1))

    def step(ids):
        return model(input_ids=ids, use_cache=False).logits

    torch._dynamo.reset()
    options = {"force_disable_caches": True}
    with (
        linear_layers_of_a_gpu(*HALVES),
        dispatch(candidates=norm_kernels.switched_on()),
        listen() as entries,
        torch._inductor.config.patch(options),
        torch.no_grad(),
    ):
        got, want = torch.compile(step, fullgraph=True)(ids), step(ids)
    served = [e.decision.row.kernel for e in entries]
    # The norm of the embedding is a kernel of its own, and so is the last one: what reads it is no linear layer of ours.
    first, second = (
        ["cuda_table", "cuda_table_squares", "cuda_table_glu_rms", "cuda_table_squares"],
        ["cuda_table_rms", "cuda_table_squares", "cuda_table_glu_rms"],
    )
    assert served == [*first, *second, served[-1]] and served[-1] in ("cuda_table", "cuda_table_pointwise")
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 3e-2

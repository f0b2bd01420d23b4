"""The evaluator against eager PyTorch, at every position, on chains of everything it claims to understand."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import fp4_inductor  # noqa: F401
from fp4_inductor.passes.pointwise import Evaluator, NotPointwise

TABLE = torch.randn(300)


class Stored:
    """A leaf backed by a real tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __call__(self, at):
        return self.tensor[at] if at else self.tensor

    def restricted(self, rows):
        return self


CHAINS = {
    "permute, reshape": lambda x: x.permute(2, 0, 1).reshape(-1, 6),
    "transpose, flatten": lambda x: x.transpose(0, -1).flatten(),
    "slices and a select": lambda x: x[1:, :, 2:13:3].select(1, -2),
    "negative slice": lambda x: x[:-1, -3:, 1:-2],
    "unsqueeze, expand, flatten": lambda x: x.unsqueeze(-1).expand(4, 6, 16, 5).flatten(1, 2),
    "squeeze": lambda x: x[:1].squeeze(0).t(),
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1),
    "stack": lambda x: torch.stack([x + 1, x * 2], dim=1).flatten(0, 1),
    "cat of unequal parts": lambda x: torch.cat([x[:, :4], x, x[:, 5:] * 3], dim=1),
    "broadcast": lambda x: x * x[:, :1] + x[:1, :, :1] - x.flatten()[0],
    "type promotion": lambda x: x.to(torch.bfloat16) * x.to(torch.bfloat16)[:, :, :1].float() + x.flatten()[3].double(),
    "bit pattern": lambda x: ((x.view(torch.int32) & 0x7FFFFFFF) ^ 3).view(torch.float32),
    "table": lambda x: TABLE[(x * 40).to(torch.int64).clamp(-150, 149)],
    "table of rows": lambda x: TABLE.view(60, 5)[(x.abs() * 20).to(torch.int64).clamp(0, 59)].flatten(-2),
    "embedding": lambda x: torch.nn.functional.embedding((x.abs() * 20).to(torch.int64).clamp(0, 59), TABLE.view(60, 5)),
    "where": lambda x: torch.where(x > 0, x, -0.5),
    "masked write": lambda x: torch.index_put(x, [x > 0.3], torch.tensor(7.0)),
    "shifts": lambda x: ((x * 100).to(torch.int32) >> 2) << 1,
    "a gather from the leaf": lambda x: x.flatten()[(x.abs() * 3).to(torch.int64).clamp(0, 5)],
    "moved to a device": lambda x: torch.ops.prims.device_put.default(x, torch.device("cpu")) + 1,
    "fp8": lambda x: x.to(torch.float8_e4m3fn).float() / 3,
}


def evaluate(fn, x):
    module = make_fx(fn, select_decomp_table(), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    graph = module.graph
    (leaf,) = graph.find_nodes(op="placeholder")
    (root,) = next(iter(reversed(graph.nodes))).all_input_nodes
    shape = root.meta["val"].shape
    at = tuple(p.flatten() for p in torch.meshgrid(*(torch.arange(s) for s in shape), indexing="ij"))
    return Evaluator({leaf: Stored(x)})(root, at).expand(shape.numel()).reshape(shape)


@pytest.mark.parametrize("chain", CHAINS)
def test_equals_eager(chain):
    x = torch.randn(4, 6, 16)
    got, want = evaluate(CHAINS[chain], x), CHAINS[chain](x)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


NOT_UNDERSTOOD = {
    "a reduction": lambda x: x - x.mean(),
    "a sort": lambda x: x.sort(-1).values,
    "a product": lambda x: x @ x.mT,
    "random numbers": lambda x: x + torch.rand_like(x),
    "positions as values": lambda x: x * torch.arange(16),
    "a cumulative sum": lambda x: x.cumsum(1),
    "another element size": lambda x: x.view(torch.bfloat16),
    "a part too small to judge": lambda x: torch.cat([x, x[:, :1, :1].expand(4, 1, 16)], dim=1)[:, 5:, :3],
}


@pytest.mark.parametrize("chain", NOT_UNDERSTOOD)
def test_refuses(chain):
    with pytest.raises(NotPointwise):
        evaluate(NOT_UNDERSTOOD[chain], torch.randn(4, 6, 16))

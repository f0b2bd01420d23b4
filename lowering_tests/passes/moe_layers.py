"""Mixture-of-experts layers as people write them, on NVFP4 experts kept as buffers; and layers that only look like one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor.formats import nvfp4, sparse24

fp4 = torch.ops.fp4
T, K, E, H, I = 7, 2, 6, 64, 32  # noqa: E741


class Layer(nn.Module):
    """Experts, their biases and a router; ``body(self, x)`` is the layer. ``sparse``: the names of the 2:4-sparse weights."""

    def __init__(self, body, dtype=torch.float32, gated=True, sparse=()):
        super().__init__()
        rows = 2 * I if gated else I
        self.parts = {}
        for name, shape in (("gate_up", (E, rows, H)), ("down", (E, H, I))):
            w = torch.randn(shape) / shape[-1] ** 0.5
            self.parts[name] = "vmsg" if name in sparse else "qsg"
            parts = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w)) if name in sparse else nvfp4.quantize(w)
            for part, value in zip(self.parts[name], parts, strict=True):
                self.register_buffer(f"{name}_{part}", value)
        self.register_buffer("router", torch.randn(E, H, dtype=dtype) / 8)
        self.register_buffer("b1", torch.randn(E, rows, dtype=dtype))
        self.register_buffer("b2", torch.randn(E, H, dtype=dtype))
        self.body, self.dtype = body, dtype

    def route(self, x):
        w, ids = torch.topk(F.softmax(x.float() @ self.router.float().t(), -1), K)
        return ids, (w / w.sum(-1, keepdim=True)).to(x.dtype)

    def gate_up(self, ids=None):
        return self._dense("gate_up", ids)

    def down(self, ids=None):
        return self._dense("down", ids)

    def _dense(self, name, ids):
        parts = [getattr(self, f"{name}_{p}") for p in self.parts[name]]
        dequantize = fp4.dequantize if len(parts) == 3 else fp4.sparse_dequantize
        return dequantize(*(p if ids is None else p[ids] for p in parts), self.dtype)

    def linear(self, name, x, e):
        parts = [getattr(self, f"{name}_{p}")[e] for p in self.parts[name]]
        return (fp4.linear if len(parts) == 3 else fp4.sparse_linear)(x, *parts)

    def forward(self, x):
        return self.body(self, x)


def swiglu(z):
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def gathered(act=swiglu, *, bias=False, combine=lambda y, w: (y * w[..., None]).sum(1), shift=0, again=lambda y, z: y, down=None):
    """Weights of the chosen experts, then two einsums; the arguments vary one thing each."""

    def body(m, x):
        ids, w = m.route(x)
        z = torch.einsum("th,tkih->tki", x, m.gate_up()[ids])
        z = z + m.b1[ids] if bias else z
        y = torch.einsum("tki,tkhi->tkh", act(z), (m.down() if down is None else down(m))[(ids + shift) % E if shift else ids])
        y = y + m.b2[ids] if bias else y
        return again(combine(y, w), z)

    return body


def gather_then_dequantize(m, x):
    ids, w = m.route(x)
    z = torch.einsum("th,tkih->tki", x, m.gate_up(ids))
    return torch.einsum("tkh,tk->th", torch.einsum("tki,tkhi->tkh", swiglu(z), m.down(ids)), w)


def one_einsum(m, x):
    ids, w = m.route(x)
    z = torch.einsum("th,tkih->tki", x, m.gate_up()[ids])
    return torch.einsum("tki,tkhi,tk->th", swiglu(z), m.down()[ids], w)


def matmuls(m, x):
    ids, w = m.route(x)
    z = (x[:, None, None, :] @ m.gate_up()[ids].mT).squeeze(2)
    return ((swiglu(z)[:, :, None] @ m.down()[ids].mT).squeeze(2) * w[..., None]).sum(1)


def batch_and_sequence(m, x):
    x = x.view(1, -1, H)
    ids, w = m.route(x)
    z = torch.einsum("bth,btkih->btki", x, m.gate_up()[ids])
    return (torch.einsum("btki,btkhi->btkh", swiglu(z), m.down()[ids]) * w[..., None]).sum(2)


def slots_first(m, x):
    ids, w = m.route(x)
    s = ids.t().flatten()
    z = torch.bmm(x.repeat(K, 1)[:, None], m.gate_up()[s].mT)[:, 0]
    y = torch.bmm(swiglu(z)[:, None], m.down()[s].mT)[:, 0]
    return (y.view(K, -1, H) * w.t()[..., None]).sum(0)


def index_select(m, x):
    ids, w = m.route(x)
    s = ids.flatten()
    z = torch.bmm(x.repeat_interleave(K, 0)[:, None], m.gate_up().index_select(0, s).mT)[:, 0]
    y = torch.bmm(swiglu(z)[:, None], m.down().index_select(0, s).mT)[:, 0]
    return (y.view(-1, K, H) * w[..., None]).sum(1)


def top_1(m, x):
    w, ids = F.softmax(x.float() @ m.router.float().t(), -1).max(-1)
    z = torch.bmm(m.gate_up()[ids], x[..., None]).squeeze(-1)
    return torch.bmm(m.down()[ids], swiglu(z)[..., None]).squeeze(-1) * w[:, None].to(x.dtype)


def weight_on_input(m, x):
    ids, w = m.route(x)
    z = torch.einsum("tkh,tkih->tki", x[:, None] * w[..., None], m.gate_up()[ids])
    return torch.einsum("tki,tkhi->tkh", swiglu(z), m.down()[ids]).sum(1)


def weight_between(m, x):
    ids, w = m.route(x)
    z = torch.einsum("th,tkih->tki", x, m.gate_up()[ids])
    return torch.einsum("tki,tkhi->tkh", swiglu(z) * w[..., None], m.down()[ids]).sum(1)


def sorted_rows(m, x):
    ids, w = m.route(x)
    flat = ids.view(-1)
    perm = torch.argsort(flat)
    token, expert = perm // K, flat[perm]
    z = torch.bmm(m.gate_up()[expert], x[token][..., None]).squeeze(-1)
    y = torch.bmm(m.down()[expert], swiglu(z)[..., None]).squeeze(-1)
    return torch.zeros_like(x).index_add(0, token, y * w.view(-1)[perm][:, None])


def added_rows(m, x):
    ids, w = m.route(x)
    token, expert = torch.arange(x.shape[0]).repeat_interleave(K), ids.view(-1)
    z = torch.bmm(m.gate_up()[expert], x[token][..., None]).squeeze(-1)
    y = torch.bmm(m.down()[expert], swiglu(z)[..., None]).squeeze(-1)
    return torch.zeros_like(x).index_add(0, token, y * w.view(-1)[:, None])


def unsorted_by_argsort(m, x):
    ids, w = m.route(x)
    expert, perm = ids.view(-1).sort(stable=True)
    z = torch.bmm(m.gate_up()[expert], x[perm // K][..., None]).squeeze(-1)
    y = torch.bmm(m.down()[expert], swiglu(z)[..., None]).squeeze(-1)
    return (y[perm.argsort()].view(-1, K, H) * w[..., None]).sum(1)


def grouped(counts):
    """torch's grouped_mm on sorted rows; ``counts(ids, sorted)`` gives the number of rows of each expert."""

    def body(m, x):
        ids, w = m.route(x)
        expert, perm = ids.view(-1).sort()
        offsets = counts(ids.view(-1), expert).cumsum(0).to(torch.int32)
        z = torch._grouped_mm(x[perm // K], m.gate_up().mT, offs=offsets)
        y = torch._grouped_mm(swiglu(z), m.down().mT, offs=offsets)
        out = torch.zeros_like(y).index_copy(0, perm, y)
        return (out.view(-1, K, H) * w[..., None]).sum(1)

    return body


def one_hot(m, x):
    ids, w = m.route(x)
    combine = (F.one_hot(ids, E).to(w.dtype) * w[..., None]).sum(1)
    z = torch.einsum("th,eih->tei", x, m.gate_up())
    return torch.einsum("teh,te->th", torch.einsum("tei,ehi->teh", swiglu(z), m.down()), combine)


def one_hot_experts_first(m, x):
    ids, w = m.route(x)
    combine = torch.einsum("tke,tk->te", F.one_hot(ids, E).to(w.dtype), w)
    z = torch.einsum("th,eih->eti", x, m.gate_up())
    return torch.einsum("eth,te->th", torch.einsum("eti,ehi->eth", swiglu(z), m.down()), combine)


def scattered(m, x):
    """The training path of gpt-oss before Transformers had experts implementations."""
    ids, w = m.route(x)
    combine = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, w)
    z = torch.bmm(x.repeat(E, 1).view(E, -1, H), m.gate_up().mT) + m.b1[:, None]
    y = torch.bmm(swiglu(z), m.down().mT) + m.b2[:, None]
    return (y * combine.t()[..., None]).sum(0)


def loop_over_slots(m, x):
    ids, w = m.route(x)
    out = 0
    for j in range(K):
        z = torch.bmm(m.gate_up()[ids[:, j]], x[..., None]).squeeze(-1)
        out = out + torch.bmm(m.down()[ids[:, j]], swiglu(z)[..., None]).squeeze(-1) * w[:, j, None]
    return out


def loop_over_experts(m, x, order=range(E), weight=lambda ids, w, e: torch.where(ids == e, w, 0).sum(-1, keepdim=True)):
    ids, w = m.route(x)
    out = torch.zeros_like(x)
    gate_up, down = m.gate_up(), m.down()
    for e in order:
        out = out + swiglu(x @ gate_up[e].t()) @ down[e].t() * weight(ids, w, e)
    return out


def loop_over_packed_experts(m, x):
    ids, w = m.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        out += m.linear("down", swiglu(m.linear("gate_up", x, e)), e) * ((ids == e) * w).sum(-1, keepdim=True)
    return out


def input_of_each_slot(m, x):
    ids, w = m.route(x)
    z = torch.einsum("tkh,tkih->tki", x[:, None] + w[..., None], m.gate_up()[ids])
    return (torch.einsum("tki,tkhi->tkh", swiglu(z), m.down()[ids]) * w[..., None]).sum(1)


def weights_on_both_sides(m, x):
    ids, w = m.route(x)
    z = torch.einsum("tkh,tkih->tki", x[:, None] * w[..., None], m.gate_up()[ids])
    return (torch.einsum("tki,tkhi->tkh", swiglu(z), m.down()[ids]) * w[..., None]).sum(1)


def loop_with_where(m, x):
    """How Transformers' models ran before they had experts implementations: the rows of each expert, added up in place."""
    ids, w = m.route(x)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, E).permute(2, 1, 0)
    gate_up, down = m.gate_up(), m.down()
    for e in range(E):
        slot, token = torch.where(mask[e])
        y = swiglu(x[token] @ gate_up[e].t()) @ down[e].t()
        out.index_add_(0, token, y * w[token, slot, None])
    return out


def batched_mm(m, x, low=0, high=E - 1):
    """Transformers' batched_mm; 5.17 clamps the ids, 5.23 does not."""
    ids, w = m.route(x)
    s = ids.reshape(-1)
    s = s if low is None else s.clamp(low, high)
    rows = x.repeat_interleave(K, dim=0)
    z = torch.bmm(m.gate_up()[s], rows.unsqueeze(-1)).squeeze(-1)
    y = torch.bmm(m.down()[s], swiglu(z).unsqueeze(-1)).squeeze(-1)
    return (y * w.reshape(-1).unsqueeze(-1)).view(x.shape[0], K, H).sum(dim=1)


def grouped_mm(m, x, masked=True):
    """Transformers' grouped_mm; 5.17 masks rows whose id is no expert, 5.23 does not."""
    ids, w = m.route(x)
    expert, perm = torch.sort(ids.reshape(-1))
    rows = x[perm // K]
    offsets = torch.cumsum(torch.histc(expert.float(), bins=E, min=0, max=E - 1), dim=0, dtype=torch.int32)
    mask = (expert >= E).unsqueeze(-1)
    rows = rows.masked_fill(mask, 0.0) if masked else rows
    z = torch._grouped_mm(rows, m.gate_up().transpose(-2, -1), offs=offsets)
    z = z.masked_fill(mask, 0.0) if masked else z
    y = torch._grouped_mm(swiglu(z), m.down().transpose(-2, -1), offs=offsets)
    y = y.masked_fill(mask, 0.0) if masked else y
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.size(0))
    return (y * w.reshape(-1)[perm].unsqueeze(-1))[inverse].view(x.shape[0], K, H).sum(dim=1)


def clamped_and_masked(m, x):
    """The ids are clamped for the gather; pairs beyond a limit of their own are left out."""
    ids, w = m.route(x)
    ids = ids + 1
    s = ids.clamp(0, E - 1)
    z = torch.einsum("th,tkih->tki", x, m.gate_up()[s])
    y = torch.einsum("tki,tkhi->tkh", swiglu(z), m.down()[s])
    return (torch.where((ids >= E)[..., None], 0.0, y) * w[..., None]).sum(1)


def counted_from_the_end(m, x):
    """An index may be negative; an id of fp4.moe may not."""
    ids, w = m.route(x)
    ids = torch.where(w > 0.55, ids - E, ids)
    z = torch.einsum("th,tkih->tki", x, m.gate_up()[ids])
    return (torch.einsum("tki,tkhi->tkh", swiglu(z), m.down()[ids]) * w[..., None]).sum(1)


def masked_by_weight(m, x):
    """Any condition on a pair, not only on its id."""
    ids, w = m.route(x)
    z = torch.einsum("th,tkih->tki", x, m.gate_up()[ids])
    y = torch.einsum("tki,tkhi->tkh", swiglu(z), m.down()[ids])
    return (torch.where((w > 0.55)[..., None], y, 0.0) * w[..., None]).sum(1)


# name -> (body, the counter that goes up)
FORMS = {
    "dequantize, then gather": (gathered(), "moe_batched_mm"),
    "gather, then dequantize": (gather_then_dequantize, "moe_batched_mm"),
    "one einsum for down and weights": (one_einsum, "moe_batched_mm"),
    "matmul, broadcast": (matmuls, "moe_batched_mm"),
    "biases": (gathered(bias=True), "moe_batched_mm"),
    "scaled by a constant": (gathered(combine=lambda y, w: (y * (2.5 * w)[..., None]).sum(1)), "moe_batched_mm"),
    "batch and sequence": (batch_and_sequence, "moe_batched_mm"),
    "slots first": (slots_first, "moe_batched_mm"),
    "index_select": (index_select, "moe_batched_mm"),
    "top 1": (top_1, "moe_batched_mm"),
    "weight on the input": (weight_on_input, "moe_batched_mm"),
    # every pair has its own input: T * k tokens with one expert each
    "input of each slot": (input_of_each_slot, "moe_batched_mm"),
    "weights on input and output": (weights_on_both_sides, "moe_batched_mm"),
    "one weight for all slots": (gathered(combine=lambda y, w: torch.einsum("tkh,tj->th", y, w)), "moe_batched_mm"),
    "weight between the products": (weight_between, "moe_batched_mm"),
    "sorted, index_add": (sorted_rows, "moe_batched_mm"),
    "index_add": (added_rows, "moe_batched_mm"),
    "sorted, argsort of argsort": (unsorted_by_argsort, "moe_batched_mm"),
    "one-hot": (one_hot, "moe_one_hot"),
    "one-hot, experts first": (one_hot_experts_first, "moe_one_hot"),
    "scattered weights, biases": (scattered, "moe_one_hot"),
    "loop over slots": (loop_over_slots, "moe_loop"),
    "loop over experts": (loop_over_experts, "moe_loop"),
    "loop over packed experts": (loop_over_packed_experts, "moe_loop"),
    "loop over experts, where and index_add": (loop_with_where, "moe_loop"),
    "batched_mm": (lambda m, x: batched_mm(m, x, None), "moe_batched_mm"),
    "batched_mm, clamped": (batched_mm, "moe_batched_mm"),
    "clamped and masked": (clamped_and_masked, "moe_batched_mm"),
    "ids counted from the end": (counted_from_the_end, "moe_batched_mm"),
    "masked by weight": (masked_by_weight, "moe_batched_mm"),
    "grouped_mm": (lambda m, x: grouped_mm(m, x, False), "moe_grouped_mm"),
    "grouped_mm, masked": (grouped_mm, "moe_grouped_mm"),
    "grouped_mm, bincount": (grouped(lambda ids, s: torch.bincount(ids, minlength=E)), "moe_grouped_mm"),
    "grouped_mm, counted by comparison": (grouped(lambda ids, s: (ids[:, None] == torch.arange(E)).sum(0)), "moe_grouped_mm"),
}


def _second_half(m, x):
    """Like "gather", but up and gate of another expert."""
    ids, w = m.route(x)
    gate = torch.einsum("th,tkih->tki", x, m.gate_up()[ids][:, :, :I])
    up = torch.einsum("th,tkih->tki", x, m.gate_up()[ids.flip(1)][:, :, I:])
    return (torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, m.down()[ids]) * w[..., None]).sum(1)


def _unsorted_offsets(m, x):
    """grouped_mm whose rows are not in the order the offsets are for."""
    ids, w = m.route(x)
    offsets = torch.histc(ids.view(-1).float(), E, 0, E - 1).cumsum(0).to(torch.int32)
    z = torch._grouped_mm(x.repeat_interleave(K, 0), m.gate_up().mT, offs=offsets)
    y = torch._grouped_mm(swiglu(z), m.down().mT, offs=offsets)
    return (y.view(-1, K, H) * w[..., None]).sum(1)


def _rotated(m):
    return m.down().roll(1, 0)


def _weight_before_bias(m, x):
    ids, w = m.route(x)
    z = torch.einsum("th,tkih->tki", x, m.gate_up()[ids])
    return (torch.einsum("tki,tkhi->tkh", swiglu(z), m.down()[ids]) * w[..., None] + m.b2[ids]).sum(1)


def _bias_of_another_expert(m, x):
    ids, w = m.route(x)
    z = torch.einsum("th,tkih->tki", x, m.gate_up()[ids]) + m.b1[ids.flip(1)]
    return (torch.einsum("tki,tkhi->tkh", swiglu(z), m.down()[ids]) * w[..., None]).sum(1)


def _masked_inside(m, x):
    ids, w = m.route(x)
    z = torch.einsum("th,tkih->tki", x, m.gate_up()[ids]) + m.b1[ids]
    z = torch.where((ids >= E - 1)[..., None], 0.0, z)
    return ((torch.einsum("tki,tkhi->tkh", swiglu(z), m.down()[ids]) + m.b2[ids]) * w[..., None]).sum(1)


def _scattered_twice(m, x):
    """``scatter`` of ids that may repeat keeps one of the weights, not their sum."""
    ids, w = m.route(x)
    combine = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids // 2, w)
    z = torch.bmm(x.repeat(E, 1).view(E, -1, H), m.gate_up().mT)
    return (torch.bmm(swiglu(z), m.down().mT) * combine.t()[..., None]).sum(0)


def _all_experts(m, x):
    """A dense mixture: every expert counts."""
    z = torch.einsum("th,eih->tei", x, m.gate_up())
    return torch.einsum("teh,te->th", torch.einsum("tei,ehi->teh", swiglu(z), m.down()), F.softmax(x @ m.router.t(), -1))


def _contracted_over_rows(m, x):
    ids, w = m.route(x)
    z = torch.einsum("th,tkhi->tki", x, m.gate_up()[ids])  # 2 * I == H: the shapes fit either way
    return (torch.einsum("tki,tkhi->tkh", F.silu(z[..., :I]) * z[..., I:], m.down()[ids]) * w[..., None]).sum(1)


def _of_the_next(ids, w, e):
    return torch.where(ids == (e + 1) % E, w, 0).sum(-1, keepdim=True)


def _growing(ids, w, e):
    return torch.where(ids == e, w * (e + 1), 0).sum(-1, keepdim=True)


# name -> (body, part of the reason). Each is a legal layer of its own, and none is fp4.moe's.
NOT_A_LAYER = {
    "down takes the next expert": (gathered(shift=1), "the two products take different experts"),
    "down's experts rotated": (gathered(down=_rotated), ""),
    "gate and up of different experts": (_second_half, "the two products take different experts"),
    "weights applied twice": (gathered(combine=lambda y, w: (y * w[..., None] * w[..., None]).sum(1)), "applied twice"),
    "no weights": (gathered(combine=lambda y, w: y.sum(1)), "no router weights"),
    "mean over slots": (gathered(combine=lambda y, w: (y * w[..., None]).mean(1)), "not the tokens of the result"),
    "maximum over slots": (gathered(combine=lambda y, w: (y * w[..., None]).amax(1)), "not the tokens of the result"),
    "used again in between": (gathered(again=lambda y, z: y + z[:, 0]), "is also used by"),
    "grouped, rows not sorted": (_unsorted_offsets, "do not come from sorted ids"),
    "weights before the bias": (_weight_before_bias, ""),
    "bias of another expert": (_bias_of_another_expert, ""),
    "masked between the products only": (_masked_inside, "masked between"),
    "scattered to equal ids": (_scattered_twice, "not known to be those of chosen ids"),
    "a dense mixture": (_all_experts, "not known to be those of chosen ids"),
    "gate_up transposed": (_contracted_over_rows, "not rows of tokens times one expert weight"),
    "loop leaves an expert out": (lambda m, x: loop_over_experts(m, x, range(1, E)), "each of them once"),
    "loop takes an expert twice": (lambda m, x: loop_over_experts(m, x, [0, 0, *range(2, E)]), "each of them once"),
    "loop compares with another id": (lambda m, x: loop_over_experts(m, x, weight=_of_the_next), ""),
    "loop with a weight per expert": (lambda m, x: loop_over_experts(m, x, weight=_growing), ""),
}

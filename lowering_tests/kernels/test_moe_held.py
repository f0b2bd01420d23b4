"""Calls of experts whose weights are held: the results of ``fp4.moe``, its errors, and its choice of a kernel."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fp4_inductor import errors
from fp4_inductor.kernels.moe import cuda, held
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops.moe_call import MoeCall

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def calls(device: str = "cpu") -> list[tuple[str, MoeCall]]:
    torch.manual_seed(0)
    return [(what, MoeCall.of(*args)) for what, args in contract.CONTRACT.inputs(torch.device(device))]


def held_by(call: MoeCall) -> held.HeldExperts:
    return held.HeldExperts(call.gate_up, call.down, call.activation, call.weight_on_input, call.prefill)


def tokens(call: MoeCall) -> tuple:
    return call.hidden, call.expert_ids, call.expert_weights, call.expert_map


@pytest.mark.parametrize("device", DEVICES)
def test_the_bits_of_the_op(device):
    for what, call in calls(device):
        experts = held_by(call)
        for _ in range(2):
            assert torch.equal(experts(*tokens(call)), torch.ops.fp4.moe(*call.flat())), what


class ReachedError(Exception):
    """A kernel is asked for."""


@pytest.fixture
def as_on_a_gpu():
    """Calls go on as on a GPU until they ask for a kernel."""
    with mock.patch.object(cuda.host, "row_for", side_effect=ReachedError) as row_for:
        yield row_for


def test_tokens_that_do_not_fit_are_refused_at_any_call(as_on_a_gpu):
    _, call = calls()[0]
    experts = held_by(call)
    experts.asked = cuda.asked_by(call.gate_up, call.down, call.activation, call.weight_on_input)
    x, ids, weights, _ = tokens(call)
    for _ in range(2):
        with pytest.raises(ReachedError):
            experts(x, ids, weights)
        for bad, error in (
            ((x[:-1], ids, weights), errors.ShapeError), ((x, ids, weights[:-1]), errors.ShapeError), ((x[:, :-16], ids, weights), errors.ShapeError),
            ((x, ids, weights[:, :-1]), errors.ShapeError), ((x, ids.float(), weights), errors.DTypeError), ((x.int(), ids, weights), errors.DTypeError),
        ):  # fmt: skip
            with pytest.raises(error):
                experts(*bad)


def test_a_kernel_is_asked_for_with_what_the_weights_are(as_on_a_gpu):
    for what, call in calls():
        if call.assignments:
            experts = held_by(call)
            experts.asked = cuda.asked_by(call.gate_up, call.down, call.activation, call.weight_on_input)
            with pytest.raises(ReachedError):
                experts(*tokens(call))
            op, hidden, pairs, width, k, prefill, form, counts = as_on_a_gpu.call_args.args
            assert (op == "sparse_moe") == any(w.meta is not None for w in (call.gate_up, call.down)), what
            assert hidden is call.hidden and (pairs, width, k, prefill) == (call.expert_ids.numel(), call.down.n, call.hidden.shape[1], "auto"), what
            assert counts == (call.chosen_from, 2 if call.two_scales else 1) and ("weight_on_input" in form) == call.weight_on_input, what


def test_a_rank_expects_its_share_of_the_assignments(as_on_a_gpu):
    """A kernel that is right for one assignment an expert is not asked for because a rank has half of the experts and sees every token."""
    _, call = calls()[0]
    experts = held_by(call)
    experts.asked = cuda.asked_by(call.gate_up, call.down, call.activation, call.weight_on_input)
    everywhere = torch.cat([torch.arange(call.experts), torch.full((call.experts,), -1)])
    for table, chosen_from in ((None, call.experts), (everywhere, 2 * call.experts), (everywhere[:1], call.experts)):
        with pytest.raises(ReachedError):
            experts(*tokens(call)[:3], table)
        assert as_on_a_gpu.call_args.args[-1].experts == chosen_from
    assert experts.asked.counts.experts == call.experts, "the next call may have no map"


def test_a_call_is_checked_once():
    _, call = calls()[0]
    experts = held_by(call)
    with mock.patch.object(contract, "check", side_effect=contract.check) as check:
        for t in (4, 3, 3, 1):
            experts(call.hidden[:t], call.expert_ids[:t], call.expert_weights[:t])
    here = [args for args in check.call_args_list if args.args[0].gate_up is experts.gate_up]
    assert len(here) - 4 == 1, "the function of the op for a CPU checks each of the four"

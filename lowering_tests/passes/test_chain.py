"""Products of one row that read each other's results, between two attentions over a KVCache, become one fp4.linear_chain.

Graphs on the CPU: the plan of a GPU is pretended (norm_kernels.py), and the op computes its products one by one.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config, _engines, _exchange, dispatch
from fp4_inductor._torch.collectives import all_reduce
from fp4_inductor.explain import Explanation
from fp4_inductor.ops.linear_chain import ARRIVALS, ChainCall, Product
from fp4_inductor.passes import chain, missed, operators
from fp4_inductor.passes.missed import UNCHAINED, listen
from lowering_tests import norm_kernels
from lowering_tests.models.conftest import BASE, build
from lowering_tests.ranks import group_of_one

BF16, fp4 = torch.bfloat16, torch.ops.fp4
K, HEADS, LENGTH, EPS = 64, 4, 16, 1e-5


@torch.library.custom_op("fp4_tests::total", mutates_args=())
def total(part: torch.Tensor, group: str) -> torch.Tensor:
    """As a library names a sum over the ranks of a group; over one rank."""
    return part.clone()


total.register_fake(lambda part, group: torch.empty_like(part))


@pytest.fixture
def chained(compiled):
    """``chained(step, *args, **dispatch)``: compiled for the pretended GPU; what was compiled, and why products were left apart."""

    def run(step, *args, **options):
        with norm_kernels.on_a_cpu(), dispatch(**options), listen() as left:
            c = compiled(step, *args)
        return c, [m.reason for m in left if m.what == UNCHAINED]

    return run


def called(graph: str) -> list[str]:
    """The fp4 ops of a graph in order."""
    return re.findall(r"(?:= |auto_functionalized_v2\()fp4\.(\w+)\.default", graph)


def arrivals_of(graph: str) -> list[tuple[str, str]]:
    """Of each op whose programs meet in arrivals: the value that it is given, and that which it leaves."""
    left = []
    for name, op, bases in re.findall(r"(v\d+) = auto_functionalized_v2\(fp4\.(\w+)\.default.*_all_bases=\[(.*?)\]", graph):
        number = 4 if op == "linear_chain" else 3
        item = re.search(rf"(v\d+) = <built-in function getitem>\({name}, {number}\)", graph)
        left.append((bases.split(", ")[-1], item[1] if item else ""))
    return left


# --- decoders -------------------------------------------------------------------------------------------------------


def decode_steps(model):
    """``steps(call)``: the logits of three steps over a fresh cache."""

    def steps(call):
        cache, token, logits = KVCache(model, 32, 1), torch.tensor([[5]]), []
        with torch.no_grad():
            for _ in range(3):
                logits.append(call(token, cache))
                token = logits[-1][:, -1].argmax(-1)[:, None]
        assert len(cache.counter.arrivals) >= ARRIVALS and not cache.counter.arrivals.any()
        return torch.cat(logits)

    return steps


LAYER = ["cached_attention", "linear_chain"]
FAMILIES = {
    "llama": ["linear_siblings", *LAYER, *LAYER],
    "qwen3": ["linear_siblings", *LAYER, *LAYER],
    "mistral": ["linear_siblings", *LAYER, *LAYER],
    "qwen2": ["linear_siblings", *LAYER, *LAYER],
    "phi3": ["linear", *LAYER, *LAYER],
    # Norms behind attention and behind the MLP stand between the others.
    "gemma3": ["linear_siblings", "cached_attention", "linear", "linear_chain"] * 2,
    # So do experts.
    "mixtral": ["linear_siblings", "cached_attention", "linear", "moe"] * 2,
}


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f in ("mistral", "qwen2") else ()) for f in FAMILIES])  # which are as Llama
def test_decode_steps(chained, family):
    model = fp4_inductor.quantize_model(build(family, BF16), progress=False)

    def step(ids, cache):
        return model(input_ids=ids, past_key_values=cache).logits

    steps = decode_steps(model)
    want, runs = steps(step), []

    def first_compiled(ids, cache):
        if not runs:
            runs.append(chained(step, ids, cache))
            return runs[0][0].result
        return step(ids, cache)

    got = steps(first_compiled)
    (c, left) = runs[0]
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 3e-2
    ops = [name for name in called(c.graph) if name != "linear_head"]
    assert (ops, left) == (FAMILIES[family], [])
    links = arrivals_of(c.graph)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(links)), "each is given what the one before it has left"


def test_layers_that_are_compiled_once(chained):
    """A region ends with its layer, so that the next one's q, k and v are not in its chain. The last layer is no region: it counts besides."""
    import transformers

    fields = BASE | dict(num_hidden_layers=6, intermediate_size=128, head_dim=16)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**fields), dtype=BF16).eval()
    model = fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    cache, ids = KVCache(model, 32, 1), torch.tensor([[5]])
    with torch.no_grad():
        want = model(input_ids=ids, past_key_values=KVCache(model, 32, 1)).logits
    c, left = chained(lambda ids: model(input_ids=ids, past_key_values=cache).logits, ids)
    assert (c.matches["linear_chain"], left) == (2, [])
    assert [graph.count("qdata=[") for graph in c.graphs] == [1, 1] and all(re.search(r"qdata=\[in\d+, in\d+, in\d+\]", graph) for graph in c.graphs)
    assert float((c.result.double() - want.double()).norm() / want.double().norm()) < 3e-2


# --- what is a chain, and what is not -------------------------------------------------------------------------------


def made(size):
    """The parts of a weight ``[N, K]``, with a third number as many global scales; or the weight of a norm."""
    if isinstance(size, int):
        return torch.randn(size).to(BF16)
    q, s, g = fp4.quantize(torch.randn(size[:2]).to(BF16) / size[1] ** 0.5)
    return q, s, g * torch.arange(1, size[2] + 1) if len(size) > 2 else g


def normalized(x, weight):
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def attended(x, arrivals):
    """``x [1, Q, K]`` behind attention to itself and to an empty cache."""
    heads = x.view(1, x.shape[1], HEADS, -1).transpose(1, 2)
    cache = [torch.zeros(1, HEADS, LENGTH, K // HEADS, dtype=x.dtype) for _ in range(2)]
    return fp4.cached_attention(heads, heads, heads, *cache, torch.zeros((), dtype=torch.int64), arrivals=arrivals).flatten(2)


def step_of(then, attend=attended):
    def step(x, arrivals, *parts):
        arrivals = arrivals + 0  # or the graph would have to end with a copy
        return then(attend(x, arrivals), x, *parts)

    return step


@pytest.fixture
def compared(chained):
    """``compared(then, *sizes, ...)``: the ops of the compiled graph and why products were left apart; the results are those of eager code."""

    def run(then, *sizes, rows=1, count=ARRIVALS, attend=attended, **options):
        x, arrivals, parts = torch.randn(1, rows, K).to(BF16), torch.zeros(count, dtype=torch.int32), [made(size) for size in sizes]
        step = step_of(then, attend)
        c, left = chained(step, x, arrivals, *parts, **options)
        want = step(x, arrivals, *parts)
        pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (c.result, want)), strict=True)
        assert all(float((a.double() - b.double()).norm() / b.double().norm()) < 1e-2 for a, b in pairs)
        return c, [name for name in called(c.graph) if name != "cached_attention"], left

    return run


SQUARE = (K, K)


def two(a, x, o, down):
    return fp4.linear(x + fp4.linear(a, *o), *down)


def from_line(graph: str, first: str) -> str:
    """From the line with ``first`` on. A reshape ahead of it is written where it is read, ``x as [1, 64]``, and values are numbered anew: torch 2.13 and
    2.14 reshape at other places."""
    begin = graph.rindex("\n", 0, graph.index(first)) + 1
    ahead, rest = graph[:begin], graph[begin:]
    for name, what, shape in re.findall(r"(v\d+) = aten\.reshape\.default\((\w+), (\[[\d, ]+\])\)", ahead):
        rest = re.sub(rf"\b{name}\b", f"{what} as {shape}", rest)
    numbers = {name: f"v{i}" for i, name in enumerate(dict.fromkeys(re.findall(r"\bv\d+\b", rest)))}
    return re.sub(r"\bv\d+\b", lambda name: numbers[name[0]], rest)


def test_the_graph(compared):
    def then(a, x, o, gate_up, down, last, *norms):
        h = x + fp4.linear(a, *o)
        gate, up = fp4.linear(normalized(h, norms[0]), *gate_up).chunk(2, -1)
        y = h + fp4.linear(F.silu(gate) * up, *down)
        return y, fp4.linear(normalized(y.view(1, K), norms[1]), *last)

    c, ops, left = compared(then, SQUARE, (2 * K, K), SQUARE, (32, K), K, K)
    assert (ops, left, c.matches["linear_chain"]) == (["linear_chain"], [], 1)
    assert_expected_inline(
        from_line(c.graph, "fp4.linear_chain.default").replace("], ", "],\n    "),
        """\
v0 = auto_functionalized_v2(fp4.linear_chain.default, x=v1 as [1, 64],
    qdata=[in2, in6, in9, in13],
    scale=[in3, in7, in10, in14],
    global_scale=[in4, in8, in11, in15],
    bias=[None, None, None, None],
    norm_weight=[None, in5, None, in12],
    residual=[in1 as [1, 64],
    None, None, None],
    added=[-1, -1, 0, -1],
    eps=[0.0, 1e-05, 0.0, 1e-05],
    norm_offset=[0.0, 0.0, 0.0, 0.0],
    act=[0, 1, 0, 0],
    glu=[0, 1, 0, 0],
    starts=[0, 0, 0, 0, 0, 0, 0, 0],
    router=None, routing=[],
    summed=[],
    group=, early=False, prefill=auto, _arrivals_base_index=0, _all_bases=[v2])
v3 = <built-in function getitem>(v0, 2)
v4 = <built-in function getitem>(v0, 3)
v5 = <built-in function getitem>(v0, 4)
v6 = aten.reshape.default(v3, [1, 1, 64])
return v6, v4""",
    )


def without(x, arrivals):
    """No attention."""
    return x * 2


BETWEEN = "what a product reads besides the result of the one before it is computed between them"
# name -> what stands behind attention, its weights, options, and why it is left
LEFT = {
    "M": (two, [SQUARE] * 2, dict(rows=2), "M is 2: one launch takes M = 1"),
    "a kernel that is off": (two, [SQUARE] * 2, dict(thresholds={"chain": 0}), "switched off by DispatchConfig.thresholds"),
    "another kernel": (two, [SQUARE] * 2, dict(thresholds={"gemv": 0}), f"linear, then pointwise serves N = {K}, K = {K}, not cuda_gemv"),
    "K": (lambda a, x, o, down: fp4.linear(fp4.linear(a, *o), *down), [(48, K), (K, 48)], {}, "K = 48 is not a multiple of 64"),
    "no attention": (two, [SQUARE] * 2, dict(attend=without), chain.NO_ARRIVALS),
    "an attention without arrivals": (two, [SQUARE] * 2, dict(attend=lambda x, arrivals: attended(x, None)), chain.NO_ARRIVALS),
    "few arrivals": (
        two, [SQUARE] * 2, dict(count=8), f"the fp4.cached_attention before it has 8 arrivals, one launch needs {ARRIVALS}",
    ),
    "a part of a buffer": (
        two, [SQUARE] * 2, dict(attend=lambda x, arrivals: attended(x, arrivals[2:])),
        "the arrivals of the fp4.cached_attention before it are a part of a buffer",
    ),
    "a product": (lambda a, x, o, down: fp4.linear(fp4.linear(a, *o) * x, *down), [SQUARE] * 2, {}, "a result is multiplied by another tensor"),
    "a sum with what is made between": (
        lambda a, x, o, down: (lambda h: fp4.linear(h, *down) + h.cumsum(-1))(fp4.linear(a, *o)), [SQUARE] * 2, {}, BETWEEN,
    ),
    "a weight that is made between": (
        lambda a, x, o, down: (lambda h: fp4.linear(h, down[0], down[1], h.float().mean().abs()))(fp4.linear(a, *o)), [SQUARE] * 2, {}, BETWEEN,
    ),
    "prefill": (
        lambda a, x, o, down: fp4.linear(fp4.linear(a, *o), *down, None, "bf16"), [SQUARE] * 2, {}, 'one product has prefill="auto", another "bf16"',
    ),
    "global scales": (
        lambda a, x, o, down: fp4.linear(fp4.linear(a, *o), *down[:2], torch.stack([down[2]] * 4), None, "auto", [0, 16, 32, 48]), [SQUARE] * 2, {},
        "a product has 4 global scales: one launch takes 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_apart(compared, name):
    then, sizes, options, reason = LEFT[name]
    _, ops, left = compared(then, *sizes, **options)
    assert (("linear_chain" in ops), left) == (not reason, [reason] if reason else [])


def test_a_write_between_them(compared, monkeypatch):
    monkeypatch.setattr(chain, "in_one_mutation_region", lambda nodes: False)
    assert compared(two, *[SQUARE] * 2)[1:] == (["linear_epilogue", "linear"], ["something is written between two products"])


def line(a, x, *parts):
    """One behind the other."""
    for part in parts:
        a = fp4.linear(a, *part)
    return a


@pytest.mark.parametrize(("count", "ops"), [(1, ["linear"]), (4, ["linear_chain"]), (5, ["linear_chain", "linear"]), (7, ["linear_chain"] * 2)])
def test_a_chain_has_four_products_at_most(compared, count, ops):
    """The second one is given what the first one has left."""
    c, found, left = compared(line, *[SQUARE] * count)
    assert (found, left) == (ops, [])
    links = arrivals_of(c.graph)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(links))


@pytest.fixture
def engine():
    """What is compiled is the graph of an engine that promises to call it on one stream."""
    remove = _engines.add_provider(lambda: True)
    yield
    remove()


ZEROS = rf"(v\d+) = aten\.full\.default\(\[{ARRIVALS}\], 0, dtype=torch\.int32"


@pytest.mark.parametrize(("count", "ops"), [(2, ["linear", "linear"]), (3, ["linear_chain"]), (6, ["linear_chain", "linear_chain"])])
def test_without_arrivals(compared, count, ops):
    """The graph makes zeros, once, if the launches that are saved are more than that."""
    c, found, left = compared(line, *[SQUARE] * count, attend=without)
    assert (found, left) == (ops, [chain.NO_ARRIVALS] if count == 2 else [])
    zeros = re.findall(ZEROS, c.graph)
    assert len(zeros) == (count > 2)
    links = arrivals_of(c.graph)
    assert [links[0][0]] == zeros if zeros else not links
    assert all(before[1] == after[0] for before, after in itertools.pairwise(links))


def test_two_products_of_an_engines_graph(compared, engine):
    """Their zeros are no launch."""
    c, ops, left = compared(line, *[SQUARE] * 2, attend=without)
    assert (ops, left, len(re.findall(ZEROS, c.graph))) == (["linear_chain"], [], 1)


def test_what_others_read_is_there(compared):
    """Results inside of the chain, in their own shapes, and members of siblings."""

    def then(a, x, first, second, third):
        y = fp4.linear(a, *first)
        z = fp4.linear(y.view(1, K), *second)
        parts = fp4.linear_siblings(z[None], *third, None, [0, 16, 16, 32])
        return y.cumsum(-1), z, parts[1] * 2, parts[0]

    c, ops, left = compared(then, SQUARE, SQUARE, (32, K, 2))
    assert (ops, left) == (["linear_chain"], [])
    assert "starts=[0, 0, 0, 0, 16, 0]" in c.graph


def test_operands_that_are_views_move_ahead(compared):
    """Here a part of a weight, a global scale of several, and what is added, in another shape."""

    def then(a, x, first, second):
        h = fp4.linear(a, *first)
        scales = second[2].view(1)
        return fp4.linear_epilogue(h, second[0][:K], second[1][:K], scales[0], None, "gelu", None, h.view(1, 1, K))

    c, ops, left = compared(then, SQUARE, (2 * K, K))
    assert (ops, left) == (["linear_chain"], [])
    assert "added=[-1, 0]" in c.graph and "act=[0, 2]" in c.graph


def test_what_is_added(compared):
    """Results of several products, and what was there before, also twice."""

    def then(a, x, *parts):
        first = fp4.linear_epilogue(a, *parts[0], None, "", None, x)
        second = fp4.linear_epilogue(first, *parts[1], None, "", None, x)
        third = fp4.linear_epilogue(second, *parts[2], None, "relu", None, second)
        return fp4.linear_epilogue(third, *parts[3], None, "", None, first)

    c, ops, left = compared(then, *[SQUARE] * 4)
    assert (ops, left) == (["linear_chain"], [])
    assert "added=[-1, -1, 1, 0]" in c.graph and re.search(r"residual=\[v\d+, v\d+, None, None\]", c.graph)


def test_two_layers_that_read_one_result(compared):
    """One of them is in the chain."""

    def then(a, x, first, second, third):
        h = fp4.linear(a, *first)
        return fp4.linear(h, *second), fp4.linear(h, *third)

    assert compared(then, SQUARE, SQUARE, (32, K))[1:] == (["linear_chain", "linear"], [])


def test_a_part_of_a_run(compared):
    """The rest is told, once, with the product that it would stand behind."""

    def then(a, x, first, second, third):
        return fp4.linear(fp4.linear_epilogue(line(a, x, first, second), *third, None, "", x, None), *third)

    _, ops, left = compared(then, SQUARE, SQUARE, SQUARE)
    assert (ops, left) == (["linear_chain", "linear_epilogue", "linear"], ["a result is multiplied by another tensor"])


def test_the_graph_of_a_cpu_stays_as_it_is(compiled):
    x, parts = torch.randn(1, 1, K).to(BF16), [made(SQUARE), made(SQUARE)]
    with listen() as left:
        c = compiled(step_of(two), x, torch.zeros(ARRIVALS, dtype=torch.int32), *parts)
    assert "linear_chain" not in c.matches and left == []


def test_what_explain_prints():
    left = [missed.Missed(f"linear_{i}", "[1, 64]", "M is 2: one launch takes M = 1", UNCHAINED) for i in range(2)]
    text = Explanation([], {}, left).text(200)
    assert "left apart: 2 products [1, 64] (linear_0, linear_1) are not one launch with the products behind it: M is 2: one launch takes M = 1" in text


# --- a model that is divided among ranks ----------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path, monkeypatch):
    yield from group_of_one(tmp_path, monkeypatch)


def divided(group, lead=(1, 1), total=all_reduce):
    """A layer's products behind its attention, o and down summed over ``group``; a sum of rows as experts give it has another ``lead``."""

    def step(x, arrivals, o, norm, gate_up, down, second_norm, qkv):
        arrivals = arrivals + 0
        h = x + total(fp4.linear(attended(x, arrivals), *o), group)
        gate, up = fp4.linear(normalized(h, norm), *gate_up).chunk(2, -1)
        h = total(fp4.linear((F.silu(gate) * up).reshape(*lead, -1), *down), group).reshape(h.shape) + h
        return h, fp4.linear(normalized(h, second_norm), *qkv)

    return step


def divided_parts():
    x, arrivals = torch.randn(1, 1, K).to(BF16), torch.zeros(ARRIVALS, dtype=torch.int32)
    return x, arrivals, made((K, K)), made(K), made((256, K)), made((K, 128)), made(K), made((96, K))


@pytest.mark.parametrize("lead", [(1, 1), (1,)])
def test_sums_over_ranks_are_inside(chained, group, lead):
    _exchange.add(group.group_name, _exchange.Exchange((0,), 0, None))
    step, parts = divided(group, lead), divided_parts()
    c, left = chained(step, *parts)
    assert (called(c.graph), left) == (["cached_attention", "linear_chain"], []) and "all_reduce" not in c.graph
    assert "added=[-1, -1, 0, -1]" in c.graph and f"summed=[0, 2], group={group.group_name}" in c.graph
    for got, want in zip(c.result, step(*parts), strict=True):
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 1e-2


@pytest.mark.parametrize("known", [True, False])
def test_sums_by_one_operator_of_another_library(chained, group, monkeypatch, known):
    """It has a name of its own for the group; a group of which torch has none stays that library's."""
    _exchange.add(group.group_name, _exchange.Exchange((0,), 0, None))
    monkeypatch.setitem(operators.SUMS, "fp4_tests::total", {"tp:0": group.group_name if known else ""}.get)
    step, parts = divided("tp:0", total=torch.ops.fp4_tests.total), divided_parts()
    c, left = chained(step, *parts)
    assert left == []
    assert (c.graph.count("fp4_tests.total"), called(c.graph).count("linear_chain")) == ((0, 1) if known else (2, 1))
    assert (f"summed=[0, 2], group={group.group_name}" in c.graph) == known
    for got, want in zip(c.result, step(*parts), strict=True):
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 1e-2


def test_a_sum_to_which_nothing_is_added(group):
    """What a compiled graph reads by its address is a plain tensor, also where the op computes its products one by one."""
    x, arrivals, o, norm, gate_up = divided_parts()[:5]
    products = [Product(*o[:3]), Product(*gate_up[:3], norm_weight=norm, eps=EPS)]
    results = fp4.linear_chain(*ChainCall.made(x, [products[0]._replace(summed=True), products[1]], arrivals, group=group.group_name))
    assert {type(result) for result in results} == {torch.Tensor}
    assert torch.equal(results[0], fp4.linear(x, *o))


def test_sums_of_ranks_that_share_no_memory(chained, group):
    """The launch ends there, and it is said why."""
    c, left = chained(divided(group), *divided_parts())
    assert c.graph.count("all_reduce.default(") == 2 and called(c.graph).count("linear_chain") == 1
    assert left == ["its result is summed over ranks: the ranks of this group share no memory"] * 2


def test_a_sum_that_something_else_reads(chained, group):
    """The launch does not add the residual to it then."""
    _exchange.add(group.group_name, _exchange.Exchange((0,), 0, None))

    def step(x, arrivals, o, norm, gate_up):
        part = all_reduce(fp4.linear(attended(x, arrivals + 0), *o), group)
        return fp4.linear(normalized(x + part, norm), *gate_up), part.relu()

    x, arrivals, *parts = divided_parts()
    c, _ = chained(step, x, arrivals, *parts[:3])
    assert called(c.graph).count("linear_chain") == 0 and c.graph.count("all_reduce.default(") == 1
    for got, want in zip(c.result, step(x, arrivals, *parts[:3]), strict=True):
        assert float((got.double() - want.double()).norm() / want.double().norm()) < 1e-2


def test_other_reductions_stay(chained, group):
    _exchange.add(group.group_name, _exchange.Exchange((0,), 0, None))

    def step(x, arrivals, o, norm, gate_up):
        part = fp4.linear(attended(x, arrivals + 0), *o)
        largest = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(part, "max", group.group_name))
        return fp4.linear(normalized(x + largest, norm), *gate_up)

    x, arrivals, *parts = divided_parts()
    c, _ = chained(step, x, arrivals, *parts[:3])
    assert c.graph.count("all_reduce.default(") == 1 and "summed=[0]" not in c.graph

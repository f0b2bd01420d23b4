"""Several products of one row in one launch, on a GPU: against float64 and against a launch each, replays, and whole steps over a KVCache."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config, _engines, dispatch
from fp4_inductor.kernels import csrc, host, registry
from fp4_inductor.kernels.forms import Epilogue, Norm, Options
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.ops import CONTRACTS
from fp4_inductor.ops.linear_chain import ARRIVALS, ChainCall, Product, Routing
from fp4_inductor.passes import missed
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, error, weight

pytestmark = pytest.mark.gpu
fp4 = torch.ops.fp4
CONTRACT = CONTRACTS["linear_chain"]
EPS = 1e-6
# K of o, hidden size, inner size, rows of q, k and v
SHAPES = {
    "Qwen3-8B": (4096, 4096, 12288, 6144), "Llama-3-8B": (4096, 4096, 14336, 6144), "Qwen3-0.6B": (2048, 1024, 3072, 4096), "2048": (2048, 2048, 6144, 3072),
    "odd": (192, 320, 448, 200),
}  # fmt: skip


@contextlib.contextmanager
def serving(**options):
    """The kernel serves, also where it is off by default."""
    [kernel] = [k for k in registry.kernels("linear_chain") if k.csrc]
    arch = host.arch(torch.device(DEVICE))
    on = kernel.at(arch)
    if on is None:
        pytest.skip(f"{kernel.name} is not written for sm_{arch}")
    if why := csrc.why_not(kernel.csrc, arch):
        pytest.skip(why)
    with dispatch(candidates=(kernel.name,) if on.off else (), **options):
        yield


@pytest.fixture(autouse=True)
def _inference():
    torch._dynamo.reset()
    with torch.no_grad(), serving():
        yield


def layer(shape, dtype=BF16, rich=False) -> tuple[torch.Tensor, list[Product]]:
    """x and the products between two attentions. ``rich``: with biases, several global scales, GeGLU, and norms as Gemma writes them."""
    k, hidden, inner, n = SHAPES[shape]

    def part(rows, columns, starts=(), **options) -> Product:
        q, s, g = weight(rows, columns)
        g = g * torch.tensor([1.0, 3.0, 0.2], device=DEVICE)[: len(starts) + 1] if starts else g
        return Product(q, s, g, torch.randn(rows, device=DEVICE).to(dtype) if rich else None, starts=starts, **options)

    def norm():
        return dict(norm_weight=(torch.randn(hidden, device=DEVICE) / 2).to(dtype), eps=EPS, norm_offset=float(rich))

    act = "gelu_tanh" if rich else "silu"
    products = [
        part(hidden, k, residual=torch.randn(1, hidden, device=DEVICE).to(dtype)),
        part(2 * inner, hidden, (inner,) if rich else (), act=act, glu=True, **norm()),
        part(hidden, inner, added=0),
        part(n, hidden, (n // 2, 3 * n // 4) if rich else (), **norm()),
    ]
    return torch.randn(1, k, device=DEVICE).to(dtype) * 3, products


def zeros() -> torch.Tensor:
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=DEVICE)


def launched(c: ChainCall, early: bool = False) -> list[torch.Tensor]:
    """By the kernel."""
    results = torch.ops.fp4_csrc.linear_chain(*c[: ChainCall._fields.index("group")], 0, int(early), host.arch(c.x.device))
    return list(results[: len(c.qdata)])


def one_by_one(c: ChainCall) -> list[torch.Tensor]:
    """By a launch of cuda_gemv for each product."""
    results: list[torch.Tensor] = []
    for p in c.products():
        name = "linear_gemv" + ("_glu" if p.glu else "_pointwise" if p.act or p.adds else "")
        residual = results[p.added] if p.added >= 0 else p.residual
        norm = None if p.norm_weight is None else Norm(p.norm_weight, p.eps, p.norm_offset)
        options = Options(then=Epilogue(p.starts, p.act, None, residual), norm=norm)
        x = results[-1] if results else c.x
        results.append(csrc.call(name, x, (p.qdata, p.scale), p.global_scale, p.bias, host.arch(x.device), options))
    return results


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "rich"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64_and_single_launches(shape, dtype, rich):
    x, products = layer(shape, dtype, rich)
    for first, last in ((0, 4), (0, 3), (1, 4), (1, 3), (0, 2), (2, 4)):
        part = [p._replace(added=p.added - first if p.added >= first else -1) for p in products[first:last]]
        given = torch.randn(1, 2 * part[0].qdata.shape[1], device=DEVICE).to(dtype) if first else x
        c = ChainCall.made(given, part, zeros())
        got = launched(c)
        for i, (a, alone, want) in enumerate(zip(got, one_by_one(c), CONTRACT.reference(*c), strict=False)):
            assert error(a, want.double()) <= CONTRACT.tolerance[dtype], (first, last, i)
            assert error(a, alone.double()) <= CONTRACT.tolerance[dtype], (first, last, i)
        assert all(torch.equal(a, b) for a, b in zip(got, launched(c, early=True), strict=True))


@pytest.mark.parametrize("shape", ["Qwen3-0.6B", "odd"])
def test_other_values(shape):
    """Rows of zeros, tiny and huge activations, and NaN, which reaches every result."""
    x, products = layer(shape)
    for value in (torch.zeros_like(x), x * 1e-6, x * 1e4):
        c = ChainCall.made(value, products, zeros())
        assert all(error(a, b.double()) <= CONTRACT.tolerance[BF16] for a, b in zip(launched(c), CONTRACT.reference(*c), strict=True))
    for column in (0, x.shape[1] // 2, x.shape[1] - 1):
        dirty = x.clone()
        dirty[0, column] = float("nan")
        assert all(bool(y.isnan().all()) for y in launched(ChainCall.made(dirty, products, zeros())))
    clean = ChainCall.made(x, products, zeros())
    assert all(bool(y.isfinite().all()) for y in launched(clean)), "nothing of that is left"


@pytest.mark.parametrize("shape", ["Qwen3-8B", "Qwen3-0.6B"])
def test_a_thousand_replays_are_bit_equal(shape):
    """Three chains in a row that share memory, begun early: the results of one are read by the next."""
    x, products = layer(shape)
    again = products[1:3]
    arrivals = zeros()

    def run():
        results = launched(ChainCall.made(x, products, arrivals), early=True)
        for _ in range(2):
            more = [again[0], again[1]._replace(added=-1, residual=results[2 if len(results) == 4 else 1])]
            results = launched(ChainCall.made(more[1].residual, more, arrivals), early=True)
        return results

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    first = [t.clone() for t in out]
    for _ in range(1000):
        for t in out:
            t.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, first, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(run(), first, strict=True))


def model(family, layers=2):
    import transformers

    torch.manual_seed(0)
    fields = dict(
        vocab_size=128, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=128
    )
    config = getattr(transformers, family)(**fields, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).eval().to(DEVICE)
    return fp4_inductor.quantize_model(made, NVFP4Config("amax"), progress=False)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["no graphs", "CUDA graphs"])
@pytest.mark.parametrize(("family", "layers", "products"), [("LlamaConfig", 2, 4 + 3), ("Qwen3Config", 2, 4 + 3), ("Qwen3Config", 5, 3 + 3)])
def test_decode_steps(family, layers, products, mode):
    """Logits with one launch between two attentions, and with a launch for each product: the same tokens, close.

    Of five layers the first four are one region, which ends ahead of the next one's q, k and v.
    """
    quantized, tokens = model(family, layers), torch.randint(3, 128, (40,)).tolist()

    def steps(**options):
        torch._dynamo.reset()
        cache, logits = KVCache(quantized, 64, 1), []
        step = torch.compile(lambda ids: quantized(input_ids=ids, past_key_values=cache).logits, fullgraph=True, mode=mode)
        with dispatch(**options), listen() as entries, missed.listen() as left:
            for token in tokens:
                logits.append(step(torch.tensor([[token]], device=DEVICE)).clone())
        return torch.cat(logits), [e for e in entries if e.op == "fp4.linear_chain"], [m for m in left if m.what == missed.UNCHAINED]

    ours, chains, left = steps(candidates=csrc_candidates())
    apart, none, _ = steps(candidates=csrc_candidates(), thresholds={"chain": 0})
    assert [e.decision.row.kernel for e in chains] == ["cuda_gemv_chain"] * products and not none and not left
    assert error(ours, apart.double()) <= 3e-2


def piece():
    """``(f, x)``: what stands between two attentions."""
    x, products = layer("Qwen3-0.6B")
    parts = [(p.qdata, p.scale, p.global_scale) for p in products]
    residual, norms = torch.randn(1, 1024, device=DEVICE, dtype=BF16), [p.norm_weight for p in products if p.norm_weight is not None]

    def normalized(t, w):
        t32 = t.float()
        return w * (t32 * torch.rsqrt(t32.pow(2).mean(-1, keepdim=True) + EPS)).to(t.dtype)

    def f(x):
        h = residual + fp4.linear(x, *parts[0])
        gate, up = fp4.linear(normalized(h, norms[0]), *parts[1]).chunk(2, -1)
        y = h + fp4.linear(torch.nn.functional.silu(gate) * up, *parts[2])
        return fp4.linear(normalized(y, norms[1]), *parts[3]).float().tanh()

    return f, x


@pytest.mark.parametrize("engine", [False, True], ids=["any caller", "an engine"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["no graphs", "CUDA graphs"])
def test_graphs_without_an_attention(mode, engine):
    """They meet in zeros of their own, filled at each call, or kept by an engine's graph."""
    f, x = piece()
    remove = _engines.add_provider(lambda: engine)
    try:
        with listen() as entries:
            compiled = torch.compile(f, fullgraph=True, mode=mode)
            got = [compiled(x).clone() for _ in range(20)]
    finally:
        remove()
    [first] = [e.note for e in entries if e.note.startswith("product 1 of 4 of one launch")]
    assert ("its blocks meet in a constant of the graph" in first) == engine
    assert all(torch.equal(got[0], y) for y in got)
    torch._dynamo.reset()
    with dispatch(thresholds={"chain": 0}):
        assert error(got[0], torch.compile(f, fullgraph=True)(x).double()) <= 3e-2


def test_calls_on_two_streams_at_the_same_time():
    """Each call has zeros of its own, and a cooperative launch waits until all of its blocks find room."""
    f, x = piece()
    compiled = torch.compile(f, fullgraph=True)
    want, streams, results = compiled(x).clone(), [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(compiled(x))
    torch.cuda.synchronize()
    assert all(torch.equal(want, y) for y in results)


def csrc_candidates() -> tuple[str, ...]:
    """The kernel's name, where it is off."""
    [kernel] = [k for k in registry.kernels("linear_chain") if k.csrc]
    on = kernel.at(host.arch(torch.device(DEVICE)))
    return (kernel.name,) if on is not None and on.off else ()


def test_generate_takes_it():
    """A loop of CUDA graphs: two calls give the same tokens."""
    quantized, ids = model("LlamaConfig"), torch.randint(3, 128, (1, 9), device=DEVICE)
    with listen() as entries:
        first = fp4_inductor.generate(quantized, ids, max_new_tokens=60, min_new_tokens=60, do_sample=False)
    assert any(e.op == "fp4.linear_chain" for e in entries)
    assert torch.equal(fp4_inductor.generate(quantized, ids, max_new_tokens=60, min_new_tokens=60, do_sample=False), first)


def test_an_eager_call_is_one_by_one():
    x, products = layer("Qwen3-0.6B")
    c = ChainCall.made(x, products, zeros())
    assert all(error(a, b.double()) <= CONTRACT.tolerance[BF16] for a, b in zip(fp4.linear_chain(*c), CONTRACT.reference(*c), strict=True))


# K of o, hidden size, inner size and number of the experts, how many a token gets, rows of q, k and v; the router's form; global scales of gate and up
MIXTURES = {
    "Qwen3-30B-A3B": (4096, 2048, 768, 128, 8, 5120, "normalized", 1), "Qwen3-Next": (4096, 2048, 512, 512, 10, 9216, "normalized", 1),
    "chosen": (2048, 2048, 512, 60, 4, 3072, "chosen", 1), "odd": (192, 320, 128, 12, 3, 200, "softmax", 2),
}  # fmt: skip


def mixture(name, dtype=BF16) -> tuple[torch.Tensor, list[Product]]:
    k, hidden, inner, experts, top_k, n, form, scales = MIXTURES[name]

    def stack(rows, columns):
        return [torch.stack(parts) for parts in zip(*(weight(rows, columns) for _ in range(experts)), strict=True)]

    norm = dict(norm_weight=(torch.rand(hidden, device=DEVICE) + 0.5).to(dtype), eps=EPS, norm_offset=0.0)
    q, s, g = stack(2 * inner, hidden)
    routing = Routing((torch.randn(experts, hidden, device=DEVICE) / hidden**0.5).to(dtype), top_k, form, True)
    products = [
        Product(*weight(hidden, k), residual=torch.randn(1, hidden, device=DEVICE).to(dtype)),
        Product(q, s, torch.stack((g, g * 2), 1) if scales == 2 else g, act="silu", glu=True, routing=routing, **norm),
        Product(*stack(hidden, inner), added=0),
        Product(*weight(n, hidden), **norm),
    ]
    return torch.randn(1, k, device=DEVICE).to(dtype), products


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_against_float64(name, dtype):
    """In the launch of one layer, of a part of it, and 50 times."""
    x, products = mixture(name, dtype)
    for first, last in ((0, 4), (0, 3), (1, 4), (1, 3)):
        part = [p._replace(added=p.added - first if p.added >= first else -1) for p in products[first:last]]
        given = torch.randn(1, MIXTURES[name][1], device=DEVICE).to(dtype) if first else x
        c = ChainCall.made(given, part, zeros())
        got = launched(c)
        for i, (a, want) in enumerate(zip(got, CONTRACT.reference(*c), strict=False)):
            assert not want.numel() or error(a, want.double()) <= CONTRACT.tolerance[dtype], (first, last, i)
        assert all(torch.equal(a, b) for _ in range(50) for a, b in zip(got, launched(c, early=True), strict=True))

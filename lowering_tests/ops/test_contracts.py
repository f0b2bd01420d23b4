"""Every op of ``torch.ops.fp4`` against its contract: opcheck, fakes, tolerance, no mutation, no aliasing, any stride."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import fp4_inductor  # noqa: F401
from fp4_inductor import errors
from fp4_inductor.formats import nvfp4
from fp4_inductor.ops import CONTRACTS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPS = sorted(CONTRACTS)


def cases(name: str, device: str = "cpu"):
    torch.manual_seed(0)
    return list(CONTRACTS[name].inputs(torch.device(device)))


def covering(found, values: bool = True):
    """Those of the cases that bring something new: a value, or a tensor's dtype, rank, emptiness or single row, in some argument's place.

    First those that bring the most: fewer are needed then. Without ``values`` it matters only which type a number or a word has, and no dtype does.
    """
    left = [(case, set(enumerate(_form(a, values) for a in case[1]))) for case in found]
    seen: set[tuple] = set()
    while left:
        case, what = max(left, key=lambda each: len(each[1] - seen))
        if what <= seen:
            return
        seen |= what
        yield case


def _form(a, values: bool) -> tuple:
    if isinstance(a, torch.Tensor):
        return (a.dtype if values else None, a.dim(), 0 in a.shape, a.dim() > 1 and a.shape[-2] == 1)
    if isinstance(a, (list, tuple)):
        return tuple(_form(each, values) for each in a)
    return (repr(a) if values or isinstance(a, bool) else type(a),)


def tensors(args) -> list[torch.Tensor]:
    """Those of lists, too."""
    return [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]


def changed(args, change, which: int | None = None) -> tuple:
    """``args`` with ``change(t)`` in the place of each tensor, or of that with this number alone."""
    number = itertools.count()
    return tree_map_only(torch.Tensor, lambda t: change(t) if which in (next(number), None) else t, tuple(args))


def written_by(name, args) -> list[int]:
    """The numbers of the arguments that this call writes: of those that may be left out, the ones that it has."""
    return [i for i in CONTRACTS[name].written if i < len(args) and args[i] is not None]


def called(name: str, args):
    """``(outputs, what was written)``: the op on copies of the arguments that it writes, laid out as they are, so that it can be called again."""
    written = written_by(name, args)
    own = [copied(a) if i in written else a for i, a in enumerate(args)]
    return outputs(CONTRACTS[name].op(*own)), [own[i] for i in written]


def copied(t: torch.Tensor) -> torch.Tensor:
    """The same strides and values in other memory, what lies between them included."""
    return torch.as_strided(t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0).clone(), t.shape, t.stride(), t.storage_offset())


def results(name: str, args) -> list[torch.Tensor]:
    out, written = called(name, args)
    return [*out, *written]


def outputs(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result or ())


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def dense(name: str, args) -> torch.Tensor:
    """The matmul ops in float64, never rounded."""
    if name == "linear":
        x, qdata, scale, g, bias, _, rows = (*args, *(None, "auto", None)[len(args) - 4 :])
        if rows:  # a matrix of its own for each row
            ends = torch.tensor([*rows[1:], qdata.shape[0]])
            g = g[torch.bucketize(torch.arange(qdata.shape[0]), ends, right=True).to(g.device)]
            w = nvfp4.dequantize(qdata[:, None], scale[:, None], g, torch.float32)[:, 0]
        else:
            w = nvfp4.dequantize(qdata, scale, g, torch.float32)
        y = x.double() @ w.double().mT
        return y if bias is None else y + bias.double()
    x, qdata, scale, g = args
    return x.double() @ nvfp4.dequantize(qdata, scale, g, torch.float32).double().mT


def test_the_ops_that_exist():
    assert {"linear", "bmm", "dequantize", "quantize"} <= set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_inputs_cover_what_reliability_asks_for(name):
    shapes = {tuple(tuple(t.shape) for t in tensors(args)) for _, args in cases(name)}
    assert len(shapes) >= 8
    first = [s[0] for s in shapes]
    off_tile = [s for s in first if any(d % 32 for d in s)]
    assert len(off_tile) >= 5
    rows = {s[-2] if len(s) > 1 else 1 for s in first}
    assert {0, 1} <= rows, rows


def opcheck(name, args, *tests) -> set[str]:
    return set(torch.library.opcheck(CONTRACTS[name].op, args, test_utils=tests, raise_exception=False).values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, device):
    """Registration of gradients and fake tensors. Of opcheck's other tests test_schema and AOT dispatch are the next two."""
    for description, args in covering(cases(name, device)):
        assert opcheck(name, args, "test_autograd_registration", "test_faketensor") == {"SUCCESS"}, description


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("values", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPS)
def test_opcheck_aot_dispatch(name, values, device):
    """With dynamic shapes. By far the most time; results are the fake kernel's, which is compared for every value and dtype above."""
    for description, args in covering(cases(name, device), values):
        assert opcheck(name, args, "test_aot_dispatch_dynamic") == {"SUCCESS"}, description


@pytest.mark.parametrize("name", ["linear", "bmm", "dequantize"])
def test_opcheck_schema_cannot_run_on_float8_today(name):
    """torch's SchemaCheckMode compares inputs by allclose, which has no float8 kernel. When this fails, torch can: add "test_schema" above."""
    _, args = next(c for c in cases(name) if c[1][0].numel())
    with pytest.raises(Exception, match="Float8_e4m3fn"):
        torch.library.opcheck(CONTRACTS[name].op, args, test_utils="test_schema")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_inputs_are_not_written_and_outputs_do_not_alias(name, device):
    """What test_schema would check. Arguments that the schema says are written are, and autograd is told."""
    for description, args in cases(name, device):
        written = written_by(name, args)
        kept = tensors([a for i, a in enumerate(args) if i not in written])
        before = [bits(t) for t in kept]
        versions = [t._version for t in kept]
        others = [(args[i]._version, bits(args[i])) for i in written]
        result = outputs(CONTRACTS[name].op(*args))
        assert all(torch.equal(b, bits(t)) for b, t in zip(before, kept, strict=True)), description
        assert versions == [t._version for t in kept], description
        for i, (version, old) in zip(written, others, strict=True):
            assert args[i]._version == version + 1, description
            names = [a.name for a in CONTRACTS[name].op._schema.arguments]
            later = "key_mean" in names and "position" in names and bool(args[names.index("position")])
            counted = names[i] == "arrivals" or (names[i] == "key_mean" and later)  # a call leaves them as they were; the mean stays after the first
            assert torch.equal(old, bits(args[i])) == (counted or args[0].numel() == 0), description
        storages = {t.untyped_storage().data_ptr() for t in tensors(args) if t.numel()}
        owned = [t.untyped_storage().data_ptr() for t in result if t.numel()]
        assert not storages & set(owned), description
        assert len(set(owned)) == len(owned), description


def test_quantize_returns_its_own_global_scale():
    w, given = torch.randn(4, 32), torch.tensor(0.5)
    for g in (given, given.view(1)):
        returned = torch.ops.fp4.quantize(w, "amax", g)[2]
        assert returned.data_ptr() != given.data_ptr()
        assert returned.shape == ()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_fake_has_the_shape_strides_and_dtype_of_the_real_result(name, device):
    for description, args in cases(name, device):
        layouts = [changed(args, lambda t, of=layout: of(t) if t.dim() > 1 else t) for layout in (_strided, _transposed)]
        for variant in (args, *layouts):
            mode = FakeTensorMode()
            fake = outputs(CONTRACTS[name].op(*changed(variant, mode.from_tensor)))
            real = outputs(CONTRACTS[name].op(*variant))
            for f, r in zip(fake, real, strict=True):
                assert (f.shape, f.storage_offset(), f.dtype, f.device) == (r.shape, r.storage_offset(), r.dtype, r.device), description
                assert f.stride() == r.stride() or not r.numel(), description


@pytest.mark.parametrize("name", OPS)
def test_meta_tensors_give_shapes(name):
    for _, args in cases(name):
        meta = outputs(CONTRACTS[name].op(*changed(args, lambda t: t.to("meta"))))
        assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in called(name, args)[0]]
        assert all(t.is_meta for t in meta)


def _strided(t: torch.Tensor) -> torch.Tensor:
    """The same values behind an offset, a row pitch and a column stride of two."""
    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.float32, 8: torch.int64}
    store = torch.zeros(*t.shape[:-1], 2 * t.shape[-1] + 3, dtype=of_size[t.dtype.itemsize], device=t.device).view(t.dtype)
    view = store[..., 3::2]
    view.copy_(t)
    assert torch.equal(bits(view), bits(t))
    return view


def _transposed(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [_strided, _transposed])
@pytest.mark.parametrize("name", OPS)
def test_any_layout_gives_the_bits_of_the_contiguous_input(name, layout, device):
    for description, args in cases(name, device):
        want = results(name, args)
        # each tensor alone, too: a kernel may honour the strides of one operand only
        numbers = [None, *(i for i, t in enumerate(tensors(args)) if t.dim())]
        variants = [changed(args, lambda t: layout(t) if t.dim() else t, i) for i in numbers]
        for variant in variants:
            got = results(name, variant)
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(want, got, strict=True)), description


@pytest.mark.parametrize("name", ["linear", "bmm"])
def test_an_expanded_activation_and_a_sliced_weight(name):
    _, (x, qdata, scale, g, *_) = next(c for c in cases(name) if c[1][0].dim() > 1 and c[1][0].shape[-2] > 1 and c[1][1].shape[-2] > 4)
    op = CONTRACTS[name].op
    one = x[..., :1, :]
    assert torch.equal(op(one.expand_as(x), qdata, scale, g), op(one.expand_as(x).contiguous(), qdata, scale, g))
    part = slice(1, 5)
    assert torch.equal(op(x, qdata[..., part, :], scale[..., part, :], g), op(x, qdata[..., part, :].clone(), scale[..., part, :].clone(), g))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear", "bmm"])
def test_tolerance_against_float64(name, dtype, device):
    worst = 0.0
    for description, args in cases(name, device):
        args = tuple(a.to(dtype) if isinstance(a, torch.Tensor) and i in (0, 4) else a for i, a in enumerate(args))
        want, got = dense(name, args), CONTRACTS[name].op(*args)
        assert got.dtype == dtype
        if want.numel():
            error = float((got.double() - want).norm() / want.norm())
            assert error <= CONTRACTS[name].tolerance[dtype], (description, error)
            worst = max(worst, error)
    assert worst > 0


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_within_tolerance_on_both_sides_of_every_cpu_regime(m, dtype):
    w = nvfp4.quantize(torch.randn(96, 208) / 208**0.5)
    args = (torch.randn(m, 208).to(dtype), *w, torch.randn(96).to(dtype))
    want = dense("linear", args)
    error = float((torch.ops.fp4.linear(*args).double() - want).norm() / want.norm())
    assert error <= CONTRACTS["linear"].tolerance[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["dequantize", "quantize"])
def test_exact_ops_equal_their_reference(name, device):
    for description, args in cases(name, device):
        for a, b in zip(outputs(CONTRACTS[name].op(*args)), outputs(CONTRACTS[name].reference(*args)), strict=True):
            assert torch.equal(bits(a), bits(b)), description


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_decodes_every_byte_and_scale(dtype):
    """[256 scale bytes, 256 packed bytes] in one weight, against the format's definition; NaN scales included."""
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32).contiguous().view(torch.float8_e4m3fn)
    qdata = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    for g in (torch.tensor(1.0), torch.tensor(0.3), torch.tensor(3e-5)):
        got = torch.ops.fp4.dequantize(qdata, scale, g, dtype)
        want = nvfp4.dequantize(qdata, scale, g, dtype)
        assert torch.equal(torch.isnan(got), torch.isnan(want))
        assert torch.equal(bits(got.nan_to_num()), bits(want.nan_to_num()))


# --- rows do not see each other ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 9, 17, 33, 64])
def test_a_non_finite_activation_stays_in_its_row(m, bad, device):
    w = nvfp4.quantize(torch.randn(33, 80, device=device))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(m, 80, device=device).to(dtype)
        clean = torch.ops.fp4.linear(x, *w)
        for row in {0, m // 2, m - 1}:
            dirty = x.clone()
            dirty[row, 79] = bad
            got = torch.ops.fp4.linear(dirty, *w)
            others = torch.arange(m, device=device) != row
            assert torch.equal(got[others], clean[others])
            assert not torch.isfinite(got[row]).any()  # Inf * 0 is NaN, too


@pytest.mark.parametrize("device", DEVICES)
def test_a_non_finite_activation_stays_in_its_expert_and_row(device):
    x, w = torch.randn(3, 5, 48, device=device), nvfp4.quantize(torch.randn(3, 17, 48, device=device))
    clean = torch.ops.fp4.bmm(x, *w)
    dirty = x.clone()
    dirty[1, 2, 3] = float("nan")
    got = torch.ops.fp4.bmm(dirty, *w)
    assert torch.isnan(got[1, 2]).all()
    got[1, 2] = clean[1, 2]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_rows_are_finite_for_finite_activations_of_any_size(device):
    pool = torch.tensor([0.0, 1e-45, 1e-43, 1e-38, 1.0, 448.0, 3e38, torch.finfo(torch.float32).max])
    x = torch.cat([torch.randn(64, 32) * 10.0 ** torch.linspace(-45, 37, 64)[:, None], pool[:, None].expand(-1, 32), pool[torch.randint(0, 8, (64, 32))]]).to(
        device
    )
    assert torch.isfinite(x).all()
    x8, scale = torch.ops.fp4.quantize_rows_fp8(x)
    assert (torch.isfinite(scale) & (scale > 0)).all()
    assert torch.isfinite(x8.float()).all()
    normal = x.abs().amax(-1) > 1e-30
    error = ((x8.double() * scale.double() - x.double()).abs().amax(-1) / x.double().abs().amax(-1))[normal]
    assert error.max() <= 2.0**-4 + 1e-6  # half an E4M3 ulp of the row's maximum


# --- nothing to do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("k", [0, 32])
def test_empty_dimensions_have_a_result(m, n, k, device):
    w = torch.ops.fp4.quantize(torch.randn(n, k, device=device))
    x, bias = torch.randn(m, k, device=device), torch.randn(n, device=device)
    assert torch.ops.fp4.dequantize(*w, torch.float32).shape == (n, k)
    got = torch.ops.fp4.linear(x, *w, bias)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, nvfp4.dequantize(*w, torch.float32), bias), rtol=1e-5, atol=1e-5)
    if k == 0:
        assert torch.equal(got, bias.expand(m, n))
    w3 = torch.ops.fp4.quantize(torch.randn(2, n, k, device=device))
    assert torch.ops.fp4.bmm(torch.randn(2, m, k, device=device), *w3).shape == (2, m, n)


# --- refusals ---------------------------------------------------------------------------------------------------

W = nvfp4.quantize(torch.ones(8, 32))
W3 = nvfp4.quantize(torch.ones(2, 8, 32))
X = torch.ones(3, 32)
REFUSED = {
    "linear: K": (errors.ShapeError, r"\(3, 48\).*32", lambda f: f.linear(torch.ones(3, 48), *W)),
    "linear: 3-D weight": (errors.ShapeError, r"fp4.bmm", lambda f: f.linear(X, *W3)),
    "linear: scalar": (errors.ShapeError, r"\(\)", lambda f: f.linear(torch.ones(()), *W)),
    "linear: dtype": (errors.DTypeError, r"float64.*bfloat16", lambda f: f.linear(X.double(), *W)),
    "linear: integer": (errors.DTypeError, r"int64", lambda f: f.linear(X.long(), *W)),
    "linear: bias shape": (errors.ShapeError, r"\(1,\).*\(8,\)", lambda f: f.linear(X, *W, torch.ones(1))),
    "linear: bias dtype": (errors.DTypeError, r"bfloat16.*float32", lambda f: f.linear(X, *W, torch.ones(8).bfloat16())),
    "linear: prefill": (errors.ConfigError, r"'fp4'.*auto", lambda f: f.linear(X, *W, None, "fp4")),
    "linear: device": (errors.DeviceError, r"cpu.*meta", lambda f: f.linear(X.to("meta"), *W)),
    "linear: bias device": (errors.DeviceError, r"cpu.*meta", lambda f: f.linear(X, *W, torch.ones(8, device="meta"))),
    "linear: scale device": (errors.DeviceError, r"scale meta.*\.to\(device\)", lambda f: f.linear(X, W[0], W[1].to("meta"), W[2])),
    "bmm: experts": (errors.ShapeError, r"x \(3, 3, 32\)", lambda f: f.bmm(torch.ones(3, 3, 32), *W3)),
    "bmm: 2-D": (errors.ShapeError, r"x \(3, 32\)", lambda f: f.bmm(X, *W3)),
    "bmm: dtype": (errors.DTypeError, r"float64", lambda f: f.bmm(torch.ones(2, 3, 32).double(), *W3)),
    "bmm: device": (errors.DeviceError, r"meta", lambda f: f.bmm(torch.ones(2, 3, 32, device="meta"), *W3)),
    "dequantize: dtype": (errors.DTypeError, r"float64", lambda f: f.dequantize(*W, torch.float64)),
    "dequantize: device": (errors.DeviceError, r"meta", lambda f: f.dequantize(W[0], W[1], W[2].to("meta"), torch.float32)),
    "quantize: search": (errors.ConfigError, r"'best'", lambda f: f.quantize(X, "best")),
    "quantize: K": (errors.ShapeError, r"\(3, 20\)", lambda f: f.quantize(X[:, :20])),
    "quantize: device": (errors.DeviceError, r"w cpu, global_scale meta", lambda f: f.quantize(X, "amax", torch.ones((), device="meta"))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_typed(case):
    error_class, message, call = REFUSED[case]
    with pytest.raises(error_class, match=message):
        call(torch.ops.fp4)


@pytest.mark.parametrize("case", [c for c in REFUSED if "device" not in c])
def test_the_fake_refuses_what_the_op_refuses(case):
    """A graph that could not run is not traced either."""
    error_class, message, call = REFUSED[case]
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error_class, match=message):
        call(torch.ops.fp4)


# --- bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPS)
def test_a_hundred_runs_give_one_hash(name, device):
    for _, args in cases(name, device)[::3]:
        assert len({hash(tuple(bits(t).cpu().numpy().tobytes() for t in results(name, args))) for _ in range(100)}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariance_of_few_rows_on_a_cpu(dtype):
    """The C kernel computes each row alone, so a row has the same bits in any batch of up to 8."""
    from fp4_inductor.kernels.linear import cpu_native

    native, why = cpu_native.status()
    if not native:
        pytest.skip(f"ATen decodes here and its GEMM is not batch-invariant: {why}")
    w = nvfp4.quantize(torch.randn(130, 272))
    x = torch.randn(cpu_native.MAX_M, 272).to(dtype)
    alone = torch.cat([torch.ops.fp4.linear(row[None], *w) for row in x])
    for m in range(1, cpu_native.MAX_M + 1):
        assert torch.equal(torch.ops.fp4.linear(x[:m], *w), alone[:m])

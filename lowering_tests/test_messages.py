"""What a user reads: reports, explanations and errors of models with many layers fit the terminal and lose nothing."""

from __future__ import annotations

import re

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fp4_inductor
from fp4_inductor import _text, errors
from fp4_inductor.explain import ExplainRow, Explanation
from fp4_inductor.models.coverage import LayerReport, Report, Skipped
from fp4_inductor.models.plan import make_plan
from fp4_inductor.passes.missed import Missed

# --- names -------------------------------------------------------------------------------------------------------


def expanded(group: str) -> list[str]:
    """The names that a group stands for, by the rules that its text follows."""
    names = [""]
    for part in re.split(r"\.(?![^{]*\})", group):
        pieces = part.strip("{}").split(",") if part.startswith("{") else [part]
        ranges = [re.fullmatch(r"(\d+)-(\d+)", piece) for piece in pieces]
        alternatives = [str(n) for piece, r in zip(pieces, ranges) for n in (range(int(r[1]), int(r[2]) + 1) if r else [piece])]
        names = [f"{name}.{a}".lstrip(".") for name in names for a in alternatives]
    return names


NAMES = {
    "layers and siblings": [f"model.layers.{i}.self_attn.{p}_proj" for i in range(48) for p in "qkvo"],
    "experts apart": [f"layers.{i}.mlp.experts.{e}.{p}.weight" for i in range(1, 5) for e in range(6) for p in ("up", "down")],
    "some layers": [f"h.{i}.mlp.fc" for i in (0, 1, 2, 5, 9, 10)],
    "a layer that lacks one": [f"layers.{i}.{p}" for i in range(4) for p in ("q_norm", "k_norm") if (i, p) != (2, "k_norm")],
    "two depths": ["lm_head.weight", *(f"model.layers.{i}.norm.weight" for i in range(3)), "model.norm.weight", "embed.weight"],
    "of a Sequential": ["0", "1", "2", "4.weight", "4.bias"],
    "digits in a word, leading zeros": ["layer1.0.conv", "layer1.1.conv", "layer2.0.conv", "x.01", "x.1"],
    "fx nodes": ["dequantize", "dequantize_1", "dequantize_2"],
    "one, and nothing": ["model.norm"],
}


@pytest.mark.parametrize("case", NAMES)
def test_groups_stand_for_exactly_their_names(case):
    names = NAMES[case]
    groups = _text.group_names(names)
    assert sorted(name for text, _ in groups for name in expanded(text)) == sorted(names)
    assert [count for _, count in groups] == [len(expanded(text)) for text, _ in groups]
    assert _text.group_names([*names, *names]) == groups, "a name that occurs twice is one name"


def test_groups_read_as_this():
    assert [text for text, _ in _text.group_names(NAMES["layers and siblings"])] == ["model.layers.0-47.self_attn.{q_proj,k_proj,v_proj,o_proj}"]
    assert [text for text, _ in _text.group_names(NAMES["experts apart"])] == ["layers.1-4.mlp.experts.0-5.{up,down}.weight"]
    assert _text.join_names(NAMES["some layers"]) == "h.{0-2,5,9-10}.mlp.fc"
    assert _text.join_names(NAMES["a layer that lacks one"]) == "layers.0-3.q_norm, layers.{0-1,3}.k_norm"
    assert _text.join_names(NAMES["fx nodes"], 2) == "dequantize, dequantize_1, ... (1 more)"
    assert _text.join_names(f"h.{i}" for i in range(0, 40, 2)) == "h.{0,2,4,6,8,10,... 20 in all}"
    assert _text.join_names([]) == ""


def test_texts_that_differ_in_numbers_are_one():
    texts = [f"model.layers.{i}.mlp: {i + 3} of 128 fp4 experts, error 0.{9 - i}" for i in (0, 1, 4)]
    assert _text.merge_alike([*texts, "another 5"]) == {
        "model.layers.{0-1,4}.mlp: 3-7 of 128 fp4 experts, error 0.5-0.9": texts,
        "another 5": ["another 5"],
    }


# --- paragraphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 57, 80, 120])
def test_wrapped_text_keeps_every_character_but_spaces(width):
    text = f"note: {_text.join_names(n for names in NAMES.values() for n in names)}: 0.1234567 of 99.5 % " + "x" * 130 + " 12,345.678," * 12
    lines = _text.wrap(text, width, "  note ", "        ")
    assert max(map(len, lines)) <= width and len(lines) > 3
    assert "".join("".join(lines).split()) == "".join(("note" + text).split())
    numbers = re.compile(r"(?<![\w.-])\d[\d.]*\d(?![\w.-])")
    assert [n for line in lines for n in numbers.findall(line)] == numbers.findall(text), "no number is cut"


def test_the_width_is_the_terminals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "103")
    assert _text.terminal_width() == 103
    monkeypatch.setenv("COLUMNS", "7")
    assert _text.terminal_width() == 40
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))  # a pipe, or no output at all
    assert _text.terminal_width() == 80


# --- reports -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3_30b():
    """The modules of Qwen3-30B-A3B, 48 layers, on the meta device."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, head_dim=128)
    config = transformers.Qwen3MoeConfig(**sizes, num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8)
    with torch.device("meta"):
        return transformers.Qwen3MoeForCausalLM(config)


def report_of(model: nn.Module) -> Report:
    """A report as if ``model`` had been quantized, every layer with notes and an error of its own."""
    plan = make_plan(model)
    weights = {t.name: t.module.weight for t in plan.targets}
    weights |= {f"{e.name}.{p}": e.stack(p) for e in plan.experts for p in e.spec.parameters[:2]}
    layers = []
    for i, (name, w) in enumerate(weights.items()):
        notes = ("rows of one weight, one call where they read one input: q_proj/k_proj/v_proj",) if name[-6:] in ("q_proj", "k_proj", "v_proj") else ()
        notes += (f"{i % 60 + 1} of 128 experts saw fewer than 64 calibration tokens (3 saw {i % 7}): other tokens stood in",) if "experts" in name else ()
        layers.append(LayerReport(name, tuple(w.shape), w.numel(), 2 * w.numel(), w.numel() * 9 // 16, 0.05 + i / 9999, notes))
    uncovered = [Skipped(f"model.layers.{i}.other.weight", 4096, f"shares its weight with model.layers.{i - 1}.other") for i in range(1, 48)]
    warnings = [f"{layer.name}: relative error {0.5 + i / 999:.2f}. Single weights are far larger." for i, layer in enumerate(layers[::3])]
    before = sum(2 * p.numel() for p in model.parameters())
    config = "2:4-sparse NVFP4, pruning=sparsegpt, scale_search=activation, prefill=auto"
    return Report(layers, plan.skipped, uncovered, before, sum(i.bytes_after for i in layers), config, ["a remark " * 20], 0.1, warnings)


@pytest.mark.parametrize("width", [80, 120])
def test_a_report_fits(qwen3_30b, width, monkeypatch):
    report = report_of(qwen3_30b)
    lines = report.text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 60, "repeated layers are grouped"
    monkeypatch.setenv("COLUMNS", str(width))
    assert str(report).splitlines() == lines


def test_a_report_loses_nothing(qwen3_30b):
    report = report_of(qwen3_30b)
    text = " ".join(report.text(80).split())
    assert "model.layers.0-47.mlp.gate.weight" in text
    assert "shares its weight with model.layers.0-46.other: model.layers.1-47.other.weight" in text
    assert "!! model.layers.{0,3,6" in text and "in all}.self_attn.q_proj: relative error 0.50-" in text
    assert "1-60 of 128 experts saw fewer than 64 calibration tokens" in text
    assert len(report.layers) == 48 * 6 and len({layer.name for layer in report.layers}) == 48 * 6
    assert {s.name for s in report.skipped} >= {f"model.layers.{i}.mlp.gate.weight" for i in range(48)}


def test_a_report_reads_as_this():
    layers = [LayerReport(f"layers.{i}.{p}", (64, 64), 4096, 8192, 2308, 0.08 + i / 100, ("a note",)) for i in range(3) for p in ("up", "down")]
    skipped = [Skipped(f"layers.{i}.norm.weight", 64, "vectors (norms, biases): no matrix product") for i in range(3)]
    report = Report(layers, [*skipped, Skipped("embed.weight", 2048, "embedding: a lookup, no matrix product")], [], 53000, 17000, "NVFP4")
    assert_expected_inline(
        report.text(72),
        """\
fp4_inductor report (NVFP4)
  quantized       6 layers   24.6 k weights  49.2 kB -> 13.8 kB
  whole model                               53.0 kB -> 17.0 kB (3.12x
        smaller)
  coverage   100.00 % of linear and expert weights outside the skip list
  kept in high precision
       2.0 k in   1: embedding: a lookup, no matrix product:
            embed.weight
         192 in   3: vectors (norms, biases): no matrix product:
            layers.0-2.norm.weight
  largest relative errors
    0.1000  layers.2.up [64, 64]
    0.1000  layers.2.down [64, 64]
    0.0900  layers.1.up [64, 64]
    0.0900  layers.1.down [64, 64]
    0.0800  layers.0.up [64, 64]
  note: a note: layers.0-2.{up,down}""",
    )


# --- explanations ------------------------------------------------------------------------------------------------


def some_rows(layers: int = 3) -> list[ExplainRow]:
    refused = (("fast", "K = 8"), ("faster", "K = 8"), ("fastest", "no nvcc"))
    kind = ("bfloat16", "mid", "triton_mid", "guard", ("silu",), refused)
    rows = [ExplainRow("fp4.linear", f"layers.{i}.{p}", "s0", 128, 64, *kind, batch="the tile follows M") for i in range(layers) for p in ("up", "gate")]
    return [*rows, ExplainRow("fp4.linear", "head", "1", 9, 64, "bfloat16", "gemv", "triton_gemv", "proven", (), (("fast", "K = 8"),), "a remark")]


def test_the_table():
    """Equal calls are one line with their modules, below it if the line is too long; "not taken" is counted."""
    explanation = Explanation(some_rows(), {"dequantize_mm": 2}, [Missed("dequantize", "[8, 64, 64]", "why"), Missed("dequantize_1", "[8, 64, 64]", "why")])
    assert_expected_inline(
        explanation.text(120),
        """\
calls  op           M    N   K  dtype     regime  kernel       decision  epilogue  modules
    6  fp4.linear  s0  128  64  bfloat16  mid     triton_mid   guard     silu      layers.0-2.{up,gate}
    1  fp4.linear   1    9  64  bfloat16  gemv    triton_gemv  proven    -         head
note: a remark
batch: triton_mid: the tile follows M
not taken: 3 kernels, 2 reasons: print(explanation.not_taken())
patterns: dequantize_mm x2
left dense: 2 weights [8, 64, 64] (dequantize, dequantize_1) are dequantized: why""",
    )
    assert_expected_inline(
        explanation.text(60),
        """\
calls  op           M    N   K  regime  kernel
    6  fp4.linear  s0  128  64  mid     triton_mid
       layers.0-2.{up,gate}
       epilogue: silu, dtype: bfloat16, decision: guard
    1  fp4.linear   1    9  64  gemv    triton_gemv
       head
       dtype: bfloat16, decision: proven
note: a remark
batch: triton_mid: the tile follows M
not taken: 3 kernels, 2 reasons:
    print(explanation.not_taken())
patterns: dequantize_mm x2
left dense: 2 weights [8, 64, 64] (dequantize, dequantize_1)
    are dequantized: why""",
    )
    assert str(Explanation([], {}, explanation.missed[:1])).endswith("left dense: dequantize [8, 64, 64] is dequantized: why")


def test_what_was_not_taken_is_told_on_request():
    explanation = Explanation(some_rows())
    assert_expected_inline(
        explanation.not_taken(80),
        """\
not taken: K = 8: fast (7), faster (6)
not taken: no nvcc: fastest (6)
In brackets: the calls that a kernel was not taken for.""",
    )
    assert Explanation([]).not_taken() == ""
    assert [len(row.refused) for row in explanation.rows] == [3] * 6 + [1], "the rows keep each refusal"


@pytest.mark.parametrize("width", [80, 120])
def test_an_explanation_fits(width, monkeypatch):
    """Names of a mixture of experts, the longest names of ops and kernels, symbolic M."""
    kinds = [("fp4.linear_siblings", "self_attn.q_proj"), ("fp4.quantize_glu_rows_fp8", "mlp.experts"), ("fp4.linear", "self_attn.o_proj")]
    rows = []
    for i in range(48):
        for m, (op, name) in zip(("s27*s53", "Min(4096, s27*s53)", "1"), kinds, strict=True):
            refused = tuple((f"cuda_sparse_wide_fp8_{k}", f"layer {i % 3}: K = 2880 is no multiple of {k}, which this kernel's tiles need") for k in (64, 256))
            row = ExplainRow(op, f"model.layers.{i}.{name}", m, 151936, 14336, "bfloat16", "large_nvfp4", "cuda_sparse_wide_fp8", "runtime", ("silu", "mul"))
            rows.append(ExplainRow(**{**vars(row), "refused": refused, "note": f"remark {i % 3} " * 12, "batch": "summed in another order " * 5}))
    missed = [Missed(f"dequantize_default_{i}", "[128, 1536, 2048]", "the product is used outside of the layer, too") for i in range(48)]
    explanation = Explanation(rows, {f"pattern_number_{i}": i for i in range(12)}, missed)
    lines = explanation.text(width).splitlines()
    assert max(map(len, [*lines, *explanation.not_taken(width).splitlines()])) <= width
    assert len(lines) < 60 and not any(line.startswith("not taken: cuda") for line in lines)
    assert "model.layers.{0,3,6,9,12,15,... 16 in all}.self_attn.o_proj" in "".join(line.strip() for line in lines)
    assert len({row.module for row in explanation.rows}) == 48 * 3
    monkeypatch.setenv("COLUMNS", str(width))
    assert str(explanation).splitlines() == lines


# --- errors ------------------------------------------------------------------------------------------------------


def refusal(model: nn.Module, **options) -> errors.FP4Error:
    with pytest.raises(errors.FP4Error) as caught:
        fp4_inductor.quantize_model(model, progress=False, **options)
    return caught.value


def test_a_preflight_says_a_remedy_once(qwen3_30b):
    error = refusal(qwen3_30b)
    assert_expected_inline(
        str(error),
        """\
288 layers cannot be quantized; nothing was changed:
  - model.layers.0-47.self_attn.{q_proj,k_proj,v_proj,o_proj}.weight, model.layers.0-47.mlp.experts.{gate_up_proj,down_proj}: each is on the meta device; got meta; accepted: materialised weights. Load the weights first (from_pretrained, to_empty + load_state_dict).
got 288 problems; accepted: none. Do what each line says, or name the layers in ignore=[...].""",  # noqa: E501
    )
    assert len(error.problems) == 288 and all(isinstance(p, errors.DeviceError) for p in error.problems)
    assert {p.name for p in error.problems} >= {f"model.layers.{i}.mlp.experts.down_proj" for i in range(48)}


class Block(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


def blocks(n: int = 12) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(n))})


def test_values_stand_beside_the_layers_that_have_them():
    model = blocks()
    for i, block in enumerate(model["layers"]):
        block.up.weight.data[0, : 1 + i % 2] = float("nan")
    error = refusal(model)
    assert type(error) is errors.NonFiniteError and len(error.problems) == 12
    odd, even = "layers.{0,2,4,6,8,10}.up.weight", "layers.{1,3,5,7,9,11}.up.weight"
    assert f"  - 12 layers: each holds NaN or Inf; got 1 of 2048 elements ({odd}), 2 of 2048 elements ({even}); accepted: finite values. Repair" in str(error)
    assert str(error).count("Repair the weight") == 1


def test_many_values_are_counted():
    model = blocks()
    for i, block in enumerate(model["layers"]):
        block.up.weight.data[0, : 1 + i] = float("nan")
    assert "layers.0-11.up.weight: each holds NaN or Inf; got 1 of 2048 elements, 2 of 2048" in str(refusal(model))
    assert "4 of 2048 elements, ... (12 in all); accepted" in str(refusal(model))


def test_kinds_of_problems_stay_apart():
    model = blocks()
    for block in model["layers"][:3]:
        block.down.register_buffer("mask", torch.ones(3))
    model["layers"][5].up.weight.data[0, 0] = float("inf")
    lines = [line for line in str(refusal(model)).splitlines() if line.startswith("  - ")]
    assert [line.split(";")[0] for line in lines] == [
        "  - layers.0-2.down: each holds more than a weight and a bias",
        "  - layers.5.up.weight holds NaN or Inf",
    ]


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_coverage_is_told_by_reason():
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 32), "own": Own(32, 32)}) for _ in range(30))})
    error = refusal(model)
    assert type(error) is errors.CoverageError
    [line] = [line for line in str(error).splitlines() if line.startswith("  - ")]
    assert line.startswith("  - layers.0-29.own.weight (30720 weights): Own")
    report = fp4_inductor.report(fp4_inductor.quantize_model(model, strict=False, progress=False))
    assert [s.name for s in report.uncovered] == [f"layers.{i}.own.weight" for i in range(30)]
    assert report.text(80).count("layers.0-29.own.weight") == 1


def test_a_checkpoint_of_another_model_groups_what_differs(tmp_path):
    fp4_inductor.save(fp4_inductor.quantize_model(blocks(30), progress=False), tmp_path)
    with pytest.raises(errors.CheckpointError) as caught:
        fp4_inductor.load(blocks(25), tmp_path)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert lines == ["  - layers.25-29.{down,up}: the model has no such module"]
    assert "got 10 differences" in str(caught.value)


def test_calibration_that_misses_layers_groups_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.layers = nn.Linear(32, 32), blocks(30)["layers"]

        def forward(self, x):
            return self.used(x)

    config = fp4_inductor.NVFP4Config("activation", calibration=[torch.randn(4, 32)])
    error = refusal(Model(), config=config)
    assert type(error) is errors.CalibrationError and "got layers.0-29.{up,down}; accepted" in str(error)

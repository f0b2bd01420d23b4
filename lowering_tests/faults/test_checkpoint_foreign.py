"""Damaged, lying and hostile checkpoints of other libraries: a typed error that names the tensor, never a crash, never another structure."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.checkpoint.gguf_file import open_gguf
from fp4_inductor.checkpoint.safetensors_file import read_header
from fp4_inductor.checkpoint.shards import INDEX, Shards, open_shards
from fp4_inductor.integrations.pretrained.load import take_quantization_config
from lowering_tests.faults.mutations import header, mutate, put_header
from lowering_tests.foreign import COMPRESSED, MIXTRAL, MODELOPT, TORCHAO, write_gpt_oss, write_mixed, write_mxfp4_pack
from lowering_tests.models.conftest import build

MUTATIONS = int(os.environ.get("FP4_MUTATIONS", "900"))  # 10^5 by hand: FP4_MUTATIONS=100000
SEED = os.environ.get("FP4_MUTATIONS_SEED", "")
KINDS = 9  # kinds of files below
FIXTURES = {"modelopt": MODELOPT, "compressed": COMPRESSED, "torchao": TORCHAO, "mixtral": MIXTRAL}
FILE = "model.safetensors"
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def _quiet():
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def copied(tmp_path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(FIXTURES[kind], tmp_path / kind))


def refused(directory: Path, match: str, **options) -> errors.FP4Error:
    with pytest.raises(errors.CheckpointError, match=match) as caught:
        fp4_inductor.load_pretrained(directory, **options)
    assert None not in (caught.value.value, caught.value.limit, caught.value.remedy)
    return caught.value


def edit_header(directory: Path, edit: Callable[[dict], None]) -> None:
    fields, data = header(directory / FILE)
    edit(fields)
    put_header(directory / FILE, fields, data)


def edit_config(directory: Path, edit: Callable[[dict], None]) -> None:
    config = json.loads((directory / "config.json").read_text())
    edit(config)
    (directory / "config.json").write_text(json.dumps(config))


def edit_tensors(directory: Path, edit: Callable[[dict], None]) -> None:
    tensors = load_file(directory / FILE)
    with open(directory / FILE, "rb") as file:
        metadata = json.loads(file.read(struct.unpack("<Q", file.read(8))[0])).get("__metadata__")
    edit(tensors)
    save_file(tensors, directory / FILE, metadata=metadata)


def shard(directory: Path) -> dict[str, str]:
    """The one file as two with an index; returns the weight_map."""
    tensors = load_file(directory / FILE)
    (directory / FILE).unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    put_index(directory, weight_map)
    return weight_map


def put_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# --- files and headers -----------------------------------------------------------------------------------------------


def test_files_that_are_not_there(copied, tmp_path):
    directory = copied("modelopt")
    (directory / FILE).rename(directory / "pytorch_model.bin")
    refused(directory, "no safetensors weights")
    (directory / "config.json").unlink()
    refused(directory, r"config\.json cannot be read")


@pytest.mark.parametrize("kind", ["modelopt", "torchao"])
def test_truncated_and_lying_headers(copied, kind):
    path = copied(kind) / FILE
    data = path.read_bytes()
    for size in (0, 7, 8, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        refused(path.parent, r"too short|longer|within|JSON")
    for length in (0, 1, 2**31, 2**63, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", length) + data[8:])
        refused(path.parent, "longer|JSON")
    path.write_bytes(data + b"\0")
    refused(path.parent, "after the last tensor")


def test_overlap_and_sizes(copied):
    directory = copied("modelopt")
    edit_header(directory, lambda h: h[f"{UP}.weight"].update(shape=[128, 33]))
    refused(directory, rf"{UP}\.weight: dtype and shape do not fit")


# --- tensors ---------------------------------------------------------------------------------------------------------

PARTS = {
    "modelopt": [f"{UP}.weight", f"{UP}.weight_scale"],
    "compressed": [f"{UP}.weight_scale", f"{UP}.weight_global_scale"],
    "torchao": [f"{UP}._weight_qdata", f"{UP}._weight_scale", f"{UP}._weight_per_tensor_scale"],
    "mixtral": ["model.layers.1.block_sparse_moe.experts.2.w3.weight_scale", "model.layers.1.self_attn.q_proj.weight"],
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in PARTS.items() for n in names])
def test_a_missing_part_is_named(copied, kind, name):
    directory = copied(kind)
    edit_tensors(directory, lambda t: t.pop(name))
    refused(directory, name.replace(".", r"\."))
    refused(directory, name.replace(".", r"\."), strict=False)


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("modelopt", f"{UP}.weight", {"shape": [64, 64]}),
        ("modelopt", f"{UP}.weight", {"dtype": "I8"}),
        ("modelopt", f"{UP}.weight_scale", {"shape": [64, 8]}),
        ("modelopt", f"{UP}.weight_scale", {"dtype": "F8_E5M2"}),
        ("modelopt", f"{UP}.weight_scale", {"dtype": "U8"}),
        ("modelopt", f"{UP}.weight_scale_2", {"dtype": "I32"}),
        ("modelopt", f"{UP}.input_scale", {"dtype": "U32"}),
        ("compressed", f"{UP}.weight_packed", {"shape": [64, 64]}),
        ("compressed", f"{UP}.weight_global_scale", {"dtype": "I32"}),
        ("torchao", f"{UP}._weight_scale", {"shape": [16, 32]}),
        ("torchao", f"{UP}._weight_qdata", {"shape": [4096]}),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight", {"shape": [48, 64]}),
    ],
)
def test_wrong_shapes_and_dtypes_of_parts(copied, kind, name, change):
    directory = copied(kind)
    edit_header(directory, lambda h: h[name].update(change))
    refused(directory, rf"{name.rpartition('.')[0]}.*(wrong shape or dtype|packed matrix|unknown dtype)")


def test_missing_and_unknown_tensors_are_named(copied):
    directory = copied("modelopt")
    edit_tensors(directory, lambda t: t.update({"model.ghost.weight": t.pop("model.norm.weight")}))
    error = refused(directory, r"model\.norm\.weight: not in the checkpoint")
    assert "model.ghost.weight: not in the model" in str(error)
    model = fp4_inductor.load_pretrained(directory, strict=False)
    assert any("model.ghost.weight" in note for note in fp4_inductor.report(model).notes)


def test_dense_tensors_that_disagree_with_the_config(copied):
    directory = copied("modelopt")
    edit_header(directory, lambda h: h["lm_head.weight"].update(shape=[64, 128]))
    refused(directory, r"lm_head\.weight: shape \(64, 128\) in the checkpoint, \(128, 64\) in the model")


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 128), ("intermediate_size", 96), ("num_key_value_heads", 4), ("vocab_size", 256)])
def test_a_config_of_another_size(copied, field, value):
    directory = copied("modelopt")
    edit_config(directory, lambda c: c.update({field: value}))
    refused(directory, "in the checkpoint, .* in the model")


def test_a_config_with_other_layers(copied):
    directory = copied("modelopt")
    edit_config(directory, lambda c: c.update(num_hidden_layers=3))
    refused(directory, r"model\.layers\.2\.self_attn\.\{q_proj,k_proj,v_proj,o_proj\}\.weight.*: not in the checkpoint")
    edit_config(directory, lambda c: c.update(num_hidden_layers=1))
    refused(directory, r"model\.layers\.1\..*: not in the model")
    edit_config(directory, lambda c: c.update(num_hidden_layers=10**9))
    refused(directory, "num_hidden_layers")


def test_partial_experts(copied):
    directory = copied("mixtral")
    prefix = "model.layers.1.block_sparse_moe.experts"

    def without(names):
        shutil.copy(MIXTRAL / FILE, directory / FILE)
        edit_tensors(directory, lambda t: [t.pop(n) for n in list(t) if any(n.startswith(f"{prefix}.{m}.") for m in names)])

    without(["2.w3"])
    refused(directory, r"experts\.gate_up_proj cannot be put together.*experts\.2\.w3")
    without(["1"])
    refused(directory, r"experts\.1\.|\(3, 192, 64\) in the checkpoint, \(4, 192, 64\)")
    without(["3"])
    refused(directory, r"\(3, 192, 64\) in the checkpoint, \(4, 192, 64\) in the model")

    def one_dense(t):
        for part in ("weight_scale", "weight_scale_2", "input_scale"):
            t.pop(f"{prefix}.2.w2.{part}")
        t[f"{prefix}.2.w2.weight"] = torch.zeros(64, 96, dtype=torch.bfloat16)

    shutil.copy(MIXTRAL / FILE, directory / FILE)
    edit_tensors(directory, one_dense)
    refused(directory, r"experts\.down_proj is quantized in part only.*experts\.2\.w2")


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8])
@pytest.mark.parametrize(("kind", "name"), [("modelopt", f"{UP}.weight_scale"), ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale")])
def test_scales_that_are_nan_or_negative(copied, kind, name, byte):
    directory = copied(kind)
    data = bytearray((directory / FILE).read_bytes())
    data[read_header(directory / FILE).entries[name].start + 5] = byte
    (directory / FILE).write_bytes(data)
    refused(directory, rf"{name.removesuffix('_scale')} has a NaN or negative block scale")


GLOBALS = [("modelopt", f"{UP}.weight_scale_2"), ("compressed", f"{UP}.weight_global_scale"), ("modelopt", f"{UP}.input_scale")]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize(("kind", "name"), GLOBALS)
def test_bad_global_scales(copied, kind, name, value):
    directory = copied(kind)
    edit_tensors(directory, lambda t: t[name].fill_(value))
    refused(directory, r"up_proj\..*finite and positive")


# --- the index -------------------------------------------------------------------------------------------------------


OUTSIDE = ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", ".hidden.safetensors", "model.bin", "m.safetensors\0", 3, None]


@pytest.mark.parametrize("name", OUTSIDE)
def test_paths_that_leave_the_directory(copied, name):
    directory = copied("modelopt")
    weight_map = shard(directory)
    put_index(directory, weight_map | {f"{UP}.weight": name})
    refused(directory, "outside the checkpoint")


def test_a_lying_index(copied):
    directory = copied("modelopt")
    weight_map = shard(directory)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    name = f"{UP}.weight"
    put_index(directory, weight_map | {name: one if weight_map[name] == two else two})
    refused(directory, rf"{name} is not in")
    put_index(directory, {k: v for k, v in weight_map.items() if k != name})
    refused(directory, rf"misses tensors.*{name}")
    put_index(directory, weight_map | {"ghost": one})
    refused(directory, "ghost is not in")
    put_index(directory, [])
    refused(directory, "no weight_map")
    put_index(directory, weight_map | {"more": "model-00003-of-00002.safetensors"})
    refused(directory, "cannot be opened")


def test_one_name_in_two_shards(copied):
    directory = copied("modelopt")
    weight_map = shard(directory)
    name = next(n for n, f in weight_map.items() if f.startswith("model-00001"))
    second = directory / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {name: load_file(directory / "model-00001-of-00002.safetensors")[name]}, second, metadata={"format": "pt"})
    refused(directory, rf"{name} is in two shards")


# --- the quantization config -----------------------------------------------------------------------------------------


def mixed(q: dict, **kinds: object) -> None:
    q.update(quant_algo="MIXED_PRECISION", quantized_layers={name: {"quant_algo": kind} for name, kind in kinds.items()})


@pytest.mark.parametrize(
    ("kind", "edit", "match"),
    [
        ("modelopt", lambda q: q.update(quant_method="awq"), "in a format without a reader"),
        ("modelopt", lambda q: q.update(quant_algo="FP8"), "quant_algo.*FP8"),
        ("modelopt", lambda q: q.update(quant_algo=None), "quant_algo"),
        ("modelopt", lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=32), "group_size.*32"),
        ("modelopt", lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8), "8-bit float"),
        ("modelopt", lambda q: q.update(config_groups=[]), "config_groups"),
        ("modelopt", lambda q: q.update(quant_algo="MIXED_PRECISION"), "without quantized_layers"),
        ("modelopt", lambda q: mixed(q, a="W4A8_AWQ", b="NVFP4", c="W4A8_AWQ", d=3), r"quant_algo of 3 of 4 layers \(W4A8_AWQ: a, c; None: d\)"),
        ("modelopt", lambda q: mixed(q, **{UP: "FP8"}), rf"{UP}\.weight is not stored as quantized_layers says"),
        ("modelopt", lambda q: q.update(quant_algo="MIXED_PRECISION", quantized_layers={UP: {"quant_algo": "NVFP4", "group_size": 32}}), "group_size of .*32"),
        ("compressed", lambda q: q.update(quantization_status="frozen"), "quantization_status"),
        ("compressed", lambda q: q.update(config_groups={}), "config_groups"),
        ("compressed", lambda q: q["config_groups"]["group_0"].update(format="pack-quantized"), "weight format.*pack-quantized"),
        ("compressed", lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=128), "group_size.*128"),
        ("compressed", lambda q: q["config_groups"]["group_0"]["weights"].update(type="int"), "4-bit int"),
        ("compressed", lambda q: q.update(transform_config={"u": {}}), "transform_config"),
        ("torchao", lambda q: q.update(quant_type={"default": {"_type": "Int4WeightOnlyConfig"}}), "quant_type"),
        ("torchao", lambda q: q.update(quant_type="int4"), "quant_type"),
        ("compressed", lambda q: q.update(quant_method="modelopt", quant_algo="NVFP4"), "weight format"),
        ("compressed", lambda q: [q.clear(), q.update(quant_method="modelopt", quant_algo="NVFP4")], "no quantized weight was found"),
    ],
)
def test_unknown_variants(copied, kind, edit, match):
    directory = copied(kind)
    edit_config(directory, lambda c: edit(c["quantization_config"]))
    if "modelopt" in kind:
        (directory / "hf_quant_config.json").unlink()
    refused(directory, match)


def test_a_model_that_is_not_quantized(copied):
    directory = copied("modelopt")
    edit_config(directory, lambda c: c.pop("quantization_config"))
    (directory / "hf_quant_config.json").unlink()
    refused(directory, "not quantized")


def test_a_null_byte_in_the_ignore_list_is_no_matter(copied):
    """ModelOpt 0.47 writes such an entry for Nemotron-H."""
    directory = copied("modelopt")
    edit_config(directory, lambda c: c["quantization_config"]["ignore"].append("\0sentinel"))
    assert fp4_inductor.report(fp4_inductor.load_pretrained(directory)).coverage == 100.0


def test_no_pickle_and_no_remote_code(copied):
    directory = copied("modelopt")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    (directory / "modeling_evil.py").write_text("raise SystemExit('run')")
    edit_config(directory, lambda c: c.update(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}))
    fp4_inductor.load_pretrained(directory)


# --- mutations -------------------------------------------------------------------------------------------------------


def structure(model) -> list[tuple]:
    return [(n, t.dtype, tuple(t.shape)) for n, t in model.state_dict().items()] + [(n, type(m).__name__) for n, m in model.named_modules()]


def _written(kind: str, directory: Path) -> Path:
    """Formats without a fixture, written here."""
    if kind == "mixed":
        write_mixed(directory)
    elif kind == "fp4_inductor":
        fp4_inductor.load_pretrained(MIXTRAL).save_pretrained(directory)
    else:
        (write_gpt_oss if kind == "gpt_oss" else write_mxfp4_pack)(build({"gpt_oss": kind}.get(kind, "llama"), torch.bfloat16), directory)
    return directory


@pytest.mark.parametrize("kind", [*FIXTURES, "mixed", "fp4_inductor", "gpt_oss", "mxfp4_pack"])
def test_mutated_files(tmp_path, kind):
    """Refused with a typed error, or the same structure: another value is a legal value in formats without checksums.

    The plan is what proves a checkpoint: it is made for every mutation, on one skeleton; what it accepts is then loaded.
    """
    import transformers

    from fp4_inductor.integrations.pretrained.plan import make_load_plan

    rng = random.Random(kind + SEED)
    directory = FIXTURES.get(kind) or _written(kind, tmp_path / "written")
    pristine = {p.name: p.read_bytes() for p in directory.iterdir() if p.name in (FILE, "config.json")}
    want = structure(fp4_inductor.load_pretrained(directory))
    config = transformers.AutoConfig.from_pretrained(directory)
    source = take_quantization_config(config)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    before = structure(skeleton)
    refusals = typed = loads = 0
    work = tmp_path / "work"
    work.mkdir()
    each = MUTATIONS // KINDS
    for i in range(each):
        # config.json is transformers' to read: fewer of those, each a whole load.
        whole = i % 50 == 0
        for name, data in pristine.items():
            (work / name).write_bytes(data)
        (work / FILE).rename(work / "aside") if whole else (work / "config.json").unlink()
        changed = mutate(rng, work)
        if whole:
            (work / "aside").rename(work / FILE)
        else:
            (work / "config.json").write_bytes(pristine["config.json"])
        try:
            if not whole:
                make_load_plan(skeleton, open_shards(work), source, torch.bfloat16, True)
                if loads > each // 10:
                    continue
            loads += 1
            assert structure(fp4_inductor.load_pretrained(work)) == want or whole, changed
        except errors.FP4Error as error:
            refusals += 1
            typed += None not in (error.value, error.limit, error.remedy)
    assert structure(skeleton) == before
    assert typed == refusals > each * 0.4
    assert loads


def test_mutated_gguf(tmp_path):
    """As above: the header is a third of this file, and aimed at."""
    import transformers

    pytest.importorskip("gguf")
    from fp4_inductor.integrations.pretrained import gguf
    from fp4_inductor.integrations.pretrained.plan import make_load_plan
    from lowering_tests.gguf_files import write_gpt_oss as write

    rng = random.Random("gguf" + SEED)
    options = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 16}
    config = transformers.GptOssConfig(**options, num_attention_heads=2, num_key_value_heads=1, head_dim=32, layer_types=["full_attention"])
    write(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "good.gguf")
    pristine = (tmp_path / "good.gguf").read_bytes()
    header = open_gguf(tmp_path / "good.gguf")
    end = min(t.start for t in header.tensors.values())
    config = gguf.config_of(header)
    skeleton = gguf.skeleton(transformers.GptOssForCausalLM, config)

    def found(path: Path) -> list:
        weights, dense = gguf.match(open_gguf(path), skeleton, config)
        source = {"quant_method": "gguf", "found": weights, "dense": list(dense)}
        make_load_plan(skeleton, Shards(path.parent, {}, {}), source, torch.bfloat16, True)
        return sorted((n, w.shape, type(w).__name__) for n, w in weights.weights.items()) + sorted((n, t.shape) for n, t in dense.items())

    want, loaded = found(tmp_path / "good.gguf"), structure(fp4_inductor.load_pretrained(tmp_path / "good.gguf"))
    refusals = typed = loads = 0
    path = tmp_path / "work" / "m.gguf"
    path.parent.mkdir()
    each = MUTATIONS // KINDS
    for i in range(each):
        path.write_bytes(pristine)
        changed = mutate(rng, path.parent, end)
        try:
            assert found(path) == want, changed
            if i % 20 == 0:
                loads += 1
                assert structure(fp4_inductor.load_pretrained(path)) == loaded, changed
        except errors.FP4Error as error:
            refusals += 1
            typed += None not in (error.value, error.limit, error.remedy)
    assert typed == refusals > each * 0.4
    assert loads

"""Damaged, lying and hostile checkpoints: a typed error that says what is wrong, and a model that was not touched."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, errors
from fp4_inductor.checkpoint import manifest as mf
from fp4_inductor.checkpoint.safetensors_file import read_header
from lowering_tests.faults.mutations import header, mutate, put_header

MUTATIONS = int(os.environ.get("FP4_MUTATIONS", "400"))  # 10^5 by hand: FP4_MUTATIONS=100000
SEED = os.environ.get("FP4_MUTATIONS_SEED", "")
SHARD_1, SHARD_2 = "fp4_inductor-00001-of-00002.safetensors", "fp4_inductor-00002-of-00002.safetensors"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 32)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32, bias=False)
        self.head = nn.Linear(32, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))


def _write(directory: Path, limit: str) -> None:
    torch.manual_seed(0)
    fp4_inductor.save(fp4_inductor.quantize_model(Net().bfloat16(), progress=False), directory, max_shard_size=limit)


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    out = {}
    for kind, limit in (("single", "5GB"), ("sharded", "1500B")):
        out[kind] = tmp_path_factory.mktemp(kind)
        _write(out[kind], limit)
    assert (out["sharded"] / SHARD_2).exists()
    assert not list(out["sharded"].glob("*-of-00003*"))
    return out


@pytest.fixture
def single(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["single"], tmp_path / "c"))


@pytest.fixture
def sharded(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals["sharded"], tmp_path / "c"))


def _state(model: nn.Module) -> list[tuple]:
    return [(n, id(t), t.data_ptr(), t.dtype, tuple(t.shape)) for n, t in model.state_dict(keep_vars=True).items()] + [
        (n, id(m), type(m)) for n, m in model.named_modules()
    ]


def refused(directory: Path, match: str, model: nn.Module | None = None, **options) -> errors.CheckpointError:
    model = Net() if model is None else model
    before = _state(model)
    with pytest.raises(errors.CheckpointError, match=match) as caught:
        fp4_inductor.load(model, directory, **options)
    assert _state(model) == before
    assert None not in (caught.value.value, caught.value.limit, caught.value.remedy)
    return caught.value


def sums(raw: bytes, n: int) -> dict[str, int]:
    """What save() would record for this file; a header that cannot be read is refused before anyone looks at the sums."""
    try:
        fields = json.loads(raw[8 : 8 + n])
        return {k: zlib.crc32(raw[8 + n :][slice(*v["data_offsets"])]) for k, v in fields.items() if k != "__metadata__"}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, IndexError):
        return {}


def put_manifest(directory: Path, edit: Callable[[dict], None] = lambda body: None, resign: bool = True) -> None:
    """Edit the manifest; ``resign`` makes sizes, digests and the checksum right again, as an attacker would."""
    path = directory / mf.FILE
    body = json.loads(path.read_text())
    if resign:
        for name in [n for n in body["files"] if (directory / n).is_file()]:
            raw = (directory / name).read_bytes()
            body["files"][name]["bytes"] = len(raw)
            n = min(struct.unpack("<Q", raw[:8])[0], len(raw)) if len(raw) >= 8 else 0
            body["files"][name]["header_sha256"] = hashlib.sha256(raw[8 : 8 + n]).hexdigest()
            body["files"][name]["crc32"] = sums(raw, n)
    edit(body)
    if resign:
        body["checksum"] = mf.checksum(body)
    path.write_text(json.dumps(body))


def edit_header(directory: Path, edit: Callable[[dict], None], file: str = mf.SINGLE) -> None:
    fields, data = header(directory / file)
    edit(fields)
    put_header(directory / file, fields, data)
    put_manifest(directory)


# --- files that are not there or not whole -------------------------------------------------------------------------


def test_no_checkpoint(tmp_path):
    refused(tmp_path, "cannot be read")
    refused(tmp_path / "nowhere", "no such folder")
    (tmp_path / mf.FILE).mkdir()
    refused(tmp_path, "cannot be read")


@pytest.mark.parametrize("missing", [SHARD_1, SHARD_2, mf.INDEX])
def test_a_file_is_missing(sharded, missing):
    (sharded / missing).unlink()
    refused(sharded, "cannot be")


def test_every_truncation_is_refused(single):
    path = single / mf.SINGLE
    raw, manifest = path.read_bytes(), (single / mf.FILE).read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        (single / mf.FILE).write_bytes(manifest)
        refused(single, r"too short|longer|another size|within|Is the checkpoint")
        put_manifest(single)  # also when the manifest was made to fit
        refused(single, r"too short|longer|within|JSON|bytes is not valid")


def test_appended_bytes(single):
    path = single / mf.SINGLE
    path.write_bytes(path.read_bytes() + b"\0")
    refused(single, "after the last tensor")
    put_manifest(single)
    refused(single, "after the last tensor")


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001])
def test_a_lying_header_length(single, length):
    path = single / mf.SINGLE
    raw = path.read_bytes()
    path.write_bytes(struct.pack("<Q", length) + raw[8:])
    refused(single, r"longer|JSON|altered")
    put_manifest(single)
    refused(single, r"longer|JSON")


@pytest.mark.parametrize(
    "text", [b"[]", b"null", b"{", b"\xff\xfe{}", b'{"a": 1e999}', b"[" * 100_000, b'{"a":' * 50_000, b"{}" + b" " * 10 + b"x", b'"' + b"9" * 5000]
)
def test_headers_that_are_no_json_object(single, text):
    put_header(single / mf.SINGLE, text, b"")
    put_manifest(single)
    refused(single, r"JSON|described")


# --- headers that lie ----------------------------------------------------------------------------------------------


def test_an_altered_header_is_noticed(single):
    path = single / mf.SINGLE
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"BF16")] = ord("I")
    path.write_bytes(raw)
    refused(single, r"dtype|altered")


@pytest.mark.parametrize("shape", [[48, -16], [48, 16.0], [48, True], "48", None, [[48], 16], [48, "16"]])
def test_invalid_shapes(single, shape):
    edit_header(single, lambda h: h["up.qdata"].update(shape=shape))
    refused(single, r"up\.qdata.*invalid shape")


@pytest.mark.parametrize("offsets", [[-1, 3], [3, 1], [0], [0, 1, 2], [0, 2**70], [0, 10**9], "0", [0.0, 768.0], [None, 1]])
def test_invalid_offsets(single, offsets):
    edit_header(single, lambda h: h["up.qdata"].update(data_offsets=offsets))
    refused(single, r"up\.qdata.*data_offsets")


def test_sizes_that_do_not_fit_their_bytes(single):
    edit_header(single, lambda h: h["up.qdata"].update(shape=[48, 17]))
    refused(single, r"up\.qdata: dtype and shape do not fit")
    edit_header(single, lambda h: h["up.qdata"].update(shape=[2**40, 2**40]))
    refused(single, r"up\.qdata: dtype and shape do not fit")


def test_overlapping_and_gapped_tensors(single):
    original = (single / mf.SINGLE).read_bytes()
    fields, data = header(single / mf.SINGLE)
    a = fields["up.qdata"]["data_offsets"]
    edit_header(single, lambda h: h["down.qdata"].update(data_offsets=[a[0], a[0] + 768]))
    refused(single, r"overlaps|hole")
    (single / mf.SINGLE).write_bytes(original)
    fields["ghost"] = {"dtype": "U8", "shape": [0], "data_offsets": [3, 3]}
    put_header(single / mf.SINGLE, fields, data)
    put_manifest(single)
    refused(single, r"overlaps|hole")


def test_a_name_twice_in_one_header(single):
    fields, data = header(single / mf.SINGLE)
    text = json.dumps(fields)
    again = '"up.bias": ' + json.dumps(fields["up.bias"])
    put_header(single / mf.SINGLE, (text[:-1] + ", " + again + "}").encode(), data)
    put_manifest(single)
    refused(single, "twice")


@pytest.mark.parametrize("dtype", ["F4", "f32", "", 3, None, "F8_E8M0", ["U8"]])
def test_unknown_dtypes(single, dtype):
    edit_header(single, lambda h: h["up.qdata"].update(dtype=dtype))
    refused(single, r"up\.qdata.*unknown dtype")


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("up.qdata", {"dtype": "I8"}, r"up\.qdata has the wrong shape or dtype"),
        ("up.qdata", {"shape": [16, 48]}, r"up\.qdata has the wrong shape or dtype"),
        ("up.scale", {"dtype": "U8"}, r"up\.scale has the wrong shape or dtype"),
        ("up.scale", {"dtype": "F8_E5M2"}, r"up\.scale has the wrong shape or dtype"),
        ("up.scale", {"shape": [96]}, r"up\.scale has the wrong shape or dtype"),
        ("up.global_scale", {"dtype": "I32"}, r"up\.global_scale has the wrong shape or dtype"),
        ("up.global_scale", {"shape": [1]}, r"up\.global_scale has the wrong shape or dtype"),
        ("up.bias", {"shape": [4, 12]}, r"up\.bias has the wrong shape or dtype"),
        ("up.bias", {"dtype": "I16"}, r"up\.bias has the wrong shape or dtype"),
        ("embed.weight", {"shape": [32, 8]}, r"embed\.weight.*: shape \(32, 8\) in the checkpoint, \(8, 32\) in the model"),
        ("embed.weight", {"dtype": "U16"}, r"embed\.weight.*: torch\.uint16 in the checkpoint, torch\.float32 in the model"),
        ("steps", {"dtype": "F64"}, r"steps: torch\.float64 in the checkpoint, torch\.int64 in the model"),
        ("steps", {"shape": [2, 1]}, r"steps: shape"),
    ],
)
def test_wrong_shapes_and_dtypes(single, name, change, match):
    edit_header(single, lambda h: h[name].update(change))
    refused(single, match)
    refused(single, match, strict=False)


@pytest.mark.parametrize("name", ["up.qdata", "up.scale", "up.global_scale", "up.bias"])
def test_a_missing_part_is_named(single, name):
    edit_header(single, lambda h: h.update({name + "x": h.pop(name)}))
    refused(single, name.replace(".", r"\."))
    refused(single, name.replace(".", r"\."), strict=False)


def test_missing_and_extra_tensors_are_named(single):
    edit_header(single, lambda h: h.update({"stepz": h.pop("steps")}))
    error = refused(single, r"steps: not in the checkpoint")
    assert "stepz: not in the model" in str(error)


# --- values --------------------------------------------------------------------------------------------------------


def _poke(directory: Path, name: str, data: bytes, offset: int = 0, resign: bool = True) -> None:
    start = read_header(directory / mf.SINGLE).entries[name].start + offset
    raw = bytearray((directory / mf.SINGLE).read_bytes())
    raw[start : start + len(data)] = data
    (directory / mf.SINGLE).write_bytes(raw)
    if resign:
        put_manifest(directory)


@pytest.mark.parametrize("name", ["up.qdata", "down.scale", "up.global_scale", "up.bias", "steps"])
def test_a_flipped_bit_in_a_tensor_is_seen(single, name):
    """A flipped bit of a code is another legal code: only the checksum of the data can tell."""
    entry = read_header(single / mf.SINGLE).entries[name]
    raw = (single / mf.SINGLE).read_bytes()
    for at in {entry.start, entry.end - 1}:
        for bit in (0, 7):
            _poke(single, name, bytes([raw[at] ^ 1 << bit]), at - entry.start, resign=False)
            refused(single, r"was altered since it was saved.*CRC-32")
            (single / mf.SINGLE).write_bytes(raw)
    fp4_inductor.load(Net(), single)


def _as_version_1(body: dict) -> None:
    body["version"] = 1
    for layer in body["layers"].values():
        del layer["input_scale"]


def test_version_1_is_read_and_checked(single):
    """It has one sum over the data of a file, and knows no input scales."""
    raw = (single / mf.SINGLE).read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    want = _bits(fp4_inductor.load(Net(), single))

    def edit(body: dict) -> None:
        _as_version_1(body)
        del body["files"][mf.SINGLE]["crc32"]
        body["files"][mf.SINGLE]["data_crc32"] = zlib.crc32(raw[8 + n :])

    put_manifest(single, edit)
    assert _bits(fp4_inductor.load(Net(), single)) == want
    _poke(single, "up.qdata", bytes([raw[read_header(single / mf.SINGLE).entries["up.qdata"].start] ^ 1]), resign=False)
    refused(single, r"tensors were altered since they were saved.*CRC-32")


def test_version_1_with_sums_of_version_2(single):
    put_manifest(single, _as_version_1)
    refused(single, "files.*is not valid")


def test_input_scales_are_kept_and_checked(tmp_path):
    model = fp4_inductor.quantize_model(Net().bfloat16(), progress=False)
    model.up.input_scale = torch.tensor(0.0125)
    fp4_inductor.save(model, tmp_path)
    loaded = fp4_inductor.load(Net(), tmp_path)
    assert loaded.down.input_scale is None
    assert torch.equal(loaded.up.input_scale, model.up.input_scale)
    assert loaded.half().up.input_scale.dtype == torch.float32
    _poke(tmp_path, "up.input_scale", struct.pack("<f", -1.0))
    refused(tmp_path, r"up\.input_scale must be finite and positive")


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8])
def test_scales_that_are_nan_or_negative(single, byte):
    _poke(single, "down.scale", bytes([byte]))
    refused(single, r"down\.scale holds a NaN or negative scale")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, -float("inf")])
def test_bad_global_scales(single, value):
    _poke(single, "up.global_scale", struct.pack("<f", value))
    refused(single, r"up\.global_scale must be finite and positive")


def test_every_good_scale_byte_is_accepted(single):
    for byte in range(0x7F):
        _poke(single, "down.scale", bytes([byte]))
        assert int(fp4_inductor.load(Net(), single).down.scale.view(torch.uint8)[0, 0]) == byte


# --- index and manifest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../fp4_inductor.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "model.safetensors", "fp4_inductor.safetensors\0", 3, None]
)
def test_paths_that_leave_the_directory(sharded, name):
    index = json.loads((sharded / mf.INDEX).read_text())
    index["weight_map"]["up.qdata"] = name
    (sharded / mf.INDEX).write_text(json.dumps(index))
    refused(sharded, "outside the checkpoint")


def test_a_path_in_the_manifest(single, tmp_path):
    shutil.copy(single / mf.SINGLE, tmp_path / mf.SINGLE)
    put_manifest(single, lambda b: b["files"].update({f"../{mf.SINGLE}": b["files"].pop(mf.SINGLE)}))
    refused(single, "outside the checkpoint")


def test_a_lying_index(sharded):
    path = sharded / mf.INDEX
    index = json.loads(path.read_text())
    for change, match in (
        (lambda m: m.update({"up.qdata": SHARD_1 if m["up.qdata"] == SHARD_2 else SHARD_2}), r"up\.qdata is not in"),
        (lambda m: m.pop("up.qdata"), r"misses tensors.*up\.qdata"),
        (lambda m: m.update({"ghost": SHARD_1}), "ghost is not in"),
        (lambda m: m.update({"up.qdata": "fp4_inductor-00009-of-00009.safetensors"}), r"up\.qdata is not in"),
    ):
        changed = dict(index["weight_map"])
        change(changed)
        path.write_text(json.dumps({"metadata": {}, "weight_map": changed}))
        refused(sharded, match)
    for text in ("[]", "{}", '{"weight_map": []}', "{", ""):
        path.write_text(text)
        refused(sharded, r"JSON|weight_map")


def test_one_name_in_two_shards(sharded):
    fields, _ = header(sharded / SHARD_1)
    name = next(n for n in fields if n != "__metadata__")
    second, data = header(sharded / SHARD_2)
    size = len(data)
    second[name] = {"dtype": "U8", "shape": [1], "data_offsets": [size, size + 1]}
    put_header(sharded / SHARD_2, second, data + b"\0")
    put_manifest(sharded)
    refused(sharded, "in two shards")


def test_an_altered_manifest(single):
    put_manifest(single, lambda b: b["layers"]["up"].update(prefill="bf16"), resign=False)
    refused(single, "checksum")


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda b: b.update(version=mf.VERSION + 1), "unknown version"),
        (lambda b: b.update(version=0), "unknown version"),
        (lambda b: b.update(version="2"), "unknown version"),
        (lambda b: b.update(version=True), "unknown version"),
        (lambda b: b.update(format="other"), "another format"),
        (lambda b: b.pop("aliases"), "missing or unknown fields"),
        (lambda b: b.update(more=1), "missing or unknown fields"),
        (lambda b: b.update(layers=[]), "layers is not valid"),
        (lambda b: b.update(files={}), "lists no file"),
        (lambda b: b.update(derived="x"), "derived is not valid"),
        (lambda b: b.update(derived=["ghost"]), "not stored"),
        (lambda b: b.update(report=None), "report is not valid"),
        (lambda b: b["report"].update(errors={"up": -1}), "errors"),
        (lambda b: b["report"].update(kept={"up": 3}), "kept"),
        (lambda b: b["layers"]["up"].update(in_features=0), "in_features is not valid"),
        (lambda b: b["layers"]["up"].update(in_features=2**60), "in_features is not valid"),
        (lambda b: b["layers"]["up"].update(in_features=32.0), "in_features is not valid"),
        (lambda b: b["layers"]["up"].update(in_features=16), r"up\.qdata has the wrong shape"),
        (lambda b: b["layers"]["up"].update(in_features=31), r"\[48, 31\] in the checkpoint, \[48, 32\] in the model"),
        (lambda b: b["layers"]["up"].update(out_features=47), r"up\.qdata has the wrong shape"),
        (lambda b: b["layers"]["up"].update(dtype="float64"), "dtype is not valid"),
        (lambda b: b["layers"]["up"].update(dtype=["bfloat16"]), "dtype is not valid"),
        (lambda b: b["layers"]["up"].update(bias=False), r"up\.bias"),
        (lambda b: b["layers"]["down"].update(bias=True), r"down\.bias"),
        (lambda b: b["layers"]["up"].update(prefill="fp64"), "prefill is not valid"),
        (lambda b: b["layers"]["up"].pop("prefill"), "layers"),
        (lambda b: b["layers"].pop("up"), r"up\.weight: not in the checkpoint"),
        (lambda b: b["layers"].update(ghost=b["layers"]["up"]), r"ghost\.qdata is missing"),
        (lambda b: b["layers"].update(embed=b["layers"].pop("up")), r"embed\.qdata is missing"),
        (lambda b: b["tensors"].update(up={"dtype": "bfloat16", "transposed": False}), "up"),
        (lambda b: b["tensors"].update(ghost={"dtype": "bfloat16", "transposed": False}), r"ghost\.qdata"),
        (lambda b: b["aliases"].update({"head.weight": "ghost"}), "alias"),
        (lambda b: b["aliases"].update({"up.bias": "embed.weight"}), "alias"),
        (lambda b: b["aliases"].update({"head.weight": "up.bias"}), r"head\.weight: shape"),
        (lambda b: b["aliases"].update({"head.weight": 3}), "aliases"),
        (lambda b: b["aliases"].pop("head.weight"), r"head\.weight: not in the checkpoint"),
        (lambda b: b["files"][mf.SINGLE].update(bytes=True), "bytes is not valid"),
        (lambda b: b["files"][mf.SINGLE].update(bytes=9), "another size"),
        (lambda b: b["files"][mf.SINGLE].update(header_sha256="0"), "altered"),
        (lambda b: b["files"][mf.SINGLE]["crc32"].pop("up.qdata"), "crc32 does not list"),
        (lambda b: b["files"][mf.SINGLE]["crc32"].update({"up.qdata": "1"}), "crc32 is not valid"),
        (lambda b: b["files"][mf.SINGLE].update(data_crc32=1), "files.*is not valid"),
        (lambda b: b["layers"]["up"].update(input_scale=True), "input_scale is not as"),
        (lambda b: b["layers"]["up"].update(input_scale=1), "input_scale is not valid"),
        (lambda b: b["files"].update({SHARD_1: b["files"][mf.SINGLE]}), "cannot be opened"),
    ],
)
def test_a_manifest_that_lies(single, edit, match):
    put_manifest(single, edit)
    refused(single, match)


# --- the wrong model -----------------------------------------------------------------------------------------------


def test_models_that_do_not_fit(single):
    class Wide(Net):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(64, 48)

    class Unbiased(Net):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(32, 48, bias=False)

    class Convolution(Net):
        def __init__(self):
            super().__init__()
            self.up = nn.Conv1d(32, 48, 1)

    class Without(Net):
        def __init__(self):
            super().__init__()
            del self.up

    class OwnForward(Net):
        def __init__(self):
            super().__init__()

            class Scaled(nn.Linear):
                def forward(self, x):
                    return 2 * super().forward(x)

            self.up = Scaled(32, 48)

    for cls, match in (
        (Wide, r"up: \[48, 32\] in the checkpoint, \[48, 64\] in the model"),
        (Unbiased, "up: a bias in the checkpoint, no bias in the model"),
        (Convolution, "up: a quantized layer in the checkpoint, Conv1d in the model"),
        (Without, "up: the model has no such module"),
        (OwnForward, "up: a quantized layer in the checkpoint, Scaled in the model"),
    ):
        refused(single, match, model=cls())
        refused(single, match, model=cls(), strict=False)


def test_no_pickle_is_read(single):
    for name in ("pytorch_model.bin", "model.pt"):
        (single / name).write_bytes(b"\x80\x04cos\nsystem\n")
    assert isinstance(fp4_inductor.load(Net(), single).up, FP4Linear)


# --- mutations -----------------------------------------------------------------------------------------------------


def _structure(model: nn.Module) -> list[tuple]:
    layers = [(n, m.in_features, m.out_features) for n, m in model.named_modules() if isinstance(m, FP4Linear)]
    return [(n, t.dtype, tuple(t.shape)) for n, t in model.state_dict().items()] + layers


def _bits(model: nn.Module) -> list[bytes]:
    return [t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in model.state_dict().values()]


@pytest.mark.parametrize("resign", [False, True], ids=["damage", "attack"])
@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_mutated_files(originals, tmp_path, kind, resign):
    """Damage is refused or has no effect at all; whoever also recomputes the checksums can change values, never structure."""
    rng = random.Random(f"{kind}{resign}{SEED}")
    good = fp4_inductor.load(Net(), originals[kind])
    structure, bits = _structure(good), _bits(good)
    pristine = {p.name: p.read_bytes() for p in originals[kind].iterdir()}
    refusals = 0
    for _ in range(MUTATIONS // 4):
        for name, raw in pristine.items():
            (tmp_path / name).write_bytes(raw)
        changed = mutate(rng, tmp_path)
        if resign:
            try:
                put_manifest(tmp_path)
            except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError, UnicodeError):
                continue  # the manifest itself is no longer readable: covered by the other half
        model = Net()
        before = _state(model)
        try:
            fp4_inductor.load(model, tmp_path)
        except errors.CheckpointError:
            refusals += 1
            assert _state(model) == before, changed
        else:
            assert _structure(model) == structure, changed
            if not resign:
                assert _bits(model) == bits, changed
    assert refusals > MUTATIONS // 4 * 0.4

"""The native checkpoint of 2:4-sparse weights: bits, names on disk, mixed models, and damage that is refused."""

from __future__ import annotations

import json
import zlib

import pytest
import safetensors.torch
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, Sparse24Linear, Sparse24NVFP4Tensor, errors
from fp4_inductor.checkpoint import manifest as mf
from fp4_inductor.checkpoint.safetensors_file import read_header
from fp4_inductor.formats import sparse24


class Net(nn.Module):
    """A dense quantized, a sparse and a sparse padded layer; a sparse Parameter, presented transposed."""

    def __init__(self, quantized=True):
        super().__init__()
        self.dense, self.sparse, self.odd = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 40, bias=False)
        self.last = nn.Linear(40, 8)
        self.w = nn.Parameter(torch.empty(64, 40), requires_grad=False)
        if quantized:
            self.dense = FP4Linear.from_weight(self.dense.weight, self.dense.bias)
            self.sparse = sparse_layer(self.sparse)
            self.last = sparse_layer(self.last)
            self.w = nn.Parameter(Sparse24NVFP4Tensor.from_dense(torch.randn(40, 64), "magnitude").t(), requires_grad=False)

    def forward(self, x):
        h = self.sparse(torch.relu(self.dense(x)))
        return self.last(self.odd(h) + h @ self.w)


def sparse_layer(linear: nn.Linear) -> Sparse24Linear:
    return Sparse24Linear.from_weight(linear.weight, linear.bias, mask=sparse24.magnitude_mask(linear.weight))


def saved(path) -> Net:
    model = Net().eval()
    fp4_inductor.save(model, path)
    return model


def test_every_bit_comes_back(tmp_path):
    model, x = saved(tmp_path), torch.randn(5, 64)
    for target in (lambda: Net(quantized=False), Net(quantized=False).eval(), Net().eval()):
        loaded = fp4_inductor.load(target, tmp_path)
        assert [type(m).__name__ for m in loaded.children()] == ["FP4Linear", "Sparse24Linear", "Linear", "Sparse24Linear"]
        assert type(loaded.w.data) is Sparse24NVFP4Tensor
        assert loaded.w.transposed
        assert loaded.last.padding == 24
        for a, b in ((loaded.sparse, model.sparse), (loaded.last, model.last), (loaded.w, model.w)):
            assert all(torch.equal(p.reshape(-1).view(torch.uint8), q.reshape(-1).view(torch.uint8)) for p, q in zip(a.parts(), b.parts(), strict=True))
        assert torch.equal(loaded(x), model(x))


def test_what_is_on_disk(tmp_path):
    saved(tmp_path)
    body = json.loads((tmp_path / mf.FILE).read_text())
    assert body["layers"]["sparse"] == {
        "in_features": 96, "out_features": 64, "dtype": "float32", "bias": True, "prefill": "auto", "input_scale": False, "storage": "sparse24_nvfp4"
    }  # fmt: skip
    assert "storage" not in body["layers"]["dense"]
    assert body["tensors"]["w"] == {"dtype": "float32", "transposed": True, "storage": "sparse24_nvfp4"}
    on_disk = safetensors.torch.load_file(tmp_path / mf.SINGLE)
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in on_disk.items() if name.startswith("sparse.")}
    assert shapes == {
        "sparse.values": ((64, 24), torch.uint8),
        "sparse.meta": ((64, 12), torch.uint8),
        "sparse.scale": ((64, 6), torch.float8_e4m3fn),
        "sparse.global_scale": ((), torch.float32),
        "sparse.bias": ((64,), torch.float32),
    }


def rewrite(path, change) -> None:
    """Change the tensors and sign the checkpoint again, as an attacker or a broken exporter would."""
    tensors = safetensors.torch.load_file(path / mf.SINGLE)
    change(tensors)
    safetensors.torch.save_file(tensors, path / mf.SINGLE, metadata={"format": "pt"})
    header = read_header(path / mf.SINGLE)
    body = json.loads((path / mf.FILE).read_text())
    data = (path / mf.SINGLE).read_bytes()
    sums = {name: zlib.crc32(data[e.start : e.end]) for name, e in header.entries.items()}
    body["files"] = {mf.SINGLE: {"bytes": header.size, "header_sha256": header.digest, "crc32": sums}}
    sign(path, body)


def sign(path, body) -> None:
    body["checksum"] = mf.checksum(body)
    (path / mf.FILE).write_text(json.dumps(body))


def _set(name, value):
    return lambda t: t.__setitem__(name, value(t[name]))


def _byte(t, value):
    t = t.clone()
    t.view(torch.uint8).reshape(-1)[3] = value
    return t


TAMPERED = {
    "illegal nibble": (_set("sparse.meta", lambda t: _byte(t, 0x54)), r"sparse\.meta: 2:4 metadata is corrupt; got 1 of 768 bytes, the first 0x54 at \(0, 3\)"),
    "illegal nibble of a Parameter": (_set("w.meta", lambda t: _byte(t, 0x00)), r"w\.meta: .*0x00"),
    "meta of another K": (_set("sparse.meta", lambda t: t[:, :8].clone()), r"sparse\.meta has the wrong shape"),
    "values missing": (lambda t: t.pop("sparse.values"), r"sparse\.values is missing"),
    "values as int8": (_set("sparse.values", lambda t: t.view(torch.int8)), r"sparse\.values has the wrong shape or dtype"),
    "NaN scale": (_set("sparse.scale", lambda t: _byte(t, 0x7F)), r"sparse\.scale holds a NaN"),
    "K of the Parameter": (_set("w.values", lambda t: t[:, :12].clone()), r"w\.values .*K = 48.*K % 32"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_damage_is_refused_and_the_model_unchanged(tmp_path, case):
    change, message = TAMPERED[case]
    saved(tmp_path)
    rewrite(tmp_path, change)
    target = Net(quantized=False)
    with pytest.raises(errors.CheckpointError, match=message):
        fp4_inductor.load(target, tmp_path)
    assert type(target.sparse) is nn.Linear


@pytest.mark.parametrize("storage", ["nvfp4", "pair48", 3, None])
def test_a_wrong_storage_is_refused(tmp_path, storage):
    saved(tmp_path)
    body = json.loads((tmp_path / mf.FILE).read_text())
    body["layers"]["sparse"]["storage"] = storage
    sign(tmp_path, body)
    with pytest.raises(errors.CheckpointError, match=r"sparse\.qdata is missing" if storage == "nvfp4" else r"layers\['sparse'\]\.storage is not valid"):
        fp4_inductor.load(Net(quantized=False), tmp_path)


def test_the_report_of_a_loaded_model(tmp_path):
    saved(tmp_path)
    loaded = fp4_inductor.load(Net(quantized=False), tmp_path, strict=True)
    report = fp4_inductor.report(loaded)
    row = next(r for r in report.layers if r.name == "sparse")
    assert row.bytes_after == 64 * 96 * 3.5 / 8 + 4 + 64 * 4
    assert any("multiple of 32" in note for r in report.layers if r.name == "last" for note in r.notes)

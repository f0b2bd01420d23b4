"""GGUF files of every architecture that transformers reads: its name map and its rearrangements, with FP4 tensors kept packed.

transformers says which tensor is which (``get_gguf_hf_weights_map``) and how llama.cpp rearranged its values (``TENSOR_PROCESSORS``).
A packed weight is not run through such a function: the function is run on row numbers, and where it does nothing but move rows, the
rows of codes and scales are moved; else the weight is dequantized and the report says so. Experts are joined here, by how the model
stores them: transformers' own GptOssTensorProcessor looks for names that llama.cpp does not write.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ...checkpoint.gguf_file import GGUFFile, GGUFTensor, open_gguf
from ...checkpoint.readers import Found, gguf
from ...errors import CheckpointError, list_names
from ...models.experts import ExpertsSpec, describe_experts
from ...models.plan import linear_kind
from .config import FP4InductorConfig

_REMEDY = "Download the file again, or load another format of this model."
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IGNORED = {"rope_freqs.weight": "rope_freqs.weight is ignored, as transformers does: long contexts are rotated as the config says"}


def load_gguf(path: Path, auto: Any, prefill: str, strict: bool, options: dict[str, Any], attention: str = "auto") -> nn.Module:
    """See :func:`fp4_inductor.load_pretrained`."""
    file = open_gguf(path)
    config = config_of(file)
    mapping = getattr(auto, "_model_mapping", None)
    if mapping is not None and type(config) not in mapping:
        raise CheckpointError(
            f"{path.name}: {auto.__name__} has no model for this architecture", value=file.architecture, limit="a language model", remedy="Pass model_class."
        )
    model_class = auto if mapping is None else mapping[type(config)]
    found, dense = match(file, skeleton(model_class, config), config)
    source = {"quant_method": gguf.METHOD, "shards": gguf.Shards(path.parent, {}, {}), "found": found, "dense": list(dense)}
    if options["dtype"] == "auto":
        options["dtype"] = torch.bfloat16  # a GGUF file does not say
    wanted = FP4InductorConfig(prefill=prefill, strict=strict, source=source, attention=attention)
    return model_class.from_pretrained(None, config=config, state_dict=dense, quantization_config=wanted, **options)


def skeleton(model_class: Any, config: PretrainedConfig) -> PreTrainedModel:
    """The model without values."""
    with torch.device("meta"):
        return model_class(copy.deepcopy(config))


def config_of(file: GGUFFile) -> PretrainedConfig:
    """transformers' reading of the metadata, and what it misses.

    Raises:
        CheckpointError: an architecture that transformers does not read, or metadata without sense.
    """
    from transformers import CONFIG_MAPPING
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        # transformers up to 5.23 reads the length of the key where it wants a value of gpt-oss' rope scaling, and fails.
        body = _gpt_oss(file) if file.architecture == "gpt-oss" else load_gguf_checkpoint(str(file.path), return_tensors=False)["config"]
        config_class = CONFIG_MAPPING[body["model_type"]]
        _complete(body, file, config_class)
        return config_class.from_dict(body)
    except Exception as error:  # transformers trusts what it reads
        raise CheckpointError(
            f"{file.path.name} holds no model configuration that transformers reads",
            value=f"architecture {file.architecture}: {type(error).__name__}: {str(error)[:200]}",
            limit="an architecture of transformers' GGUF support",
            remedy=_REMEDY,
        ) from error


def _complete(body: dict[str, Any], file: GGUFFile, config_class: type) -> None:
    """What is in the file and not in transformers' map, where the configuration has it."""
    default = config_class()
    arch = file.architecture
    for name, key in (
        ("head_dim", f"{arch}.attention.key_length"),
        ("sliding_window", f"{arch}.attention.sliding_window"),
        ("moe_intermediate_size", f"{arch}.expert_feed_forward_length"),
        ("n_positions", f"{arch}.context_length"),
        *((f"{t}_token_id", f"tokenizer.ggml.{t if t != 'pad' else 'padding'}_token_id") for t in ("bos", "eos", "pad")),
    ):
        if hasattr(default, name) and file.fields.get(key) is not None:
            body.setdefault(name, file.fields[key])


def _gpt_oss(file: GGUFFile) -> dict[str, Any]:
    from transformers import GptOssConfig
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    mapping: dict[str, str | None] = GGUF_CONFIG_MAPPING["gpt_oss"]  # type: ignore[assignment]
    keys = {name: file.field(key) for key, name in mapping.items() if name is not None}
    body = {name: value for name, value in keys.items() if value is not None}
    rope = {"rope_theta": body.pop("rope_theta"), "rope_type": file.field("rope.scaling.type", "default")}
    if rope["rope_type"] != "default":
        length = file.field("rope.scaling.original_context_length")
        rope = {**(GptOssConfig().rope_parameters or {}), **rope, "factor": file.field("rope.scaling.factor"), "original_max_position_embeddings": length}
    vocabulary = {"vocab_size": len(file.fields.get("tokenizer.ggml.tokens", ()))}
    return vocabulary | body | {"model_type": "gpt_oss", "rope_parameters": rope, "tie_word_embeddings": "output.weight" not in file.tensors}


def match(file: GGUFFile, model: PreTrainedModel, config: PretrainedConfig) -> tuple[Found, dict[str, Tensor]]:
    """The tensors of ``file`` under the names of ``model`` (on the meta device).

    Returns:
        ``(what stays packed, everything else as dense tensors)``.

    Raises:
        CheckpointError: an architecture without a name map, tensors the model has not, experts that are not complete.
    """
    return _Match(file, model, config).all()


class _Match:
    def __init__(self, file: GGUFFile, model: PreTrainedModel, config: PretrainedConfig):
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        self.file, self.model, self.state = file, model, model.state_dict()
        self.processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
        try:
            self.names = get_gguf_hf_weights_map(model, self.processor)
        except NotImplementedError as error:
            raise gguf.unsupported(f"GGUF: architecture of {file.path.name}", file.architecture, "one that the gguf package has names for") from error
        self.left = dict(file.tensors)
        self.found = Found()
        self.dense: dict[str, Tensor] = {}

    def all(self) -> tuple[Found, dict[str, Tensor]]:
        for name, module in self.model.named_modules():
            spec = describe_experts(module)
            if isinstance(spec, ExpertsSpec):
                self.experts(name, spec)
        for stored in list(self.left):
            name = self.names.get(stored) or self.names.get(stored.removesuffix(".weight"))
            if name in self.state and stored in self.left:
                self.plain(name, self.left.pop(stored))
        for stored in [n for n in self.left if n in _IGNORED]:
            self.found.notes.append(_IGNORED[stored])
            del self.left[stored]
        if self.left:
            value = list_names(self.left)
            raise CheckpointError(f"{self.file.path.name} has tensors that the model has not", value=value, limit="none", remedy=_REMEDY)
        return self.found, self.dense

    def plain(self, name: str, t: GGUFTensor) -> None:
        """A tensor that is one of the model's."""
        kind = self.kind(t)
        scale, of_input = self.beside(t) if kind in gguf.TYPES else (None, None)
        if kind in gguf.TYPES and len(t.shape) == 2 and self.is_linear(name):
            rows, moved = self.rows(t)
            if moved:
                pieces = gguf.Pieces(self.file.path, kind, (t,), () if scale is None else (scale,))
                self.found.add(pieces.stored(name, rows=rows, input_scale=of_input))
                return
        values = self.values(t) if scale is None else self.values(t) * self.values(scale).reshape(-1)[0]
        if kind in gguf.TYPES:
            self.found.notes.append(f"{name} was {kind} and is in high precision here: not a linear layer by itself, or its values were rearranged")
        try:
            processed = self.process(values, t.name)
        except Exception as error:  # written for tensors that fit
            raise gguf.unsupported(f"GGUF: {t.name}", f"{t.shape}: {type(error).__name__}: {error}", f"the shape of {name}") from error
        self.dense[name] = self.fitting(name, torch.from_numpy(np.ascontiguousarray(processed))).to(_PLAIN.get(kind, torch.float32))

    def experts(self, owner: str, spec: ExpertsSpec) -> None:
        """The 3-D weights of one module of experts: packed if all of them are, else dense."""
        import gguf as names

        number = re.search(r"\d+", owner)
        tensor = {
            part: names.TENSOR_NAMES[getattr(names.MODEL_TENSOR, f"FFN_{part}_EXP")].format(bid=number[0] if number else 0)
            for part in ("GATE_UP", "GATE", "UP", "DOWN")
            if hasattr(names.MODEL_TENSOR, f"FFN_{part}_EXP")
        }
        first = ["UP"] if spec.first == "up_proj" else ["GATE_UP"] if f"{tensor.get('GATE_UP')}.weight" in self.left else ["GATE", "UP"]
        wanted = {spec.first: [tensor[p] for p in first], "down_proj": [tensor["DOWN"]]}
        interleaved = {spec.first: spec.activation.interleaved, "down_proj": False}
        pieces = {name: [self.take(f"{base}.weight", 3) for base in bases] for name, bases in wanted.items()}
        kinds = {name: {self.kind(t) for t in ts} for name, ts in pieces.items()}
        packed = all(len(k) == 1 and k <= gguf.TYPES.keys() for k in kinds.values())
        for name, ts in pieces.items():
            full, joins = f"{owner}.{name}", interleaved[name]
            half = joins and len(ts) == 1  # gate and up in one tensor, one half each
            beside = [self.beside(t) for t in ts]
            scales = [s for s, _ in beside if s is not None]
            ignored = [i.name for _, i in beside if i is not None]
            self.found.ignored |= dict.fromkeys(ignored, "input scales of GGUF experts")
            if packed and not half and len(scales) in (0, len(ts)):
                weights = gguf.Pieces(self.file.path, min(kinds[name]), tuple(ts), tuple(scales), joins)
                self.found.add(weights.stored(full, transposed=spec.transposed))
                continue
            packed = False
            values = [self.values(t) * (1 if s is None else self.values(s).reshape(-1, 1, 1)) for t, (s, _) in zip(ts, beside, strict=True)]
            tensors = [torch.from_numpy(v) for v in values]
            w = gguf.join(list(tensors[0].chunk(2, -2)) if half else tensors, joins, -2)
            self.dense[full] = self.fitting(full, w.mT.contiguous() if spec.transposed else w)
        for name, bases in wanted.items() if spec.bias else ():
            ts = [self.take(f"{base}.bias", 2) for base in bases]
            stored = gguf.stored_bias(f"{owner}.{name}_bias", self.file.path, ts, interleaved[name])
            if packed:
                self.found.add(stored)
            else:
                self.dense[stored.name] = self.fitting(stored.name, stored.decode(*(torch.from_numpy(self.values(t)) for t in ts)))
        if not packed and spec.first in (w.name.rpartition(".")[2] for w in self.found.weights.values() if w.name.startswith(f"{owner}.")):
            raise gguf.unsupported(f"GGUF: {owner}", sorted(set().union(*kinds.values())), "all experts of a layer in one FP4 type, or none")

    def fitting(self, name: str, t: Tensor) -> Tensor:
        """``t``, if it has the shape of the model's: transformers takes dense tensors of another shape without a word."""
        want = self.state[name].shape
        if t.shape != want:
            raise gguf.unsupported(f"GGUF: the shape of {name}", tuple(t.shape), tuple(want))
        return t

    def take(self, name: str, dims: int) -> GGUFTensor:
        t = self.left.pop(name, None)
        if t is None or len(t.shape) != dims:
            value = "no such tensor" if t is None else t.shape
            raise CheckpointError(f"{self.file.path.name}: {name}", value=value, limit=f"a tensor of {dims} dimensions", remedy=_REMEDY)
        return t

    def beside(self, t: GGUFTensor) -> tuple[GGUFTensor | None, GGUFTensor | None]:
        """The global scale and the input scale that belong to ``t``."""
        base = t.name.removesuffix(".weight")
        return self.left.pop(f"{base}.scale", None), self.left.pop(f"{base}.input_scale", None)

    def is_linear(self, name: str) -> bool:
        owner, _, attribute = name.rpartition(".")
        tied = {*self.model.all_tied_weights_keys, *self.model.all_tied_weights_keys.values()}
        return attribute == "weight" and linear_kind(self.model.get_submodule(owner)) in ("linear", "transposed") and name not in tied

    def rows(self, t: GGUFTensor) -> tuple[Tensor | None, bool]:
        """How llama.cpp ordered the rows: (index or None for as they are, False if it did more than that)."""
        n, k = t.shape
        for width in dict.fromkeys((2, k)):  # some processors reshape by the true width
            probe = np.arange(n * width, dtype=np.int64).reshape(n, width)
            try:
                got = np.asarray(self.process(probe, t.name))
            except Exception:  # this width does not suit it
                continue
            if got.shape == probe.T.shape and np.array_equal(got.T, probe):
                return None, True  # the model keeps it [K, N]; packed weights stay [N, K]
            order = got[:, 0] // width if got.shape == probe.shape else probe[:0, 0]
            if len(order) and np.array_equal(np.sort(order), np.arange(n)) and np.array_equal(got, probe[order]):
                return (None if np.array_equal(order, np.arange(n)) else torch.from_numpy(order)), True
        return None, False

    def process(self, values: np.ndarray, stored: str) -> np.ndarray:
        parsed: dict[str, Any] = {"tensors": {}}
        result = self.processor.process(weights=values, name=stored, tensor_key_mapping=self.names, parsed_parameters=parsed)
        kept: Iterator[Any] = iter(parsed["tensors"].values())
        return result.weights if result.name is not None else next(kept).numpy()

    def kind(self, t: GGUFTensor) -> str:
        import gguf as names

        return names.GGMLQuantizationType(t.kind).name

    def values(self, t: GGUFTensor) -> np.ndarray:
        """float32, decoded by the gguf package."""
        import gguf as names

        raw = np.fromfile(self.file.path, np.uint8, t.end - t.start, offset=t.start)
        try:
            values = names.dequantize(raw.reshape(*t.shape[:-1], -1) if raw.size else raw, names.GGMLQuantizationType(t.kind))
        except NotImplementedError as error:
            raise gguf.unsupported(f"GGUF: type of {t.name}", self.kind(t), "a type that the gguf package decodes") from error
        return values.reshape(t.shape).astype(np.float32)

"""Linear layers: the parameters of a checkpoint's format as vLLM loads and shards them, then our parts, then one op.

vLLM shards a parameter by what it is: rows and columns of any packed width, one entry of a global scale for each layer that was
merged. What it has loaded is the layout that the kernels read, so nothing is copied and nothing is repacked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from ...errors import CheckpointError, NonFiniteError
from ...formats import nvfp4
from ...formats.packing import PackedLinear, pack_linear
from . import compiling
from .dummy import fill_dummy
from .engine import (
    GroupQuantScaleParameter,
    LinearMethodBase,
    ModelWeightParameter,
    ParallelLMHead,
    PerTensorScaleParameter,
    initialize_online_processing,
    register_weight_loader_v2_supported_method,
)
from .refusals import check_columns
from .settings import Settings

META = "weight_meta"  # of 2:4-sparse weights, beside the names of ModelOpt
_NAN_CODE = 0x7F  # E4M3: a block scale that was never loaded is found


@dataclass(frozen=True)
class Names:
    """How a format calls the tensors of a weight; ``divides``: its global scale divides. ``meta``: metadata of a 2:4-sparse weight."""

    codes: str
    scale: str
    global_scale: str
    input_scale: str
    divides: bool
    meta: str = META

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.codes, self.scale, self.global_scale, self.input_scale


MODELOPT = Names("weight", "weight_scale", "weight_scale_2", "input_scale", divides=False)
COMPRESSED = Names("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", divides=True)


def never_loaded(*shape: int) -> Tensor:
    """Block scales on the current device, all NaN."""
    return torch.full(shape, _NAN_CODE, dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)


def nan(*shape: int) -> Tensor:
    """Global scales on the current device, all NaN. Their dtype is given: vLLM builds models under set_default_dtype(bfloat16)."""
    return torch.full(shape, float("nan"), dtype=torch.float32)


def frozen(t: Tensor) -> Parameter:
    return Parameter(t, requires_grad=False)


class _Linear(LinearMethodBase):
    """What every method here does; ``prefix`` is the layer's path, for messages."""

    def __init__(self, prefix: str, settings: Settings, dummy: bool):
        self.prefix, self.settings, self.dummy = prefix, settings, dummy

    def _describe(self, layer: Any, k: int, sizes: list[int], whole: int, *, sparse: bool = False, online: bool = False) -> None:
        check_columns(self.prefix, k, whole, sparse, online)
        layer.logical_widths = list(sizes)
        layer.input_size_per_partition, layer.output_size_per_partition = k, sum(sizes)
        halves = len(sizes) == 2 and sizes[0] == sizes[1]
        compiling.add_layer("sparse_linear" if sparse else "linear", sum(sizes), k, self.settings, glu=halves and not sparse)

    def _keep(self, layer: Any, packed: Any) -> None:
        """The final parameters. The codes are called ``weight``: vLLM's LoRA layers ask that for its device."""
        layer.weight, layer.weight_scale, layer.weight_global_scale = (frozen(t) for t in (packed.codes, packed.scale, packed.global_scale))
        if packed.meta is not None:
            layer.weight_meta = frozen(packed.meta)
        layer.fp4_rows = packed.rows


@register_weight_loader_v2_supported_method
class FP4LinearMethod(_Linear):
    """NVFP4 weights, dense or 2:4-sparse, under the names of ``names``; calls ``fp4.linear`` or ``fp4.sparse_linear``.

    Raises:
        ShapeError: a rank does not hold whole blocks. CheckpointError, NonFiniteError: scales that are not in the checkpoint, or NaN.
    """

    def __init__(self, names: Names, prefix: str, settings: Settings, dummy: bool, sparse: bool = False):
        super().__init__(prefix, settings, dummy)
        self.names, self.sparse = names, sparse

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int, params_dtype: Any, **extra: Any
    ) -> None:
        k, n, loader, names = input_size_per_partition, sum(output_partition_sizes), extra["weight_loader"], self.names
        self._describe(layer, k, output_partition_sizes, input_size, sparse=self.sparse)
        layer.fp4_loaded = loaded = Loaded()

        def sides(name: str) -> dict[str, Any]:
            return {"input_dim": 1, "output_dim": 0, "weight_loader": loaded.watch(name, loader)}

        codes = torch.empty(n, k // (4 if self.sparse else 2), dtype=torch.uint8)
        layer.register_parameter(names.codes, ModelWeightParameter(data=codes, **sides(names.codes)))
        if self.sparse:
            layer.register_parameter(META, ModelWeightParameter(data=torch.zeros(n, k // 8, dtype=torch.uint8), **sides(META)))
        layer.register_parameter(names.scale, GroupQuantScaleParameter(data=never_loaded(n, k // nvfp4.GROUP), **sides(names.scale)))
        one = _load_whole if isinstance(layer, ParallelLMHead) else loader  # its own loader shards by vocabulary, and a scale has none
        for name in (names.global_scale, names.input_scale):  # input scales are loaded and dropped
            data = nan(len(output_partition_sizes))
            layer.register_parameter(name, PerTensorScaleParameter(data=data, weight_loader=loaded.watch(name, one)))

    def process_weights_after_loading(self, layer: Any) -> None:
        if not hasattr(layer, self.names.global_scale) or hasattr(layer, "fp4_rows"):
            return  # vLLM may ask again
        codes, scale, g = (getattr(layer, name).data for name in self.names.tensors[:3])
        meta = getattr(layer, META).data if self.sparse else None
        if self.dummy:
            fill_dummy(codes, scale, g, meta, self.names.divides)
        loaded: Loaded = layer.fp4_loaded
        for name in (self.names.codes, self.names.scale, self.names.global_scale):
            loaded.check(name, len(g), self.prefix)
        g = loaded_scales(g, self.prefix, whole=None in loaded.shards.get(self.names.global_scale, [None]))
        sizes = layer.logical_widths if len(g) > 1 else None
        packed = pack_linear(codes, scale, g, output_sizes=sizes, meta=meta, divides=self.names.divides, name=self.prefix)
        for name in ("fp4_loaded", *self.names.tensors, *((META,) if self.sparse else ())):
            delattr(layer, name)
        self._keep(layer, packed)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scale, g = layer.weight, layer.weight_scale, layer.weight_global_scale
        if self.sparse:
            return torch.ops.fp4.sparse_linear(x, weight, layer.weight_meta, scale, g, bias, self.settings.prefill, layer.fp4_rows)
        return torch.ops.fp4.linear(x, weight, scale, g, bias, self.settings.prefill, layer.fp4_rows)


class Loaded:
    """Which shards of each tensor of a layer a loader was given: a tensor that is not in the checkpoint is found, and what it held is no number."""

    def __init__(self) -> None:
        self.shards: dict[str, list[Any]] = {}

    def watch(self, name: str, loader: Callable) -> Callable:
        """``loader`` of the parameter ``name``, called as vLLM calls it: with a shard's id where layers are merged, and without for a whole tensor."""

        @functools.wraps(loader)
        def load(param: Tensor, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            shard = args[0] if args else kwargs.get("loaded_shard_id", kwargs.get("shard_id"))
            self.shards.setdefault(name, []).extend(shard if isinstance(shard, tuple) else [shard])
            return loader(param, loaded_weight, *args, **kwargs)

        return load

    def check(self, name: str, members: int, prefix: str) -> None:
        """Raise CheckpointError unless all of ``members`` merged layers, or one tensor for all of them, were loaded.

        Nothing is known of a loader of vLLM's that writes into parameters by itself; what it leaves out is NaN where it is a scale.
        """
        seen = self.shards.get(name, [])
        if self.shards and None not in seen and len(set(seen)) < members:
            _refuse_missing(f"{prefix}: {name}", members - len(set(seen)), members)


def _refuse_missing(what: str, count: int, of: int) -> NoReturn:
    raise CheckpointError(
        f"{what} is missing or NaN in the checkpoint",
        value=f"{count} of {of}",
        limit="one for each layer that is merged here",
        remedy="Quantize all of the layers that vLLM merges (q/k/v, gate/up) or none, and download the checkpoint again if it is damaged.",
    )


def loaded_scales(g: Tensor, prefix: str, whole: bool) -> Tensor:
    """The global scales that were loaded: one for each merged layer, or one if the checkpoint stores the merged layer as one tensor (Phi-3)."""
    missing = g.isnan()
    count = int(missing.sum())
    if whole and count == len(g) - 1:
        return g[~missing]
    if count:
        _refuse_missing(f"{prefix}: a global scale", count, len(g))
    return g


def _load_whole(param: Tensor, loaded: Tensor, *_: Any) -> None:
    param.data.copy_(loaded.reshape(param.shape))


@register_weight_loader_v2_supported_method
class FP8LinearMethod(_Linear):
    """A weight in E4M3 with a float32 scale for each row (our FP8 heads and layers); calls ``fp4.linear_fp8``."""

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int, params_dtype: Any, **extra: Any
    ) -> None:
        k, n, loader = input_size_per_partition, sum(output_partition_sizes), extra.get("weight_loader")
        layer.logical_widths = list(output_partition_sizes)
        layer.input_size_per_partition, layer.output_size_per_partition = k, n
        compiling.add_layer("linear_fp8", n, k, self.settings)
        sides: dict[str, Any] = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        layer.register_parameter("weight", ModelWeightParameter(data=never_loaded(n, k), **sides))
        # [N, 1]: a column that every rank of a row-parallel layer keeps whole.
        columns = {**sides, "weight_loader": _load_whole} if k != input_size else sides
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=nan(n, 1), **columns))

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.weight_scale.dim() == 1:
            return
        weight, scale = layer.weight.data, layer.weight_scale.data.reshape(-1)
        if self.dummy:
            weight.view(torch.uint8).fill_(0x20)
            scale.fill_(1e-2)
        if isinstance(layer, ParallelLMHead):  # rows of vocabulary that nobody loads
            scale[layer.shard_indices.num_org_elements :] = 0.0
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()) or bool(((weight.view(torch.uint8) & _NAN_CODE) == _NAN_CODE).any()):
            raise NonFiniteError(
                f"{self.prefix}: an FP8 weight or its scales are missing or NaN", value="NaN", limit="finite", remedy="Download the checkpoint again."
            )
        del layer.weight, layer.weight_scale
        layer.weight, layer.weight_scale = frozen(weight), frozen(scale.contiguous())

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.fp4.linear_fp8(x, layer.weight, layer.weight_scale, bias, self.settings.prefill)


@register_weight_loader_v2_supported_method
class ModelOptFP8LinearMethod(FP8LinearMethod):
    """ModelOpt's FP8 layers, in E4M3 with one scale for each merged layer; activations stay in high precision, so input scales are dropped."""

    def create_weights(self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], *sizes: Any, **extra: Any) -> None:
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *sizes, **extra)
        loader = _load_whole if isinstance(layer, ParallelLMHead) else extra.get("weight_loader")
        del layer.weight_scale
        for name in ("weight_scale", "input_scale"):
            layer.register_parameter(name, PerTensorScaleParameter(data=nan(len(output_partition_sizes)), weight_loader=loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        if not hasattr(layer, "input_scale"):
            return  # vLLM may ask again
        scale = layer.weight_scale.data
        scale = torch.ones_like(scale) if self.dummy else loaded_scales(scale, self.prefix, whole=True)
        widths = torch.tensor(layer.logical_widths if len(scale) > 1 else [sum(layer.logical_widths)], device=scale.device)
        del layer.input_scale, layer.weight_scale
        layer.weight_scale = frozen(scale.repeat_interleave(widths)[:, None])
        super().process_weights_after_loading(layer)


@register_weight_loader_v2_supported_method
class OnlineLinearMethod(_Linear):
    """A bf16 weight that is quantized as soon as all of it is loaded; vLLM holds no other layer's bf16 weight then.

    Layers that are merged share one global scale: that of the largest magnitude among all of their weights, on whatever rank. Blocks
    of 16 columns do not straddle ranks. So every rank holds a slice of what one process would hold, bit for bit.
    """

    uses_meta_device = True

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int, output_size: int, params_dtype: Any, **extra: Any
    ) -> None:
        self._describe(layer, input_size_per_partition, output_partition_sizes, input_size, online=True)
        layer.fp4_largest = largest = Largest()
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype, device="meta")
        loader = largest.watch(extra["weight_loader"])
        layer.register_parameter("weight", ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader))
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(layer, "fp4_rows"):
            return
        weight, largest = layer.weight.data, layer.fp4_largest.value
        codes, scale, g = quantized(weight, None if largest is None else largest.to(weight.device), self.settings.scale_search, self.prefix)
        del layer.weight, layer.fp4_largest
        self._keep(layer, PackedLinear(codes, scale, g, None, None))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.fp4.linear(x, layer.weight, layer.weight_scale, layer.weight_global_scale, bias, self.settings.prefill, None)


class Largest:
    """The largest magnitude of all weights that a loader was given, before it took its rank's share of them."""

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def watch(self, loader: Callable) -> Callable:
        """``loader``, called as vLLM calls it (by position or by name)."""

        @functools.wraps(loader)
        def load(param: Tensor, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            largest = nvfp4.check_finite(loaded_weight.detach().reshape(-1, loaded_weight.shape[-1]))
            self.value = largest if self.value is None else torch.maximum(self.value, largest.to(self.value.device))
            return loader(param, loaded_weight, *args, **kwargs)

        return load


def quantized(weight: Tensor, largest: Tensor | None, scale_search: str, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    """``fp4.quantize`` of a weight under the global scale of ``largest`` (its own maximum if None); errors name the layer."""
    try:
        g = None if largest is None else nvfp4.global_scale_of(largest.to(weight.dtype), scale_search)
        return torch.ops.fp4.quantize(weight, scale_search, g)
    except NonFiniteError as error:
        remedy = "Repair the checkpoint, or leave the layer in bf16."
        raise NonFiniteError(f"{prefix}: {error.what}", value=error.value, limit=error.limit, remedy=remedy) from error

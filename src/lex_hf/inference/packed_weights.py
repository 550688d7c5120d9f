"""Weights of linear layers in 8 or 4 bits on a CPU, multiplied as they are stored by PyTorch's packed products.

One row is multiplied in the time that its weights take to be read, so fewer bytes are faster. Weights alone are
rounded, to the nearest number of their grid, without calibration; states are rounded to bfloat16 for each product,
which is what the products take, and otherwise stay in the dtype of the model.
"""

from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lex_hf.model.linear_lex import PART, LexLinear, multiplies_by_row

METHOD = "packed_weights"
GROUP_SIZES = (32, 64, 128, 256)
_TILE = 64  # inputs or outputs that products take together, at most: what fills up the last tile must exist
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@register_quantization_config(METHOD)
class PackedWeightsConfig(QuantizationConfigMixin):
    """Weights of linear layers in 8 or 4 bits, for `from_pretrained(..., quantization_config=...)` on a CPU.

    The language-modelling head is packed like all other linear layers. Where it is tied to the embeddings, these keep
    their own weights, and the head gets a packed copy. Matrices that are not an `nn.Linear` stay as they are:
    embeddings, `Conv1D` of GPT-2, experts that are one tensor.

    Args:
        bits: 8, with a scale for each output; or 4, with a scale and a middle for each group of inputs.
        group_size: Inputs in a group with 4 bits: 32, 64, 128 or 256. More of them take fewer bytes and round more.
        modules_to_not_convert: Names of modules that keep their weights, whole or as they end, e.g. `["lm_head"]`.

    Raises:
        ValueError: If one of them is none of these.
    """

    def __init__(
        self,
        bits: int = 8,
        group_size: int = 32,
        modules_to_not_convert: list[str] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if bits not in PACKINGS:
            raise ValueError(f"bits = {bits!r}: packed weights have {' or '.join(map(str, PACKINGS))} bits.")
        if group_size not in GROUP_SIZES:
            raise ValueError(
                f"group_size = {group_size!r}: it must be one of {', '.join(map(str, GROUP_SIZES))}, which PyTorch's "
                "product of 4 bits takes."
            )
        self.quant_method = quant_method
        self.bits = bits
        self.group_size = group_size
        self.modules_to_not_convert = modules_to_not_convert


class Int8Packing:
    """8 bits from -127 to 127, with a scale for each output; both sides are filled up to whole tiles.

    Attributes:
        many: Rows of states from which on unpacking and a product of matrices are faster than the packed product.
    """

    many = 48

    def __init__(self, group_size: int) -> None:
        """Make one; all packings take a group size, and this one has no groups."""

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed weights, `(outputs, inputs)`, and scales, `(outputs,)`, of float32 weights."""
        weight = F.pad(weight, (0, -weight.shape[1] % _TILE, 0, -weight.shape[0] % _TILE))
        scales = (weight.abs().amax(dim=1) / 127).bfloat16()
        scales = torch.where(scales > 0, scales, 1.0)
        return (weight / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales

    def multiply(self, states: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Multiply states, `(rows, inputs)` in bfloat16; returns `(rows, outputs)`."""
        return torch.ops.aten._weight_int8pack_mm(states, packed, scales)

    def unpack(self, packed: torch.Tensor, scales: torch.Tensor, in_features: int) -> torch.Tensor:
        """Return weights in float32, `(outputs, in_features)`."""
        return packed[:, :in_features] * scales.float()[:, None]

    def scales_of(self, scales: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the scales of some outputs."""
        return scales[part]


class Int4Packing:
    """4 bits from 0 to 15, with a scale and a middle for each group of inputs: (q - 8) * scale + middle.

    Outputs are filled up to whole tiles and inputs to whole groups. How a tile is laid out depends on the instructions
    that the CPU has.

    Args:
        group_size: Inputs in a group.

    Attributes:
        many: As for 8 bits.
    """

    many = 256

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return packed weights, and scales and middles, `(groups, outputs, 2)`, of float32 weights."""
        outputs, inputs = weight.shape
        weight = F.pad(weight, (0, -inputs % self.group_size, 0, -outputs % _TILE))
        groups = weight.unflatten(1, (-1, self.group_size))
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        step = ((high - low) / 15).bfloat16().float()
        middle = (low + 8 * step).bfloat16().float()
        step = torch.where(step > 0, step, 1.0)  # all alike: each is the middle
        digits = ((groups - middle[..., None]) / step[..., None]).round_().add_(8).clamp_(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(digits.flatten(1).to(torch.int32), 1)
        return packed, torch.stack((step, middle), dim=2).transpose(0, 1).contiguous().bfloat16()

    def multiply(self, states: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Multiply states, `(rows, inputs)` in bfloat16; returns `(rows, outputs)`."""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(states, packed, self.group_size, scales)

    def unpack(self, packed: torch.Tensor, scales: torch.Tensor, in_features: int) -> torch.Tensor:
        """Return weights in float32, `(outputs, in_features)`."""
        order = _order_in_tiles()
        tiles = packed.reshape(-1, 2 * packed.shape[1], len(order) // 2)
        digits = torch.stack((tiles & 15, tiles >> 4), dim=-1).flatten(2)[..., order.argsort()].transpose(1, 2)
        step, middle = scales.float().transpose(0, 1)[..., None].unbind(2)
        groups = digits.flatten(0, 1).unflatten(1, (-1, self.group_size)).float().sub_(8)
        return groups.mul_(step).add_(middle).flatten(1)[:, :in_features]

    def scales_of(self, scales: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the scales and middles of some outputs."""
        return scales[:, part]


PACKINGS: dict[int, Callable[[int], Int8Packing | Int4Packing]] = {8: Int8Packing, 4: Int4Packing}


@cache
def _order_in_tiles() -> torch.Tensor:
    """Return which output each half byte of a tile of packed weights belongs to, of the first input.

    Raises:
        RuntimeError: If this PyTorch lays out tiles in a way that is not known here.
    """
    output, place = torch.arange(2 * _TILE)[:, None].expand(-1, 2), torch.arange(2).expand(2 * _TILE, -1)
    outputs, places = _halves(output % 16) + 16 * _halves(output // 16), _halves(place)
    size = int(places.argmax())  # of a tile: then comes the second input
    order = outputs[:size]
    starts = size * torch.arange(2 * _TILE // size)[:, None, None]
    if not torch.equal(outputs, (starts + order.expand(2, -1)).flatten()):
        raise RuntimeError(
            f"This PyTorch ({torch.__version__}) lays out weights of 4 bits in another way: use 8 bits."
        )
    return order


def _halves(digits: torch.Tensor) -> torch.Tensor:
    """Pack small numbers as weights of 4 bits, and return all half bytes in order."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(digits.to(torch.int32).contiguous(), 1).flatten()
    return torch.stack((packed & 15, packed >> 4), dim=1).flatten().long()


class PackedLinear(nn.Module):
    """A linear layer with packed weights, for inference on a CPU.

    Args:
        linear: The layer whose weights are packed.
        config: How.

    Attributes:
        packed: Packed weights.
        scales: Scales, in bfloat16.
        bias: As that of the layer.
    """

    def __init__(self, linear: nn.Linear, config: PackedWeightsConfig) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits, self.dtype = config.bits, linear.weight.dtype
        self.packing = PACKINGS[config.bits](config.group_size)
        packed, scales = self.packing.pack(linear.weight.detach().float())
        # Parameters, not buffers: they are what the model knows, and counted and compared as such.
        self.missing = -linear.in_features % (config.group_size if config.bits == 4 else _TILE)
        self.packed, self.scales = (nn.Parameter(tensor, requires_grad=False) for tensor in (packed, scales))
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The weights as they count, a new tensor `(out_features, in_features)` in the dtype that they had."""
        weight = self.packing.unpack(self.packed, self.scales, self.in_features)
        return weight[: self.out_features].to(self.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `(..., in_features)` to `(..., out_features)`.

        Raises:
            ValueError: If gradients are wanted.
        """
        if torch.is_grad_enabled() and input.requires_grad:
            raise ValueError(
                f"Weights of {self.bits} bits have no gradients, and the input of a layer wants them: load the model "
                "without quantization_config to train it, or call it under torch.no_grad()."
            )
        states = input.reshape(-1, self.in_features).bfloat16()
        output = self._multiply_many(states) if self._are_many(states) else self._multiply(states)
        output = output.to(input.dtype).view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias

    def _are_many(self, states: torch.Tensor) -> bool:
        # In this order: reading sizes under a compiler would specialise the graph.
        return not torch.compiler.is_compiling() and states.shape[0] >= self.packing.many

    def _multiply(self, states: torch.Tensor) -> torch.Tensor:
        states = F.pad(states, (0, self.missing)) if self.missing else states.contiguous()
        return self.packing.multiply(states, self.packed, self.scales)[:, : self.out_features]

    def _multiply_many(self, states: torch.Tensor) -> torch.Tensor:
        """Multiply by weights that are unpacked a part at a time."""
        output = states.new_empty(len(states), self.out_features)
        exact = states.float() if multiplies_by_row(torch.bfloat16) else states
        size = max(1, PART // self.in_features // _TILE) * _TILE
        for first in range(0, self.out_features, size):
            part = slice(first, first + size)
            scales = self.packing.scales_of(self.scales, part)
            weight = self.packing.unpack(self.packed[part], scales, self.in_features)[: self.out_features - first]
            output[:, part] = F.linear(exact, weight.to(exact.dtype))
        return output

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedLinear":
        """Let the weights stay where and as they are."""
        scales = fn(self.scales)
        if scales.device.type != "cpu" or scales.dtype != torch.bfloat16:
            raise ValueError(
                f"A model with weights of {self.bits} bits stays on the CPU and in its dtype, and cannot be moved to "
                f"{scales.dtype} on {scales.device}: load it again, without quantization_config or another dtype=."
            )
        return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


@register_quantizer(METHOD)
class PackedWeightsQuantizer(HfQuantizer):
    """What `from_pretrained` asks about packed weights. The model is loaded whole, and packed layer by layer then."""

    requires_calibration = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what was saved packed, and devices other than a CPU.

        Raises:
            ValueError: For these.
        """
        if self.pre_quantized:
            raise ValueError(
                f"This checkpoint's config.json says that its weights are packed ({METHOD}), and packed weights are "
                "never saved: remove quantization_config from it, and give PackedWeightsConfig when loading."
            )
        given = kwargs.get("device_map")
        for device in given.values() if isinstance(given, dict) else [given]:
            if device is not None and str(device) not in ("cpu", "meta", "auto"):
                raise ValueError(
                    f"device_map = {given!r}: the products with packed weights run on CPUs; leave it out, or load "
                    "without PackedWeightsConfig."
                )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        _pack(model, self.quantization_config)
        return model

    def is_serializable(self) -> bool:
        """Refuse to save.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "Packed weights are not saved: their layout is that of this CPU. Save the model without "
            "quantization_config, and give PackedWeightsConfig when loading; packing takes seconds."
        )

    @property
    def is_trainable(self) -> bool:
        """No: the products have no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Yes: each product is one operation."""
        return True


def pack_weights(model: PreTrainedModel, config: PackedWeightsConfig | None = None) -> PreTrainedModel:
    """Pack the weights of a model that is in memory, as `from_pretrained(..., quantization_config=config)` does.

    Args:
        model: The model; it is changed, and returned.
        config: How; 8 bits by default.

    Raises:
        ValueError: If it has no linear layers to pack, or has weights that cannot be packed: not in half or single
            precision, not on a CPU, or not finite. It is then left as it is.
    """
    quantizer = PackedWeightsQuantizer(config or PackedWeightsConfig(), pre_quantized=False)
    _pack(model, quantizer.quantization_config)
    model.hf_quantizer = quantizer
    model.is_quantized, model.quantization_method = True, METHOD
    model.config.quantization_config = quantizer.quantization_config
    return model


def _pack(model: PreTrainedModel, config: Any) -> None:
    chosen = dict(_linear_layers(model, config.modules_to_not_convert or ()))
    if all(layer.weight.device.type == "meta" for layer in chosen.values()) and chosen:
        return  # names and shapes are looked at, and nothing is computed
    _check(model, chosen)
    model.requires_grad_(requires_grad=False)
    for name, layer in chosen.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, PackedLinear(layer, config).train(layer.training))


def _linear_layers(model: nn.Module, left_out: Collection[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yield names and layers; of subclasses of `nn.Linear` only those that are known to multiply and no more."""
    for name, module in model.named_modules():
        is_left_out = any(name == each or name.endswith(f".{each}") for each in left_out)
        if type(module) in (nn.Linear, LexLinear) and not is_left_out:
            assert isinstance(module, nn.Linear)
            yield name, module


def _check(model: nn.Module, layers: dict[str, nn.Linear]) -> None:
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no linear layers to pack: PackedWeightsConfig packs modules that are an "
            "nn.Linear and not among modules_to_not_convert."
        )
    for name, layer in layers.items():
        weight = layer.weight
        if weight.device.type != "cpu" or weight.dtype not in _DTYPES:
            raise ValueError(
                f"{name} has weights in {weight.dtype} on {weight.device}: those that are packed must be in float32, "
                "bfloat16 or float16, and on a CPU."
            )
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{name} has weights that are infinite or NaN, so it cannot be packed.")

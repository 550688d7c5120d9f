"""Weights laid out for the rows of a batch: what oneDNN would otherwise do anew in every step, on a CPU in float32."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from lex_hf.model.linear_lex import WORTH_IT, LexLinear, runs_plainly

logger = logging.get_logger(__name__)

_ROWS = 16  # for which weights are laid out; they serve any number, and one row is faster without


class WeightLayout:
    """Copies of the weights of linear layers, in the layout that products with several rows take.

    From two rows on, oneDNN brings weights into a layout of its own before it multiplies. With 2 to 16 rows that takes
    between one and three times as long as the product itself (`benchmarks/README.md`), so while a batch runs, the
    layers use copies that have it already. They take as much memory as the weights.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def nbytes(self) -> int:
        """Return the bytes that the copies take."""
        return sum(layer.weight.nbytes for layer in _layers(self.model))

    def apply(self) -> None:
        """Lay out the weights as they are now, and let layers use the copies."""
        for layer in _layers(self.model):
            laid_out = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
            vars(layer)["forward"] = partial(_multiply, layer, laid_out)

    def remove(self) -> None:
        """Let layers use their weights again."""
        for layer in _layers(self.model):
            vars(layer).pop("forward", None)


def _layers(model: nn.Module) -> Iterator[Any]:
    """Yield linear layers whose products gain by the layout; subclasses mean something else by a product."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return
    for layer in model.modules():
        if type(layer) in (nn.Linear, LexLinear):
            weight: Any = layer.weight
            is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.dtype == torch.float32
            if is_plain and weight.numel() >= WORTH_IT:
                yield layer


def _multiply(layer: nn.Linear, laid_out: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    is_single = states.numel() <= layer.in_features
    if is_single or states.dtype != torch.float32 or not runs_plainly(states) or torch.is_autocast_enabled("cpu"):
        return type(layer).forward(layer, states)
    return torch.ops.mkldnn._linear_pointwise(states, laid_out, layer.bias, "none", [], "")

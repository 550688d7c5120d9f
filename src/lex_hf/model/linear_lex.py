"""Linear layers that take the fastest kernel on a CPU."""

from functools import cache

import torch
from torch import nn

PART = 2**20  # weights that are brought into float32 at once: what a cache of a CPU holds
ROWS = 6  # of states, from which on that pays

# Below this many weights the call itself takes the time, and PyTorch's own product has the shorter one.
WORTH_IT = 2**18


def runs_plainly(*tensors: torch.Tensor) -> bool:
    """Return whether an operation on these tensors runs now, on a CPU and without gradients, not under a compiler."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return all(tensor.device.type == "cpu" for tensor in tensors)


def suits_parts(states: torch.Tensor, tokens: int, module: nn.Module) -> bool:
    """Return whether a module should take states in parts, in memory that is mapped already.

    Args:
        states: Shape `(batch, sequence, hidden_size)`.
        tokens: Number of tokens up to which nothing is gained.
        module: The module; its weights must be at hand.
    """
    # In this order: reading sizes under a compiler would specialise the graph, and weights are many.
    if not runs_plainly(states) or states.shape[0] * states.shape[1] <= tokens:
        return False
    return runs_plainly(*module.parameters())


class LexLinear(nn.Linear):
    """`nn.Linear`; without gradients on a CPU, oneDNN multiplies where it is faster than what PyTorch would call.

    In float32 it reads the weights faster: PyTorch leaves these products to another library, which for the matrices of
    a language model takes up to twice as long, most of all for the few rows of a decoding step. In half precision, on
    a CPU without instructions for it, PyTorch multiplies row by row; several rows are faster in float32, with weights
    that are brought into it a part at a time (`benchmarks/README.md`).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `(..., in_features)` to `(..., out_features)`."""
        if self._suits_onednn(input):
            if input.dtype == torch.float32:
                return product(input, self.weight, self.bias)
            return multiply_in_parts(input, self.weight, self.bias)
        return super().forward(input)

    def _suits_onednn(self, states: torch.Tensor) -> bool:
        weight = self.weight
        return (
            runs_plainly(states, weight)
            # Subclasses (sharded, quantised, fake) mean something else by a product.
            and type(weight) is nn.Parameter
            and type(states) is torch.Tensor
            and weight.dtype == states.dtype
            and states.numel() > 0
            and (self._is_worth_it(1) if states.dtype == torch.float32 else self._suits_parts(states))
            and not torch.is_autocast_enabled("cpu")
            and torch.backends.mkldnn.is_available()
        )

    def _is_worth_it(self, rows: int) -> bool:
        return rows * self.in_features * self.out_features >= WORTH_IT

    def _suits_parts(self, states: torch.Tensor) -> bool:
        rows = states.numel() // self.in_features
        return rows >= ROWS and self._is_worth_it(rows // ROWS) and multiplies_by_row(states.dtype)


def product(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply by oneDNN; all in float32, weights of the shape `(out_features, in_features)`."""
    return torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")


def multiply_in_parts(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply in float32, and round once, with a few rows of the weights in float32 at a time.

    Args:
        states: Shape `(..., in_features)`.
        weight: Shape `(out_features, in_features)`, in any dtype of numbers.
        bias: Shape `(out_features,)`, or `None`.

    Returns:
        Shape `(..., out_features)`, in the dtype of `states`.
    """
    exact = states.float()
    output = states.new_empty((*states.shape[:-1], len(weight)))
    size = max(1, PART // weight.shape[1])
    for first in range(0, len(weight), size):
        part = slice(first, first + size)
        output[..., part] = product(exact, weight[part].float(), None if bias is None else bias[part].float())
    return output


@cache
def multiplies_by_row(dtype: torch.dtype) -> bool:
    """Return whether PyTorch has no product of matrices in half precision here, but one for each row."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    is_supported = None if name is None else getattr(torch.ops.mkldnn, name, None)
    return is_supported is not None and not is_supported()

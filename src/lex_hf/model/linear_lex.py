"""Linear layers that take the faster of two kernels on a CPU."""

import torch
from torch import nn

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
    """`nn.Linear`; without gradients, in float32 on a CPU, oneDNN multiplies, which reads the weights faster.

    PyTorch leaves float32 products to another library, which for the matrices of a language model takes up to twice as
    long, most of all for the few rows of a decoding step (`benchmarks/README.md`).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `(..., in_features)` to `(..., out_features)`."""
        if self._suits_onednn(input):
            return torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
        return super().forward(input)

    def _suits_onednn(self, states: torch.Tensor) -> bool:
        weight = self.weight
        return (
            self.in_features * self.out_features >= WORTH_IT
            and runs_plainly(states, weight)
            # Subclasses (sharded, quantised, fake) mean something else by a product.
            and type(weight) is nn.Parameter
            and type(states) is torch.Tensor
            and weight.dtype == states.dtype == torch.float32
            and states.numel() > 0
            and not torch.is_autocast_enabled("cpu")
            and torch.backends.mkldnn.is_available()
        )

"""Linear layers that take the faster of two kernels on a CPU."""

import torch
from torch import nn

# Below this many weights the call itself takes the time, and PyTorch's own product has the shorter one.
WORTH_IT = 2**18


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
        if self.in_features * self.out_features < WORTH_IT or torch.compiler.is_compiling():
            return False
        weight = self.weight
        return (
            # Subclasses (sharded, quantised, fake) mean something else by a product.
            type(weight) is nn.Parameter
            and type(states) is torch.Tensor
            and weight.device.type == states.device.type == "cpu"
            and weight.dtype == states.dtype == torch.float32
            and states.numel() > 0
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and torch.backends.mkldnn.is_available()
        )

"""LexLinear gives what nn.Linear gives, by oneDNN where that pays, and by PyTorch everywhere else."""

import copy

import pytest
import torch
from helpers.calls import Calls
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lex_hf.model import linear_lex
from lex_hf.model.linear_lex import WORTH_IT, LexLinear

ONEDNN = "mkldnn._linear_pointwise.default"
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch is without oneDNN")


def by_onednn(layer: nn.Module, states: torch.Tensor) -> bool:
    with Calls() as calls:
        layer(states)
    return ONEDNN in calls.names


@pytest.fixture(scope="module")
def large() -> LexLinear:
    torch.manual_seed(0)
    layer = LexLinear(512, WORTH_IT // 512)
    assert layer.weight.numel() == WORTH_IT
    return layer


@given(
    rows=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    outputs=st.integers(WORTH_IT // 512, WORTH_IT // 512 + 40),
    bias=st.booleans(),
    transposed=st.booleans(),
)
def test_the_same_numbers(rows: list[int], outputs: int, bias: bool, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(outputs)
    layer = LexLinear(512, outputs, bias=bias)
    states = torch.randn(*rows, 512, generator=generator)
    if transposed and rows:
        states = states.transpose(0, -1).contiguous().transpose(0, -1)
    with torch.no_grad():
        output, expected = layer(states), copy.deepcopy(layer).double()(states.double())
    assert output.shape == expected.shape
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=1e-5)


@needs_onednn
def test_which_kernel(large: LexLinear) -> None:
    states = torch.randn(1, 1, 512)
    assert not by_onednn(large, states)  # gradients are wanted
    with torch.no_grad():
        assert by_onednn(large, states)
        assert not by_onednn(LexLinear(511, WORTH_IT // 512), states[..., :511])
        assert not by_onednn(copy.deepcopy(large).double(), states.double())
        assert not by_onednn(copy.deepcopy(large).bfloat16(), states.bfloat16())  # a single row
        assert not by_onednn(large, states[:, :0])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not by_onednn(large, states)
            assert large(states).dtype == torch.bfloat16
    with torch.inference_mode():
        assert by_onednn(large, states)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_half_precision(large: LexLinear, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_lex, "PART", 512 * 100)  # several parts, the last of them smaller
    layer, states = copy.deepcopy(large).to(dtype), torch.randn(2, 3, 512).to(dtype)
    with torch.no_grad():
        monkeypatch.setattr(linear_lex, "multiplies_by_row", lambda dtype: False)
        assert not by_onednn(layer, states)
        monkeypatch.setattr(linear_lex, "multiplies_by_row", lambda dtype: True)
        assert by_onednn(layer, states)
        assert not by_onednn(layer, states[:1])
        for each in (layer, LexLinear(512, 530, bias=False).to(dtype)):
            output, expected = each(states), copy.deepcopy(each).double()(states.double())
            assert (output.dtype, output.shape) == (dtype, expected.shape)
            # Sums in float32, rounded once.
            torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=torch.finfo(dtype).eps)
    assert not by_onednn(layer, states)  # gradients are wanted


def test_kernels_are_asked_for_what_this_processor_has() -> None:
    assert not linear_lex.multiplies_by_row(torch.float32)
    assert linear_lex.multiplies_by_row(torch.bfloat16) == (not torch.ops.mkldnn._is_mkldnn_bf16_supported())


def test_gradients(large: LexLinear) -> None:
    states = torch.randn(2, 3, 512, requires_grad=True)
    plain = nn.Linear(512, large.out_features)
    plain.load_state_dict(large.state_dict())
    for layer in (large, plain):
        layer(states).square().sum().backward()
    for mine, theirs in zip(large.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_weights_of_another_kind_are_left_to_pytorch(large: LexLinear) -> None:
    class Scaled(nn.Parameter):
        """A weight that means something else."""

    layer = copy.deepcopy(large)
    layer.weight = Scaled(layer.weight.detach(), requires_grad=False)
    with torch.no_grad():
        assert not by_onednn(layer, torch.randn(1, 512))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch 2.15, on its kernel
def test_under_vmap(large: LexLinear) -> None:
    states = torch.randn(4, 3, 512)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(large)(states), large(states), atol=2e-5, rtol=1e-5)


def test_compiles_to_one_graph(large: LexLinear) -> None:
    states = torch.randn(2, 512)
    with torch.no_grad():
        compiled = torch.compile(large, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(states), large(states), atol=2e-5, rtol=1e-5)
        exported = torch.export.export(large, (states,)).module()
        torch.testing.assert_close(exported(states), large(states), atol=2e-5, rtol=1e-5)

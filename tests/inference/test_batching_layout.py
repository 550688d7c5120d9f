"""Copies of weights in the layout of a batch: the same products, and never those of weights that have changed."""

from typing import Any

import pytest
import torch
from helpers.models import needs_rows, random_ids, tiny_model
from helpers.rope_models import rope_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lex_hf import blockwise
from lex_hf.inference.batching import layout
from lex_hf.inference.batching.layout import WeightLayout
from lex_hf.model.linear_lex import LexLinear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch was built without oneDNN")


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "WORTH_IT", 1)


@settings(max_examples=40)
@given(
    kind=st.sampled_from([nn.Linear, LexLinear]),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=3),
    bias=st.booleans(),
)
def test_products_are_those_of_the_weights(
    kind: type[nn.Linear], sizes: tuple[int, int], shape: list[int], bias: bool
) -> None:
    layer = kind(*sizes, bias=bias)
    states = torch.randn(*shape, sizes[0])
    expected = nn.functional.linear(states.double(), layer.weight.double(), layer.bias.double() if bias else None)
    laid_out = WeightLayout(nn.ModuleList([layer]))
    laid_out.apply()
    with torch.no_grad():
        torch.testing.assert_close(layer(states).double(), expected, atol=1e-4, rtol=1e-5)
        assert layer(states[..., :0, :] if shape else states).shape[-1] == sizes[1]
    laid_out.remove()
    assert "forward" not in vars(layer)


def test_gradients_and_other_dtypes_go_their_own_way() -> None:
    layer = LexLinear(6, 4)
    WeightLayout(nn.ModuleList([layer])).apply()
    states = torch.randn(3, 6, requires_grad=True)
    layer(states).sum().backward()
    assert states.grad is not None
    assert layer.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(states).dtype == torch.bfloat16


def test_what_is_no_plain_weight_is_left_alone() -> None:
    class Other(nn.Linear):
        pass

    layers = nn.ModuleList([Other(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, device="meta")])
    laid_out = WeightLayout(layers)
    laid_out.apply()
    assert laid_out.nbytes() == 0
    assert not any("forward" in vars(layer) for layer in layers)


@needs_rows
@pytest.mark.parametrize("make", [tiny_model, lambda: blockwise(rope_model())])
def test_a_manager_uses_them_while_it_runs_and_takes_new_weights_after_a_pause(make: Any) -> None:
    model = make()
    prompts = [random_ids(1, n, seed=n, vocab_size=60)[0].tolist() for n in (4, 19, 33)]
    manager = model.init_continuous_batching(
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=3)
    )

    def written() -> list[list[int]]:
        names = [manager.add_request(ids, max_new_tokens=12) for ids in prompts]
        return [manager.get_result(name).generated_tokens for name in names]

    def alone() -> list[list[int]]:
        ids = [torch.tensor([each]) for each in prompts]
        return [model.generate(each, max_new_tokens=12, do_sample=False)[0, each.shape[1] :].tolist() for each in ids]

    expected = alone()
    manager.start()
    assert "forward" in vars(model.lm_head)
    assert written() == expected
    with manager.pause():
        assert "forward" not in vars(model.lm_head)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.data.neg_()
        changed = alone()
    assert changed != expected
    assert written() == changed
    manager.stop()
    assert not any("forward" in vars(layer) for layer in model.modules())
    manager.destroy()


@needs_rows
@pytest.mark.parametrize(("free", "is_used"), [(10**4, False), (10**9, True)])
def test_without_memory_for_them_there_are_none(free: int, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lex_hf.inference.batching.manager.free_memory", lambda device: free)
    model = tiny_model()
    with model.continuous_batching_context_manager(
        continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=2)
    ):
        assert ("forward" in vars(model.lm_head)) == is_used

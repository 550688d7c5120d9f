"""Order variance and translation invariance, for our schemes and for models of others."""

from typing import Any

import pytest
import torch
from helpers.models import PATTERNS, SCHEMES, random_ids, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lex_hf import check_positions

ABSOLUTE = ("sinusoidal", "learned")


@pytest.mark.parametrize("scheme", [{}, {"position_embedding_type": "rope"}, *SCHEMES])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_holds_for_each_scheme_and_pattern(scheme: dict[str, Any], pattern: dict[str, Any]) -> None:
    model = tiny_model(dtype=torch.float64, **(pattern | scheme))
    check = check_positions(model, random_ids(1, 40), tolerance=1e-9)
    # Even without a scheme the causal mask of two layers tells something of the order.
    assert check.is_order_variant
    assert check.ignores_padding
    absolute = model.config.position_embedding_type in ABSOLUTE
    assert check.ignores_shifts != absolute
    # Two layers reach back less than 40 tokens: text in front only matters if it moves the borders of blocks.
    moved = {"full": True, "sliding": False, "blockwise": check.shift % (model.config.block_length or 7) != 0}
    expected = absolute or any(moved[name] for name in model.config.layer_patterns)
    assert (check.text_in_front > check.tolerance) == expected


def test_a_model_without_order_is_found_out() -> None:
    one_layer = {"num_hidden_layers": 1, "attention_pattern": "full", "dtype": torch.float64}
    assert not check_positions(
        tiny_model(position_embedding_type="none", **one_layer), random_ids(40)
    ).is_order_variant
    assert check_positions(tiny_model(position_embedding_type="rope", **one_layer), random_ids(40)).is_order_variant


def test_a_model_in_training_is_checked_without_dropout_and_left_in_training() -> None:
    model = tiny_model(hidden_dropout=0.5).train()
    assert check_positions(model, random_ids(1, 20)).ignores_padding
    assert model.training


def test_learned_positions_beyond_the_table_are_reported_not_raised() -> None:
    model = tiny_model(position_embedding_type="learned")
    check = check_positions(model, random_ids(1, 14)[:, :7], shift=8)
    assert check.shifted_positions is check.text_in_front is None
    assert not check.ignores_shifts


def test_models_of_others() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None}
    llama = LlamaForCausalLM(
        LlamaConfig(hidden_size=24, num_attention_heads=2, num_hidden_layers=2, intermediate_size=20, **sizes)
    ).eval()
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=24, n_head=2, n_layer=2, n_positions=64, **sizes)).eval()
    for module in (*llama.modules(), *gpt2.modules()):
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight)
    assert check_positions(llama, random_ids(1, 30)).ignores_shifts
    check = check_positions(gpt2, random_ids(1, 30))
    assert check.is_order_variant
    assert not check.ignores_shifts
    assert check.right_padding <= check.tolerance < check.left_padding


@pytest.mark.parametrize("ids", [torch.ones(2, 9, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)])
def test_bad_input(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="give one text of at least 3 tokens"):
        check_positions(tiny_model(), ids)
    with pytest.raises(ValueError, match="shift = 0"):
        check_positions(tiny_model(), random_ids(9), shift=0)
    with pytest.raises(ValueError, match="tolerance = nan"):
        check_positions(tiny_model(), random_ids(9), tolerance=float("nan"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_of_logits_that_are_not_finite_nothing_is_said(value: float) -> None:
    model = tiny_model()
    torch.nn.init.constant_(model.lm_head.weight, value)
    with pytest.raises(ValueError, match=r"logits of the model are not all finite numbers.*check its weights"):
        check_positions(model, random_ids(9))

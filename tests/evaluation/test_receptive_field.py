"""Receptive fields: shares of gradients, what the patterns let through, and models of others."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference
from helpers.models import PATTERNS, random_ids, tiny_model
from helpers.official import official
from helpers.other_models import bert, gpt2, gpt_neox, llama
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lex_hf import LexConfig, LexForCausalLM
from lex_hf.evaluation.receptive_field import (
    cumulative_gradient,
    empirical_receptive_field,
    receptive_field,
    theoretical_receptive_field,
)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(0, 0.999))
def test_shares_and_their_threshold_by_hand(norms: list[float], threshold: float) -> None:
    norms[len(norms) // 2] += 1.0  # at least one is above 0
    cumulative = cumulative_gradient(torch.tensor(norms, dtype=torch.float64))
    expected = [math.fsum(norms[len(norms) - k :]) / math.fsum(norms) for k in range(1, len(norms) + 1)]
    assert cumulative.tolist() == pytest.approx(expected, abs=1e-12)
    erf = int(empirical_receptive_field(cumulative, threshold))
    assert cumulative[erf - 1] > threshold
    assert erf == 1 or cumulative[erf - 2] <= threshold


def test_golden_cases(golden: Path) -> None:
    for case in json.loads((golden / "receptive_field.json").read_text())["cases"]:
        norms = torch.tensor(case["gradient_norms"], dtype=torch.float64)
        if "gradient_vectors" in case:
            norms = torch.tensor(case["gradient_vectors"], dtype=torch.float64).norm(dim=-1)
        cumulative = cumulative_gradient(norms)
        expected = torch.tensor(case["c"], dtype=torch.float64).flip(0)
        torch.testing.assert_close(cumulative, expected, rtol=0, atol=1e-9)
        assert int(empirical_receptive_field(cumulative)) == case["ERF_tokens"], case["note"]


@pytest.mark.parametrize("norms", [[0.0, 0.0], [1.0, math.nan], [1.0, -1.0], [math.inf], []])
def test_norms_that_are_none(norms: list[float]) -> None:
    with pytest.raises(ValueError, match="Gradient norms must be finite"):
        cumulative_gradient(torch.tensor(norms))


@pytest.mark.parametrize(
    ("pattern", "name", "length"),
    [("blockwise", "bca", n) for n in (32, 48, 160)] + [("full", "causal", n) for n in (48, 160)],
)
def test_golden_gradients(golden: Path, pattern: str, name: str, length: int) -> None:
    stored = load_file(golden / "lex_gradients_f64.safetensors")
    ids = load_file(golden / "lex_torchscale_logits_f32.safetensors")[f"input_ids_{length}"]
    model = official(golden, attention_pattern=pattern).double()
    field = receptive_field(model, ids, targets=stored[f"target_{length}"], progress=False)
    expected = stored[f"cumulative_{name}_{length}"].flip(1)
    torch.testing.assert_close(field.curves[:, 0], expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(field.cumulative, expected.mean(dim=0), rtol=0, atol=1e-9)
    assert field.theoretical == (64 if (pattern, length) == ("blockwise", 160) else length)
    reached = [int((row < 1).sum()) + 1 for row in field.curves[:, 0]]
    assert reached == [field.theoretical] * 2
    smallest = [next(k for k in range(1, length + 1) if row[k - 1] > 0.99) for row in expected]
    assert field.erfs[:, 0].tolist() == smallest


def reach_by_hand(config: LexConfig, length: int) -> list[int]:
    """How many tokens act on the prediction after each of `length` tokens, from the masks of all layers."""
    acts = torch.eye(length)
    for pattern in config.layer_patterns:
        acts = reference.visible(pattern, length, config.attention_span(pattern)).float() @ acts
    return [position - int(row.nonzero().min()) + 1 for position, row in enumerate(acts)]


@given(
    st.lists(st.sampled_from(["blockwise", "sliding"]), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(1, 6),
)
@hypothesis_settings(max_examples=40)
def test_what_patterns_let_through(patterns: list[str], block: int, window: int) -> None:
    sizes = {"block_length": block, "sliding_window": window, "num_hidden_layers": len(patterns)}
    config = LexConfig(attention_pattern=patterns, **sizes)
    expected = reach_by_hand(config, 45)
    assert [theoretical_receptive_field(config, position) for position in range(45)] == expected
    assert theoretical_receptive_field(config) == max(expected)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_zero_exactly_where_the_patterns_say(pattern: dict[str, Any]) -> None:
    model, positions = tiny_model(dtype=torch.float64, **pattern), [0, 6, 20, 27, 39]
    field = receptive_field(model, random_ids(2, 40), positions=positions, progress=False)
    for index, position in enumerate(positions):
        reach = theoretical_receptive_field(model.config, position)
        assert reach is not None
        assert (field.curves[:, index, reach - 1 :] == 1).all()
        assert (field.curves[:, index, : reach - 1] < 1).all()
    assert field.theoretical == max(theoretical_receptive_field(model.config, p) or 0 for p in positions)
    bound = theoretical_receptive_field(model.config)
    assert (bound is None) == ("full" in model.config.layer_patterns)


def test_gradients_match_finite_differences() -> None:
    model, ids, step = tiny_model(dtype=torch.float64), random_ids(1, 5), 1e-6
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        target = int(model(ids).logits[0, -1].argmax())
        moves = step * torch.eye(embeds.numel(), dtype=torch.float64).view(-1, *embeds.shape[1:])
        ahead, behind = (
            model(inputs_embeds=embeds + sign * moves).logits[:, -1].log_softmax(-1)[:, target] for sign in (1, -1)
        )
    norms = ((ahead - behind) / (2 * step)).view(5, -1).norm(dim=1)
    expected = torch.tensor([float(norms[5 - k :].sum() / norms.sum()) for k in range(1, 6)], dtype=torch.float64)
    field = receptive_field(model, ids, progress=False)
    torch.testing.assert_close(field.cumulative, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [tiny_model, gpt2, llama, gpt_neox])
def test_positions_and_batches_are_texts_of_their_own(make: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    model, ids, positions = make().double().eval(), random_ids(3, 30), [28, 3, 13]
    targets = torch.stack([ids[:, p + 1] for p in positions], dim=1)
    field = receptive_field(model, ids, targets=targets, positions=positions, batch_size=2, progress=False)
    assert field.curves.shape == (3, 3, 29)
    assert field.positions == positions
    for index, position in enumerate(positions):
        cut = ids[:, : position + 1]
        alone = receptive_field(model, cut, targets=targets[:, index], batch_size=1, progress=False)
        torch.testing.assert_close(field.curves[:, index, : position + 1], alone.curves[:, 0], rtol=0, atol=1e-9)
        assert torch.equal(field.erfs[:, index], alone.erfs[:, 0])
        assert (field.curves[:, index, position:] == 1).all()
    torch.testing.assert_close(field.cumulative, sum(field.curves.reshape(9, 29)) / 9)


def test_without_targets_the_most_likely_token_is_explained() -> None:
    model, ids = tiny_model(), random_ids(3, 20)
    likely = model(ids).logits[:, [4, 19]].argmax(-1)
    found = receptive_field(model, ids, positions=[4, 19], progress=False)
    expected = receptive_field(model, ids, positions=[4, 19], targets=likely, progress=False)
    other = receptive_field(model, ids, positions=[4, 19], targets=(likely + 1) % 97, progress=False)
    assert torch.equal(found.curves, expected.curves)
    assert not torch.allclose(found.curves, other.curves)


def test_less_memory_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(4, 20)
    expected, forward, sizes = receptive_field(model, ids, progress=False), model.forward, []

    def limited(inputs_embeds: Tensor, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        sizes.append(len(inputs_embeds))
        if sizes[-1] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return forward(inputs_embeds=inputs_embeds, logits_to_keep=logits_to_keep, **kwargs)

    monkeypatch.setattr(model, "forward", limited)
    found = receptive_field(model, ids, batch_size=3, progress=False)
    assert sizes == [3, 2, 2]
    torch.testing.assert_close(found.curves, expected.curves)


def test_models_without_logits_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(2, 20)
    expected, forward = receptive_field(model, ids, positions=[3, 19], progress=False), model.forward
    monkeypatch.setattr(model, "forward", lambda inputs_embeds, use_cache: forward(inputs_embeds=inputs_embeds))
    torch.testing.assert_close(receptive_field(model, ids, positions=[3, 19], progress=False).curves, expected.curves)
    monkeypatch.setattr(model, "forward", lambda input_ids: forward(input_ids))
    with pytest.raises(ValueError, match="does not accept inputs_embeds"):
        receptive_field(model, ids, progress=False)


def test_the_model_is_left_as_it_was() -> None:
    model, ids = tiny_model(hidden_dropout=0.5, attention_dropout=0.5), random_ids(2, 20)
    expected = receptive_field(model, ids, progress=False)
    model.train()
    model.model.norm.eval()
    with torch.inference_mode():
        found = receptive_field(model, ids, progress=False)
    assert torch.equal(found.curves, expected.curves)
    assert model.model.layers[0].training
    assert not model.model.norm.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not found.curves.requires_grad


def test_results_are_ready_for_json() -> None:
    field = receptive_field(tiny_model(), random_ids(2, 40), threshold=0.5, progress=False)
    plain = json.loads(json.dumps(field.to_dict()))
    assert plain["cumulative"] == field.cumulative.tolist()
    assert len(plain["cumulative"]) == 40
    assert plain["erf"] == field.erf == next(k for k, share in enumerate(plain["cumulative"], 1) if share > 0.5)
    assert plain["erfs"] == field.erfs.tolist()
    # Block 5 of 7 tokens holds positions 35 to 39; two layers add two blocks.
    assert (plain["theoretical"], plain["training_length"], plain["positions"]) == (5 + 14, 14, [39])


def model_with(weight: float) -> LexForCausalLM:
    model = tiny_model()
    nn.init.constant_(model.lm_head.weight, weight)
    return model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, r"shape \(2, 0\); give texts of equal length"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"positions": [9]}, "must be different indices of tokens, 0 to 8"),
        ({"positions": [-1]}, "must be different indices of tokens, 0 to 8"),
        ({"positions": [3, 3]}, "must be different indices of tokens, 0 to 8"),
        ({"positions": []}, "must be different indices of tokens, 0 to 8"),
        ({"targets": torch.ones(3, dtype=torch.long)}, r"targets has the shape \(3,\).*\(2, 1\)"),
        ({"positions": [1, 2], "targets": torch.ones(2, dtype=torch.long)}, r"targets has the shape \(2,\).*\(2, 2\)"),
        ({"threshold": 1.0}, r"threshold = 1.0: it must lie in \[0, 1\)"),
        ({"model": model_with(math.nan)}, "Gradient norms must be finite"),
        ({"model": model_with(0.0)}, "one of each text above 0"),
        ({"model": bert().eval(), "positions": [4]}, "lets tokens after position 4 influence its prediction"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    given_arguments = {"model": tiny_model(), "input_ids": random_ids(2, 9), **arguments}
    with pytest.raises(ValueError, match=message):
        receptive_field(**given_arguments, progress=False)


def test_negative_positions_have_no_field() -> None:
    with pytest.raises(ValueError, match="position = -1: it must be at least 0"):
        theoretical_receptive_field(LexConfig(), -1)


def test_weights_that_are_not_finite_are_named_as_the_cause() -> None:
    model = tiny_model()
    torch.nn.init.constant_(model.model.layers[0].mlp.down_proj.weight, math.nan)
    with pytest.raises(ValueError, match=r"Gradient norms must be finite.*weights"):
        receptive_field(model, random_ids(12), positions=[5], progress=False)

"""Attention to the first tokens of a text, beside softmax in loops."""

import pytest
import torch
from helpers.rope_models import LENGTH, VOCABULARY, rope_model
from helpers.slow_rope import SlowModel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lex_hf import blockwise
from lex_hf.evaluation.first_tokens import attention_to_first_tokens, even_share

TEXTS, TOKENS = 3, 13


def texts() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, VOCABULARY, (TEXTS, TOKENS), generator=generator)


@torch.no_grad()
def slow(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Mean weights by loops over layers, heads, queries and keys, for one text."""
    slow_model, first = SlowModel(model), len(ids) // 4
    states, found = model.get_input_embeddings()(ids), []
    for layer in slow_model.layers:
        query, key, value = slow_model.projected(layer, states)
        heads, rows = query.shape[1], []
        total = torch.zeros(heads, first, dtype=torch.float64)
        for i in range(len(ids)):
            scores = torch.stack([(slow_model.rotated(query[i], i - j) * key[j]).sum(-1) for j in range(i + 1)])
            weights = (scores * query.shape[-1] ** -0.5).softmax(dim=0)
            total += weights[:first].T if i >= first else 0
            rows.append((weights[..., None] * value[: i + 1]).sum(dim=0).float())
        found.append(total / (len(ids) - first))
        states = slow_model.finished(layer, states, torch.stack(rows))
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_weights_are_those_of_loops(kind: str, attention: str) -> None:
    model = rope_model(kind, attention)
    found = attention_to_first_tokens(model, texts())
    assert found.shape == (3, 4, TOKENS // 4)
    expected = torch.stack([slow(model, row) for row in texts()]).mean(dim=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert model.config._attn_implementation == attention


def test_a_model_that_ignores_its_tokens_spreads_attention_evenly() -> None:
    model = rope_model()
    for layer in model.get_decoder().layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    found = attention_to_first_tokens(model, texts())
    torch.testing.assert_close(found, torch.full_like(found, even_share(TOKENS)))
    assert even_share(TOKENS) == pytest.approx(sum(1 / seen for seen in range(4, TOKENS + 1)) / 10)


@pytest.mark.parametrize("shape", [(5,), (0, 5), (1, 3), (1, 1, 5)])
def test_texts_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give texts of equal length, at least one, of at least 4 tokens"):
        attention_to_first_tokens(rope_model(), torch.ones(shape, dtype=torch.long))


def test_a_model_in_blocks_shows_the_same_within_the_training_length() -> None:
    model, ids = rope_model(), texts()[:, :LENGTH]
    whole = attention_to_first_tokens(model, ids)
    torch.testing.assert_close(attention_to_first_tokens(blockwise(model), ids), whole)


def test_models_without_attention_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", vocab_size=VOCABULARY, hidden_size=8))
    with pytest.raises(ValueError, match="MambaForCausalLM returns no attention weights of all keys"):
        attention_to_first_tokens(model, texts())

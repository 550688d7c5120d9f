"""A recipe with what is changed of it, and what comes of it without a command line."""

from pathlib import Path

import pytest
from helpers.models import tiny_model
from transformers import GPT2Config

from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.training.planning import customize, packing, planned_config, train_recipe
from lex_hf.training.recipes import load_recipe

SIZES = ("hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=16")
SMALL = (*SIZES, "training_length=16", "per_device_train_batch_size=2", "examples_per_step=2")


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("tiny", {"model": "some/model", "tokenizer": "bytes"}, "has a tokenizer of its own"),
        ("tiny", {"model": "some/model", "assignments": ["hidden_size=3"]}, "has a configuration of its own"),
        ("fine-tune", {}, "describes no model: give one with --model"),
    ],
)
def test_a_model_has_one_configuration_and_one_tokenizer(
    recipe: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        customize(load_recipe(recipe), **changes)


def test_a_configuration_is_planned_without_weights(tmp_path: Path) -> None:
    assert planned_config(customize(load_recipe("tiny"), assignments=SMALL)).hidden_size == 16
    tiny_model().config.save_pretrained(tmp_path / "lex")
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    recipe = customize(load_recipe("fine-tune"), model="any")
    assert planned_config(recipe, str(tmp_path / "lex")).training_length == 14
    with pytest.raises(ValueError, match="is of type 'gpt2'"):
        planned_config(recipe, str(tmp_path / "gpt2"))


def test_texts_are_found_before_there_is_a_tokenizer(tmp_path: Path) -> None:
    recipe = load_recipe("tiny")
    with pytest.raises(OSError, match="no such file"):
        packing(recipe, [str(tmp_path / "nothing.txt")], 0)
    text = tmp_path / "text.txt"
    text.write_text("some words " * 20)
    examples = packing(recipe, [str(text)], 0)(byte_tokenizer(), 10)
    assert len(examples[0]["input_ids"]) == 10


def test_a_recipe_is_trained_and_left_with_the_model(tmp_path: Path) -> None:
    text, output, sizes = tmp_path / "text.txt", tmp_path / "out", []
    text.write_text("some words " * 20)
    recipe = customize(load_recipe("tiny"), assignments=[*SMALL, "max_steps=2"])
    result = train_recipe(recipe, [str(text)], output, announce=sizes.append)
    assert (result.steps, result.tokens) == (2, 64)
    assert sizes[0].startswith("tiny: ")
    assert "32 tokens a step, 1 processes" in sizes[0]
    assert load_recipe(output / "recipe.yaml").model["hidden_size"] == 16

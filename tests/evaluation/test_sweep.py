"""Measurements that are repeated: lengths, pairs of models, patterns, and the segments they are measured on."""

from pathlib import Path

import pytest
from datasets import Dataset
from helpers.models import tiny_model
from helpers.rope_models import rope_model

from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import PerplexityOptions, compute_perplexity, measure_perplexity
from lex_hf.evaluation.segments import segments_in_turn, take_segments
from lex_hf.evaluation.sweep import (
    at_lengths,
    check_patterns,
    measure_lengths,
    measure_pair,
    own_pattern,
    with_patterns,
)

TEXTS = ["the first text, of several words", "another one, which is longer than the first text was"]
QUIET = PerplexityOptions(progress=False)


def _model(seed: int = 0) -> object:
    return tiny_model(vocab_size=257, bos_token_id=256, eos_token_id=256, pad_token_id=256, seed=seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    paths = [tmp_path_factory.mktemp(name) for name in "ab"]
    for seed, path in enumerate(paths):
        _model(seed).save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
    return str(paths[0]), str(paths[1])


def test_lengths_are_measured_longest_first_and_returned_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, measured = _model(), byte_tokenizer(), []

    def noted(*arguments: object) -> object:
        measured.append(arguments[-1].length)
        return measure_perplexity(*arguments)

    monkeypatch.setattr("lex_hf.evaluation.sweep.measure_perplexity", noted)
    results = measure_lengths(model, tokenizer, TEXTS, at_lengths(QUIET, (5, 20, 9, 5)))
    assert measured == [20, 9, 5]
    assert [result.length for result in results] == [5, 20, 9, 5]


def test_without_lengths_the_model_s_own_is_measured() -> None:
    (result,) = measure_lengths(_model(), byte_tokenizer(), TEXTS, at_lengths(QUIET, ()))
    assert result.length == 14


def test_all_lengths_are_checked_before_a_measurement() -> None:
    with pytest.raises(ValueError, match="length = 0"):
        at_lengths(QUIET, (5, 0))


def test_a_pair_is_measured_at_the_length_of_the_first(folders: tuple[str, str]) -> None:
    loading = {"device": "cpu"}
    a, b = measure_pair(folders, (loading, {**loading, "attention_pattern": "full"}), TEXTS, options=QUIET)
    assert (a.length, b.length) == (14, 14)
    expected = compute_perplexity(_model(), byte_tokenizer(), TEXTS, length=14, progress=False)
    assert a.nll == pytest.approx(expected.nll, rel=1e-6)
    assert a.nll != b.nll


def test_pairs_that_cannot_be_compared_fail_before_a_measurement(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("lex_hf.evaluation.sweep.measure_perplexity")
    with pytest.raises(ValueError, match="too few pairs, 1"):
        measure_pair(folders, ({"device": "cpu"},) * 2, TEXTS[:1], options=QUIET)
    pair = (folders[0], str(tmp_path / "nothing"))
    with pytest.raises((ValueError, OSError), match="nothing"):
        measure_pair(pair, ({"device": "cpu"},) * 2, TEXTS, options=QUIET)


def test_a_model_is_loaded_with_each_pattern(folders: tuple[str, str]) -> None:
    documents, loading = Dataset.from_dict({"text": TEXTS}), {"device": "cpu"}
    found = list(with_patterns(folders[0], documents, ["full", "sliding"], loading=loading, length=8, count=3))
    assert [(name, model.config.layer_patterns[0], tuple(ids.shape)) for name, model, ids in found] == [
        ("full", "full", (3, 8)),
        ("sliding", "sliding", (3, 8)),
    ]
    ((own, _, ids),) = with_patterns(folders[0], documents, (), loading=loading, length=8, count=2)
    assert own == "blockwise"
    assert bytes(ids[1].tolist()) == b"another "
    with pytest.raises(ValueError, match="attention_pattern = 'local': it must be one of blockwise"):
        check_patterns(["full", "local"])


def test_a_model_whose_layers_differ_has_a_short_name() -> None:
    assert own_pattern(tiny_model(num_hidden_layers=3, attention_pattern=["full", "blockwise", "full"])) == (
        "blockwise + full"
    )
    assert own_pattern(tiny_model(attention_pattern=["sliding"] * 3)) == "sliding"
    assert own_pattern(rope_model()) == "llama"


def test_segments_are_taken_from_the_texts_in_turn() -> None:
    documents = [[0, 1, 2, 3, 4], [10, 11], [20, 21, 22, 23]]
    assert segments_in_turn(documents, 2) == [[0, 1], [10, 11], [20, 21], [2, 3], [22, 23]]
    assert take_segments(documents, 2, 4).tolist() == [[0, 1], [10, 11], [20, 21], [2, 3]]
    with pytest.raises(ValueError, match="hold 5 segments of 2 tokens, 6 were requested"):
        take_segments(documents, 2, 6)

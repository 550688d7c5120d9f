"""One measurement repeated: at several lengths, for two models, with several attention patterns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lex_hf.data.tokenizing import tokenize_documents
from lex_hf.evaluation.comparison import check_pairs
from lex_hf.evaluation.loading import check_model, load_for_evaluation
from lex_hf.evaluation.perplexity import PerplexityOptions, measure_perplexity
from lex_hf.evaluation.results import PerplexityResult
from lex_hf.evaluation.segments import take_segments
from lex_hf.model.configuration_lex import ATTENTION_PATTERNS

_NOT_OF_THE_CHECKPOINT = ("device", "dtype", "blockwise", "sinks")


def measure_lengths(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    options: Sequence[PerplexityOptions],
) -> list[PerplexityResult]:
    """Measure perplexity with each of the options that [`at_lengths`] returns; results are in their order.

    The longest length is measured first, because it is the one that may fail.
    """
    by_length = {each.length: each for each in options}
    longest_first = sorted(by_length, key=lambda length: length or 0, reverse=True)
    found = {length: measure_perplexity(model, tokenizer, texts, by_length[length]) for length in longest_first}
    return [found[each.length] for each in options]


def at_lengths(options: PerplexityOptions, lengths: Sequence[int]) -> list[PerplexityOptions]:
    """Return the options for each of several lengths, in their order; those given if there are no lengths.

    Raises:
        ValueError: If a length is out of range.
    """
    return [replace(options, length=each) for each in lengths] or [options]


def measure_pair(
    models: tuple[str, str],
    loading: tuple[Mapping[str, Any], Mapping[str, Any]],
    texts: Sequence[str],
    *,
    options: PerplexityOptions,
) -> tuple[PerplexityResult, PerplexityResult]:
    """Measure the perplexity of two models on the same texts, one after the other.

    Args:
        models: Folders or Hub ids of A and B.
        loading: Options of `load_for_evaluation` for each.
        texts: At least two.
        options: Options of the measurement; where `length` is `None`, both are measured at A's default.

    Raises:
        ValueError: If there are too few texts or a model does not load, before anything is measured; or as of
            `measure_perplexity`.
    """
    for model, given in zip(models, loading, strict=True):
        check_model(model, **{name: value for name, value in given.items() if name not in _NOT_OF_THE_CHECKPOINT})
    check_pairs(len(texts))
    results: list[PerplexityResult] = []
    for model, given in zip(models, loading, strict=True):
        loaded = load_for_evaluation(model, **given)
        results.append(measure_perplexity(*loaded, texts, options))
        options = replace(options, length=results[0].length)
    a, b = results
    return a, b


def with_patterns(
    model: str,
    texts: Dataset,
    patterns: Sequence[str],
    *,
    loading: Mapping[str, Any],
    length: int,
    count: int,
) -> Iterator[tuple[str, PreTrainedModel, Tensor]]:
    """Load a model with each attention pattern, and take segments of texts as token ids.

    Args:
        model: Folder or Hub id.
        texts: A dataset with the column `text`.
        patterns: Attention patterns; the model's own if there are none.
        loading: Further options of `load_for_evaluation`.
        length: Tokens of a segment.
        count: Number of segments.

    Yields:
        Name of the pattern, the model, and token ids of shape `(segments, length)`.

    Raises:
        ValueError: If the model does not load, or the texts hold fewer segments.
    """
    chosen: list[str | None] = [*patterns] if patterns else [None]
    for pattern in chosen:
        network, tokenizer = load_for_evaluation(model, **loading, **of_pattern(pattern))
        ids = take_segments(tokenize_documents(texts, tokenizer)["input_ids"], length, count)
        yield pattern or own_pattern(network), network, ids


def own_pattern(model: PreTrainedModel) -> str:
    """Return the attention pattern of a LEX model, all of them if layers differ, or the type of another model."""
    patterns = getattr(model.config, "layer_patterns", [model.config.model_type])
    return " + ".join(sorted(set(patterns)))


def of_pattern(name: str | None) -> dict[str, Any]:
    """Return the option of `load_for_evaluation` for an attention pattern; none for a model's own."""
    return {} if name is None else {"attention_pattern": name}


def check_patterns(names: Sequence[str]) -> None:
    """Check names of attention patterns.

    Raises:
        ValueError: If one is unknown.
    """
    for name in names:
        if name not in ATTENTION_PATTERNS:
            raise ValueError(f"attention_pattern = {name!r}: it must be one of {', '.join(ATTENTION_PATTERNS)}.")

"""Recall of one model that reads in several ways, over the same texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from lex_hf.data.documents import load_documents
from lex_hf.data.token_ids import load_token_ids
from lex_hf.errors import plain
from lex_hf.evaluation.answers import own_cache
from lex_hf.evaluation.hidden_pairs import RecallTask
from lex_hf.evaluation.loading import load_for_evaluation, load_without_tokenizer
from lex_hf.evaluation.recall import RecallOptions, RecallResult, Texts, known_training_length, measure_texts
from lex_hf.evaluation.recall_tasks import SENTENCE, TextRecall, TokenRecall
from lex_hf.evaluation.sweep import check_patterns, of_pattern, own_pattern
from lex_hf.rope.blockwise import reader_of
from lex_hf.rope.ways import WAYS, Size

_KEY_LENGTH = 4  # ids of a key among those of a text, which thereby hardly ever hold it by chance

Loaded = tuple[PreTrainedModel, RecallTask]
"""A model, and a task for it."""


def measure_readings(
    load: Callable[[str | None], Loaded],
    options: RecallOptions,
    *,
    patterns: Sequence[str] = (),
    ways: Sequence[str] = (),
    training_length: int | None = None,
) -> dict[str, RecallResult]:
    """Measure recall of a model with several attention patterns, or in several ways, over the same texts.

    Args:
        load: Returns the model with an attention pattern, its own for `None`, and the task; see [`loader`].
        options: Options of the measurement.
        patterns: Attention patterns of LEX models.
        ways: Names from [`WAYS`], for models with rotary positions.
        training_length: l in tokens; by default what the configuration of the model says.

    Returns:
        The results by the name of the pattern or way; a way that cannot be read has the reason in its points.

    Raises:
        ValueError: If an argument does not fit.
    """
    check_patterns(patterns)
    unknown = sorted(set(ways) - set(WAYS))
    if unknown:
        raise ValueError(f"ways = {', '.join(unknown)}: those known are {', '.join(WAYS)}.")
    if patterns and ways:
        raise ValueError("Attention patterns are those of LEX models, ways those of others: give one kind.")
    results = {}
    chosen: list[str | None] = [*patterns] if patterns else [None]
    for pattern in chosen:
        model, task = load(pattern)
        length = known_training_length(model) if training_length is None else training_length
        texts = Texts(task, options, length)
        if ways:
            return _in_ways(model, texts, list(dict.fromkeys(ways)))
        name = pattern or _own_name(model)
        results[name] = measure_texts(model, texts, own_cache if options.use_cache else None, name)
    return results


def loader(
    model: str,
    files: Sequence[str],
    *,
    text_field: str = "text",
    sentence: str = SENTENCE,
    add_start_token: bool = True,
    loading: Mapping[str, Any],
) -> Callable[[str | None], Loaded]:
    """Return a function that loads a model with an attention pattern, and makes the task of files.

    Args:
        model: Folder or Hub id.
        files: Texts that hide the pairs, as of [`load_documents`]; filler if there are none. Files of token ids, as of
            [`load_token_ids`], are for models without a tokenizer: keys are then 4 ids, and values one, of those that
            the texts hold.
        text_field: As of [`load_documents`].
        sentence: As of [`TextRecall`].
        add_start_token: Whether a text begins with the BOS token.
        loading: Options of [`load_for_evaluation`].

    Raises:
        ValueError: As of [`load_documents`].
    """
    ids = load_token_ids(files) if files else None
    if ids is not None:
        if sentence != SENTENCE:
            raise ValueError("The files hold token ids, and there is no tokenizer for a sentence: leave it out.")
        return lambda pattern: _with_ids(
            load_without_tokenizer(model, **loading, **of_pattern(pattern)), ids, add_start_token
        )
    texts = list(load_documents(files, text_field=text_field)["text"]) if files else None

    def load(pattern: str | None) -> Loaded:
        network, tokenizer = load_for_evaluation(model, **loading, **of_pattern(pattern))
        return network, TextRecall(tokenizer, texts, sentence, add_start_token)

    return load


def _with_ids(model: PreTrainedModel, texts: Sequence[Sequence[int]], add_start_token: bool) -> Loaded:
    """A task of token ids; texts begin with the BOS token if it is wanted and all that are given do."""
    start = model.config.get_text_config().bos_token_id
    is_begun = add_start_token and isinstance(start, int) and all(text[:1] == [start] for text in texts)
    filler = [each for text in texts for each in text if not (is_begun and each == start)]
    known = sorted(set(filler))
    begin = (start,) if is_begun else ()
    return model, TokenRecall(known, known, filler, start=begin, key_length=_KEY_LENGTH, is_text=True)


def _in_ways(model: PreTrainedModel, texts: Texts, ways: Sequence[str]) -> dict[str, RecallResult]:
    if texts.training_length is None:
        raise ValueError("The configuration of the model does not say its training length: give training_length.")
    texts.check_vocabulary(model)
    size, results = Size(texts.training_length, texts.longest), {}
    for way in ways:
        name = WAYS[way].describe(size)
        try:
            with WAYS[way].open(model, size) as reading:
                new_cache = reading.new_cache if texts.options.use_cache else None
                results[name] = measure_texts(reading.model, texts, new_cache, name)
        except ValueError as error:
            results[name] = texts.refused(name, plain(error))
    return results


def _own_name(model: PreTrainedModel) -> str:
    """The attention pattern of a LEX model, the blocks of another one, or its type."""
    reader = reader_of(model)
    if reader is not None:
        return f"blockwise, blocks of {reader.pattern.block}"
    return own_pattern(model)

"""Perplexity of causal language models under named protocols."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from lex_hf.evaluation.loading import evaluating, join_processes, load_for_evaluation
from lex_hf.evaluation.protocols import PROTOCOLS, ProtocolSettings, Window, chunked, last_token, sliding, streaming
from lex_hf.evaluation.results import ContextBucket, DocumentScore, Outcome, PerplexityResult, sum_losses, summarise
from lex_hf.evaluation.resume import Records
from lex_hf.evaluation.scoring import Scores, Windows, document_scorer, score_windows
from lex_hf.evaluation.texts import Document, encode

__all__ = [  # with the names that a user of this module needs
    "PROTOCOLS",
    "ContextBucket",
    "DocumentScore",
    "PerplexityOptions",
    "PerplexityResult",
    "Scores",
    "Window",
    "chunked",
    "compute_perplexity",
    "last_token",
    "load_for_evaluation",
    "measure_perplexity",
    "score_windows",
    "sliding",
    "streaming",
]

DEFAULT_LENGTH = 1024


@dataclass(frozen=True)
class PerplexityOptions:
    """Options of a measurement of perplexity, checked when they are created.

    They are the keyword arguments of [`compute_perplexity`], which describes them.

    Raises:
        ValueError: If the protocol is unknown or has no such option, or a number is out of range. Where `length` is
            `None`, the numbers that depend on it are checked by [`PerplexityOptions.settings`].
    """

    protocol: str = "chunked"
    length: int | None = None
    stride: int | None = None
    contexts: Sequence[int] | None = None
    batch_size: int | Literal["auto"] = 8
    add_start_token: bool = True
    max_length: int | None = None
    records: str | Path | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        ProtocolSettings.check_names(self.protocol, self._of_protocols)
        if self.length is not None:
            ProtocolSettings.complete(self.protocol, self.length, self._of_protocols)
        if isinstance(self.batch_size, int) and not isinstance(self.batch_size, bool):
            if self.batch_size < 1:
                raise ValueError(f"batch_size = {self.batch_size}: it must be at least 1.")
        elif self.batch_size != "auto":
            raise ValueError(f"batch_size = {self.batch_size!r}: it must be a whole number of at least 1, or 'auto'.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length = {self.max_length}: it must be at least 2.")

    def settings(self, config: PreTrainedConfig) -> ProtocolSettings:
        """Return the settings for a model; the default length is `config.training_length`, if there is one.

        Raises:
            ValueError: If a number is out of range for that length.
        """
        length = getattr(config, "training_length", DEFAULT_LENGTH) if self.length is None else self.length
        return ProtocolSettings.complete(self.protocol, length, self._of_protocols)

    @property
    def _of_protocols(self) -> dict[str, Any]:
        return {"stride": self.stride, "contexts": self.contexts}


def compute_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    protocol: str = "chunked",
    length: int | None = None,
    stride: int | None = None,
    contexts: Sequence[int] | None = None,
    batch_size: int | Literal["auto"] = 8,
    add_start_token: bool = True,
    max_length: int | None = None,
    records: str | Path | None = None,
    progress: bool = True,
) -> PerplexityResult:
    """Measure how well a causal language model predicts texts.

    Under `accelerate launch` or `torchrun` the texts are distributed over the processes; each of them must make the
    same call, with the whole model, and gets the whole result.

    Args:
        model: Any causal language model of transformers, on the device and in the dtype wanted. It runs in
            evaluation mode and is left as it was.
        tokenizer: Its tokenizer; special tokens are not added, except for the start token.
        texts: The documents, at least one.
        protocol: `"chunked"`, `"sliding"`, `"streaming"` or `"last_token"`, see the functions of these names.
        length: Tokens in a segment, window or chunk; `None` means the config's `training_length` if it has one,
            else 1024.
        stride: Of `sliding`: tokens between two windows; `None` means half of `length`.
        contexts: Of `last_token`: numbers of tokens before the target; `None` means the powers of two below
            `length` - 1, and `length` - 1.
        batch_size: Number of windows evaluated at once; `"auto"` begins with 64 and takes fewer whenever there is
            not enough memory.
        add_start_token: Whether to prepend the BOS token to each text, so that its first token is scored too.
        max_length: Number of tokens read of each text, the start token included; `None` reads all.
        records: A file of JSON lines, for long runs: each text is recorded there as soon as it is finished, and
            what is recorded there for the same text, protocol, settings, configuration and weights is not computed
            again. Windows of different texts then share no batch. Processes but the first write to files of their
            own, named `records` with `.1`, `.2`, … appended.
        progress: Whether to show a progress bar, counted in scored tokens; of the first process only.

    Returns:
        The result, over all scored tokens and for each text.

    Raises:
        ValueError: If there are no texts, one is not a string, has fewer than two tokens (the start token
            included) or is too short for the protocol, the protocol is unknown or has no such option, a number is
            out of range, the tokenizer has no BOS token or gives ids the model does not know, the model cannot
            read so many tokens, `records` holds something else, or a loss is not finite.
        OSError: If `records` cannot be read or written. What was recorded before stays there.
    """
    options = PerplexityOptions(
        protocol=protocol,
        length=length,
        stride=stride,
        contexts=contexts,
        batch_size=batch_size,
        add_start_token=add_start_token,
        max_length=max_length,
        records=records,
        progress=progress,
    )
    return measure_perplexity(model, tokenizer, texts, options)


def measure_perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], options: PerplexityOptions
) -> PerplexityResult:
    """Do what [`compute_perplexity`] does, with its keyword arguments as options that are already checked."""
    settings = options.settings(model.config)
    documents = encode(model, tokenizer, texts, options.add_start_token, options.max_length)
    windows = _windows(documents, settings)
    join_processes(model.device)
    records = None if options.records is None else Records(options.records, settings, model)
    with evaluating(model), torch.inference_mode():
        finished = list(_measure(model, documents, windows, settings, options, records))
    outcomes = dict(gather_object(finished))
    return summarise(documents, [outcomes[index] for index in range(len(documents))], settings)


def _measure(
    model: PreTrainedModel,
    documents: Sequence[Document],
    windows: Windows,
    settings: ProtocolSettings,
    options: PerplexityOptions,
    records: Records | None,
) -> Iterator[tuple[int, Outcome]]:
    """Measure this process's share of the documents: one by one if they are recorded, else all together."""
    state = PartialState()
    # Dealt out by size, so that all processes have about as much to do, and regardless of what is recorded: processes
    # that see a file at different times still agree on who does what.
    order = sorted(windows, key=lambda index: len(documents[index].tokens), reverse=True)
    mine = {index: windows[index] for index in order[state.process_index :: state.num_processes]}
    total, is_shown = _scored(*mine.values()), options.progress and state.is_main_process
    with tqdm(total=total, unit="token", unit_scale=True, desc="Perplexity", disable=not is_shown) as bar:
        tokens = [document.tokens for document in documents]
        score = document_scorer(model, tokens, mine, options.batch_size, bar.update)
        if records is None:
            for index, scores in score(mine).items():
                yield index, sum_losses(scores, settings.contexts)
            return
        for index, cut in mine.items():
            outcome = records.get(documents[index])
            if outcome is None:
                outcome = sum_losses(score({index: cut})[index], settings.contexts)
                records.add(documents[index], outcome)
            else:
                bar.update(_scored(cut))
            yield index, outcome


def _scored(*documents: Sequence[Window]) -> int:
    return sum(window.scored for cut in documents for window in cut)


def _windows(documents: Sequence[Document], settings: ProtocolSettings) -> Windows:
    windows = {}
    for index, document in enumerate(documents):
        try:
            windows[index] = settings.windows(len(document.tokens))
        except ValueError as error:
            raise ValueError(f"Text {index} (counted from 0): {error}") from error
    return windows

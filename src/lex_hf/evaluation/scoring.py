"""Scoring: losses of the windows of documents, in batches as large as memory allows.

Losses are negative log-likelihoods (NLL) in nats per token, computed in float32 whatever the dtype of the model.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lex_hf.evaluation.protocols import Window

_LOGITS_AT_ONCE = 4096  # tokens
_LARGEST_BATCH = 64  # where the search for a batch size begins

Windows = Mapping[int, Sequence[Window]]
"""Windows of documents, in order, by index of the document."""


@dataclass(frozen=True)
class Scores:
    """Losses of consecutive targets of one document."""

    document: int  # index, from 0
    target: int  # index of the first target in its document, at least 1
    context: int  # tokens the model had seen before the first target; one more for each next target
    nll: Tensor  # of each target, in nats, shape (targets,), float32


def document_scorer(
    model: PreTrainedModel,
    tokens: Sequence[Tensor],
    windows: Windows,
    batch_size: int | Literal["auto"],
    progress: Callable[[int], Any],
) -> Callable[[Windows], dict[int, list[Scores]]]:
    """Return a function that scores documents, in batches of the size given or of one that fits into memory.

    Args:
        model: As of [`score_windows`].
        tokens: Its documents.
        windows: All windows that are going to be scored.
        batch_size: Number of windows evaluated at once; `"auto"` begins with 64 and takes fewer, for this and all
            later calls, whenever there is not enough memory.
        progress: Called with the number of tokens scored since the last call; negative if they are scored again.

    Returns:
        A function from windows of some of the documents to their losses, by index of the document. It raises
        ValueError if a loss is not finite, or there is not enough memory for a single window.
    """

    def score(size: int, part: Windows) -> dict[int, list[Scores]]:
        found: dict[int, list[Scores]] = defaultdict(list)
        done = 0
        try:
            for scores in score_windows(model, tokens, part, size):
                check_finite(scores)
                found[scores.document].append(scores)
                done += len(scores.nll)
                progress(len(scores.nll))
        except RuntimeError as error:
            progress(-done)  # if this was a lack of memory, a smaller batch starts over
            if batch_size == "auto" and size == 1 and should_reduce_batch_size(error):
                raise ValueError(
                    "batch_size = 'auto': there is not enough memory for a single window of "
                    f"{max(window.size for cut in part.values() for window in cut)} tokens. Choose a smaller length."
                ) from error
            raise
        return found

    if batch_size != "auto":
        return lambda part: score(batch_size, part)
    # Of windows that are read one by one there is only one batch size to try.
    most = sum(not window.cached for cut in windows.values() for window in cut)
    return find_executable_batch_size(score, starting_batch_size=max(1, min(_LARGEST_BATCH, most)))


def score_windows(
    model: PreTrainedModel, documents: Sequence[Tensor], windows: Windows, batch_size: int
) -> Iterator[Scores]:
    """Compute the losses of windows of documents.

    Windows without a cache share a batch if they are equal in size, also across documents, the largest first; then
    documents with a cache are read one by one. At most `batch_size` windows' logits exist at a time, of LEX models
    those of `_LOGITS_AT_ONCE` tokens.

    Args:
        model: Any causal language model.
        documents: Token ids of each document, 1-D.
        windows: By index of the document, its windows in order.
        batch_size: Number of windows evaluated at once.

    Yields:
        Losses in the order of computation.

    Raises:
        ValueError: If windows need a cache and the model returns no `past_key_values`, or it cannot read so many
            tokens.
    """
    alone = [(document, each) for document, cut in windows.items() for each in cut if not each.cached]
    alone.sort(key=_shape, reverse=True)  # too large a batch fails at once
    for _, group in groupby(alone, key=_shape):
        equal = list(group)
        for first in range(0, len(equal), batch_size):
            yield from _score_batch(model, documents, equal[first : first + batch_size])
    for document, cut in windows.items():
        yield from _score_stream(model, documents[document], document, [each for each in cut if each.cached])


def _shape(window: tuple[int, Window]) -> tuple[int, int]:
    return window[1].size, window[1].scored


def _score_batch(
    model: PreTrainedModel, documents: Sequence[Tensor], batch: Sequence[tuple[int, Window]]
) -> Iterator[Scores]:
    tokens = torch.stack([documents[document][each.start : each.stop + 1] for document, each in batch])
    scored = batch[0][1].scored
    # The logits of a long text would take more memory than everything else.
    if len(batch) * scored > _LOGITS_AT_ONCE and type(model).__name__ == "LexForCausalLM":
        decoder, head = model.base_model, model.get_output_embeddings()
        states = forward(decoder, tokens[:, :-1], scored, use_cache=False).last_hidden_state
    else:
        states, head = forward(model, tokens[:, :-1], scored, use_cache=False).logits, nn.Identity()
    pieces = zip(
        states[:, -scored:].flatten(0, 1).split(_LOGITS_AT_ONCE),
        tokens[:, -scored:].flatten().split(_LOGITS_AT_ONCE),
        strict=True,
    )
    losses = torch.cat([_token_losses(head(part), targets) for part, targets in pieces])
    for (document, window), row in zip(batch, losses.split(scored), strict=True):
        yield Scores(document, window.target, window.context, row)


def _score_stream(
    model: PreTrainedModel, tokens: Tensor, document: int, windows: Sequence[Window]
) -> Iterator[Scores]:
    # All losses share one buffer: allocated between the states of the chunks they would fragment memory.
    sizes, cache = [window.scored for window in windows], None
    for window, losses in zip(windows, torch.empty(sum(sizes)).split(sizes), strict=True):
        nll, cache = score_next(model, tokens[window.start : window.stop + 1], window.scored, cache)
        losses.copy_(nll)
        yield Scores(document, window.target, window.context, losses)


def score_next(model: PreTrainedModel, tokens: Tensor, scored: int, cache: Cache | None) -> tuple[Tensor, Cache]:
    """Read the next piece of a text, and compute the losses of its last targets.

    Args:
        model: Any causal language model.
        tokens: Ids of the piece, whose first token is the last target of the piece before, shape `(inputs + 1,)`.
        scored: Number of targets, at most the inputs.
        cache: What was read before; `None` if nothing, or an empty one.

    Returns:
        NLL of the targets in nats, shape `(scored,)`, float32, on the CPU, and the cache.

    Raises:
        ValueError: If the model returns no `past_key_values`, or it cannot read so many tokens.
    """
    output = forward(model, tokens[None, :-1], scored, past_key_values=cache, use_cache=True)
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise ValueError(
            f"protocol = 'streaming': {type(model).__name__} returns no past_key_values, so it cannot read a "
            "text in chunks. Use protocol='chunked'."
        )
    return _token_losses(output.logits[0, -scored:], tokens[-scored:]), cache


def forward(model: PreTrainedModel, input_ids: Tensor, scored: int, **options: Any) -> Any:
    """Run a model; logits of tokens before the last `scored` are left out if it can do that.

    Args:
        model: Any causal language model.
        input_ids: Shape `(batch, sequence)`.
        scored: Number of tokens, from the end, whose logits are wanted.
        options: Passed to the model.

    Raises:
        ValueError: If its table of positions ends.
    """
    if scored < input_ids.shape[1] and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = scored
    try:
        return model(input_ids=input_ids.to(model.device), **options)
    except IndexError as error:  # ids are known to be in range, so it is the table of positions that ends
        raise ValueError(
            f"{type(model).__name__} cannot read {input_ids.shape[1]} tokens here ({error}). If its position "
            "embeddings end, choose a smaller length, or max_length with protocol='streaming'."
        ) from error


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """NLL of `targets`, shape (targets,), on the CPU; one row at a time, so the float32 copy stays small."""
    return F.cross_entropy(logits.float(), targets.to(logits.device), reduction="none").cpu()


def check_finite(scores: Scores) -> None:
    """Refuse losses that are not finite.

    Raises:
        ValueError: If one is not; the message says where.
    """
    broken = (~scores.nll.isfinite()).nonzero()
    if len(broken):
        first = int(broken[0])
        raise ValueError(
            f"The loss of token {scores.target + first} of text {scores.document} (both counted from 0, "
            f"with the start token) is {scores.nll[first].item()}, after {scores.context + first} tokens of "
            "context. Check the weights, or load the model with dtype='float32'."
        )

"""Answers: how probable each of several continuations of a long text is, and what greedy decoding would write."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lex_hf.evaluation.hidden_pairs import Ids

_PIECE = 4096  # tokens of a text that are read at once

NewCache = Callable[[], Cache | None] | None
"""Function to an empty cache, or to `None` to have the model make one; `None` to read without a cache."""


@dataclass(frozen=True)
class Answers:
    """How a model answers some texts.

    Attributes:
        log_probabilities: Of each candidate, in nats, float32, shape `(texts, candidates)`.
        is_written: Whether greedy decoding writes each candidate, same shape.
    """

    log_probabilities: Tensor
    is_written: Tensor


def answer(model: PreTrainedModel, texts: Tensor, candidates: Sequence[Sequence[Ids]], new_cache: NewCache) -> Answers:
    """Let a model read texts, and score what could follow.

    Args:
        model: A causal language model in evaluation mode.
        texts: Token ids, shape `(texts, tokens)`.
        candidates: For each text equally many continuations, as token ids.
        new_cache: See [`NewCache`].

    Raises:
        ValueError: If the model cannot read so many tokens, returns no cache, or a logit is not finite.
    """
    width = max(len(each) for row in candidates for each in row)
    padded = torch.tensor([[(*each, *[0] * (width - len(each))) for each in row] for row in candidates])
    counted = torch.tensor([[[index < len(each) for index in range(width)] for each in row] for row in candidates])
    follow = _continuing(model, texts, new_cache)
    found = [_score(follow(ids[:, :-1]), ids) for ids in padded.unbind(dim=1)]
    scores, hits = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
    # Causal attention: what is behind a shorter candidate has changed nothing before it.
    return Answers((scores * counted).sum(dim=2), (hits | ~counted).all(dim=2))


def _score(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each id, and whether it is the most probable one, both of shape `(texts, ids)`."""
    logits = logits.float().cpu()
    if not logits.isfinite().all():
        raise ValueError("A logit is not finite: check the weights, or load the model with dtype='float32'.")
    return logits.log_softmax(dim=-1).gather(2, ids[:, :, None])[:, :, 0], logits.argmax(dim=-1) == ids


def own_cache() -> None:
    """Have the model make its cache: a [`NewCache`]."""


def _continuing(model: PreTrainedModel, texts: Tensor, new_cache: NewCache) -> Callable[[Tensor], Tensor]:
    """Return a function from further ids, shape `(texts, ids)`, to the logits of a text's last token and of these."""
    device = model.device
    model(input_ids=texts[:1, :1].to(device), use_cache=False)  # dynamic frequencies stay until a short text
    if new_cache is None:
        return lambda ids: _forward(model, torch.cat((texts, ids), dim=1), ids.shape[1] + 1, use_cache=False).logits
    cache: Any = new_cache()
    for piece in texts.split(_PIECE, dim=1):
        output = _forward(model, piece, 1, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise ValueError(f"{type(model).__name__} returns no past_key_values: measure with use_cache=False.")
    last = output.logits[:, -1:]
    shared = {id(module): module for module in model.modules()}  # some layers of caches know their model

    def follow(ids: Tensor) -> Tensor:
        if ids.shape[1] == 0:
            return last
        copied = copy.deepcopy(cache, dict(shared))
        options = {"past_key_values": copied, "use_cache": True}
        return torch.cat((last, _forward(model, ids, ids.shape[1], **options).logits), dim=1)

    return follow


def _forward(model: PreTrainedModel, ids: Tensor, kept: int, **options: Any) -> Any:
    """Run the model; logits but for the last `kept` are left out if it can do that."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = kept
    output = model(input_ids=ids.to(model.device), **options)
    output.logits = output.logits[:, -kept:]
    return output

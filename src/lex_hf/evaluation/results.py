"""Results of perplexity measurements: losses summed in float64 by document, by context and over a corpus."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lex_hf.evaluation.protocols import ProtocolSettings
from lex_hf.evaluation.scoring import Scores
from lex_hf.evaluation.statistics import CONFIDENCE_LEVEL, bootstrap_interval
from lex_hf.evaluation.texts import Document


@dataclass(frozen=True)
class ContextBucket:
    """Mean loss of the targets that had at least `start` and fewer than `stop` tokens of context.

    Attributes:
        start: Smallest context of the bucket in tokens.
        stop: 2 · `start`, a power of two; `start` + 1 under `last_token`, which has a bucket for each context.
        nll: Mean NLL in nats per token.
        tokens: Number of targets.
    """

    start: int
    stop: int
    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(`nll`); infinite if that exceeds float64."""
        return torch.tensor(self.nll, dtype=torch.float64).exp().item()


@dataclass(frozen=True)
class DocumentScore:
    """Contribution of one text to a result.

    Attributes:
        text: SHA-256 of the text that was read, in UTF-8, as hexadecimal digits; shows whether two results are over
            the same texts.
        nll: Total NLL of its scored tokens in nats.
        tokens: Number of its scored tokens.
        bytes: UTF-8 bytes of the text that was read.
    """

    text: str
    nll: float
    tokens: int
    bytes: int


@dataclass(frozen=True)
class PerplexityResult:
    """Result of `compute_perplexity`.

    Under `last_token` all numbers but `loss_by_position` are those of the largest context.

    Attributes:
        perplexity: exp(`nll`); infinite if that exceeds float64.
        nll: Mean NLL over all scored tokens, in nats per token.
        tokens: Number of scored tokens.
        bits_per_byte: `nll` in bits, times the targets per UTF-8 byte of the texts; comparable between tokenizers.
            Where every target is scored this is the total NLL in bits by the bytes of the texts. Without a start
            token the first token of each text is not a target, but its bytes count.
        confidence_interval: Lower and upper end of an interval for `perplexity`, from a bootstrap over texts that
            draws whole texts, each with its tokens; `None` for a single text.
        confidence_level: Its confidence level.
        confidence_note: Method of the interval, or the reason why there is none.
        perplexities: Perplexity of each text, in the order given.
        mean_perplexity: Mean of `perplexities`, as the official `perplexity` metric of `evaluate` defines it.
        protocol: Name of the protocol.
        length: Length of its segments, windows or chunks in tokens.
        options: The protocol's own options, as used.
        loss_by_position: Mean NLL by context, in buckets between powers of two; under `last_token` at each of the
            contexts, over the same targets.
        documents: Contribution of each text, in the order given.
    """

    perplexity: float
    nll: float
    tokens: int
    bits_per_byte: float
    confidence_interval: tuple[float, float] | None
    confidence_level: float
    confidence_note: str
    perplexities: list[float]
    mean_perplexity: float
    protocol: str
    length: int
    options: dict[str, Any]
    loss_by_position: list[ContextBucket]
    documents: list[DocumentScore]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain dictionaries, lists and numbers, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """Sums over the scored tokens of one document."""

    nll: float  # total, in nats; of several contexts that of the largest alone
    tokens: int  # number behind it
    positions: list[list[float]]  # for each bucket of contexts its first context, total NLL and number of targets


def sum_losses(scores: Sequence[Scores], contexts: Sequence[int] | None) -> Outcome:
    """Sum all losses of one document, by context and in total.

    If `contexts`, in ascending order, are measured apart, the largest alone makes the total.
    """
    nll = torch.cat([each.nll for each in scores]).double()
    context = torch.cat([torch.arange(len(each.nll)) + each.context for each in scores])
    edges = torch.tensor(contexts) if contexts else 2 ** torch.arange(int(context.max()).bit_length())
    bucket = torch.bucketize(context, edges, right=True) - 1
    sums = zip(edges.tolist(), bucket.bincount(nll).tolist(), bucket.bincount().tolist(), strict=True)
    counted = nll[context == contexts[-1]] if contexts else nll
    return Outcome(counted.sum().item(), len(counted), [[*each] for each in sums if each[-1]])


def summarise(
    documents: Sequence[Document], outcomes: Sequence[Outcome], settings: ProtocolSettings
) -> PerplexityResult:
    """Return the result over all documents, from their sums in the same order."""
    nll = torch.tensor([outcome.nll for outcome in outcomes], dtype=torch.float64)
    tokens = torch.tensor([outcome.tokens for outcome in outcomes])
    mean, by_document = nll.sum() / tokens.sum(), (nll / tokens).exp()
    targets_per_byte = sum(len(each.tokens) - 1 for each in documents) / sum(each.size for each in documents)
    interval, note = _interval(nll, tokens)
    return PerplexityResult(
        perplexity=mean.exp().item(),
        nll=mean.item(),
        tokens=int(tokens.sum()),
        bits_per_byte=mean.item() / math.log(2) * targets_per_byte,
        confidence_interval=interval,
        confidence_level=CONFIDENCE_LEVEL,
        confidence_note=note,
        perplexities=by_document.tolist(),
        mean_perplexity=by_document.mean().item(),
        protocol=settings.protocol,
        length=settings.length,
        options=settings.options,
        loss_by_position=_by_context(outcomes, exact=settings.contexts is not None),
        documents=[
            DocumentScore(document.text, outcome.nll, outcome.tokens, document.size)
            for document, outcome in zip(documents, outcomes, strict=True)
        ],
    )


def _interval(nll: Tensor, tokens: Tensor) -> tuple[tuple[float, float] | None, str]:
    """A confidence interval for the perplexity of a corpus, with its method, or with the reason why there is none."""
    if len(nll) < 2:
        return None, "There is a single text; a bootstrap over texts needs at least 2."
    ends = bootstrap_interval(lambda loss, count, axis: loss.sum(axis) / count.sum(axis), nll.numpy(), tokens.numpy())
    low, high = torch.tensor(ends, dtype=torch.float64).exp().tolist()
    return (low, high), f"Percentile bootstrap over {len(nll)} texts."


def _by_context(outcomes: Sequence[Outcome], *, exact: bool) -> list[ContextBucket]:
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0])
    for start, nll, tokens in (bucket for outcome in outcomes for bucket in outcome.positions):
        sums[int(start)][0] += nll
        sums[int(start)][1] += tokens
    return [
        ContextBucket(start, start + 1 if exact else 2 * start, nll=nll / tokens, tokens=int(tokens))
        for start, (nll, tokens) in sorted(sums.items())
    ]

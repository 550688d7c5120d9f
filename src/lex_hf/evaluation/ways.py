"""Ways to read beyond the training length, measured beside each other: perplexity by position, memory and time."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from lex_hf.data.documents import load_documents
from lex_hf.errors import plain
from lex_hf.evaluation import plots
from lex_hf.evaluation.costs import STEPS, Costs, layer_bytes, measure_costs
from lex_hf.evaluation.loading import evaluating, load_for_evaluation
from lex_hf.evaluation.texts import encode
from lex_hf.rope import probe
from lex_hf.rope.blockwise import training_length_of
from lex_hf.rope.reader import ModelFunction
from lex_hf.rope.ways import WAYS, Size, Way

MOST_LENGTHS = 32  # training lengths that are read by default
ROUNDS = 3  # of which the fastest counts
PIECE = 4  # training lengths, where a text is read in pieces
_LOGITS_AT_ONCE = 4096
_COMPARED = {"unchanged": "unchanged", "blockwise": "in blocks"}


@dataclass(frozen=True)
class WayResult:
    """What was measured of one way.

    Attributes:
        way: Its name for the command line.
        name: Its name in tables, with its settings.
        memory: `"keeps everything"` or `"bounded"`.
        problem: Why it could not be measured; all else is then empty.
        nll: Mean negative log-likelihood in nats per token, by bucket; `None` where no text is so long.
        tokens: Number of predictions, by bucket.
        bytes_kept: Keys and values that are kept after the longest text, by formula.
        bytes_counted: Those that were found in its cache; `None` of references, which have none.
        prefill_seconds: Time to read the longest text but for its last `STEPS` tokens: in one pass, or in pieces of 4
            training lengths if that is faster.
        decode_seconds: Time of each of these, one at a time.
    """

    way: str
    name: str
    memory: str
    problem: str | None = None
    nll: tuple[float | None, ...] = ()
    tokens: tuple[int, ...] = ()
    bytes_kept: int | None = None
    bytes_counted: int | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None

    @property
    def perplexity(self) -> tuple[float | None, ...]:
        """Perplexity by bucket."""
        return tuple(None if nll is None else _exp(nll) for nll in self.nll)


@dataclass(frozen=True)
class WaysResult:
    """All ways.

    Attributes:
        model: Name of the model.
        training_length: l, in tokens.
        longest: Length of the longest text that was read, in tokens.
        texts: Number of texts.
        buckets: First and last place of the last token read before a prediction, places counted from 0.
        ways: Results, in the order of the table.
    """

    model: str
    training_length: int
    longest: int
    texts: int
    buckets: tuple[tuple[int, int], ...]
    ways: tuple[WayResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as dictionaries, lists, texts and numbers."""
        ways = [asdict(way) | {"perplexity": list(way.perplexity)} for way in self.ways]
        return asdict(self) | {"ways": ways}

    def plot(self) -> Figure:
        """Draw perplexity by position, ways that keep everything beside bounded ones, with the memory they keep."""
        panels = {_panel(memory, ways): self._curves(ways) for memory, ways in self._by_memory().items()}
        return self._drawn(panels, self._headline(), emphasis=[WAYS[way].title for way in _COMPARED])

    def plot_beyond(self) -> Figure:
        """Draw perplexity beyond the training length in ways that are bounded, which lie close to each other."""
        ways = self._by_memory().get("bounded", [])
        curves = {
            name: {end: value for end, value in curve.items() if end > self.training_length}
            for name, curve in self._curves(ways).items()
        }
        return self._drawn({_panel("bounded", ways): curves}, f"{self.model}: perplexity beyond the training length")

    def _headline(self) -> str:
        """Return what the model's perplexity comes to, unchanged and in blocks, or else what is drawn."""
        about = f"{self.model}, trained on {self.training_length} tokens"
        said = []
        for way in self._measured:
            within, *_, after = way.perplexity[1:]  # of the second half of the training length, and of the last tokens
            if way.way in _COMPARED and within is not None and after is not None:
                moves = "rises" if after > within else "falls"
                said.append(f"{moves} from {within:#.3g} to {after:#.3g} {_COMPARED[way.way]}")
        if len(said) < len(_COMPARED):
            return f"{about}: perplexity by position"
        return f"{about}, reads {self.longest}: its perplexity\n{' and '.join(said)}"

    def _by_memory(self) -> dict[str, list[WayResult]]:
        found: dict[str, list[WayResult]] = {}
        for way in self._measured:
            found.setdefault(way.memory, []).append(way)
        return found

    def _curves(self, ways: Sequence[WayResult]) -> dict[str, dict[int, float]]:
        return {WAYS[way.way].title: self._curve(way) for way in ways}

    @property
    def _measured(self) -> list[WayResult]:
        return [way for way in self.ways if way.problem is None]

    def _curve(self, way: WayResult) -> dict[int, float]:
        """Perplexity by the end of a bucket."""
        return {
            last + 1: math.nan if value is None else value
            for (_, last), value in zip(self.buckets, way.perplexity, strict=True)
        }

    def _drawn(
        self, panels: Mapping[str, Mapping[str, Mapping[int, float]]], title: str, emphasis: Collection[str] = ()
    ) -> Figure:
        label = "Tokens read (each mark: mean since the mark before)"
        return plots.perplexity_by_scheme(
            panels, self.training_length, title=title, xlabel=label, legend_columns=3, emphasis=emphasis
        )


def _panel(memory: str, ways: Sequence[WayResult]) -> str:
    """Return the title of a panel: how ways use memory, and the least and the most that they keep."""
    sizes = sorted(way.bytes_kept for way in ways if way.bytes_kept is not None)
    known = [f"{size / 2**20:.2g}" for size in sizes]
    if not known:
        return memory
    return f"{memory}: {' to '.join(dict.fromkeys([known[0], known[-1]]))} MiB of keys and values"


def measure_ways(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    training_length: int | None = None,
    *,
    name: str = "model",
    longest: int | None = None,
    ways: Sequence[str] | None = None,
    report: Callable[[str], object] = lambda text: None,
) -> WaysResult:
    """Let a model read texts in several ways, each text in one pass.

    Args:
        model: A causal language model with rotary positions; left as it was.
        texts: Token ids of each text, int64, shape `(tokens,)`.
        training_length: Number of tokens that it was trained to read, even; by default what its configuration says.
        name: Its name.
        longest: Tokens of a text that are read; by default those of the longest text, at most 32 training lengths.
        ways: Names from [`WAYS`]; all by default.
        report: Called with a line about what is being measured.

    Raises:
        ValueError: If an argument does not fit, or no text is longer than the training length.
    """
    chosen = _chosen(ways)
    length = known_length(model, training_length)
    _check(model, texts, length, longest)
    longest = min(longest or MOST_LENGTHS * length, max(map(len, texts)))
    texts = [text[:longest].to(model.device) for text in texts]
    size, buckets = Size(length, longest), _buckets(length, longest)
    with torch.no_grad(), evaluating(model):
        results = [_read(model, each, size, texts, buckets, report) for each in chosen]
        report("measuring time and memory")
        results = _with_costs(model, results, size, max(texts, key=len))
    return WaysResult(name, length, longest, len(texts), tuple(buckets), tuple(results))


def read_texts(
    model: str,
    files: Sequence[str],
    count: int,
    text_field: str,
    add_start_token: bool,
    longest: int | None,
    loading: Mapping[str, Any],
) -> tuple[PreTrainedModel, list[Tensor]]:
    """Load a model with its tokenizer, and tokenize texts.

    Args:
        model: Folder or Hub id.
        files: As of [`load_documents`].
        count: Number of texts, the first ones.
        text_field: As of [`load_documents`].
        add_start_token: Whether each text begins with the BOS token.
        longest: Tokens of a text that are kept; `None` keeps all.
        loading: Options of [`load_for_evaluation`].

    Returns:
        The model, and the token ids of each text.

    Raises:
        ValueError: As of [`load_documents`], [`load_for_evaluation`] and [`encode`].
    """
    texts = list(load_documents(list(files), text_field=text_field)["text"])[:count]
    network, tokenizer = load_for_evaluation(model, **loading)
    return network, [each.tokens for each in encode(network, tokenizer, texts, add_start_token, longest)]


def known_length(model: PreTrainedModel, given: int | None) -> int:
    """Return a training length in tokens: the one given, or what the configuration of a model says.

    Raises:
        ValueError: If there is none, or it is not an even number of at least 8.
    """
    length = training_length_of(model.config.get_text_config(), given)
    if length < 8:
        raise ValueError(f"training_length = {length}: it must be an even number of tokens, at least 8.")
    return length


def _chosen(ways: Sequence[str] | None) -> list[str]:
    unknown = sorted(set(ways or ()) - set(WAYS))
    if unknown:
        raise ValueError(f"ways = {', '.join(unknown)}: those known are {', '.join(WAYS)}.")
    return [name for name in WAYS if not ways or name in ways]


def _check(model: PreTrainedModel, texts: Sequence[Tensor], length: int, longest: int | None) -> None:
    if not texts or min(map(len, texts)) < 2:
        raise ValueError("There are no texts, or one has fewer than 2 tokens; the first token is not scored.")
    vocabulary, largest = model.get_input_embeddings().weight.shape[0], max(int(text.max()) for text in texts)
    if largest >= vocabulary:
        raise ValueError(f"A text holds the token id {largest}, but the vocabulary of the model has {vocabulary} ids.")
    if longest is not None and longest <= length + STEPS:
        raise ValueError(
            f"length = {longest}: it must exceed the training length of {length} tokens by {STEPS} or more."
        )
    if max(map(len, texts)) <= length + STEPS:
        raise ValueError(
            f"The longest text has {max(map(len, texts))} tokens, and the model was trained with {length}: within the "
            "training length all ways are alike. Give longer texts, or the true training length."
        )


def _buckets(length: int, longest: int) -> list[tuple[int, int]]:
    """Return first and last places: halves of the training length, then up to 4, 8, 16, … training lengths."""
    edges, limit = [0, length // 2, length], 4 * length
    while edges[-1] < longest - 1:
        edges.append(min(limit, longest - 1))
        limit *= 2
    return [(first, end - 1) for first, end in pairwise(edges)]


def _read(
    model: PreTrainedModel,
    name: str,
    size: Size,
    texts: Sequence[Tensor],
    buckets: Sequence[tuple[int, int]],
    report: Callable[[str], object],
) -> WayResult:
    """Measure the losses of a way by bucket."""
    way = WAYS[name]
    result = WayResult(name, way.describe(size), "bounded" if way.is_bounded else "keeps everything")
    try:
        with way.open(model, size) as reading:
            report(f"reading: {result.name}")
            losses = [_losses(reading.model, text) for text in texts]
    except (ValueError, IndexError) as error:  # an IndexError: its table of positions ends
        return replace(result, problem=plain(error))
    parts = [[loss[first : last + 1].double() for loss in losses] for first, last in buckets]
    tokens = tuple(sum(map(len, row)) for row in parts)
    sums = [sum(float(part.sum()) for part in row) for row in parts]
    means = tuple(total / count if count else None for total, count in zip(sums, tokens, strict=True))
    return replace(result, nll=means, tokens=tokens)


def _losses(model: PreTrainedModel, text: Tensor) -> Tensor:
    """NLL of each token of a text but the first, in nats, shape `(tokens - 1,)`."""
    model(input_ids=text[None, :1], use_cache=False)  # dynamic frequencies of transformers stay until a short text
    logits = model(input_ids=text[None, :-1], use_cache=False).logits[0]
    pieces = zip(logits.split(_LOGITS_AT_ONCE), text[1:].split(_LOGITS_AT_ONCE), strict=True)
    return torch.cat([F.cross_entropy(part.float(), targets, reduction="none") for part, targets in pieces]).cpu()


def _with_costs(model: PreTrainedModel, results: Sequence[WayResult], size: Size, text: Tensor) -> list[WayResult]:
    """Add bytes, and time where there is a cache: ways take turns, and the fastest of several rounds counts."""
    costs: dict[str, Costs] = {}
    for _ in range(ROUNDS):
        for name in (result.way for result in results if result.problem is None):
            with WAYS[name].open(model, size) as reading:
                if reading.new_cache is not None:
                    found = measure_costs(reading.model, reading.new_cache, text, PIECE * size.training_length)
                    costs[name] = found.fastest(costs.get(name))
    return [each if each.problem else _with(each, model, size, costs.get(each.way)) for each in results]


def _with(result: WayResult, model: PreTrainedModel, size: Size, costs: Costs | None) -> WayResult:
    kept = bytes_kept(model, WAYS[result.way], size)
    if costs is None:
        return replace(result, bytes_kept=kept)
    return replace(
        result,
        bytes_kept=kept,
        bytes_counted=costs.cache_bytes,
        prefill_seconds=costs.prefill_seconds,
        decode_seconds=costs.decode_seconds,
    )


def bytes_kept(model: PreTrainedModel, way: Way, size: Size) -> int:
    """Return the bytes of keys and values that a way keeps after the longest text.

    That is, over all layers, tokens kept · 2 · key heads · head dimension · bytes of a number, where the last four are
    counted in the cache of one token. Layers with a window of their own keep that.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    model(input_ids=probe.tokens(model, 1), past_key_values=cache, use_cache=True)
    windows = probe.examine(model, ModelFunction(model.config.get_text_config()._attn_implementation).of).windows
    total = 0
    for index, layer in enumerate(cache.layers):
        window, each = windows.get(index), layer_bytes(layer)
        kept = way.kept(size.longest, size.training_length)
        has_window = window is not None and window <= size.training_length
        total += each * (min(size.longest, window - 1) if has_window and window is not None else kept)
    return total


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf

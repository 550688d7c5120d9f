"""Perplexity of causal language models under named protocols.

The scoring convention is the same for every protocol. A text becomes one sequence of tokens ``s``, the start
token first if one is asked for. Every token of ``s`` but the first is a *target*. A protocol cuts the sequence
into *windows*, and says which targets are scored in each; `chunked`, `sliding` and `streaming` score every target
exactly once, whatever the length, so results at different lengths are over the same tokens. Protocols differ in
what the model sees before a target: its *context*, counted in tokens, at least 1.

Losses are negative log-likelihoods (NLL) in nats per token, taken in float32 whatever the dtype of the model
and summed in float64. Nothing is ever padded.

To add a protocol, write one function that returns the windows of a document and give it a row in `PROTOCOLS`; an
option of its own is a keyword-only parameter with a row in `_OPTIONS`.
"""

import glob
import hashlib
import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.utils import find_executable_batch_size, gather_object
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from lex_hf.data.tokenizing import tokenize
from lex_hf.evaluation.comparison import CONFIDENCE_LEVEL, bootstrap_interval
from lex_hf.evaluation.loading import join_processes
from lex_hf.evaluation.loading import load_for_evaluation as load_for_evaluation  # part of this module's interface
from lex_hf.evaluation.modes import evaluating

DEFAULT_LENGTH = 1024
_LOGITS_AT_ONCE = 4096  # tokens
_LARGEST_BATCH = 64  # where the search for a batch size begins
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")  # in a config: where and with what it was saved
_RECORD = b'{"key": "'  # how each line of a file of records begins


@dataclass(frozen=True)
class Window:
    """Consecutive tokens of a document that the model reads at once, and the targets scored there.

    The inputs are ``s[start:stop]``; of their targets, ``s[start + 1 : stop + 1]``, the last `scored` count.

    Attributes:
        start: Index of the first input.
        stop: Index after the last input.
        scored: Number of targets scored, the last ones, at least 1.
        cached: Whether the model also sees all tokens before `start`, through the cache of the windows before.
    """

    start: int
    stop: int
    scored: int
    cached: bool = False

    @property
    def size(self) -> int:
        """Number of inputs."""
        return self.stop - self.start

    @property
    def target(self) -> int:
        """Index of the first target that is scored."""
        return self.stop + 1 - self.scored

    @property
    def context(self) -> int:
        """Number of tokens the model has seen before the first target that is scored."""
        return self.target if self.cached else self.target - self.start


def chunked(tokens: int, length: int) -> list[Window]:
    """Cut a document into segments of `length` tokens, each evaluated alone (LEX paper, section 4.2).

    With L = `length`, segment i has inputs ``s[i*L : (i+1)*L]`` and targets ``s[i*L + 1 : (i+1)*L + 1]``: its
    first input is the last target of the segment before it. A target therefore has 1 to L tokens of context.
    What remains at the end of a document is a shorter segment.

    Args:
        tokens: Number of tokens of the document, at least 2.
        length: Inputs of a segment.
    """
    stops = [*range(length, tokens - 1, length), tokens - 1]
    return [Window(index * length, stop, scored=stop - index * length) for index, stop in enumerate(stops)]


def sliding(tokens: int, length: int, *, stride: int) -> list[Window]:
    """Move a window of `length` tokens on by `stride` tokens at a time and score the targets that are new.

    Targets of the first window have 1 to `length` tokens of context, all later ones `length` - `stride` + 1 to
    `length`. A stride of `length` is `chunked`; a stride of 1 gives each target all the context that fits, for one
    forward pass per token. The last window may be shorter.

    Args:
        tokens: Number of tokens of the document, at least 2.
        length: Inputs of a window.
        stride: Tokens between the starts of two windows, 1 to `length`.
    """
    windows = [Window(0, min(length, tokens - 1), scored=min(length, tokens - 1))]
    while (done := windows[-1].stop) < tokens - 1:
        start = windows[-1].start + stride
        stop = min(start + length, tokens - 1)
        windows.append(Window(start, stop, scored=stop - done))
    return windows


def streaming(tokens: int, length: int) -> list[Window]:
    """Read a document once from start to end, in chunks of `length` tokens, with the model's own cache.

    The context of a target is everything before it, as far as the model's attention and cache reach; `length`
    only sets how much is computed at once. Memory is that of one chunk and of the cache. Documents are read
    one by one, so the batch size has no effect.

    Args:
        tokens: Number of tokens of the document, at least 2.
        length: Inputs of a chunk.
    """
    return [Window(each.start, each.stop, each.scored, cached=True) for each in chunked(tokens, length)]


def last_token(tokens: int, length: int, *, contexts: Sequence[int]) -> list[Window]:
    """Score only the last token of each segment of `length` tokens, at several contexts (Sandwich paper, §3.4).

    The segments follow each other without overlap, ``s[i*L : (i+1)*L]`` with L = `length`; what remains at the end
    is left out. The last token of each is predicted from as many tokens before it as each of `contexts` says, so
    that perplexities at different contexts are over the same targets.

    Args:
        tokens: Number of tokens of the document.
        length: Tokens of a segment.
        contexts: Numbers of tokens before the target, each 1 to `length` - 1.

    Raises:
        ValueError: If the document is shorter than one segment.
    """
    if tokens < length:
        raise ValueError(
            f"it has {tokens} tokens (with the start token), but the protocol 'last_token' needs at least "
            f"length = {length}. Choose a smaller length, or leave the text out."
        )
    targets = range(length - 1, tokens, length)
    return [Window(target - context, target, scored=1) for target in targets for context in contexts]


Protocol = Callable[..., list[Window]]
"""A protocol takes the number of tokens of a document, the length, and its options as keywords."""

PROTOCOLS: dict[str, Protocol] = {
    "chunked": chunked,
    "last_token": last_token,
    "sliding": sliding,
    "streaming": streaming,
}


@dataclass(frozen=True)
class Scores:
    """Losses of consecutive targets of one document.

    Attributes:
        document: Index of the document, from 0.
        target: Index of the first target in its document, at least 1.
        context: Number of tokens the model had seen before the first target; one more for each next target.
        nll: NLL of each target in nats, shape (targets,), float32.
    """

    document: int
    target: int
    context: int
    nll: Tensor


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
    """What one text contributes to a result.

    Attributes:
        text: SHA-256 of the text that was read, in UTF-8, as hexadecimal digits; tells whether two results are over
            the same texts.
        nll: NLL of its scored tokens together, in nats.
        tokens: Number of its scored tokens.
        bytes: UTF-8 bytes of the text that was read.
    """

    text: str
    nll: float
    tokens: int
    bytes: int


@dataclass(frozen=True)
class PerplexityResult:
    """What `compute_perplexity` measured.

    Under `last_token` all numbers but `loss_by_position` are those of the largest context.

    Attributes:
        perplexity: exp(`nll`); infinite if that exceeds float64.
        nll: Mean NLL over all scored tokens, in nats per token.
        tokens: Number of scored tokens.
        bits_per_byte: `nll` in bits, times the targets per UTF-8 byte of the texts; comparable between tokenizers.
            Where every target is scored this is the total NLL in bits by the bytes of the texts. Without a start
            token the first token of each text is no target, but its bytes count.
        confidence_interval: Lower and upper end of an interval for `perplexity`, from a bootstrap over texts that
            draws whole texts, each with its tokens; `None` for a single text.
        confidence_level: Its confidence level.
        confidence_note: How the interval was made, or why there is none.
        perplexities: Perplexity of each text, in the order given.
        mean_perplexity: Mean of `perplexities`, as the official `perplexity` metric of `evaluate` defines it.
        protocol: Name of the protocol.
        length: Length of its segments, windows or chunks in tokens.
        options: The protocol's own options, as used.
        loss_by_position: Mean NLL by context, in buckets between powers of two; under `last_token` at each of the
            contexts, over the same targets.
        documents: What each text contributes, in the order given.
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

    Under `accelerate launch` or `torchrun` the texts are shared out between the processes; each of them must make
    the same call, with the whole model, and gets the whole result.

    Args:
        model: Any causal language model of transformers, on the device and in the dtype wanted. It runs in
            evaluation mode and is left as it was.
        tokenizer: Its tokenizer; special tokens are not added, but for the start token.
        texts: The documents, at least one.
        protocol: `"chunked"`, `"sliding"`, `"streaming"` or `"last_token"`, see the functions of these names.
        length: Tokens in a segment, window or chunk; `None` means the config's `training_length` if it has one,
            else 1024.
        stride: Of `sliding`: tokens between two windows; `None` means half of `length`.
        contexts: Of `last_token`: numbers of tokens before the target; `None` means the powers of two below
            `length` - 1, and `length` - 1.
        batch_size: Number of windows evaluated at once; `"auto"` begins with 64 and takes fewer whenever memory
            does not suffice.
        add_start_token: Whether the BOS token goes before each text, so that its first token is scored too.
        max_length: Read only so many tokens of each text, the start token included; `None` reads all.
        records: A file of JSON lines, for long runs: each text is recorded there as soon as it is finished, and
            what is recorded there for the same text, protocol, settings, configuration and weights is not computed
            again. Windows of different texts then share no batch. Processes but the first write to files of their
            own, `records` with `.1`, `.2`, … behind.
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
    if length is None:
        length = getattr(model.config, "training_length", DEFAULT_LENGTH)
    _require_at_least(1, length=length)
    check_batch_size(batch_size)
    options = protocol_options(protocol, length, stride=stride, contexts=contexts)
    documents = _encode(tokenizer, texts, add_start_token, max_length)
    _check_vocabulary(model, documents)
    windows = _cut(documents, PROTOCOLS[protocol], length, options)
    join_processes(model.device)
    settings = {"protocol": protocol, "length": length, **options}
    store = None if records is None else _Records(Path(records), {**settings, "model": _fingerprint(model)})
    with evaluating(model), torch.inference_mode():
        finished = list(_measure(model, documents, windows, batch_size, options.get("contexts"), store, progress))
    outcomes = dict(gather_object(finished))
    return _summarise(documents, [outcomes[index] for index in range(len(documents))], protocol, length, options)


def score_windows(
    model: PreTrainedModel, documents: Sequence[Tensor], windows: Mapping[int, Sequence[Window]], batch_size: int
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

    Returns:
        An iterator over losses, in the order of computation.

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
    # Of a long text, the logits would take more memory than all else.
    if len(batch) * scored > _LOGITS_AT_ONCE and type(model).__name__ == "LexForCausalLM":
        decoder, head = model.base_model, model.get_output_embeddings()
        states = _forward(decoder, tokens[:, :-1], scored, use_cache=False).last_hidden_state
    else:
        states, head = _forward(model, tokens[:, :-1], scored, use_cache=False).logits, nn.Identity()
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
    # Losses are kept in one place: between the states of the chunks they would leave gaps that no state fits into.
    sizes, cache = [window.scored for window in windows], None
    for window, losses in zip(windows, torch.empty(sum(sizes)).split(sizes), strict=True):
        row = tokens[window.start : window.stop + 1]
        output = _forward(model, row[None, :-1], window.scored, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise ValueError(
                f"protocol = 'streaming': {type(model).__name__} returns no past_key_values, so it cannot read a "
                "text in chunks. Use protocol='chunked'."
            )
        losses.copy_(_token_losses(output.logits[0, -window.scored :], row[-window.scored :]))
        yield Scores(document, window.target, window.context, losses)


def _forward(model: PreTrainedModel, input_ids: Tensor, scored: int, **options: Any) -> Any:
    """Run the model; where only the last logits are wanted and it can leave the others out, it does."""
    if scored < input_ids.shape[1] and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = scored
    try:
        return model(input_ids=input_ids.to(model.device), **options)
    except IndexError as error:  # ids are known to be in range: it is a table of positions that ends
        raise ValueError(
            f"{type(model).__name__} cannot read {input_ids.shape[1]} tokens here ({error}). If its position "
            "embeddings end, choose a smaller length, or max_length with protocol='streaming'."
        ) from error


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """NLL of `targets`, shape (targets,), on the CPU; one row at a time, so the float32 copy stays small."""
    return F.cross_entropy(logits.float(), targets.to(logits.device), reduction="none").cpu()


def _check_finite(scores: Scores) -> None:
    broken = (~scores.nll.isfinite()).nonzero()
    if len(broken):
        first = int(broken[0])
        raise ValueError(
            f"The loss of token {scores.target + first} of text {scores.document} (both counted from 0, "
            f"with the start token) is {scores.nll[first].item()}, after {scores.context + first} tokens of "
            "context. Check the weights, or load the model with dtype='float32'."
        )


@dataclass(frozen=True)
class _Outcome:
    """Sums over the scored tokens of one document."""

    nll: float
    tokens: int
    positions: list[list[float]]  # first context of a bucket, NLL of its targets together, number of targets


def _measure(
    model: PreTrainedModel,
    documents: Sequence["_Document"],
    windows: Mapping[int, Sequence[Window]],
    batch_size: int | Literal["auto"],
    contexts: Sequence[int] | None,
    store: "_Records | None",
    progress: bool,
) -> Iterator[tuple[int, _Outcome]]:
    """Measure the documents that fall to this process: one by one if they are recorded, else all together."""
    state = PartialState()
    # Dealt out by size, so that all have about as much to do. What is recorded does not matter here: processes that
    # see a file at different times still agree on who does what.
    order = sorted(windows, key=lambda index: len(documents[index].tokens), reverse=True)
    mine = {index: windows[index] for index in order[state.process_index :: state.num_processes]}
    with _progress_bar(mine, shown=progress and state.is_main_process) as bar:
        read = _reader(model, [document.tokens for document in documents], mine, batch_size, bar)
        if store is None:
            for index, scores in read(mine).items():
                yield index, _outcome(scores, contexts)
            return
        for index, cut in mine.items():
            outcome = store.get(documents[index])
            if outcome is None:
                outcome = _outcome(read({index: cut})[index], contexts)
                store.add(documents[index], outcome)
            else:
                bar.update(sum(window.scored for window in cut))
            yield index, outcome


def _progress_bar(windows: Mapping[int, Sequence[Window]], *, shown: bool) -> Any:
    total = sum(window.scored for cut in windows.values() for window in cut)
    return tqdm(total=total, unit="token", unit_scale=True, desc="Perplexity", disable=not shown)


def _reader(
    model: PreTrainedModel,
    tokens: Sequence[Tensor],
    windows: Mapping[int, Sequence[Window]],
    batch_size: int | Literal["auto"],
    bar: Any,
) -> Callable[[Mapping[int, Sequence[Window]]], dict[int, list[Scores]]]:
    """Make a function that computes the losses of documents, in batches of the size given or of one that fits."""

    def read(size: int, part: Mapping[int, Sequence[Window]]) -> dict[int, list[Scores]]:
        found: dict[int, list[Scores]] = defaultdict(list)
        done = 0
        try:
            for scores in score_windows(model, tokens, part, size):
                _check_finite(scores)
                found[scores.document].append(scores)
                done += len(scores.nll)
                bar.update(len(scores.nll))
        except RuntimeError:
            bar.update(-done)  # if memory was short, a smaller batch begins anew
            raise
        return found

    if batch_size != "auto":
        return lambda part: read(batch_size, part)
    # Of windows that are read one by one there is only one batch size to try.
    most = sum(not window.cached for cut in windows.values() for window in cut)
    attempt = find_executable_batch_size(read, starting_batch_size=max(1, min(_LARGEST_BATCH, most)))

    def read_what_fits(part: Mapping[int, Sequence[Window]]) -> dict[int, list[Scores]]:
        try:
            return attempt(part)
        except RuntimeError as error:
            if "No executable batch size" not in str(error):
                raise
            raise ValueError(
                "batch_size = 'auto': the memory does not suffice for a single window of "
                f"{max(window.size for cut in part.values() for window in cut)} tokens. Choose a smaller length."
            ) from error

    return read_what_fits


def _outcome(scores: Sequence[Scores], contexts: Sequence[int] | None) -> _Outcome:
    """Sum the losses of one document, by context and together; of several contexts the largest alone counts."""
    nll = torch.cat([each.nll for each in scores]).double()
    context = torch.cat([torch.arange(len(each.nll)) + each.context for each in scores])
    edges = torch.tensor(contexts) if contexts else 2 ** torch.arange(int(context.max()).bit_length())
    bucket = torch.bucketize(context, edges, right=True) - 1
    sums = zip(edges.tolist(), bucket.bincount(nll).tolist(), bucket.bincount().tolist(), strict=True)
    counted = nll[context == contexts[-1]] if contexts else nll
    return _Outcome(counted.sum().item(), len(counted), [[*each] for each in sums if each[-1]])


def _summarise(
    documents: Sequence["_Document"],
    outcomes: Sequence[_Outcome],
    protocol: str,
    length: int,
    options: dict[str, Any],
) -> PerplexityResult:
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
        protocol=protocol,
        length=length,
        options=options,
        loss_by_position=_by_context(outcomes, exact="contexts" in options),
        documents=[
            DocumentScore(document.text, outcome.nll, outcome.tokens, document.size)
            for document, outcome in zip(documents, outcomes, strict=True)
        ],
    )


def _interval(nll: Tensor, tokens: Tensor) -> tuple[tuple[float, float] | None, str]:
    """A confidence interval for the perplexity of a corpus, and how it was made or why it was not."""
    if len(nll) < 2:
        return None, "There is a single text; a bootstrap over texts needs at least 2."
    ends = bootstrap_interval(lambda loss, count, axis: loss.sum(axis) / count.sum(axis), nll.numpy(), tokens.numpy())
    low, high = torch.tensor(ends, dtype=torch.float64).exp().tolist()
    return (low, high), f"Percentile bootstrap over {len(nll)} texts."


def _by_context(outcomes: Sequence[_Outcome], *, exact: bool) -> list[ContextBucket]:
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0])
    for start, nll, tokens in (bucket for outcome in outcomes for bucket in outcome.positions):
        sums[int(start)][0] += nll
        sums[int(start)][1] += tokens
    return [
        ContextBucket(start, start + 1 if exact else 2 * start, nll=nll / tokens, tokens=int(tokens))
        for start, (nll, tokens) in sorted(sums.items())
    ]


class _Records:
    """Outcomes of finished documents, in a file of JSON lines that a later run goes on from.

    Each process appends to a file of its own and reads those of all, so no two ever write to the same one.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._settings = json.dumps(settings, sort_keys=True).encode()
        rank = PartialState().process_index
        self._file = path.with_name(f"{path.name}.{rank}") if rank else path
        self._finished: dict[str, _Outcome] = {}
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(
                f"records = {str(path)!r} is no regular file: what is written there cannot be read again."
            )
        with self._explained():
            for each in [path, *sorted(path.parent.glob(f"{glob.escape(path.name)}.[0-9]*"))]:
                if each.exists():
                    self._finished.update(_read_records(each))
            with self._file.open("ab") as file:  # what cannot be written to is found out before any work is done
                file.truncate(len(_whole_lines(self._file)))

    def get(self, document: "_Document") -> _Outcome | None:
        return self._finished.get(self._key(document))

    def add(self, document: "_Document", outcome: _Outcome) -> None:
        key = self._key(document)
        line = {"key": key, "text": document.text, "bytes": document.size, **asdict(outcome)}
        with self._explained(), self._file.open("a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")
        self._finished[key] = outcome

    def _key(self, document: "_Document") -> str:
        digest = hashlib.sha256(self._settings)
        digest.update(document.text.encode() + document.tokens.numpy().tobytes())
        return digest.hexdigest()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"records = {str(self._file)!r} cannot be read or written: {error}. What was recorded before is "
                "still there; once there is room and permission, the same call goes on from it."
            ) from error


def _read_records(path: Path) -> Iterator[tuple[str, _Outcome]]:
    """Keys and outcomes of one file; a last line that was cut off, as by a kill, is passed over."""
    whole = _whole_lines(path)
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            fields = json.loads(line)
            yield fields["key"], _Outcome(float(fields["nll"]), int(fields["tokens"]), fields["positions"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"records: line {number} of {path} is no record of a finished text. Choose another file, or delete "
                "the line: its text is then computed again."
            ) from error


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    rest = content[end:]
    if not rest.startswith(_RECORD[: len(rest)]):
        raise ValueError(f"records: {path} ends with something that is no record. Choose another file.")
    return content[:end]


def _fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of configuration and weights, wherever the model is stored: a folder's content may change."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclass(frozen=True)
class _Document:
    tokens: Tensor  # (tokens,), token ids
    size: int  # UTF-8 bytes of the text that was read
    text: str  # SHA-256 of these bytes


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_start_token: bool, max_length: int | None
) -> list[_Document]:
    _check_texts(texts)
    if max_length is not None:
        _require_at_least(2, max_length=max_length)
    if add_start_token and tokenizer.bos_token_id is None:
        raise ValueError(
            "add_start_token = True, but the tokenizer has no BOS token. Set tokenizer.bos_token, or pass "
            "add_start_token=False: the first token of each text is then not scored."
        )
    start = [tokenizer.bos_token_id] if add_start_token else []
    room = None if max_length is None else max_length - len(start)
    return [
        _document(tokenizer, index, text, start, ids, room)
        for index, (text, ids) in enumerate(zip(texts, tokenize(texts, tokenizer), strict=True))
    ]


def _document(
    tokenizer: PreTrainedTokenizerBase,
    index: int,
    text: str,
    start: list[int],
    ids: NDArray[np.int32],
    room: int | None,
) -> _Document:
    """Keep `room` tokens of one text; the bytes counted are those of the tokens kept."""
    kept = ids[:room]
    tokens = torch.cat([torch.tensor(start, dtype=torch.long), torch.from_numpy(kept)])
    if len(tokens) < 2:
        raise ValueError(
            f"Text {index} (counted from 0), {text[:40]!r}, gives the tokens {tokens.tolist()}; the first is "
            "not scored, so at least 2 are needed. Leave the text out, or check the tokenizer."
        )
    read = text if len(kept) == len(ids) else tokenizer.decode(kept, clean_up_tokenization_spaces=False)
    content = read.encode()
    return _Document(tokens, len(content), hashlib.sha256(content).hexdigest())


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise ValueError("The texts are a single string; they must be a list of strings: put it into a list.")
    if len(texts) == 0:
        raise ValueError("There are no texts; at least one is needed.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"Text {index} (counted from 0) is a {type(text).__name__}; it must be a string.")


def _check_vocabulary(model: PreTrainedModel, documents: Sequence[_Document]) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    for index, document in enumerate(documents):
        largest = int(document.tokens.max())
        if largest >= size:
            raise ValueError(
                f"Text {index} (counted from 0) holds the token id {largest}, but the model's vocabulary has "
                f"{size} ids. Use the tokenizer the model was trained with."
            )


def _require_at_least(smallest: int, **numbers: int) -> None:
    for name, value in numbers.items():
        if value < smallest:
            raise ValueError(f"{name} = {value}: it must be at least {smallest}.")


def check_batch_size(batch_size: int | str) -> None:
    """Check a number of windows evaluated at once.

    Raises:
        ValueError: If it is neither a whole number of at least 1 nor `"auto"`.
    """
    if isinstance(batch_size, int) and not isinstance(batch_size, bool):
        _require_at_least(1, batch_size=batch_size)
    elif batch_size != "auto":
        raise ValueError(f"batch_size = {batch_size!r}: it must be a whole number of at least 1, or 'auto'.")


def protocol_options(protocol: str, length: int, **given: Any) -> dict[str, Any]:
    """Check a protocol's name and its options, and fill in those that were not given.

    Args:
        protocol: Its name.
        length: Length of its segments, windows or chunks in tokens.
        given: Options by name; `None` if not given.

    Returns:
        The options that the protocol has.

    Raises:
        ValueError: If there is no such protocol, it has no such option, or a number is out of range.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol = {protocol!r}: it must be one of {', '.join(PROTOCOLS)}.")
    parameters = inspect.signature(PROTOCOLS[protocol]).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for name, value in given.items():
        if value is not None and name not in known:
            raise ValueError(
                f"{name} = {value}: the protocol {protocol!r} has no such option; it has "
                f"{', '.join(known) or 'none of its own'}. Leave it out, or choose another protocol."
            )
    return {name: _OPTIONS[name](length, given[name]) for name in known}


def _stride(length: int, stride: int | None) -> int:
    if stride is None:
        return max(1, length // 2)
    if not 1 <= stride <= length:
        raise ValueError(f"stride = {stride}: it must be 1 to length = {length}, or targets would be left out.")
    return stride


def _contexts(length: int, contexts: Sequence[int] | None) -> list[int]:
    if length < 2:
        raise ValueError(f"length = {length}: it must be at least 2 with protocol = 'last_token'.")
    if contexts is None:
        contexts = [*(2**power for power in range((length - 1).bit_length())), length - 1]
    if len(contexts) == 0 or not all(1 <= context < length for context in contexts):
        raise ValueError(f"contexts = {list(contexts)}: each must be 1 to length - 1 = {length - 1}, one at least.")
    return sorted(set(contexts))


_OPTIONS: dict[str, Callable[[int, Any], Any]] = {"stride": _stride, "contexts": _contexts}


def _cut(
    documents: Sequence[_Document], protocol: Protocol, length: int, options: Mapping[str, Any]
) -> dict[int, list[Window]]:
    windows = {}
    for index, document in enumerate(documents):
        try:
            windows[index] = protocol(len(document.tokens), length, **options)
        except ValueError as error:
            raise ValueError(f"Text {index} (counted from 0): {error}") from error
    return windows

"""Perplexity of causal language models under named protocols.

The scoring convention is the same for every protocol. A text becomes one sequence of tokens ``s``, the start
token first if one is asked for. Every token of ``s`` but the first is a *target*; `chunked` and `streaming`
score each target exactly once, whatever the length, so results at different lengths are over the same tokens.
Protocols differ in what the model sees before a target: its *context*, counted in tokens, at least 1.

Losses are negative log-likelihoods (NLL) in nats per token, taken in float32 whatever the dtype of the model
and summed in float64. Nothing is ever padded.

To add a protocol, write one function of type `Protocol` and give it a row in `PROTOCOLS`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

DEFAULT_LENGTH = 1024
# What decides where files come from must hold for the tokenizer as it does for the model.
_HUB_OPTIONS = ("cache_dir", "local_files_only", "revision", "token")


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


Protocol = Callable[[PreTrainedModel, Sequence[Tensor], int, int], Iterator[Scores]]
"""A protocol takes the model, the documents (one 1-D tensor of token ids each), the length in tokens and the
batch size. It yields losses as they are computed, and holds logits of at most batch size * length tokens."""


def chunked(model: PreTrainedModel, documents: Sequence[Tensor], length: int, batch_size: int) -> Iterator[Scores]:
    """Cut each document into segments of `length` tokens, each evaluated alone (LEX paper, section 4.2).

    With L = `length`, segment i has inputs ``s[i*L : (i+1)*L]`` and targets ``s[i*L + 1 : (i+1)*L + 1]``: its
    first input is the last target of the segment before it. A target therefore has 1 to L tokens of context.
    What remains at the end of a document is a shorter segment. Segments of equal length share a batch, also
    across documents, and there is no cache.
    """
    segments = [
        _Segment(document, start, min(start + length, len(tokens) - 1))
        for document, tokens in enumerate(documents)
        for start in range(0, len(tokens) - 1, length)
    ]
    segments.sort(key=_Segment.size, reverse=True)  # the largest first: too large a batch fails at once
    for _, group in groupby(segments, key=_Segment.size):
        equal = list(group)
        for first in range(0, len(equal), batch_size):
            yield from _score_segments(model, documents, equal[first : first + batch_size])


def streaming(model: PreTrainedModel, documents: Sequence[Tensor], length: int, batch_size: int) -> Iterator[Scores]:
    """Read each document once from start to end, in chunks of `length` tokens, with the model's own cache.

    The context of a target is everything before it, as far as the model's attention and cache reach; `length`
    only sets how much is computed at once. Memory is that of one chunk and of the cache. Documents are read
    one by one, so `batch_size` has no effect.

    Raises:
        ValueError: If the model returns no `past_key_values`.
    """
    for document, tokens in enumerate(documents):
        cache = None
        for start in range(0, len(tokens) - 1, length):
            nll, cache = _score_chunk(model, tokens[start : start + length + 1], cache)
            yield Scores(document, target=start + 1, context=start + 1, nll=nll)


PROTOCOLS: dict[str, Protocol] = {"chunked": chunked, "streaming": streaming}


@dataclass(frozen=True)
class ContextBucket:
    """Mean loss of the targets that had at least `start` and fewer than `stop` tokens of context.

    Attributes:
        start: Smallest context of the bucket in tokens, a power of two.
        stop: 2 · `start`.
        nll: Mean NLL in nats per token.
        tokens: Number of targets.
    """

    start: int
    stop: int
    nll: float
    tokens: int


@dataclass(frozen=True)
class PerplexityResult:
    """What `compute_perplexity` measured.

    Attributes:
        perplexity: exp(`nll`); infinite if that exceeds float64.
        nll: Mean NLL over all scored tokens, in nats per token.
        tokens: Number of scored tokens.
        bits_per_byte: Total NLL in bits by the UTF-8 bytes of the texts, comparable between tokenizers.
            Without a start token the first token of each text is not scored, but its bytes count.
        perplexities: Perplexity of each text, in the order given.
        mean_perplexity: Mean of `perplexities`, as the official `perplexity` metric of `evaluate` defines it.
        protocol: Name of the protocol.
        length: Length of its segments or chunks in tokens.
        loss_by_position: Mean NLL by context, in buckets between powers of two.
    """

    perplexity: float
    nll: float
    tokens: int
    bits_per_byte: float
    perplexities: list[float]
    mean_perplexity: float
    protocol: str
    length: int
    loss_by_position: list[ContextBucket]

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
    batch_size: int = 8,
    add_start_token: bool = True,
    max_length: int | None = None,
    progress: bool = True,
) -> PerplexityResult:
    """Measure how well a causal language model predicts texts.

    Args:
        model: Any causal language model of transformers, on the device and in the dtype wanted. It runs in
            evaluation mode and is left as it was.
        tokenizer: Its tokenizer; special tokens are not added, but for the start token.
        texts: The documents, at least one.
        protocol: `"chunked"` or `"streaming"`, see the functions of these names.
        length: Tokens in a segment or chunk; `None` means the config's `training_length` if it has one, else
            1024.
        batch_size: Number of segments evaluated at once.
        add_start_token: Whether the BOS token goes before each text, so that its first token is scored too.
        max_length: Read only so many tokens of each text, the start token included; `None` reads all.
        progress: Whether to show a progress bar, counted in scored tokens.

    Returns:
        The result, over all scored tokens and for each text.

    Raises:
        ValueError: If there are no texts, one is not a string or has fewer than two tokens (the start token
            included), the protocol is unknown, a number is out of range, the tokenizer has no BOS token or
            gives ids the model does not know, or a loss is not finite.
    """
    score = _protocol(protocol)
    if length is None:
        length = getattr(model.config, "training_length", DEFAULT_LENGTH)
    _require_at_least(1, length=length, batch_size=batch_size)
    documents = _encode(tokenizer, texts, add_start_token, max_length)
    _check_vocabulary(model, documents)
    tokens = [document.tokens for document in documents]
    with _evaluating(model), torch.inference_mode():
        scores = list(_watched(score(model, tokens, length, batch_size), tokens, progress))
    return _summarise(scores, sum(document.size for document in documents), protocol, length)


def load_for_evaluation(
    model_id: str,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer with the Auto classes.

    Args:
        model_id: Folder or Hub id that holds both.
        device: Where to put the model; `None` means a CUDA device if there is one, else the CPU. `"gpu"` is
            another word for `"cuda"`.
        dtype: Dtype of the weights, or its name; `None` keeps that of the checkpoint.
        trust_remote_code: Whether code that comes with the model may run.
        **model_kwargs: Passed to `AutoModelForCausalLM.from_pretrained`, as `attention_pattern="full"`.

    Returns:
        The model, in evaluation mode, and the tokenizer.

    Raises:
        ValueError: If there is no such model or tokenizer, it cannot be read, or the device or the dtype is
            unknown.
    """
    placement = _device(device)
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (dtype in (None, "auto") or isinstance(named, torch.dtype)):
        raise ValueError(f"dtype = {dtype!r}: it must be a dtype of torch, for example 'float32' or 'bfloat16'.")
    hub = {name: model_kwargs[name] for name in _HUB_OPTIONS if name in model_kwargs}
    with _explained(model_id, "a tokenizer (tokenizer.json, tokenizer_config.json)"):
        tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=trust_remote_code, **hub)
    with _explained(model_id, "a causal language model (config.json, model.safetensors or its shards)"):
        model = AutoModelForCausalLM.from_pretrained(
            model_id, dtype=dtype, trust_remote_code=trust_remote_code, **model_kwargs
        )
    return model.to(placement).eval(), tokenizer


@dataclass(frozen=True)
class _Segment:
    """Inputs ``s[start:stop]`` and targets ``s[start + 1 : stop + 1]`` of one document."""

    document: int
    start: int
    stop: int

    def size(self) -> int:
        return self.stop - self.start


def _score_segments(
    model: PreTrainedModel, documents: Sequence[Tensor], segments: Sequence[_Segment]
) -> Iterator[Scores]:
    tokens = torch.stack([documents[each.document][each.start : each.stop + 1] for each in segments])
    tokens = tokens.to(model.device)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    for segment, row, targets in zip(segments, logits, tokens[:, 1:], strict=True):
        yield Scores(segment.document, target=segment.start + 1, context=1, nll=_token_losses(row, targets))


def _score_chunk(model: PreTrainedModel, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Losses of ``tokens[1:]``, and the cache after ``tokens[:-1]``."""
    row = tokens.to(model.device)
    output = model(input_ids=row[None, :-1], past_key_values=cache, use_cache=True)
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise ValueError(
            f"protocol = 'streaming': {type(model).__name__} returns no past_key_values, so it cannot read a "
            "text in chunks. Use protocol='chunked'."
        )
    return _token_losses(output.logits[0], row[1:]), cache


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """NLL of `targets`, shape (targets,), on the CPU; one row at a time, so the float32 copy stays small."""
    return F.cross_entropy(logits.float(), targets.to(logits.device), reduction="none").cpu()


def _watched(scores: Iterable[Scores], documents: Sequence[Tensor], progress: bool) -> Iterator[Scores]:
    """Pass scores on, moving a progress bar, and stop at the first loss that is not finite."""
    total = sum(len(tokens) - 1 for tokens in documents)
    with tqdm(total=total, unit="token", unit_scale=True, desc="Perplexity", disable=not progress) as bar:
        for each in scores:
            _check_finite(each)
            bar.update(len(each.nll))
            yield each


def _check_finite(scores: Scores) -> None:
    broken = (~scores.nll.isfinite()).nonzero()
    if len(broken):
        first = int(broken[0])
        raise ValueError(
            f"The loss of token {scores.target + first} of text {scores.document} (both counted from 0, "
            f"with the start token) is {scores.nll[first].item()}, after {scores.context + first} tokens of "
            "context. Check the weights, or load the model with dtype='float32'."
        )


def _summarise(scores: Sequence[Scores], text_bytes: int, protocol: str, length: int) -> PerplexityResult:
    nll = torch.cat([each.nll for each in scores]).double()
    sizes = torch.tensor([len(each.nll) for each in scores])
    document = torch.tensor([each.document for each in scores]).repeat_interleave(sizes)
    context = torch.cat([torch.arange(len(each.nll)) + each.context for each in scores])
    by_document = (document.bincount(nll) / document.bincount()).exp()
    return PerplexityResult(
        perplexity=nll.mean().exp().item(),
        nll=nll.mean().item(),
        tokens=len(nll),
        bits_per_byte=nll.sum().item() / math.log(2) / text_bytes,
        perplexities=by_document.tolist(),
        mean_perplexity=by_document.mean().item(),
        protocol=protocol,
        length=length,
        loss_by_position=_by_context(nll, context),
    )


def _by_context(nll: Tensor, context: Tensor) -> list[ContextBucket]:
    edges = 2 ** torch.arange(int(context.max()).bit_length())
    bucket = torch.bucketize(context, edges, right=True) - 1
    tokens, total = bucket.bincount().tolist(), bucket.bincount(nll).tolist()
    return [
        ContextBucket(start, 2 * start, nll=total[index] / tokens[index], tokens=tokens[index])
        for index, start in enumerate(edges.tolist())
    ]


@dataclass(frozen=True)
class _Document:
    tokens: Tensor  # (tokens,), token ids
    size: int  # UTF-8 bytes of the text that was read


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
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return [
        _document(tokenizer, index, text, start, ids, room)
        for index, (text, ids) in enumerate(zip(texts, encoded, strict=True))
    ]


def _document(
    tokenizer: PreTrainedTokenizerBase,
    index: int,
    text: str,
    start: list[int],
    ids: list[int],
    room: int | None,
) -> _Document:
    """Keep `room` tokens of one text; the bytes counted are those of the tokens kept."""
    kept = ids[:room]
    if len(start + kept) < 2:
        raise ValueError(
            f"Text {index} (counted from 0), {text[:40]!r}, gives the tokens {start + kept}; the first is "
            "not scored, so at least 2 are needed. Leave the text out, or check the tokenizer."
        )
    read = text if len(kept) == len(ids) else tokenizer.decode(kept, clean_up_tokenization_spaces=False)
    return _Document(torch.tensor(start + kept), len(read.encode()))


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


def _protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise ValueError(f"protocol = {name!r}: it must be one of {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put every module into evaluation mode, then those that were training back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _explained(model_id: str, wanted: str) -> Iterator[None]:
    """Say what was looked for when a folder or a Hub repository does not hold it."""
    try:
        yield
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"{model_id!r} was searched for {wanted}, without success: {error}") from error


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        placement = torch.device("cuda" if device == "gpu" else device)
    except RuntimeError as error:
        raise ValueError(f"device = {device!r}: it must be a device of torch, as 'cpu' or 'cuda:1'.") from error
    if placement.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = {device!r}: torch finds no CUDA device here; use 'cpu'.")
    return placement

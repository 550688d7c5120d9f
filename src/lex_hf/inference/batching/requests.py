"""Requests: what each one asks for, how its next token is chosen, and when it ends; each as `generate` has it."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

CANCELLED = "The request was cancelled."

# They look at the scores of a row alone, so rows with the same settings go through them together.
_OF_SCORES_ALONE = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)


@dataclass
class Settings:
    """How the tokens of a request are chosen, and when it ends.

    Attributes:
        samples: Whether to sample; otherwise the most probable token is taken.
        limit: Number of new tokens at most; `None` for no limit.
        ends: Ids of tokens that end a text.
        processors: What `generate` applies to scores.
        criteria: Further reasons to end: stop strings, time.
        group: Rows with the same one go through `processors` together; `None` for rows that go alone.
    """

    samples: bool
    limit: int | None
    ends: frozenset[int]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    group: tuple[Any, ...] | None

    @classmethod
    def make(
        cls,
        model: Any,
        config: GenerationConfig,
        prompt: Sequence[int],
        tokenizer: Any,
        logits_processor: Sequence[Any] = (),
        **changes: Any,
    ) -> "Settings":
        """Read the settings of a request from a generation configuration, as `generate` reads them.

        Args:
            model: The model.
            config: Configuration of all requests; what it leaves open, the model's own says.
            prompt: Ids of the prompt.
            tokenizer: Needed for stop strings.
            logits_processor: Further processors of scores, as `generate` takes them.
            changes: Fields in which this request differs.

        Raises:
            ValueError: For fields that do not exist, ways to generate other than greedy and sampling, values that
                `generate` refuses, or a prompt that is as long as the text may become.
        """
        config = copy.deepcopy(config)
        if unknown := sorted(config.update(**changes)):
            raise ValueError(f"{', '.join(unknown)}: no field of GenerationConfig is called so.")
        has_length = config.max_length is not None or model.generation_config.max_length is not None
        config, _ = model._prepare_generation_config(config)
        _check_mode(config)
        limit = config.max_new_tokens
        if limit is None and has_length:
            limit = config.max_length - len(prompt)
        if limit is not None and limit < 1:
            given = (
                f"max_new_tokens = {limit}: it must be at least 1"
                if config.max_new_tokens is not None
                else f"max_length = {config.max_length}, and the prompt has {len(prompt)} tokens: allow more"
            )
            raise ValueError(f"{given}.")
        if config.min_new_tokens is not None:
            config.min_length = config.min_new_tokens + len(prompt)
        ends = config.eos_token_id
        ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        if config.pad_token_id is None:
            config.pad_token_id = max(*ends, 0, 0)  # nothing is padded here, and transformers would log a choice
        ids = torch.tensor([list(prompt)], device=model.device)
        model._prepare_special_tokens(config, True, device=model.device)
        processors = model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=ids,
            prefix_allowed_tokens_fn=None,
            logits_processor=LogitsProcessorList(logits_processor),
            device=model.device,
            model_kwargs={},
        )
        criteria = _criteria(config, tokenizer)
        return cls(config.do_sample, limit, frozenset(ends), processors, criteria, _group(config, processors))


def _check_mode(config: GenerationConfig) -> None:
    """Refuse what needs more than one row, or other rows than those of this request."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) or (config.guidance_scale or 1) != 1:
        what = f"guidance_scale = {config.guidance_scale}" if (config.guidance_scale or 1) != 1 else mode.value
        raise ValueError(
            f"Continuous batching generates greedily or samples, and this configuration asks for {what}: call "
            "generate() for it."
        )


def _criteria(config: GenerationConfig, tokenizer: Any) -> StoppingCriteriaList:
    criteria = StoppingCriteriaList()
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(max_time=config.max_time))
    if config.stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings are found in text: pass the tokenizer of the model, tokenizer=….")
        criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer))
    return criteria


def _group(config: GenerationConfig, processors: LogitsProcessorList) -> tuple[Any, ...] | None:
    if not all(type(each) in _OF_SCORES_ALONE for each in processors):
        return None
    settings = ((type(each).__name__, *sorted(vars(each).items())) for each in processors)
    return (config.do_sample, *settings)


@dataclass(eq=False)
class Prompt:
    """A prompt and what has been read of it; requests for several continuations share one.

    Attributes:
        ids: Ids of its tokens.
        cache: The cache of the tokens that were read.
        read: Their number.
        logits: Logits of the token after the last one, shape `(1, vocab_size)`, once all were read.
        waiting: Number of requests that are still to be continued from here.
    """

    ids: list[int]
    cache: Cache | None = None
    read: int = 0
    logits: torch.Tensor | None = None
    waiting: int = 1


@dataclass(eq=False)
class Request:
    """A request on its way.

    Attributes:
        request_id: Its name.
        prompt: Its prompt.
        settings: How its tokens are chosen.
        generator: The source of its random numbers.
        streaming: Whether every token is delivered when it is written.
        records_times: Whether the time of every token is kept.
        returns_logprobs: Whether log-probabilities are kept.
        tokens: Ids of its new tokens.
        logprobs: Their log-probabilities in nats, after all processors.
        times: When they were written, in seconds (`time.perf_counter`).
        status: How far it is.
        error: Why it failed.
        created: When it was made.
        lifespan: When its prompt was begun, and when it ended; -1 before.
    """

    request_id: str
    prompt: Prompt
    settings: Settings
    generator: torch.Generator
    streaming: bool = False
    records_times: bool = False
    returns_logprobs: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    status: RequestStatus = RequestStatus.PENDING
    error: str | None = None
    created: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)

    def begin(self) -> None:
        """Note that the prompt is being read."""
        self.status, self.lifespan = RequestStatus.PREFILLING, (time.perf_counter(), -1)

    def accept(self, choice: "Choice") -> None:
        """Append a token, and note whether it is the last one."""
        self.status, token = RequestStatus.DECODING, choice.token
        self.tokens.append(token)
        if self.returns_logprobs and choice.logprob is not None:
            self.logprobs.append(choice.logprob)
        if self.records_times:
            self.times.append(time.perf_counter())
        settings = self.settings
        if token in settings.ends or len(self.tokens) == settings.limit or (settings.criteria and self._is_stopped()):
            self.end(RequestStatus.FINISHED)

    def _is_stopped(self) -> bool:
        last = max(getattr(each, "maximum_token_len", 1) for each in self.settings.criteria)
        ids = torch.tensor([(self.prompt.ids[-last:] + self.tokens)[-last:]])
        return bool(self.settings.criteria(ids, None))

    def end(self, status: RequestStatus, error: str | None = None) -> None:
        """Note that there are no further tokens."""
        self.status, self.error = status, error
        self.lifespan = (self.lifespan[0], time.perf_counter())

    @property
    def has_ended(self) -> bool:
        """True if there are no further tokens."""
        return self.status >= RequestStatus.FINISHED

    def output(self) -> GenerationOutput:
        """Return what transformers calls the output of a request: what there is of it so far."""
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt.ids,
            generated_tokens=self.tokens[:],
            logprobs=self.logprobs[:],
            error=self.error,
            status=self.status,
            created_time=self.created,
            lifespan=self.lifespan,
            timestamps=self.times[:] if self.records_times else None,
        )


@dataclass(frozen=True)
class Choice:
    """The next token of a request.

    Attributes:
        token: Its id.
        logprob: Its log-probability in nats, after all processors, if that is wanted.
        error: Why there is none.
    """

    token: int = -1
    logprob: float | None = None
    error: str | None = None


def choose(requests: Sequence[Request], logits: torch.Tensor) -> list[Choice]:
    """Choose the next token of each request, each as it would be alone.

    What fails, e.g. a processor, fails for the requests that use it alone.

    Args:
        requests: The requests.
        logits: Their logits, shape `(requests, vocab_size)`.
    """
    groups: dict[Any, list[int]] = {}
    for row, request in enumerate(requests):
        groups.setdefault(row if request.settings.group is None else request.settings.group, []).append(row)
    choices = [Choice()] * len(requests)
    for rows in groups.values():
        members = [requests[row] for row in rows]
        try:
            found = _chosen(members, logits[rows].to(dtype=torch.float32))
        except Exception as error:  # processors raise anything
            found = [Choice(error=f"{type(error).__name__}: {error}")] * len(rows)
        for row, choice in zip(rows, found, strict=True):
            choices[row] = choice
    return choices


def _chosen(requests: Sequence[Request], scores: torch.Tensor) -> list[Choice]:
    """Choose tokens for one request, or for several with the same settings."""
    settings = requests[0].settings
    if settings.processors:
        text = requests[0].prompt.ids + requests[0].tokens if settings.group is None else []
        scores = settings.processors(torch.tensor([text], dtype=torch.long, device=scores.device), scores)
    if settings.samples:
        probabilities = scores.softmax(dim=-1)
        draws = zip(probabilities.split(1), requests, strict=True)
        tokens = [int(torch.multinomial(each, num_samples=1, generator=request.generator)) for each, request in draws]
    else:
        tokens = scores.argmax(dim=-1).tolist()
    if not any(request.returns_logprobs for request in requests):
        return [Choice(token) for token in tokens]
    logprobs = scores.log_softmax(dim=-1).gather(1, torch.tensor(tokens, device=scores.device)[:, None])
    return [Choice(token, logprob) for token, logprob in zip(tokens, logprobs[:, 0].tolist(), strict=True)]


def check_prompt(ids: Any, model: PreTrainedModel) -> list[int]:
    """Return the ids of a prompt as a list.

    Raises:
        ValueError: If it is empty, or holds something that is no id of the model's vocabulary.
    """
    ids = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    if not ids:
        raise ValueError("A prompt is empty: it needs at least one token.")
    size = model.get_input_embeddings().weight.shape[0]
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < size:
            raise ValueError(
                f"A prompt holds {each!r}; it must be a flat list of ids from 0 to {size - 1}. Does the tokenizer "
                "belong to this model?"
            )
    return ids

"""Generation over a corpus: every prompt continued, in files that a run which was stopped continues."""

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import get_cpu_distributed_information
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils.logging import tqdm

from lex_hf.evaluation.loading import evaluating, join_processes
from lex_hf.evaluation.resume import model_fingerprint
from lex_hf.inference.batching.limits import MEMORY_SHARE, is_constant
from lex_hf.inference.batching.manager import BlockBatchingManager
from lex_hf.inference.batching.requests import Settings
from lex_hf.inference.corpus_folder import RESULT, CorpusFolder, hash_of, survey
from lex_hf.inference.generation import encode_prompt
from lex_hf.records import fingerprint
from lex_hf.rope.blockwise import reader_of

_OF_THE_MACHINE = ("rows", "piece", "progress")  # options that change nothing in what is written


@dataclass(frozen=True)
class CorpusOptions:
    """Options of [`generate_corpus`], checked when they are created.

    Attributes:
        max_new_tokens: Number of new tokens for each prompt at most.
        do_sample: Whether to sample; otherwise the most probable token is taken.
        temperature: Temperature of sampling; `None` means the model's own.
        top_p: Nucleus of sampling; `None` means the model's own.
        seed: Seed of the first prompt; prompt *n* has `seed + n`, whatever runs beside it.
        stop_strings: Texts that end a continuation; they are its end then.
        max_prompt_tokens: Number of tokens that are read of a prompt, its last ones (a start token stays); `None`
            reads all. How many were left out is in the result.
        include_prompts: Whether the text of each prompt is written, too, and not its hash alone.
        rows: Number of texts that are continued at once in each process; `None` takes what memory allows.
        piece: Number of tokens of prompts that are read between two steps; `None` means 256 on a CPU, else 2,048.
        progress: Whether to show a progress bar, counted in prompts; of the first process only.

    Raises:
        ValueError: If a number is out of range, or a stop string is empty.
    """

    max_new_tokens: int = 200
    do_sample: bool = True
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0
    stop_strings: Sequence[str] = ()
    max_prompt_tokens: int | None = None
    include_prompts: bool = False
    rows: int | None = None
    piece: int | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        least = {"max_new_tokens": 1, "seed": 0, "max_prompt_tokens": 2, "rows": 1, "piece": 1}
        optional = {field.name for field in fields(self) if field.default is None}
        for name, smallest in least.items():
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= smallest
            if not is_number and not (value is None and name in optional):
                raise ValueError(f"{name} = {value!r}: it must be a whole number of at least {smallest}.")
        strings = self.stop_strings
        if isinstance(strings, str) or not all(isinstance(each, str) and each for each in strings):
            raise ValueError(f"stop_strings = {strings!r}: it must be a list of texts, none of them empty.")

    def generation_config(self, model: PreTrainedModel) -> GenerationConfig:
        """Return what `generate` would take for one prompt: the model's own settings, with these."""
        config = copy.deepcopy(model.generation_config)
        assert config is not None
        sampling = {"temperature": self.temperature, "top_p": self.top_p} if self.do_sample else {}
        config.update(
            max_new_tokens=self.max_new_tokens,
            do_sample=self.do_sample,
            stop_strings=list(self.stop_strings) or config.stop_strings,
            num_return_sequences=1,
            **{name: value for name, value in sampling.items() if value is not None},
        )
        return config


@dataclass(frozen=True)
class CorpusResult:
    """What was generated over a corpus, by all processes and all runs.

    Attributes:
        path: The file of the continuations, in the order of the prompts.
        prompts: Number of prompts.
        finished_before: How many of them were finished before this run.
        tokens: Number of new tokens.
        prompt_tokens: Number of tokens of prompts that were read.
        cut: Number of prompts of which only the last tokens were read.
        finish_reasons: How many ended with an end token or a stop string (`"stop"`), and how many at the limit
            (`"length"`).
    """

    path: str
    prompts: int
    finished_before: int
    tokens: int
    prompt_tokens: int
    cut: int
    finish_reasons: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, as JSON can hold it."""
        return asdict(self)


def generate_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Iterable[str],
    output: str | Path,
    options: CorpusOptions | None = None,
) -> CorpusResult:
    """Continue every prompt of a corpus, which may be larger than memory.

    The prompts are read one at a time: once to check them, and then as rows become free, so that few wait in memory.
    Each continuation is the one of `torch.manual_seed(seed + n)` and `generate` for prompt *n* alone: in float32 it
    depends neither on the number of rows or processes nor on interruptions. It is written as soon as it ends. Run
    again with the same arguments, the function continues where it was stopped, also if there are further prompts after
    those of the earlier run.

    Under `accelerate launch` or `torchrun` every process continues its share of the prompts; each of them must make
    the same call, with the whole model and the same files, and gets the whole result.

    Args:
        model: A LEX model, or one that [`lex_hf.blockwise`] made, on the device and in the dtype wanted.
        tokenizer: Its tokenizer; special tokens are added as it adds them.
        prompts: Texts that can be read several times: a list, or what
            [`stream_documents`][lex_hf.data.documents.stream_documents] returns.
        output: A folder, new or of an earlier run. `continuations.jsonl` has a line for each prompt, in their order:
            `number` (from 0), `prompt_sha256`, `prompt` if wanted, `prompt_tokens` (read), `cut` (left out), `seed`,
            `text`, `tokens` (ids) and `finish_reason` (`"stop"` or `"length"`). While processes run, each has a file
            `continuations.part-N.jsonl`. `settings.json` says what the continuations depend on.
        options: The options; by default those of `CorpusOptions()`.

    Raises:
        ValueError: Before anything is generated: for options or a model that cannot be used, prompts that can be read
            only once, are no texts or are not those of the earlier run, a folder that holds something else or was
            written with other settings, which are named, or is being written by another run. Later: for a prompt
            without tokens or with ids that the model does not know, or that it fails to continue.
        OSError: If the folder cannot be read or written. What was finished before stays there.
        RuntimeError: If generation fails.
    """
    options = CorpusOptions() if options is None else options
    _check_model(model, options)
    config = options.generation_config(model)
    settings = Settings.make(model, config, [0], tokenizer)
    join_processes(model.device)
    folder = CorpusFolder(output, _identity(model, tokenizer, config, options))
    digests = survey(_checked(prompts, tokenizer))
    if not digests:
        raise ValueError("There are no prompts; at least one is needed.")
    with folder.opened(digests), evaluating(model):
        state = PartialState()
        mine = range(state.process_index, len(digests), state.num_processes)
        left = sum(not folder.is_finished(number) for number in mine)
        bar = {"total": len(mine), "initial": len(mine) - left, "unit": "prompt", "desc": "Continuations"}
        with tqdm(**bar, disable=not (options.progress and state.is_main_process)) as shown:
            if left:
                _Run(model, tokenizer, folder, options, settings, shown.update).all(_texts(prompts), mine)
        found = folder.merge(digests)
    return CorpusResult(path=str(folder.path / RESULT), finished_before=folder.finished, **found)


def _texts(prompts: Iterable[Any]) -> Iterator[Any]:
    """Yield the texts of prompts, which may be the rows of a dataset."""
    for each in prompts:
        yield each["text"] if isinstance(each, dict) else each


def _checked(prompts: Iterable[Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield prompts, each after a check."""
    if isinstance(prompts, str):
        raise ValueError("The prompts are a single string; they must be a list of strings: put it into a list.")
    if iter(prompts) is prompts:
        raise ValueError(
            "The prompts are an iterator, which can be read only once, and they are read again to continue a run: "
            "give a list, or what stream_documents returns."
        )
    for number, text in enumerate(_texts(prompts)):
        if not isinstance(text, str):
            raise ValueError(f"Prompt {number} (counted from 0) is a {type(text).__name__}; it must be a string.")
        if not text and not tokenizer.bos_token:
            raise ValueError(f"Prompt {number} (counted from 0) is empty, and the tokenizer has no start token.")
        yield text


def _check_model(model: PreTrainedModel, options: CorpusOptions) -> None:
    if reader_of(model) is None and model.config.model_type != "lex":
        raise ValueError(
            f"{type(model).__name__} keeps all it has read, and many prompts at once need a cache of constant size: "
            "make it read in blocks first, with lex_hf.blockwise(model), --blockwise on the command line."
        )
    if options.max_prompt_tokens is None and not is_constant(model):
        raise ValueError(
            "The model has layers with full attention, which need room for the longest prompt: give max_prompt_tokens "
            "(--max-prompt-tokens)."
        )


def _identity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: GenerationConfig, options: CorpusOptions
) -> dict[str, Any]:
    """Return what continuations depend on, under names by which a user knows it."""
    own = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name[0] != "_" and name != "transformers_version"
    }
    chosen = {name: value for name, value in asdict(options).items() if name not in _OF_THE_MACHINE}
    source: Any = reader_of(model) or model.config
    if not options.do_sample:
        chosen |= {"temperature": None, "top_p": None, "seed": None}
    return chosen | {
        "stop_strings": list(options.stop_strings),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "attention": [str(pattern) for pattern in source.patterns],
        "model": model_fingerprint(model),
        "tokenizer": _tokenizer_fingerprint(tokenizer),
        "generation_config": {name: value for name, value in own.items() if name not in chosen},
    }


def _tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = dict(tokenizer.get_vocab()) if backend is None else json.loads(backend.to_str())
    for changed_by_calls in ("truncation", "padding") if backend is not None else ():
        content.pop(changed_by_calls, None)
    return fingerprint([type(tokenizer).__name__, tokenizer.special_tokens_map, content])


@dataclass(frozen=True)
class _Prompt:
    """A prompt on its way."""

    number: int
    text: str
    ids: list[int]
    cut: int


class _Run:
    """The work of one process: prompts go to a manager as rows become free, and what ends goes to the folder."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: CorpusFolder,
        options: CorpusOptions,
        settings: Settings,
        advance: Any,
    ) -> None:
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.options, self.settings, self.advance = options, settings, advance
        self._open: dict[str, _Prompt] = {}

    def all(self, texts: Iterator[str], mine: range) -> None:
        """Continue those of this process's prompts that are not finished."""
        manager = self._manager()
        most = 2 * manager.rows.size  # one waits for each that is continued
        manager.start()
        try:
            for number, text in enumerate(texts):
                if number not in mine or self.folder.is_finished(number):
                    continue
                while self._take(manager, timeout=None if len(self._open) >= most else 0):
                    pass  # what has ended is written before anything else is read
                self._add(manager, number, text)
            while self._open:
                self._take(manager)
        except KeyboardInterrupt:
            if not PartialState().is_main_process:
                raise
            raise KeyboardInterrupt(
                f"Interrupted. What is finished is in {self.folder.path}; the same call continues from there."
            ) from None
        finally:
            manager.destroy()

    def _manager(self) -> BlockBatchingManager:
        on_this_machine = get_cpu_distributed_information().local_world_size if self.model.device.type == "cpu" else 1
        config = ContinuousBatchingConfig(
            max_requests_per_batch=self.options.rows,
            max_batch_tokens=self.options.piece,
            max_memory_percent=MEMORY_SHARE / max(on_this_machine, 1),
        )
        longest = self.options.max_prompt_tokens
        hints = (
            None
            if longest is None
            else WorkloadHints(max_prompt_length=longest, max_generated_length=self.options.max_new_tokens)
        )
        return BlockBatchingManager(self.model, self.options.generation_config(self.model), config, hints)

    def _add(self, manager: BlockBatchingManager, number: int, text: str) -> None:
        try:
            ids = encode_prompt(text, self.model, self.tokenizer)["input_ids"][0].tolist()
            kept = self._cut(ids)
            seed = self.options.seed + number
            manager.add_request(kept, str(number), seed=seed, tokenizer=self.tokenizer)
        except ValueError as error:
            raise ValueError(f"Prompt {number} (counted from 0), {text[:40]!r}: {error}") from error
        self._open[str(number)] = _Prompt(number, text, kept, len(ids) - len(kept))

    def _cut(self, ids: list[int]) -> list[int]:
        """Leave out what is too much: tokens at the beginning, after the start token if there is one."""
        most = self.options.max_prompt_tokens
        if most is None or len(ids) <= most:
            return ids
        start = ids[:1] if ids[0] == self.tokenizer.bos_token_id else []
        return start + ids[len(ids) - most + len(start) :]

    def _take(self, manager: BlockBatchingManager, timeout: float | None = None) -> bool:
        """Write the next continuation that ends, and return whether there was one in time (seconds)."""
        output = manager.get_result(timeout=timeout)
        if output is None:
            if timeout is None or not manager.is_running():
                raise RuntimeError(f"Generation failed: {manager.fatal_error}") from manager.fatal_error
            return False
        prompt = self._open.pop(output.request_id)
        if output.error is not None:
            raise ValueError(
                f"Prompt {prompt.number} (counted from 0), {prompt.text[:40]!r}, cannot be continued: {output.error}"
            )
        self.folder.add(self._line(prompt, output))
        self.advance()
        return True

    def _line(self, prompt: _Prompt, output: GenerationOutput) -> dict[str, Any]:
        tokens = output.generated_tokens
        # As in pipelines of transformers: tokens alone would lose the space at their beginning with some tokenizers.
        beginning, whole = (
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in (prompt.ids, prompt.ids + tokens)
        )
        return {
            "number": prompt.number,
            "prompt_sha256": hash_of(prompt.text),
            **({"prompt": prompt.text} if self.options.include_prompts else {}),
            "prompt_tokens": len(prompt.ids),
            "cut": prompt.cut,
            "seed": self.options.seed + prompt.number if self.options.do_sample else None,
            "text": whole[len(beginning) :],
            "tokens": tokens,
            "finish_reason": self._reason(prompt.ids, tokens),
        }

    def _reason(self, ids: list[int], tokens: list[int]) -> str:
        if len(tokens) < self.options.max_new_tokens or tokens[-1] in self.settings.ends:
            return "stop"
        last = max((getattr(each, "maximum_token_len", 1) for each in self.settings.criteria), default=1)
        text = torch.tensor([(ids[-last:] + tokens)[-last:]])
        return "stop" if self.settings.criteria and bool(self.settings.criteria(text, None)) else "length"

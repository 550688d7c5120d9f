"""Continuous batching with the interface of transformers: requests join and leave a running batch at any step."""

import asyncio
import contextlib
import queue
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging

from lex_hf.inference.batching.layout import WeightLayout
from lex_hf.inference.batching.limits import Limits, free_memory
from lex_hf.inference.batching.outputs import Outputs, is_finished
from lex_hf.inference.batching.requests import Prompt, Request, Settings, check_prompt
from lex_hf.inference.batching.rows import Rows
from lex_hf.inference.batching.schedule import Schedule
from lex_hf.inference.batching.sessions import FileSessions, MemorySessions, Sessions

logger = logging.get_logger(__name__)

_PATIENCE = 10  # seconds to wait for room in the queue, as transformers does


class BlockBatchingManager:
    """Generates for many requests at once; `model.init_continuous_batching()` makes one.

    Its methods are those of transformers' `ContinuousBatchingManager`. A request writes the tokens that it would write
    alone, whatever joins, leaves or is cancelled around it.

    Args:
        model: A LEX model, or one that [`lex_hf.blockwise`] made.
        generation_config: What requests ask for where they say nothing; the model's own by default.
        continuous_batching_config: Of transformers' settings, those that mean something without pages:
            `max_requests_per_batch` (rows), `max_batch_tokens` (tokens of prompts read between two steps),
            `max_memory_percent`, `max_queue_size`, `scheduler_type`, `seed`, `return_logprobs`,
            `decode_compile_config`, `default_compile_level`. Those that only pages have must be left alone.
        workload_hints: The longest prompt and continuation, which layers with full attention must have room for.
        session_bytes: Bytes for what finished requests leave behind; a prompt that begins with their text goes on from
            there. 0 keeps nothing. On a CPU in float32, a copy of the weights in another layout is held while the
            manager runs, if there is memory for it.
        session_folder: Where to keep it; by default in memory.

    Raises:
        ValueError: If a setting does not fit, the model cannot be served, or there is no memory for a single row.

    Example:
        >>> from lex_hf import LexConfig, LexForCausalLM
        >>> model = LexForCausalLM(LexConfig(num_hidden_layers=1)).eval()
        >>> with model.continuous_batching_context_manager() as manager:
        ...     request = manager.add_request([1, 2, 3], max_new_tokens=4, temperature=0.8, do_sample=True, seed=0)
        ...     len(manager.get_result(request).generated_tokens)
        4
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
        *,
        session_bytes: int = 0,
        session_folder: str | Path | None = None,
    ) -> None:
        self.model: Any = model.eval()
        self.generation_config = model.generation_config if generation_config is None else generation_config
        config = ContinuousBatchingConfig() if continuous_batching_config is None else continuous_batching_config
        self.continuous_batching_config = config
        self.limits = Limits.of(model, self.generation_config, config, workload_hints)
        self.num_return_sequences = self.generation_config.num_return_sequences or 1
        self.rows = Rows(model, self.limits.room)
        self.rows.allocate(self.limits.rows(self.rows.row_bytes))
        self.outputs = Outputs()
        self.fatal_error: Exception | None = None
        self.warmed_up = False
        compile_config = self.limits.compile_config
        self._schedule = Schedule(
            model,
            self.rows,
            piece=self.limits.piece,
            reads_all=self.limits.reads_all,
            step=model if compile_config is None else model.get_compiled_call(compile_config),
            sizes=() if compile_config is None else _sizes(self.rows.size),
            sessions=_sessions(session_bytes, session_folder, model),
            deliver=self._deliver,
        )
        self._seed = secrets.randbits(48) if config.seed is None else config.seed
        self._changed = threading.Condition()
        self._inbox: list[Request] = []
        self._cancelled: list[str] = []
        self._open: set[str] = set()
        self._counter = self._unnamed = 0
        self._pauses = 0
        self._is_paused = self._is_stopping = self._is_hurried = False
        self._thread: threading.Thread | None = None
        layout = WeightLayout(model)
        used = layout.nbytes() + self.rows.size * self.rows.row_bytes
        is_worth_it = compile_config is None and self.rows.size > 1 and used <= free_memory(model.device)
        self._layout = layout if is_worth_it else None

    # Requests and their results: called from any thread.

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        seed: int | None = None,
        tokenizer: Any = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Any] = (),
        **settings: Any,
    ) -> str:
        """Add a request.

        Args:
            input_ids: Ids of the prompt.
            request_id: A name for it; made if not given.
            max_new_tokens: Number of new tokens at most; the configuration says it by default. `None` in both is no
                limit.
            streaming: Whether to deliver a result with every token, and not only at the end.
            record_timestamps: Whether to keep the time of every token.
            eos_token_id: Ids that end the text.
            seed: Seed of sampling: the tokens are those of `torch.manual_seed(seed)` and `generate` alone. Without it,
                the seed of the manager and the number of the request make one.
            tokenizer: Needed for `stop_strings`.
            generation_config: A configuration of this request, in the place of the manager's.
            logits_processor: Further processors of scores, as `generate` takes them.
            settings: Fields of `GenerationConfig` for this request, e.g. `temperature`, `top_p`, `do_sample`,
                `repetition_penalty`, `stop_strings`.

        Returns:
            The name of the request.

        Raises:
            ValueError: If the prompt is empty or holds what is no id, a setting is unknown or impossible, or a request
                of that name has not ended.
            RuntimeError: If the manager is stopping or has failed.
            queue.Full: If the queue stays full for ten seconds.
        """
        config = self.generation_config if generation_config is None else generation_config
        changes = settings | {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        changes = {name: value for name, value in changes.items() if value is not None}
        ids = check_prompt(input_ids, self.model)
        made = Settings.make(self.model, config, ids, tokenizer, logits_processor, **changes)
        self.limits.check_length(len(ids), made.limit)
        count = self.num_return_sequences if generation_config is None else generation_config.num_return_sequences or 1
        name, number = self._name(request_id)
        seed = self._seed + number if seed is None else seed
        prompt = Prompt(ids, waiting=count)
        for index in range(count):
            # As transformers calls them: the last one has the name of the request itself.
            request = Request(
                name if index == count - 1 else f"{name}__child#{index}",
                prompt,
                made if index == 0 else Settings.make(self.model, config, ids, tokenizer, logits_processor, **changes),
                torch.Generator(self.model.device).manual_seed(seed + index),
                streaming,
                record_timestamps,
                self.continuous_batching_config.return_logprobs,
            )
            self._post(request)
        return name

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **settings: Any,
    ) -> list[str]:
        """Add several requests with the same settings; see [`BlockBatchingManager.add_request`].

        Returns:
            Their names, in the order of the prompts.
        """
        prompts = [check_prompt(ids, self.model) for ids in inputs]
        return [
            self.add_request(
                ids,
                max_new_tokens=max_new_tokens,
                streaming=streaming,
                record_timestamps=record_timestamps,
                **settings,
            )
            for ids in prompts
        ]

    def _name(self, request_id: str | None) -> tuple[str, int]:
        with self._changed:
            number = self._counter
            self._counter += 1
            if request_id is None:
                request_id = f"req_{self._unnamed}"
                self._unnamed += 1
        return request_id, number

    def _post(self, request: Request) -> None:
        with self._changed:
            if self.fatal_error is not None:
                raise RuntimeError(f"Generation has failed ({self.fatal_error}), and takes no further requests.")
            if self._is_stopping:
                raise RuntimeError("The manager is stopping, and takes no further requests.")
            if request.request_id in self._open:
                raise ValueError(f"A request {request.request_id!r} has not ended yet: choose another request_id.")
            most = self.continuous_batching_config.max_queue_size
            if most and not self._changed.wait_for(lambda: self._waiting() < most, _PATIENCE):
                raise queue.Full(f"{most} requests are waiting already, and no more may.")
            self._open.add(request.request_id)
            self._inbox.append(request)
            self._changed.notify_all()

    def _waiting(self) -> int:
        return len(self._inbox) + len(self._schedule.waiting)

    def cancel_request(self, request_id: str) -> None:
        """End a request; its last result says that it was cancelled. One that has ended already is left alone."""
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify_all()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Return the next result.

        Args:
            request_id: Of which request; `None` for any.
            timeout: Seconds to wait; `None` for no limit.

        Returns:
            The result, or `None` if there is none in time, or the manager does not run.
        """
        return self.outputs.take(request_id, timeout if self.is_running() else 0)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield results as they come, while the manager runs."""
        while self.is_running():
            result = self.get_result(timeout=0.1)
            if result is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput]:
        """Yield the results of one request, up to its last one."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if is_finished(result):
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Call `callback` in the running event loop with each result of a request."""
        self.outputs.register(request_id, callback, asyncio.get_running_loop())

    def counts(self) -> Mapping[str, int]:
        """Return how many requests are running, being read and waiting, and what was read and written so far."""
        schedule = self._schedule
        return {
            "rows": self.rows.size,
            "running": len(schedule.running),
            "reading": int(schedule.reading is not None),
            "waiting": self._waiting(),
            "tokens_read": schedule.tokens_read,
            "tokens_written": schedule.tokens_written,
            "steps": schedule.steps,
            "session_bytes": schedule.sessions.nbytes(),
        }

    # The thread that generates.

    def is_running(self) -> bool:
        """Return whether the thread that generates is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread that generates."""
        if self.is_running():
            return
        self._is_stopping = self._is_hurried = False
        self.fatal_error = None
        self._lay_out()
        self.outputs.open()
        self._thread = threading.Thread(target=self._run, name="lex-hf-batching", daemon=True)
        self._thread.start()

    def warmup(self) -> None:
        """Compile the steps for every number of rows, if steps are compiled."""
        for size in self._schedule.sizes:
            ids = torch.zeros((size, 1), dtype=torch.long, device=self.model.device)
            with torch.no_grad():
                self._schedule.step(input_ids=ids, past_key_values=self.rows.first(size), use_cache=True)
        self.warmed_up = True

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no further requests, and stop when those that came have ended.

        Args:
            block: Whether to wait for it.
            timeout: Seconds to wait at most; `None` for no limit.
            keep_for_next_session: Whether `model.init_continuous_batching()` returns this manager the next time.
            hard_stop: Whether to end all requests now, with an error.

        Raises:
            RuntimeError: In a pause, which holds the thread that would have to stop.
        """
        with self._changed:
            if self._is_paused and block:
                raise RuntimeError("Leave pause() before you stop the manager: the thread that would stop is held.")
            self._is_stopping, self._is_hurried = True, self._is_hurried or hard_stop
            self._changed.notify_all()
        if block and self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("Requests are still running %s s after the manager was told to stop.", timeout)
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self

    def destroy(self) -> None:
        """Stop at once, and give back the memory of the rows."""
        self.stop(hard_stop=True)
        self._schedule.sessions.close()
        self.rows.release()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Hold the thread that generates between two steps, e.g. to change weights; then requests go on.

        Raises:
            RuntimeError: If it does not run.
        """
        with self._changed:
            self._pauses += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_paused or not self.is_running())
            if not self._is_paused:
                self._pauses -= 1
                raise RuntimeError("The manager does not run: there is nothing to pause.")
        try:
            self._lay_out(is_wanted=False)
            yield
        finally:
            self._lay_out()
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def _lay_out(self, is_wanted: bool = True) -> None:
        """Lay out the weights for steps of several rows, as they are now; or let layers use those that they have."""
        if self._layout is not None:
            (self._layout.apply if is_wanted else self._layout.remove)()

    def _deliver(self, output: GenerationOutput) -> None:
        if is_finished(output):
            with self._changed:
                self._open.discard(output.request_id)
        self.outputs.deliver(output)

    def _run(self) -> None:
        """Advance until told to stop."""
        schedule = self._schedule
        try:
            while self._wait_for_work():
                self._take_in()
                if self._is_hurried:
                    schedule.fail_all("The manager was stopped before this request ended.")
                schedule.advance()
        except Exception as error:  # whatever a model raises in a step of many rows concerns all of them
            logger.exception("Generation failed.")
            self.fatal_error = error
            self._take_in()
            schedule.fail_all(f"Generation failed: {error}")
        finally:
            self._lay_out(is_wanted=False)
            self.outputs.close()
            with self._changed:
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; return False if nothing will come."""

        def is_needed() -> bool:
            is_idle = schedule.is_idle() and not self._inbox and not self._cancelled
            return not self._pauses and (not is_idle or self._is_stopping)

        schedule = self._schedule
        with self._changed:
            while not is_needed():
                self._is_paused = bool(self._pauses)
                self._changed.notify_all()
                self._changed.wait()
            self._is_paused = False
            return not (self._is_stopping and schedule.is_idle() and not self._inbox)

    def _take_in(self) -> None:
        """Take what came in since the last step."""
        with self._changed:
            self._schedule.waiting.extend(self._inbox)
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, []
            self._changed.notify_all()
        for request_id in cancelled:
            self._schedule.cancel(request_id)


def _sizes(rows: int) -> tuple[int, ...]:
    """Numbers of rows for which steps are compiled: powers of two, and all."""
    return (*(2**power for power in range((rows - 1).bit_length())), rows)


def _sessions(max_bytes: int, folder: str | Path | None, model: PreTrainedModel) -> Sessions:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
        raise ValueError(f"session_bytes = {max_bytes!r}: it must be a number of bytes, 0 to keep nothing.")
    if folder is not None and not max_bytes:
        raise ValueError(f"session_folder = {str(folder)!r} needs session_bytes: how many bytes may be kept there?")
    if folder is not None:
        return FileSessions(max_bytes, Path(folder), model)
    return MemorySessions(max_bytes) if max_bytes else Sessions()

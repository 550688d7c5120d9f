"""The entry points of continuous batching, as models of transformers have them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging

from lex_hf.inference.batching.manager import BlockBatchingManager
from lex_hf.inference.batching.requests import Settings, check_prompt


def init(
    model: Any,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
    **options: Any,
) -> BlockBatchingManager:
    """Make a [`BlockBatchingManager`]; or return the one that was stopped with `keep_for_next_session`.

    Raises:
        ValueError: See [`BlockBatchingManager`]; or if another one is kept.
    """
    kept = vars(model).get("_cached_continuous_batching_manager")
    if kept is None:
        return BlockBatchingManager(model, generation_config, continuous_batching_config, workload_hints, **options)
    if options or continuous_batching_config not in (None, kept.continuous_batching_config):
        raise ValueError(
            "A manager with other settings is kept from an earlier call: call "
            "model.destroy_cached_continuous_batching_manager() first."
        )
    if generation_config is not None:
        kept.generation_config = generation_config
    return kept


def destroy_kept(model: Any) -> None:
    """Stop the manager that an earlier call kept, and give back its memory."""
    kept = vars(model).pop("_cached_continuous_batching_manager", None)
    if kept is not None:
        kept.destroy()


@contextlib.contextmanager
def running(
    model: Any,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: WorkloadHints | None = None,
    **options: Any,
) -> Iterator[BlockBatchingManager]:
    """Run a manager for as long as a block of code takes; requests that have not ended then are waited for.

    Args:
        model: A LEX model, or one that [`lex_hf.blockwise`] made.
        generation_config: As for [`BlockBatchingManager`], like all that is not listed here.
        block: Whether to wait for requests that have not ended; otherwise they go on in their thread.
        timeout: Seconds to wait for them at most, after which they go on; `None` for no limit.
        continuous_batching_config: See there.
        persistent_manager: Whether to keep the manager for the next time.
        warmup: Whether to compile before the first request, if steps are compiled.
        workload_hints: See there.
        options: See there.
    """
    manager = init(model, generation_config, continuous_batching_config, workload_hints, **options)
    if warmup and not manager.warmed_up:
        manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)
        if not persistent_manager and not manager.is_running():
            manager.destroy()


def generate_batch(
    model: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **settings: Any,
) -> dict[str, GenerationOutput]:
    """Generate for a list of prompts of any lengths, in as many rows as there are or memory allows.

    Args:
        model: A LEX model, or one that [`lex_hf.blockwise`] made.
        inputs: Ids of each prompt.
        generation_config: What all requests ask for; the model's own by default.
        continuous_batching_config: See [`BlockBatchingManager`].
        record_timestamps: Whether to keep the time of every token.
        progress_bar: Whether to show a bar.
        persistent_manager: Whether to keep the manager for the next call.
        warmup: Whether to compile before the first request, if steps are compiled.
        settings: As for [`BlockBatchingManager.add_request`], for all of them; `seed` is that of the first one, and
            the others have those that follow it.

    Returns:
        For each request, in the order of the prompts, its name and what came of it. Each wrote what `generate` would
        have written for it alone.

    Raises:
        ValueError: For prompts or settings that cannot be served, before anything is generated; or if nothing would
            end a text.
        RuntimeError: If generation fails.
    """
    if not inputs:
        return {}
    if "cache_implementation" in settings:  # generate(cache_implementation="paged") ends here
        raise ValueError(
            f"cache_implementation = {settings['cache_implementation']!r}: rows of blocks have no pages. Call "
            "generate_batch(list of ids) without it."
        )
    prompts = [check_prompt(ids, model) for ids in inputs]
    config = model.generation_config if generation_config is None else generation_config
    seed, tokenizer = settings.pop("seed", None), settings.pop("tokenizer", None)
    # Of a prompt, settings depend on its length alone: the longest leaves least room, the shortest most.
    extremes = {len(ids): ids for ids in (max(prompts, key=len), min(prompts, key=len))}
    *_, most = [Settings.make(model, config, ids, tokenizer, **settings) for ids in extremes.values()]
    if most.limit is None and not most.ends and not most.criteria:
        raise ValueError("Nothing would end the texts: give max_new_tokens, or eos_token_id.")
    count = len(prompts) * (config.num_return_sequences or 1)
    hints = {"max_prompt_length": max(extremes), "max_generated_length": most.limit or 0}
    manager = init(model, generation_config, continuous_batching_config, _hints(hints, count))
    if warmup and not manager.warmed_up:
        manager.warmup()
    manager.start()
    try:
        names = [
            manager.add_request(
                ids,
                record_timestamps=record_timestamps,
                seed=None if seed is None else seed + index,
                tokenizer=tokenizer,
                generation_config=generation_config,
                **settings,
            )
            for index, ids in enumerate(prompts)
        ]
        results = _collect(manager, count, progress_bar)
    finally:
        manager.stop(keep_for_next_session=persistent_manager, hard_stop=True)
        if not persistent_manager:
            manager.destroy()
    if failed := [each for each in results.values() if each.error is not None]:
        raise RuntimeError(f"Request {failed[0].request_id} failed: {failed[0].error}")
    return {key: results[key] for name in names for key in _family(name, count // len(names))}


def _family(name: str, count: int) -> list[str]:
    """Names of the continuations of one prompt."""
    return [*(f"{name}__child#{index}" for index in range(count - 1)), name]


def _hints(lengths: Mapping[str, int], count: int) -> WorkloadHints:
    hints = WorkloadHints(**lengths)
    hints.num_requests = count  # no field of it in older transformers
    return hints


def _collect(manager: BlockBatchingManager, count: int, progress_bar: bool) -> dict[str, GenerationOutput]:
    """Wait for the last results of so many requests."""
    results: dict[str, GenerationOutput] = {}
    with logging.tqdm(total=count, disable=not progress_bar, unit="request") as bar:
        while len(results) < count:
            result = manager.get_result()
            if result is None:
                raise RuntimeError(f"Generation failed: {manager.fatal_error}")
            results[result.request_id] = result
            bar.update()
    return results

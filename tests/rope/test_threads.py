"""One model called in two threads, whose forward passes go side by side from module to module: each is as alone."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.models import needs_rows, random_ids, tiny_model
from helpers.rope_models import LENGTH, rope_model
from transformers import PreTrainedModel

from lex_hf import blockwise
from lex_hf.rope.region_reader import reading_regions
from lex_hf.rope.regions import dual_chunk

NEW = 20  # tokens
WINDOWS = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: blockwise(rope_model()),
    "sinks": lambda: blockwise(rope_model(attention="sdpa"), 2 * LENGTH, sinks=2),
    "some layers": lambda: blockwise(rope_model(), layers=[0, 2]),
    "qwen2 with windows": lambda: blockwise(rope_model("qwen2", use_sliding_window=True, **WINDOWS)),
    "gemma3 with windows": lambda: blockwise(rope_model("gemma3_text", **WINDOWS)),
    "lex": tiny_model,
}
PROMPTS = [random_ids(1, tokens, seed=tokens, vocab_size=60) for tokens in (3, 14)]


def at_once(models: Sequence[PreTrainedModel], *calls: Callable[[], Any]) -> list[Any]:
    """Results of two calls, which wait for each other before every module of these models.

    Each has to go through as many modules as the other.
    """
    assert len(calls) == 2
    barrier = threading.Barrier(2)

    def meet(*args: Any) -> None:
        barrier.wait(30)

    def finish(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException:
            barrier.abort()
            raise

    # They run after those that the package registered, whose notes the other thread would now overwrite.
    hooks = [module.register_forward_pre_hook(meet) for model in models for module in model.modules()]
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(finish, calls))
    finally:
        for hook in hooks:
            hook.remove()


def text(model: PreTrainedModel, prompt: torch.Tensor) -> list[int]:
    return model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("kind", MODELS)
def test_each_thread_writes_what_it_writes_alone(kind: str) -> None:
    model = MODELS[kind]()
    expected = [text(model, prompt) for prompt in PROMPTS]
    assert at_once([model], *(lambda prompt=prompt: text(model, prompt) for prompt in PROMPTS)) == expected


@needs_rows
@pytest.mark.parametrize("kind", ["llama", "sinks", "lex"])
def test_a_running_batch_and_another_thread_write_what_they_write_alone(kind: str) -> None:
    model = MODELS[kind]()
    expected = [text(model, prompt) for prompt in PROMPTS]
    with model.continuous_batching_context_manager() as manager:

        def request() -> list[int]:
            name = manager.add_request(PROMPTS[1][0].tolist(), max_new_tokens=NEW)
            result = manager.get_result(name)
            assert result.error is None, result.error
            return result.generated_tokens

        assert at_once([model], lambda: text(model, PROMPTS[0]), request) == expected


def test_two_models_are_made_blockwise_at_once() -> None:
    models = [rope_model(seed=seed) for seed in range(2)]
    others = copy.deepcopy(models)
    at_once(models, *(lambda model=model: blockwise(model) for model in models))
    for model, other in zip(models, map(blockwise, others), strict=True):
        assert torch.equal(model(PROMPTS[1]).logits, other(PROMPTS[1]).logits)


def test_texts_are_read_at_other_positions_at_once() -> None:
    def read(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, use_cache=False).logits

    model = rope_model()
    with reading_regions(model, dual_chunk(LENGTH // 2, LENGTH), LENGTH):
        expected = [read(prompt) for prompt in PROMPTS]
        found = at_once([model], *(lambda prompt=prompt: read(prompt) for prompt in PROMPTS))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

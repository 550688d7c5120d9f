"""Which request gets on when, and that each writes what it writes alone, whatever happens around it."""

import functools
from typing import Any

import pytest
import torch
from helpers.models import HYBRID, MIXED, NEVER, PATTERNS, SCHEMES, random_ids, tiny_model
from helpers.rope_models import rope_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from lex_hf import blockwise
from lex_hf.inference.batching.requests import CANCELLED, Prompt, Request, Settings
from lex_hf.inference.batching.rows import Rows
from lex_hf.inference.batching.schedule import Schedule
from lex_hf.inference.batching.sessions import MemorySessions, Sessions

# Tokens of a prompt, and new ones: more than two pairs of blocks of 7, and than one.
LONGEST, MOST = 36, 16

# What a request may ask for; the first ones are greedy.
WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.5},
    {"no_repeat_ngram_size": 2, "min_new_tokens": 1, "eos_token_id": [5, 6, 7]},
    {"eos_token_id": list(range(30))},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.3},
    {"do_sample": True, "top_k": 0},
)


@functools.cache
def model_of(kind: str) -> PreTrainedModel:
    if kind == "llama":
        return blockwise(rope_model("llama"))
    if kind == "sinks":
        return blockwise(rope_model("llama", max_position_embeddings=14), sinks=3)
    if kind == "gpt_neox":
        return blockwise(rope_model("gpt_neox"))
    if kind.startswith("pattern"):
        return tiny_model(**PATTERNS[int(kind[7:])])
    if kind in ("hybrid", "mixed"):
        return tiny_model(**(HYBRID if kind == "hybrid" else MIXED[1]))
    return tiny_model(**SCHEMES[int(kind[6:])])


NAMED = ("llama", "sinks", "gpt_neox", "scheme0", "scheme3", "scheme7", "hybrid", "mixed")
KINDS = (*NAMED, *(f"pattern{i}" for i in range(len(PATTERNS))))


@functools.cache
def alone(kind: str, length: int, new: int, wish: int) -> list[int]:
    """What `generate` writes alone, without a cache for greedy requests, of which nothing is drawn."""
    model, prompt = model_of(kind), prompt_of(kind, length)
    torch.manual_seed(length)
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, **{"do_sample": False} | WISHES[wish], pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def prompt_of(kind: str, length: int) -> list[int]:
    return random_ids(1, length, seed=length, vocab_size=model_of(kind).config.vocab_size)[0].tolist()


def schedule_of(
    model: PreTrainedModel, rows: int, piece: int, **options: Any
) -> tuple[Schedule, list[GenerationOutput]]:
    storage, outputs = Rows(model, LONGEST + MOST), []
    storage.allocate(rows)
    defaults: dict[str, Any] = {"reads_all": False, "step": model, "sizes": (), "sessions": Sessions()}
    return Schedule(model, storage, piece=piece, deliver=outputs.append, **defaults | options), outputs


def request_of(kind: str, name: str, length: int, new: int, wish: int, **fields: Any) -> Request:
    model, ids = model_of(kind), prompt_of(kind, length)
    made = Settings.make(model, GenerationConfig(), ids, None, max_new_tokens=new, **WISHES[wish])
    return Request(name, Prompt(ids), made, torch.Generator().manual_seed(length), **fields)


requests = st.tuples(st.integers(1, LONGEST), st.integers(1, MOST), st.integers(0, len(WISHES) - 1))
actions = st.lists(
    st.one_of(
        requests, st.tuples(st.just("advance"), st.integers(1, 12)), st.tuples(st.just("cancel"), st.integers(0, 9))
    ),
    min_size=3,
    max_size=25,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(actions=actions, rows=st.integers(1, 4), piece=st.integers(1, 40), sizes=st.booleans(), keeps=st.booleans())
def test_each_request_writes_what_it_writes_alone(
    kind: str, actions: list[Any], rows: int, piece: int, sizes: bool, keeps: bool
) -> None:
    schedule, outputs = schedule_of(
        model_of(kind),
        rows,
        piece,
        sizes=(1, 2, rows)[:rows] if sizes and rows > 2 else (),
        sessions=MemorySessions(10**6) if keeps else Sessions(),
    )
    asked: dict[str, tuple[int, int, int]] = {}
    cancelled = set()
    for action in actions:
        if action[0] == "advance":
            for _ in range(action[1]):
                schedule.advance()
        elif action[0] == "cancel":
            cancelled.add(str(action[1]))
            schedule.cancel(str(action[1]))
        else:
            name = str(len(asked))
            asked[name] = action
            schedule.waiting.append(request_of(kind, name, *action))
    while not schedule.is_idle():
        schedule.advance()
    assert sorted(each.request_id for each in outputs) == sorted(asked)
    for output in outputs:
        expected = alone(kind, *asked[output.request_id])
        if output.error == CANCELLED:
            assert output.request_id in cancelled
            assert output.generated_tokens == expected[: len(output.generated_tokens)]
        else:
            assert output.error is None
            assert output.generated_tokens == expected
            assert output.status == RequestStatus.FINISHED
    assert schedule.rows.size == rows


@given(
    lengths=st.lists(st.integers(1, LONGEST), min_size=1, max_size=8), rows=st.integers(1, 4), piece=st.integers(1, 45)
)
@settings(max_examples=25)
def test_between_two_steps_at_most_one_piece_is_read(lengths: list[int], rows: int, piece: int) -> None:
    schedule, outputs = schedule_of(model_of("pattern0"), rows, piece)
    for index, length in enumerate(lengths):
        schedule.waiting.append(request_of("pattern0", str(index), length, 5, 0))
    while not schedule.is_idle():
        read, steps, running = schedule.tokens_read, schedule.steps, len(schedule.running)
        schedule.advance()
        assert schedule.tokens_read - read <= piece
        assert schedule.steps - steps == int(running > 0 or bool(schedule.running) or schedule.steps > steps)
        assert len(schedule.running) + (schedule.reading is not None) <= rows
    assert schedule.tokens_read == sum(lengths)
    assert len(outputs) == len(lengths)


def test_all_prompts_are_read_first_if_that_is_wanted() -> None:
    schedule, _ = schedule_of(model_of("pattern0"), 3, 4, reads_all=True)
    for index in range(5):
        schedule.waiting.append(request_of("pattern0", str(index), 30, 9, 0))
    schedule.advance()
    assert (len(schedule.running), len(schedule.waiting), schedule.tokens_read) == (3, 2, 90)


def test_requests_come_in_their_order() -> None:
    schedule, outputs = schedule_of(model_of("pattern0"), 1, 100)
    for index in range(5):
        schedule.waiting.append(request_of("pattern0", str(index), 10 - index, 2, 0))
    while not schedule.is_idle():
        schedule.advance()
    assert [each.request_id for each in outputs] == ["0", "1", "2", "3", "4"]


def test_memory_stays_constant_however_many_requests_pass() -> None:
    model = model_of("pattern0")
    schedule, outputs = schedule_of(model, 3, 50)
    places = [tensor.data_ptr() for layer in schedule.rows.cache.layers for tensor in (layer.keys, layer.values)]
    sizes = set()
    for index in range(60):
        schedule.waiting.append(request_of("pattern0", str(index), 1 + index % LONGEST, 1 + index % 7, 0))
        while len(schedule.waiting) > 2:
            schedule.advance()
            sizes.add(sum(layer.nbytes() for layer in schedule.rows.cache.layers))
    while not schedule.is_idle():
        schedule.advance()
    assert len(outputs) == 60
    assert len(sizes) == 1
    assert places == [
        tensor.data_ptr() for layer in schedule.rows.cache.layers for tensor in (layer.keys, layer.values)
    ]


class Failing:
    """A processor that fails after some tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no more")
        return scores


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_request_that_fails_fails_alone(after: int) -> None:
    schedule, outputs = schedule_of(model_of("pattern0"), 3, 50)
    for index in range(4):
        schedule.waiting.append(request_of("pattern0", str(index), 10 + index, 8, 0))
    schedule.waiting[1].settings.processors.append(Failing(after))
    schedule.waiting[1].settings.group = None
    while not schedule.is_idle():
        schedule.advance()
    results = {each.request_id: each for each in outputs}
    assert results["1"].status == RequestStatus.FAILED
    assert results["1"].error == "RuntimeError: no more"
    assert results["1"].generated_tokens == alone("pattern0", 11, 8, 0)[:after]
    for index in (0, 2, 3):
        assert results[str(index)].generated_tokens == alone("pattern0", 10 + index, 8, 0)


def test_a_text_goes_on_from_its_session() -> None:
    schedule, outputs = schedule_of(model_of("pattern0"), 2, 50, sessions=MemorySessions(10**6))
    schedule.waiting.append(request_of("pattern0", "first", 50, 9, 0))
    while not schedule.is_idle():
        schedule.advance()
    history = outputs[0].prompt_ids + outputs[0].generated_tokens
    before = schedule.tokens_read
    second = request_of("pattern0", "second", 3, 6, 0)
    second.prompt.ids = history + second.prompt.ids
    schedule.waiting.append(second)
    while not schedule.is_idle():
        schedule.advance()
    assert schedule.tokens_read - before == 4  # the last token of the answer, and the new ones
    expected = model_of("pattern0").generate(torch.tensor([second.prompt.ids]), max_new_tokens=6, do_sample=False)
    assert outputs[1].generated_tokens == expected[0, len(second.prompt.ids) :].tolist()


def test_scores_of_a_row_do_not_depend_on_its_neighbours_settings() -> None:
    names = [(12, 9, wish) for wish in range(len(WISHES))]
    schedule, outputs = schedule_of(model_of("pattern0"), len(names), 1000)
    for index, wish in enumerate(names):
        schedule.waiting.append(request_of("pattern0", str(index), *wish))
    while not schedule.is_idle():
        schedule.advance()
    for output in outputs:
        assert output.generated_tokens == alone("pattern0", *names[int(output.request_id)])
    assert NEVER == 97


@pytest.mark.parametrize("kind", ["pattern0", "pattern2", "pattern4", "pattern5", "sinks"])
def test_what_a_row_held_before_has_no_effect(kind: str) -> None:
    schedule, outputs = schedule_of(model_of(kind), 2, 50)
    for layer in schedule.rows.cache.layers:
        layer.keys.fill_(float("nan")), layer.values.fill_(float("nan"))
    for index in range(3):
        schedule.waiting.append(request_of(kind, str(index), 3 + 9 * index, 20, 0))
    while not schedule.is_idle():
        schedule.advance()
    for output in outputs:
        assert output.generated_tokens == alone(kind, len(output.prompt_ids), 20, 0)

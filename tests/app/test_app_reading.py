"""Texts read on the page: losses of a dense pass with the right mask, bytes of the cache, several people at once."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.models import BYTES, dense_logits, tiny_model
from helpers.rope_models import rope_model
from helpers.slow_rope import SlowModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lex_hf.app import reading
from lex_hf.app.desk import Desk
from lex_hf.app.reading import Progress, by_position
from lex_hf.app.settings import OWN, SETTINGS, Settings
from lex_hf.app.turns import Turns
from lex_hf.data.tokenizers import byte_tokenizer

TEXT = "A text of some tokens, which is longer than three blocks of any of these models, and not a multiple of them."
TOLERANCE = {"atol": 5e-4, "rtol": 1e-4}
LENGTH, SINKS, BLOCK = 16, 4, 6  # of the Llama: its training length, and (16 - 4) // 2


def ids_of(text: str = TEXT) -> torch.Tensor:
    return torch.tensor(list(text.encode()))


def last(states: Iterator[tuple[Progress, ...]]) -> tuple[Progress, ...]:
    *_, state = states
    return state


def losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:-1].float(), ids[1:], reduction="none")


def in_blocks(query: int, key: int) -> int | None:
    return query - key if key // 8 >= query // 8 - 1 else None


def with_sinks(query: int, key: int) -> int | None:
    own = max((query - SINKS) // BLOCK, 0)
    if key < SINKS:
        return query - key - max(own - 1, 0) * BLOCK
    return query - key if (key - SINKS) // BLOCK >= own - 1 else None


DISTANCES: dict[str, Callable[[int, int], int | None]] = {
    "full": lambda query, key: query - key,
    "sliding": lambda query, key: query - key if query - key < LENGTH else None,
    "blockwise": in_blocks,
    "blockwise-sinks": with_sinks,
}


@pytest.mark.parametrize("name", ["full", "sliding", "blockwise"])
def test_losses_of_a_lex_model_are_those_of_a_dense_mask(
    name: str, lex: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    [state] = last(Desk(lex, tokenizer).read(TEXT, [name]))
    expected = losses(dense_logits(tiny_model(**BYTES, attention_pattern=name), ids_of()), ids_of())
    torch.testing.assert_close(state.nll, expected, **TOLERANCE)
    assert state.loss == pytest.approx(float(expected.mean()), rel=1e-4)
    assert (state.problem, state.total) == (None, len(TEXT) - 1)
    assert lex.config.attention_pattern == "blockwise"


@pytest.mark.parametrize("name", list(SETTINGS))
def test_losses_of_a_llama_are_those_of_pairs_at_their_distances(
    name: str, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    [state] = last(Desk(llama, tokenizer).read(TEXT, [name]))
    expected = losses(SlowModel(llama).by_pairs(ids_of(), DISTANCES[name]), ids_of())  # type: ignore[arg-type]
    torch.testing.assert_close(state.nll, expected, **TOLERANCE)


def test_bytes_are_those_of_the_keys_and_values(
    lex: PreTrainedModel, llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    token = 2 * 2 * 30 * 4  # of keys and values, layers, numbers, bytes
    state = last(Desk(lex, tokenizer).read(TEXT, ["blockwise", "sliding", "full"]))
    blocks, window, everything = (each.cache_bytes for each in state)
    assert (blocks, window) == (14 * token, 28 * token)
    assert everything >= state[2].total * token
    token = 2 * 2 * 2 * 8 * 4  # of keys and values, layers, heads, numbers, bytes
    state = last(Desk(llama, tokenizer).read(TEXT, list(SETTINGS)))
    found = [each.cache_bytes // token for each in state]
    assert found == [state[0].total, LENGTH - 1, LENGTH, 2 * BLOCK + 2 * SINKS]  # sinks are kept as they came, too


def test_a_text_grows_in_all_settings(lex: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    states = list(Desk(lex, tokenizer).read(TEXT, ["blockwise", "full"]))
    assert [len(each.nll) for each in states[0]] == [0, 0]
    assert states[0][0].loss is states[0][0].tokens_per_second is None
    for index in (0, 1):
        sizes = [len(state[index].nll) for state in states]
        assert sizes == sorted(sizes)
        assert sizes[-1] == len(TEXT) - 1
        assert len(set(sizes)) > 3
        assert states[-1][index].seconds > 0
    early = next(state[0] for state in states if len(state[0].nll))
    torch.testing.assert_close(early.nll, states[-1][0].nll[: len(early.nll)])


def test_people_at_once_get_what_they_would_get_alone(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Each with settings and a text of their own, and pieces in turn."""
    desk = Desk(llama, tokenizer)
    wanted = [(TEXT, ["full", "blockwise"]), (TEXT[::-1], ["blockwise", "sliding"]), (TEXT, ["sliding", "full"])]
    alone = [last(desk.read(*each)) for each in wanted]
    running = {index: desk.read(*each) for index, each in enumerate(wanted)}
    found: dict[int, tuple[Progress, ...]] = {}
    while running:
        for index, states in list(running.items()):
            state = next(states, None)
            if state is None:
                del running[index]
            else:
                found[index] = state
    for index, expected in enumerate(alone):
        for one, other in zip(found[index], expected, strict=True):
            torch.testing.assert_close(one.nll, other.nll, atol=0, rtol=0)


def test_settings_share_weights_and_nothing_else(lex: PreTrainedModel, llama: PreTrainedModel) -> None:
    for model in (lex, llama):
        settings = Settings(model)
        before = model.config.to_dict(), model.config._attn_implementation
        opened = [settings.open(name) for name in ("full", "sliding", "blockwise")]
        assert settings.open("full") is opened[0]
        for each in opened:
            own = {name: id(parameter) for name, parameter in model.named_parameters()}
            assert {name: id(parameter) for name, parameter in each.model.named_parameters()} == own
            assert each.model.config is not model.config
        assert (model.config.to_dict(), model.config._attn_implementation) == before


@pytest.mark.parametrize("name", ["sliding", "blockwise"])
def test_a_setting_lasts_as_long_as_a_reading(name: str, llama: PreTrainedModel, tokenizer: Any) -> None:
    """And then nothing is left of it among transformers' functions."""
    gc.collect()
    before = set(ALL_ATTENTION_FUNCTIONS._global_mapping)
    states = Desk(llama, tokenizer).read(TEXT, [name])
    gc.collect()
    assert set(ALL_ATTENTION_FUNCTIONS._global_mapping) > before
    assert last(states)[0].cache_bytes == 2 * 2 * 2 * 8 * 4 * (LENGTH - (name == "sliding"))
    del states
    gc.collect()
    assert set(ALL_ATTENTION_FUNCTIONS._global_mapping) == before


def test_patterns_are_those_of_the_masks(lex: PreTrainedModel, llama: PreTrainedModel, tokenizer: Any) -> None:
    for name, distance in DISTANCES.items():
        found = Desk(llama, tokenizer).pattern(name, 1)
        expected = [[key <= query and distance(query, key) is not None for key in range(48)] for query in range(48)]
        assert (found.seen.step, found.seen.tokens, found.seen.visible.tolist()) == (1, 48, expected)
    texts = [Desk(llama, tokenizer).pattern(name, 0).description for name in SETTINGS]
    assert texts == ["all tokens before", "window of 16 tokens", "blocks of 8 tokens", "blocks of 6 tokens, 4 sinks"]
    assert Desk(lex, tokenizer).pattern("blockwise", 1).description == "blocks of 7 tokens"
    with pytest.raises(ValueError, match="layer = 2: it is not known which keys its queries see; it is known of 0, 1"):
        Desk(lex, tokenizer).pattern("blockwise", 2)


def test_patterns_of_long_texts_are_looked_at_in_places(tokenizer: Any) -> None:
    model = tiny_model(**BYTES, training_length=320)
    seen = Desk(model, tokenizer).pattern("sliding", 0).seen
    assert (seen.step, seen.tokens, len(seen.visible)) == (10, 960, 96)
    expected = [[0 <= query - key < 320 for key in range(0, 960, 10)] for query in range(0, 960, 10)]
    assert seen.visible.tolist() == expected
    again = torch.zeros(96, 96, dtype=torch.bool)
    for query, key, count in seen.runs():
        again[query, key : key + count] = True
    assert torch.equal(again, seen.visible)


def test_layers_that_differ_are_a_setting(tokenizer: Any) -> None:
    model = tiny_model(**BYTES, attention_pattern=["blockwise", "full"])
    desk = Desk(model, tokenizer)
    assert list(desk.settings.titles) == [OWN, *SETTINGS]
    [state] = last(desk.read(TEXT, [OWN]))
    torch.testing.assert_close(state.nll, losses(dense_logits(model, ids_of()), ids_of()), **TOLERANCE)
    assert desk.settings.open(OWN).description == "blocks of 7 tokens; all tokens before"
    assert desk.settings.open("sliding").description == "window of 14 tokens"


def test_impossible_settings_are_sentences(lex: PreTrainedModel, tokenizer: Any) -> None:
    desk = Desk(lex, tokenizer)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Blockwise with sinks: a LEX model has blocks of its own, without"):
            desk.read(TEXT, ["full", "blockwise-sinks"])
    with pytest.raises(ValueError, match="setting = 'nothing': it must be one of full, sliding, blockwise"):
        desk.read(TEXT, ["nothing"])
    with pytest.raises(ValueError, match="training_length = 8: a LEX model has one of its own, 14 tokens"):
        Desk(lex, tokenizer, training_length=8)
    with pytest.raises(ValueError, match="training_length = 7: it must be an even number"):
        Desk(rope_model(**BYTES), tokenizer, training_length=7)
    bloom = rope_model("bloom", **{**BYTES, "max_position_embeddings": None}, n_head=4, n_layer=1)
    with pytest.raises(ValueError, match=r"^Sliding window: training_length: the configuration of the model does not"):
        Desk(bloom, tokenizer).read(TEXT, ["sliding"])
    assert last(Desk(bloom, tokenizer).read(TEXT, ["full"]))[0].problem is None
    assert Desk(bloom, tokenizer).settings.open("full").description == "attention of its own"
    with pytest.raises(ValueError, match=r"^Blockwise: .*cannot be made blockwise"):
        Desk(bloom, tokenizer, training_length=8).read(TEXT, ["blockwise"])
    mamba = rope_model("mamba", **BYTES)
    with pytest.raises(ValueError, match=r"^Blockwise: "):
        Desk(mamba, tokenizer, training_length=8).read(TEXT, ["blockwise"])
    with pytest.raises(ValueError, match=r"^Full: MambaForCausalLM cannot read a text in pieces so"):
        Desk(mamba, tokenizer).read(TEXT, ["full"])


def test_texts_that_cannot_be_read_are_sentences(lex: PreTrainedModel, tokenizer: Any) -> None:
    desk = Desk(lex, tokenizer, most_characters=200)
    for text in ("", " \n"):
        with pytest.raises(ValueError, match="There is no text: type or paste one"):
            desk.read(text, ["full"])
    with pytest.raises(ValueError, match="The text has 1,000 characters, and this page takes 200"):
        desk.read("a" * 1000, ["full"])
    with pytest.raises(ValueError, match="at least 2 are needed"):
        desk.read("a", ["full"])
    with pytest.raises(ValueError, match="most_characters = 0"):
        Desk(lex, tokenizer, most_characters=0)


def test_one_setting_that_ends_leaves_the_other(tokenizer: Any) -> None:
    """Learned positions end at the training length, in every setting; a cache that grows, at its limit."""
    model = tiny_model(**BYTES, position_embedding_type="learned", training_length=40)
    [state] = last(Desk(model, tokenizer).read(TEXT, ["full"]))
    assert state.problem is not None
    assert 0 < len(state.nll) <= 40
    opened = [Settings(tiny_model(**BYTES)).open(name) for name in ("blockwise", "full")]
    near, far = last(reading.read_beside(opened, ids_of(), Turns(), most_cache_bytes=20_000))
    assert (near.problem, len(near.nll)) == (None, near.total)
    assert far.problem is not None
    assert far.problem.startswith("The cache holds 0 MiB, and this page stops at 0 MiB: choose a setting whose cache")
    assert len(far.nll) < far.total
    assert far.cache_bytes > 20_000


def test_losses_that_are_not_finite_are_a_problem(tokenizer: Any) -> None:
    model = tiny_model(**BYTES)
    with torch.no_grad():
        model.model.norm.bias.fill_(float("nan"))
    [state] = last(Desk(model, tokenizer).read(TEXT, ["blockwise"]))
    assert state.problem is not None
    assert "is nan" in state.problem
    assert len(state.nll) == 0


def test_faults_of_the_program_are_not_problems_of_a_text() -> None:
    with pytest.raises(RuntimeError, match="a fault"):
        reading.problem_of(RuntimeError("a fault"))
    gpt2 = rope_model("gpt2", **{**BYTES, "max_position_embeddings": 40}, n_head=4, n_layer=1, n_embd=32)
    [state] = last(Desk(gpt2, byte_tokenizer()).read(TEXT, ["full"]))
    assert state.problem == "The model reads no further: its table of positions ends here. Give a shorter text."
    assert len(state.nll) == 16
    assert "not enough memory" in reading.problem_of(RuntimeError("DefaultCPUAllocator: can't allocate memory"))


def test_curves_are_means_of_equal_parts() -> None:
    nll = torch.arange(23.0)
    assert by_position(Progress(nll[:13], 23), 5) == [(5, 2.0), (10, 7.0)]
    assert by_position(Progress(nll, 23), 5) == [(5, 2.0), (10, 7.0), (15, 12.0), (23, 18.5)]
    assert by_position(Progress(nll[:22], 23), 5) == [(5, 2.0), (10, 7.0), (15, 12.0)]
    assert by_position(Progress(nll[:0], 23), 5) == []
    assert by_position(Progress(nll[:1], 1), 64) == [(1, 0.0)]
    assert by_position(Progress(nll[:3], 3), 64) == [(1, 0.0), (2, 1.0), (3, 2.0)]

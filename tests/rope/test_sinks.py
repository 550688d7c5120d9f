"""Sinks: the first tokens of a text stay visible just before every pair of blocks, as a loop over pairs has it."""

import copy
import functools
import re
from typing import Any

import pytest
import torch
from helpers.architectures import tiny_model
from helpers.models import NEVER
from helpers.rope_models import VOCABULARY, rope_model
from helpers.slow_rope import SlowModel
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from lex_hf import blockwise, load_cache, restore, save_cache
from lex_hf.model.cache_layer_lex import ROLLBACK
from lex_hf.model.masking_lex import BlockwisePattern
from lex_hf.model.versions_lex import record_past
from lex_hf.rope import probe
from lex_hf.rope.blockwise import reader_of
from lex_hf.rope.reader import ModelFunction
from lex_hf.rope.turns import recognise

TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
LENGTH, SINKS, BLOCK = 16, 3, 6  # of training; (16 - 3) // 2
KINDS = ["llama", "gpt_neox"]


def model_of(kind: str = "llama", attention: str = "eager") -> PreTrainedModel:
    return rope_model(kind, attention, max_position_embeddings=LENGTH, num_hidden_layers=2)


@functools.cache
def with_sinks(kind: str = "llama") -> PreTrainedModel:
    """One that is only read with."""
    return blockwise(model_of(kind), sinks=SINKS)


def distance_of(query: int, key: int, sinks: int = SINKS, block: int = BLOCK) -> int | None:
    """How far a key seems to be, or `None` if it is not seen."""
    own = max((query - sinks) // block, 0)
    if key < sinks:
        return query - key - max(own - 1, 0) * block
    return query - key if (key - sinks) // block >= own - 1 else None


@pytest.fixture(scope="module")
def texts() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, VOCABULARY, (3, SINKS + 7 * BLOCK + 2), generator=generator)


@pytest.fixture(scope="module")
def slow_logits(texts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits of the texts by a loop over pairs, by kind of model."""
    slow = {kind: SlowModel(model_of(kind)) for kind in KINDS}
    return {kind: torch.stack([model.by_pairs(row, distance_of) for row in texts]) for kind, model in slow.items()}


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor, pieces: list[int], cache: Any, **options: Any) -> torch.Tensor:
    logits, start = [], 0
    for size in pieces:
        given = {name: mask[:, : start + size] for name, mask in options.items()}
        part = ids[:, start : start + size]
        logits.append(model(part, past_key_values=cache, use_cache=True, **given).logits)
        start += size
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_loop_over_pairs(
    kind: str, attention: str, slow_logits: dict[str, torch.Tensor], texts: torch.Tensor
) -> None:
    model, expected = blockwise(model_of(kind, attention), sinks=SINKS), slow_logits[kind]
    with torch.no_grad():
        torch.testing.assert_close(model(texts, use_cache=False).logits, expected, **TOLERANCE)
    tokens = read(model, texts, [1] * texts.shape[1], DynamicCache(config=model.config))
    torch.testing.assert_close(tokens, expected, **TOLERANCE)


@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    pieces=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=6),
    padded=st.lists(st.integers(0, 40), max_size=10),
    is_static=st.booleans(),
)
@example(kind="llama", pieces=[2, 9, 1, 1, 15, 1, 1], padded=[], is_static=True)
def test_pieces_and_padding_change_nothing(
    kind: str,
    pieces: list[int],
    padded: list[int],
    is_static: bool,
    slow_logits: dict[str, torch.Tensor],
    texts: torch.Tensor,
) -> None:
    """Each row of a batch with padding anywhere gives the logits that its text gives alone."""
    model, tokens = with_sinks(kind), min(sum(pieces), texts.shape[1])
    pieces = pieces if sum(pieces) == tokens else [tokens]
    mask = torch.ones(3, tokens, dtype=torch.long)
    for place in padded:
        mask[1 + place % 2, place % tokens] = 0
    mask[:, 0] = torch.where(mask.sum(dim=1) == 0, 1, mask[:, 0])
    columns = torch.zeros_like(mask)
    for row, seen in enumerate(mask):  # the i-th token of each row is the i-th of its text
        columns[row, seen == 1] = texts[row, : int(seen.sum())]
    reader = reader_of(model)
    assert reader is not None
    found = read(model, columns, pieces, reader.new_cache(tokens if is_static else None), attention_mask=mask)
    for row, seen, own in zip(found, mask, slow_logits[kind], strict=True):
        torch.testing.assert_close(row[seen == 1], own[: int(seen.sum())], **TOLERANCE)


def test_up_to_the_training_length_nothing_changes(texts: torch.Tensor) -> None:
    model, short = model_of(), texts[:, : SINKS + 2 * BLOCK]
    with torch.no_grad():
        plain = model(short).logits
        torch.testing.assert_close(blockwise(model, sinks=SINKS)(short).logits, plain, **TOLERANCE)


def test_sinks_change_what_far_tokens_see(texts: torch.Tensor) -> None:
    model, without = with_sinks(), blockwise(model_of(), 2 * BLOCK)
    with torch.no_grad():
        assert not torch.allclose(model(texts).logits[:, -1], without(texts).logits[:, -1], atol=1e-3)
        other = texts.clone()
        other[:, 0] = (other[:, 0] + 1) % VOCABULARY
        assert not torch.equal(model(texts).logits[:, -1], model(other).logits[:, -1])


def test_generation_with_and_without_cache_writes_the_same(texts: torch.Tensor) -> None:
    model = blockwise(model_of(attention="sdpa"), sinks=SINKS)
    ids, mask = texts[:, :9].clone(), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4], mask[2, :1] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 9 * BLOCK, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert torch.equal(model.generate(ids, cache_implementation="static", disable_compile=True, **options), expected)
    assert torch.equal(
        model.generate(ids[:1], prompt_lookup_num_tokens=3, max_new_tokens=40, do_sample=False, eos_token_id=NEVER),
        model.generate(ids[:1], use_cache=False, max_new_tokens=40, do_sample=False),
    )
    beams = {"num_beams": 3, "max_new_tokens": 30, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))


@settings(max_examples=20)
@given(read_first=st.integers(1, 40), removed=st.integers(1, 40), again=st.integers(1, 20))
def test_tokens_are_taken_back(read_first: int, removed: int, again: int) -> None:
    model = with_sinks()
    ids = torch.randint(2, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(5))
    cache = reader_of(model).new_cache()  # type: ignore[union-attr]
    for layer in cache.layers:
        layer.activate_past_recording()
    removed = min(removed, read_first)
    read(model, ids, [read_first], cache)
    cache.crop(-removed)
    other = torch.cat((ids[:, : read_first - removed], ids[:, 40 : 40 + again]), dim=1)
    with torch.no_grad():
        found = model(other[:, read_first - removed :], past_key_values=cache).logits
        expected = model(other, use_cache=False).logits[:, read_first - removed :]
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_as_many_tokens_are_taken_back_as_are_remembered() -> None:
    model = blockwise(model_of(), sinks=SINKS)
    ids = torch.randint(2, VOCABULARY, (1, 2 * ROLLBACK), generator=torch.Generator().manual_seed(6))
    cache = reader_of(model).new_cache()  # type: ignore[union-attr]
    read(model, ids, [5], cache)
    record_past(cache)
    read(model, ids[:, 5:], [*[1] * 20, ids.shape[1] - 25], cache)
    with pytest.raises(ValueError, match="can give back at most") as error:
        cache.crop(1 - ids.shape[1])
    most = int(re.search(r"at most (\d+)", str(error.value))[1])  # type: ignore[index]
    assert most >= ROLLBACK
    cache.crop(-most)
    kept = ids.shape[1] - most
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, kept:]
    torch.testing.assert_close(read(model, ids[:, kept:], [1] * 20, cache), expected[:, :20], **TOLERANCE)


@pytest.mark.parametrize("is_static", [False, True])
def test_rows_change_places(texts: torch.Tensor, is_static: bool) -> None:
    """As in beam search, and when a row is left out."""
    model, first, order = blockwise(model_of(), sinks=SINKS), SINKS + 2 * BLOCK, torch.tensor([2, 0, 0])
    cache = reader_of(model).new_cache(64 if is_static else None)  # type: ignore[union-attr]
    read(model, texts, [first], cache)
    cache.reorder_cache(order)
    rest = texts[:, first:]
    found = read(model, rest, [1] * rest.shape[1], cache)
    with torch.no_grad():
        expected = model(torch.cat((texts[order, :first], rest), dim=1), use_cache=False).logits[:, first:]
    torch.testing.assert_close(found, expected, **TOLERANCE)
    if is_static:
        cache.reset()
        torch.testing.assert_close(
            read(model, texts, [1] * first, cache), read(model, texts, [first], None), **TOLERANCE
        )


def test_a_long_text_is_as_exact_as_a_short_one(texts: torch.Tensor) -> None:
    """Keys of sinks are turned from what they were, not on and on."""
    model = blockwise(model_of().to(torch.float64), sinks=SINKS)
    half = blockwise(model_of(), sinks=SINKS)
    ids = texts[:1].repeat(1, 10)
    cache = DynamicCache(config=half.config)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -20:]
    found = read(half, ids, [1] * ids.shape[1], cache)[:, -20:]
    torch.testing.assert_close(found.double(), expected, **TOLERANCE)
    bytes_kept = sum(layer.nbytes() for layer in cache.layers)
    per_token = 2 * 2 * 8 * 4 * 2  # keys and values, heads, width, float32, layers
    assert bytes_kept == (2 * SINKS + 2 * BLOCK) * per_token


def test_attention_weights_show_the_sinks(texts: torch.Tensor) -> None:
    model = blockwise(model_of(), sinks=SINKS)
    with torch.no_grad():
        weights = model(texts, use_cache=False, output_attentions=True).attentions
    tokens = texts.shape[1]
    seen = torch.tensor([[distance_of(q, k) is not None and k <= q for k in range(tokens)] for q in range(tokens)])
    for each in weights:
        assert torch.equal(each > 0, seen.expand_as(each))
        torch.testing.assert_close(each.sum(-1), torch.ones_like(each[..., 0]))


def test_gradients_reach_the_sinks(texts: torch.Tensor) -> None:
    model = blockwise(model_of(), sinks=SINKS).train()
    embedded = model.get_input_embeddings()(texts[:1]).detach().requires_grad_()
    model(inputs_embeds=embedded, use_cache=False).logits[0, -1].sum().backward()
    assert embedded.grad is not None
    reached = embedded.grad[0].abs().sum(dim=1) > 0
    assert reached[:SINKS].all()


def test_a_cache_is_saved_and_read(texts: torch.Tensor, tmp_path: Any) -> None:
    model = blockwise(model_of(), sinks=SINKS)
    cache = reader_of(model).new_cache()  # type: ignore[union-attr]
    first = SINKS + 4 * BLOCK + 1
    read(model, texts, [first], cache)
    save_cache(cache, model, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model)
    rest = texts[:, first:]
    expected, found = (read(model, rest, [1] * rest.shape[1], each) for each in (cache, loaded))
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="another model"):
        load_cache(tmp_path / "cache.safetensors", blockwise(model_of(), 2 * BLOCK))


def test_a_copy_and_a_restored_model(texts: torch.Tensor) -> None:
    model = model_of()
    with torch.no_grad():
        before = model(texts).logits
        blockwise(model, sinks=SINKS)
        with_sinks = model(texts).logits
        other = copy.deepcopy(model)
        assert torch.equal(restore(model)(texts).logits, before)
        torch.testing.assert_close(other(texts).logits, with_sinks, rtol=0, atol=0)
    turn = reader_of(other).turns[0]  # type: ignore[union-attr]
    assert turn.attended.module in set(other.modules())


@pytest.mark.parametrize("sinks", [-1, 5, 100, 1.5, True])
def test_impossible_sinks(sinks: Any) -> None:
    with pytest.raises(ValueError, match="sinks = "):
        blockwise(model_of(), sinks=sinks)


def test_packed_rows_are_refused(texts: torch.Tensor) -> None:
    model = blockwise(model_of(), sinks=SINKS)
    positions = torch.arange(texts.shape[1])[None] % 20
    with pytest.raises(ValueError, match="pack several documents"):
        model(texts, position_ids=positions, use_cache=False)


def test_a_cache_of_other_blocks_is_refused(texts: torch.Tensor) -> None:
    model = blockwise(model_of(), sinks=SINKS)
    cache = reader_of(model).new_cache()  # type: ignore[union-attr]
    read(model, texts, [5], cache)
    with pytest.raises(ValueError, match="another model"):
        read(blockwise(model_of(), sinks=1), texts, [5], cache)


ROTATIONS = [
    "llama",
    "gpt_neox",
    "cohere",
    "glm",
    "gemma2",
    "phi3",
    "smollm3",
    "deepseek_v3",
    "llama4_text",
    "nanochat",
]


@pytest.mark.parametrize("kind", ROTATIONS)
def test_keys_are_turned_as_the_model_would_have_rotated_them(kind: str) -> None:
    model = tiny_model(kind)
    function, decoder = ModelFunction("eager").of, model.get_decoder()
    layers = list(range(model.config.num_hidden_layers))
    turns = recognise(model, decoder, layers, function)
    near, far = (probe.states_at(model, 6, distance, function) for distance in (2, 39))
    for layer in layers:
        known = (turns[layer].attended, *turns[layer].stored)
        for turn, here, there in zip(known, near[layer], far[layer], strict=True):
            torch.testing.assert_close(turn(here, torch.full((1, 1), 37)), there, atol=1e-4, rtol=1e-4)


def test_a_rotation_that_is_not_known_is_refused() -> None:
    model = model_of()
    own = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: own(x, position_ids**2)
    with pytest.raises(ValueError, match="cannot"):
        blockwise(model, sinks=SINKS)


@given(
    block=st.integers(1, 7),
    sinks=st.integers(0, 5),
    tokens=st.integers(0, 60),
)
def test_slots_are_those_of_a_text_that_is_moved(block: int, sinks: int, tokens: int) -> None:
    """Write token after token: sinks stay, a full pair moves by a block."""
    pattern, slots = BlockwisePattern(block, sinks), []
    for token in range(tokens):
        if len(slots) == sinks + 2 * block:
            slots = slots[:sinks] + slots[sinks + block :]
        assert pattern.next_slot(pattern.slots_in_use(token)) == len(slots)
        assert int(pattern.next_slots(torch.tensor([token]))) == len(slots)
        slots.append(token)
        start = slots[sinks] - sinks if len(slots) > sinks else 0
        assert int(pattern.pair_starts(torch.tensor([token]))) == start
    assert pattern.slots_in_use(tokens) == len(slots)
    query, key = torch.arange(sinks + 3 * block), torch.arange(sinks + 3 * block)
    expected = [[k <= q and distance_of(q, k, sinks, block) is not None for k in key.tolist()] for q in query.tolist()]
    assert torch.equal(pattern.visible(query, key), torch.tensor(expected))

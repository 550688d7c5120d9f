"""The cache: reading in pieces equals reading at once, and memory stays what it is."""

import copy
import math
from typing import Any

import pytest
import torch
from helpers.models import PATTERNS, TOLERANCE, cuts, dense_logits, random_ids, read_in_pieces, tiny_model
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaConfig, QuantizedCache, StaticCache

from lex_hf import LexCache, LexForCausalLM, LexStaticCache
from lex_hf.model import versions_lex
from lex_hf.model.cache_layer_lex import LexCacheLayer

pattern_fields = st.sampled_from(PATTERNS)
quick = hypothesis_settings(max_examples=30)


@quick
@given(fields=pattern_fields, pieces=cuts, length=st.integers(1, 70))
def test_pieces_of_any_size_give_the_same_logits(fields: dict[str, Any], pieces: list[int], length: int) -> None:
    model, ids = tiny_model(dtype=torch.float64, **fields), random_ids(2, length)
    pieces = [*pieces, length]
    expected = torch.stack([dense_logits(model, row) for row in ids])
    torch.testing.assert_close(read_in_pieces(model, ids, pieces), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("fields", PATTERNS)
def test_every_way_to_cut_a_text_in_three(fields: dict[str, Any]) -> None:
    """Each border meets each slot: hypothesis would find some of these by luck only."""
    model, ids = tiny_model(dtype=torch.float64, training_length=8, **fields), random_ids(1, 34)
    expected = dense_logits(model, ids[0])[None]
    for first in range(1, 14):
        for second in range(1, 14):
            logits = read_in_pieces(model, ids, [first, second, 34])
            torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


@quick
@given(fields=pattern_fields, pieces=cuts, data=st.data())
def test_ragged_batches_read_in_pieces(fields: dict[str, Any], pieces: list[int], data: st.DataObject) -> None:
    """Rows that begin, pause and end anywhere; left-padded prompts are the usual case."""
    width = data.draw(st.integers(1, 70), label="width")
    model, pieces = tiny_model(dtype=torch.float64, **fields), [*pieces, width]
    lengths = [data.draw(st.integers(1, width)) for _ in range(2)]
    columns = st.sets(st.integers(0, width - 1), min_size=1)
    places = [*(range(width - n, width) for n in lengths), sorted(data.draw(columns))]
    ids, mask = torch.zeros(2, 3, width, dtype=torch.long)
    for row, place in enumerate(places):
        ids[row, list(place)], mask[row, list(place)] = random_ids(len(place), seed=row), 1
    logits = read_in_pieces(model, ids, pieces, mask)
    assert logits.isfinite().all()
    for row, place in enumerate(places):
        expected = dense_logits(model, ids[row, list(place)])
        torch.testing.assert_close(logits[row, list(place)], expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_token_by_token_over_ten_blocks_in_other_dtypes(dtype: torch.dtype) -> None:
    model, ids = tiny_model(dtype=dtype), random_ids(2, 75)
    with torch.no_grad():
        expected = model(ids).logits
    for pieces in ([1] * 75, [5] * 15, [40, 1, 34]):
        logits = read_in_pieces(model, ids, pieces)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_is_finite_and_exact_at_position_one_million(dtype: torch.dtype) -> None:
    """A text that repeats itself every block gives the same logits in every block, so also in the last.

    One narrow head, as the products of half precision are slow on CPUs; the blocks are long, as their rounding is.
    """
    narrow = {"num_hidden_layers": 1, "hidden_size": 6, "num_attention_heads": 1, "intermediate_size": 8}
    model = tiny_model(dtype=dtype, training_length=512, xpos_scale_base=256, **narrow)
    period = random_ids(1, 256)
    chunk, cache = period.repeat(1, 500), LexCache(model.config)
    with torch.no_grad():
        expected = model(period.repeat(1, 3)).logits[:, -256:]
        for _ in range(8):
            logits = model(chunk, past_key_values=cache, logits_to_keep=256).logits
        assert cache.get_seq_length() == 1_024_000
        stepped = [model(period[:, i : i + 1], past_key_values=cache).logits for i in range(256)]
    tolerance = TOLERANCE[dtype] / 2  # the logits of so narrow a model are small
    for result in (logits, torch.cat(stepped, dim=1)):
        assert result.isfinite().all()
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("fields", [{}, {"attention_pattern": "sliding", "sliding_window": 7}])
def test_bytes_are_the_same_after_ten_and_after_a_thousand_blocks(fields: dict[str, Any]) -> None:
    model = tiny_model(**fields)
    cache, ids = LexCache(model.config), random_ids(2, 990 * 7)
    assert cache.nbytes() == 0
    with torch.no_grad():
        model(ids[:, :3], past_key_values=cache)
        at_start, places = cache.nbytes(), [layer.keys.data_ptr() for layer in cache.layers]
        model(ids[:, 3:70], past_key_values=cache)
        after_ten = cache.nbytes()
        model(ids[:, 70:6000], past_key_values=cache)
        for column in range(6000, 6050):
            model(ids[:, column : column + 1], past_key_values=cache)
        model(ids[:, 6050:], past_key_values=cache)
        model(ids[:, :70], past_key_values=cache)
    assert cache.get_seq_length() == 1000 * 7
    assert at_start == after_ten == cache.nbytes() > 0
    # Written in place: never a new storage.
    assert [layer.keys.data_ptr() for layer in cache.layers] == places
    # 2 (keys and values) · layers · batch · l · hidden · 4 bytes, where l = 2h.
    assert cache.nbytes() == 2 * 2 * 2 * 14 * 30 * 4


def test_a_hybrid_says_what_each_layer_costs() -> None:
    model = tiny_model(attention_pattern=["blockwise", "full"], position_embedding_type="rope")
    cache, sizes = LexCache(model.config), []
    for length in (100, 1000):
        with torch.no_grad():
            model(random_ids(1, length), past_key_values=cache)
        sizes.append(cache.nbytes_by_layer())
    (blockwise, grown), (still_blockwise, grown_more) = sizes
    assert blockwise == still_blockwise == 2 * 14 * 30 * 4
    assert 2 * 100 * 30 * 4 <= grown <= 2 * 2 * 100 * 30 * 4
    assert 2 * 1100 * 30 * 4 <= grown_more <= 2 * 2 * 1100 * 30 * 4
    assert cache.nbytes() == still_blockwise + grown_more


def test_the_cache_holds_no_view_of_a_long_prompt() -> None:
    model = tiny_model()
    with torch.no_grad():
        cache = model(random_ids(1, 3000)).past_key_values
    for layer in cache.layers:
        assert layer.keys.untyped_storage().nbytes() == 14 * 30 * 4


def test_decoding_writes_in_place_and_moves_a_block_only_at_its_end() -> None:
    """Write a token's position into its value: what is kept, and where, can then be read off."""
    model = tiny_model(num_hidden_layers=1)
    cache, ids = LexCache(model.config), random_ids(1, 30)
    layer = cache.layers[0]
    for position in range(30):
        with torch.no_grad():
            before = None if layer.values is None else layer.values.clone()
            model(ids[:, position : position + 1], past_key_values=cache)
        changed = [0] if before is None else (before != layer.values).any(-1).any(1)[0].nonzero().flatten().tolist()
        moves = position >= 14 and position % 7 == 0
        assert layer.fill == (position + 1 if position < 14 else 8 + position % 7)
        assert changed == ([*range(8)] if moves else [layer.fill - 1])


@pytest.mark.parametrize("fields", PATTERNS)
def test_rows_can_be_reordered_repeated_and_selected(fields: dict[str, Any]) -> None:
    model = tiny_model(dtype=torch.float64, **fields)
    ids, mask = random_ids(3, 33), torch.ones(3, 33, dtype=torch.long)
    mask[1, :10], mask[2, :25] = 0, 0
    follow = random_ids(6, 12, seed=5)
    with torch.no_grad():
        cache = model(ids, attention_mask=mask).past_key_values
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0]))
        cache.batch_select_indices(torch.tensor([0, 2, 5]))
        rows = [2, 1, 0]
        known = torch.cat((mask[rows], torch.ones(3, 12, dtype=torch.long)), dim=1)
        logits = model(follow[:3], attention_mask=known, past_key_values=cache).logits
        whole = torch.cat((ids[rows], follow[:3]), dim=1)
        expected = model(whole, attention_mask=known, use_cache=False).logits[:, 33:]
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


def test_a_copy_goes_its_own_way_and_reset_starts_anew() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(1, 40)
    with torch.no_grad():
        cache = model(ids[:, :20]).past_key_values
        twin = copy.deepcopy(cache)
        model(random_ids(1, 17, seed=3), past_key_values=twin)
        expected = model(ids).logits[:, 20:]
        torch.testing.assert_close(model(ids[:, 20:], past_key_values=cache).logits, expected, atol=1e-9, rtol=0)
        cache.reset()
        assert cache.get_seq_length() == 0
        again = model(ids, past_key_values=cache).logits[:, 20:]
    torch.testing.assert_close(again, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("read", "removed"), [(14, 5), (14, 14), (18, 4), (20, 6), (21, 7), (7, 0)])
def test_crop_takes_tokens_back(read: int, removed: int) -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(1, 40)
    with torch.no_grad():
        cache = model(ids[:, :read]).past_key_values
        cache.crop(-removed)
        assert cache.get_seq_length() == read - removed
        logits = model(ids[:, read - removed :], past_key_values=cache).logits
        expected = model(ids).logits[:, read - removed :]
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("read", "removed", "spare"), [(15, 2, 1), (18, 5, 4), (6, 7, 6)])
def test_crop_refuses_what_the_cache_no_longer_holds(read: int, removed: int, spare: int) -> None:
    model = tiny_model()
    with torch.no_grad():
        cache = model(random_ids(1, read)).past_key_values
    with pytest.raises(ValueError, match=rf"crop\(-{removed}\).* at most {spare} tokens"):
        cache.crop(-removed)


@pytest.mark.parametrize("keeps", [False, True])
def test_crop_takes_numbers_as_this_version_of_transformers_gives_them(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens to remove are negative; before transformers 5.14, it asked for the tokens to keep, which are positive."""
    monkeypatch.setattr(versions_lex, "_CROPS_TO_LENGTH", keeps)
    model, ids = tiny_model(dtype=torch.float64), random_ids(1, 14)
    with torch.no_grad():
        cache = model(ids[:, :12]).past_key_values
        if not keeps:
            with pytest.raises(ValueError, match="as a negative number"):
                cache.crop(9)
        cache.crop(9 if keeps else torch.tensor(-3))  # type: ignore[arg-type] # as transformers 5.14 does
        assert cache.get_seq_length() == 9
        if keeps:
            cache.crop(99)
            assert cache.get_seq_length() == 9
        logits = model(ids[:, 9:], past_key_values=cache).logits
        torch.testing.assert_close(logits, model(ids).logits[:, 9:], atol=1e-9, rtol=0)


@pytest.mark.parametrize("fields", PATTERNS)
def test_rollback_is_exact_across_the_borders_of_blocks(fields: dict[str, Any]) -> None:
    """Read a draft of any length at any point, take back any part of it, read on: as if it had never been read."""
    model, ids, draft = tiny_model(dtype=torch.float64, **fields), random_ids(1, 60), random_ids(1, 12, seed=9)
    with torch.no_grad():
        expected = model(ids).logits
        for read in range(1, 40):
            for length, removed in ((3, 3), (5, 2), (3, 1)):
                cache = LexCache(model.config)
                model(ids[:, :read], past_key_values=cache)
                cache.activate_past_recording()
                kept = length - removed
                text = torch.cat((ids[:, read : read + kept], draft[:, :removed]), dim=1)
                model(text, past_key_values=cache)
                cache.crop(-removed)
                assert cache.get_seq_length() == read + kept
                rest = ids[:, read + kept :]
                logits = [
                    model(piece, past_key_values=cache).logits for piece in rest.split([1, 6, rest.shape[1] - 7], 1)
                ]
                torch.testing.assert_close(torch.cat(logits, dim=1), expected[:, read + kept :], atol=1e-9, rtol=0)


def test_rollback_after_a_long_text_and_token_by_token() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(2, 60)
    with torch.no_grad():
        expected = model(ids).logits
        for read in range(15, 45):
            for removed in range(8):
                cache = LexCache(model.config)
                cache.activate_past_recording()
                model(ids[:, :read], past_key_values=cache)  # in one piece: many blocks at once
                cache.crop(-removed)
                logits = model(ids[:, read - removed :], past_key_values=cache).logits
                torch.testing.assert_close(logits, expected[:, read - removed :], atol=1e-9, rtol=0)
        for length in (1, 20):
            cache = LexCache(model.config)
            model(ids[:, :17], past_key_values=cache)
            cache.activate_past_recording()
            for piece in ids[:, 17:57].split(length, dim=1):
                model(piece, past_key_values=cache)
            cache.crop(-38)  # over five borders
            logits = model(ids[:, 19:], past_key_values=cache).logits
            torch.testing.assert_close(logits, expected[:, 19:], atol=1e-9, rtol=0)
            # The 41 tokens read since, and the 5 before them in the block they continued.
            with pytest.raises(ValueError, match=r"crop\(-50\).* at most 46 tokens"):
                cache.crop(-50)


@pytest.mark.parametrize("continued", [[], [1], [9]])
def test_rows_that_end_at_different_slots_are_never_rolled_back_wrongly(continued: list[int]) -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, 18:20] = 0
    with torch.no_grad():
        cache, read = LexCache(model.config), 0
        cache.activate_past_recording()
        for piece in (17, 5, *continued):  # the second piece is padded in one row
            chunk, known = ids[:, read : read + piece], mask[:, : read + piece]
            model(chunk, attention_mask=known, past_key_values=cache)
            read += piece
    with pytest.raises(ValueError, match="the block that these tokens followed is no longer in the cache"):
        cache.crop(-12)


@pytest.mark.parametrize("fields", PATTERNS)
@pytest.mark.parametrize("read", [13, 14, 17])
def test_a_row_without_a_token_keeps_its_state(read: int, fields: dict[str, Any]) -> None:
    """Bit for bit: what its slot holds is met again if the step is taken back."""
    model, ids = tiny_model(**fields), random_ids(2, read + 1)
    mask = torch.ones(2, read + 1, dtype=torch.long)
    mask[1, 0] = mask[0, read] = 0
    with torch.no_grad():
        cache = model(ids[:, :read], attention_mask=mask[:, :read], use_cache=True).past_key_values
        before = [layer.keys.clone() for layer in cache.layers]
        model(ids[:, read:], attention_mask=mask, past_key_values=cache)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert layer.lengths.tolist() == [read, read]
        assert torch.equal(layer.keys[0, :, : keys.shape[2]], keys[0])
        assert not torch.equal(layer.keys[1, :, : keys.shape[2]], keys[1]) or layer.keys.shape != keys.shape


def test_recording_keeps_the_end_of_a_long_text_only() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(1, 2000)
    with torch.no_grad():
        expected = model(ids).logits
        cache = LexCache(model.config)
        cache.activate_past_recording()
        model(ids, past_key_values=cache)
        assert cache.nbytes() < 2 * 2 * 8 * 30 * (14 + 14 + 7 + 256 + 7)
        cache.crop(-256)
        logits = model(ids[:, 1744:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected[:, 1744:], atol=1e-9, rtol=0)


def test_an_empty_dynamic_cache_becomes_a_lex_cache_in_place() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(1, 40)
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        with torch.no_grad():
            logits = [model(ids[:, i : i + 8], past_key_values=cache).logits for i in range(0, 40, 8)]
            torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits, atol=1e-9, rtol=0)
        assert cache.get_seq_length() == 40
        assert all(isinstance(layer, LexCacheLayer) for layer in cache.layers)


def foreign_caches(model: LexForCausalLM) -> dict[str, Any]:
    filled = DynamicCache()
    full = StaticCache(config=model.config, max_cache_len=9)
    for cache in (filled, full):
        cache.update(torch.zeros(1, 3, 2, 10), torch.zeros(1, 3, 2, 10), 0)
    return {
        "DynamicCache that holds 2 tokens": filled,
        "StaticCache that holds 2 tokens": full,
        "tuple": ((torch.zeros(1), torch.zeros(1)),),
        "other attention patterns": LexCache(tiny_model(training_length=6).config),
        "other attention patterns or positions": LexCache(tiny_model(attention_pattern="full").config),
        "layer 0 has position_embedding_type = 'rope', not 'xpos'": LexCache(
            tiny_model(position_embedding_type="rope").config
        ),
        r"position_embedding_type = \('xpos', 'none'\), not 'xpos'": LexCache(
            tiny_model(position_embedding_type=["xpos", "none"]).config
        ),
        "layer 0 has xpos_gamma = 0.5, not 0.4": LexCache(tiny_model(xpos_gamma=0.5).config),
        "a model with 3 layers, and this one has 2": LexCache(tiny_model(num_hidden_layers=3).config),
        "a model with 1 layers": LexStaticCache(tiny_model(num_hidden_layers=1).config, 9),
    }


@pytest.mark.parametrize("case", foreign_caches(tiny_model()))
def test_caches_of_others_are_refused(case: str) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=case):
        model(random_ids(1, 4), past_key_values=foreign_caches(model)[case])


def test_configurations_of_others_are_refused() -> None:
    for kind in (LexCache, lambda config: LexStaticCache(config, 9)):
        with pytest.raises(ValueError, match=r"is a LlamaConfig: .* DynamicCache\(config=model.config\)"):
            kind(LlamaConfig())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_attention_heads": 5}, "holds 5 heads of 6 in torch.float32, and this model has 3 of 10"),
        ({"hidden_size": 36}, "holds 3 heads of 12"),
        ({"dtype": torch.float64}, "in torch.float64, and this model has 3 of 10 in torch.float32"),
    ],
)
@pytest.mark.parametrize("static", [False, True])
def test_a_cache_that_another_model_filled_is_refused(other: dict[str, Any], message: str, static: bool) -> None:
    model, filler, ids = tiny_model(), tiny_model(**other), random_ids(1, 6)
    cache = LexStaticCache(filler.config, 20) if static else LexCache(filler.config)
    with torch.no_grad():
        filler(ids, past_key_values=cache)
        kept = cache.layers[0].keys.clone()
        with pytest.raises(ValueError, match=message):
            model(ids, past_key_values=cache)
    assert torch.equal(cache.layers[0].keys, kept)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("then", "now"),
    [
        ([1, 1, 1, 1, 1], [1, 1, 1, 0, 0]),  # met the end of the text early, masked in the next turn
        ([0, 0, 1, 1, 1], [1, 1, 1, 1, 1]),
        ([0, 0, 1, 1, 1], [1, 1, 1, 0, 0]),  # as many tokens, but others
    ],
)
def test_a_mask_cannot_change_what_was_read(then: list[int], now: list[int], static: bool) -> None:
    model, ids = tiny_model(), random_ids(2, 8)
    cache = LexStaticCache(model.config, 20) if static else LexCache(model.config)
    ones = [[1] * 5, then]
    with torch.no_grad():
        model(ids[:, :5], attention_mask=torch.tensor(ones), past_key_values=cache)
        for mask in (torch.tensor([[1] * 8, [*now, 1, 1, 1]]), torch.tensor([[1] * 6, [*now, 1]])):
            new = ids[:, 5 : mask.shape[1]]
            with pytest.raises(ValueError, match="a token that was read cannot become padding afterwards"):
                model(new, attention_mask=mask, past_key_values=cache)
        known = torch.tensor([[1] * 8, [*then, 1, 1, 1]])
        logits = model(ids[:, 5:], attention_mask=known, past_key_values=cache).logits
        expected = model(ids, attention_mask=known, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("static", [False, True])
def test_generate_refuses_a_next_turn_that_masks_what_was_written(static: bool) -> None:
    model, ids = tiny_model(), random_ids(2, 12)
    cache = LexStaticCache(model.config, 40) if static else LexCache(model.config)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:10] = 0
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
    with pytest.raises(ValueError, match="a token that was read cannot become padding"):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)


def test_masks_of_rows_that_were_moved_are_checked_against_their_new_rows() -> None:
    model, ids, mask = tiny_model(), random_ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    with torch.no_grad():
        cache = model(ids[:, :5], attention_mask=mask[:, :5]).past_key_values
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([2, 0]))
        with pytest.raises(ValueError, match="Row 0: 3 tokens now, 5 when they were read"):
            model(ids[:, 5:], attention_mask=mask, past_key_values=cache)
        model(ids[:, 5:], attention_mask=mask[[1, 0]], past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)


@pytest.mark.parametrize("value", [0.5, -math.inf, 2.0, math.nan])
def test_masks_of_other_numbers_are_refused(value: float) -> None:
    model, mask = tiny_model(), torch.ones(2, 6)
    mask[1, 2] = value
    with pytest.raises(ValueError, match="holds values other than 0 and 1"):
        model(random_ids(2, 6), attention_mask=mask)


@pytest.mark.parametrize("shape", [(6,), (1, 5), (2, 7), (3, 6), (1, 1, 6)])
def test_position_ids_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    positions = torch.arange(shape[-1]).expand(shape)
    with pytest.raises(ValueError, match=r"position_ids have the shape .*; it must be \(batch, tokens\) = \(2, 6\)"):
        tiny_model()(random_ids(2, 6), position_ids=positions)


def test_a_cache_of_another_batch_size_is_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        cache = model(random_ids(2, 5)).past_key_values
        with pytest.raises(ValueError, match="holds 2 texts and the input has 3 rows"):
            model(random_ids(3, 1), past_key_values=cache)
    assert cache.get_seq_length() == 5


def test_quantized_caches_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="cache_implementation='quantized' is not available"):
        model.generate(random_ids(1, 4), cache_implementation="quantized", max_new_tokens=2)
    assert not issubclass(QuantizedCache, DynamicCache)  # or usable_cache would adopt one

"""The static cache: the tokens of the dynamic one, in storage that never moves, from one graph."""

import copy
from typing import Any

import pytest
import torch
from helpers.models import (
    MIXED,
    PATTERNS,
    SCHEMES,
    TOLERANCE,
    left_padded,
    needs_whole_graphs,
    quick,
    random_ids,
    tiny_model,
)
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from lex_hf import LexCache, LexForCausalLM, LexStaticCache

ALL_SCHEMES = ({}, *SCHEMES, *MIXED)


def in_pieces(model: LexForCausalLM, ids: torch.Tensor, pieces: list[int], cache: Any) -> torch.Tensor:
    """Logits of ids, read in pieces of the given sizes, over and over."""
    logits, start, turn = [], 0, 0
    with torch.no_grad():
        while start < ids.shape[1]:
            stop = start + pieces[turn % len(pieces)]
            logits.append(model(ids[:, start:stop], past_key_values=cache).logits)
            start, turn = stop, turn + 1
    return torch.cat(logits, dim=1)


@quick
@given(
    st.sampled_from(ALL_SCHEMES),
    st.sampled_from(PATTERNS),
    st.lists(st.sampled_from([1, 1, 2, 7, 9, 16, 30]), min_size=1, max_size=4),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_pieces_of_any_size_give_the_logits_of_one_pass(
    scheme: dict[str, Any], pattern: dict[str, Any], pieces: list[int], dtype: torch.dtype
) -> None:
    model, ids = tiny_model(dtype=dtype, **{**pattern, **scheme}), random_ids(2, 60)
    with torch.no_grad():
        expected = model(ids).logits
    cache = LexStaticCache(model.config, max_cache_len=60)
    logits = in_pieces(model, ids, pieces, cache)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE[dtype], rtol=0)
    assert int(cache.get_seq_length()) == 60


@pytest.mark.parametrize("fields", PATTERNS)
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}])
def test_generation_equals_that_of_the_dynamic_cache(fields: dict[str, Any], mode: dict[str, Any]) -> None:
    model = tiny_model(dtype=torch.float64, **fields)
    inputs = left_padded([random_ids(n, seed=n) for n in (1, 6, 7, 15, 33)])
    settings = {"max_new_tokens": 40, "do_sample": False, **mode}
    assert torch.equal(
        model.generate(**inputs, cache_implementation="static", **settings), model.generate(**inputs, **settings)
    )


@needs_whole_graphs
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_pattern": ["blockwise", "full"]},
        {"attention_pattern": "sliding"},
        {"num_hidden_layers": 1, "position_embedding_type": "alibi"},
        {"num_hidden_layers": 1, "position_embedding_type": "t5", "t5_num_buckets": 8, "t5_max_distance": 20},
        {"num_hidden_layers": 1, "position_embedding_type": "sinusoidal"},
    ],
)
def test_one_graph_serves_every_step_and_every_call(fields: dict[str, Any]) -> None:
    """No C compiler is needed: what recompiles is decided before any backend."""
    model = tiny_model(**fields)
    compiling = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiling._compile_all_devices = True
    inputs = left_padded([random_ids(n, seed=n) for n in (1, 6, 7, 15, 33)])
    settings = {"max_new_tokens": 40, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    static = {"cache_implementation": "static", "compile_config": compiling, **settings}
    assert torch.equal(model.generate(**inputs, **static), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(model.generate(**inputs, **static), expected)
    assert torch.equal(model.generate(**inputs, prefill_chunk_size=5, **static), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_storage_stays_where_it_is_and_serves_any_length() -> None:
    model = tiny_model()
    cache = LexStaticCache(model.config, max_cache_len=10)
    cache.early_initialization(2, num_heads=3, head_dim=10, dtype=torch.float32, device=torch.device("cpu"))
    layer = cache.layers[0]
    places = [tensor.data_ptr() for tensor in (layer.keys, layer.values, layer.lengths, layer.columns)]
    assert cache.nbytes() == 2 * 2 * 2 * 14 * 30 * 4 == LexCache(model.config).nbytes() + cache.nbytes()
    in_pieces(model, random_ids(2, 100), [1, 9], cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    in_pieces(model, random_ids(2, 10), [4], cache)
    assert [tensor.data_ptr() for tensor in (layer.keys, layer.values, layer.lengths, layer.columns)] == places
    assert cache.is_compileable
    assert [layer.get_max_length() for layer in cache.layers] == [-1, -1]


def test_full_attention_has_room_for_what_was_asked() -> None:
    model = tiny_model(attention_pattern="full")
    cache = LexStaticCache(model.config, max_cache_len=12)
    with torch.no_grad():
        model(random_ids(1, 8), past_key_values=cache)
        with pytest.raises(ValueError, match="room for 12 tokens of full attention, and the text has 13"):
            model(random_ids(1, 5), past_key_values=cache)
    assert int(cache.get_seq_length()) == 8
    assert [layer.get_max_length() for layer in cache.layers] == [12, 12]


def test_a_step_too_many_is_refused_before_anything_is_written() -> None:
    model, mask = tiny_model(attention_pattern="full"), torch.ones(1, 12)
    mask[0, :2] = 0
    for read in ({}, {"attention_mask": mask}):  # with padding, which is not stored, a prompt may still be too long
        cache = LexStaticCache(model.config, max_cache_len=12)
        with torch.no_grad():
            model(random_ids(1, 12), past_key_values=cache, **read)
            room = 12 - int(cache.layers[0].lengths)
            for _ in range(room):
                model(random_ids(1, 1), past_key_values=cache)
            kept = cache.layers[0].keys.clone()
            with pytest.raises(ValueError, match="room for 12 tokens of full attention, and the text has 13"):
                model(random_ids(1, 1), past_key_values=cache)
        assert torch.equal(cache.layers[0].keys, kept)
    with torch.no_grad(), pytest.raises(ValueError, match="room for 11 tokens"):
        model(random_ids(1, 12), past_key_values=LexStaticCache(model.config, 11), attention_mask=mask)


def test_an_empty_static_cache_of_transformers_is_made_one_of_lex() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(2, 40)
    cache = StaticCache(config=model.config, max_cache_len=40)
    logits = in_pieces(model, ids, [9, 1], cache)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids).logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize("fields", PATTERNS)
@pytest.mark.parametrize("read", [5, 14, 25])
def test_rows_can_be_reordered_repeated_and_selected(fields: dict[str, Any], read: int) -> None:
    model, ids = tiny_model(dtype=torch.float64, **fields), random_ids(3, 40)
    rows = {"reorder_cache": [2, 0, 0], "batch_select_indices": [2, 0], "batch_repeat_interleave": [0, 0, 1, 1, 2, 2]}
    for name, order in rows.items():
        cache = LexStaticCache(model.config, max_cache_len=80)
        in_pieces(model, ids[:, :read], [3], cache)
        getattr(cache, name)(2 if name == "batch_repeat_interleave" else torch.tensor(order))
        logits = in_pieces(model, ids[order, read:], [1], cache)
        with torch.no_grad():
            expected = model(ids[order]).logits[:, read:]
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


def test_a_copy_goes_its_own_way() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(1, 40)
    cache = LexStaticCache(model.config, max_cache_len=40)
    in_pieces(model, ids[:, :20], [20], cache)
    other = copy.deepcopy(cache)
    in_pieces(model, random_ids(1, 9, seed=3), [1], other)
    with torch.no_grad():
        expected = model(ids).logits[:, 20:]
    torch.testing.assert_close(in_pieces(model, ids[:, 20:], [1], cache), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("read", "removed", "spare"), [(14, 14, 14), (18, 4, 4), (21, 7, 7), (6, 2, 6)])
def test_crop_takes_back_what_the_ring_still_holds(read: int, removed: int, spare: int) -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(1, 40)
    cache = LexStaticCache(model.config, max_cache_len=40)
    in_pieces(model, ids[:, :read], [1], cache)
    with pytest.raises(ValueError, match=f"can give back at most {spare} tokens"):
        cache.crop(-spare - 1)
    cache.crop(-removed)
    assert int(cache.get_seq_length()) == read - removed
    logits = in_pieces(model, ids[:, read - removed :], [1], cache)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(ids).logits[:, read - removed :], atol=1e-9, rtol=0)


def test_rows_without_a_token_keep_their_state() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(2, 30)
    cache, mask = LexStaticCache(model.config, max_cache_len=30), torch.ones(2, 30)
    mask[1, 10::2] = 0
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        logits = [
            model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits
            for t in range(8, 30)
        ]
        expected = model(ids[1:, mask[1] == 1]).logits[:, 8:]
    real = mask[1, 8:] == 1
    torch.testing.assert_close(torch.cat(logits, dim=1)[1:, real], expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ten_blocks_in_other_dtypes(dtype: torch.dtype) -> None:
    model, ids = tiny_model(dtype=dtype), random_ids(1, 75)
    with torch.no_grad():
        expected = tiny_model(dtype=dtype)(ids).logits
    logits = in_pieces(model, ids, [30, *[1] * 45], LexStaticCache(model.config, 75))
    torch.testing.assert_close(logits, expected, atol=TOLERANCE[dtype], rtol=0)

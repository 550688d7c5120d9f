"""Ways to read beyond the training length: each equals a loop over pairs or tokens, and leaves the model as it was."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.rope_models import LENGTH, VOCABULARY, rope_model
from helpers.slow_rope import SlowModel
from transformers import AutoModelForCausalLM, DynamicCache

from lex_hf import restore
from lex_hf.rope.region_reader import reading_regions
from lex_hf.rope.regions import Region, dual_chunk, self_extend, smallest_group
from lex_hf.rope.scaling import scaled
from lex_hf.rope.ways import SINKS, WAYS, Size, dual_chunk_of, self_extend_of, sinks_beside_blocks, streaming_of
from lex_hf.rope.window import reading_window

TOKENS = 33
SIZE = Size(LENGTH, TOKENS)
TOLERANCE = {"atol": 5e-5, "rtol": 0}


def ids_of(tokens: int = TOKENS, rows: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(0))


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def extended(i: int, j: int) -> int:
    """Self-Extend with a window of 4, in the words of the paper."""
    window, group = 4, smallest_group(4, LENGTH, TOKENS)
    if i - j < window:
        return i - j
    return (i // group + window - window // group) - j // group


def chunked(i: int, j: int) -> int:
    """Dual Chunk Attention with chunks of 6, and c = 8."""
    if i // 6 == j // 6:
        return i - j
    query = min(6 + i % 6, LENGTH - 1) if i // 6 == j // 6 + 1 else LENGTH - 1
    return query - j % 6


def within_window(i: int, j: int) -> int | None:
    return i - j if i - j < LENGTH else None


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize(("way", "distance"), [("self-extend", extended), ("dual-chunk", chunked)])
def test_positions_of_pairs(way: str, distance: Callable[[int, int], int], kind: str) -> None:
    model, ids = rope_model(kind), ids_of()
    assert max(distance(i, j) for i in range(TOKENS) for j in range(i + 1)) < LENGTH
    expected = SlowModel(model).by_pairs(ids[0], distance)
    with WAYS[way].open(model, SIZE) as reading:
        torch.testing.assert_close(logits_of(reading.model, ids)[0], expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_streaming_evicts_and_rotates_again(kind: str) -> None:
    model, ids = rope_model(kind), ids_of()
    expected = SlowModel(model).by_tokens(ids[0], SINKS, LENGTH)
    with WAYS["streaming"].open(model, SIZE) as reading:
        torch.testing.assert_close(logits_of(reading.model, ids)[0], expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_sliding_window_in_one_pass_and_with_its_cache(kind: str) -> None:
    model, ids = rope_model(kind), ids_of()
    expected = SlowModel(model).by_pairs(ids[0], within_window)
    with WAYS["sliding"].open(model, SIZE) as reading, torch.no_grad():
        torch.testing.assert_close(logits_of(model, ids)[0], expected, **TOLERANCE)
        assert reading.new_cache is not None
        cache = reading.new_cache()
        pieces = [model(piece, past_key_values=cache).logits[0] for piece in ids.split([3, 9, 1, 1, 19], dim=1)]
    torch.testing.assert_close(torch.cat(pieces), expected, **TOLERANCE)
    assert {layer.keys.shape[2] for layer in cache.layers} == {LENGTH - 1}


@pytest.mark.parametrize("kind", ["glm4", "llama4_text", "gemma2"])
def test_regions_suit_other_families(kind: str) -> None:
    """Other layouts of the rotation, soft caps, layers with a window: a window by regions is that by masks."""
    model = rope_model(kind, **({"sliding_window": 3} if kind == "gemma2" else {}))
    ids = ids_of(rows=2)
    places: Any = lambda places: places  # noqa: E731
    elsewhere: Any = lambda places: places + 5  # noqa: E731
    regions = (
        Region(lambda query, key: query - key < 3, places, places),
        Region(lambda query, key: (query - key >= 3) & (query - key < LENGTH), elsewhere, elsewhere),
    )
    with reading_window(model, LENGTH):
        expected = logits_of(model, ids)
    assert not torch.allclose(logits_of(model, ids), expected, **TOLERANCE)
    with reading_regions(model, regions, LENGTH):
        torch.testing.assert_close(logits_of(model, ids), expected, **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in WAYS if name not in ("linear", "yarn")])
def test_texts_of_the_training_length_are_read_as_before_and_models_are_left(name: str) -> None:
    """Interpolation alone changes them."""
    model, ids = rope_model(), ids_of(LENGTH)
    expected = logits_of(model, ids)
    with WAYS[name].open(model, Size(LENGTH, LENGTH)) as reading:
        torch.testing.assert_close(logits_of(reading.model, ids), expected, **TOLERANCE)
    assert torch.equal(logits_of(model, ids), expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("scaling", ["linear", "dynamic", "yarn"])
def test_scaled_models_are_those_that_transformers_loads(scaling: str, kind: str, tmp_path: Path) -> None:
    model, ids = rope_model(kind, **({"rotary_pct": 0.5} if kind == "gpt_neox" else {})), ids_of()
    before = logits_of(model, ids)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": scaling, "factor": 4.0}
    if scaling == "yarn":
        config["rope_parameters"]["original_max_position_embeddings"] = LENGTH
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = scaled(model, scaling, 4.0, LENGTH)
    expected = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"), ids)
    assert not torch.allclose(expected, before, **TOLERANCE)
    torch.testing.assert_close(logits_of(other, ids), expected, **TOLERANCE)
    assert torch.equal(logits_of(model, ids), before)
    assert {weight.data_ptr() for weight in other.parameters()} == {weight.data_ptr() for weight in model.parameters()}


def test_linear_scaling_is_interpolation_of_positions() -> None:
    model, ids = rope_model(), ids_of()
    with torch.no_grad():
        expected = model(ids, position_ids=torch.arange(TOKENS)[None] / 4.0).logits
    torch.testing.assert_close(logits_of(scaled(model, "linear", 4.0, LENGTH), ids), expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "regions"),
    [("self-extend", self_extend_of), ("dual-chunk", dual_chunk_of), ("streaming", streaming_of)],
)
def test_keys_that_are_kept_are_those_that_later_queries_see(name: str, regions: Any) -> None:
    for tokens in range(1, TOKENS - 2 * LENGTH):
        later, keys = torch.arange(tokens, TOKENS), torch.arange(tokens)
        seen = torch.stack([region.seen(later, keys).any(dim=0) for region in regions(SIZE)]).any(dim=0)
        assert int(seen.sum()) == WAYS[name].kept(tokens, LENGTH)


@pytest.mark.parametrize("regions", [self_extend(4, 7), dual_chunk(6, 8), streaming_of(SIZE)])
def test_regions_do_not_overlap(regions: tuple[Region, ...]) -> None:
    places = torch.arange(TOKENS)
    count = torch.stack([region.seen(places, places) for region in regions]).sum(dim=0)
    assert count.max() == 1
    assert count.diagonal().min() == 1


@pytest.mark.parametrize(("longest", "group"), [(128, 1), (4096, 64), (4097, 64), (10**5, 1563)])
def test_the_smallest_group_fits(longest: int, group: int) -> None:
    assert smallest_group(64, 128, longest) == group
    for size, fits in ((group, True), (group - 1, False)):
        if size:
            assert ((longest - 1) // size + 64 - 64 // size < 128) is fits


class TestErrors:
    @pytest.mark.parametrize("way", ["self-extend", "dual-chunk", "streaming", "blockwise"])
    def test_models_without_rotary_positions(self, way: str) -> None:
        model, ids = rope_model("gpt2"), ids_of(LENGTH)
        before = logits_of(model, ids)
        with pytest.raises(ValueError, match="its positions are absolute"), WAYS[way].open(model, SIZE):
            pass
        assert torch.equal(logits_of(model, ids), before)

    def test_scaling(self) -> None:
        with pytest.raises(ValueError, match="GPT2LMHeadModel has no rope_parameters"):
            scaled(rope_model("gpt2"), "linear", 2.0, LENGTH)
        again = scaled(rope_model(), "yarn", 2.0, LENGTH)
        with pytest.raises(ValueError, match="frequencies that are scaled already"):
            scaled(again, "linear", 2.0, LENGTH)

    def test_what_a_reference_does_not_read(self) -> None:
        model, ids = rope_model(), ids_of()
        with WAYS["dual-chunk"].open(model, SIZE):
            with pytest.raises(ValueError, match="give neither past_key_values"):
                model(ids, past_key_values=DynamicCache())
            with pytest.raises(ValueError, match="without padding"):
                model(ids, attention_mask=torch.zeros_like(ids))

    def test_attention_functions_without_masks(self) -> None:
        model = rope_model()
        model.config._attn_implementation_internal = "flash_attention_2"
        with pytest.raises(ValueError, match="takes no mask of a window"), reading_window(model, LENGTH):
            pass

    def test_a_way_that_failed_leaves_the_model(self) -> None:
        model = rope_model()
        with pytest.raises(RuntimeError, match="in between"), WAYS["blockwise"].open(model, SIZE):
            raise RuntimeError("in between")
        with pytest.raises(ValueError, match="is not blockwise"):
            restore(model)


@pytest.mark.parametrize(("length", "sinks", "block"), [(8, 2, 3), (12, 3, 4), (16, 4, 6), (2048, 4, 1022)])
def test_blocks_beside_sinks_fit_the_training_length(length: int, sinks: int, block: int) -> None:
    way = WAYS["blockwise-sinks"]
    assert sinks_beside_blocks(length) == sinks < block
    assert way.describe(Size(length, 10 * length)) == f"blockwise, blocks of {block} + {sinks} sinks"
    assert sinks + 2 * block <= length
    assert way.kept(10 * length, length) == 2 * sinks + 2 * block  # sinks are kept as they came, too

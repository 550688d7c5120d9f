"""The engine on its own: heads that share keys and values, and positions far into a text."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.models import PATTERNS, pattern_fields, quick
from hypothesis import given
from hypothesis import strategies as st

from lex_hf import LexConfig
from lex_hf.model.attention_lex import Planner
from lex_hf.model.batch_lex import Batch
from lex_hf.model.cache_layer_lex import LexCacheLayer
from lex_hf.model.functions_lex import AttentionFunction
from lex_hf.model.positions_lex import SCHEMES

HEADS, SHARED, WIDTH = 6, 2, 10
TOLERANCE = {"atol": 1e-9, "rtol": 0}
kinds = st.sampled_from(["xpos", "rope", "alibi", "none"])


def config_of(**fields: Any) -> LexConfig:
    sizes = {"hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    return LexConfig(**sizes, training_length=14, xpos_scale_base=7, **fields)


def read(
    config: LexConfig, states: tuple[torch.Tensor, ...], mask: torch.Tensor, pieces: list[int], room: int | None
) -> torch.Tensor:
    """Outputs of one layer of attention, `(batch, heads, sequence, head_dim)`, for states read in pieces."""
    scheme, layer = SCHEMES[config.position_embedding_type](config), LexCacheLayer(config.patterns[0], (), room)
    attend = partial(AttentionFunction("eager"), torch.nn.Identity())
    outputs, start = [], 0
    for length in pieces:
        stop = start + length
        query, key, value = (each[:, :, start:stop] for each in states)
        batch = Batch.of(query[:, 0], mask[:, :stop], None, layer)
        (plan,) = Planner(layer.pattern, scheme, AttentionFunction("eager"), query.dtype, query.device).plan(
            [batch], layer
        )
        query, key = plan.rotation.rotate(batch.align(query), batch.align(key))
        key, value = layer.update(key, batch.align(value), batch, plan.rotation.decay)
        output, _ = plan.attend(attend, query, key, value, scaling=WIDTH**-0.5, dropout=0.0, dense=False)
        outputs.append(batch.restore(output))
        start = stop
    return torch.cat(outputs, dim=2)


@quick
@given(
    pattern_fields,
    kinds,
    st.lists(st.integers(1, 17), min_size=1, max_size=6),
    st.integers(0, 9),
    st.booleans(),
    st.integers(0, 99),
)
def test_heads_that_share_keys_and_values_read_as_if_each_had_its_own(
    pattern: dict[str, Any], kind: str, pieces: list[int], padding: int, preallocated: bool, seed: int
) -> None:
    config, length = config_of(position_embedding_type=kind, **pattern), sum(pieces)
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(3, heads, length, WIDTH, generator=generator, dtype=torch.float64)
        for heads in (HEADS, SHARED, SHARED)
    )
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, : min(padding, length - 1)] = 0
    room = length if preallocated else None
    own = (query, *(states.repeat_interleave(HEADS // SHARED, dim=1) for states in (key, value)))
    real = (mask == 1)[:, None, :, None]
    shared, expected = (read(config, states, mask, pieces, room) * real for states in ((query, key, value), own))
    torch.testing.assert_close(shared, expected, **TOLERANCE)
    torch.testing.assert_close(read(config, own, mask, [length], None) * real, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["xpos", "rope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_positions_are_as_exact_as_near_ones(kind: str, dtype: torch.dtype) -> None:
    """Scores between tokens of a pair of blocks, at the start of a text and after 10^8 tokens."""
    scheme, slots = SCHEMES[kind](config_of(position_embedding_type=kind)), torch.arange(14)
    query, key = torch.randn(2, 1, 1, 14, WIDTH, generator=torch.Generator().manual_seed(0), dtype=dtype)
    scores = []
    for before in (0, 10**8 // 14 * 14):
        rotated = scheme.rotation(slots + before, slots - 7, 7, dtype).rotate(query, key)
        scores.append(rotated[0] @ rotated[1].mT)
    torch.testing.assert_close(*scores, atol={torch.float32: 1e-5, torch.float64: 1e-6}[dtype], rtol=0)


@pytest.mark.parametrize("fields", PATTERNS)
def test_keys_of_a_previous_block_are_scaled_and_not_rotated_again(fields: dict[str, Any]) -> None:
    """Without a scale, what is stored never changes, wherever it stands."""
    for kind in ("rope", "alibi", "none"):
        config = config_of(position_embedding_type=kind, **fields)
        positions = torch.arange(5)
        rotation = SCHEMES[kind](config).rotation(positions, positions, config.patterns[0].block, torch.float32)
        assert rotation.decay is None

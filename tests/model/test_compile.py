"""A forward pass under the user's own compiler: the logits and the tokens of eager mode, for every batch and cache."""

import shutil
from typing import Any

import pytest
import torch
from helpers.models import NEVER, left_padded, needs_whole_graphs, random_ids, tiny_model
from torch._dynamo.utils import counters

from lex_hf import LexCache, LexForCausalLM, LexStaticCache

PROMPTS = (1, 6, 7, 15, 33)
pytestmark = [needs_whole_graphs, pytest.mark.usefixtures("fresh_compiler")]
HYBRID = {"attention_pattern": ["blockwise", "full"]}


def compiled(model: LexForCausalLM, backend: str, whole: bool = True) -> LexForCausalLM:
    """Transformers' documented recipe; without `whole`, graphs may break."""
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=whole)
    return model


@pytest.mark.parametrize(
    ("cache", "backend", "fields"),
    [
        (None, "eager", HYBRID),
        ("static", "aot_eager", HYBRID),
        (None, "eager", {"attention_pattern": "sliding", "position_embedding_type": "sinusoidal"}),
        ("static", "eager", {"attention_pattern": "sliding", "position_embedding_type": "sinusoidal"}),
    ],
)
def test_generation_from_whole_graphs_writes_the_tokens_of_eager_mode(
    cache: str | None, backend: str, fields: dict[str, Any]
) -> None:
    model = tiny_model(dtype=torch.float64, **fields)
    inputs = left_padded([random_ids(n, seed=n) for n in PROMPTS])
    options = {"max_new_tokens": 25, "do_sample": False, "cache_implementation": cache}
    expected = model.generate(**inputs, **options)
    assert torch.equal(compiled(model, backend).generate(**inputs, **options), expected)
    assert counters["stats"]["unique_graphs"] == 2  # the prompts, and every step
    assert not counters["graph_break"]


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_in_chunks_without_padding_under_model_compile(cache: str | None) -> None:
    model, ids = tiny_model(dtype=torch.float64, num_hidden_layers=1), random_ids(2, 18)
    options = {"max_new_tokens": 20, "do_sample": False, "cache_implementation": cache, "prefill_chunk_size": 9}
    expected = model.generate(ids, **options)
    model.compile(backend="eager")
    assert torch.equal(model.generate(ids, **options), expected)


def test_beams_reorder_the_rows_between_the_steps_of_one_graph() -> None:
    model = tiny_model(dtype=torch.float64)
    inputs = left_padded([random_ids(n, seed=n) for n in (3, 15)])
    options = {"max_new_tokens": 20, "num_beams": 3, "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert torch.equal(compiled(model, "eager").generate(**inputs, **options), expected)
    assert counters["stats"]["unique_graphs"] <= 3


def read(
    model: LexForCausalLM, ids: torch.Tensor, mask: torch.Tensor | None, pieces: list[int], cache: Any
) -> torch.Tensor:
    logits, start = [], 0
    with torch.no_grad():
        for piece in pieces:
            stop = start + piece
            known = None if mask is None else mask[:, :stop]
            logits.append(model(ids[:, start:stop], attention_mask=known, past_key_values=cache).logits)
            start = stop
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    ("fields", "pieces", "backend", "static"),
    [
        ({"attention_pattern": "blockwise"}, [8, 30], "aot_eager", False),
        ({"attention_pattern": "blockwise", "block_length": 3}, [2, 15], "eager", True),
        ({"attention_pattern": "sliding", "sliding_window": 5}, [15, 7], "eager", False),
        (HYBRID, [7, 5], "eager", True),
    ],
)  # two graphs or three of each: hypothesis would take minutes for more
def test_ragged_batches_in_pieces_have_the_logits_of_eager_mode(
    fields: dict[str, Any], pieces: list[int], backend: str, static: bool
) -> None:
    width = sum(pieces)
    mask = torch.ones(3, width, dtype=torch.long)
    mask[1, : pieces[0] + 1] = 0  # a row without a token in the first piece
    mask[2] = torch.rand(width, generator=torch.Generator().manual_seed(width)) < 0.5
    layers = 1 if isinstance(fields["attention_pattern"], str) else 2  # a second alike says no more
    model = tiny_model(dtype=torch.float64, num_hidden_layers=layers, **fields)
    ids = random_ids(3, width)

    def cache() -> Any:
        return LexStaticCache(model.config, width) if static else LexCache(model.config)

    expected = read(model, ids, mask, pieces, cache())
    found = read(compiled(model, backend), ids, mask, pieces, cache())
    real = mask == 1
    torch.testing.assert_close(found[real], expected[real], atol=1e-9, rtol=0)


def test_eager_and_compiled_passes_may_share_a_cache() -> None:
    model, twin = (tiny_model(dtype=torch.float64, **HYBRID) for _ in range(2))
    compiled(twin, "eager")
    ids, mask, cache = random_ids(2, 44), torch.ones(2, 44, dtype=torch.long), LexCache(model.config)
    mask[1, :5] = 0
    stops, logits = [12, 13, 24, 25, 26, 44], []
    with torch.no_grad():
        for number, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
            turn = (model, twin)[number % 2]
            logits.append(turn(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits)
        expected = model(ids, attention_mask=mask).logits
    real = mask == 1
    torch.testing.assert_close(torch.cat(logits, dim=1)[real], expected[real], atol=1e-9, rtol=0)
    cache.crop(-1)
    assert cache.layers[0].lengths.tolist() == [43, 38]


def test_packed_rows_without_a_cache() -> None:
    model, ids = tiny_model(dtype=torch.float64).train(), random_ids(1, 40)
    positions = torch.cat((torch.arange(23), torch.arange(17)))[None]
    plain = torch.arange(40)[None]
    expected = [model(ids, position_ids=each).logits for each in (positions, plain)]
    compiled(model, "eager")
    found = [model(ids, position_ids=each).logits for each in (positions, plain)]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    assert not torch.allclose(expected[0], expected[1])
    mask = torch.ones_like(ids)
    torch.testing.assert_close(model(ids, attention_mask=mask, position_ids=positions).logits, expected[0])


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids start again within a row"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])}, "does not fit what the cache has read"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 2, 1]])}, "values other than 0 and 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_graph(passed: dict[str, torch.Tensor], message: str) -> None:
    model = compiled(tiny_model(num_hidden_layers=1), "eager")
    cache = LexCache(model.config)
    with torch.no_grad():
        model(random_ids(1, 4), past_key_values=cache)
        with pytest.raises(RuntimeError, match=message):
            model(random_ids(1, 4, seed=1), past_key_values=cache, **passed)


def test_guesses_are_taken_back() -> None:
    """With these weights three tokens are guessed in the third pass, all wrongly, and four more passes follow."""
    model, prompt = tiny_model(dtype=torch.float64, num_hidden_layers=1, seed=5), random_ids(1, 9).repeat(1, 3)
    options = {"max_new_tokens": 7, "do_sample": False, "prompt_lookup_num_tokens": 3, "eos_token_id": NEVER}
    expected = model.generate(prompt, **options)
    assert torch.equal(compiled(model, "eager", whole=False).generate(prompt, **options), expected)


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # in PyTorch itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_layers_of_a_static_cache_count_in_tensors_of_their_own() -> None:
    """Inductor makes one tensor of what it allocates equal: each layer would count in it again."""
    model = compiled(tiny_model(attention_pattern="full"), "inductor")
    cache = LexStaticCache(model.config, 20)
    with torch.no_grad():
        model(random_ids(2, 3), past_key_values=cache)
    counts = [tensor for layer in cache.layers for tensor in (layer.lengths, layer.padding, layer.columns)]
    assert len({tensor.data_ptr() for tensor in counts}) == len(counts)
    assert [layer.lengths.tolist() for layer in cache.layers] == [[3, 3]] * 2

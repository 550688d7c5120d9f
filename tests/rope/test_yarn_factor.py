"""Layers that keep full attention beside blocks, with frequencies scaled by YaRN in these alone."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.architectures import tiny_model as architecture
from helpers.models import enable_checkpointing
from helpers.rope_models import LENGTH, VOCABULARY, dense_mask, rope_model
from transformers import LlamaForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lex_hf import blockwise, restore
from lex_hf.evaluation.loading import load_for_evaluation
from lex_hf.evaluation.resume import model_fingerprint
from lex_hf.rope.blockwise import reader_of
from lex_hf.rope.scaling import scaled

BLOCK, FACTOR = LENGTH // 2, 4.0
TOLERANCE = {"atol": 2e-5, "rtol": 0}
LAYERS = [0, 2]  # that read in blocks, of three


def ids_of(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(0))


def far_llama(**options: Any) -> LlamaForCausalLM:
    return blockwise(rope_model(), layers=LAYERS, **{"yarn_factor": FACTOR, **options})


@torch.no_grad()
def layer_by_layer(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a Llama, whose layers are called one after the other: each with its mask, and angles of its own."""
    states, positions = model.model.embed_tokens(ids), torch.arange(ids.shape[1])[None]
    config = copy.deepcopy(model.config)
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": FACTOR,
        "original_max_position_embeddings": LENGTH,
    }
    near, far = (module(states, positions) for module in (model.model.rotary_emb, LlamaRotaryEmbedding(config)))
    for index, layer in enumerate(model.model.layers):
        mask = dense_mask(ids.shape[1], BLOCK if index in LAYERS else ids.shape[1])
        angles = near if index in LAYERS else far
        states = layer(states, attention_mask=mask.expand(len(ids), -1, -1, -1), position_embeddings=angles)
    return model.lm_head(model.model.norm(states))


def test_only_layers_that_keep_full_attention_are_scaled() -> None:
    model, ids = rope_model(), ids_of(2, 40)
    expected = layer_by_layer(model, ids)
    blockwise(model, layers=LAYERS, yarn_factor=FACTOR)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, **TOLERANCE)
        cache, pieces = DynamicCache(config=model.config), []
        for piece in ids.split([9, 1, 1, 17, 12], dim=1):
            pieces.append(model(piece, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **TOLERANCE)
        padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), ids), dim=1)
        logits = model(padded, attention_mask=(torch.arange(43) >= 3).long().expand(2, -1)).logits
        torch.testing.assert_close(logits[:, 3:], expected, **TOLERANCE)


@pytest.mark.parametrize("mode", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
def test_generation_with_and_without_cache(mode: dict[str, Any]) -> None:
    model, ids = far_llama(), ids_of(2, 21)
    options = {"max_new_tokens": 30, "do_sample": False, **{k: v for k, v in mode.items() if k == "num_beams"}}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **{**options, **mode}), expected)


@pytest.mark.parametrize(
    "kind",
    ["cohere", "deepseek_v3", "falcon_h1", "gemma3_text", "glm4", "gpt_neox", "lfm2", "phi3", "qwen3_next", "smollm3"],
)
def test_other_architectures(kind: str) -> None:
    """The first layer that keeps full attention has the keys of a model that is scaled as a whole."""
    model, ids = architecture(kind), ids_of(1, 30)
    first, *rest = sorted(reader_of(blockwise(model)).layers)
    restore(model)

    @torch.no_grad()
    def read(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        blockwise(model, layers=rest, **options)
        output = model(ids, use_cache=True)
        restore(model)
        return output.logits, output.past_key_values.layers[first].keys

    logits, keys = read()
    far_logits, far_keys = read(yarn_factor=FACTOR)
    assert (far_logits - logits).abs().max() > 1e-3
    assert torch.equal(read(yarn_factor=1.0)[0], logits)
    cache = DynamicCache(config=model.config.get_text_config())
    with torch.no_grad():
        scaled(model, "yarn", FACTOR, model.config.max_position_embeddings)(ids, past_key_values=cache)
    torch.testing.assert_close(far_keys, cache.layers[first].keys, **TOLERANCE)
    if kind != "deepseek_v3":  # which keeps what keys are made of
        assert (far_keys - keys).abs().max() > 1e-3


def test_far_positions_are_exact() -> None:
    """A text gives the same wherever it begins: beyond position 10^7, angles of float32 have lost their fraction."""
    model, ids, places = far_llama(), ids_of(1, 30), torch.arange(30)[None]
    with torch.no_grad():
        near, far = (model(ids, position_ids=places + shift, use_cache=False).logits for shift in (0, 3 * 10**7))
    torch.testing.assert_close(far, near, atol=1e-4, rtol=0)


def test_restoring_and_copies() -> None:
    model, ids = rope_model(), ids_of(1, 30)
    before = model(ids).logits
    blockwise(model, layers=LAYERS, yarn_factor=FACTOR)
    far, other = model(ids).logits, copy.deepcopy(model)
    restore(model)
    assert torch.equal(model(ids).logits, before)
    assert torch.equal(other(ids).logits, far)
    assert not torch.equal(far, before)


def test_records_tell_ways_to_read_apart() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"layers": [0]},
        {"layers": [0, 2]},
        {"layers": [0, 2], "sinks": 1},
        {"layers": [0, 2], "yarn_factor": 2},
        {"layers": [0, 2], "yarn_factor": 4},
    ]
    found = [model_fingerprint(blockwise(rope_model(), **way)) for way in ways]
    assert len({model_fingerprint(rope_model()), *found}) == len(ways) + 1
    assert found[-1] == model_fingerprint(far_llama())  # 4 and 4.0


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model, ids = rope_model(), ids_of(1, 30)
    before = model(ids).logits
    with pytest.raises(ValueError, match=r"yarn_factor = 0.5: it must be at least 1"):
        blockwise(model, layers=LAYERS, yarn_factor=0.5)
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        assert not any(getattr(module, hooks) for module in model.modules())
    assert torch.equal(model(ids).logits, before)


def test_training_reaches_all_weights() -> None:
    model, ids = far_llama().train(), ids_of(2, 30)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(model, use_reentrant=False)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, **TOLERANCE)


def test_compiled() -> None:
    model, ids = far_llama(), ids_of(1, 30)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")(ids, use_cache=False).logits
    torch.testing.assert_close(compiled, expected, **TOLERANCE)


@pytest.mark.parametrize("factor", [0.5, float("nan"), float("inf"), True, "4"])
def test_impossible_factors(factor: Any) -> None:
    with pytest.raises(ValueError, match=f"yarn_factor = {factor!r}: it must be at least 1"):
        far_llama(yarn_factor=factor)


def test_where_no_layer_keeps_full_attention() -> None:
    with pytest.raises(ValueError, match=r"yarn_factor = 4.0 is for layers that keep full attention, and all read"):
        blockwise(rope_model(), yarn_factor=FACTOR)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cohere2", "it changes nothing, as the layers that keep full attention have no rotary positions"),
        ("gpt_oss", "has rope_type 'yarn': it was trained with frequencies that are scaled already"),
    ],
)
def test_models_that_have_no_use_of_it(kind: str, message: str) -> None:
    model = architecture(kind)
    rest = sorted(reader_of(blockwise(model)).layers)[1:]
    restore(model)
    with pytest.raises(ValueError, match=message):
        blockwise(model, layers=rest, yarn_factor=FACTOR)
    assert reader_of(model) is None


def test_loading(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"yarn_factor = 4.0: only a model that reads in blocks has yarn_factor"):
        load_for_evaluation(str(tmp_path), yarn_factor=FACTOR)

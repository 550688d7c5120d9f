"""Parity with the official code, on outputs that were stored from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.official import official
from safetensors.torch import load_file

from lex_hf import LexCache, LexConfig
from lex_hf.model.positions_lex import SCHEMES
from lex_hf.model.rotation_lex import rotate

LENGTHS = (7, 31, 32, 33, 48, 64, 77, 100, 160)
BEYOND = tuple(length for length in LENGTHS if length > 32)
DENSE = 4  # of the logits of the dense formula every fourth is stored, at all positions; of the official code's, all


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_match_the_official_code(golden: Path, length: int, attention: str) -> None:
    stored = load_file(golden / "lex_torchscale_logits_f32.safetensors")
    with torch.no_grad():
        logits = official(golden, attn_implementation=attention)(stored[f"input_ids_{length}"]).logits
    torch.testing.assert_close(logits, stored[f"logits_{length}"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", BEYOND)
def test_logits_without_bca_match_the_official_code(golden: Path, length: int) -> None:
    ids = load_file(golden / "lex_torchscale_logits_f32.safetensors")[f"input_ids_{length}"]
    expected = load_file(golden / "lex_torchscale_logits_nobca_f32.safetensors")[f"logits_{length}"]
    with torch.no_grad():
        logits = official(golden, attention_pattern="full")(ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("pattern", "name", "lengths"), [("blockwise", "bca", LENGTHS), ("full", "causal", BEYOND)])
def test_float64_logits_match_the_dense_formula(
    golden: Path, pattern: str, name: str, lengths: tuple[int, ...]
) -> None:
    ids = load_file(golden / "lex_torchscale_logits_f32.safetensors")
    dense = load_file(golden / "lex_dense_logits_f64.safetensors")
    model = official(golden, attention_pattern=pattern).double()
    for length in lengths:
        with torch.no_grad():
            logits = model(ids[f"input_ids_{length}"]).logits[..., ::DENSE]
        torch.testing.assert_close(logits, dense[f"logits_{name}_{length}"], atol=1e-9, rtol=0)


@pytest.mark.parametrize("length", [20, 48])
def test_hidden_states_and_attentions_match(golden: Path, length: int) -> None:
    stored = load_file(golden / "lex_torchscale_hidden_f32.safetensors")
    model = official(golden, attn_implementation="eager")
    with torch.no_grad():
        outputs = model(stored[f"input_ids_{length}"], output_hidden_states=True, output_attentions=True)
    # transformers replaces the last hidden state by its normalised form.
    for ours, theirs in zip(outputs.hidden_states[:-1], stored[f"hidden_{length}"][:-1], strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)
    torch.testing.assert_close(outputs.hidden_states[-1], stored[f"final_norm_{length}"], atol=5e-5, rtol=0)
    weights = stored[f"attn_probs_layer0_dense_f64_{length}"]
    torch.testing.assert_close(outputs.attentions[0].double(), weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "dense_logits_bca_f64"),
        ({"attention_pattern": "sliding"}, "dense_logits_sliding_32_f64"),
        ({"attention_pattern": "sliding", "sliding_window": 33}, "dense_logits_sliding_33_f64"),
        ({"attention_pattern": "sliding", "sliding_window": 33}, "logits_token_by_token_f32"),
    ],
)
def test_decoding_token_by_token_and_in_one_pass(golden: Path, fields: dict[str, Any], expected: str) -> None:
    stored = load_file(golden / "lex_torchscale_decode.safetensors")
    ids, model = stored["input_ids"], official(golden, **fields)
    cache = LexCache(model.config)
    with torch.no_grad():
        stepped = torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(100)], dim=1)
        at_once = model(ids).logits
    step = DENSE if expected.startswith("dense") else 1
    for logits in (stepped, at_once):
        torch.testing.assert_close(logits[..., ::step].double(), stored[expected].double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "length", "fields"),
    [
        ("rope_bca", 31, {"position_embedding_type": "rope"}),
        ("rope_bca", 100, {"position_embedding_type": "rope"}),
        ("rope_bca", 100, {"xpos_scale": "none"}),
        ("rope_causal", 100, {"position_embedding_type": "rope", "attention_pattern": "full"}),
        ("norot_bca", 31, {"xpos_rotation": False}),
        ("norot_bca", 100, {"xpos_rotation": False}),
        ("scalar_zeta_bca", 31, {"xpos_scale": "scalar"}),
        ("scalar_zeta_bca", 100, {"xpos_scale": "scalar"}),
        ("relu_f32", 100, {"hidden_act": "relu"}),
    ],
)
def test_ablations_match(golden: Path, name: str, length: int, fields: dict[str, Any]) -> None:
    ids = load_file(golden / "lex_torchscale_logits_f32.safetensors")[f"input_ids_{length}"]
    expected = load_file(golden / "lex_variants.safetensors")[f"{name}_{length}"]
    with torch.no_grad():
        logits = official(golden, **fields)(ids).logits[..., :: 1 if name == "relu_f32" else DENSE]
    torch.testing.assert_close(logits.double(), expected.double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("pattern", "name", "length"),
    [
        ("blockwise", "bca", 32),
        ("blockwise", "bca", 48),
        ("blockwise", "bca", 160),
        ("full", "causal", 48),
        ("full", "causal", 160),
    ],
)
def test_gradients_reach_as_far_as_they_should(golden: Path, pattern: str, name: str, length: int) -> None:
    stored = load_file(golden / "lex_gradients_f64.safetensors")
    ids = load_file(golden / "lex_torchscale_logits_f32.safetensors")[f"input_ids_{length}"]
    model = official(golden, attention_pattern=pattern).double()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    log_probs = model(inputs_embeds=embeds, use_cache=False).logits[:, -1].log_softmax(-1)
    log_probs.gather(1, stored[f"target_{length}"][:, None]).sum().backward()
    norms, expected = embeds.grad.norm(dim=-1), stored[f"grad_norm_{name}_{length}"]
    torch.testing.assert_close(norms, expected, atol=1e-9 * expected.max().item(), rtol=0)
    assert torch.equal(norms == 0, expected == 0)


def test_mean_losses_match(golden: Path) -> None:
    facts = json.loads((golden / "lex_torchscale.json").read_text())["mean_next_token_nll_f64"]
    ids = load_file(golden / "lex_torchscale_logits_f32.safetensors")
    models = {"bca": official(golden), "causal": official(golden, attention_pattern="full")}
    for length, losses in facts.items():
        for name, expected in losses.items():
            tokens = ids[f"input_ids_{length}"]
            with torch.no_grad():
                assert models[name](tokens, labels=tokens).loss.item() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("width", "length"), [(16, 2), (16, 33), (64, 33), (64, 512)])
def test_xpos_products_match(golden: Path, width: int, length: int) -> None:
    stored = load_file(golden / f"xpos_d{width}.safetensors")
    cases = {"qk_f64": {}}
    if length == 33:
        cases |= {
            "qk_f64_rope": {"position_embedding_type": "rope"},
            "qk_f64_norot": {"xpos_rotation": False},
            "qk_f64_scalar_zeta": {"xpos_scale": "scalar"},
        }
    for name, fields in cases.items():
        config = LexConfig(hidden_size=width, num_attention_heads=1, **fields)
        scheme = SCHEMES[config.position_embedding_type](config)
        places = torch.arange(length)
        factors = scheme.rotation(places, places, None, torch.float64)
        query, key = stored[f"q_{length}"].double(), stored[f"k_{length}"].double()
        query = rotate(query, factors.query[0])[:, stored[f"rows_{length}"]]
        products = query @ rotate(key, factors.key[0]).transpose(1, 2)
        torch.testing.assert_close(products, stored[f"{name}_{length}"].double(), atol=1e-9, rtol=1e-9)

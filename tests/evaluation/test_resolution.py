"""Attention resolution: the equation, its expectation from a config, and what is measured in models."""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference
from helpers.models import ABLATIONS, PATTERNS, SCHEMES, random_ids, settings_of, tiny_model
from helpers.other_models import VOCABULARY, bert, gpt2, gpt_neox, llama
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from lex_hf import LexConfig, LexForCausalLM
from lex_hf.evaluation import resolution
from lex_hf.evaluation.resolution import attention_resolution, expected_attention, measure_resolution


def by_hand(exponentials: list[Fraction], reading: str) -> Fraction:
    """Eq. 4 in exact fractions of e^s."""
    values = [*exponentials, Fraction(0)] if reading == "C" else exponentials
    numerator = sum(values[i] * (values[i] - values[i + 1]) for i in range(len(values) - 1))
    total = sum(values[:-1] if reading == "B" else values)
    return numerator / total**2


@given(
    st.lists(st.fractions(min_value=Fraction(1, 50), max_value=50, max_denominator=50), min_size=2, max_size=9),
    st.sampled_from("ABC"),
    st.floats(-2000, 2000),
)
@hypothesis_settings(max_examples=50)
def test_equation_4_under_each_reading(exponentials: list[Fraction], reading: Any, constant: float) -> None:
    s = [math.log(value) for value in exponentials]
    expected = pytest.approx(float(by_hand(exponentials, reading)), rel=1e-9, abs=1e-12)
    assert attention_resolution(s, reading=reading) == expected
    moved = attention_resolution([value + constant for value in s], reading=reading)
    assert moved == pytest.approx(expected.expected, rel=1e-8, abs=1e-9)


def test_the_default_reading_is_bounded_where_the_literal_one_is_not() -> None:
    rising = torch.tensor([0.0, 1.0, 800.0])
    assert attention_resolution(rising) == attention_resolution(rising, reading="A") == 0
    assert attention_resolution(rising, reading="B") < -1e9


def test_golden_resolutions(golden: Path) -> None:
    stored = json.loads((golden / "attention_resolution.json").read_text())
    linear = [{**case, "s": [-case["slope"] * n for n in range(case["K"])]} for case in stored["linear_cases"]]
    for case in (*stored["cases"], *stored["shift_cases"], *linear):
        for reading in ("A", "B", "C"):
            found = attention_resolution(case["s"], reading=reading)
            assert found == pytest.approx(case[f"{reading}_float"], rel=1e-9, abs=1e-15)


def rotary(kind: str) -> LexConfig:
    fields = {"rope": {"position_embedding_type": "rope"}, "xpos_noB": {"xpos_scale_base": 1}}.get(kind, {})
    return LexConfig(hidden_size=64, num_attention_heads=1, **fields)


@pytest.mark.parametrize("kind", ["rope", "xpos_B512", "xpos_noB"])
def test_golden_expectations(golden: Path, kind: str) -> None:
    stored = json.loads((golden / "attention_resolution.json").read_text())
    found = expected_attention(rotary(kind), torch.tensor(stored["g_zeta"]["n"]))
    expected = torch.tensor(stored["g_zeta"][f"g_{kind}__i_0_to_d/2-1"], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    for case in stored["R_of_g"]:
        if case["kind"] == kind:
            g = expected_attention(rotary(kind), torch.arange(int(case["n"].removeprefix("0..")) + 1))
            assert attention_resolution(g) == pytest.approx(case["A_float"], rel=1e-9)
            assert attention_resolution(g / 32) == pytest.approx(case["A_float_of_g_divided_by_d/2"], rel=1e-9)


@pytest.mark.parametrize("fields", [{}, *ABLATIONS, {"xpos_gamma": 0.7, "rope_theta": 500.0, "xpos_scale_base": 3}])
def test_expectation_of_rotary_schemes_by_hand(fields: dict[str, Any]) -> None:
    config = LexConfig(hidden_size=36, num_attention_heads=3, **fields)
    ones = torch.ones(40, 12, dtype=torch.float64)
    # States of ones have q k* = 2 in each pair, and scores are divided by √12.
    expected = reference.xpos_scores(ones, ones, config.to_dict())[:, 0] * math.sqrt(12) / 2
    torch.testing.assert_close(expected_attention(config, torch.arange(40)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", ["alibi", "sandwich", "smoothed_sandwich"])
def test_expectation_of_biases_is_their_mean_over_heads(scheme: str) -> None:
    config = LexConfig(hidden_size=36, num_attention_heads=3, position_embedding_type=scheme)
    distances = torch.tensor([[0, 5], [17, 3]])
    expected = [
        [sum(reference.bias({}, config.to_dict(), head, r) for head in (1, 2, 3)) / 3 for r in row]
        for row in distances.tolist()
    ]
    torch.testing.assert_close(expected_attention(config, distances), torch.tensor(expected, dtype=torch.float64))


def test_expectation_of_each_layer_of_a_mixture() -> None:
    mixed, distances = LexConfig(position_embedding_type=["xpos", "alibi"] * 12), torch.arange(9)
    for layer, scheme in enumerate(("xpos", "alibi")):
        alone = expected_attention(LexConfig(position_embedding_type=scheme), distances)
        assert torch.equal(expected_attention(mixed, distances, layer), alone)


@pytest.mark.parametrize("scheme", ["t5", "shaw", "kerple", "sinusoidal", "learned", "none"])
def test_schemes_without_an_expectation_say_so(scheme: str) -> None:
    with pytest.raises(ValueError, match=f"'{scheme}' has no expectation.*xpos, rope, alibi"):
        expected_attention(LexConfig(position_embedding_type=scheme), torch.arange(3))


@pytest.mark.parametrize("n", [torch.tensor([1, -1]), torch.tensor([0.5]), torch.tensor([], dtype=torch.long)])
def test_distances_that_are_none(n: Tensor) -> None:
    with pytest.raises(ValueError, match="distances are integers, at least one, none negative"):
        expected_attention(LexConfig(), n)


@pytest.mark.parametrize("s", [[1.0], [[1.0, 2.0]], [1.0, math.nan], [math.inf, 1.0]])
def test_scores_that_are_none(s: Any) -> None:
    with pytest.raises(ValueError, match=r"give at least two scores|s\[[01]\] = (nan|inf): all scores must be finite"):
        attention_resolution(s)


def test_unknown_readings_are_refused() -> None:
    with pytest.raises(ValueError, match="reading = 'D': it must be one of A, B, C"):
        attention_resolution([1.0, 2.0], reading="D")  # type: ignore[arg-type]


def mean_by_distance(scores: Tensor, seen: Tensor) -> list[float]:
    """Mean over texts, heads and pairs that are seen, in plain loops; scores are (texts, heads, query, key)."""
    found: dict[int, list[float]] = {}
    for query, row in enumerate(seen.tolist()):
        for key, meets in enumerate(row):
            if meets:
                found.setdefault(query - key, []).extend(scores[:, :, query, key].flatten().tolist())
    return [sum(found[n]) / len(found[n]) for n in range(len(found))]


def dense_curves(model: LexForCausalLM, ids: Tensor) -> list[list[float]]:
    """s[n] of each layer by the formulas of the reference."""
    facts, curves = settings_of(model), []
    with torch.no_grad():
        inputs = model(ids, output_hidden_states=True).hidden_states
    for index, (layer, (pattern, block)) in enumerate(zip(model.model.layers, facts["patterns"], strict=True)):
        states, heads = layer.input_layernorm(inputs[index]), model.config.num_attention_heads
        query, key = (
            project(states).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project in (layer.self_attn.q_proj, layer.self_attn.k_proj)
        )
        weights = model.state_dict()
        scores = torch.stack(
            [
                torch.stack([reference.scores(q[h], k[h], weights, facts, index, h + 1) for h in range(heads)])
                for q, k in zip(query, key, strict=True)
            ]
        )
        curves.append(mean_by_distance(scores.detach(), reference.visible(pattern, ids.shape[1], block)))
    return curves


def check_against_dense(fields: dict[str, Any], length: int, implementation: str) -> None:
    model = tiny_model(dtype=torch.float64, attn_implementation=implementation, **fields)
    ids = random_ids(2, length)
    found = measure_resolution(model, ids, progress=False)
    assert (found.length, found.texts, found.patterns) == (length, 2, model.config.layer_patterns)
    expected = dense_curves(model, ids)
    for curve, slow in zip(found.curves, expected, strict=True):
        torch.testing.assert_close(curve, torch.tensor(slow, dtype=torch.float64), rtol=0, atol=1e-9)
    assert found.by_layer == pytest.approx([attention_resolution(curve) for curve in expected], abs=1e-9)
    assert found.mean == pytest.approx(sum(found.by_layer) / 2)


@pytest.mark.parametrize("fields", [*PATTERNS, *ABLATIONS, *SCHEMES])
def test_measured_scores_match_the_dense_reference(fields: dict[str, Any]) -> None:
    check_against_dense(fields, 31, "sdpa")


@given(st.sampled_from(PATTERNS), st.integers(2, 45), st.sampled_from(["eager", "sdpa"]))
@hypothesis_settings(max_examples=12)
def test_measured_scores_match_at_every_length(pattern: dict[str, Any], length: int, implementation: str) -> None:
    check_against_dense(pattern, length, implementation)


def test_pairs_that_never_meet_do_not_count() -> None:
    found = measure_resolution(tiny_model(attention_pattern=["blockwise", "full"]), random_ids(3, 50), progress=False)
    blockwise, full = found.pairs
    assert (len(blockwise), len(full)) == (14, 50)
    assert full.tolist() == [3 * (50 - n) for n in range(50)]
    seen = reference.visible("blockwise", 50, 7)
    assert blockwise.tolist() == [3 * int(seen.diagonal(-n).sum()) for n in range(14)]


@pytest.mark.parametrize("scheme", ["alibi", "sandwich", "smoothed_sandwich"])
def test_a_model_that_ignores_its_tokens_shows_the_bias_alone(scheme: str) -> None:
    model = tiny_model(dtype=torch.float64, position_embedding_type=scheme)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.q_proj.weight)
        nn.init.zeros_(layer.self_attn.q_proj.bias)
    found = measure_resolution(model, random_ids(40), progress=False)
    expected = expected_attention(model.config, torch.arange(14))
    torch.testing.assert_close(found.curves, (expected, expected), rtol=0, atol=1e-9)
    assert found.mean == pytest.approx(attention_resolution(expected))


@pytest.mark.parametrize("fields", [{}, *ABLATIONS])
def test_a_model_of_ones_shows_the_expectation_of_its_rotation(fields: dict[str, Any]) -> None:
    model = tiny_model(dtype=torch.float64, **fields)
    for layer in model.model.layers:
        for project in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            nn.init.zeros_(project.weight)
            nn.init.ones_(project.bias)
    found = measure_resolution(model, random_ids(40), progress=False)
    expected = expected_attention(model.config, torch.arange(14)) * 2 / math.sqrt(10)
    torch.testing.assert_close(found.curves, (expected, expected), rtol=0, atol=1e-9)


def test_scores_are_never_made_for_a_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    add = resolution._ScoreSums.add

    def recorded(self: Any, scores: Tensor, seen: Tensor, distance: Tensor) -> None:
        sizes.append(scores.numel())
        add(self, scores, seen, distance)

    monkeypatch.setattr(resolution._ScoreSums, "add", recorded)
    measure_resolution(tiny_model(), random_ids(2, 300), progress=False)
    assert max(sizes) <= 14 * 14
    measure_resolution(tiny_model(attention_pattern="full"), random_ids(2, 300), progress=False)
    assert max(sizes) == 300 * 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    ids = random_ids(2, 40)
    exact = measure_resolution(tiny_model(dtype=torch.float64), ids, progress=False)
    found = measure_resolution(tiny_model(dtype=dtype), ids, progress=False)
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    for curve, expected in zip(found.curves, exact.curves, strict=True):
        assert curve.dtype == torch.float64
        torch.testing.assert_close(curve, expected, rtol=0, atol=tolerance)


def mistral() -> PreTrainedModel:
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 20}
    return MistralForCausalLM(MistralConfig(num_hidden_layers=2, sliding_window=9, **sizes, **VOCABULARY))


def gpt2_states(model: Any, index: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    block = model.transformer.h[index]
    query, key, _ = block.attn.c_attn(block.ln_1(inputs)).chunk(3, dim=-1)
    return query.unflatten(-1, (3, -1)).transpose(1, 2), key.unflatten(-1, (3, -1)).transpose(1, 2)


def llama_states(model: Any, index: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    layer = model.model.layers[index]
    states = layer.input_layernorm(inputs)
    query = layer.self_attn.q_proj(states).unflatten(-1, (6, -1)).transpose(1, 2)
    key = layer.self_attn.k_proj(states).unflatten(-1, (2, -1)).transpose(1, 2)
    query, key = modeling_llama.apply_rotary_pos_emb(query, key, *model.model.rotary_emb(states, positions))
    return query, torch.stack([key[:, head // 3] for head in range(6)], dim=1)


def gpt_neox_states(model: Any, index: int, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    layer = model.gpt_neox.layers[index]
    projected = layer.attention.query_key_value(layer.input_layernorm(inputs)).unflatten(-1, (3, -1))
    query, key, _ = projected.transpose(1, 2).chunk(3, dim=-1)
    return modeling_gpt_neox.apply_rotary_pos_emb(query, key, *model.gpt_neox.rotary_emb(inputs, positions))


@pytest.mark.parametrize(
    ("make", "states", "window"),
    [
        (gpt2, gpt2_states, None),
        (llama, llama_states, None),
        (gpt_neox, gpt_neox_states, None),
        (mistral, llama_states, 9),
    ],
)
@torch.no_grad()
def test_models_of_others_match_their_own_projections(
    make: Callable[[], PreTrainedModel], states: Callable[..., tuple[Tensor, Tensor]], window: int | None
) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids = random_ids(2, 23)
    inputs = model(ids, output_hidden_states=True).hidden_states
    found = measure_resolution(model, ids, batch_size=1, progress=False)
    assert found.patterns is None
    seen = reference.visible("sliding" if window else "full", 23, window)
    for index, curve in enumerate(found.curves):
        query, key = states(model, index, inputs[index], torch.arange(23)[None])
        expected = mean_by_distance(query @ key.mT / math.sqrt(query.shape[-1]), seen)
        # Rotary factors of these models are float32 whatever the dtype.
        torch.testing.assert_close(curve, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-5)


def gemma2() -> PreTrainedModel:
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 20}
    return Gemma2ForCausalLM(
        Gemma2Config(
            head_dim=12,
            num_hidden_layers=2,
            attn_logit_softcapping=0.01,
            attn_implementation="eager",  # older versions of transformers choose sdpa, which has no such caps
            **sizes,
            **VOCABULARY,
        )
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BloomForCausalLM(BloomConfig(hidden_size=24, n_head=2, n_layer=2, **VOCABULARY)), "does not attend"),
        (gemma2, "more than a softmax"),
        (bert, "passes no mask"),
    ],
)
def test_models_that_cannot_be_measured_say_why(make: Callable[[], PreTrainedModel], message: str) -> None:
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        measure_resolution(model, random_ids(2, 23), progress=False)
    assert model.config._attn_implementation == before
    assert resolution._IMPLEMENTATION not in ALL_ATTENTION_FUNCTIONS


def test_attention_to_later_keys_is_refused() -> None:
    query = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="lets a query see later keys"):
        resolution._Recorder(3)(nn.Identity(), query, query, query, torch.zeros(1, 1, 3, 3))


def test_batches_and_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(5, 30)
    expected = measure_resolution(model, ids, batch_size=5, progress=False)
    torch.testing.assert_close(measure_resolution(model, ids, batch_size=2, progress=False).curves, expected.curves)
    forward, sizes = model.model.forward, []

    def limited(*args: Any, **kwargs: Any) -> Any:
        sizes.append(len(kwargs["input_ids"]))
        if sizes[-1] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", limited)
    found = measure_resolution(model, ids, batch_size=4, progress=False)
    assert sizes == [1, 1, 4, 3, 2, 2, 1]  # the two of a single text are the check of the attention
    torch.testing.assert_close(found.curves, expected.curves)
    assert found.pairs[0].tolist() == expected.pairs[0].tolist()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_model_is_left_as_it_was(implementation: str) -> None:
    model = tiny_model(attn_implementation=implementation, hidden_dropout=0.5, attention_dropout=0.5)
    ids = random_ids(2, 30)
    logits = model(ids).logits
    expected = measure_resolution(model, ids, progress=False)
    model.train()
    model.model.norm.eval()
    found = measure_resolution(model, ids, progress=False)
    assert found.by_layer == expected.by_layer
    assert model.config._attn_implementation == implementation
    assert model.model.layers[0].training
    assert not model.model.norm.training
    assert torch.equal(model.eval()(ids).logits, logits)
    model(ids, labels=ids).loss.backward()  # nothing that inference mode made is left in the model


def test_results_are_ready_for_json_and_draw_themselves() -> None:
    found = measure_resolution(tiny_model(), random_ids(2, 30), progress=False)
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["curves"] == [curve.tolist() for curve in found.curves]
    assert plain["pairs"][0][0] == 60
    assert plain["by_layer"] == found.by_layer
    by_distance, by_layer, _ = found.plot().axes
    assert [line.get_ydata().tolist() for line in by_distance.lines] == plain["curves"]
    assert [bar.get_height() for bar in by_layer.patches] == found.by_layer


@pytest.mark.parametrize("ids", [torch.ones(2, 1), torch.ones(0, 5), torch.ones(1, 2, 3)])
def test_bad_texts(ids: Tensor) -> None:
    with pytest.raises(ValueError, match="give texts of equal length, at least one, of at least 2 tokens"):
        measure_resolution(tiny_model(), ids.long())
    with pytest.raises(ValueError, match="batch_size = 0: it must be at least 1"):
        measure_resolution(tiny_model(), random_ids(9), batch_size=0)


@pytest.mark.parametrize("part", ["self_attn.q_proj", "mlp.down_proj"])
def test_weights_that_are_not_finite_are_reported(part: str) -> None:
    model = tiny_model(num_hidden_layers=1)
    nn.init.constant_(model.model.layers[0].get_submodule(part).weight, math.nan)
    with pytest.raises(ValueError, match=r"hidden states of LexForCausalLM are not all finite .*weights"):
        measure_resolution(model, random_ids(9), progress=False)

"""Position schemes: golden values, every scheme with every pattern and layout, gradients, files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference
from helpers.models import (
    PATTERNS,
    SCHEMES,
    cuts,
    dense_logits,
    enable_checkpointing,
    logits_of,
    pattern_fields,
    random_ids,
    read_in_pieces,
    scheme_fields,
    settings_of,
    tiny_model,
)
from helpers.processes import run_without_lex_hf
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lex_hf import LexConfig, LexForCausalLM
from lex_hf.model.biases_lex import T5Scheme
from lex_hf.model.positions_lex import SCHEMES as TABLE

quick = hypothesis_settings(max_examples=60)


def model_of(scheme: dict[str, Any], pattern: dict[str, Any]) -> LexForCausalLM:
    return tiny_model(dtype=torch.float64, **(pattern | scheme))


def test_every_scheme_is_tested() -> None:
    assert {fields["position_embedding_type"] for fields in SCHEMES} | {"xpos", "rope"} == set(TABLE)


@quick
@given(scheme=scheme_fields, pattern=pattern_fields, pieces=cuts, length=st.integers(1, 44))
def test_at_once_in_pieces_and_token_by_token(
    scheme: dict[str, Any], pattern: dict[str, Any], pieces: list[int], length: int
) -> None:
    model, ids = model_of(scheme, pattern), random_ids(2, length)
    expected = torch.stack([dense_logits(model, row) for row in ids])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-9, rtol=0)
    for cut in ([*pieces, length], [1] * length):
        torch.testing.assert_close(read_in_pieces(model, ids, cut), expected, atol=1e-9, rtol=0)


@quick
@given(scheme=scheme_fields, pattern=pattern_fields, pieces=cuts, data=st.data())
def test_padding_changes_nothing_at_once_and_in_pieces(
    scheme: dict[str, Any], pattern: dict[str, Any], pieces: list[int], data: st.DataObject
) -> None:
    model, width = model_of(scheme, pattern), data.draw(st.integers(1, 44), label="width")
    length = data.draw(st.integers(1, width))
    places = [
        range(width - length, width),
        range(length),
        sorted(data.draw(st.sets(st.integers(0, width - 1), min_size=1))),
    ]
    ids, mask = torch.zeros(2, 3, width, dtype=torch.long)
    for row, place in enumerate(places):
        ids[row, list(place)], mask[row, list(place)] = random_ids(len(place), seed=row), 1
    with torch.no_grad():
        at_once = model(ids, attention_mask=mask, use_cache=False).logits
    for logits in (at_once, read_in_pieces(model, ids, [*pieces, width], mask)):
        assert logits.isfinite().all()
        for row, place in enumerate(places):
            expected = dense_logits(model, ids[row, list(place)])
            torch.testing.assert_close(logits[row, list(place)], expected, atol=1e-9, rtol=0)


@quick
@given(scheme=scheme_fields, pattern=pattern_fields, lengths=st.lists(st.integers(1, 30), min_size=2, max_size=4))
def test_packed_documents_know_nothing_of_each_other(
    scheme: dict[str, Any], pattern: dict[str, Any], lengths: list[int]
) -> None:
    model, texts = model_of(scheme, pattern), [random_ids(n, seed=n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        logits = model(torch.cat(texts)[None], position_ids=positions).logits[0]
    expected = torch.cat([dense_logits(model, text) for text in texts])
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_of_every_parameter(scheme: dict[str, Any], pattern: dict[str, Any]) -> None:
    model, ids = model_of(scheme, pattern).train(), random_ids(33)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = reference.forward(weights, ids, settings_of(model))
    torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
    for checkpointing in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if checkpointing:
            enable_checkpointing(model, **checkpointing)
        model.zero_grad()
        logits = model(ids[None]).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
        for name, parameter in model.named_parameters():
            gradient = weights[name].grad
            message = f"{name}, {checkpointing=}"
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-9, rtol=1e-9, msg=message)
            if ".positions." in name or ".relative." in name:
                assert gradient is not None
                assert gradient.any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved_and_loaded_schemes_are_the_same(tmp_path: Path, scheme: dict[str, Any]) -> None:
    model = tiny_model(**scheme)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.processes
def test_every_scheme_loads_without_lex_hf(tmp_path: Path) -> None:
    for index, scheme in enumerate(SCHEMES):
        model = tiny_model(**scheme)
        model.save_pretrained(tmp_path / str(index))
        torch.save(logits_of(model), tmp_path / f"{index}.pt")
    code = f"""
    import torch
    from transformers import AutoModelForCausalLM
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    for index in range({len(SCHEMES)}):
        folder = {str(tmp_path)!r} + f"/{{index}}"
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        expected = torch.load(folder + ".pt", weights_only=True)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected), index
    """
    result = run_without_lex_hf(code, tmp_path / "home")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_half_precision_and_autocast(scheme: dict[str, Any], dtype: torch.dtype) -> None:
    model, ids = tiny_model(**scheme), random_ids(2, 40)
    with torch.no_grad():
        expected = model(ids).logits
        with torch.autocast("cpu", dtype=dtype):
            mixed = model(ids).logits
        half = tiny_model(dtype=dtype, **scheme)(ids).logits
    scale = expected.std()
    for logits in (mixed, half):
        assert (logits.float() - expected).abs().mean() < 0.05 * scale


BIASES = [
    ({"position_embedding_type": "alibi"}, "alibi_press_h{H}"),
    ({"position_embedding_type": "alibi", "alibi_slopes": "geometric"}, "alibi_chi_h{H}"),
    ({"position_embedding_type": "sandwich"}, "sandwich_i1_d128_h{H}"),
    ({"position_embedding_type": "sandwich", "sandwich_first_index": 0}, "sandwich_i0_d128_h{H}"),
    ({"position_embedding_type": "smoothed_sandwich"}, "smoothed_paper_h{H}"),
    (
        {"position_embedding_type": "smoothed_sandwich", "smoothed_sandwich_fit": "points"},
        "smoothed_fit50_i1_d128_h{H}",
    ),
    (
        {
            "position_embedding_type": "smoothed_sandwich",
            "smoothed_sandwich_fit": "points",
            "sandwich_first_index": 0,
        },
        "smoothed_fit50_i0_d128_h{H}",
    ),
    ({"position_embedding_type": "t5"}, "t5_h{H}"),
    ({"position_embedding_type": "kerple"}, "kerple_log_h{H}"),
    ({"position_embedding_type": "kerple", "kerple_variant": "power"}, "kerple_power_h{H}"),
    ({"position_embedding_type": "xpos"}, None),
    ({"position_embedding_type": "learned"}, None),
]


@pytest.mark.parametrize("heads", [8, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("fields", "name"), BIASES)
def test_biases_match_the_golden_values(
    golden: Path, fields: dict[str, Any], name: str | None, heads: int, dtype: torch.dtype
) -> None:
    stored = load_file(golden / "position_bias.safetensors")
    model = tiny_model(hidden_size=heads * 2, num_attention_heads=heads, dtype=torch.float64, **fields)
    kind = None if name is None else name.format(H=heads)
    with torch.no_grad():
        if fields["position_embedding_type"] == "t5":
            model.model.positions.relative_attention_bias.weight.copy_(stored[f"t5_table_h{heads}"])
        if fields["position_embedding_type"] == "kerple":
            variant = kind.removesuffix(f"_h{heads}")
            model.model.positions.r1.copy_(stored[f"{variant}_r1_h{heads}"])
            model.model.positions.r2.copy_(stored[f"{variant}_r2_h{heads}"])
    bias = model.to(dtype).position_bias(torch.tensor([63]), torch.arange(64))[:, 0]
    expected = torch.zeros(heads, 64, dtype=torch.float64) if kind is None else stored[kind]
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-9, "rtol": 0}
    assert bias.dtype == dtype
    torch.testing.assert_close(bias.double(), expected.double(), **tolerance)


@pytest.mark.parametrize("variant", ["log", "power"])
def test_kerple_stays_in_range(golden: Path, variant: str) -> None:
    stored = load_file(golden / "position_bias.safetensors")
    fields = {"position_embedding_type": "kerple", "kerple_variant": variant}
    model = tiny_model(hidden_size=16, num_attention_heads=8, dtype=torch.float64, **fields)
    names = sorted(name for name in stored if name.startswith(f"kerple_{variant}_clamp"))
    parameters = {name.split("_")[3]: stored[name] for name in names if "_r" in name}
    with torch.no_grad():
        model.model.positions.r1.copy_(parameters["r1"])
        model.model.positions.r2.copy_(parameters["r2"])
    bias = model.position_bias(torch.tensor([63]), torch.arange(64))[:, 0]
    torch.testing.assert_close(bias, stored[f"kerple_{variant}_clamp_h8"].double(), atol=1e-9, rtol=0)


def test_t5_buckets_are_exact(golden: Path) -> None:
    stored = load_file(golden / "position_bias.safetensors")
    scheme = T5Scheme(LexConfig(position_embedding_type="t5"))
    assert torch.equal(scheme.buckets(torch.arange(601)), stored["t5_bucket_by_distance_0_600"])


@pytest.mark.parametrize("variant", ["log", "power"])
def test_learned_schemes_are_initialised_as_their_code_does(variant: str) -> None:
    torch.manual_seed(0)
    fields = {"hidden_size": 2000, "num_attention_heads": 1000, "num_hidden_layers": 1, "vocab_size": 9}
    tokens = {"bos_token_id": None, "eos_token_id": None, "intermediate_size": 2}
    kerple = LexConfig(position_embedding_type="kerple", kerple_variant=variant, **fields, **tokens)
    scheme = LexForCausalLM(kerple).model.positions
    for parameter, high in (
        (scheme.r1, 2.0 if variant == "log" else 1.0),
        (scheme.r2, 1.0 if variant == "log" else 2.0),
    ):
        assert 0 <= parameter.min() < 0.05 * high
        assert 0.95 * high < parameter.max() <= high
        assert parameter.mean().item() == pytest.approx(high / 2, rel=0.1)
    t5 = LexForCausalLM(LexConfig(position_embedding_type="t5", **fields, **tokens)).model.positions
    assert t5.relative_attention_bias.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_learned_positions_end_with_an_error() -> None:
    model = tiny_model(position_embedding_type="learned")
    with torch.no_grad():
        cache = model(random_ids(1, 14)).past_key_values
        message = r"end at 14 tokens \(training_length\), and this text reaches 15"
        with pytest.raises(ValueError, match=message):
            model(random_ids(1, 1), past_key_values=cache)
        with pytest.raises(ValueError, match=message):
            model(random_ids(1, 15))
        # Padding takes no positions.
        mask = (torch.arange(40) >= 26).long()[None]
        assert model(random_ids(1, 40), attention_mask=mask).logits.isfinite().all()
    with pytest.raises(ValueError, match="this text reaches 15"):
        model.generate(random_ids(1, 10), max_new_tokens=10, do_sample=False)


@pytest.mark.parametrize("scheme", [{"position_embedding_type": "alibi"}, {"position_embedding_type": "sandwich"}])
def test_a_window_larger_than_the_training_length_serves_a_model_trained_with_full_attention(
    tmp_path: Path, scheme: dict[str, Any]
) -> None:
    """The efficient inference of the Sandwich paper, Appendix B: the same weights, a cache of w tokens."""
    tiny_model(attention_pattern="full", dtype=torch.float64, **scheme).save_pretrained(tmp_path)
    full = AutoModelForCausalLM.from_pretrained(tmp_path)
    windowed = AutoModelForCausalLM.from_pretrained(tmp_path, attention_pattern="sliding", sliding_window=40)
    ids = random_ids(1, 60)
    with torch.no_grad():
        expected, logits = full(ids).logits, read_in_pieces(windowed, ids, [50] + [1] * 10)
    torch.testing.assert_close(logits[:, :40], expected[:, :40], atol=1e-9, rtol=0)
    assert (logits[:, 40:] - expected[:, 40:]).abs().max() > 1e-3


BAD_FIELDS = [
    ({"alibi_slopes": "steep"}, "alibi", "alibi_slopes = 'steep': it must be one of"),
    ({"t5_num_buckets": 7}, "t5", "t5_num_buckets = 7: it must be even"),
    ({"t5_max_distance": 16}, "t5", "t5_max_distance = 16: it must exceed t5_num_buckets / 2 = 16"),
    ({"shaw_max_distance": 0}, "shaw", "shaw_max_distance = 0: it must be at least 1"),
    ({"kerple_variant": "sin"}, "kerple", "kerple_variant = 'sin'"),
    ({"sandwich_dim": 5}, "sandwich", "sandwich_dim = 5: it must be even"),
    ({"sandwich_first_index": 2}, "smoothed_sandwich", "sandwich_first_index = 2"),
    ({"smoothed_sandwich_fit": "eye"}, "smoothed_sandwich", "smoothed_sandwich_fit = 'eye'"),
    ({"hidden_size": 15, "num_attention_heads": 3}, "sinusoidal", "hidden_size = 15: it must be even"),
]


@pytest.mark.parametrize(("fields", "scheme", "message"), BAD_FIELDS)
def test_bad_fields_are_refused(fields: dict[str, Any], scheme: str, message: str) -> None:
    with pytest.raises(StrictDataclassError, match=message):
        LexConfig(position_embedding_type=scheme, **fields)


def test_schemes_that_do_not_turn_take_odd_heads() -> None:
    assert tiny_model(hidden_size=27, position_embedding_type="alibi")(random_ids(1, 5)).logits.isfinite().all()


def test_vectors_have_no_bias_by_position() -> None:
    model, places = tiny_model(position_embedding_type=["alibi", "shaw"]), torch.arange(3)
    assert model.position_bias(places, places).any()
    with pytest.raises(ValueError, match=r"'shaw' adds what depends on the queries.*measure_resolution"):
        model.position_bias(places, places, layer=1)


def test_layers_with_schemes_of_their_own(tmp_path: Path) -> None:
    """One name for all layers is that name; several have their biases and parameters under their names."""
    ids, places = random_ids(2, 40), torch.arange(20)
    alone = {name: tiny_model(position_embedding_type=name) for name in ("alibi", "kerple")}
    uniform = tiny_model(position_embedding_type=["kerple", "kerple"])
    uniform.load_state_dict(alone["kerple"].state_dict())
    assert torch.equal(uniform(ids).logits, alone["kerple"](ids).logits)
    mixed = tiny_model(position_embedding_type=["alibi", "kerple"])
    with torch.no_grad():
        for name in ("r1", "r2"):
            mixed.get_parameter(f"model.positions.kerple.{name}").copy_(
                alone["kerple"].get_parameter(f"model.positions.{name}")
            )
    for layer, name in enumerate(alone):
        assert torch.equal(mixed.position_bias(places, places, layer), alone[name].position_bias(places, places))
    mixed.save_pretrained(tmp_path)
    assert torch.equal(LexForCausalLM.from_pretrained(tmp_path)(ids).logits, mixed(ids).logits)

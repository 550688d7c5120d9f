"""Packed weights: the product is that of the weights they stand for, and what they cannot do is a sentence."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calls import Calls
from helpers.models import needs_whole_graphs, random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer
from typer.testing import CliRunner

import lex_hf
from lex_hf import PackedWeightsConfig
from lex_hf.cli.commands import app
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.loading import load_for_evaluation
from lex_hf.evaluation.perplexity import compute_perplexity
from lex_hf.inference import packed_weights
from lex_hf.inference.cache_files import load_cache, save_cache
from lex_hf.inference.packed_weights import PACKINGS, PackedLinear, pack_weights

ROUNDED = 2**-8  # from one number in bfloat16 to the next, relative to it at most
CONFIGS = [PackedWeightsConfig(8), PackedWeightsConfig(4), PackedWeightsConfig(4, group_size=128)]
KERNELS = {8: "aten._weight_int8pack_mm.default", 4: "aten._weight_int4pack_mm_for_cpu.default"}


def linear(inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(inputs + 97 * outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def check_product(layer: PackedLinear, states: torch.Tensor) -> None:
    """Compare with the product of rounded states and the weights that count, in float64."""
    weight = layer.packing.unpack(layer.packed, layer.scales, layer.in_features)[: layer.out_features].double()
    rounded = states.bfloat16().double()
    expected, magnitude = rounded @ weight.T, rounded.abs() @ weight.abs().T
    if layer.bias is not None:
        expected, magnitude = expected + layer.bias.double(), magnitude + layer.bias.double().abs()
    with torch.no_grad():
        output = layer(states)
    assert (output.shape, output.dtype) == (expected.shape, states.dtype)
    # Outputs are rounded to bfloat16 and then to the dtype of the states, and some CPUs round weights to bfloat16.
    assert bool(((output.double() - expected).abs() <= ROUNDED * (2 * expected.abs() + magnitude) + 1e-6).all())


@settings(max_examples=60)
@given(
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 150),
    rows=st.lists(st.integers(0, 4), max_size=3),
    config=st.sampled_from(CONFIGS),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_product_is_that_of_the_weights_that_count(
    inputs: int, outputs: int, rows: list[int], config: PackedWeightsConfig, bias: bool, dtype: torch.dtype
) -> None:
    layer = PackedLinear(linear(inputs, outputs, bias, dtype), config)
    check_product(layer, torch.randn(*rows, inputs).to(dtype))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("by_row", [True, False])
def test_many_rows_have_the_same_product(
    config: PackedWeightsConfig, by_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "PART", 128 * 64)  # several parts, the last of them smaller
    monkeypatch.setattr(packed_weights, "multiplies_by_row", lambda dtype: by_row)
    layer = PackedLinear(linear(70, 200), config)
    states = torch.randn(layer.packing.many, 70)
    with Calls() as calls:
        check_product(layer, states)
    assert KERNELS[config.bits] not in calls.names
    with torch.no_grad():
        one_by_one = torch.cat([layer(row[None]) for row in states])
        difference = (layer(states) - one_by_one).abs()
    assert bool((difference <= 4 * ROUNDED * one_by_one.abs().amax(dim=1, keepdim=True)).all())


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_are_rounded_to_the_nearest(config: PackedWeightsConfig) -> None:
    source = linear(64, 30)
    layer = PackedLinear(source, config)
    groups = [source.weight] if config.bits == 8 else source.weight.split(config.group_size, dim=1)
    rounded = [layer.weight] if config.bits == 8 else layer.weight.split(config.group_size, dim=1)
    assert layer.weight.dtype == torch.float32
    for group, found in zip(groups, rounded, strict=True):
        if config.bits == 8:
            step = group.abs().amax(dim=1, keepdim=True) / 127
        else:
            step = (group.amax(dim=1, keepdim=True) - group.amin(dim=1, keepdim=True)) / 15
        # Steps and middles are rounded to bfloat16: the ends of the grid may lie that much too low.
        assert bool(((found - group).abs() <= step * (0.5 + 16 * ROUNDED * (16 / 2 ** (8 - config.bits)))).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_of_equal_weights(bits: int) -> None:
    source = nn.Linear(96, 5)
    nn.init.zeros_(source.weight)
    with torch.no_grad():
        source.weight[1] = 0.375
        source.weight[2, :32] = -2.0
    torch.testing.assert_close(
        PackedLinear(source, PackedWeightsConfig(bits)).weight, source.weight, rtol=5e-3, atol=0
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_one_row_is_multiplied_by_the_packed_product(bits: int) -> None:
    layer = PackedLinear(linear(64, 64), PackedWeightsConfig(bits))
    with Calls() as calls, torch.no_grad():
        layer(torch.randn(1, 1, 64))
    assert KERNELS[bits] in calls.names


@needs_whole_graphs
@pytest.mark.parametrize("bits", [8, 4])
def test_compiles_to_one_graph(bits: int) -> None:
    layer, states = PackedLinear(linear(70, 90), PackedWeightsConfig(bits)), torch.randn(2, 3, 70)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(states), layer(states))


def save(folder: Path, **fields: Any) -> Path:
    ids = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    model = tiny_model(hidden_size=96, intermediate_size=128, **ids, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.3 if parameter.dim() > 1 else 1.0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_is_loaded_with_packed_weights(bits: int, tied: bool, tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=tied)
    config = PackedWeightsConfig(bits)
    whole, packed = (
        AutoModelForCausalLM.from_pretrained(tmp_path, **given) for given in ({}, {"quantization_config": config})
    )
    layers = [name for name, module in packed.named_modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 2 * 6 + 1
    assert not any(type(module) is nn.Linear for module in packed.modules())
    assert torch.equal(packed.get_input_embeddings().weight, whole.get_input_embeddings().weight)
    assert packed.config.quantization_config.to_dict() == config.to_dict()

    # It computes what the model with the rounded weights does.
    for name in layers:
        whole.get_submodule(name).weight = nn.Parameter(packed.get_submodule(name).weight)
    ids = random_ids(2, 40)
    with torch.no_grad():
        logits, expected = packed(ids).logits, whole(ids).logits
    assert float((logits - expected).std() / expected.std()) < 0.03
    assert logits.dtype == torch.float32
    some = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=PackedWeightsConfig(bits, modules_to_not_convert=["lm_head", "layers.1.mlp.up_proj"]),
    )
    left = [name for name, module in some.named_modules() if isinstance(module, nn.Linear)]
    assert left == ["model.layers.1.mlp.up_proj", "lm_head"]


def test_other_models_are_packed_and_read_in_blocks() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    expected = lex_hf.blockwise(copy.deepcopy(llama), 16)
    for bits, error in ((8, 0.03), (4, 0.3)):
        packed = lex_hf.blockwise(pack_weights(copy.deepcopy(llama), PackedWeightsConfig(bits)), 16)
        ids = random_ids(1, 70)
        with torch.no_grad():
            logits, whole = packed(ids).logits, expected(ids).logits
        assert 0 < float((logits - whole).std() / whole.std()) < error
        assert packed.generate(ids, max_new_tokens=20, do_sample=False).shape == (1, 90)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity_stays_close(dtype: str, tmp_path: Path) -> None:
    text, found = ["It was a dark evening in November, and the old man went home. " * 5], {}
    save(tmp_path)
    for name, options in {
        "whole": {},
        "int8": {"quantization_config": PackedWeightsConfig(8)},
        "int4": {"quantization_config": PackedWeightsConfig(4)},
    }.items():
        model, tokenizer = load_for_evaluation(str(tmp_path), device="cpu", dtype=dtype, **options)
        result = compute_perplexity(model, tokenizer, text, length=64, progress=False)
        found[name] = result.perplexity
    assert found["int8"] != found["whole"]
    assert found["int8"] == pytest.approx(found["whole"], rel=0.02)
    assert found["int4"] == pytest.approx(found["whole"], rel=0.2)


def test_caches_belong_to_packed_weights(tmp_path: Path) -> None:
    save(tmp_path / "model")
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=PackedWeightsConfig(bits))
        for bits in (8, 4)
    ]
    with torch.no_grad():
        cache = models[0](random_ids(1, 20)).past_key_values
    save_cache(cache, models[0], tmp_path / "cache.safetensors")
    assert load_cache(tmp_path / "cache.safetensors", models[0]).get_seq_length() == 20
    with pytest.raises(ValueError, match="was written by another model: its weights"):
        load_cache(tmp_path / "cache.safetensors", models[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits = 3: packed weights have 8 or 4 bits"),
        ({"bits": 4, "group_size": 48}, "group_size = 48: it must be one of 32, 64, 128, 256"),
    ],
)
def test_impossible_configurations(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedWeightsConfig(**fields)


def test_gradients_are_refused() -> None:
    model = pack_weights(tiny_model())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model(random_ids(1, 5))
    states = model.get_input_embeddings()(random_ids(1, 5)).requires_grad_()
    with pytest.raises(
        ValueError, match=r"Weights of 8 bits have no gradients.*load the model without quantization_config"
    ):
        model(inputs_embeds=states)
    with pytest.raises(ValueError, match="fine-tun"):
        Trainer(model)


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (lambda model: model.to("meta"), r"stays on the CPU and in its dtype.*on meta"),
        (lambda model: model.to(torch.float16), r"cannot be moved to torch.float16 on cpu"),
        (
            lambda model: model.save_pretrained("/nowhere"),
            r"not saved: their layout is that of this CPU\. Save the model",
        ),
    ],
)
def test_what_packed_weights_cannot_do(move: Any, message: str) -> None:
    model = pack_weights(tiny_model(), PackedWeightsConfig(4))
    with pytest.raises(ValueError, match=message):
        move(model)


def test_a_packed_model_stays_as_it_is() -> None:
    model = pack_weights(tiny_model(), PackedWeightsConfig(4))
    logits = model(random_ids(1, 5)).logits
    for same in (model.to("cpu"), copy.deepcopy(model), model.eval()):
        assert torch.equal(same(random_ids(1, 5)).logits, logits)


@pytest.mark.parametrize("device_map", ["cuda", {"": "cuda:0"}, {"model": "cpu", "lm_head": "disk"}])
def test_other_devices_are_refused_before_loading(device_map: Any, tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ValueError, match="products with packed weights run on CPUs; leave it out"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=PackedWeightsConfig(), device_map=device_map
        )


def test_weights_that_cannot_be_packed_are_named() -> None:
    for dtype in (torch.float64, torch.float32):
        model = tiny_model(dtype=dtype)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[2, 3] = torch.nan
        before = copy.deepcopy(model.state_dict())
        name = "model.layers.0.self_attn.q_proj" if dtype == torch.float64 else "model.layers.1.mlp.up_proj"
        with pytest.raises(ValueError, match=rf"{name} has weights"):
            pack_weights(model)
        assert list(model.state_dict()) == list(before)
        assert any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="has no linear layers to pack"):
        pack_weights(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=7)).transformer)


def test_a_checkpoint_that_says_it_is_packed_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "config.json"
    content = path.read_text()
    path.write_text(content.replace("{", '{"quantization_config": {"quant_method": "packed_weights", "bits": 8},', 1))
    with pytest.raises(ValueError, match="packed weights are never saved: remove quantization_config"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_commands_take_weights(tmp_path: Path) -> None:
    folder, text = save(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("It was a dark evening in November. " * 9)
    runner = CliRunner()
    generate = ["generate", str(folder), "It was", "--greedy", "--max-new-tokens", "5", "--json"]
    evaluate = ["evaluate", str(folder), str(text), "--length", "32", "--json"]
    for command in (generate, evaluate):
        outputs = set()
        for options in ([], ["--weights", "int8"], ["--weights", "int4", "--dtype", "bfloat16"]):
            result = runner.invoke(app, [*command, *options])
            assert result.exit_code == 0, result.output
            outputs.add(result.stdout)
        assert len(outputs) > 1
    for options, message in (
        (["--weights", "int2"], "--weights int2: it must be int8 or int4"),
        (["--weights", "int8", "--device", "cuda"], "leave out --device cuda"),
    ):
        result = runner.invoke(app, [*generate, *options])
        assert result.exit_code == 1
        assert message in " ".join(result.output.split())


def test_all_bits_have_a_kernel() -> None:
    assert set(PACKINGS) == set(KERNELS)

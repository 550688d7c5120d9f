"""Saving and loading: Auto classes, with and without lex_hf installed, meta device, dtypes, shards."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.models import logits_of, tiny_model
from helpers.processes import run_without_lex_hf
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import lex_hf
from lex_hf import LexConfig, LexForCausalLM, LexModel
from lex_hf.model.scheme_lex import PositionScheme

PACKAGE = Path(lex_hf.__file__).parent / "model"


@pytest.mark.parametrize("tied", [False, True])
def test_auto_classes_load_what_was_saved(tmp_path: Path, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, LexForCausalLM)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LexConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), LexModel)
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_a_pattern_can_be_chosen_when_loading(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    full = AutoModelForCausalLM.from_pretrained(tmp_path, attention_pattern="full")
    assert torch.equal(logits_of(full), logits_of(tiny_model(attention_pattern="full")))


def test_lists_of_patterns_and_schemes_are_saved_with_the_model(tmp_path: Path) -> None:
    lists = {"attention_pattern": ["blockwise", "full"], "position_embedding_type": ["alibi", "none"]}
    model = tiny_model(**lists, full_attention_log_scaling=True)
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert {name: stored[name] for name in lists} == lists
    assert AutoConfig.from_pretrained(tmp_path).layer_schemes == ["alibi", "none"]
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(model))
    in_blocks = AutoModelForCausalLM.from_pretrained(
        tmp_path, attention_pattern="blockwise", position_embedding_type=["none", "none"]
    )
    expected = tiny_model(position_embedding_type="none", attention_pattern="blockwise")
    assert torch.equal(logits_of(in_blocks), logits_of(expected))


def test_shards_load(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path)), logits_of(model))


def test_meta_device_and_casts_leave_derived_tensors_right(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = LexForCausalLM(model.config)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(logits_of(empty.eval()), logits_of(model))
    expected = logits_of(tiny_model(dtype=torch.bfloat16))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(logits_of(loaded), expected)
    for cast in (model.to(torch.bfloat16), model.half().bfloat16()):
        places = torch.arange(9)
        rotation = cast.model.positions.rotation(places, places, 7, torch.bfloat16)
        assert {factors.dtype for factors in (rotation.query, rotation.key, rotation.decay)} == {torch.float32}
    # A model that went through float16 lost precision in its weights, but none in its positions.
    assert torch.equal(
        logits_of(loaded.float()),
        logits_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float()),
    )
    assert not list(model.buffers())


def test_initialisation_follows_the_config() -> None:
    torch.manual_seed(0)
    model = LexForCausalLM(
        LexConfig(**{**tiny_model().config.to_dict(), "hidden_size": 300, "initializer_range": 0.05})
    )
    assert model.model.layers[0].self_attn.q_proj.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.02)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


def test_parameters_have_the_names_that_tools_look_for() -> None:
    names = {re.sub(r"\.\d+\.", ".N.", name) for name in tiny_model().state_dict()}
    layer = [f"self_attn.{p}_proj" for p in "qkvo"] + ["mlp.up_proj", "mlp.down_proj"]
    layer += ["input_layernorm", "post_attention_layernorm"]
    both = [f"model.layers.N.{name}" for name in layer] + ["model.norm"]
    expected = {f"{name}.{kind}" for name in both for kind in ("weight", "bias")}
    assert names == expected | {"model.embed_tokens.weight", "lm_head.weight"}


def test_exactly_the_hub_files_are_saved(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == {path.name for path in PACKAGE.glob("*_lex.py")}
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModel"] == "modeling_lex.LexModel"
    allowed = {"torch", "transformers", "huggingface_hub", "__future__"} | set(sys.stdlib_module_names)
    for path in tmp_path.glob("*.py"):
        for module in re.findall(r"^\s*(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE):
            assert module.startswith(".") or module.split(".")[0] in allowed, (path.name, module)


@pytest.mark.processes
def test_loading_without_lex_hf(tmp_path: Path) -> None:
    mixed = {"attention_pattern": ["blockwise", "full"], "position_embedding_type": ["xpos", "none"]}
    models = [
        tiny_model(),
        tiny_model(position_embedding_type="rope", attention_pattern=["full", "sliding"]),
        tiny_model(**mixed, block_length=3, full_attention_log_scaling=True),
    ]
    folders = [tmp_path / str(number) for number in range(len(models))]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
        torch.save(logits_of(model), folder / "expected.pt")
    code = f"""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM
    try:
        import lex_hf
    except ModuleNotFoundError:
        pass
    else:
        raise SystemExit("lex_hf can be imported")
    for folder in {[str(folder) for folder in folders]}:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, 97, (2, 40), generator=generator)
        expected = torch.load(folder + "/expected.pt", weights_only=True)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected), folder
        tokens = model.generate(ids[:, :9], max_new_tokens=30, do_sample=False)
        assert torch.equal(tokens, model.generate(ids[:, :9], max_new_tokens=30, do_sample=False, use_cache=False))
        assert type(AutoModel.from_pretrained(folder, trust_remote_code=True)).__name__ == "LexModel"
        model.save_pretrained(folder + "/again")
    """
    result = run_without_lex_hf(code, tmp_path / "home")
    assert result.returncode == 0, result.stderr
    # What was loaded from code in the folder can be saved again, code included.
    for model, folder in zip(models, folders, strict=True):
        again = folder / "again"
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(again)), logits_of(model))
        assert {path.name for path in again.glob("*.py")} == {path.name for path in PACKAGE.glob("*_lex.py")}


@pytest.mark.processes
def test_without_trust_the_error_says_what_to_do(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    code = f"""
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r})
    """
    result = run_without_lex_hf(code, tmp_path / "home")
    assert result.returncode != 0
    assert "trust_remote_code=True" in result.stderr


@pytest.mark.processes
def test_importing_the_package_is_light() -> None:
    heavy = ("matplotlib", "datasets", "evaluate", "typer")
    code = f"import sys, lex_hf; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_metric_path_names_what_exists() -> None:
    assert (Path(lex_hf.metric_path()) / "perplexity.py").is_file()
    with pytest.raises(ValueError, match="no metric 'bleu'; there are: perplexity"):
        lex_hf.metric_path("bleu")


def test_the_base_scheme_does_nothing() -> None:
    scheme, states = PositionScheme(tiny_model().config), torch.ones(1, 2, 30)
    assert scheme.embed(states, torch.arange(2)) is states
    assert scheme.rotation(torch.arange(2), torch.arange(2), None, states.dtype).query is None
    assert scheme.bias(torch.arange(2), torch.arange(2), 2, torch.float32) is None

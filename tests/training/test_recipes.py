"""Recipes: those that come with the package say what the papers print; bad ones are refused; what a training takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import random_ids, tiny_model
from huggingface_hub.errors import StrictDataclassError
from torch.utils.flop_counter import FlopCounterMode

from lex_hf import LexForCausalLM
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.reproduce.recall_systems import hybrid
from lex_hf.reproduce.tiny import tiny_config
from lex_hf.training.arguments import training_arguments
from lex_hf.training.estimate import activation_bytes, count_saved_bytes, estimate, visible_keys
from lex_hf.training.recipe_files import lex_optimizer, recipe_names
from lex_hf.training.recipes import DataSettings, load_recipe


class TestShipped:
    def test_names(self) -> None:
        assert recipe_names() == ["fine-tune", "gpt-medium", "hybrid", "sandwich-162m", "small", "tiny"]

    @pytest.mark.parametrize("name", recipe_names())
    def test_all_values_are_possible(self, name: str) -> None:
        recipe = load_recipe(name)
        recipe.check_training()
        if recipe.model:
            assert recipe.config().vocab_size == recipe.model["vocab_size"]
        again = load_recipe(name).to_yaml()
        assert again == recipe.to_yaml()

    def test_gpt_medium_is_the_paper_s(self) -> None:
        recipe = load_recipe("gpt-medium")
        config, told = recipe.config(), recipe.estimate(recipe.config(), 16)
        assert (config.num_hidden_layers, config.hidden_size) == (24, 1024)
        assert (config.intermediate_size, config.num_attention_heads) == (4096, 16)
        assert (config.position_embedding_type, config.xpos_scale_base, config.training_length) == ("xpos", 512, 1024)
        assert config.attention_span("blockwise") == 512
        arguments = training_arguments("plan", **(recipe.training | {"bf16": False}))
        assert (arguments.max_steps, arguments.get_warmup_steps(50_000)) == (50_000, 20_000)
        assert (arguments.learning_rate, arguments.lr_scheduler_type.value) == (3e-4, "polynomial")
        assert arguments.lr_scheduler_kwargs == {"lr_end": 0.0, "power": 1.0}
        assert (arguments.adam_beta1, arguments.adam_beta2, arguments.adam_epsilon) == (0.9, 0.98, 1e-6)
        assert (arguments.max_grad_norm, arguments.weight_decay) == (2.0, 0.01)
        assert (told.examples_per_step, told.tokens_per_step) == (512, 2**19)

    def test_sandwich_162m_is_the_paper_s(self) -> None:
        recipe = load_recipe("sandwich-162m")
        config, told = recipe.config(), recipe.estimate(recipe.config(), 1)
        assert (config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (12, 12, 64)
        assert round(told.parameters, -6) == 162_000_000
        assert (config.position_embedding_type, config.attention_pattern) == ("sandwich", "full")
        assert (config.training_length, config.sandwich_dim) == (512, 128)
        assert (told.steps, told.examples_per_step, told.tokens_per_step) == (50_000, 32, 32 * 512)
        assert (recipe.training["learning_rate"], recipe.training["bf16"]) == (6e-4, True)

    def test_small_fits_one_gpu(self) -> None:
        recipe = load_recipe("small")
        told = recipe.estimate(recipe.config(), 1)
        assert 10_000_000 < told.parameters < 30_000_000
        assert told.memory.total < 8 * 2**30

    def test_hybrid_is_small_with_the_layers_of_the_study(self) -> None:
        small, recipe = load_recipe("small"), load_recipe("hybrid")
        config = recipe.config()
        layers = hybrid(4, "none", config.num_hidden_layers)
        assert {name: recipe.model[name] for name in layers} == layers
        assert (config.block_length, config.full_attention_log_scaling) == (config.training_length // 8, True)
        own = {*layers, "block_length", "full_attention_log_scaling"}
        assert {name: value for name, value in recipe.model.items() if name not in own} == {
            name: value for name, value in small.model.items() if name not in own
        }
        assert (recipe.training, recipe.data) == (small.training, small.data)
        assert recipe.estimate(config, 1).memory.total < 8 * 2**30

    def test_tiny_is_the_experiments_model(self) -> None:
        recipe = load_recipe("tiny")
        assert recipe.config(byte_tokenizer()).to_dict() == tiny_config("xpos").to_dict()
        rope = recipe.override(["position_embedding_type=t5"])
        assert rope.config().to_dict() == tiny_config("t5").to_dict()
        arguments = recipe.arguments("plan")
        assert (arguments.max_steps, arguments.get_warmup_steps(1500)) == (1500, 100)
        assert (arguments.learning_rate, arguments.per_device_train_batch_size) == (2e-3, 16)
        config = tiny_config("xpos")
        assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (4, 96, 4)
        assert (config.intermediate_size, config.training_length, config.xpos_scale_base) == (384, 128, 64)
        assert (config.t5_max_distance, config.t5_scaled, config.vocab_size) == (32, True, 257)

    @pytest.mark.parametrize("name", ["fine-tune", "small", "hybrid", "tiny"])
    def test_the_optimiser_is_the_paper_s(self, name: str) -> None:
        told, paper = load_recipe(name).training, lex_optimizer()
        shared = [each for each in paper if each.startswith("adam_")] + ["weight_decay", "max_grad_norm"]
        assert len(shared) == 5
        assert {each: told[each] for each in shared} == {each: paper[each] for each in shared}

    @pytest.mark.parametrize(
        ("name", "steps", "warmup"),
        [
            ("tiny", 1500, 100),
            ("tiny", 1000, 66),
            ("tiny", 3, 0),
            ("gpt-medium", 50_000, 20_000),
            ("small", 3000, 300),
        ],
    )
    def test_the_warm_up_keeps_its_share(self, name: str, steps: int, warmup: int) -> None:
        assert load_recipe(name).warmup_steps(steps) == warmup


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("modle: {}", r"no section 'modle'; the closest that there is: 'model'"),
            ("model: {hiden_size: 3}", r"model has no field 'hiden_size'; the closest that there is: 'hidden_size'"),
            ("training: {learning_rat: 3}", r"training has no field 'learning_rat'.*'learning_rate'"),
            ("data: {lenght: 3}", r"data has no field 'lenght'.*'length'"),
            ("data: {qqqq: 3}", r"data has no field 'qqqq'; there are: tokenizer, length"),
            ("training: {output_dir: x}", r"output_dir does not belong in a recipe; use --output"),
            ("training: {gradient_accumulation_steps: 2}", r"use examples_per_step of data"),
            ("training: {max_steps: 2.5}", r"training.max_steps = 2.5 is float; it must be int"),
            ("training: {bf16: 1}", r"training.bf16 = 1 is int; it must be bool"),
            ("data: {streaming: yes}", r"data.streaming = 'yes' is str; it must be bool"),
            ("model: [1]", r"the section 'model' must hold fields"),
            ("- model", r"a recipe has the sections model, training, data; this is list"),
            ("model: {hidden_size: 3", r"invalid YAML"),
            ("model: {hidden_size: 3, hidden_size: 4}", r"duplicate key 'hidden_size'"),
            ("model: !!python/object/apply:os.getcwd []", r"invalid YAML"),
        ],
    )
    def test_bad_ones(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"mine\.yaml: .*{message}"):
            load_recipe(path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"model: {\xff\xfe}", "is not a recipe: it is not UTF-8 text \\(byte 8\\)"),
            (b"a: " + b"[" * 100_000 + b"]" * 100_000, "invalid YAML: maximum recursion"),
            (b"training: {max_steps: " + b"9" * 5000 + b"}", "invalid YAML: .*digits"),
            (b"training: {max_steps: " + b"9" * 30 + b"}", "training.max_steps = 9+ is too large a number"),
            (b"1: {}", "no section 1"),
            (b"data: {length: 0}", "data.length = 0: it must be at least 2"),
            (b"data: {examples_per_step: -1}", "data.examples_per_step = -1: it must be at least 1"),
        ],
    )
    def test_hostile_ones(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "mine.yaml"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_recipe(path)

    def test_a_folder_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").mkdir()
        with pytest.raises(ValueError, match=r"mine\.yaml is not a recipe"):
            load_recipe(tmp_path / "mine.yaml")

    def test_numbers_and_words(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yml"
        path.write_text("training: {adam_epsilon: 1e-6, learning_rate: 1, save_strategy: no, weight_decay: -.5E+1}\n")
        values = load_recipe(path).training
        assert values == {"adam_epsilon": 1e-6, "learning_rate": 1, "save_strategy": "no", "weight_decay": -5.0}

    def test_what_is_no_recipe(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no recipe 'gpt-medum'. Did you mean 'gpt-medium'"):
            load_recipe("gpt-medum")
        with pytest.raises(ValueError, match=r"is not a recipe.* name a recipe first: lex-hf train tiny"):
            load_recipe(tmp_path)

    def test_empty(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.touch()
        recipe = load_recipe(path)
        assert (recipe.model, recipe.training, recipe.data) == ({}, {}, DataSettings())


class TestOverrides:
    def test_reach_every_section(self) -> None:
        changes = ["hidden_size=64", "max_steps=7", "streaming=true", "model.use_cache=false", "length=32"]
        changes += ["attention_pattern=[full, full]", "position_embedding_type=[xpos, none]", "learning_rate=1e-4"]
        recipe = load_recipe("tiny").override(changes)
        assert (recipe.model["hidden_size"], recipe.model["use_cache"]) == (64, False)
        assert recipe.model["attention_pattern"] == ["full", "full"]
        assert recipe.model["position_embedding_type"] == ["xpos", "none"]
        assert (recipe.training["max_steps"], recipe.training["learning_rate"]) == (7, 1e-4)
        assert (recipe.data.streaming, recipe.data.length) == (True, 32)
        assert load_recipe("tiny").model["hidden_size"] == 96

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ("max_steps", "it must be NAME=VALUE"),
            ("max_step=3", "no field of a recipe is called 'max_step'; the closest that there is: 'max_steps'"),
            ("use_cache=true", "it may mean model.use_cache or training.use_cache"),
            ("data.hidden_size=3", "data has no field 'hidden_size'"),
        ],
    )
    def test_bad_ones(self, change: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_recipe("tiny").override([change])

    def test_an_impossible_model(self) -> None:
        with pytest.raises(StrictDataclassError, match="training_length = 9"):
            load_recipe("tiny").override(["training_length=9"]).config()

    def test_lists_that_do_not_fit_the_layers(self) -> None:
        recipe = load_recipe("hybrid")
        assert recipe.override(["num_hidden_layers=4"]).config().layer_schemes == ["xpos", "xpos", "none", "xpos"]
        with pytest.raises(StrictDataclassError, match="a list with one for each of the 12 layers"):
            recipe.override(["num_hidden_layers=12"]).config()
        with pytest.raises(StrictDataclassError, match="must not list 'learned' beside other schemes"):
            recipe.override(["position_embedding_type=[xpos, learned]", "num_hidden_layers=2"]).config()

    def test_the_scale_follows_the_length(self) -> None:
        recipe = load_recipe("tiny").override(["training_length=64"])
        assert recipe.config().xpos_scale_base == 32
        assert recipe.override(["xpos_scale_base=5"]).config().xpos_scale_base == 5

    def test_another_tokenizer_brings_its_vocabulary(self) -> None:
        recipe = load_recipe("gpt-medium").with_tokenizer("bytes")
        config = recipe.config(recipe.tokenizer())
        assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (257, 256, 256)
        with pytest.raises(ValueError, match="gpt-medium has no vocab_size"):
            recipe.config()

    def test_written_and_read_again(self, tmp_path: Path) -> None:
        recipe = load_recipe("sandwich-162m").override(
            ["hidden_dropout=0.1", "max_steps=9", "separate_documents=true"]
        )
        path = tmp_path / "mine.yaml"
        path.write_text(recipe.to_yaml(recipe.config()))
        again = load_recipe(path)
        assert again.config().to_dict() == recipe.config().to_dict()
        assert (again.training, again.data) == (recipe.training, recipe.data)


class TestSteps:
    @pytest.mark.parametrize(("devices", "batches"), [(1, 64), (8, 8), (64, 1)])
    def test_hold_as_many_examples_on_any_number_of_devices(self, devices: int, batches: int) -> None:
        recipe = load_recipe("gpt-medium")
        told = recipe.estimate(recipe.config(), devices)
        assert (told.accumulation, told.tokens_per_step) == (batches, 2**19)

    def test_must_be_shared_out_evenly(self) -> None:
        with pytest.raises(ValueError, match=r"examples_per_step = 512: .*= 8 x 5. Change one of them"):
            load_recipe("gpt-medium").accumulation(5)

    def test_are_what_the_devices_take_if_nothing_is_said(self) -> None:
        told = load_recipe("tiny").override(["examples_per_step=null"]).estimate(tiny_config("xpos"), 3)
        assert (told.accumulation, told.examples_per_step) == (1, 48)


CONFIGS: list[dict[str, Any]] = [
    {},
    {"chunked_loss": True, "tie_word_embeddings": True},
    {"position_embedding_type": "alibi", "hidden_dropout": 0.1},
    {"position_embedding_type": "learned", "attention_pattern": "full"},
    {"position_embedding_type": "t5", "attention_pattern": "sliding", "sliding_window": 6},
    {"position_embedding_type": ["xpos", "none"], "attention_pattern": ["blockwise", "full"], "num_hidden_layers": 2}
    | {"block_length": 3, "full_attention_log_scaling": True},
]


class TestEstimate:
    @pytest.mark.parametrize("fields", CONFIGS)
    def test_counts_parameters(self, fields: dict[str, Any]) -> None:
        model = tiny_model(**fields)
        told = estimate(model.config, length=14, batch_size=2, steps=5, devices=3, accumulation=2)
        assert told.parameters == model.num_parameters()
        outer = ("embed_tokens", "lm_head", "model.positions")
        inner = sum(each.numel() for name, each in model.named_parameters() if not any(word in name for word in outer))
        assert told.parameters_without_embeddings == inner
        assert (told.tokens_per_step, told.tokens) == (2 * 3 * 2 * 14, 5 * 2 * 3 * 2 * 14)
        assert told.memory.weights == told.memory.gradients == 4 * told.parameters
        assert told.memory.optimizer == 8 * told.parameters

    @pytest.mark.parametrize("mixed_precision", [False, True])
    @pytest.mark.parametrize("fields", CONFIGS)
    def test_activations_are_those_of_a_real_forward_pass(self, fields: dict[str, Any], mixed_precision: bool) -> None:
        model = tiny_model(**fields).train()
        parameters = dict(model.named_parameters())
        ids = random_ids(3, 14)
        with count_saved_bytes(parameters) as saved, torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision):
            loss = model(ids, labels=ids, use_cache=False).loss
        assert loss.requires_grad
        told = activation_bytes(model.config, 3, 14, mixed_precision=mixed_precision, checkpointing=False)
        gradient_of_logits = 0 if model.config.chunked_loss else 3 * 14 * 97 * 4
        # The ids are kept, too, where the estimate has embeddings.
        assert told - gradient_of_logits == pytest.approx(saved.total, rel=0.02)
        assert saved.total > 10_000

    def test_checkpointing_keeps_one_layer(self) -> None:
        sizes = {"num_hidden_layers": 8, "chunked_loss": True}
        full, less = (
            estimate(
                tiny_model(**sizes).config, length=140, batch_size=4, activation_checkpointing=checkpointing
            ).memory.activations
            for checkpointing in (False, True)
        )
        assert 8 * 4 * 140 * 30 * 4 < less < full / 3

    def test_checkpointing_counts_the_largest_of_the_layers(self) -> None:
        def activations(patterns: str | list[str], layers: int) -> int:
            fields = {"attention_pattern": patterns, "num_hidden_layers": layers, "block_length": 3}
            config = tiny_model(**fields, chunked_loss=True).config
            return activation_bytes(config, 4, 140, mixed_precision=False, checkpointing=True)

        full, short = activations("full", 2), activations("blockwise", 2)
        assert full != short
        assert activations(["full", "blockwise"], 2) == activations(["blockwise", "full"], 2) == max(full, short)

    @pytest.mark.parametrize("fields", CONFIGS)
    def test_arithmetic(self, fields: dict[str, Any]) -> None:
        model = tiny_model(**fields | {"chunked_loss": False}).train()
        told = estimate(model.config, length=14, batch_size=2)
        with FlopCounterMode(display=False) as counter:
            ids = random_ids(2, 14)
            model(ids, labels=ids, use_cache=False).loss.backward()
        linear = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
        counted = counter.get_flop_counts()["Global"]
        products = sum(
            value for kind, value in counted.items() if "attention" not in str(kind) and "bmm" not in str(kind)
        )
        # The input of the first layers needs no gradient through a table, so all products have three parts.
        assert products == 2 * 14 * 6 * linear
        patterns = model.config.layer_patterns
        keys = sum(visible_keys(model.config, pattern, 14) for pattern in patterns)
        assert told.flops_per_token == pytest.approx(
            6 * (told.parameters_without_embeddings + 97 * 30) + 12 * 30 * keys, abs=1
        )

    @pytest.mark.parametrize("pattern", ["full", "sliding", "blockwise"])
    @pytest.mark.parametrize("length", [1, 5, 14, 40])
    def test_visible_keys_are_those_with_attention(self, pattern: str, length: int) -> None:
        model = tiny_model(attention_pattern=pattern, sliding_window=9, attn_implementation="eager")
        with torch.no_grad():
            weights = model(random_ids(1, length), output_attentions=True, use_cache=False).attentions[0]
        seen = (weights[0, 0] > 0).sum(-1).double().mean().item()
        assert visible_keys(model.config, pattern, length) == pytest.approx(seen)

    def test_sharding_and_what_is_not_known(self) -> None:
        config = tiny_model().config
        whole, shared = (estimate(config, length=14, batch_size=2, devices=4, sharded=s) for s in (False, True))
        assert shared.memory.weights == pytest.approx(whole.memory.weights / 4, rel=1e-3)
        assert shared.memory.activations == whole.memory.activations
        unknown = estimate(config, length=14, batch_size=2, optimizer="lion_8bit")
        assert (unknown.memory.optimizer, unknown.tokens, unknown.flops) == (None, None, None)
        assert unknown.memory.total == whole.memory.total - (whole.memory.optimizer or 0)

    @pytest.mark.parametrize(
        ("changes", "devices", "message"),
        [
            (["length=4611686018427387904"], 1, "length = 4611686018427387904: it must be"),
            (["training_length=2147483646"], 1, "A batch of 16 x 2147483646 tokens"),
            (["per_device_train_batch_size=9007199254740993", "examples_per_step=null"], 1, "batch_size = 9007"),
            (["examples_per_step=null"], 10**30, "devices = 10+: it must be"),
            (["max_steps=9007199254740993"], 1, "steps = 9007"),
            (["per_device_train_batch_size=0"], 1, "per_device_train_batch_size = 0: it must be at least 1"),
        ],
    )
    def test_absurd_numbers(self, changes: list[str], devices: int, message: str) -> None:
        recipe = load_recipe("tiny").override(changes)
        with pytest.raises(ValueError, match=message):
            recipe.estimate(recipe.config(), devices)

    def test_no_memory_is_taken(self) -> None:
        recipe = load_recipe("gpt-medium").override(["hidden_size=65536"])
        assert recipe.estimate(recipe.config(), 1).memory.weights > 2**38


def test_the_model_of_a_recipe_learns() -> None:
    recipe = load_recipe("tiny").override(["hidden_size=16", "num_hidden_layers=1", "intermediate_size=16"])
    model = LexForCausalLM(recipe.config(byte_tokenizer()))
    ids = torch.tensor([list(b"abcd" * 8)])
    assert model(ids, labels=ids).loss.item() == pytest.approx(5.55, abs=0.2)

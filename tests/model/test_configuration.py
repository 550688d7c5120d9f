"""Every impossible value is refused with a sentence; what is saved comes back."""

import json
import math
from typing import Any

import pytest
import torch
from helpers.models import tiny_model
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from lex_hf import LexConfig, LexForCausalLM


def test_the_defaults_are_gpt_medium_with_gpt2s_vocabulary() -> None:
    config = LexConfig()
    sizes = (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
    )
    assert sizes == (24, 1024, 16, 4096)
    assert (config.vocab_size, config.training_length, config.head_dim) == (50257, 1024, 64)
    assert config.attention_span("blockwise") == 512
    assert config.attention_span("sliding") == 1024
    assert config.attention_span("full") is None
    assert config.max_position_embeddings > 10**6


BAD = [
    ({"training_length": 7}, "training_length = 7: it must be even"),
    ({"training_length": 0}, "training_length = 0: it must be even and at least 2"),
    ({"block_length": 0}, "block_length = 0"),
    ({"sliding_window": 0}, "sliding_window = 0"),
    (
        {"attention_pattern": "local"},
        r"attention_pattern = 'local': it must be one of \('blockwise', 'sliding'",
    ),
    ({"attention_pattern": ["full"]}, "a list with one for each of the 24 layers"),
    ({"attention_pattern": ["full", "local"] * 12}, "attention_pattern = 'local'"),
    ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute': it must be one of"),
    ({"position_embedding_type": ["xpos"] * 23 + ["absolute"]}, "position_embedding_type = 'absolute': it must be"),
    ({"position_embedding_type": ["xpos"]}, "a list with one for each of the 24 layers"),
    ({"position_embedding_type": ["xpos", "learned"] * 12}, "must not list 'learned' beside other schemes"),
    ({"hidden_size": 1008, "num_attention_heads": 48}, "48 heads of 21, and xpos and rope rotate pairs"),
    ({"hidden_size": 1000}, "hidden_size = 1000: it must be a multiple of num_attention_heads = 16"),
    ({"num_attention_heads": 0}, "num_attention_heads = 0: it must be at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ({"vocab_size": 0}, "vocab_size = 0"),
    ({"hidden_dropout": 1.0}, r"hidden_dropout = 1.0: it must lie in \[0, 1\)"),
    ({"attention_dropout": -0.1}, "attention_dropout = -0.1"),
    ({"xpos_scale": "matrix"}, "xpos_scale = 'matrix': it must be one of"),
    ({"xpos_gamma": 0.0}, "xpos_gamma = 0.0: it must be finite and greater than 0"),
    ({"xpos_gamma": math.inf}, "xpos_gamma = inf: it must be finite and greater than 0"),
    ({"xpos_scale_base": -1}, "xpos_scale_base = -1: it must be finite and greater than 0"),
    ({"rope_theta": 0}, "rope_theta = 0: it must be finite and greater than 0"),
    ({"rope_theta": math.nan}, "rope_theta = nan: it must be finite"),
    ({"layer_norm_eps": -1.0}, "layer_norm_eps = -1.0: it must be finite and greater than 0"),
    ({"layer_norm_eps": math.nan}, "layer_norm_eps = nan"),
    ({"initializer_range": -1.0}, "initializer_range = -1.0: it must be finite and at least 0"),
    ({"hidden_dropout": math.nan}, "hidden_dropout = nan"),
    ({"eos_token_id": 50257}, "eos_token_id = 50257: it must be None or in the vocabulary, 0 to 50256"),
    ({"eos_token_id": [3, 60000]}, r"eos_token_id = \[3, 60000\]"),
    ({"vocab_size": 97, "pad_token_id": 97}, "pad_token_id = 97: it must be None or in the vocabulary, 0 to 96"),
    ({"bos_token_id": -1}, "bos_token_id = -1"),
    ({"hidden_size": 2**62}, f"hidden_size = {2**62}: it must be at most {2**31 - 1}"),
    ({"vocab_size": 10**12}, f"vocab_size = {10**12}: it must be at most"),
    ({"num_hidden_layers": 10**12}, f"num_hidden_layers = {10**12}: it must be at most {2**16}"),
    ({"training_length": 2**62}, f"training_length = {2**62}: it must be at most"),
    ({"block_length": 2**62}, f"block_length = {2**62}: it must be at most"),
    ({"hidden_size": 2**24, "num_attention_heads": 1}, "hidden_size = 16777216, .* parameters; there must be at most"),
    ({"position_embedding_type": "alibi", "xpos_gamma": -1.0}, "xpos_gamma = -1.0"),
    ({"t5_num_buckets": 0}, "t5_num_buckets = 0: it must be even"),
    ({"alibi_slope_shift": -5000}, r"alibi_slope_shift = -5000: it must lie in \[-100, 100\]"),
    ({"sandwich_dim": 3}, "sandwich_dim = 3"),
    ({"hidden_act": "swoosh"}, "hidden_act = 'swoosh'"),
    ({"hidden_size": "wide"}, "hidden_size"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_impossible_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassError, match=message):
        LexConfig(**fields)


def test_fields_can_be_overridden_when_loading_and_are_checked_again(tmp_path: Any) -> None:
    LexConfig(training_length=64).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attention_pattern="sliding")
    assert (config.attention_pattern, config.attention_span("sliding")) == ("sliding", 64)
    with pytest.raises(StrictDataclassError, match="attention_pattern = 'local'"):
        AutoConfig.from_pretrained(tmp_path, attention_pattern="local")


def test_saving_and_loading_keeps_every_field(tmp_path: Any) -> None:
    config = LexConfig(xpos_gamma=0.5, attention_pattern=["full"] * 24, sliding_window=40, eos_token_id=[1, 2])
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, LexConfig)
    ours, theirs = config.to_diff_dict(), loaded.to_diff_dict()
    assert {key: ours[key] for key in ours if key != "auto_map"} == {
        key: theirs[key] for key in ours if key != "auto_map"
    }


def test_unknown_options_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    LexConfig.from_dict(tiny_model().config.to_dict())
    assert not caplog.messages
    LexConfig(xpos_gama=0.5)
    assert caplog.messages == ["LexConfig does not know xpos_gama: kept in the config, without effect."]


def test_the_model_checks_a_config_that_was_changed_after_it_was_made() -> None:
    config = tiny_model().config
    config.training_length = 9
    with pytest.raises(StrictDataclassError, match="training_length = 9"):
        LexForCausalLM(config)


def test_a_default_that_does_not_fit_a_small_vocabulary_is_no_mistake_of_the_users() -> None:
    assert LexConfig(vocab_size=97).eos_token_id == 50256  # transformers warns


def test_what_is_stored_can_be_overridden_where_it_is_impossible(tmp_path: Any) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | {"eos_token_id": 97}))
    with pytest.raises(StrictDataclassError, match="eos_token_id = 97"):
        AutoConfig.from_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, eos_token_id=96).eos_token_id == 96


def test_the_number_of_parameters_is_known_before_any_is_made() -> None:
    for tied in (True, False):
        model = tiny_model(tie_word_embeddings=tied)
        assert model.config.num_parameters() == model.num_parameters()


def test_a_model_that_fits_no_memory_is_refused_before_it_is_made() -> None:
    config = LexConfig(hidden_size=2**16, intermediate_size=2**18, num_hidden_layers=1000)
    with pytest.raises(ValueError, match=r"hidden_size = 65536, .* GiB, and this machine has .* choose smaller sizes"):
        LexForCausalLM(config)
    with torch.device("meta"):
        assert LexForCausalLM(LexConfig(**config.to_diff_dict() | {"num_hidden_layers": 2})).device.type == "meta"

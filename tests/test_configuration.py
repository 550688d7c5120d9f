"""Every impossible value is refused with a sentence; what is saved comes back."""

from typing import Any

import pytest
from conftest import tiny_model
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
    ({"attention_pattern": ["full"]}, "one pattern for each of the 24 layers"),
    ({"attention_pattern": ["full", "local"] * 12}, "attention_pattern = 'local'"),
    ({"position_embedding_type": "absolute"}, "position_embedding_type = 'absolute': it must be one of"),
    ({"hidden_size": 1008, "num_attention_heads": 48}, "48 heads of 21, and xpos rotates pairs"),
    ({"hidden_size": 1000}, "hidden_size = 1000: it must be a multiple of num_attention_heads = 16"),
    ({"num_attention_heads": 0}, "num_attention_heads = 0: it must be at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ({"vocab_size": 0}, "vocab_size = 0"),
    ({"hidden_dropout": 1.0}, r"hidden_dropout = 1.0: it must lie in \[0, 1\)"),
    ({"attention_dropout": -0.1}, "attention_dropout = -0.1"),
    ({"xpos_scale": "matrix"}, "xpos_scale = 'matrix': it must be one of"),
    ({"xpos_gamma": 0.0}, "xpos_gamma = 0.0: it must be positive"),
    ({"xpos_scale_base": -1}, "xpos_scale_base = -1: it must be positive"),
    ({"rope_theta": 0}, "rope_theta = 0: it must be positive"),
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

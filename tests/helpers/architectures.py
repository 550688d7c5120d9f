"""A tiny model of every architecture that `AutoModelForCausalLM` knows, and which of them read in blocks.

`python -m helpers.architectures > ../docs/architectures.md`, in `tests`, writes the table of the documentation.
"""

import itertools
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers.rope_models import LENGTH, SIZES
from lex_hf import blockwise

LAYERS, WINDOW = 3, 5
_NAME = re.compile(r"`([^`]+)`")

# By name of a field, for all configurations that have it; others keep their own values.
_FIELDS: dict[str, Any] = {
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "dense_intermediate_size": 16,
    "intermediate_size_mlp": 16,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "router_hidden_size": 16,
    "zero_expert_num": 1,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # windows
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    # states
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "n_mamba_heads": 4,
    "state_size": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "lru_width": 32,
    # others
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 64,
    "rotary_dim": 4,
    "kv_channels": 8,
    "global_head_dim": 8,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "embedding_size": 32,
    "decoder_layers": LAYERS,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": LAYERS,
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "ffn_dim": 48,
    "is_decoder": True,
}
_LATENT = {"num_key_value_heads": 4}  # keys of latent attention are those of all heads
_WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_STATES = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLUTIONS = {"layer_types": ["full_attention", "conv", "full_attention"]}
_HYBRID = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
_BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_PART = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
_NO_TABLES = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_WHOLE = {"gemma4_assistant": {"text_config": _NO_TABLES}}  # which refuses its own defaults
# Where a weight's usual 0.2 lets rounding grow: also without blocks, pieces then differ by more than the tolerance.
_STD = dict.fromkeys(("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), 0.1)
_STD |= dict.fromkeys(("gemma4_text", "gemma4_unified_text"), 0.05)
NOT_BUILT = {"gemma4_assistant": "transformers does not build it: all its layers share keys, and none makes any"}
_MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "bailing_hybrid", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4"),
        _LATENT,
    ),
    **dict.fromkeys(("kimi_linear", "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(("gemma4_unified_text", "laguna", "mellum", "ministral"), _WINDOWS),
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_config": {**_PART, "hidden_size_global": 32},
        "decoder_config": {**_PART, "hidden_size_global": 32},
        "global_config": _PART,
        "patcher_config": _PART,
    },
    "cohere_compass_text": {**_WINDOWS, "rope_parameters": _BY_KIND},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cpmant": {"dim_ff": 48},
    "ctrl": {"dff": 48},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {
        **_WINDOWS,
        "use_dsa": False,
        "num_key_value_heads": 4,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "head_dim": 16,
        "rope_parameters": _BY_KIND,
    },
    "gemma3n_text": {
        **_WINDOWS,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_assistant": {**_WINDOWS, **_NO_TABLES, "num_kv_shared_layers": 4},
    "gemma4_text": {**_WINDOWS, "num_kv_shared_layers": 2},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 2, **_WINDOWS},
    "git": {"vision_config": {**_VISION, "num_hidden_layers": 1}},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "granitemoehybrid": _STATES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "longcat_flash": {**_LATENT, "num_layers": 2, "num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "mistral": {"sliding_window": None},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "moe"], "n_groups": 2},
    "phi4_multimodal": {
        "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "nemo_conv_channels": 16}
        | {"num_attention_heads": 2, "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16},
        "vision_config": {**_VISION, "num_hidden_layers": 2},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": 9, "shape_vocab_size": 9},
    "roformer": {"rotary_value": False},
    "xlnet": {"d_head": 8, "d_inner": 48},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_HYBRID, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {**_HYBRID, "num_mem_blocks": 2},
    "zaya": {"num_experts_per_tok": 1},
}


def architectures() -> list[str]:
    """Types of the models that `AutoModelForCausalLM` builds."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def text_part(kind: str) -> str:
    """The type of the text part of a model that reads more than text; of all others, their own."""
    text = _defaults(kind)[1].model_type
    if text not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return kind
    name, other = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text]
    return text if name == other or name.endswith("ForConditionalGeneration") else kind


def _defaults(kind: str) -> tuple[Any, Any]:
    """The configuration class's own values, of the whole model and of what reads text."""
    whole = AutoConfig.for_model(kind, **_WHOLE.get(kind, {}))
    return whole, whole.get_text_config(decoder=True)


def _has(config: Any, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except AttributeError:
        raise
    except Exception:  # differs between layers
        return True


def tiny_config(kind: str) -> Any:
    """The configuration of a tiny model of this type."""
    whole, default = _defaults(kind)
    fields = {**SIZES, "num_hidden_layers": LAYERS, "max_position_embeddings": 64}
    fields |= {name: value for name, value in _FIELDS.items() if _has(default, name)}
    kinds = sorted(set(getattr(default, "layer_types", None) or ()))
    if kinds:
        fields["layer_types"] = list(itertools.islice(itertools.cycle(kinds), LAYERS))
    # By the names that the class itself has for them, and those only that can be set.
    own = {default.attribute_map.get(name, name): value for name, value in (fields | _MODELS.get(kind, {})).items()}
    settable = {name: own[name] for name in own if not isinstance(getattr(type(default), name, None), property)}
    config = type(default)(**settable)
    model = AutoModelForCausalLM._model_mapping[type(whole)]
    if isinstance(config, (type(whole), model.config_class)):
        return config
    return type(whole)(text_config=config)


def tiny_model(kind: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model of this type, with weights as after training: attention of an initial model is nearly flat."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM._model_mapping[type(_defaults(kind)[0])]
    model = model._from_config(tiny_config(kind), attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=_STD.get(kind, 0.2))
    return model.eval()


def refusal(model: PreTrainedModel) -> str:
    """Make a model blockwise, and return the reason if it is refused."""
    try:
        blockwise(model, LENGTH)
    except ValueError as error:
        _, _, reason = str(error).partition(" cannot be made blockwise: ")
        if not reason:
            raise
        reason = re.sub(r" differ by [\d.e+-]+", " differ", reason)  # rounding is another on other machines
        return " ".join(reason.split()).rstrip(".")
    return ""


_EXACT, _PARTS, _REFUSED = "## Exact\n\n", "## As their text part\n\n", "## Refused\n\n"
_HEAD = """# Which architectures read in blocks

`lex_hf.blockwise` takes any model of transformers whose layers attend through transformers' attention interface, and
whose positions are rotary, or none: Llama, Qwen, Mistral, Mixtral, Gemma, Phi, GPT-NeoX, Cohere, OLMo, Granite, GLM,
DeepSeek, gpt-oss, Llama 4, and hybrids with states such as Falcon-H1 and Nemotron-H. It tries the model, and refuses
it with a sentence where that does not hold, as for GPT-2, whose positions are learned, or for BLOOM and Falcon, which
compute attention by themselves.

This is what it does with every type of model that `AutoModelForCausalLM` of transformers {version} knows. *Exact*
means: the logits of a tiny model are those of a dense mask of blocks in its own eager attention, to 2e-5, in one pass,
in pieces and token by token with a cache, and in a batch with padding on the left; layers with windows, chunks or
states keep them. Each of these may have sinks, too. The type is what `config.model_type` says: `llama` is that of
Llama 2 and 3, and of many others.

{exact} are exact, {parts} are models whose text part is another of the list, and {refused} are refused.

"""


def render(results: Mapping[str, str], version: str) -> str:
    """Write the page of the documentation.

    Args:
        results: Of each architecture nothing if it is exact, else the name of its text part or why it is refused.
        version: That of transformers.
    """
    exact, parts, refused = _sorted(results)
    head = _HEAD.format(version=version, exact=len(exact), parts=len(parts), refused=len(refused))
    reasons = [reason for reason, _ in Counter(refused.values()).most_common()]
    grouped = {reason: [kind for kind in refused if refused[kind] == reason] for reason in reasons}
    blocks = [
        _EXACT + textwrap.fill(_names(exact), 119, break_on_hyphens=False),
        _PARTS + _table(["type of model", "text part"], [[f"`{kind}`", f"`{part}`"] for kind, part in parts.items()]),
        _REFUSED + _table(["types of models", "why"], [[_names(kinds), reason] for reason, kinds in grouped.items()]),
    ]
    return head + "\n\n".join(blocks) + "\n"


def parse(page: str) -> dict[str, str]:
    """Read what [`render`] wrote."""
    page, _, refused = page.partition(_REFUSED)
    page, _, parts = page.partition(_PARTS)
    results = dict.fromkeys(_NAME.findall(page.partition(_EXACT)[2]), "")
    rows = [line.strip("| ").split(" | ") for line in (parts + refused).splitlines()]
    for row in (row for row in rows if row[0].startswith("`")):
        results |= dict.fromkeys(_NAME.findall(row[0]), row[1].strip("`") if row[1].startswith("`") else row[1])
    return dict(sorted(results.items()))


def _sorted(results: Mapping[str, str]) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Those that are exact, those that have a text part, and those that are refused."""
    parts = {kind: result for kind, result in results.items() if result in results}
    refused = {kind: result for kind, result in results.items() if result and kind not in parts}
    return [kind for kind, result in results.items() if not result], parts, refused


def _names(kinds: Iterable[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", "---"], *rows))


def main() -> None:
    """Write the page."""
    transformers.logging.set_verbosity_error()
    results = {}
    for kind in architectures():
        if text_part(kind) != kind:
            results[kind] = text_part(kind)
        else:
            results[kind] = NOT_BUILT.get(kind) or refusal(tiny_model(kind))
    sys.stdout.write(render(results, transformers.__version__))


if __name__ == "__main__":
    main()

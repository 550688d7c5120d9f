"""Systems of the study of recall: which layers see how far, and how they know of order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from lex_hf.model.configuration_lex import LexConfig

LAYERS = 8
SHARES = (2, 4, 8)  # of a hybrid, one layer in so many has full attention
LEX, LLAMA = "lex", "llama"  # kinds of models in transformers
_YARN = 32  # factor: the longest text by l
_NAMES = {"xpos": "xPos", "rope": "RoPE", "alibi": "ALiBi", "none": "no positions"}


@dataclass(frozen=True)
class RecallSystem:
    """A model and how it is read.

    Attributes:
        name: Its name in the report.
        group: The panel of the pictures in which it is drawn.
        model: Fields of its configuration in training.
        reading: Options of `load_for_evaluation` when it reads: fields of its configuration that are others then, and
            options of `blockwise`.
        kind: Its `model_type` in transformers.
    """

    name: str
    group: str
    model: Mapping[str, Any]
    reading: Mapping[str, Any] = field(default_factory=dict)
    kind: str = LEX

    def config(self, length: int, sizes: Mapping[str, Any]) -> PreTrainedConfig:
        """Return the configuration of a model in training, with texts of `length` tokens and these sizes."""
        own = {
            LEX: {"intermediate_size": 128, "training_length": length, "xpos_scale_base": length // 2},
            LLAMA: {"intermediate_size": 96, "max_position_embeddings": length},  # of three matrices, not two
        }
        return AutoConfig.for_model(self.kind, **{**own[self.kind], **sizes, **self.model})

    def full_layers(self) -> int:
        """Return how many layers have full attention when it reads."""
        if self.kind == LEX:
            fields = {"num_hidden_layers": LAYERS, **self.model, **self.reading}
            return int(LexConfig(**fields).layer_patterns.count("full"))
        bounded = self.reading.get("layers", range(LAYERS)) if "blockwise" in self.reading else ()
        return LAYERS - len(bounded)


def systems(length: int) -> list[RecallSystem]:
    """Return all systems.

    Within the training length, all patterns but short blocks are plain causal attention; so systems that differ in
    reading alone share a model. Hybrids are trained with the short blocks that they read with: where a block reaches
    as far as the training texts, layers with blocks learn to look back, and full layers have nothing to do.

    Args:
        length: l in tokens.
    """
    plain = [*_of_one_scheme(), *_hybrids(length)]
    return [*plain, *_with_log_scaling(plain), *_controls(length), *_under_blockwise(length)]


def _of_one_scheme() -> list[RecallSystem]:
    bounded, whole = "the same in all layers, bounded", "the same in all layers, full attention"
    xpos = {"position_embedding_type": "xpos"}
    found = [
        RecallSystem("xPos, blocks", bounded, xpos, {"attention_pattern": "blockwise"}),
        RecallSystem("xPos, sliding", bounded, xpos, {"attention_pattern": "sliding"}),
        RecallSystem("RoPE, blocks", bounded, {"position_embedding_type": "rope"}, {"attention_pattern": "blockwise"}),
    ]
    return found + [
        RecallSystem(f"{name}, full", whole, {"position_embedding_type": scheme}, {"attention_pattern": "full"})
        for scheme, name in _NAMES.items()
    ]


def _hybrids(length: int) -> list[RecallSystem]:
    return [
        RecallSystem(
            f"1 full in {share}, {_NAMES[scheme]}",
            f"blocks with xPos, full layers with {_NAMES[scheme]}",
            hybrid(share, scheme) | {"block_length": max(1, length // 8)},
        )
        for scheme in ("none", "rope", "xpos")
        for share in SHARES
    ]


def _with_log_scaling(plain: list[RecallSystem]) -> list[RecallSystem]:
    """Systems whose full layers have no positions, read with scores that grow with the logarithm of the length."""
    group, log = "full layers with no positions, log scaling", {"full_attention_log_scaling": True}
    return [
        RecallSystem(f"{each.name}, log scaling", group, each.model, {**each.reading, **log})
        for each in plain
        if "none" in each.model["position_embedding_type"]
    ]


def _controls(length: int) -> list[RecallSystem]:
    """What hybrids are compared with: blocks of l/2 in training, and full layers that come after training."""
    group = "controls"
    return [
        RecallSystem("1 full in 4, no positions, blocks of l/2", group, hybrid(4, "none")),
        RecallSystem(
            "xPos, 1 full in 4 in reading alone",
            group,
            {"position_embedding_type": "xpos"},
            {"attention_pattern": hybrid(4, "xpos")["attention_pattern"]},
        ),
    ]


def _under_blockwise(length: int) -> list[RecallSystem]:
    """A Llama, trained as it is, and read with full attention, in blocks of l/2, or with both.

    Full layers meet distances that they were not trained with, so some readings have YaRN: in all layers, as
    transformers has it, or in these alone. Training decides which layer looks back. With one full layer at a time, it
    was layer 1, which is none of the full layers of a hybrid with one in four; so these are tried from there on, too.
    """
    every_second = {"blockwise": length, "layers": bounded_layers(2)}
    from_layer_1 = {"blockwise": length, "layers": [index for index in range(LAYERS) if index % 4 != 1]}
    yarn = {
        "rope_type": "yarn",
        "rope_theta": LlamaConfig().rope_parameters["rope_theta"],
        "factor": float(_YARN),
        "original_max_position_embeddings": length,
    }
    readings: dict[str, dict[str, Any]] = {
        "unchanged": {},
        "YaRN": {"rope_parameters": yarn},
        "blockwise": {"blockwise": length},
        "blockwise, 1 full in 4": {"blockwise": length, "layers": bounded_layers(4)},
        "blockwise, 1 full in 2": every_second,
        "blockwise, 1 full in 2, YaRN": {**every_second, "rope_parameters": yarn},
        "blockwise, 1 full in 2, YaRN in these": {**every_second, "yarn_factor": float(_YARN)},
        "blockwise, 1 full in 4, from layer 1": from_layer_1,
        "blockwise, 1 full in 4, from layer 1, YaRN in these": {**from_layer_1, "yarn_factor": float(_YARN)},
    }
    return [
        RecallSystem(f"Llama, {name}", _group_of(reading), {}, reading, kind=LLAMA)
        for name, reading in readings.items()
    ]


def _group_of(reading: Mapping[str, Any]) -> str:
    if "layers" not in reading:
        return "a Llama, the same in all layers"
    scaled = {"yarn_factor", "rope_parameters"} & set(reading)
    return "a Llama, blocks and full layers" + (", YaRN" if scaled else "")


def bounded_layers(share: int) -> list[int]:
    """Return the layers that read in blocks, where those of [`hybrid`] have full attention."""
    return [index for index in range(LAYERS) if not _is_full(index, share)]


def _is_full(index: int, share: int) -> bool:
    return index % share == share // 2


def hybrid(share: int, scheme: str, layers: int = LAYERS) -> dict[str, Any]:
    """Return the fields of a model of which one layer in `share` has full attention and a scheme of its own.

    It is the one after the first half of each group: it needs layers before it that tell it which token comes before
    which, and as the last of eight it took twice the steps to learn.
    """

    def of(bounded: str, full: str) -> list[str]:
        return [full if _is_full(index, share) else bounded for index in range(layers)]

    return {"attention_pattern": of("blockwise", "full"), "position_embedding_type": of("xpos", scheme)}

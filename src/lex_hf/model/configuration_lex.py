"""Configuration of the Length-Extrapolatable (LEX) Transformer.

Vocabulary used throughout the package, with the symbols of the paper (arXiv 2212.10554):

* *training length* ``l``: the number of tokens a training example holds.
* *block*: ``h = block_length`` consecutive tokens of one sequence, ``l / 2`` by default; blocks are counted from the
  first real token of the sequence, never from padding.
* *pair of blocks*: a block and the one before it, ``2h`` *slots*. Every query and key that ever meet share a pair.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

# Older versions of transformers copy only the files that are imported here; positions need the others.
from .batch_lex import Movable as Movable
from .biases_lex import BiasScheme as BiasScheme
from .fields_lex import MAX_SIZE, require, require_finite, require_size
from .masking_lex import PATTERNS, FullPattern
from .positions_lex import SCHEMES
from .rotation_lex import Rotation as Rotation
from .scheme_lex import PositionScheme as PositionScheme

logger = logging.get_logger(__name__)

ATTENTION_PATTERNS = tuple(PATTERNS)

MAX_LAYERS = 2**16
MAX_PARAMETERS = 10**14  # in float32 400 TB
GPT2_END_OF_TEXT = 50256

_TP_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
_TP_PLAN_OF_VECTORS = {"layers.*.self_attn.relative": "replicated_with_grad_allreduce"}


@strict
class LexConfig(PreTrainedConfig):
    """Configuration of a [`LexModel`]; the defaults are GPT-medium with xPos (LEX paper, Table 7).

    Args:
        vocab_size: Number of token ids; the default is GPT-2's vocabulary.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Number of decoder layers.
        num_attention_heads: Number of heads; must divide `hidden_size`.
        intermediate_size: Width of the feed-forward layer.
        hidden_act: Activation of the feed-forward layer, a name transformers knows; `"gelu"` is the exact (erf) one.
        hidden_dropout: Dropout after the embedding, the attention and the feed-forward layer, in `[0, 1)`.
        attention_dropout: Dropout on attention weights, in `[0, 1)`.
        layer_norm_eps: Epsilon of every LayerNorm.
        initializer_range: Standard deviation of the normal initialisation of all matrices.
        tie_word_embeddings: Whether the LM head shares the token embedding.
        use_cache: Whether a forward pass returns a cache by default.
        chunked_loss: Whether training computes the loss a piece of the tokens at a time, and returns no logits. It
            saves the memory of `tokens × vocab_size` numbers, twice; what needs logits in training, must not use it.
        bos_token_id: Id of the first token of a text.
        eos_token_id: Id, or ids, of the token that ends a text.
        pad_token_id: Id used to fill batches.
        training_length: `l`, the length of the training examples in tokens; even. It limits nothing at inference.
        max_position_embeddings: What other tools read as the hard limit on the length of a text. LEX has none, so it
            is large; `l` is `training_length`.
        attention_pattern: Which keys a query sees: `"blockwise"` (its own block and the one before, the paper's
            blockwise causal attention), `"sliding"` (the last `sliding_window` tokens) or `"full"` (all before it).
            A list gives one pattern per layer. It holds no weights, so it can be chosen when a model is loaded.
        block_length: `h`, the length of a block; `None` means `training_length // 2`.
        sliding_window: Width of the sliding window in tokens, the query's own included; `None` means
            `training_length`.
        full_attention_log_scaling: Whether scores in layers with full attention are multiplied by max(1, ln n / ln l)
            for a query that sees n tokens, before biases: the more keys there are, the more the one that fits must
            stand out (after Chiang and Cholak, arXiv 2202.12172). Within the training length nothing changes, so it
            can be chosen when a model is loaded.
        position_embedding_type: `"xpos"`, `"rope"` (xPos with ζ = 1), `"alibi"`, `"t5"`, `"shaw"`, `"kerple"`,
            `"sandwich"`, `"smoothed_sandwich"`, `"sinusoidal"`, `"learned"` (a table of `training_length` positions;
            longer texts are an error) or `"none"`. Their classes, in `positions_lex.py` and `biases_lex.py`, give
            formulas and sources. A list gives one scheme per layer, as `["xpos", "xpos", "xpos", "none"]` beside
            `attention_pattern = ["blockwise", "blockwise", "blockwise", "full"]`; `"sinusoidal"` and `"learned"` act
            before all layers, so they stand alone. What a scheme learns is shared by its layers, but for `"shaw"`,
            whose vectors each layer has for itself.
        rope_theta: Base of the rotation frequencies θ_i = rope_theta^(-2i/d).
        xpos_gamma: γ of ζ_i = (2i/d + γ)/(1 + γ).
        xpos_scale_base: B; a distance of B tokens scales pair i by ζ_i (512 in the paper, `training_length / 2`).
        xpos_rotation: Whether xPos rotates; `False` is the paper's ablation θ = 0.
        xpos_scale: `"vector"` (one ζ_i per pair), `"scalar"` (the ablation ζ = γ/(1 + γ) for all) or `"none"` (ζ = 1).
        alibi_slopes: `"official"` (the rule of ALiBi's code for any number of heads) or `"geometric"` (2^(-8n/H)).
        alibi_slope_shift: Δ, added to the exponents of all slopes: 2^-(h + Δ).
        alibi_shared_slope: h, to give all heads the slope 2^-h; `None` gives each head its own.
        t5_num_buckets: Number of buckets of distances; even.
        t5_max_distance: Distance from which on all share the last bucket.
        t5_scaled: Whether T5's table is multiplied by √head_dim, as in KERPLE's code.
        shaw_max_distance: Distance from which on all keys share the last vector.
        kerple_variant: `"log"` or `"power"`.
        sandwich_dim: d̄, twice the number of cosines; even.
        sandwich_first_index: First index of the sum of cosines, 1 (as printed) or 0.
        smoothed_sandwich_fit: `"printed"` (the paper's curve) or `"points"` (fitted to 50 distances).

    Raises:
        huggingface_hub.errors.StrictDataclassError: If a field has the wrong type, or an impossible value; the
            message names the field, the value and the rule.

    Example:
        >>> from lex_hf import LexConfig
        >>> LexConfig().attention_span("blockwise")  # block length of the default pattern
        512
    """

    _auto_class = "AutoConfig"  # saving a model saves its code, which loads where lex_hf is not installed
    model_type = "lex"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers declares it so
    vocab_size: int = 50257
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    hidden_act: str = "gelu"
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    chunked_loss: bool = False
    bos_token_id: int | None = GPT2_END_OF_TEXT
    eos_token_id: int | list[int] | None = GPT2_END_OF_TEXT
    pad_token_id: int | None = None

    training_length: int = 1024
    max_position_embeddings: int = 2**20
    attention_pattern: str | list[str] = "blockwise"
    block_length: int | None = None
    sliding_window: int | None = None
    full_attention_log_scaling: bool = False

    position_embedding_type: str | list[str] = "xpos"
    rope_theta: float | int = 10000.0
    xpos_gamma: float | int = 0.4
    xpos_scale_base: float | int = 512
    xpos_rotation: bool = True
    xpos_scale: str = "vector"
    alibi_slopes: str = "official"
    alibi_slope_shift: float | int = 0
    alibi_shared_slope: float | int | None = None
    t5_num_buckets: int = 32
    t5_max_distance: int = 128
    t5_scaled: bool = False
    shaw_max_distance: int = 16
    kerple_variant: str = "log"
    sandwich_dim: int = 128
    sandwich_first_index: int = 1
    smoothed_sandwich_fit: str = "printed"

    def __post_init__(self, **kwargs: Any) -> None:
        # A misspelt option must not be lost in silence; what transformers itself stores in config.json is known.
        unknown = sorted(key for key in kwargs if not key.startswith("_") and key not in _FOREIGN_FIELDS)
        if unknown:
            logger.warning("LexConfig does not know %s: kept in the config, without effect.", ", ".join(unknown))
        super().__post_init__(**kwargs)
        if kwargs.get("output_attentions"):
            self.output_attentions = True  # the setter chooses eager attention, which returns them

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the config; fields overridden by `kwargs` are validated like all others, in place of those stored."""
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in cls.__annotations__}
        result = super().from_dict({**config_dict, **given}, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        config.validate()
        return result

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """What transformers does to the modules of a [`LexModel`] in tensor parallel."""
        has_vectors = any(SCHEMES[name].count_vectors(self) for name in self.layer_schemes)
        return _TP_PLAN | (_TP_PLAN_OF_VECTORS if has_vectors else {})

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def layer_patterns(self) -> list[str]:
        """The attention pattern of every layer."""
        if isinstance(self.attention_pattern, str):
            return [self.attention_pattern] * self.num_hidden_layers
        return self.attention_pattern[: self.num_hidden_layers]

    @property
    def layer_schemes(self) -> list[str]:
        """The position scheme of every layer."""
        if isinstance(self.position_embedding_type, str):
            return [self.position_embedding_type] * self.num_hidden_layers
        return self.position_embedding_type[: self.num_hidden_layers]

    def attention_span(self, pattern: str) -> int | None:
        """Number of tokens in a block of `pattern`: a query meets keys of its own and the previous block only.

        Returns:
            `block_length` for blockwise attention, the window for sliding attention (a window of w tokens never
            reaches past the previous block of w), `None` for full attention, which has no blocks.
        """
        if pattern == "blockwise":
            return self.block_length or self.training_length // 2
        if pattern == "sliding":
            return self.sliding_window or self.training_length
        return None

    @property
    def patterns(self) -> list[FullPattern]:
        """The attention pattern of every layer, with its block length."""
        names = self.layer_patterns
        patterns = {name: PATTERNS[name](self.attention_span(name)) for name in set(names)}
        return [patterns[name] for name in names]

    @property
    def key_fields(self) -> tuple[tuple[str, Any], ...]:
        """Names and values of the fields that decide how cached keys are rotated and scaled."""
        schemes = tuple(dict.fromkeys(self.layer_schemes))
        kind = schemes[0] if len(schemes) == 1 else tuple(self.layer_schemes)
        names = dict.fromkeys(name for scheme in schemes for name in SCHEMES[scheme].key_fields)
        return (("position_embedding_type", kind), *((name, getattr(self, name)) for name in names))

    def num_parameters(self) -> int:
        """Number of parameters of a [`LexForCausalLM`] of these sizes, but for those of the position scheme."""
        width, inner = self.hidden_size, self.intermediate_size
        layer = 4 * width * (width + 1) + 2 * width * inner + width + inner + 4 * width
        embeddings = self.vocab_size * width * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + 2 * width

    def validate_architecture(self) -> None:
        """Check sizes and names; part of the validation that `@strict` runs."""
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        ):
            require_size(self, name, MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE)
        count = self.num_parameters()
        if count > MAX_PARAMETERS:
            raise ValueError(
                f"hidden_size = {self.hidden_size}, num_hidden_layers = {self.num_hidden_layers}, vocab_size = "
                f"{self.vocab_size} give {count:,} parameters; there must be at most {MAX_PARAMETERS:,}."
            )
        require_finite(self, "layer_norm_eps", above=0)
        require_finite(self, "initializer_range", least=0)
        require(self.hidden_act in ACT2FN, "hidden_act", self.hidden_act, f"must be one of {sorted(ACT2FN)}")
        for name in ("hidden_dropout", "attention_dropout"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "must lie in [0, 1)")
        require(
            self.hidden_size % self.num_attention_heads == 0,
            "hidden_size",
            self.hidden_size,
            f"must be a multiple of num_attention_heads = {self.num_attention_heads}",
        )

    def validate_attention(self) -> None:
        """Check the attention pattern and the lengths it rests on."""
        length = self.training_length
        require(length >= 2 and length % 2 == 0, "training_length", length, "must be even and at least 2")
        for name in ("training_length", "max_position_embeddings"):
            require_size(self, name)
        self._require_names("attention_pattern", ATTENTION_PATTERNS)
        for name in ("block_length", "sliding_window"):
            if getattr(self, name) is not None:
                require_size(self, name, hint=", or None for the default")

    def validate_positions(self) -> None:
        """Check the position scheme and its parameters."""
        self._require_names("position_embedding_type", tuple(SCHEMES))
        for scheme in SCHEMES.values():  # an impossible value is a mistake, also where it is not in use
            scheme.validate_fields(self)
        names = dict.fromkeys(self.layer_schemes)
        for name in names:
            SCHEMES[name].validate_sizes(self)
            require(
                len(names) == 1 or not SCHEMES[name].adds_to_embeddings,
                "position_embedding_type",
                self.position_embedding_type,
                f"must not list {name!r} beside other schemes: it is added to the embeddings, before all layers",
            )

    def _require_names(self, field: str, known: tuple[str, ...]) -> None:
        """Check a field that holds one name for all layers, or a list with one for each."""
        value = getattr(self, field)
        for name in [value] if isinstance(value, str) else value:
            require(name in known, field, name, f"must be one of {known}")
        require(
            isinstance(value, str) or len(value) >= self.num_hidden_layers,
            field,
            value,
            f"must be one name, or a list with one for each of the {self.num_hidden_layers} layers",
        )

    def validate_special_tokens(self) -> None:
        """Check that special tokens are in the vocabulary."""
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, list) else [value]:
                # GPT-2's is the default, which nobody chose; transformers warns of it where it does not fit.
                require(
                    token in (None, GPT2_END_OF_TEXT) or 0 <= token < self.vocab_size,
                    name,
                    value,
                    f"must be None or in the vocabulary, 0 to {self.vocab_size - 1}",
                )


# Keys that transformers keeps in config.json beside the declared fields.
_FOREIGN_FIELDS = frozenset(
    {
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
    }
)

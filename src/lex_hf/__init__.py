"""Length-Extrapolatable (LEX) Transformers for Hugging Face.

Importing the package registers its classes with the Auto classes, so that `AutoModelForCausalLM.from_pretrained` loads
LEX checkpoints. See arXiv 2212.10554.
"""

import sys
from importlib import resources

from .cli import interrupts as interrupts  # first: what follows takes seconds

# isort: split

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .convert.gpt2 import from_gpt2
from .convert.torchscale import from_torchscale
from .evaluation.invariance import PositionCheck, check_positions
from .evaluation.receptive_field import ReceptiveField, receptive_field, theoretical_receptive_field
from .evaluation.resolution import Resolution, attention_resolution, expected_attention, measure_resolution
from .inference.cache_files import load_cache, save_cache
from .lazy import MovedModules
from .model.cache_lex import LexCache
from .model.configuration_lex import LexConfig
from .model.modeling_lex import (
    LexForCausalLM,
    LexForQuestionAnswering,
    LexForSequenceClassification,
    LexForTokenClassification,
    LexModel,
)
from .model.static_cache_lex import LexStaticCache

__version__ = "0.1.0"
__all__ = [
    "LexCache",
    "LexConfig",
    "LexForCausalLM",
    "LexForQuestionAnswering",
    "LexForSequenceClassification",
    "LexForTokenClassification",
    "LexModel",
    "LexStaticCache",
    "PositionCheck",
    "ReceptiveField",
    "Resolution",
    "attention_resolution",
    "check_positions",
    "expected_attention",
    "from_gpt2",
    "from_torchscale",
    "load_cache",
    "measure_resolution",
    "metric_path",
    "receptive_field",
    "save_cache",
    "theoretical_receptive_field",
]

# Names of modules that version 0.1.0 documented.
sys.meta_path.append(
    MovedModules(
        __name__,
        {
            "cache_lex": "model.cache_lex",
            "comparison": "evaluation.comparison",
            "configuration_lex": "model.configuration_lex",
            "context_parallel": "inference.context_parallel",
            "modeling_lex": "model.modeling_lex",
            "perplexity": "evaluation.perplexity",
            "plots": "evaluation.plots",
            "positions_lex": "model.positions_lex",
            "recipes": "training.recipes",
            "resolution": "evaluation.resolution",
            "streaming": "data.streaming",
            "tiny": "reproduce.tiny",
            "tokenization": "data.tokenizers",
        },
    )
)

AutoConfig.register("lex", LexConfig)
AutoModel.register(LexConfig, LexModel)
AutoModelForCausalLM.register(LexConfig, LexForCausalLM)
AutoModelForSequenceClassification.register(LexConfig, LexForSequenceClassification)
AutoModelForTokenClassification.register(LexConfig, LexForTokenClassification)
AutoModelForQuestionAnswering.register(LexConfig, LexForQuestionAnswering)
# Saving a model then saves its code, which loads where lex_hf is not installed.
LexConfig.register_for_auto_class()
LexModel.register_for_auto_class("AutoModel")
LexForCausalLM.register_for_auto_class("AutoModelForCausalLM")
LexForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
LexForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
LexForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")


def metric_path(name: str = "perplexity") -> str:
    """Return the path of a metric of this package, for `evaluate.load`.

    Raises:
        ValueError: If there is no metric of that name.

    Example:
        >>> import lex_hf
        >>> lex_hf.metric_path().endswith("perplexity")
        True
    """
    metrics = resources.files(__name__) / "evaluation" / "metrics"
    known = sorted(entry.name for entry in metrics.iterdir() if (entry / f"{entry.name}.py").is_file())
    if name not in known:
        raise ValueError(f"There is no metric {name!r}; there are: {', '.join(known)}.")
    return str(metrics / name)

"""Length-Extrapolatable (LEX) Transformers for Hugging Face.

Importing the package registers its classes with the Auto classes, so that `AutoModelForCausalLM.from_pretrained` loads
LEX checkpoints. See arXiv 2212.10554.
"""

from importlib import resources

from . import interrupts as interrupts  # first: what follows takes seconds

# isort: split

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .cache_files import load_cache, save_cache
from .cache_lex import LexCache
from .checks import PositionCheck, check_positions
from .configuration_lex import LexConfig
from .modeling_lex import (
    LexForCausalLM,
    LexForQuestionAnswering,
    LexForSequenceClassification,
    LexForTokenClassification,
    LexModel,
)
from .receptive_field import ReceptiveField, receptive_field, theoretical_receptive_field
from .resolution import Resolution, attention_resolution, expected_attention, measure_resolution
from .static_cache_lex import LexStaticCache
from .torchscale import from_torchscale
from .warm_start import from_gpt2

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
    metrics = resources.files(__name__) / "metrics"
    known = sorted(entry.name for entry in metrics.iterdir() if (entry / f"{entry.name}.py").is_file())
    if name not in known:
        raise ValueError(f"There is no metric {name!r}; there are: {', '.join(known)}.")
    return str(metrics / name)

"""Length-Extrapolatable (LEX) Transformers for Hugging Face.

Importing the package registers its classes with the Auto classes, so that `AutoModelForCausalLM.from_pretrained` loads
LEX checkpoints. See arXiv 2212.10554.

Nothing is imported before it is used: names on first access, and what is registered together with the Auto classes
themselves.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .lazy import AfterImport, Extras, MovedModules, exports

_ROOMS = ("app", "cli", "convert", "data", "evaluation", "hub", "inference", "model", "reproduce", "rope", "training")
# New place of each module of version 0.1.0 by its old name.
_MOVED = {
    "cache_files": "inference.cache_files",
    "cache_lex": "model.cache_lex",
    "card": "hub.card",
    "checks": "evaluation.invariance",
    "comparison": "evaluation.comparison",
    "configuration_lex": "model.configuration_lex",
    "context_parallel": "inference.context_parallel",
    "estimate": "training.estimate",
    "loading": "evaluation.loading",
    "masking_lex": "model.masking_lex",
    "modeling_lex": "model.modeling_lex",
    "perplexity": "evaluation.perplexity",
    "plots": "evaluation.plots",
    "positions_lex": "model.positions_lex",
    "recipes": "training.recipes",
    "resolution": "evaluation.resolution",
    "serve": "inference.serve",
    "static_cache_lex": "model.cache_lex",
    "streaming": "data.streaming",
    "tiny": "reproduce.tiny",
    "tokenization": "data.tokenizers",
    "torchscale": "convert.torchscale",
    "warm_start": "convert.gpt2",
}

# Module that defines each name.
_NAMES = {
    "LexCache": "model.cache_lex",
    "LexConfig": "model.configuration_lex",
    "LexForCausalLM": "model.modeling_lex",
    "LexForQuestionAnswering": "model.modeling_lex",
    "LexForSequenceClassification": "model.modeling_lex",
    "LexForTokenClassification": "model.modeling_lex",
    "LexModel": "model.modeling_lex",
    "LexStaticCache": "model.cache_lex",
    "PackedWeightsConfig": "inference.packed_weights",
    "PositionCheck": "evaluation.invariance",
    "ReceptiveField": "evaluation.receptive_field",
    "RecallResult": "evaluation.recall",
    "Resolution": "evaluation.resolution",
    "TextRecall": "evaluation.recall_tasks",
    "TokenRecall": "evaluation.recall_tasks",
    "attention_resolution": "evaluation.resolution",
    "blockwise": "rope.blockwise",
    "check_positions": "evaluation.invariance",
    "expected_attention": "evaluation.resolution",
    "from_gpt2": "convert.gpt2",
    "from_torchscale": "convert.torchscale",
    "load_cache": "inference.cache_files",
    "measure_recall": "evaluation.recall",
    "measure_resolution": "evaluation.resolution",
    "receptive_field": "evaluation.receptive_field",
    "restore": "rope.blockwise",
    "save_cache": "inference.cache_files",
    "theoretical_receptive_field": "evaluation.receptive_field",
}

if TYPE_CHECKING:
    from .convert.gpt2 import from_gpt2 as from_gpt2
    from .convert.torchscale import from_torchscale as from_torchscale
    from .evaluation.invariance import PositionCheck as PositionCheck
    from .evaluation.invariance import check_positions as check_positions
    from .evaluation.recall import RecallResult as RecallResult
    from .evaluation.recall import measure_recall as measure_recall
    from .evaluation.recall_tasks import TextRecall as TextRecall
    from .evaluation.recall_tasks import TokenRecall as TokenRecall
    from .evaluation.receptive_field import ReceptiveField as ReceptiveField
    from .evaluation.receptive_field import receptive_field as receptive_field
    from .evaluation.receptive_field import theoretical_receptive_field as theoretical_receptive_field
    from .evaluation.resolution import Resolution as Resolution
    from .evaluation.resolution import attention_resolution as attention_resolution
    from .evaluation.resolution import expected_attention as expected_attention
    from .evaluation.resolution import measure_resolution as measure_resolution
    from .inference.cache_files import load_cache as load_cache
    from .inference.cache_files import save_cache as save_cache
    from .inference.packed_weights import PackedWeightsConfig as PackedWeightsConfig
    from .model.cache_lex import LexCache as LexCache
    from .model.cache_lex import LexStaticCache as LexStaticCache
    from .model.configuration_lex import LexConfig as LexConfig
    from .model.modeling_lex import LexForCausalLM as LexForCausalLM
    from .model.modeling_lex import LexForQuestionAnswering as LexForQuestionAnswering
    from .model.modeling_lex import LexForSequenceClassification as LexForSequenceClassification
    from .model.modeling_lex import LexForTokenClassification as LexForTokenClassification
    from .model.modeling_lex import LexModel as LexModel
    from .rope.blockwise import blockwise as blockwise
    from .rope.blockwise import restore as restore
else:
    __getattr__, __dir__ = exports(__name__, _NAMES, modules=(*_ROOMS, *_MOVED))

__version__ = "0.2.0"
__all__ = sorted([*_NAMES, "metric_path"])

# Modules that the extras of pyproject.toml bring.
_EXTRAS = {
    "eval": ("accelerate", "datasets", "evaluate", "pyarrow", "scipy"),
    "train": ("accelerate", "datasets", "pyarrow", "scipy", "yaml"),
    "plot": ("matplotlib",),
    "cli": ("jinja2", "rich", "typer", "yaml"),
    "app": ("gradio",),
}

sys.meta_path[:0] = [MovedModules(__name__, _MOVED), Extras(__name__, "lex-hf", _EXTRAS)]


def _register_config() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from .model.configuration_lex import LexConfig

    AutoConfig.register("lex", LexConfig)


def _register_models() -> None:
    from transformers.models.auto import modeling_auto

    from .model import modeling_lex
    from .model.configuration_lex import LexConfig

    for auto, target in modeling_lex.AUTO_MAP.items():
        module, _, name = target.partition(".")
        if module == "modeling_lex":
            getattr(modeling_auto, auto).register(LexConfig, getattr(modeling_lex, name))


AfterImport(
    {
        "transformers.models.auto.configuration_auto": _register_config,
        "transformers.models.auto.modeling_auto": _register_models,
    },
    packages=("transformers", f"{__name__}.model"),
).install()


def metric_path(name: str = "perplexity") -> str:
    """Return the path of a metric of this package, for `evaluate.load`.

    Raises:
        ValueError: If there is no metric of that name.

    Example:
        >>> import lex_hf
        >>> lex_hf.metric_path().endswith("perplexity")
        True
    """
    metrics = Path(__file__).parent / "evaluation" / "metrics"
    known = sorted(entry.name for entry in metrics.iterdir() if (entry / f"{entry.name}.py").is_file())
    if name not in known:
        raise ValueError(f"There is no metric {name!r}; there are: {', '.join(known)}.")
    return str(metrics / name)

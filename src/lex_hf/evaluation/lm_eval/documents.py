"""The documents of the task `long_documents` of lm-evaluation-harness."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from lex_hf.data.documents import load_documents
from lex_hf.evaluation.loading import check_checkpoint
from lex_hf.model.modeling_lex import LexForCausalLM


def load(documents: str | list[str] | None = None, pretrained: Any = None, **_: Any) -> dict[str, Dataset]:
    """Load the documents that `--metadata` names.

    Args:
        documents: One source or several, see `lex_hf.data.load_documents`: JSON lines with a field `text`, other text
            files (each one document), or folders.
        pretrained: The model, if lm_eval loads it. The folder of a LEX model must hold all of its weights: the
            harness would measure random numbers in their place.
        **_: Other arguments of lm_eval: those of the model, and the version of the task.

    Returns:
        The split `test`, with the columns `text` and `source`, one row per document.

    Raises:
        FileNotFoundError: If a source does not exist.
        ValueError: If no documents are named, a source cannot be read, or the model lacks weights.
    """
    if not documents:
        raise ValueError(
            f"documents = {documents!r}: the task long_documents needs at least one file or folder. Add "
            '--metadata \'{"documents": "FILE.jsonl"}\' to lm_eval, or metadata= to its TaskManager.'
        )
    if _is_lex(pretrained):
        check_checkpoint(LexForCausalLM, pretrained)
    return {"test": load_documents([documents] if isinstance(documents, str) else documents)}


def _is_lex(pretrained: Any) -> bool:
    """True if a model is the folder of a LEX model."""
    if not isinstance(pretrained, str) or not Path(pretrained, "config.json").is_file():
        return False
    config = json.loads(Path(pretrained, "config.json").read_bytes())
    return isinstance(config, dict) and config.get("model_type") == "lex"

"""The documents of the task `long_documents` of lm-evaluation-harness."""

from typing import Any

from datasets import Dataset

from lex_hf.data import load_documents


def load(documents: str | list[str] | None = None, **_: Any) -> dict[str, Dataset]:
    """Load the documents that `--metadata` names.

    Args:
        documents: One source or several: JSON lines with a field `text`, other text files (each one document),
            or folders, as `lex_hf.data.load_documents` takes them.
        **_: What else lm_eval passes: the arguments of the model and the version of the task.

    Returns:
        The split `test`, with the columns `text` and `source`, one row per document.

    Raises:
        FileNotFoundError: If a source does not exist.
        ValueError: If no documents are named, or a source cannot be read.
    """
    if not documents:
        raise ValueError(
            f"documents = {documents!r}: the task long_documents needs at least one file or folder. Add "
            '--metadata \'{"documents": "FILE.jsonl"}\' to lm_eval, or metadata= to its TaskManager.'
        )
    return {"test": load_documents([documents] if isinstance(documents, str) else documents)}

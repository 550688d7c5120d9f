"""A folder with a LEX model that has the weights of another model, and with its tokenizer."""

from pathlib import Path
from typing import Any

from lex_hf.convert.gpt2 import from_gpt2
from lex_hf.convert.torchscale import from_torchscale
from lex_hf.data.tokenizers import check_vocabulary
from lex_hf.model.modeling_lex import LexForCausalLM
from lex_hf.training.recipes import load_tokenizer
from lex_hf.training.saving import save_pretrained


def warm_start(
    source: str, output: Path, *, tokenizer: str | None = None, **fields: Any
) -> tuple[LexForCausalLM, str | None]:
    """Convert a model and save it in a new or empty folder.

    Args:
        source: Folder or Hub id of a GPT-2, or file of an official (torchscale) checkpoint.
        output: Folder for the LEX model.
        tokenizer: Folder or Hub id of its tokenizer, or `bytes`; GPT-2's own by default.
        fields: Fields of `LexConfig`.

    Returns:
        The model, and the name of the tokenizer that was saved with it, if one was.

    Raises:
        ValueError: If the source or the tokenizer does not load, or a field or the tokenizer does not fit.
        OSError: If the folder cannot be written.
    """
    is_file = Path(source).is_file()
    model = from_torchscale(source, **fields) if is_file else from_gpt2(source, **fields)
    name = (None if is_file else source) if tokenizer is None else tokenizer
    parts: list[Any] = [model]
    if name is not None:
        words = load_tokenizer(name)
        check_vocabulary(words, model.config.vocab_size)
        parts.insert(0, words)
    save_pretrained(output, *parts)
    return model, name

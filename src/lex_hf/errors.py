"""Errors of other libraries as sentences."""

from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError


@contextmanager
def explained(source: str, wanted: str) -> Iterator[None]:
    """Turn any error of loading something into one that names it and its source.

    Args:
        source: File, folder or Hub id.
        wanted: Object to load, e.g. `"a tokenizer (tokenizer.json)"`.

    Raises:
        ValueError: If the block raises an error.
    """
    try:
        yield
    except Exception as error:  # damaged files make the libraries raise anything, tokenizers bare Exceptions
        raise ValueError(f"Could not load {wanted} from {source!r}: {plain(error)}") from error


def plain(error: BaseException) -> str:
    """Return the message of an error in one line."""
    if isinstance(error, UnpicklingError):  # torch recommends to let the pickle run its code
        return (
            "a file is neither safetensors nor a file of torch.save that holds tensors alone. Other pickles are not "
            "loaded, because they can run code: save the weights as safetensors"
        )
    return " ".join(str(error).split()) or type(error).__name__

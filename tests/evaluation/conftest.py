"""A saved LEX model."""

import pytest
from helpers.perplexity import TOKENIZER, lex


@pytest.fixture(scope="module")
def lex_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved LEX model with its tokenizer."""
    path = str(tmp_path_factory.mktemp("model"))
    lex("blockwise").save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path

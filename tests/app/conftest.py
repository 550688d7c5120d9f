import pytest
from helpers.models import BYTES, tiny_model
from helpers.rope_models import rope_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lex_hf.data.tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def lex() -> PreTrainedModel:
    return tiny_model(**BYTES)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return rope_model(**BYTES, max_position_embeddings=16, num_hidden_layers=2)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer()

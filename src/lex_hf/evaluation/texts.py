"""Texts as the token sequences that are scored."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lex_hf.data.tokenizing import tokenize


@dataclass(frozen=True)
class Document:
    """Tokens of one text.

    Attributes:
        tokens: Token ids, the start token first if there is one, int64, shape `(tokens,)`.
        size: UTF-8 bytes of the text that is read.
        text: SHA-256 of these bytes, as hexadecimal digits.
    """

    tokens: Tensor
    size: int
    text: str


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], add_start_token: bool, max_length: int | None
) -> list[Document]:
    """Tokenize texts; special tokens are not added, except for the start token.

    Args:
        tokenizer: The model's tokenizer.
        texts: At least one text.
        add_start_token: Whether to prepend the BOS token.
        max_length: Number of tokens kept of each text, the start token included; `None` keeps all.

    Raises:
        ValueError: If there are no texts, one is not a string or has fewer than two tokens, or there is no BOS token.
    """
    _check_texts(texts)
    if add_start_token and tokenizer.bos_token_id is None:
        raise ValueError(
            "add_start_token = True, but the tokenizer has no BOS token. Set tokenizer.bos_token, or pass "
            "add_start_token=False: the first token of each text is then not scored."
        )
    start = [tokenizer.bos_token_id] if add_start_token else []
    room = None if max_length is None else max_length - len(start)
    return [
        _document(tokenizer, index, text, start, ids, room)
        for index, (text, ids) in enumerate(zip(texts, tokenize(texts, tokenizer), strict=True))
    ]


def check_vocabulary(model: PreTrainedModel, documents: Sequence[Document]) -> None:
    """Check that a model has an embedding for every token.

    Raises:
        ValueError: If not.
    """
    size = model.get_input_embeddings().weight.shape[0]
    for index, document in enumerate(documents):
        largest = int(document.tokens.max())
        if largest >= size:
            raise ValueError(
                f"Text {index} (counted from 0) holds the token id {largest}, but the model's vocabulary has "
                f"{size} ids. Use the tokenizer the model was trained with."
            )


def _document(
    tokenizer: PreTrainedTokenizerBase,
    index: int,
    text: str,
    start: list[int],
    ids: NDArray[np.int32],
    room: int | None,
) -> Document:
    """Keep `room` tokens of one text; the bytes counted are those of the tokens kept."""
    kept = ids[:room]
    tokens = torch.cat([torch.tensor(start, dtype=torch.long), torch.from_numpy(kept)])
    if len(tokens) < 2:
        raise ValueError(
            f"Text {index} (counted from 0), {text[:40]!r}, gives the tokens {tokens.tolist()}; the first is "
            "not scored, so at least 2 are needed. Leave the text out, or check the tokenizer."
        )
    read = text if len(kept) == len(ids) else tokenizer.decode(kept, clean_up_tokenization_spaces=False)
    content = read.encode()
    return Document(tokens, len(content), hashlib.sha256(content).hexdigest())


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise ValueError("The texts are a single string; they must be a list of strings: put it into a list.")
    if len(texts) == 0:
        raise ValueError("There are no texts; at least one is needed.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"Text {index} (counted from 0) is a {type(text).__name__}; it must be a string.")

"""Texts as the token sequences that are scored."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lex_hf.data.tokenizing import tokenize


@dataclass(frozen=True)
class Document:
    """Tokens of one text."""

    tokens: Tensor  # ids, the start token first if there is one, int64, shape (tokens,)
    size: int  # UTF-8 bytes of the text that is read
    text: str  # SHA-256 of these bytes, as hexadecimal digits


def encode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    add_start_token: bool,
    max_length: int | None,
) -> list[Document]:
    """Tokenize texts; see `compute_perplexity`. Special tokens are not added, except for the start token.

    Raises:
        ValueError: If there are no texts, one is not a string or has fewer than two tokens, there is no BOS token, or
            the model has no embedding for a token.
    """
    _check_texts(texts)
    if add_start_token and tokenizer.bos_token_id is None:
        raise ValueError(
            "add_start_token = True, but the tokenizer has no BOS token. Set tokenizer.bos_token, or pass "
            "add_start_token=False: the first token of each text is then not scored."
        )
    start = torch.tensor([tokenizer.bos_token_id] if add_start_token else [], dtype=torch.long)
    room = None if max_length is None else max_length - len(start)
    vocabulary, documents = model.get_input_embeddings().weight.shape[0], []
    for index, (text, ids) in enumerate(zip(texts, tokenize(texts, tokenizer), strict=True)):
        kept = ids[:room]
        tokens = torch.cat([start, torch.from_numpy(kept)])
        if len(tokens) < 2:
            raise ValueError(
                f"Text {index} (counted from 0), {text[:40]!r}, gives the tokens {tokens.tolist()}; the first is "
                "not scored, so at least 2 are needed. Leave the text out, or check the tokenizer."
            )
        largest = int(tokens.max())
        if largest >= vocabulary:
            raise ValueError(
                f"Text {index} (counted from 0) holds the token id {largest}, but the model's vocabulary has "
                f"{vocabulary} ids. Use the tokenizer the model was trained with."
            )
        read = text if len(kept) == len(ids) else tokenizer.decode(kept, clean_up_tokenization_spaces=False)
        content = read.encode()
        documents.append(Document(tokens, len(content), hashlib.sha256(content).hexdigest()))
    return documents


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise ValueError("The texts are a single string; they must be a list of strings: put it into a list.")
    if len(texts) == 0:
        raise ValueError("There are no texts; at least one is needed.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"Text {index} (counted from 0) is a {type(text).__name__}; it must be a string.")

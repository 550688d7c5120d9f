"""Byte-level tokenizers: one that needs no training and no download, and one trained on one's own texts."""

from collections.abc import Iterable
from itertools import chain

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 2**22


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per UTF-8 byte, whose id is the value of the byte.

    Id 256 is `<|endoftext|>`, which begins and ends texts and fills batches on the left. Decoding returns the
    text exactly. As with any transformers tokenizer, `<|endoftext|>` written in a text is read as that token.

    Returns:
        A tokenizer of 257 ids without a maximum length. Saved with a model, it loads through `AutoTokenizer`.

    Example:
        >>> byte_tokenizer()("né")["input_ids"]
        [110, 195, 169]
    """
    # Byte-level models write each byte as one printable character (the table of GPT-2).
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _of_bytes(tokenizer)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, the kind of tokenizer that GPT-2 has.

    Any text can be encoded, and decoding returns it exactly. The last id is `<|endoftext|>`, which begins and ends
    texts and fills batches on the left.

    Args:
        texts: Texts to learn merges from.
        vocab_size: Number of ids: 256 bytes, the merges, and `<|endoftext|>`.

    Returns:
        A tokenizer without a maximum length; it has fewer than `vocab_size` ids if the texts hold too few pairs.

    Raises:
        ValueError: If `vocab_size` is less than 257 or more than 2^22, or there are no texts.

    Example:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 2, vocab_size=260)
        >>> tokenizer.decode(tokenizer("not né")["input_ids"])
        'not né'
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size = {vocab_size}: must be at least 257, for all bytes and {END_OF_TEXT}.")
    if vocab_size > LARGEST_VOCABULARY:  # memory for all of it is allocated at once
        raise ValueError(f"vocab_size = {vocab_size}: must be at most {LARGEST_VOCABULARY}.")
    texts = iter(texts)
    first = next(texts, None)
    if first is None:
        raise ValueError("There are no texts to train the tokenizer on: all of them are empty.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # The end-of-text token is appended, as in GPT-2.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(chain([first], texts), trainer)
    return _of_bytes(tokenizer)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Check that a model with `vocab_size` ids knows all tokens.

    Raises:
        ValueError: If not.
    """
    if len(tokenizer) > vocab_size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} tokens, but the model vocab_size = {vocab_size}.")


def _of_bytes(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    return for_language_models(tokenizer)


def for_language_models(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give a tokenizer the special tokens and the padding side that training and generation need."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
    )

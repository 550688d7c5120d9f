"""A byte-level tokenizer that needs no training and no download."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END_OF_TEXT = "<|endoftext|>"


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
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        padding_side="left",
    )

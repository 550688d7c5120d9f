"""A text continued by a model."""

from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


def encode_prompt(text: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    """Tokenise a prompt; an empty one becomes the start token.

    Returns:
        `input_ids` and `attention_mask` of shape `(1, tokens)`, on the model's device.

    Raises:
        ValueError: If there is no token, or one that the model does not know.
    """
    inputs = tokenizer(text or tokenizer.bos_token or "", return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("The prompt is empty, and the tokenizer has no start token: give at least one character.")
    largest, size = int(inputs["input_ids"].max()), model.get_input_embeddings().weight.shape[0]
    if largest >= size:
        raise ValueError(
            f"The prompt holds the token id {largest}, but the vocabulary of {model.name_or_path} has {size} ids: use "
            "the tokenizer the model was trained with."
        )
    return inputs.to(model.device)


def continue_text(model: PreTrainedModel, inputs: BatchEncoding, **options: Any) -> torch.Tensor:
    """Continue a prompt from [`encode_prompt`]; the options are arguments of `generate`.

    Returns:
        Ids of the new tokens, shape `(tokens,)`.

    Raises:
        ValueError: If the model cannot read so many tokens.
    """
    try:
        output = model.generate(**inputs, return_dict_in_generate=True, **options)
    except IndexError as error:  # of models whose positions are a table
        raise ValueError(f"{model.name_or_path} cannot read so many tokens ({error}): choose fewer.") from error
    return output.sequences[0, inputs["input_ids"].shape[1] :]

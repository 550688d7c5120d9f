"""What a page does, without the page: a model, read and written with by several people at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lex_hf.app.patterns import Seen, seen
from lex_hf.app.reading import Progress, read_beside
from lex_hf.app.settings import Settings
from lex_hf.app.texts import MOST_CHARACTERS, check_text
from lex_hf.app.turns import Turns
from lex_hf.app.writing import Sampling, Written, write
from lex_hf.evaluation.texts import encode
from lex_hf.inference.generation import encode_prompt


@dataclass(frozen=True)
class Pattern:
    """The attention pattern of a layer.

    Attributes:
        description: What queries see, in words.
        seen: Which keys they see.
    """

    description: str
    seen: Seen


class Desk:
    """A model and its tokenizer, for any number of people; what each of them does is in a generator of their own.

    Args:
        model: A causal language model in evaluation mode.
        tokenizer: Its tokenizer.
        training_length: As of [`Settings`].
        most_characters: Characters of a text, at most.

    Attributes:
        settings: The model in its settings.
        turns: In which people use it.

    Raises:
        ValueError: As of [`Settings`], or if the limit is impossible.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        training_length: int | None = None,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        if most_characters < 1:
            raise ValueError(f"most_characters = {most_characters}: it must be at least 1.")
        self.settings, self.turns = Settings(model, training_length), Turns()
        self.most_characters = most_characters
        self._model, self._tokenizer = model, tokenizer

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self._model.num_parameters()

    def read(self, text: str, names: Sequence[str]) -> Iterator[tuple[Progress, ...]]:
        """Read a text in several settings; see [`read_beside`].

        Raises:
            ValueError: If the text is empty, too long or has fewer than two tokens, or a setting is impossible: at
                once, and not when it is iterated over.
        """
        check_text(text, self.most_characters)
        opened = [self.settings.open(name) for name in names]
        [document] = encode(self._model, self._tokenizer, [text], add_start_token=False, max_length=None)
        return read_beside(opened, document.tokens, self.turns)

    def write(
        self, text: str, name: str, sampling: Sampling, generator: torch.Generator | None = None
    ) -> Iterator[Written]:
        """Continue a text without an end; see [`write`].

        Raises:
            ValueError: As of [`read`].
        """
        check_text(text, self.most_characters)
        opened = self.settings.open(name)
        inputs = encode_prompt(text, self._model, self._tokenizer)
        return write(opened, self._tokenizer, inputs["input_ids"], sampling, self.turns, generator=generator)

    def pattern(self, name: str, layer: int) -> Pattern:
        """Return which keys the queries of a layer see in a setting.

        Args:
            name: Name of the setting.
            layer: Index of the layer.

        Raises:
            ValueError: If the setting is impossible, or it is not known what the layer sees.
        """
        opened, length = self.settings.open(name), self.settings.training_length
        if layer not in opened.patterns or length is None:
            known = ", ".join(map(str, sorted(opened.patterns))) or "no layer"
            raise ValueError(
                f"layer = {layer}: it is not known which keys its queries see; it is known of {known}. Layers without "
                "attention have no keys."
            )
        return Pattern(opened.describe(layer), seen(opened.patterns[layer], length))

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return int(self._model.config.get_text_config().num_hidden_layers)

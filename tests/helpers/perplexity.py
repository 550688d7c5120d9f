"""Models whose perplexity is known or can be told token by token."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import lex_hf
from helpers.models import tiny_model
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import PROTOCOLS, PerplexityResult, compute_perplexity, score_windows

VOCABULARY = 257
EVERY_TARGET = ("chunked", "sliding", "streaming")  # protocols that score each target once
TOKENIZER = byte_tokenizer()
BOS = 256


class BigramConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "test_bigram"
    vocab_size = VOCABULARY


class Bigram(PreTrainedModel):  # type: ignore[misc]
    """The logits of the next token are the row of a table that belongs to the token before; first all zero.

    It notes the shape of every batch it sees, what was asked for, and whether it ran as an evaluation.
    """

    config_class = BigramConfig

    def __init__(self, cached: bool = True) -> None:
        super().__init__(BigramConfig())
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.dropout = nn.Dropout(0.5)
        self.cached = cached
        self.shapes: list[tuple[int, int]] = []
        self.cache_asked_for: set[bool] = set()
        self.as_evaluation = True
        self.post_init()
        nn.init.zeros_(self.table.weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False
    ) -> CausalLMOutputWithPast:
        self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
        self.cache_asked_for.add(use_cache)
        self.as_evaluation &= not self.training and not torch.is_grad_enabled()
        kept = DynamicCache() if use_cache and self.cached else None
        return CausalLMOutputWithPast(logits=self.dropout(self.table(input_ids)), past_key_values=kept)

    def set_probability(self, before: int | str, after: int | str, probability: float) -> None:
        """Make `after` this probable after `before`; all other tokens are equally probable."""
        row = torch.full((VOCABULARY,), math.log((1 - probability) / (VOCABULARY - 1)))
        row[_id(after)] = math.log(probability)
        self.table.weight.data[_id(before)] = row


def _id(token: int | str) -> int:
    return ord(token) if isinstance(token, str) else token


@cache
def neox() -> GPTNeoXForCausalLM:
    """A model of another family, with full attention and positions."""
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=20,
            bos_token_id=BOS,
            eos_token_id=BOS,
        )
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model.eval()


@cache
def lex(pattern: str) -> lex_hf.LexForCausalLM:
    return tiny_model(vocab_size=VOCABULARY, attention_pattern=pattern, bos_token_id=BOS)


def text_of(length: int, seed: int = 0) -> str:
    """Random letters, `length` of them: as many tokens, or one more with the start token."""
    letters = torch.randint(97, 123, (length,), generator=torch.Generator().manual_seed(seed))
    return "".join(map(chr, letters.tolist()))


TEXTS = [text_of(size, seed=size) for size in (17, 30, 8, 23, 11)]


def compute(model: Any, texts: list[str], **options: Any) -> PerplexityResult:
    return compute_perplexity(model, TOKENIZER, texts, **{"progress": False, **options})


@torch.no_grad()
def loss_of(model: Any, text: str, target: int, start: int) -> float:
    """NLL of one token after the tokens from `start` on, by a forward pass of its own."""
    tokens = torch.tensor([BOS, *text.encode()])
    logits = model(input_ids=tokens[None, start:target], use_cache=False).logits[0, -1]
    return -logits.double().log_softmax(-1)[tokens[target]].item()


def reference_losses(model: Any, text: str, length: int | None) -> list[float]:
    """NLL of every token after the start token, one forward pass each.

    The model sees what lies before the token in its segment of `length` inputs, or all of it if `None`.
    """
    targets = range(1, len(text.encode()) + 1)
    return [loss_of(model, text, target, (target - 1) // length * length if length else 0) for target in targets]


def nll_of(model: Any, text: str, protocol: str, length: int, batch_size: int = 3, **options: Any) -> list[float]:
    """Per-token losses of one text, put in order."""
    tokens = torch.tensor([BOS, *text.encode()])
    windows = {0: PROTOCOLS[protocol](len(tokens), length, **options)}
    with torch.no_grad():
        scores = list(score_windows(model, [tokens], windows, batch_size))
    losses = {each.target + offset: nll for each in scores for offset, nll in enumerate(each.nll.tolist())}
    assert sum(len(each.nll) for each in scores) == len(losses), "a token was scored twice"
    assert sorted(losses) == list(range(1, len(tokens))), "a token was not scored"
    return [losses[target] for target in sorted(losses)]

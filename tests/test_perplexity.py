"""Perplexity: hand computations, a token-by-token reference, agreement of protocols, and the metric."""

import inspect
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import lex_hf
from lex_hf.perplexity import (
    PROTOCOLS,
    ContextBucket,
    DocumentScore,
    PerplexityResult,
    Window,
    chunked,
    compute_perplexity,
    last_token,
    load_for_evaluation,
    score_windows,
    sliding,
    streaming,
)
from lex_hf.tokenization import byte_tokenizer

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


def compute(model: Any, texts: list[str], **options: Any) -> PerplexityResult:
    return compute_perplexity(model, TOKENIZER, texts, **{"progress": False, **options})


@torch.no_grad()
def loss_of(model: Any, text: str, target: int, start: int) -> float:
    """NLL of one token after the tokens from `start` on, by a forward pass of its own."""
    tokens = torch.tensor([BOS, *text.encode()])
    logits = model(input_ids=tokens[None, start:target], use_cache=False).logits[0, -1]
    return -logits.double().log_softmax(-1)[tokens[target]].item()


def reference(model: Any, text: str, length: int | None) -> list[float]:
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


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", EVERY_TARGET)
def test_known_probabilities_by_hand(protocol: str) -> None:
    model = Bigram()
    model.set_probability(BOS, "a", 1 / 4)
    model.set_probability("a", "b", 1 / 8)
    model.set_probability("b", "b", 1 / 2)

    result = compute(model, ["ab", "abbb"], protocol=protocol, length=3)

    # 1/4 · 1/8 over two tokens, and 1/4 · 1/8 · 1/2 · 1/2 over four.
    assert result.perplexities == pytest.approx([32 ** (1 / 2), 128 ** (1 / 4)], rel=1e-6)
    assert result.mean_perplexity == pytest.approx((32 ** (1 / 2) + 128 ** (1 / 4)) / 2, rel=1e-6)
    assert result.perplexity == pytest.approx((32 * 128) ** (1 / 6), rel=1e-6)
    assert result.nll == pytest.approx(math.log(32 * 128) / 6, rel=1e-6)
    assert result.tokens == 6
    assert result.bits_per_byte == pytest.approx(12 / 6, rel=1e-6)
    assert (result.protocol, result.length) == (protocol, 3)
    for score, text, bits in zip(result.documents, (b"ab", b"abbb"), (5, 7), strict=True):
        assert score.nll == pytest.approx(bits * math.log(2), rel=1e-6)
        assert (score.tokens, score.bytes, score.text) == (len(text), len(text), sha256(text).hexdigest())


def test_bits_per_byte_counts_bytes_of_utf8() -> None:
    text = "né€😀"  # 1 + 2 + 3 + 4 bytes, and as many tokens
    with_start = compute(Bigram(), [text])
    without = compute(Bigram(), [text], add_start_token=False)
    assert (with_start.tokens, without.tokens) == (10, 9)
    assert with_start.bits_per_byte == pytest.approx(math.log2(VOCABULARY), rel=1e-6)
    assert without.bits_per_byte == pytest.approx(0.9 * math.log2(VOCABULARY), rel=1e-6)


def test_loss_by_position_by_hand() -> None:
    model = Bigram()
    for index, letter in enumerate("abcdef"):
        model.set_probability("fabcde"[index], letter, 2.0 ** -(index + 1))
    model.set_probability(BOS, "a", 2.0**-1)
    bit = math.log(2)  # the losses of "abcdef" are 1, 2, 3, 4, 5, 6 bits

    streamed = compute(model, ["abcdef"], protocol="streaming", length=4).loss_by_position
    assert [(each.start, each.stop, each.tokens) for each in streamed] == [(1, 2, 1), (2, 4, 2), (4, 8, 3)]
    assert [each.nll / bit for each in streamed] == pytest.approx([1, 2.5, 5], rel=1e-5)

    segments = compute(model, ["abcdef"], protocol="chunked", length=4).loss_by_position
    assert [(each.start, each.stop, each.tokens) for each in segments] == [(1, 2, 2), (2, 4, 3), (4, 8, 1)]
    # Contexts 1 2 3 4 1 2: "e" and "f" are in the second segment.
    assert [each.nll / bit for each in segments] == pytest.approx([3, 11 / 3, 4], rel=1e-5)


@pytest.mark.parametrize("protocol", EVERY_TARGET)
def test_losses_are_float32_whatever_the_dtype(protocol: str) -> None:
    model = Bigram().to(torch.bfloat16).eval()
    model.table.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    options = {"stride": 4} if protocol == "sliding" else {}
    got = nll_of(model, text_of(20), protocol, length=6, **options)
    model.float()  # the same rounded table: only the loss itself could differ
    assert got == pytest.approx(reference(model, text_of(20), None), abs=1e-5)


def test_max_length_reads_only_the_beginning() -> None:
    whole, cut = text_of(40), text_of(40)[:12]
    assert compute(neox(), [whole], max_length=13, length=5) == compute(neox(), [cut], length=5)
    assert compute(neox(), [whole], max_length=12, length=5, add_start_token=False) == compute(
        neox(), [cut], length=5, add_start_token=False
    )
    assert compute(neox(), [cut], max_length=99) == compute(neox(), [cut])


def test_default_length_is_the_training_length() -> None:
    assert compute(lex("blockwise"), ["abc"]).length == 14
    assert compute(neox(), ["abc"]).length == 1024


# --- protocols ------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(size=st.integers(1, 40), length=st.integers(1, 45), batch_size=st.integers(1, 4))
def test_chunked_is_the_token_by_token_reference(size: int, length: int, batch_size: int) -> None:
    text = text_of(size, seed=size)
    got = nll_of(neox(), text, "chunked", length, batch_size)
    assert got == pytest.approx(reference(neox(), text, length), abs=1e-4)


@settings(max_examples=8)
@given(size=st.integers(1, 40), length=st.integers(1, 45))
def test_streaming_is_the_token_by_token_reference(size: int, length: int) -> None:
    text = text_of(size, seed=size)
    got = nll_of(neox(), text, "streaming", length)
    assert got == pytest.approx(reference(neox(), text, None), abs=1e-4)


@pytest.mark.parametrize("pattern", ["blockwise", "sliding", "full"])
@settings(max_examples=10)
@given(size=st.integers(1, 120), length=st.integers(1, 125))
def test_streaming_lex_is_one_pass_over_the_document(pattern: str, size: int, length: int) -> None:
    text = text_of(size, seed=size)
    tokens = torch.tensor([[BOS, *text.encode()]])
    with torch.no_grad():
        logits = lex(pattern)(input_ids=tokens[:, :-1], use_cache=False).logits[0]
    whole = F.cross_entropy(logits, tokens[0, 1:], reduction="none").tolist()
    assert nll_of(lex(pattern), text, "streaming", length) == pytest.approx(whole, abs=1e-4)


def test_windows_by_hand() -> None:
    assert chunked(8, 3) == [Window(0, 3, 3), Window(3, 6, 3), Window(6, 7, 1)]
    assert chunked(7, 3) == [Window(0, 3, 3), Window(3, 6, 3)]
    assert chunked(2, 9) == [Window(0, 1, 1)]
    assert streaming(8, 5) == [Window(0, 5, 5, cached=True), Window(5, 7, 2, cached=True)]
    assert sliding(11, 4, stride=2) == [Window(0, 4, 4), Window(2, 6, 2), Window(4, 8, 2), Window(6, 10, 2)]
    assert sliding(10, 4, stride=3) == [Window(0, 4, 4), Window(3, 7, 3), Window(6, 9, 2)]
    assert sliding(3, 4, stride=1) == [Window(0, 2, 2)]
    # Segments 0…4 and 5…9; token 10 is left over.
    assert last_token(11, 5, contexts=[1, 4]) == [Window(3, 4, 1), Window(0, 4, 1), Window(8, 9, 1), Window(5, 9, 1)]


@settings(max_examples=200)
@given(tokens=st.integers(2, 60), length=st.integers(1, 70), data=st.data())
def test_sliding_scores_each_target_once_with_enough_context(tokens: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    windows = sliding(tokens, length, stride=stride)
    contexts = {each.target + more: each.context + more for each in windows for more in range(each.scored)}
    assert sum(each.scored for each in windows) == len(contexts)
    assert sorted(contexts) == list(range(1, tokens))
    for target, context in contexts.items():
        assert min(target, length - stride + 1) <= context <= min(target, length)
    assert all(each.start == index * stride and each.size <= length for index, each in enumerate(windows))
    assert sliding(tokens, length, stride=length) == chunked(tokens, length)


@settings(max_examples=10)
@given(size=st.integers(1, 30), length=st.integers(1, 35), data=st.data())
def test_sliding_is_the_token_by_token_reference(size: int, length: int, data: st.DataObject) -> None:
    stride, text = data.draw(st.integers(1, length)), text_of(size, seed=size)
    got = nll_of(neox(), text, "sliding", length, stride=stride)
    # The first window that reaches the target counts.
    starts = {
        target: next(s for s in range(0, size + 1, stride) if s + length >= target) for target in range(1, size + 1)
    }
    assert got == pytest.approx([loss_of(neox(), text, target, starts[target]) for target in starts], abs=1e-4)


def test_sliding_by_half_a_window_is_the_default() -> None:
    text = text_of(40)
    assert compute(neox(), [text], protocol="sliding", length=9) == compute(
        neox(), [text], protocol="sliding", length=9, stride=4
    )
    assert compute(neox(), [text], protocol="sliding", length=1).options == {"stride": 1}


def test_last_token_by_hand() -> None:
    model = Bigram()
    model.set_probability("c", "d", 1 / 4)
    model.set_probability("g", "d", 1 / 16)
    texts = ["abcd" + "efgd" + "ab", "xxcd"]  # segments of 4: their last tokens cost 2, 4 and 2 bits

    result = compute(model, texts, protocol="last_token", length=4, contexts=[3, 1], add_start_token=False)

    bit = math.log(2)
    assert (result.tokens, result.options) == (3, {"contexts": [1, 3]})
    assert result.nll == pytest.approx(8 / 3 * bit, rel=1e-5)
    assert result.perplexities == pytest.approx([8, 4], rel=1e-5)
    assert [(each.start, each.stop, each.tokens) for each in result.loss_by_position] == [(1, 2, 3), (3, 4, 3)]
    assert [each.perplexity for each in result.loss_by_position] == pytest.approx([2 ** (8 / 3)] * 2, rel=1e-5)
    # 12 targets (the first token of each text is none) in 14 bytes.
    assert result.bits_per_byte == pytest.approx(8 / 3 * 12 / 14, rel=1e-5)


@settings(max_examples=8)
@given(size=st.integers(6, 40), length=st.integers(2, 7))
def test_last_token_is_the_token_by_token_reference(size: int, length: int) -> None:
    text = text_of(size, seed=size)
    result = compute(neox(), [text], protocol="last_token", length=length, contexts=range(1, length))
    targets = range(length - 1, size + 1, length)
    for bucket, context in zip(result.loss_by_position, range(1, length), strict=True):
        losses = [loss_of(neox(), text, target, target - context) for target in targets]
        assert (bucket.start, bucket.tokens) == (context, len(losses))
        assert bucket.nll == pytest.approx(sum(losses) / len(losses), abs=1e-4)


@pytest.mark.parametrize(
    ("length", "contexts"), [(2, [1]), (8, [1, 2, 4, 7]), (9, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 9])]
)
def test_default_contexts(length: int, contexts: list[int]) -> None:
    assert compute(Bigram(), [text_of(20)], protocol="last_token", length=length).options == {"contexts": contexts}


@pytest.mark.parametrize("model", [neox, lambda: lex("blockwise"), lambda: lex("full")])
def test_last_token_with_all_the_context_is_the_end_of_one_pass(model: Any) -> None:
    texts = [text_of(36, seed=seed) for seed in range(3)]  # with the start token, one segment each
    result = compute(model(), texts, protocol="last_token", length=37)
    last = [nll_of(model(), text, "streaming", length=10)[-1] for text in texts]
    assert [each.nll for each in result.documents] == pytest.approx(last, abs=1e-4)


def test_only_the_logits_that_count_are_computed() -> None:
    seen = []
    hook = neox().register_forward_hook(lambda *event: seen.append(tuple(event[-1].logits.shape[:2])))
    try:
        compute(neox(), [text_of(19)], protocol="last_token", length=10, contexts=[9, 4])
        compute(neox(), [text_of(19)], protocol="sliding", length=10, stride=3)
    finally:
        hook.remove()
    assert seen == [(2, 1), (2, 1), (1, 10), (3, 3)]


@pytest.mark.parametrize("model", [neox, lambda: lex("full")])
def test_protocols_agree_on_a_document_that_fits(model: Any) -> None:
    texts = [text_of(30), text_of(17, seed=1)]
    one = compute(model(), texts, protocol="chunked", length=31)
    other = compute(model(), texts, protocol="streaming", length=7)
    assert one.perplexities == pytest.approx(other.perplexities, rel=1e-5)
    assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)


def test_context_helps_where_the_protocol_gives_it() -> None:
    """Streaming must not forget between chunks: `chunked` at the same length does, and differs."""
    text = text_of(40)
    streamed, cut = (nll_of(neox(), text, protocol, length=5) for protocol in ("streaming", "chunked"))
    assert streamed[:5] == pytest.approx(cut[:5], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(streamed[5:], cut[5:], strict=True)) > 1e-2


def test_batch_size_does_not_matter() -> None:
    texts = [text_of(size, seed=size) for size in (23, 1, 50, 23, 8)]
    one, many = (compute(neox(), texts, length=5, batch_size=size) for size in (1, 7))
    assert one.perplexities == pytest.approx(many.perplexities, rel=1e-5)
    assert one.perplexity == pytest.approx(many.perplexity, rel=1e-5)
    assert one.perplexities == pytest.approx(
        [compute(neox(), [text], length=5).perplexity for text in texts], rel=1e-5
    )


@pytest.mark.parametrize("protocol", EVERY_TARGET)
def test_every_length_scores_the_same_tokens(protocol: str) -> None:
    texts = [text_of(23), text_of(9, seed=1)]
    model = Bigram()
    model.table.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    # A bigram model does not care about context, so equal targets mean equal losses.
    results = [compute(model, texts, protocol=protocol, length=length) for length in (1, 2, 5, 23, 24, 99)]
    assert {result.tokens for result in results} == {32}
    for result in results:
        assert result.nll == pytest.approx(results[0].nll, rel=1e-6)
        assert sum(bucket.tokens for bucket in result.loss_by_position) == 32


def test_chunked_never_pads_and_batches_equal_segments() -> None:
    model = Bigram()
    compute(model, [text_of(10), text_of(14), text_of(6)], length=4, batch_size=4)
    # Segments 4 4 2, 4 4 4 2 and 4 2: six of four tokens, three of two.
    assert model.shapes == [(4, 4), (2, 4), (3, 2)]
    assert model.cache_asked_for == {False}


def test_streaming_reads_one_chunk_at_a_time() -> None:
    model = Bigram()
    compute(model, [text_of(10), text_of(3)], protocol="streaming", length=4, batch_size=9)
    assert model.shapes == [(1, 4), (1, 4), (1, 2), (1, 3)]
    assert model.cache_asked_for == {True}


# --- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_model_is_evaluated_and_left_as_it_was(protocol: str) -> None:
    model = Bigram().train()
    model.table.eval()
    compute(model, ["abc"], protocol=protocol, length=4)
    assert model.as_evaluation
    assert [module.training for module in (model, model.table, model.dropout)] == [True, False, True]

    model.table.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="is nan"):
        compute(model, ["abc"], protocol=protocol, length=4)
    assert [module.training for module in (model, model.table, model.dropout)] == [True, False, True]


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    compute(Bigram(), ["abc"], progress=False)
    assert capsys.readouterr().err == ""
    compute(Bigram(), ["abc", "abcd"], progress=True)
    assert "7.00/7.00" in capsys.readouterr().err


class Cramped(Bigram):
    """A model whose device holds batches of at most `room` rows."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutputWithPast:
        if len(input_ids) > self.room:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return super().forward(input_ids, **options)


@pytest.mark.parametrize("records", [False, True])
def test_batch_size_that_fits_is_found(records: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text_of(24), text_of(11, seed=1)]
    options: dict[str, Any] = {"records": tmp_path / "records.jsonl"} if records else {}
    model = Cramped(room=5)
    found = compute(model, texts, length=4, batch_size="auto", progress=True, **options)
    assert found == compute(Bigram(), texts, length=4)
    assert max(rows for rows, _ in model.shapes) == 5
    assert "35.0/35.0" in capsys.readouterr().err


def test_what_is_computed_again_is_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [
        text_of(8),
        *(text_of(3, seed=seed) for seed in range(6)),
    ]
    # One window of 5 tokens fits, then seven of 3 do not.
    compute(Cramped(room=6), texts, length=5, batch_size="auto", progress=True)
    assert "26.0/26.0" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["chunked", "streaming"])
def test_memory_for_no_batch_at_all(protocol: str) -> None:
    with pytest.raises(ValueError, match=r"batch_size = 'auto': .* a single window of 4 tokens"):
        compute(Cramped(room=0), [text_of(9)], protocol=protocol, length=4, batch_size="auto")


def test_other_errors_are_not_taken_for_lack_of_memory() -> None:
    model = Bigram()
    model.forward = lambda **_: (_ for _ in ()).throw(RuntimeError("shapes differ"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="shapes differ"):
        compute(model, ["abc"], batch_size="auto")


def test_positions_that_end() -> None:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=BOS, eos_token_id=BOS, **sizes)).eval()
    assert compute(model, [text_of(40)], length=16).tokens == 40
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel cannot read 17 tokens here .* choose a smaller length"):
        compute(model, [text_of(40)], length=17)


def test_confidence_interval() -> None:
    model = Bigram()
    model.set_probability("a", "a", 1 / 4)
    model.set_probability("b", "b", 1 / 2)
    options: dict[str, Any] = {"add_start_token": False}
    alone = compute(model, ["aaa"], **options)
    assert alone.confidence_interval is None
    assert "single text" in alone.confidence_note
    # Of the four ways to draw two texts, each end is one, with a probability of a quarter.
    both = compute(model, ["aaa", "bb"], **options)
    assert both.confidence_interval == pytest.approx((2, 4), rel=1e-5)
    assert both.confidence_level == 0.95
    assert "2 texts" in both.confidence_note
    assert compute(model, ["aaa"] * 5, **options).confidence_interval == pytest.approx((4, 4), rel=1e-5)


def test_confidence_interval_draws_texts_with_their_tokens() -> None:
    """Against a loop over draws, for texts of very different size."""
    model = Bigram()
    model.table.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    result = compute(model, [text_of(size, seed=size) for size in (2, 3, 5, 40, 60)])
    nll, tokens = (torch.tensor([getattr(each, name) for each in result.documents]) for name in ("nll", "tokens"))
    drawn = torch.randint(5, (20_000, 5), generator=torch.Generator().manual_seed(1))
    perplexities = torch.stack([(nll[draw].sum() / tokens[draw].sum()).exp() for draw in drawn])
    expected = perplexities.double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert result.confidence_interval == pytest.approx(expected, rel=0.02)
    assert expected[1] > 1.1 * expected[0]


def test_result_is_ready_for_json() -> None:
    result = compute(neox(), [text_of(9), text_of(5)], length=4, protocol="last_token")
    loaded = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    loaded["loss_by_position"] = [ContextBucket(**bucket) for bucket in loaded["loss_by_position"]]
    loaded["documents"] = [DocumentScore(**document) for document in loaded["documents"]]
    loaded["confidence_interval"] = tuple(loaded["confidence_interval"])
    assert PerplexityResult(**loaded) == result


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "There are no texts"),
        ("abc", {}, "a single string"),
        (["abc", 5], {}, r"Text 1 .* is a int"),
        (["abc", ""], {}, r"Text 1 .*, '', gives the tokens \[256\]"),
        (["abc", "a"], {"add_start_token": False}, r"Text 1 .*, 'a', gives the tokens \[97\]"),
        (["abc"], {"protocol": "strided"}, "protocol = 'strided': it must be one of chunked, last_token, sliding, "),
        (["abc"], {"length": 0}, "length = 0: it must be at least 1"),
        (["abc"], {"batch_size": 0}, "batch_size = 0: it must be at least 1"),
        (["abc"], {"batch_size": "all"}, "batch_size = 'all': it must be a whole number of at least 1, or 'auto'"),
        (["abc"], {"max_length": 1}, "max_length = 1: it must be at least 2"),
        (["abc"], {"stride": 2}, "stride = 2: the protocol 'chunked' has no such option; it has none of its own"),
        (["abc"], {"protocol": "sliding", "contexts": [1]}, "'sliding' has no such option; it has stride"),
        (["abc"], {"protocol": "sliding", "length": 4, "stride": 5}, "stride = 5: it must be 1 to length = 4"),
        (["abc"], {"protocol": "sliding", "length": 4, "stride": 0}, "stride = 0: it must be 1 to length = 4"),
        (["abc"], {"protocol": "last_token", "length": 1}, "length = 1: it must be at least 2 with protocol"),
        (
            ["abc"],
            {"protocol": "last_token", "length": 4, "contexts": [1, 4]},
            r"contexts = \[1, 4\]: each must be 1 to length - 1 = 3",
        ),
        (["abc"], {"protocol": "last_token", "length": 4, "contexts": []}, r"contexts = \[\]: .* one at least"),
        (
            ["abcd", "abc"],
            {"protocol": "last_token", "length": 5},
            r"Text 1 \(counted from 0\): it has 4 tokens .* needs at least length = 5",
        ),
    ],
)
def test_bad_input(texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute(Bigram(), texts, **options)


def test_tokenizer_without_bos() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(ValueError, match="no BOS token"):
        compute_perplexity(Bigram(), tokenizer, ["abc"], progress=False)
    assert compute_perplexity(Bigram(), tokenizer, ["abc"], add_start_token=False, progress=False).tokens == 2


def test_special_tokens_are_not_added() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A {tokenizer.eos_token}", special_tokens=[(tokenizer.bos_token, BOS)]
    )
    assert tokenizer("a")["input_ids"] == [BOS, 97, BOS]
    options: dict[str, Any] = {"length": 4, "progress": False}
    for add_start_token in (True, False):
        options["add_start_token"] = add_start_token
        assert compute_perplexity(neox(), tokenizer, ["abcdef"], **options) == compute(neox(), ["abcdef"], **options)


def test_tokenizer_of_another_model() -> None:
    model = tiny_model(vocab_size=100)
    with pytest.raises(ValueError, match=r"Text 1 .* holds the token id 120, .* has 100 ids"):
        compute(model, ["abc", "axb"], add_start_token=False)


@pytest.mark.parametrize("protocol", EVERY_TARGET)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_loss_that_is_not_finite(protocol: str, value: float) -> None:
    model = Bigram()
    model.table.weight.data[ord("x"), ord("y")] = value
    with pytest.raises(ValueError, match=r"token 6 of text 1 .* is (nan|inf)"):
        compute(model, ["abc", "abcdxyz"], protocol=protocol, length=2)


def test_streaming_needs_a_cache() -> None:
    with pytest.raises(ValueError, match="Bigram returns no past_key_values"):
        compute(Bigram(cached=False), ["abc"], protocol="streaming")


# --- records --------------------------------------------------------------------------------------

TEXTS = [text_of(size, seed=size) for size in (17, 30, 8, 23, 11)]


def shapes_of(model: Bigram, texts: list[str], **options: Any) -> list[tuple[int, int]]:
    """Shapes of the batches of one evaluation."""
    model.shapes.clear()
    compute(model, texts, **options)
    return list(model.shapes)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_records_change_nothing_and_are_not_computed_again(protocol: str, tmp_path: Path) -> None:
    path, options = tmp_path / "records.jsonl", {"protocol": protocol, "length": 6}
    recorded = compute(neox(), TEXTS, records=path, **options)
    plain = compute(neox(), TEXTS, **options)
    assert recorded.perplexity == pytest.approx(plain.perplexity, rel=1e-5)
    assert recorded.perplexities == pytest.approx(plain.perplexities, rel=1e-5)
    assert [b.nll for b in recorded.loss_by_position] == pytest.approx([b.nll for b in plain.loss_by_position])

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_text = {line["text"]: line for line in lines}
    assert len(lines) == len(by_text) == len(TEXTS)
    for text, document in zip(TEXTS, recorded.documents, strict=True):
        line = by_text[sha256(text.encode()).hexdigest()]
        assert [line[name] for name in ("nll", "tokens", "bytes")] == [document.nll, document.tokens, len(text)]

    before = path.read_bytes()
    seen: list[Any] = []
    hook = neox().register_forward_hook(lambda *event: seen.append(event))
    try:
        assert compute(neox(), [*TEXTS[1:], TEXTS[0]], records=str(path), **options).tokens == recorded.tokens
        assert compute(neox(), TEXTS, records=path, **options) == recorded
    finally:
        hook.remove()
    assert seen == []
    assert path.read_bytes() == before


def test_only_what_is_the_same_in_all_respects_is_taken_from_the_records(tmp_path: Path) -> None:
    model, options = Bigram(), {"records": tmp_path / "records.jsonl", "length": 6}
    first = shapes_of(model, TEXTS, **options)
    assert len(first) > 0
    assert shapes_of(model, [*TEXTS, "new"], **options) == [(1, 3)]
    assert shapes_of(model, TEXTS, **options, batch_size=1) == []
    for other in ({"length": 5}, {"protocol": "streaming"}, {"add_start_token": False}, {"max_length": 7}):
        assert shapes_of(model, TEXTS, **{**options, **other}) != []
        assert shapes_of(model, TEXTS, **{**options, **other}) == []
    for stride in (2, 3):
        assert shapes_of(model, TEXTS, **options, protocol="sliding", stride=stride) != []
    assert shapes_of(model, TEXTS, **options, protocol="sliding") == []  # 3 is half of 6
    model.config.some_setting = 7
    assert shapes_of(model, TEXTS, **options) == first
    model.table.weight.data[200, 100] += 1  # trained on, in the same folder
    assert shapes_of(model, TEXTS, **options) == first
    assert shapes_of(model.bfloat16(), TEXTS, **options) == first


def test_equal_texts_are_computed_once(tmp_path: Path) -> None:
    model = Bigram()
    result = compute(model, ["abc", "abc", "abc"], records=tmp_path / "records.jsonl")
    assert model.shapes == [(1, 3)]
    assert result.tokens == 9


KILLED = """
import os, signal, sys
from lex_hf.perplexity import compute_perplexity, load_for_evaluation

folder, records, *texts = sys.argv[1:]
model, tokenizer = load_for_evaluation(folder, device="cpu")
passes = 0

def kill_in_the_eighth(*_):
    global passes
    passes += 1
    if passes == 8:
        os.kill(os.getpid(), signal.SIGKILL)

model.register_forward_pre_hook(kill_in_the_eighth)
compute_perplexity(model, tokenizer, texts, length=6, batch_size=2, records=records, progress=False)
"""


@pytest.mark.processes
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, folder: str) -> None:
    path, options = tmp_path / "records.jsonl", {"length": 6, "batch_size": 2}
    command = [sys.executable, "-c", KILLED, folder, str(path), *TEXTS]
    killed = subprocess.run(command, env=os.environ, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    # 30 tokens take three passes; 23 take two and one for the rest; the kill came within the 17.
    finished = path.read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in finished] == [30, 23]
    path.write_text("\n".join(finished) + "\n" + finished[0][:50])  # as if the kill had come while writing

    model, _ = load_for_evaluation(folder, device="cpu")
    shapes: list[Any] = []
    model.register_forward_pre_hook(
        lambda module, arguments, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    resumed = compute(model, TEXTS, records=path, **options)
    assert shapes == [(2, 6), (1, 5), (1, 6), (1, 5), (1, 6), (1, 2)]  # of 17, 11 and 8 tokens
    assert resumed == compute(model, TEXTS, records=tmp_path / "whole.jsonl", **options)
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()


@pytest.mark.parametrize("protocol", ["chunked", "sliding"])
def test_logits_of_a_long_text_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    model = tiny_model(vocab_size=257, bos_token_id=256, pad_token_id=256)
    options = {"length": 16, "protocol": protocol, "batch_size": 2}
    whole = compute(model, TEXTS, **options)
    largest = []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: largest.append(inputs[0].shape[0]))
    monkeypatch.setattr("lex_hf.perplexity._LOGITS_AT_ONCE", 7)
    assert compute(model, TEXTS, **options).nll == pytest.approx(whole.nll, rel=1e-6)
    assert max(largest) == 7


def test_full_disk_loses_nothing(tmp_path: Path) -> None:
    path, options = tmp_path / "records.jsonl", {"length": 6}
    whole = compute(Bigram(), TEXTS, records=path, **options)
    lines = path.read_bytes().splitlines(keepends=True)
    path.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines[0]) + len(lines[1]) + 20, hard))
    try:
        with pytest.raises(OSError, match=r"records = '.*records.jsonl' cannot be .* What was recorded before is"):
            compute(Bigram(), TEXTS, records=path, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes().startswith(lines[0] + lines[1])
    model = Bigram()
    assert compute(model, TEXTS, records=path, **options) == whole
    assert path.read_bytes().splitlines(keepends=True) == lines
    assert len(model.shapes) == len(shapes_of(Bigram(), TEXTS[:1], **options)) + sum(
        len(shapes_of(Bigram(), [text], **options)) for text in (TEXTS[2], TEXTS[4])
    )


def test_records_in_no_folder_and_in_a_folder(tmp_path: Path) -> None:
    model = Bigram()
    for path in (tmp_path / "missing" / "records.jsonl", tmp_path):
        with pytest.raises(OSError, match="cannot be read or written"):
            compute(model, ["abc"], records=path)
    assert model.shapes == [], "found out before any work is done"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"key": "k", "nll": 1.0}\n', "line 1 of .* is no record"),
        ('{"key": "k", "nll": 1.0, "tokens": 1, "positions": []}\n[]\n', "line 2 of .* is no record"),
        ("A book.\nIts second line.\n", "line 1 of .* is no record"),
        ("A book without an end of line", "ends with something that is no record"),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "book.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        compute(Bigram(), ["abc"], records=path)
    assert path.read_text() == content


# --- several processes ----------------------------------------------------------------------------

SHARED = """
import json, os, sys
from pathlib import Path
import evaluate, lex_hf
from lex_hf.cli import app
from lex_hf.perplexity import compute_perplexity, load_for_evaluation

evaluate.config.HF_MODULES_CACHE = sys.argv[1] + "/modules"
folder, out, *texts = sys.argv[2:]
out = Path(out)
model, tokenizer = load_for_evaluation(folder, device="cpu")
results = {}
for protocol in ("chunked", "sliding", "last_token", "streaming"):
    result = compute_perplexity(model, tokenizer, texts, protocol=protocol, length=6)
    results[protocol] = result.to_dict()
results["alone"] = compute_perplexity(model, tokenizer, texts[:1], length=6, progress=False).to_dict()
records = out / "records.jsonl"
results["records"] = compute_perplexity(
    model, tokenizer, texts, length=6, records=records, progress=False
).to_dict()
metric = evaluate.load(lex_hf.metric_path(), cache_dir=sys.argv[1])
results["metric"] = metric.compute(predictions=texts, model_id=folder, device="cpu", length=6, progress=False)
rank = os.environ["RANK"]
(out / f"{rank}.json").write_text(json.dumps(results))
(out / "text.txt").write_text(texts[0])
app(["evaluate", folder, str(out / "text.txt"), "--length", "6", "--json"], standalone_mode=False)
"""


def approximately(value: Any) -> Any:
    """The same value, with numbers that other batches may round otherwise."""
    if isinstance(value, dict):
        return {key: approximately(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [approximately(each) for each in value]
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


@pytest.mark.processes
def test_two_processes_give_the_numbers_of_one(tmp_path: Path, folder: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHARED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, str(script), str(tmp_path / "cache"), folder, str(tmp_path), *TEXTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, timeout=300, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    model = lex("blockwise")
    for protocol in PROTOCOLS:
        expected = compute(model, TEXTS, protocol=protocol, length=6)
        assert first[protocol] == approximately(expected.to_dict())
    expected = compute(model, TEXTS, length=6)
    for name in ("records", "metric"):
        assert first[name] == approximately(expected.to_dict())
    assert first["alone"] == approximately(compute(model, TEXTS[:1], length=6).to_dict())

    # Each process recorded its share; one process goes on from both files.
    files = [tmp_path / "records.jsonl", tmp_path / "records.jsonl.1"]
    tokens = [[json.loads(line)["tokens"] for line in file.read_text().splitlines()] for file in files]
    assert tokens == [[30, 17, 8], [23, 11]]
    sizes = [file.stat().st_size for file in files]
    fresh, _ = load_for_evaluation(folder, device="cpu")
    again = compute(fresh, TEXTS, length=6, records=files[0])
    assert json.loads(json.dumps(again.to_dict())) == first["records"]
    assert [file.stat().st_size for file in files] == sizes

    # One process shows bars and prints.
    (printed,) = json.loads(run.stdout)
    assert printed == first["alone"]
    assert run.stderr.count("55.0/55.0") == 3, "the share of the first process, for protocols that score all"


# --- loading and the metric -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved LEX model with its tokenizer."""
    path = str(tmp_path_factory.mktemp("model"))
    lex("blockwise").save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def metric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[evaluate.EvaluationModule]:
    """The metric as a user loads it; what `evaluate` writes goes to a temporary folder."""
    path = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", path / "modules")
        patch.setattr(sys, "path", [*sys.path])
        yield evaluate.load(lex_hf.metric_path(), cache_dir=str(path))
    for name in [name for name in sys.modules if name.split(".")[0] == "evaluate_modules"]:
        del sys.modules[name]


def test_load_for_evaluation(folder: str) -> None:
    model, tokenizer = load_for_evaluation(folder, dtype="bfloat16", attention_pattern="full")
    assert (model.dtype, model.device.type, model.training) == (torch.bfloat16, "cpu", False)
    assert model.config.attention_pattern == "full"
    assert tokenizer("né")["input_ids"] == [110, 195, 169]
    assert load_for_evaluation(folder, device="cpu")[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpux"}, "device = 'gpux': it must be a device of torch"),
        ({"dtype": "float99"}, "dtype = 'float99': it must be a dtype of torch"),
        ({"dtype": "nn"}, "dtype = 'nn': it must be a dtype of torch"),
    ],
)
def test_bad_loading_options(folder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_for_evaluation(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_no_gpu_here(folder: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"device = '{device}': torch finds no CUDA device"):
        load_for_evaluation(folder, device=device)


def test_folder_that_lacks_something(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"searched for a tokenizer \(tokenizer.json"):
        load_for_evaluation(str(tmp_path))
    TOKENIZER.save_pretrained(tmp_path)
    lex("blockwise").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"searched for a causal language model .*no file named"):
        load_for_evaluation(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match="searched for a causal language model"):
        load_for_evaluation(str(tmp_path))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_metric_is_compute_perplexity(metric: Any, folder: str, protocol: str) -> None:
    texts = [text_of(50), text_of(31, seed=1) + "né€"]
    options = {"sliding": {"stride": 3}, "last_token": {"contexts": [2, 5]}}.get(protocol, {})
    got = metric.compute(predictions=texts, model_id=folder, protocol=protocol, length=8, progress=False, **options)
    assert got == compute(lex("blockwise"), texts, protocol=protocol, length=8, **options).to_dict()
    assert got == metric.compute(
        predictions=texts,
        model=lex("blockwise"),
        tokenizer=TOKENIZER,
        protocol=protocol,
        length=8,
        progress=False,
        **options,
    )


def test_metric_passes_every_option_on(metric: Any, folder: str) -> None:
    texts = [text_of(50)]
    options: dict[str, Any] = {"length": 20, "batch_size": 2, "add_start_token": False, "max_length": 45}
    got = metric.compute(
        predictions=texts,
        model_id=folder,
        **options,
        device="cpu",
        dtype="float64",
        trust_remote_code=False,
        attention_pattern="full",
        progress=False,
    )
    full = tiny_model(vocab_size=VOCABULARY, attention_pattern="full", bos_token_id=BOS).double()
    assert got == compute(full, texts, **options).to_dict()
    assert got["perplexity"] != compute(lex("blockwise"), texts, **options).perplexity


def test_metric_passes_the_batch_size_on(metric: Any) -> None:
    model = Bigram()
    metric.compute(predictions=[text_of(9)], model=model, tokenizer=TOKENIZER, length=3, batch_size=2, progress=False)
    assert model.shapes == [(2, 3), (1, 3)]


def test_metric_collects_predictions_in_steps(metric: Any) -> None:
    for text in ("abc", "né"):
        metric.add(prediction=text)
    metric.add_batch(predictions=["xyz"])
    got = metric.compute(model=neox(), tokenizer=TOKENIZER, progress=False)
    assert got == compute(neox(), ["abc", "né", "xyz"]).to_dict()


@torch.no_grad()
def test_metric_is_the_official_formula_for_texts_of_one_segment(metric: Any) -> None:
    """The official metric pads on the right, masks, and averages exp(mean loss) over texts."""
    texts = [text_of(19), "né", text_of(7, seed=1)]
    batch = TOKENIZER(
        [TOKENIZER.bos_token + text for text in texts],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    logits = neox()(**batch).logits[:, :-1]
    mask = batch["attention_mask"][:, 1:]
    loss = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none") * mask
    official = torch.exp(loss.sum(1) / mask.sum(1))

    got = metric.compute(predictions=texts, model=neox(), tokenizer=TOKENIZER, progress=False)

    assert got["perplexities"] == pytest.approx(official.tolist(), rel=1e-5)
    assert got["mean_perplexity"] == pytest.approx(official.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either model_id, or both model and tokenizer"),
        ({"model_id": "m", "model": 1}, "either model_id, or both model and tokenizer"),
        ({"model_id": "m", "tokenizer": 1}, "either model_id, or both model and tokenizer"),
        ({"model": 1}, "either model_id, or both model and tokenizer"),
        (
            {"model": 1, "tokenizer": 1, "device": "cpu", "lenght": 3},
            "device, lenght: of use only with model_id",
        ),
    ],
)
def test_metric_with_wrong_arguments(metric: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=["abc"], **arguments)


def test_metric_describes_itself(metric: Any) -> None:
    assert "2212.10554" in metric.citation
    assert list(metric.features) == ["predictions"]
    parameters = inspect.signature(compute_perplexity).parameters
    for name in {*parameters, "model_id", "device", "dtype"} - {"model", "tokenizer", "texts"}:
        assert f"    {name} (" in metric.inputs_description


def test_protocols_are_named_after_their_functions() -> None:
    assert {"chunked": chunked, "last_token": last_token, "sliding": sliding, "streaming": streaming} == PROTOCOLS

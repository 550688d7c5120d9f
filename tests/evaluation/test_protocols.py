"""Protocols of perplexity: their windows, a token-by-token reference, and how they agree."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.perplexity import (
    BOS,
    EVERY_TARGET,
    Bigram,
    compute,
    lex,
    loss_of,
    neox,
    nll_of,
    reference_losses,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lex_hf.evaluation.perplexity import PROTOCOLS, Window, chunked, last_token, sliding, streaming


@settings(max_examples=12)
@given(size=st.integers(1, 40), length=st.integers(1, 45), batch_size=st.integers(1, 4))
def test_chunked_is_the_token_by_token_reference(size: int, length: int, batch_size: int) -> None:
    text = text_of(size, seed=size)
    got = nll_of(neox(), text, "chunked", length, batch_size)
    assert got == pytest.approx(reference_losses(neox(), text, length), abs=1e-4)


@settings(max_examples=8)
@given(size=st.integers(1, 40), length=st.integers(1, 45))
def test_streaming_is_the_token_by_token_reference(size: int, length: int) -> None:
    text = text_of(size, seed=size)
    got = nll_of(neox(), text, "streaming", length)
    assert got == pytest.approx(reference_losses(neox(), text, None), abs=1e-4)


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


def test_protocols_are_named_after_their_functions() -> None:
    assert {"chunked": chunked, "last_token": last_token, "sliding": sliding, "streaming": streaming} == PROTOCOLS

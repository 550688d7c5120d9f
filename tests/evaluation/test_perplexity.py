"""Perplexity: hand computations, the run of an evaluation, options, and errors."""

import inspect
import json
import math
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_model
from helpers.perplexity import (
    BOS,
    EVERY_TARGET,
    TEXTS,
    VOCABULARY,
    Bigram,
    compute,
    lex,
    neox,
    nll_of,
    reference_losses,
    text_of,
)
from tokenizers import processors
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import (
    PROTOCOLS,
    ContextBucket,
    DocumentScore,
    PerplexityOptions,
    PerplexityResult,
    compute_perplexity,
)


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
    assert got == pytest.approx(reference_losses(model, text_of(20), None), abs=1e-5)


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


@pytest.mark.parametrize("protocol", ["chunked", "sliding"])
def test_logits_of_a_long_text_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    model = tiny_model(vocab_size=257, bos_token_id=256, pad_token_id=256)
    options = {"length": 16, "protocol": protocol, "batch_size": 2}
    whole = compute(model, TEXTS, **options)
    largest = []
    model.lm_head.register_forward_pre_hook(lambda module, inputs: largest.append(inputs[0].shape[0]))
    monkeypatch.setattr("lex_hf.evaluation.scoring._LOGITS_AT_ONCE", 7)
    assert compute(model, TEXTS, **options).nll == pytest.approx(whole.nll, rel=1e-6)
    assert max(largest) == 7


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


def test_options_are_the_keywords_of_compute_perplexity() -> None:
    parameters = inspect.signature(compute_perplexity).parameters.values()
    keywords = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert keywords == asdict(PerplexityOptions())


def test_options_that_depend_on_the_length_are_checked_once_it_is_known() -> None:
    options = PerplexityOptions(protocol="sliding", stride=2048)
    assert options.settings(tiny_model(training_length=4096).config).length == 4096
    for check in (lambda: options.settings(Bigram().config), lambda: replace(options, length=1024)):
        with pytest.raises(ValueError, match="stride = 2048: it must be 1 to length = 1024"):
            check()

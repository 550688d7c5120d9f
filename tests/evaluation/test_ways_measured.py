"""Measurements of ways to read, and the command ways-to-read."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.commands import TEXT, lex
from helpers.rope_models import LENGTH, VOCABULARY, rope_model

from lex_hf.data.token_ids import load_token_ids
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.ways import WaysResult, measure_ways
from lex_hf.rope.ways import WAYS, sinks_beside_blocks

LENGTHS = (70, 41)
BUCKETS = ((0, 3), (4, 7), (8, 31), (32, 63), (64, 68))


def texts_of() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def result() -> WaysResult:
    return measure_ways(rope_model(), texts_of())


def test_losses_by_bucket(result: WaysResult) -> None:
    model = rope_model()
    with torch.no_grad():
        losses = [F.cross_entropy(model(text[None, :-1]).logits[0], text[1:], reduction="none") for text in texts_of()]
    assert result.buckets == BUCKETS
    assert (result.training_length, result.longest, result.texts) == (LENGTH, 70, 2)
    (unchanged,) = (way for way in result.ways if way.way == "unchanged")
    for (first, last), nll, perplexity, tokens in zip(
        BUCKETS, unchanged.nll, unchanged.perplexity, unchanged.tokens, strict=True
    ):
        expected = torch.cat([loss[first : last + 1] for loss in losses])
        assert tokens == len(expected)
        assert nll == pytest.approx(float(expected.mean()), rel=1e-5)
        assert perplexity == pytest.approx(math.exp(expected.mean()), rel=1e-5)


def test_all_ways_are_measured(result: WaysResult) -> None:
    names = [way.way for way in result.ways]
    assert names == list(WAYS)
    for way in result.ways:
        assert way.problem is None
        assert way.tokens == (8, 8, 48, 32 + 8, 5)
        assert (way.memory == "bounded") == (way.way in ("sliding", "streaming", "blockwise", "blockwise-sinks"))


def test_bytes_by_formula_are_those_counted_in_caches(result: WaysResult) -> None:
    each = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dimensions, bytes
    kept = {way.way: way.bytes_kept for way in result.ways}
    assert kept["unchanged"] == kept["dual-chunk"] == 70 * each
    assert kept["sliding"] == kept["streaming"] == (LENGTH - 1) * each
    assert kept["blockwise"] == LENGTH * each
    assert kept["blockwise-sinks"] == (LENGTH + sinks_beside_blocks(LENGTH)) * each
    references = {"self-extend", "dual-chunk", "streaming"}
    for way in result.ways:
        if way.way in references:
            assert (way.bytes_counted, way.prefill_seconds, way.decode_seconds) == (None, None, None)
        else:
            assert way.bytes_counted == way.bytes_kept
            assert min(way.prefill_seconds or 0, way.decode_seconds or 0) > 0


def test_layers_with_a_window_keep_that() -> None:
    model = rope_model("gemma2", sliding_window=3)
    result = measure_ways(model, texts_of(), ways=["unchanged", "sliding", "blockwise", "blockwise-sinks"])
    for way in result.ways:
        assert way.problem is None
        assert way.bytes_counted == way.bytes_kept


def test_the_picture_beyond_shows_bounded_ways(result: WaysResult) -> None:
    (axes,) = result.plot_beyond().axes
    curves = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    bounded = [way for way in result.ways if way.memory == "bounded"]
    assert len(bounded) == 4
    for way in bounded:
        assert curves[WAYS[way.way].title] == list(way.perplexity[2:])


def test_the_picture_says_what_ways_keep_and_what_becomes_of_perplexity(result: WaysResult) -> None:
    numbers = {"unchanged": (4.0, 6.0, 70.0, 80.84), "blockwise": (4.0, 6.0, 5.0, 4.6)}
    ways = [
        replace(way, nll=tuple(map(math.log, numbers[way.way])), bytes_kept=kept)
        for way, kept in zip((each for each in result.ways if each.way in numbers), (6 << 20, 3 << 18), strict=True)
    ]
    buckets = ((0, 3), (4, 7), (8, 31), (32, 63))
    figure = replace(result, model="mine", buckets=buckets, longest=64, training_length=8, ways=tuple(ways)).plot()
    assert figure.get_suptitle() == (
        "mine, trained on 8 tokens, reads 64: its perplexity\n"
        "rises from 6.00 to 80.8 unchanged and falls from 6.00 to 4.60 in blocks"
    )
    assert [axes.get_title() for axes in figure.axes] == [
        "keeps everything: 6 MiB of keys and values",
        "bounded: 0.75 MiB of keys and values",
    ]
    unchanged = replace(result, ways=tuple(ways[:1]), buckets=buckets).plot()
    assert unchanged.get_suptitle().endswith("perplexity by position")
    (axes,) = replace(result, ways=tuple(ways[:1]), buckets=buckets).plot_beyond().axes
    assert not axes.lines
    assert axes.get_title() == "bounded"


def test_dynamic_frequencies_do_not_depend_on_the_order_of_texts() -> None:
    long, short = texts_of()
    one, other = (measure_ways(rope_model(), texts, ways=["dynamic"]) for texts in ([long, short], [short, long]))
    assert one.ways[0].nll == pytest.approx(other.ways[0].nll, rel=1e-6)


def test_what_cannot_be_measured_is_a_sentence() -> None:
    result = measure_ways(rope_model("gpt2"), texts_of())
    problems = {way.way: way.problem for way in result.ways}
    assert all(problems.values())
    assert "index out of range" in str(problems["unchanged"])
    assert "has no rope_parameters" in str(problems["yarn"])
    assert "its positions are absolute" in str(problems["blockwise"])
    assert all(way.nll == () and way.bytes_kept is None for way in result.ways)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ways": ["unchanged", "other"]}, "ways = other: those known are unchanged, linear"),
        ({"training_length": 9}, "it must be an even number of tokens"),
        ({"longest": 12}, "it must exceed the training length"),
        ({"training_length": 64}, "within the training length all ways are alike"),
        ({"texts": []}, "There are no texts"),
        ({"texts": [torch.tensor([VOCABULARY] * 70)]}, "the vocabulary of the model has 61 ids"),
    ],
)
def test_arguments_are_checked_before_the_work(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        measure_ways(rope_model(), **{"texts": texts_of(), **options})


class TestTokenIds:
    def test_files(self, tmp_path: Path) -> None:
        plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
        plain.write_text('\n{"input_ids": [1, 2]}\n\n{"input_ids": [3]}\n')
        packed.write_bytes(gzip.compress(b'{"input_ids": [4], "more": 5}'))
        assert load_token_ids([plain, packed]) == [[1, 2], [3], [4]]

    def test_texts_are_none(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        for content in ('{"text": "a"}', "", "no JSON", "[1]"):
            path.write_text(content)
            assert load_token_ids([path, tmp_path, tmp_path / "nothing.jsonl", "owner/name"]) is None

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ('{"input_ids": [1]}\n{"text": "a"}', "line 2: the field 'input_ids' must be a list"),
            ('{"input_ids": [1, -1]}', "line 1: the field 'input_ids' must be a list of token ids"),
            ('{"input_ids": [1, true]}', "line 1: the field 'input_ids' must be a list of token ids"),
            ('{"input_ids": [1]}\n{', "line 2 is not JSON"),
        ],
    )
    def test_damaged_files(self, content: str, why: str, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text(content)
        with pytest.raises(ValueError, match=why):
            load_token_ids([path])

    def test_both_kinds(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"input_ids": [1]}')
        (tmp_path / "b.txt").write_text("words")
        with pytest.raises(ValueError, match=r"b\.txt texts: give files of one kind"):
            load_token_ids([tmp_path / "a.jsonl", tmp_path / "b.txt"])


class TestCommand:
    def test_token_ids_without_a_tokenizer(self, tmp_path: Path) -> None:
        rope_model().save_pretrained(tmp_path / "model")
        path = tmp_path / "ids.jsonl"
        path.write_text("\n".join(json.dumps({"input_ids": text.tolist()}) for text in texts_of()))
        arguments = ["ways-to-read", tmp_path / "model", path, "--way", "unchanged", "--way", "blockwise"]
        done = lex(*arguments, "--output", tmp_path / "out", "--json")
        assert done.exit_code == 0, done.output
        numbers = json.loads(done.stdout)
        assert [way["way"] for way in numbers["ways"]] == ["unchanged", "blockwise"]
        assert numbers["texts"] == 2
        written = json.loads((tmp_path / "out" / "ways-to-read.json").read_text())
        assert written == numbers
        assert (tmp_path / "out" / "ways-to-read.png").read_bytes().startswith(b"\x89PNG")

    def test_texts_are_tokenized_and_tables_printed(self, tmp_path: Path) -> None:
        rope_model(vocab_size=257, bos_token_id=256).save_pretrained(tmp_path / "model")
        byte_tokenizer().save_pretrained(tmp_path / "model")
        (tmp_path / "text.txt").write_text(TEXT)
        ways = [argument for name in ("yarn", "dual-chunk", "sliding") for argument in ("--way", name)]
        done = lex("ways-to-read", tmp_path / "model", tmp_path / "text.txt", "--length", 40, *ways)
        assert done.exit_code == 0, done.output
        for wanted in ("YaRN, factor 5", "chunks of 6", "sliding window of 8", "keeps everything", "bounded", "32-38"):
            assert wanted in done.output

    def test_errors_are_sentences(self, tmp_path: Path) -> None:
        rope_model().save_pretrained(tmp_path / "model")
        path = tmp_path / "ids.jsonl"
        path.write_text('{"input_ids": [1, 2, 3]}')
        done = lex("ways-to-read", tmp_path / "model", path)
        assert done.exit_code == 1
        assert "all ways are alike" in done.output

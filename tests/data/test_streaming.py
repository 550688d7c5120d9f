"""Streams: the documents and examples of the in-memory functions, from any place on."""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

import lex_hf.data.documents
import lex_hf.data.streaming
from lex_hf.data.documents import load_documents, stream_documents
from lex_hf.data.packing import pack
from lex_hf.data.streaming import PackedStream
from lex_hf.data.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXTS = [f"document {number}, " * (number % 5 + 1) for number in range(23)]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def corpus(tmp_path: Path) -> list[Path]:
    """JSON lines, plain and gzipped, a text file and a folder."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:9])
    (tmp_path / "a.jsonl").write_text(lines + "\n" + json.dumps({"text": ""}) + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.replace("document", "paper").encode()))
    (tmp_path / "c.unknown").write_text(TEXTS[3])
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for index, text in enumerate(TEXTS[9:]):
        (tmp_path / "folder" / ("deep" if index % 2 else "") / f"{index}.txt").write_text(text)
    (tmp_path / "folder" / "empty.txt").touch()
    return [tmp_path / name for name in ("c.unknown", "a.jsonl", "folder", "b.jsonl.gz")]


def stream(corpus: list[Path], length: int = 12, **options: Any) -> PackedStream:
    return PackedStream(stream_documents(corpus), TOKENIZER, length, **options)


def rows(examples: Iterator[dict[str, torch.Tensor]], count: int) -> list[dict[str, list[int]]]:
    return [{name: row.tolist() for name, row in row.items()} for row in itertools.islice(examples, count)]


class TestDocuments:
    def test_are_those_of_load_documents(self, corpus: list[Path]) -> None:
        streamed = stream_documents(corpus)
        assert [row["text"] for row in streamed] == load_documents(corpus)["text"][:]
        assert len(list(streamed)) == 9 + 9 + 1 + 14

    def test_lines_are_read_one_by_one(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "one"}\n{"text": "two"}\nnot JSON')
        documents = iter(stream_documents([path]))
        assert [next(documents)["text"], next(documents)["text"]] == ["one", "two"]
        with pytest.raises(ValueError, match=r"a\.jsonl, line 3 is not JSON"):
            next(documents)

    def test_offsets_of_bad_bytes_are_those_in_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"text": "one"}\n{"text": "\xe9"}\n')
        with pytest.raises(ValueError, match=r"byte 0xe9 at offset 26"):
            list(stream_documents([path]))

    def test_what_is_not_there_is_known_at_once(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"gone\.txt: no such file"):
            stream_documents([tmp_path / "gone.txt"])
        with pytest.raises(ValueError, match="sources is empty"):
            stream_documents([])
        (tmp_path / "empty.txt").touch()
        with pytest.raises(ValueError, match="no documents; every text in it is empty"):
            stream_documents([tmp_path])

    @pytest.mark.parametrize("features_are_known", [True, False])
    def test_hub_dataset(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features_are_known: bool) -> None:
        calls: list[tuple[Any, ...]] = []

        def generate() -> Iterator[dict[str, Any]]:
            for number, text in enumerate(["one", "", None, "two"]):
                yield {"content": text, "id": number}

        def fake(name: str, configuration: str | None, split: str, streaming: bool) -> IterableDataset:
            calls.append((name, configuration, split, streaming))
            features = Dataset.from_list(list(generate())).features if features_are_known else None
            return IterableDataset.from_generator(generate, features=features)

        monkeypatch.setattr(lex_hf.data.documents, "load_dataset", fake)
        monkeypatch.chdir(tmp_path)
        Path("x.txt").write_text("file")
        documents = stream_documents(["x.txt", "some/wiki:en.1"], text_field="content", split="test")
        assert [row["text"] for row in documents] == ["file", "one", "two"]
        assert calls == [("some/wiki", "en.1", "test", True)]
        with pytest.raises(ValueError, match="'id' is not a column of text"):
            stream_documents(["some/wiki"], text_field="id")


class TestExamples:
    @pytest.mark.parametrize("apart", [False, True])
    def test_are_those_of_pack(self, corpus: list[Path], apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lex_hf.data.streaming, "_CHARACTERS_AT_ONCE", 50)
        expected = list(pack(load_documents(corpus), TOKENIZER, 12, separate_documents=apart))
        examples = iter(stream(corpus, shuffle_buffer=1, separate_documents=apart))
        assert rows(examples, len(expected)) == expected
        # Then they begin again, with what was left in front.
        tokens = sum(len(text.encode()) + 1 for text in load_documents(corpus)["text"])
        (following,) = rows(examples, 1)
        left = tokens % 12
        assert following["input_ids"][left:] == expected[0]["input_ids"][: 12 - left]

    def test_are_shuffled_within_blocks_by_the_seed(self, corpus: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lex_hf.data.streaming, "_CHARACTERS_AT_ONCE", 1)
        plain = [row["input_ids"] for row in rows(iter(stream(corpus, shuffle_buffer=1)), 60)]
        mixed = [row["input_ids"] for row in rows(iter(stream(corpus, shuffle_buffer=30)), 60)]
        assert mixed != plain
        assert sorted(mixed[:25]) != sorted(plain[:25])
        assert {tuple(row) for row in mixed[:30]} <= {tuple(row) for row in plain[:45]}
        other = [row["input_ids"] for row in rows(iter(stream(corpus, shuffle_buffer=30, seed=1)), 60)]
        assert other != mixed

    @given(
        consumed=st.integers(0, 260),
        ahead=st.integers(0, 40),
        buffer=st.sampled_from([1, 7, 40]),
        at_once=st.sampled_from([1, 100, 10**6]),
        apart=st.booleans(),
    )
    @settings(max_examples=25)
    def test_go_on_from_any_place(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        consumed: int,
        ahead: int,
        buffer: int,
        at_once: int,
        apart: bool,
    ) -> None:
        folder = tmp_path_factory.mktemp("corpus")
        for index, text in enumerate(TEXTS):
            (folder / f"{index:02}.txt").write_text(text)
        options: dict[str, Any] = {"shuffle_buffer": buffer, "separate_documents": apart, "seed": 3}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lex_hf.data.streaming, "_CHARACTERS_AT_ONCE", at_once)
            first = stream([folder], **options)
            examples = iter(first)
            rows(examples, consumed + ahead)
            first.consume(consumed // 2)
            first.consume(consumed - consumed // 2)
            state = json.loads(json.dumps(first.state_dict()))
            expected = rows(iter(stream([folder], **options)), consumed + 50)[consumed:]
            second = stream([folder], **options)
            second.load_state_dict(state)
            assert rows(iter(second), 50) == expected

    def test_only_places_that_may_be_needed_are_kept(self, corpus: list[Path]) -> None:
        examples = stream(corpus, shuffle_buffer=5)
        for _ in itertools.islice(iter(examples), 2000):
            examples.consume(1)
        assert len(examples._marks) <= 2

    def test_of_other_settings_are_refused(self, corpus: list[Path]) -> None:
        state = stream(corpus).state_dict()
        with pytest.raises(ValueError, match="length = 12, not 16"):
            stream(corpus, length=16).load_state_dict(state)
        with pytest.raises(ValueError, match="shuffle_buffer = 1000, not 9; seed = 0, not 4"):
            stream(corpus, shuffle_buffer=9, seed=4).load_state_dict(state)

    def test_too_few_tokens(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("abc")
        with pytest.raises(ValueError, match=r"length = 12: all documents \(1\) together have 4 tokens"):
            next(iter(stream([tmp_path / "a.txt"])))
        with pytest.raises(ValueError, match="shuffle_buffer = 0: must be at least 1"):
            stream([tmp_path / "a.txt"], shuffle_buffer=0)

    def test_are_read_in_one_process(self, corpus: list[Path]) -> None:
        loader = torch.utils.data.DataLoader(stream(corpus), num_workers=1)
        with pytest.raises(ValueError, match="set dataloader_num_workers = 0"):
            next(iter(loader))

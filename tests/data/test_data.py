"""Documents, packing and the byte tokenizer."""

import gzip
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

import lex_hf.data.documents
import lex_hf.data.packing
import lex_hf.data.tokenizing
from lex_hf.cli.commands import app
from lex_hf.data.documents import load_documents, stream_documents
from lex_hf.data.packing import pack
from lex_hf.data.tokenizers import byte_tokenizer, train_tokenizer
from lex_hf.data.tokenizing import tokenize, tokenize_documents

TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


class TestByteTokenizer:
    @given(st.text(max_size=60))
    @example("".join(map(chr, range(0x250))))
    @example(" a  b .\r\n\t,\N{ZERO WIDTH JOINER}e\N{COMBINING ACUTE ACCENT}\N{GRINNING FACE}\0")
    @settings(max_examples=100)
    def test_ids_are_the_bytes_and_decode_to_the_text(self, text: str) -> None:
        ids = TOKENIZER(text)["input_ids"]
        assert ids == list(text.encode())
        assert TOKENIZER.decode(ids) == text

    def test_special_token(self) -> None:
        assert len(TOKENIZER) == 257
        assert TOKENIZER.bos_token_id == TOKENIZER.eos_token_id == TOKENIZER.pad_token_id == 256
        batch = TOKENIZER(["ab", "c"], padding=True)
        assert batch["input_ids"] == [[97, 98], [256, 99]]
        assert batch["attention_mask"] == [[1, 1], [0, 1]]
        assert TOKENIZER.decode([97, 256], skip_special_tokens=True) == "a"

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        TOKENIZER.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        text = " a  .  b\N{GRINNING FACE}"
        assert loaded(text)["input_ids"] == list(text.encode())
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert (loaded.eos_token_id, loaded.pad_token_id, loaded.padding_side) == (256, 256, "left")

    def test_a_long_text_takes_linear_time(self) -> None:
        start = time.perf_counter()
        ids = TOKENIZER("día\n" * 200_000, verbose=False)["input_ids"]
        assert len(ids) == 1_000_000
        assert time.perf_counter() - start < 10  # about one second


def _texts(*sources: str | Path, **options: str) -> list[str]:
    documents = load_documents(sources, **options)
    assert documents.column_names == ["text", "source"]
    return list(documents["text"])


class TestLoadDocuments:
    def test_text_files_are_documents_as_they_are(self, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_bytes("é\r\nx\n".encode())
        (tmp_path / "a.unknown").write_bytes(b" y ")
        documents = load_documents([tmp_path / "b.txt", str(tmp_path / "a.unknown")])
        assert documents["text"][:] == ["é\r\nx\n", " y "]
        assert documents["source"][:] == [str(tmp_path / "b.txt"), str(tmp_path / "a.unknown")]

    @pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.jsonl.gz"])
    def test_json_lines(self, tmp_path: Path, name: str) -> None:
        # U+2028 may stand in a JSON string as it is, and ends no line.
        lines = '{"body": "one\u2028 1\\n"}\n\n{"body": ""}\r\n{"body": "two", "n": 3}'.encode()
        (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
        assert _texts(tmp_path / name, text_field="body") == ["one\u2028 1\n", "two"]

    def test_folder_is_read_at_any_depth_in_the_order_of_paths(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "z.txt").write_text("z")
        (tmp_path / "sub" / "a.py").write_text("a")
        (tmp_path / "b.jsonl").write_text('{"text": "b1"}\n{"text": "b2"}\n')
        (tmp_path / "empty.py").touch()
        (tmp_path / "picture.png").write_bytes(b"\x89")
        assert _texts(tmp_path) == ["b1", "b2", "a", "z"]

    def test_hub_dataset(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        calls: list[tuple[Any, ...]] = []

        def fake(name: str, configuration: str | None, split: str) -> Dataset:
            calls.append((name, configuration, split))
            return Dataset.from_dict({"content": ["one", "", "two"], "id": [1, 2, 3]})

        monkeypatch.setattr(lex_hf.data.documents, "load_dataset", fake)
        monkeypatch.chdir(tmp_path)
        Path("x.txt").write_text("file")
        texts = _texts("x.txt", "some/wiki:en.1", text_field="content", split="test")
        assert texts == ["file", "one", "two"]
        assert calls == [("some/wiki", "en.1", "test")]
        for field in ("text", "id"):
            with pytest.raises(ValueError, match=f"'{field}' is not a column of text.*'content'"):
                load_documents(["some/wiki"], text_field=field)

    def test_hub_dataset_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> Dataset:
            raise ConnectionError("no way to the Hub")

        monkeypatch.setattr(lex_hf.data.documents, "load_dataset", fail)
        with pytest.raises(FileNotFoundError, match=r"'no-such' is neither a file.*no way to the Hub"):
            load_documents(["no-such"])

    def test_hub_dataset_that_cannot_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> Dataset:
            raise datasets.exceptions.DatasetGenerationError("An error occurred\nwhile generating")

        monkeypatch.setattr(lex_hf.data.documents, "load_dataset", fail)
        for load in (load_documents, stream_documents):
            with pytest.raises(ValueError, match=r"'no-such' is neither .*: An error occurred while generating"):
                load(["no-such"])

    def test_a_device_may_have_no_end(self) -> None:
        for load in (load_documents, stream_documents):
            with pytest.raises(ValueError, match="/dev/zero is a device, which may have no end"):
                load(["/dev/zero"])

    @pytest.mark.parametrize("source", ["gone.txt", "gone.jsonl.gz", "some/deep/path", "./gone", Path("gone")])
    def test_missing_file_is_not_looked_for_on_the_hub(self, source: str | Path) -> None:
        with pytest.raises(FileNotFoundError, match=rf"^{re.escape(str(source))}: no such file or folder"):
            load_documents([source])

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("e.txt", b"", "e.txt is empty"),
            ("l.txt", b"caf\xe9 au lait", "l.txt is not UTF-8 text: byte 0xe9 at offset 3"),
            ("c.jsonl", b'{"text": "ok"}\n\n{"text": \n', "c.jsonl, line 3 is not JSON"),
            (
                "f.jsonl",
                b'{"text": "ok"}\n{"body": "b", "a": 1}',
                r"f.jsonl, line 2: no field 'text'.*'a', 'body'",
            ),
            ("t.jsonl", b'{"text": 5}', "t.jsonl, line 1: the field 'text' is int"),
            ("a.json", b"[1]", "a.json, line 1: each line must be a JSON object, not list"),
            ("s.jsonl", b'{"text": "\\ud800"}', "s.jsonl, line 1: the text has half a surrogate pair"),
            ("n.jsonl", b'\n{"text": ""}\n', "n.jsonl: no documents"),
            (
                "g.jsonl.gz",
                gzip.compress(b'{"text": "long enough"}', mtime=0)[:-9],
                "g.jsonl.gz is not a complete gzip",
            ),
            ("h.jsonl.gz", b"plain", "h.jsonl.gz is not a complete gzip"),
            ("h.txt.gz", b"plain", "h.txt.gz is not a complete gzip"),
            (
                "z.txt.gz",
                gzip.compress(b"long enough", mtime=0)[:10] + b"\xff" * 20,
                "z.txt.gz is not a complete gzip",
            ),
            ("e.JSONL.GZ", gzip.compress(b"", mtime=0), "e.JSONL.GZ is empty"),
            ("u.txt", "wide".encode("utf-16"), "u.txt is not UTF-8 text: byte 0xff at offset 0"),
            ("d.jsonl", b'{"text": "ok"}\n' + b"[" * 100_000, "d.jsonl, line 2 is JSON that is nested too deeply"),
            (
                "d.jsonl",
                b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
                "d.jsonl, line 1 is JSON that is nested too deeply",
            ),
            ("i.jsonl", b'{"text": ' + b"1" * 10_000 + b"}", "i.jsonl, line 1 is not JSON: Exceeds the limit"),
            (
                "p.json",
                json.dumps({"text": "pretty"}, indent=2).encode(),
                r"p\.json, line 1 is not JSON: .* A file that is one JSON document, .* write one object per line, "
                r"with `jq -c '\.\[\]' .*p\.json` of a list, with `jq -c \. .*p\.json` of objects",
            ),
            ("q.JSON", json.dumps([{"text": "pretty"}], indent=2).encode(), r"q\.JSON, line 1 is not JSON: .*jq -c"),
            ("r.json", json.dumps([{"text": "a"}] * 2).encode(), r"r\.json, line 1: .* not list\. .*jq -c '\.\[\]'"),
            ("w.jsonl", b'{"text": "ok"}\n{"text"', r"w\.jsonl, line 2 is not JSON: [^.]*\.$"),
        ],
    )
    def test_bad_file(self, tmp_path: Path, name: str, content: bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_documents([tmp_path / name])

    def test_names_that_are_not_utf_8(self, tmp_path: Path) -> None:
        path = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.txt"))
        path.write_text("a")
        documents = load_documents([path])
        assert documents["source"][:] == [rf"{tmp_path}/caf\xe9.txt"]
        assert [row["text"] for row in stream_documents([path])] == ["a"]

    def test_a_byte_order_mark_is_no_part_of_json(self, tmp_path: Path) -> None:
        (tmp_path / "a.json.gz").write_bytes(gzip.compress('{"text": "a"}\n{"text": "b"}'.encode("utf-8-sig")))
        assert _texts(tmp_path / "a.json.gz") == ["a", "b"]

    def test_bad_folder(self, tmp_path: Path) -> None:
        (tmp_path / "x.png").touch()
        with pytest.raises(ValueError, match=r"no files that end in \.txt, "):
            load_documents([tmp_path])
        (tmp_path / "x.txt").touch()
        with pytest.raises(ValueError, match="no documents"):
            load_documents([tmp_path])

    def test_no_list_of_sources(self) -> None:
        with pytest.raises(ValueError, match="sources is empty"):
            load_documents([])
        with pytest.raises(ValueError, match=re.escape("give a list, ['a.txt']")):
            load_documents("a.txt")


def _documents(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"text": texts})


TRAINED = train_tokenizer(["to be or not to be, that is the question; don't ask me 123 times "] * 3, 300)
# Words and signs next to each other in every way that a tokenizer may care about.
PROSE = st.lists(
    st.sampled_from(
        ["to", "be", " ", "  ", "\n", "don't", "é", "12", "<|endoftext|>", "<|end", "oftext|>", "or", " not"]
    ),
    max_size=40,
).map("".join)


class TestTrainTokenizer:
    @pytest.mark.parametrize("vocab_size", [256, 2**22 + 1, 10**15, 10**30])
    def test_sizes_out_of_range(self, vocab_size: int) -> None:
        with pytest.raises(ValueError, match=f"vocab_size = {vocab_size}: must be at (least 257|most 4194304)"):
            train_tokenizer(["to be"], vocab_size)

    def test_no_texts(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="There are no texts to train the tokenizer on"):
            train_tokenizer([], 300)
        (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
        result = CliRunner().invoke(app, ["tokenizer", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")])
        assert result.exit_code == 1
        assert "There are no texts to train the tokenizer on" in result.stderr

    def test_a_full_disk_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(self: Any, folder: Path, **_: Any) -> None:
            Path(folder, "tokenizer_config.json").write_text("{}")
            raise Exception("No space left on device (os error 28)")

        monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
        text = tmp_path / "a.txt"
        text.write_text("to be or not to be")
        for output in (tmp_path / "new/deep", tmp_path / "there"):
            (tmp_path / "there").mkdir(exist_ok=True)
            result = CliRunner().invoke(app, ["tokenizer", str(text), "--output", str(output), "--vocab-size", "260"])
            assert result.exit_code == 1
            message = (
                f"Error: {output} cannot be written, nothing is left of it: No space left on device (os error 28)"
            )
            assert " ".join(result.stderr.split()).startswith(message)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [text]


class TestTokenize:
    @pytest.mark.parametrize("tokenizer", [TOKENIZER, TRAINED])
    @given(
        texts=st.lists(PROSE | st.text(max_size=30), max_size=4), size=st.integers(1, 9), at_once=st.integers(1, 50)
    )
    @example(texts=["<|endoftext|>" * 4], size=1, at_once=1)
    @settings(max_examples=150)
    def test_pieces_give_the_tokens_of_the_whole(
        self, tokenizer: Any, texts: list[str], size: int, at_once: int
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lex_hf.data.tokenizing, "_CHARACTERS_OF_A_PIECE", size)
            patch.setattr(lex_hf.data.tokenizing, "_CHARACTERS_AT_ONCE", at_once)
            pieces = tokenize(texts, tokenizer)
        assert [ids.tolist() for ids in pieces] == [tokenizer(text)["input_ids"] for text in texts]
        assert {ids.dtype for ids in pieces} <= {np.dtype("int32")}

    @given(text=st.lists(st.sampled_from(["a", "b", "ab", "ba"]), max_size=30).map("".join), size=st.integers(1, 5))
    @settings(max_examples=100)
    def test_added_tokens_that_overlap_stay_whole(self, text: str, size: int) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(["aba", "abba", "bb"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lex_hf.data.tokenizing, "_CHARACTERS_OF_A_PIECE", size)
            assert tokenize([text], tokenizer)[0].tolist() == tokenizer(text)["input_ids"]

    @pytest.mark.parametrize("tokenizer", [TOKENIZER, TRAINED])
    def test_a_long_text_is_handed_over_in_pieces(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[list[str]] = []
        call = type(tokenizer).__call__

        def noting(self: Any, texts: list[str], **options: Any) -> Any:
            calls.append(texts)
            return call(self, texts, **options)

        monkeypatch.setattr(type(tokenizer), "__call__", noting)
        text = "to be or not to be " * 50_000
        examples = pack(_documents([text, text[:999]]), tokenizer, 512)
        assert max(len(piece) for pieces in calls for piece in pieces) < 4200
        assert max(sum(map(len, pieces)) for pieces in calls) < 140_000
        assert "".join(piece for pieces in calls for piece in pieces) == text + text[:999]
        if tokenizer is TOKENIZER:
            assert bytes(examples[0]["input_ids"]).decode() == text[:512]

    @pytest.mark.parametrize(
        "change",
        [
            lambda tokenizer: tokenizer.add_tokens([AddedToken("<b>", lstrip=True)]),
            lambda tokenizer: tokenizer.add_tokens([AddedToken("b", single_word=True)]),
            lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", normalizers.NFC()),
            lambda tokenizer: setattr(tokenizer.backend_tokenizer, "pre_tokenizer", None),
            lambda tokenizer: setattr(tokenizer.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel()),
        ],
    )
    @pytest.mark.parametrize("make", [byte_tokenizer, lambda: train_tokenizer(["to be"] * 3, 260)])
    def test_others_see_whole_texts(self, make: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = make()
        change(tokenizer)
        monkeypatch.setattr(lex_hf.data.tokenizing, "_CHARACTERS_OF_A_PIECE", 2)
        text = "e\N{COMBINING ACUTE ACCENT} to be <b> b bb or not <b>"
        assert tokenize([text], tokenizer)[0].tolist() == tokenizer(text)["input_ids"]
        assert [piece for piece, _ in lex_hf.data.tokenizing._pieces([text], tokenizer)] == [text]

    def test_merges_without_words_are_not_cut(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = train_tokenizer(["abab"] * 9, 260)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        monkeypatch.setattr(lex_hf.data.tokenizing, "_CHARACTERS_OF_A_PIECE", 1)
        assert tokenize(["abab ab"], tokenizer)[0].tolist() == tokenizer("abab ab")["input_ids"]

    def test_a_tokenizer_of_0_1_0(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What 0.1.0 saved is read as before, and in pieces."""
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(SAVED_BY_0_1_0)))
        monkeypatch.setattr(lex_hf.data.tokenizing, "_CHARACTERS_OF_A_PIECE", 3)
        text = "né<|endoftext|> to be"
        assert tokenize([text], tokenizer)[0].tolist() == [*"né".encode(), 256, *b" to be"]
        pieces = lex_hf.data.tokenizing._pieces([text], tokenizer)
        assert [piece for piece, _ in pieces] == ["né<|endoftext|>", " to", " be"]


SAVED_BY_0_1_0: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 256,
            "content": "<|endoftext|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in bytes_to_unicode().items()},
        "merges": [],
    },
}


class TestPack:
    @given(st.lists(st.text("ab\né", min_size=1, max_size=9), min_size=1, max_size=7), st.integers(2, 11))
    @settings(max_examples=40)
    def test_examples_are_slices_of_one_stream(self, texts: list[str], length: int) -> None:
        stream = [token for text in texts for token in [*text.encode(), 256]]
        expected = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
        if expected:
            examples = pack(_documents(texts), TOKENIZER, length)
            assert examples.column_names == ["input_ids"]
            assert examples["input_ids"][:] == expected
        else:
            with pytest.raises(ValueError, match=f"{length}: all documents .* together have {len(stream)} tokens"):
                pack(_documents(texts), TOKENIZER, length)

    def test_nothing_is_lost_between_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = [f"document {i}" * (i % 4 + 1) for i in range(31)]
        whole = pack(_documents(texts), TOKENIZER, 13)
        monkeypatch.setattr(lex_hf.data.packing, "DOCUMENTS_PER_BATCH", 2)
        assert pack(_documents(texts), TOKENIZER, 13)["input_ids"][:] == whole["input_ids"][:]
        assert len(whole) == sum(len(text) + 1 for text in texts) // 13

    def test_tokenized_documents(self) -> None:
        documents = Dataset.from_dict({"text": ["ab", "é"], "source": ["x", "y"]})
        tokens = tokenize_documents(documents, TOKENIZER)
        assert tokens.column_names == ["input_ids"]
        assert tokens["input_ids"][:] == [[97, 98], [195, 169]]

    @given(st.lists(st.text("ab\né", min_size=1, max_size=9), min_size=1, max_size=7), st.integers(2, 5))
    @settings(max_examples=40)
    def test_separate_documents_have_positions_of_their_own(self, texts: list[str], length: int) -> None:
        places = [index for text in texts for index in range(len(text.encode()) + 1)]
        if len(places) < length:
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lex_hf.data.packing, "DOCUMENTS_PER_BATCH", 2)
            examples = pack(_documents(texts), TOKENIZER, length, separate_documents=True)
        assert examples["input_ids"][:] == pack(_documents(texts), TOKENIZER, length)["input_ids"][:]
        for row, positions in enumerate(examples["position_ids"]):
            inside = places[row * length : (row + 1) * length]
            # Counted from the row's first token, until a document begins.
            starts = [max([0, *(i for i in range(1, n + 1) if inside[i] == 0)]) for n in range(length)]
            assert positions == [n - start for n, start in enumerate(starts)]

    @pytest.mark.parametrize("separate", [False, True])
    def test_pieces_and_datasets_on_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separate: bool
    ) -> None:
        documents = _documents([f"document {i}" * (i % 4 + 1) for i in range(31)])
        documents.save_to_disk(tmp_path / "saved")
        whole = pack(documents, TOKENIZER, 13, separate_documents=separate)
        monkeypatch.setattr(lex_hf.data.tokenizing, "_CHARACTERS_OF_A_PIECE", 3)
        monkeypatch.setattr(lex_hf.data.tokenizing, "_CHARACTERS_AT_ONCE", 7)
        monkeypatch.setattr(lex_hf.data.packing, "DOCUMENTS_PER_BATCH", 2)
        pieces = pack(documents, TOKENIZER, 13, separate_documents=separate)
        saved = pack(Dataset.load_from_disk(tmp_path / "saved"), TOKENIZER, 13, separate_documents=separate)
        assert whole.column_names == (["input_ids", "position_ids"] if separate else ["input_ids"])
        assert whole.features == pieces.features == saved.features
        assert whole[:] == pieces[:] == saved[:]
        assert saved.cache_files  # examples of a dataset on disk are there as well
        assert not whole.cache_files
        assert whole._fingerprint != pieces._fingerprint

    def test_no_special_tokens(self) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
        )
        assert tokenizer("ab")["input_ids"] == [256, 97, 98]
        assert pack(_documents(["ab"]), tokenizer, 3)["input_ids"][:] == [[97, 98, 256]]

    def test_no_limit_on_the_length(self, caplog: pytest.LogCaptureFixture) -> None:
        tokenizer = byte_tokenizer()
        tokenizer.model_max_length = 4
        transformers_logging.enable_propagation()
        try:
            assert len(tokenize_documents(_documents(["a" * 9]), tokenizer)[0]["input_ids"]) == 9
        finally:
            transformers_logging.disable_propagation()
        assert not caplog.records

    def test_bad_arguments(self) -> None:
        with pytest.raises(ValueError, match="length = 1: an example needs at least 2 tokens"):
            pack(_documents(["ab"]), TOKENIZER, 1)
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(ValueError, match="no eos_token"):
            pack(_documents(["ab"]), tokenizer, 2)


def test_files_to_examples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abc", "de")))
    (tmp_path / "b.txt").write_text("f")
    examples = pack(load_documents([tmp_path]), TOKENIZER, 4)
    assert examples["input_ids"][:] == [[97, 98, 99, 256], [100, 101, 256, 102]]

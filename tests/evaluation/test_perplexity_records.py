"""Records of perplexity: what is taken from them, killed runs, full disks, and other files."""

import json
import resource
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from helpers.forks import PACKAGE
from helpers.perplexity import TEXTS, Bigram, compute, neox

from lex_hf.evaluation.perplexity import PROTOCOLS, load_for_evaluation


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
from lex_hf.evaluation.perplexity import compute_perplexity, load_for_evaluation

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
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, lex_folder: str) -> None:
    path, options = tmp_path / "records.jsonl", {"length": 6, "batch_size": 2}
    killed = PACKAGE.run("-c", KILLED, lex_folder, path, *TEXTS)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    # 30 tokens take three passes; 23 take two and one for the rest; the kill came within the 17.
    finished = path.read_text().splitlines()
    assert [json.loads(line)["tokens"] for line in finished] == [30, 23]
    path.write_text("\n".join(finished) + "\n" + finished[0][:50])  # as if the kill had come while writing

    model, _ = load_for_evaluation(lex_folder, device="cpu")
    shapes: list[Any] = []
    model.register_forward_pre_hook(
        lambda module, arguments, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    resumed = compute(model, TEXTS, records=path, **options)
    assert shapes == [(2, 6), (1, 5), (1, 6), (1, 5), (1, 6), (1, 2)]  # of 17, 11 and 8 tokens
    assert resumed == compute(model, TEXTS, records=tmp_path / "whole.jsonl", **options)
    assert path.read_text() == (tmp_path / "whole.jsonl").read_text()


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
        ('{"key": "k", "nll": 1.0}\n', "line 1 of .* is not a record"),
        ('{"key": "k", "nll": 1.0, "tokens": 1, "positions": []}\n[]\n', "line 2 of .* is not a record"),
        ("A book.\nIts second line.\n", "line 1 of .* is not a record"),
        ("A book without an end of line", "ends with something that is not a record"),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "book.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        compute(Bigram(), ["abc"], records=path)
    assert path.read_text() == content

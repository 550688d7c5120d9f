"""What is kept of texts: found again by their first tokens, bounded, and never another text's or another model's."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import random_ids, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import Cache

from lex_hf import LexForCausalLM, save_cache
from lex_hf.inference.batching.sessions import FileSessions, MemorySessions, Sessions

MODEL = tiny_model()


def cache_of(ids: list[int], model: LexForCausalLM = MODEL) -> Cache:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=True).past_key_values


def next_logits(cache: Cache, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return MODEL(torch.tensor([ids]), past_key_values=cache).logits[0, -1]


def file_size() -> int:
    with tempfile.NamedTemporaryFile() as file:
        save_cache(cache_of([1]), MODEL, file.name)
        return Path(file.name).stat().st_size


SIZE, FILE = sum(layer.nbytes() for layer in cache_of([1]).layers), file_size()
TEXT = random_ids(1, 40)[0].tolist()


def sessions_of(kind: str, folder: Path, texts: int = 3) -> Sessions:
    if kind == "memory":
        return MemorySessions(texts * SIZE)
    return FileSessions(texts * FILE + FILE // 2, folder, MODEL)


def settled(sessions: Sessions) -> Sessions:
    """Wait until all is written."""
    if isinstance(sessions, FileSessions):
        sessions._writer.submit(lambda: None).result()
    return sessions


@pytest.mark.parametrize("kind", ["memory", "files"])
class TestSessions:
    def test_the_longest_beginning_is_found(self, kind: str, tmp_path: Path) -> None:
        sessions = sessions_of(kind, tmp_path)
        for length in (9, 23, 40):
            assert sessions.keep(TEXT[:length], cache_of(TEXT[:length]), MODEL)
        settled(sessions)
        for length, expected in ((41, 40), (40, 23), (24, 23), (23, 9), (10, 9), (9, 0), (3, 0)):
            read, cache = sessions.find([*TEXT, 5][:length], MODEL)
            assert read == expected
            assert (cache is None) == (read == 0)
        other = [*TEXT[:20], 96 - TEXT[20], *TEXT[21:]]
        assert sessions.find(other, MODEL)[0] == 9

    def test_a_text_goes_on_from_what_was_read_as_often_as_it_likes(self, kind: str, tmp_path: Path) -> None:
        sessions = sessions_of(kind, tmp_path)
        sessions.keep(TEXT[:30], cache_of(TEXT[:30]), MODEL)
        settled(sessions)
        for ends in ([3, 4], [5] * 20, [3, 4]):
            read, cache = sessions.find(TEXT[:30] + ends, MODEL)
            assert cache is not None
            expected = next_logits(cache_of(TEXT[:30]), ends)
            torch.testing.assert_close(next_logits(cache, (TEXT[:30] + ends)[read:]), expected, atol=1e-5, rtol=0)

    def test_the_least_recently_used_make_room(self, kind: str, tmp_path: Path) -> None:
        sessions = sessions_of(kind, tmp_path)
        texts = [[number, *TEXT] for number in range(1, 6)]
        for ids in texts[:3]:
            sessions.keep(ids, cache_of(ids), MODEL)
            settled(sessions)
        assert sessions.find([*texts[0], 1], MODEL)[0] == len(texts[0])  # used again
        for ids in texts[3:]:
            sessions.keep(ids, cache_of(ids), MODEL)
            settled(sessions)
        found = [sessions.find([*ids, 1], MODEL)[0] for ids in texts]
        assert found == [41, 0, 0, 41, 41]
        assert 3 * SIZE <= sessions.nbytes() <= sessions.max_bytes

    def test_a_cache_that_is_too_large_is_not_taken(self, kind: str, tmp_path: Path) -> None:
        sessions = MemorySessions(SIZE - 1) if kind == "memory" else FileSessions(SIZE - 1, tmp_path, MODEL)
        assert not sessions.keep(TEXT, cache_of(TEXT), MODEL)
        assert settled(sessions).nbytes() == 0


@settings(max_examples=30)
@given(
    kept=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), max_size=8),
    asked=st.lists(st.integers(1, 3), min_size=1, max_size=7),
)
def test_what_is_found_is_the_longest_kept_text_that_another_begins_with(
    kept: list[list[int]], asked: list[int]
) -> None:
    sessions = MemorySessions(100 * SIZE)
    for ids in kept:
        sessions.keep(ids, cache_of([1]), MODEL)
    expected = max((len(ids) for ids in kept if len(ids) < len(asked) and asked[: len(ids)] == ids), default=0)
    assert sessions.find(asked, MODEL)[0] == expected


class TestFiles:
    def test_another_process_finds_them_and_another_model_does_not(self, tmp_path: Path) -> None:
        first = FileSessions(10**6, tmp_path, MODEL)
        first.keep(TEXT, cache_of(TEXT), MODEL)
        first.close()
        assert FileSessions(10**6, tmp_path, MODEL).find([*TEXT, 1], MODEL)[0] == len(TEXT)
        other = tiny_model(seed=1)
        assert FileSessions(10**6, tmp_path, other).find([*TEXT, 1], other) == (0, None)

    def test_a_damaged_file_is_not_used(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        sessions = FileSessions(10**6, tmp_path, MODEL)
        for length in (20, 30):
            sessions.keep(TEXT[:length], cache_of(TEXT[:length]), MODEL)
        settled(sessions)
        (path,) = tmp_path.glob("30-*.safetensors")
        path.write_bytes(path.read_bytes()[:-100])
        with caplog.at_level(logging.WARNING):
            assert sessions.find(TEXT, MODEL)[0] == 20
        assert "is not used" in caplog.text

    def test_a_disk_that_fails_ends_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr("lex_hf.inference.batching.sessions.save_cache", fail)
        sessions = FileSessions(10**6, tmp_path, MODEL)
        sessions.keep(TEXT, cache_of(TEXT), MODEL)
        settled(sessions)
        assert "could not be kept" in caplog.text
        assert sessions.find([*TEXT, 1], MODEL) == (0, None)

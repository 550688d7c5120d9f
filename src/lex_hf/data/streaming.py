"""Packed examples of a corpus that is larger than memory, made as they are needed; resumable to the example."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset as Documents
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from lex_hf.data.documents import FOLDER_SUFFIXES
from lex_hf.data.packing import Packer, too_few_tokens
from lex_hf.data.tokenizing import grouped, tokenize_in_pieces
from lex_hf.records import content_hash

_CHARACTERS_AT_ONCE = 1_000_000  # read together
_Pieces = list[tuple[NDArray[np.int32], bool]]


@dataclass(frozen=True)
class _Mark:
    """The beginning of a block of examples, and the state that is needed to make the block again."""

    examples: int  # before the block
    block: int  # number of blocks before
    source: dict[str, Any]  # position of the next document; empty means the first
    tokens: list[int]  # left over from the documents before
    starts: list[bool]  # which of those tokens begin a document
    digest: str | None = None  # hash of the examples of the block; `None` if they were not made yet


class PackedStream(IterableDataset[dict[str, torch.Tensor]]):
    """Endless examples for a training: the documents are read again and again, and packed as by [`pack`].

    Examples are shuffled within blocks of `shuffle_buffer`, by the seed and the number of the block. So the position
    of an example is a few numbers, and a stream resumes at any position without reading the documents before it: the
    caller reports examples with `consume`, and `state_dict` returns the position of the first that was not consumed,
    even if more were read ahead.

    Args:
        documents: As `stream_documents` returns them; they belong to this stream from now on.
        tokenizer: Any tokenizer with an `eos_token`.
        length: Tokens per example, at least 2.
        separate_documents: As for [`pack`].
        shuffle_buffer: Examples that are shuffled together, and held in memory; 1 keeps the order of the documents.
        seed: Seed of the shuffling.
        sources: Where the documents come from, as given to `stream_documents`: names and sizes are compared when a
            training is resumed, besides the examples around the position where it resumes.

    Raises:
        ValueError: If a number is too small or the tokenizer has no `eos_token`; when it is read, if all documents
            together do not fill an example.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        *,
        separate_documents: bool = False,
        shuffle_buffer: int = 1000,
        seed: int = 0,
        sources: Sequence[str | Path] | None = None,
    ) -> None:
        if shuffle_buffer < 1:
            raise ValueError(f"shuffle_buffer = {shuffle_buffer}: must be at least 1, which keeps the order.")
        self.documents = documents
        self.tokenizer = tokenizer
        self.settings: dict[str, Any] = {
            "length": length,
            "separate_documents": separate_documents,
            "shuffle_buffer": shuffle_buffer,
            "seed": seed,
        }
        if sources is not None:
            self.settings["sources"] = [_describe(source) for source in sources]
        self.packer = Packer(tokenizer, length, separate_documents=separate_documents)
        self.consumed = 0
        self._marks = deque([_Mark(0, 0, {}, [], [])])

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield examples from the first that was not consumed, without an end."""
        if get_worker_info() is not None:
            raise ValueError("A stream is read in the process that trains: set dataloader_num_workers = 0.")
        mark = self._marks[0]
        self._marks = deque([mark])
        batches, skip = self._batches(mark), self.consumed - mark.examples
        while True:
            block = self._block(batches, mark.block)
            self._marks[-1] = replace(mark, digest=_digest(block))
            count = len(block["input_ids"])
            for index in range(skip, count):
                yield {name: torch.from_numpy(rows[index]).long() for name, rows in block.items()}
            skip = 0
            left = self.packer.tokens.tolist(), self.packer.starts.tolist()
            mark = _Mark(mark.examples + count, mark.block + 1, self.documents.state_dict() or {}, *left)
            self._marks.append(mark)

    def consume(self, count: int) -> None:
        """Note that `count` more examples were used."""
        self.consumed += count
        while len(self._marks) > 1 and self._marks[1].examples <= self.consumed:
            self._marks.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the first example that was not consumed, as JSON can hold it."""
        return {"consumed": self.consumed, "mark": vars(self._marks[0]), "settings": self.settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a position that `state_dict` returned.

        Raises:
            ValueError: If that stream had other settings or other texts: its examples were not the same.
        """
        changed = [f"{name} = {was!r}, not {now!r}" for name, (was, now) in self.differences(state).items()]
        if changed:
            raise ValueError(f"The stream to resume had {'; '.join(changed)}.")
        self.go_to(state)

    def differences(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Compare with the stream of a `state_dict`; the examples at its position are made again.

        Returns:
            Differences by name, `(was, now)`: settings or, if they are the same, `texts`.
        """
        was = state["settings"]
        found = {name: (was[name], now) for name, now in self.settings.items() if name in was and was[name] != now}
        mark = _Mark(**state["mark"])
        if found or mark.digest is None:
            return found
        try:
            digest = _digest(self._block(self._batches(mark), mark.block))
        except (LookupError, TypeError):  # a missing position: other files, or fewer of them
            digest = "which these texts do not have"
        where = f"examples from {mark.examples} on"
        return {} if digest == mark.digest else {"texts": (f"{where}, {mark.digest}", f"{where}, {digest}")}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Resume at a position that `state_dict` returned, of a stream that is the same."""
        self.consumed = state["consumed"]
        self._marks = deque([_Mark(**state["mark"])])

    def _block(self, batches: Iterator[Iterator[_Pieces]], number: int) -> dict[str, list[NDArray[np.int32]]]:
        """Make the next examples, at least `shuffle_buffer` of them, in the order of training."""
        size = self.settings["shuffle_buffer"]
        parts: list[dict[str, NDArray[np.int32]]] = []
        while sum(len(part["input_ids"]) for part in parts) < size:
            parts += map(self.packer, next(batches))
        block = {name: [row for part in parts for row in part[name]] for name in parts[0]}  # no copies
        if size == 1:
            return block
        order = np.random.default_rng([self.settings["seed"], number]).permutation(len(block["input_ids"]))
        return {name: [rows[index] for index in order] for name, rows in block.items()}

    def _batches(self, mark: _Mark) -> Iterator[Iterator[_Pieces]]:
        """Yield tokenised documents, some at a time, from a position on and then from the first on, for ever.

        The packer becomes what it was there. Each iterator must be exhausted before the next.
        """
        self.packer.resume(mark.tokens, mark.starts)
        source, is_whole = mark.source, not mark.source
        while True:
            self.documents.load_state_dict(source)
            documents, before = 0, self.packer.count
            for texts in grouped((each["text"] for each in self.documents), len, _CHARACTERS_AT_ONCE):
                documents += len(texts)
                yield tokenize_in_pieces(texts, self.tokenizer)
            tokens = self.packer.count - before
            if is_whole and tokens < self.packer.length:
                raise too_few_tokens(self.packer.length, documents, tokens)
            source, is_whole = {}, True


def _digest(block: Mapping[str, Iterable[NDArray[np.int32]]]) -> str:
    return content_hash(row.tobytes() for rows in block.values() for row in rows)


def _describe(source: str | Path) -> str:
    """Return name and size of a file or folder, without its path, or the name of a dataset of the Hub."""
    path = Path(source)
    if path.is_dir():
        sizes = [each.stat().st_size for each in path.rglob("*") if each.name.endswith(FOLDER_SUFFIXES)]
        return f"{path.resolve().name}: {len(sizes)} files, {sum(sizes)} bytes"
    return f"{path.name}: {path.stat().st_size} bytes" if path.exists() else str(source)

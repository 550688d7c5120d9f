"""Sessions: what was read of a text, kept so that a longer text goes on from there instead of being read again.

A chat sends its whole history with every message. Its cache has a constant size however long that is, so it is kept
under the ids of the tokens that it holds, in memory or as a file, and a prompt that begins with them goes on from it.
"""

import contextlib
import copy
import hashlib
import json
import logging
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lex_hf.inference.cache_files import identity_of, load_cache, save_cache

logger = logging.getLogger(__name__)

Key = tuple[int, str]
"""Number of tokens of a text, and a hash of their ids."""


class Sessions:
    """Keeps nothing; those that keep something are below.

    Attributes:
        max_bytes: Most bytes to keep.
    """

    max_bytes = 0

    def keep(self, ids: Sequence[int], cache: Cache, model: PreTrainedModel) -> bool:
        """Keep the cache of a text, least recently used ones making room.

        Args:
            ids: Ids of the tokens that it holds.
            cache: A cache of one text, which nobody else changes from now on.
            model: The model that filled it.

        Returns:
            Whether it was taken.
        """
        return False

    def find(self, ids: Sequence[int], model: PreTrainedModel) -> tuple[int, Cache | None]:
        """Return how many tokens at the beginning of a text are in a cache that is kept, and a copy of that cache.

        Args:
            ids: Ids of the text; of the last one, the logits are needed, so it is read in any case.
            model: The model that goes on.
        """
        return 0, None

    def nbytes(self) -> int:
        """Return the bytes that are kept."""
        return 0

    def close(self) -> None:
        """Finish what is being written."""


class MemorySessions(Sessions):
    """Caches in memory.

    Args:
        max_bytes: Most bytes to keep.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._caches: OrderedDict[Key, Cache] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, ids: Sequence[int], cache: Cache, model: PreTrainedModel) -> bool:
        """Keep the cache of a text; see [`Sessions.keep`]."""
        if _nbytes(cache) > self.max_bytes:
            return False
        (key,) = _keys(ids, [len(ids)])
        with self._lock:
            self._caches[key] = cache
            self._caches.move_to_end(key)
            while self._total() > self.max_bytes:
                self._caches.popitem(last=False)
        return True

    def find(self, ids: Sequence[int], model: PreTrainedModel) -> tuple[int, Cache | None]:
        """Return what is kept of a text; see [`Sessions.find`]."""
        with self._lock:
            for key in _candidates(ids, self._caches):
                self._caches.move_to_end(key)
                return key[0], copy.deepcopy(self._caches[key])
        return 0, None

    def nbytes(self) -> int:
        """Return the bytes that are kept."""
        with self._lock:
            return self._total()

    def _total(self) -> int:
        return sum(map(_nbytes, self._caches.values()))


class FileSessions(Sessions):
    """Caches as files, which other processes of the same model may share.

    A cache that another model wrote is not used; one that vanishes while it is read, or is damaged, is read again as
    text.

    Args:
        max_bytes: Most bytes to keep.
        folder: Where.
        model: The model; its weights must not change.
    """

    def __init__(self, max_bytes: int, folder: Path, model: PreTrainedModel) -> None:
        self.max_bytes, self.folder = max_bytes, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._identity = identity_of(model, model.dtype)
        self._owner = json.dumps(self._identity, sort_keys=True).encode()
        # Files are written beside the generation, in their order.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="lex-hf-sessions")

    def keep(self, ids: Sequence[int], cache: Cache, model: PreTrainedModel) -> bool:
        """Keep the cache of a text; see [`Sessions.keep`]."""
        if _nbytes(cache) > self.max_bytes:
            return False
        (key,) = _keys(ids, [len(ids)], self._owner)
        self._writer.submit(self._write, key, cache, model)
        return True

    def _write(self, key: Key, cache: Cache, model: PreTrainedModel) -> None:
        try:
            save_cache(cache, model, self._path(key), identity=self._identity)
            self._shrink()
        except Exception:  # a full disk must not end requests
            logger.exception("A session could not be kept in %s; its text will be read again.", self.folder)

    def _shrink(self) -> None:
        """Delete the least recently used files beyond the bytes that may be kept."""
        files = []
        for key in self._known():
            with contextlib.suppress(FileNotFoundError):
                state = self._path(key).stat()
                files.append((state.st_mtime_ns, state.st_size, self._path(key)))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def find(self, ids: Sequence[int], model: PreTrainedModel) -> tuple[int, Cache | None]:
        """Return what is kept of a text; see [`Sessions.find`]."""
        for key in _candidates(ids, self._known(), self._owner):
            path = self._path(key)
            try:
                cache = load_cache(path, model, identity=self._identity)
                os.utime(path)
            except (OSError, ValueError) as error:
                logger.warning("The session in %s is not used: %s", path, error)
                continue
            return key[0], cache
        return 0, None

    def nbytes(self) -> int:
        """Return the bytes that are kept."""
        total = 0
        for key in self._known():
            with contextlib.suppress(FileNotFoundError):
                total += self._path(key).stat().st_size
        return total

    def close(self) -> None:
        """Finish what is being written."""
        self._writer.shutdown(wait=True)

    def _known(self) -> list[Key]:
        keys = []
        for path in self.folder.glob("*-*.safetensors"):
            length, _, digest = path.stem.partition("-")
            if length.isdecimal():
                keys.append((int(length), digest))
        return keys

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]}-{key[1]}.safetensors"


def _nbytes(cache: Cache) -> int:
    return sum(layer.nbytes() for layer in cache.layers)


def _candidates(ids: Sequence[int], known: Iterable[Key], owner: bytes = b"") -> list[Key]:
    """Return the keys of texts with which a longer one begins, the longest first."""
    there = {key for key in known if key[0] < len(ids)}
    return [key for key in reversed(_keys(ids, sorted({length for length, _ in there}), owner)) if key in there]


def _keys(ids: Sequence[int], lengths: Sequence[int], owner: bytes = b"") -> list[Key]:
    """Return the keys of the first so many tokens of a text, for one model; lengths ascend."""
    digest, keys, start = hashlib.sha256(owner), [], 0
    for length in lengths:
        digest.update(array("q", ids[start:length]).tobytes())
        keys.append((length, digest.hexdigest()))
        start = length
    return keys

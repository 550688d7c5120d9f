"""Ways to read texts beyond the training length without training: what users have, beside blocks.

Three scale the frequencies of the rotation, two give far pairs positions that the model knows, and four see only what
is near, two of them with the first tokens. Each is as in its paper; those of this file that have no implementation in
transformers are slow references.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from lex_hf.rope import regions
from lex_hf.rope.blockwise import blockwise, restore
from lex_hf.rope.region_reader import reading_regions
from lex_hf.rope.scaling import scaled
from lex_hf.rope.window import reading_window

SINKS = 4  # of StreamingLLM, arXiv 2309.17453, §3.2


@dataclass(frozen=True)
class Reading:
    """A model that reads in some way.

    Attributes:
        model: The model; the same one changed for a while, or another with the same weights.
        new_cache: Returns an empty cache; `None` if a reference reads whole texts only.
    """

    model: PreTrainedModel
    new_cache: Callable[[], Cache] | None


@dataclass(frozen=True)
class Size:
    """What a way depends on.

    Attributes:
        training_length: l, in tokens.
        longest: Length of the longest text in tokens.
    """

    training_length: int
    longest: int

    @property
    def factor(self) -> float:
        """Factor of scaling."""
        return max(1.0, self.longest / self.training_length)


@dataclass(frozen=True)
class Way:
    """A way to read.

    Attributes:
        title: Its name in pictures.
        describe: Returns its name in tables, with its settings.
        open: Makes a model read so while a context lasts; raises ValueError with a sentence if it cannot.
        kept: Tokens whose keys and values a layer with full attention keeps after it has read so many, at a training
            length.
        is_bounded: Whether that number has a limit.
    """

    title: str
    describe: Callable[[Size], str]
    open: Callable[[PreTrainedModel, Size], AbstractContextManager[Reading]]
    kept: Callable[[int, int], int]
    is_bounded: bool


def _plain_cache(model: PreTrainedModel) -> Callable[[], Cache]:
    return lambda: DynamicCache(config=model.config.get_text_config())


@contextmanager
def _unchanged(model: PreTrainedModel, size: Size) -> Iterator[Reading]:
    yield Reading(model, _plain_cache(model))


def _scaled(kind: str) -> Callable[[PreTrainedModel, Size], AbstractContextManager[Reading]]:
    @contextmanager
    def read(model: PreTrainedModel, size: Size) -> Iterator[Reading]:
        other = scaled(model, kind, size.factor, size.training_length)
        yield Reading(other, _plain_cache(other))

    return read


def _by_regions(
    make: Callable[[Size], tuple[regions.Region, ...]],
) -> Callable[[PreTrainedModel, Size], AbstractContextManager[Reading]]:
    @contextmanager
    def read(model: PreTrainedModel, size: Size) -> Iterator[Reading]:
        with reading_regions(model, make(size), size.training_length):
            yield Reading(model, None)

    return read


@contextmanager
def _windowed(model: PreTrainedModel, size: Size) -> Iterator[Reading]:
    with reading_window(model, size.training_length) as new_cache:
        yield Reading(model, new_cache)


def _in_blocks(sinks: Callable[[int], int]) -> Callable[[PreTrainedModel, Size], AbstractContextManager[Reading]]:
    @contextmanager
    def read(model: PreTrainedModel, size: Size) -> Iterator[Reading]:
        blockwise(model, size.training_length, sinks=sinks(size.training_length))
        try:
            yield Reading(model, _plain_cache(model))
        finally:
            restore(model)

    return read


def self_extend_of(size: Size) -> tuple[regions.Region, ...]:
    """Return the regions of Self-Extend with a window of l/2 and the smallest groups with which the text fits."""
    window, group = self_extend_settings(size)
    return regions.self_extend(window, group)


def self_extend_settings(size: Size) -> tuple[int, int]:
    """Return window and groups of Self-Extend in tokens."""
    window = size.training_length // 2
    return window, regions.smallest_group(window, size.training_length, size.longest)


def dual_chunk_of(size: Size) -> tuple[regions.Region, ...]:
    """Return the regions of Dual Chunk Attention with chunks of three quarters of l."""
    return regions.dual_chunk(3 * size.training_length // 4, size.training_length)


def streaming_of(size: Size) -> tuple[regions.Region, ...]:
    """Return the regions of StreamingLLM with a cache of l tokens."""
    return regions.streaming(SINKS, size.training_length - SINKS)


def _all(tokens: int, length: int) -> int:
    return tokens


def _window(tokens: int, length: int) -> int:
    return min(tokens, length - 1)  # the next query brings its own


def _blocks(tokens: int, length: int) -> int:
    return length


def _no_sinks(length: int) -> int:
    return 0


def sinks_beside_blocks(length: int) -> int:
    """Return how many sinks stand before blocks: those of StreamingLLM, or fewer where blocks would be too short."""
    return min(SINKS, length // 4)


def _block_beside_sinks(length: int) -> int:
    return (length - sinks_beside_blocks(length)) // 2


def _named_with_sinks(size: Size) -> str:
    block, sinks = _block_beside_sinks(size.training_length), sinks_beside_blocks(size.training_length)
    return f"blockwise, blocks of {block} + {sinks} sinks"


def _sinks_and_blocks(tokens: int, length: int) -> int:
    # Sinks are kept as they came, too.
    return 2 * sinks_beside_blocks(length) + 2 * _block_beside_sinks(length)


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "unchanged": Way("unchanged", lambda size: "full attention, unchanged", _unchanged, _all, is_bounded=False),
        "linear": Way(
            "linear scaling",
            lambda size: f"linear scaling, factor {size.factor:g}",
            _scaled("linear"),
            _all,
            is_bounded=False,
        ),
        "dynamic": Way(
            "dynamic NTK",
            lambda size: f"dynamic NTK, factor {size.factor:g}",
            _scaled("dynamic"),
            _all,
            is_bounded=False,
        ),
        "yarn": Way("YaRN", lambda size: f"YaRN, factor {size.factor:g}", _scaled("yarn"), _all, is_bounded=False),
        "self-extend": Way(
            "Self-Extend",
            lambda size: "Self-Extend, window {}, groups of {}".format(*self_extend_settings(size)),
            _by_regions(self_extend_of),
            _all,
            is_bounded=False,
        ),
        "dual-chunk": Way(
            "Dual Chunk",
            lambda size: f"Dual Chunk Attention, chunks of {3 * size.training_length // 4}",
            _by_regions(dual_chunk_of),
            _all,
            is_bounded=False,
        ),
        "sliding": Way(
            "sliding window",
            lambda size: f"sliding window of {size.training_length}",
            _windowed,
            _window,
            is_bounded=True,
        ),
        "streaming": Way(
            "StreamingLLM",
            lambda size: f"StreamingLLM, window of {size.training_length - SINKS} + {SINKS} sinks",
            _by_regions(streaming_of),
            _window,
            is_bounded=True,
        ),
        "blockwise": Way(
            "blockwise",
            lambda size: f"blockwise, blocks of {size.training_length // 2}",
            _in_blocks(_no_sinks),
            _blocks,
            is_bounded=True,
        ),
        "blockwise-sinks": Way(
            "blockwise + sinks",
            _named_with_sinks,
            _in_blocks(sinks_beside_blocks),
            _sinks_and_blocks,
            is_bounded=True,
        ),
    }
)

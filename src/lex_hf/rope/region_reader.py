"""Reading at several positions at once: a slow reference for ways that change the positions of pairs.

Scores at other positions need queries and keys that were rotated otherwise. Families of models differ in how they
rotate, so no rotation is taken apart here: the model itself rotates. Each text is read in several rows that differ in
`position_ids` alone. In attention, the rows hold the same queries and keys at different positions. Every pair takes
its score from the rows that its region names, and all rows continue with the same output.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from lex_hf.errors import plain
from lex_hf.rope import probe
from lex_hf.rope.angles import ExactAngles, modules_with_angles
from lex_hf.rope.blockwise import blockwise, restore
from lex_hf.rope.per_thread import PerThread
from lex_hf.rope.reader import ModelFunction
from lex_hf.rope.regions import Region

_QUERIES_AT_ONCE = 256
_MASKED = ("eager", "sdpa")  # attention functions that take a mask of numbers
_TRIED_TOKENS, _TRIED_WINDOW, _TRIED_SHIFT = 11, 3, 4


@dataclass(frozen=True)
class _Rows:
    """What layers get in the place of a mask: their own mask, of the true positions."""

    own: Any


@dataclass(frozen=True)
class _Pass:
    """A forward pass: the number of its texts, and for each region the rows of queries and of keys."""

    texts: int
    rows: list[tuple[int, int]]


@contextmanager
def reading_regions(
    model: PreTrainedModel, regions: Sequence[Region], training_length: int
) -> Iterator[PreTrainedModel]:
    """Let a model read whole texts with other positions while the context lasts; afterwards it is what it was.

    Layers with a sliding window within the training length keep it, and their positions.

    Args:
        model: As for [`blockwise`]: what that refuses is refused. It then takes `input_ids` without padding, and no
            cache; logits are those of the way that the regions describe.
        regions: Regions, no two of which hold the same pair.
        training_length: Number of tokens that the model was trained to read.

    Raises:
        ValueError: If the model cannot be read so; the message says why.
    """
    restore(blockwise(model, training_length))  # finds what is wrong with a model: positions, masks, angles
    config = model.config.get_text_config()
    function = ModelFunction(config._attn_implementation if config._attn_implementation in _MASKED else "eager")
    seen = probe.examine(model, ModelFunction(config._attn_implementation).of)
    own = {index for index, window in seen.windows.items() if window is not None and window <= training_length}
    # Of the models within a model, the innermost that attends: it makes masks, and calls the layers.
    *_, decoder = (each for each in model.modules() if isinstance(each, PreTrainedModel) and _holds(each, seen))
    install = partial(_installed, model, decoder, own, training_length, function)
    _try(model, install)
    with install(regions):
        yield model


def _holds(module: nn.Module, seen: probe.Probe) -> bool:
    return any(each is seen.modules[0] for each in module.modules())


def _try(model: PreTrainedModel, install: Callable[..., AbstractContextManager[None]]) -> None:
    """Move all far pairs to other positions at the same distance, which must change nothing.

    Raises:
        ValueError: If it does.
    """

    def moved(places: torch.Tensor) -> torch.Tensor:
        return places + _TRIED_SHIFT

    regions = (
        Region(lambda query, key: query - key < _TRIED_WINDOW, lambda places: places, lambda places: places),
        Region(lambda query, key: query - key >= _TRIED_WINDOW, moved, moved),
    )
    ids, name = probe.tokens(model, _TRIED_TOKENS), type(model).__name__
    with torch.no_grad(), probe.evaluating(model):
        expected = model(input_ids=ids, use_cache=False).logits
        try:
            with install(regions):
                found = model(input_ids=ids, use_cache=False).logits
        except Exception as error:  # code that was not written for this raises anything
            raise ValueError(
                f"{name} cannot read a text at several positions ({type(error).__name__}: {plain(error)})."
            ) from error
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= torch.finfo(expected.dtype).eps ** 0.5 * largest:
        raise ValueError(
            f"{name} cannot read a text at several positions: where other positions change nothing, its logits differ "
            f"by {difference:.2g}, so it does more with positions than rotate queries and keys."
        )


@contextmanager
def _installed(
    model: PreTrainedModel,
    decoder: nn.Module,
    own: Collection[int],
    training_length: int,
    function: ModelFunction,
    regions: Sequence[Region],
) -> Iterator[None]:
    reader = _RegionReader(decoder, regions, own, function)
    with ExitStack() as stack:
        for module in modules_with_angles(decoder):
            stack.callback(ExactAngles(module, training_length).remove)
        hooks = (
            decoder.register_forward_pre_hook(reader.begin, with_kwargs=True),
            decoder.register_forward_hook(reader.end, with_kwargs=True),
        )
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(probe.reading_as(model, reader.mask, reader.attend))
        yield


class _RegionReader:
    """Hooks of a decoder, and its attention implementation.

    Args:
        decoder: The decoder of the model.
        regions: As of [`reading_regions`].
        own: Indices of the layers that keep their own attention.
        function: What attends, of which a mask of numbers is taken.
    """

    def __init__(
        self, decoder: nn.Module, regions: Sequence[Region], own: Collection[int], function: ModelFunction
    ) -> None:
        self.regions, self.own, self.function = regions, own, function
        self.signature = inspect.signature(decoder.forward)
        self._pass: PerThread[_Pass] = PerThread()

    def begin(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Repeat texts, at the positions of every region; a forward pre-hook.

        Raises:
            ValueError: If there is padding, a cache, or positions are given.
        """
        kwargs = {**dict(zip(self.signature.parameters, args, strict=False)), **kwargs}
        mask = kwargs.get("attention_mask")
        if kwargs.get("past_key_values") is not None or kwargs.get("position_ids") is not None:
            raise ValueError(
                "A text is read whole and from its beginning: give neither past_key_values nor position_ids."
            )
        if mask is not None and not bool((mask == 1).all()):
            raise ValueError("A text is read without padding: give texts of equal length, and no attention_mask.")
        given = {name: kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None}
        (name, states), *_ = given.items()
        positions, rows = self._positions(torch.arange(states.shape[1], device=states.device))
        self._pass.value = _Pass(states.shape[0], rows)
        repeats = [len(positions)] + [1] * (states.dim() - 1)
        ids = torch.stack(positions).repeat_interleave(states.shape[0], dim=0)
        changed = {name: states.repeat(repeats), "position_ids": ids, "attention_mask": None, "use_cache": False}
        return (), {**kwargs, **changed}

    def _positions(self, places: torch.Tensor) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
        """Return different positions of all tokens, the true ones first, and the rows of each region."""
        rows, of_regions = [places], []
        for region in self.regions:
            pair = []
            for wanted in (region.query(places), region.key(places)):
                if not any(torch.equal(wanted, row) for row in rows):
                    rows.append(wanted)
                pair.append(next(index for index, row in enumerate(rows) if torch.equal(wanted, row)))
            of_regions.append((pair[0], pair[1]))
        return rows, of_regions

    def end(self, decoder: Any, args: Any, kwargs: Any, output: Any) -> Any:
        """Keep the first row of each text; a forward hook."""
        output.last_hidden_state = output.last_hidden_state[: self._current.texts]
        return output

    @property
    def _current(self) -> "_Pass":
        assert self._pass.value is not None, "layers attend between the two hooks"
        return self._pass.value

    def mask(self, *args: Any, **kwargs: Any) -> _Rows:
        """Make the mask of layers that keep their own attention."""
        if kwargs.get("local_size") is None:
            return _Rows(None)
        masks = ALL_MASK_ATTENTION_FUNCTIONS.get(self.function.implementation, eager_mask)
        return _Rows(masks(*args, **kwargs))

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend with the first row of each text, or region by region, and let all rows have the same output."""
        texts, function = self._current.texts, self.function.of(module)
        repeats = (query.shape[0] // texts, 1, 1, 1)
        if module.layer_idx in self.own:
            own = attention_mask.own if attention_mask.own is None else attention_mask.own[:texts]
            output, _ = function(module, query[:texts], key[:texts], value[:texts], own, **kwargs)
            return output.repeat(repeats), None
        kwargs = {name: each for name, each in kwargs.items() if name not in ("is_causal", "sliding_window")}
        kwargs["scaling"] = kwargs.get("scaling") or query.shape[-1] ** -0.5
        by_query, by_key = query.unflatten(0, (-1, texts)), key.unflatten(0, (-1, texts))
        outputs = []
        for places in torch.arange(query.shape[2], device=query.device).split(_QUERIES_AT_ONCE):
            queries, keys, values, mask = self._joined(by_query, by_key, value[:texts], places)
            output, _ = function(module, queries, keys, values, mask, is_causal=False, **kwargs)
            outputs.append(output)
        return torch.cat(outputs, dim=1).repeat(repeats), None

    def _joined(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys, values and a mask with which ordinary attention is that of all regions together.

        Every region has a part of the head dimension. Its queries and keys are there, and keys of other regions are 0,
        so that scores are those within regions. A key of several regions is there several times, of which each query
        sees one.

        Args:
            query: Shape `(rows, batch, heads, tokens, head_dim)`.
            key: Shape `(rows, batch, key heads, tokens, head_dim)`.
            value: Shape `(batch, key heads, tokens, value_dim)`.
            places: Places of the queries that attend.
        """
        earlier = torch.arange(int(places[-1]) + 1, device=places.device)
        queries, keys, values, masks = [], [], [], []
        of_regions = zip(self.regions, self._current.rows, strict=True)
        for number, (region, (row_of_queries, row_of_keys)) in enumerate(of_regions):
            queries.append(query[row_of_queries, :, :, places])
            seen = region.seen(places, earlier)
            some = seen.any(dim=0).nonzero()[:, 0]
            width = key.shape[-1]
            padding = (number * width, (len(self.regions) - 1 - number) * width)
            keys.append(nn.functional.pad(key[row_of_keys, :, :, some], padding))
            values.append(value[:, :, some])
            masks.append(seen[:, some])
        mask = torch.cat(masks, dim=1)
        added = query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
        added = added.expand(value.shape[0], 1, -1, -1)
        return torch.cat(queries, dim=-1), torch.cat(keys, dim=2), torch.cat(values, dim=2), added

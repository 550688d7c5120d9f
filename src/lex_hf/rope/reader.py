"""How a model of transformers reads in blocks: its forward pass is planned, and its layers attend along the plan.

transformers looks up two functions by the name of the attention implementation: one that makes masks, once for each
kind of layer in a forward pass, and one that attends, in each layer. A [`Reader`] is both under a name of its own. A
hook before the forward pass of the decoder lays down the plan, and supplies the cache; the function that makes masks
hands the plan to layers with full attention, in the place of their mask, and attention follows it.
"""

import copy
import inspect
import sys
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lex_hf.model.attention_lex import Fold, Planner, Step
from lex_hf.model.batch_lex import PACKED, Batch, Movable
from lex_hf.model.functions_lex import AttentionFunction, eager_attention_forward
from lex_hf.model.layers_lex import by_column
from lex_hf.model.masking_lex import BlockwisePattern, FullPattern, SlidingPattern
from lex_hf.model.scheme_lex import PositionScheme
from lex_hf.model.versions_lex import is_checkpointing, is_recording_past, record_past, takes_back
from lex_hf.rope import probe
from lex_hf.rope.block_cache import BlockCacheLayer, adopt
from lex_hf.rope.per_thread import PerThread
from lex_hf.rope.turns import Turns


@dataclass(frozen=True)
class Reading(Movable):
    """What layers with full attention get in the place of a mask.

    Attributes:
        plan: The plan of this forward pass.
        is_cached: Whether keys and values come from the cache, which has put the tokens of each row first.
        returns_weights: Whether attention weights are requested; they take queries × keys of memory.
        full: The mask of layers that keep full attention, as their own attention function takes it.
    """

    plan: Fold | Step
    is_cached: bool
    returns_weights: bool = False
    full: torch.Tensor | None = None


@dataclass
class _Pass:
    """A forward pass of the decoder, from its first hook to its last.

    Attributes:
        reading: What layers get in the place of a mask.
        cache: Its cache, or `None`.
        was_taken: Whether the model has asked for a mask.
    """

    reading: Reading
    cache: Cache | None
    was_taken: bool = False


class Reader:
    """The attention implementation of one model.

    Attributes:
        pattern: The attention pattern of layers that read in blocks.
        patterns: That of each layer that attends.
        bound: Training length in tokens, and the longest window of a layer that keeps its own attention.
        yarn_factor: By which the frequencies of layers that keep full attention are scaled; `None` if they are not.

    Args:
        decoder: The module whose forward pass makes masks and calls the layers.
        pattern: The attention pattern of layers that read in blocks.
        layers: Indices of the layers that read in blocks.
        windows: By index of each layer that attends, the number of tokens that it sees by itself; `None` for all.
        bound: Longest window, in tokens, of a layer that keeps its own attention.
        implementation: Name of the attention implementation that attends within blocks, the model's own.
        turns: By index of the layer, how sinks are turned; empty if there are none.
    """

    def __init__(
        self,
        decoder: nn.Module,
        pattern: BlockwisePattern,
        layers: Collection[int],
        windows: Mapping[int, int | None],
        bound: int,
        implementation: str,
        turns: Mapping[int, Turns] = MappingProxyType({}),
    ) -> None:
        self.name, self.bound = probe.new_name(), bound
        self.yarn_factor: float | None = None
        self.pattern, self.turns = pattern, turns
        self.layers = frozenset(layers)
        self.is_all = self.layers == set(windows)
        self.patterns = [
            self.pattern if index in layers else FullPattern() if window is None else SlidingPattern(window)
            for index, window in sorted(windows.items())
        ]
        self.keeps_full = [
            index
            for index, window in windows.items()
            if index not in self.layers and (window is None or window > bound)
        ]
        self.config: Any = decoder.config
        self.scheme = PositionScheme(self.config)
        self.signature = inspect.signature(decoder.forward)
        self.attend_with(implementation)
        self._pass: PerThread[_Pass] = PerThread()
        self._hooks: list[Any] = []

    def attend_with(self, implementation: str) -> None:
        """Take another of transformers' attention functions."""
        self.implementation = implementation
        self.function = ModelFunction(implementation)

    def install(self, decoder: PreTrainedModel) -> None:
        """Register the functions and the hooks."""
        self._register()
        weakref.finalize(decoder, probe.forget, self.name)  # a model may be deleted without being restored
        self._hooks = [
            decoder.register_forward_pre_hook(self.begin, with_kwargs=True),
            decoder.register_forward_hook(self.end, with_kwargs=True, always_call=True),
        ]

    def _register(self) -> None:
        probe.register(self.name, self.mask, self.attend)

    @property
    def key_fields(self) -> tuple[tuple[str, Any], ...]:
        """Names and values of the fields of the configuration that decide how cached keys are rotated."""
        fields = (("rope_parameters", getattr(self.config, "rope_parameters", None)), ("training_length", self.bound))
        return (*fields, ("sinks", self.pattern.sinks)) if self.pattern.sinks else fields

    def remove(self) -> None:
        """Undo [`Reader.install`]."""
        for hook in self._hooks:
            hook.remove()
        probe.forget(self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Reader":
        """Copy for a copy of the model, whose functions are registered under another name."""
        other = copy.copy(self)
        memo[id(self)] = other
        other.name = probe.new_name()
        other.config = copy.deepcopy(self.config, memo)
        other.config._attn_implementation_internal = other.name
        other._pass, other._hooks = PerThread(), copy.deepcopy(self._hooks, memo)
        other.turns = copy.deepcopy(self.turns, memo)
        other._register()
        return other

    def begin(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Plan a forward pass and supply its cache; a forward pre-hook.

        Raises:
            ValueError: If mask, positions or cache do not fit, see [`Batch.of`].
        """
        kwargs = {**dict(zip(self.signature.parameters, args, strict=False)), **kwargs}
        states = kwargs.get("inputs_embeds")
        if states is None:
            if kwargs.get("input_ids") is None:
                return (), kwargs  # the model says what it needs
            states = kwargs["input_ids"].unsqueeze(-1)
        mask, positions = _given(kwargs.get("attention_mask")), kwargs.get("position_ids")
        # Layers that are computed again get no cache from transformers, whatever the model was given.
        if decoder.training and is_checkpointing(decoder):
            kwargs |= {"use_cache": False, "past_key_values": None}
        cache, layer = self._cache(kwargs), None
        blocks: list[BlockCacheLayer] = []
        if cache is not None:
            blocks = [each for each in cache.layers if isinstance(each, BlockCacheLayer)]
            layer = blocks[0]
        batch = Batch.of(states, mask, positions, layer)
        if batch.document is not None and self.pattern.sinks:
            raise ValueError(
                f"position_ids pack several documents in a row, and each would need {self.pattern.sinks} sinks of its "
                "own: pass one document in each row, or make the model blockwise without sinks."
            )
        if batch.document is not None and cache is not None:
            if kwargs.get("past_key_values") is not None:
                raise ValueError(PACKED)
            cache, layer, blocks = None, None, []
            batch = Batch.of(states, mask, positions, None)
            kwargs["use_cache"] = False
        kwargs |= {"past_key_values": cache, "attention_mask": mask}
        if "logits_to_keep" in self.signature.parameters:
            kwargs["logits_to_keep"] = None  # a number would let layers drop queries that are in the plan
        if positions is None:  # by itself, a model counts padding
            kwargs["position_ids"] = batch.positions_by_column(states.device)
        for each in blocks:
            each.batch = batch
        planner = Planner(self.pattern, self.scheme, self.function, decoder.dtype, states.device)
        (plan,) = planner.plan([batch], layer)
        wants_weights = kwargs.get("output_attentions")
        if wants_weights is None:
            wants_weights = self.config.output_attentions
        reading = Reading(plan, is_cached=layer is not None, returns_weights=bool(wants_weights))
        self._pass.value = _Pass(reading, cache)
        return (), kwargs

    def end(self, decoder: Any, args: Any, kwargs: Any, output: Any = None) -> None:
        """Forget the plan of a forward pass; a forward hook.

        Raises:
            RuntimeError: If the pass went by without the plan.
        """
        ended, self._pass.value = self._pass.value, None
        if output is not None and (ended is None or not ended.was_taken):
            raise RuntimeError(
                f"{type(decoder).__name__} did not read in blocks: its attention implementation is now "
                f"{self.config._attn_implementation!r}. Call lex_hf.restore(model) before you change it."
            )

    def _cache(self, kwargs: dict[str, Any]) -> Cache | None:
        """Return the cache of a forward pass, with layers of two blocks."""
        cache, use_cache = kwargs.get("past_key_values"), kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(self.config, "use_cache", False)
        if cache is None and not use_cache:
            return None
        return self.new_cache() if cache is None else self._adopted(cache)

    def new_cache(self, max_cache_len: int | None = None) -> Cache:
        """Make an empty cache; with room for so many tokens, all memory is allocated once."""
        plain = DynamicCache(config=self.config) if max_cache_len is None else StaticCache(self.config, max_cache_len)
        return self._adopted(plain)

    def _adopted(self, cache: Any) -> Cache:
        return adopt(cache, dict.fromkeys(sorted(self.layers), self.pattern), self.name, self.turns)

    def prepare_cache(self, model: Any, prepare: Any, *args: Any, **kwargs: Any) -> None:
        """Let `generate` make its cache, and give it layers of two blocks before it learns that tokens are taken back.

        Args:
            model: The model that generates.
            prepare: Its own method.
            args: Arguments of that; the second are those of the model.
            kwargs: Further ones.
        """
        prepare(*args, **kwargs)
        given = args[1] if len(args) > 1 else kwargs["model_kwargs"]
        cache = given.get("past_key_values")
        if cache is not None:
            records = is_recording_past(cache)
            given["past_key_values"] = self._adopted(cache)
            generation_config = args[0] if args else kwargs["generation_config"]
            mode = args[2] if len(args) > 2 else kwargs["generation_mode"]
            if records or generation_config.is_assistant or takes_back(mode):
                record_past(cache)

    def mask(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plan for layers with full attention, and the mask of transformers for all others."""
        window = kwargs.get("local_size")
        if window is not None and window <= self.bound:
            return self._own_mask(*args, **kwargs)
        given, current = kwargs.get("attention_mask"), self._pass.value
        if current is None:  # `generate` asks before the forward pass, which then gets what it was given
            # Compiled steps need a mask whose shape does not change; other layers need that of the tokens before.
            return given[:, -kwargs["q_length"] :] if self.is_all and given is not None else given
        current.was_taken = True
        if not self.keeps_full:
            return current.reading
        if current.cache is not None:  # transformers took the sizes of any layer without a window
            length, offset = current.cache.get_mask_sizes(kwargs["q_length"], self.keeps_full[0])
            kwargs |= {"kv_length": length, "kv_offset": offset}
        return replace(current.reading, full=self._own_mask(*args, **kwargs))

    def _own_mask(self, *args: Any, **kwargs: Any) -> Any:
        return ALL_MASK_ATTENTION_FUNCTIONS.get(self.implementation, eager_mask)(*args, **kwargs)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend along the plan, or as the model does by itself; an attention function of transformers."""
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer: Any = module.layer_idx
        if isinstance(attention_mask, Reading) and layer not in self.layers:
            attention_mask = attention_mask.full
        if layer not in self.layers:
            function = self.function.of(module)
            return function(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
        if not isinstance(attention_mask, Reading):
            raise RuntimeError(
                f"{type(module).__name__} got a mask without a plan: call the model itself, not its forward method."
            )
        plan, rows = attention_mask.plan, attention_mask.plan.batch
        query = rows.align(query)
        if not attention_mask.is_cached:
            key, value = rows.align(key), rows.align(value)
        kwargs.pop("sliding_window", None)
        kwargs.pop("is_causal", None)
        function = partial(self.function, module, **kwargs)
        options: dict[str, Any] = {"dense": attention_mask.returns_weights, "scaling": scaling, "dropout": dropout}
        if layer in self.turns:
            options["turn"] = self.turns[layer].attended
        output, weights = plan.attend(function, query, key, value, **options)
        if weights is not None:
            weights, _ = by_column(rows.restore(weights), value, plan.key_order(value.shape[2]))
        return rows.restore(output).transpose(1, 2).contiguous(), weights


def _given(mask: Any) -> torch.Tensor | None:
    """Return the mask `(batch, tokens)` that was passed, perhaps among those of all kinds of layers.

    Raises:
        ValueError: If there is another one.
    """
    if isinstance(mask, dict):
        mask = next((each for each in mask.values() if isinstance(each, torch.Tensor) and each.dim() == 2), None)
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask is {shape}; a model with blocks makes its own masks, from one of the shape "
            "(batch, tokens), 1 for tokens and 0 for padding."
        )
    return mask


class ModelFunction(AttentionFunction):
    """The attention function of a model itself, also where that is the one in its own file.

    Args:
        implementation: Its name.
    """

    def __init__(self, implementation: str) -> None:
        super().__init__(implementation)
        self.suits_single_queries = True

    def of(self, module: nn.Module) -> Any:
        """Return the function that a module would call."""
        own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", eager_attention_forward)
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, own)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply attention; see [`AttentionFunction`]."""
        if mask is None and self.implementation == "eager":
            mask = query.new_zeros(1, 1, 1, 1)  # some models' own functions add it whatever it is
        return super().__call__(module, query, key, value, mask, *args, **kwargs)

"""Generation with a LEX model: its cache, and what of a step is compiled."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.utils import logging

from .batch_lex import check_past
from .cache_lex import LexCache, LexStaticCache
from .versions_lex import record_past, takes_back

logger = logging.get_logger(__name__)

CACHE_IMPLEMENTATIONS = ("dynamic", "static", "offloaded", "offloaded_static")
# Names that transformers also takes.
_DEPRECATED_CACHES = {
    "sliding_window": "static",
    "hybrid": "static",
    "hybrid_chunked": "static",
    "offloaded_hybrid": "offloaded_static",
    "offloaded_hybrid_chunked": "offloaded_static",
    "dynamic_full": "dynamic",  # of guesses, before transformers 5.15
}


class LexGenerationMixin(GenerationMixin):
    """Generation with a [`LexCache`]."""

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give `generate` a LEX cache; caches it cannot replace are refused."""
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not (empty := mask.any(dim=1)).all():
            row = int((~empty).nonzero()[0])
            raise ValueError(f"Row {row} of attention_mask has no 1: a prompt needs at least one token.")
        if generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
            # transformers would read the ids instead; one pass gives the tokens that pieces would.
            logger.warning_once("prefill_chunk_size has no effect on inputs_embeds: they are read in one pass.")
            generation_config.prefill_chunk_size = None
        wanted = generation_config.cache_implementation or "dynamic"
        wanted = _DEPRECATED_CACHES.get(wanted, wanted)
        if wanted not in CACHE_IMPLEMENTATIONS:
            raise ValueError(
                f"cache_implementation={wanted!r} is not available: LEX generates with its own cache, which already "
                f"has a constant size. Use one of {CACHE_IMPLEMENTATIONS}, or leave it unset."
            )
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            model_kwargs["past_key_values"] = LexCache.adopt(
                cache, self.config.patterns, self.config.key_fields, len(self.model.layers)
            )
        elif generation_config.use_cache is not False:
            length = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
            model_kwargs["past_key_values"] = self._new_cache(wanted, length)
            if generation_config.is_assistant:  # its guesses are taken back
                record_past(model_kwargs["past_key_values"])
        if takes_back(generation_mode) and model_kwargs.get("past_key_values") is not None:
            record_past(model_kwargs["past_key_values"])

    def _new_cache(self, implementation: str, length: int) -> Cache:
        """Make a cache for `generate`; one of static length has the longest of all so far, so compilers meet one."""
        offloading = implementation.startswith("offloaded")
        if offloading and self.device.type == "cpu":
            raise ValueError(
                f"cache_implementation={implementation!r} moves the cache off an accelerator, and the model is on the "
                "CPU: leave cache_implementation unset, or use 'static'."
            )
        if not implementation.endswith("static"):
            return LexCache(self.config, offloading=offloading)
        length = max(length, getattr(self, "_previous_max_cache_length", 0))
        self._previous_max_cache_length = length  # another thread may change it at once
        return LexStaticCache(self.config, length, offloading)

    @staticmethod
    def create_masks_for_generate(
        config: Any,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Keep of the mask what belongs to the new tokens: with a static cache, its shape must not change.

        Args:
            config: Configuration of the model.
            inputs_embeds: A tensor of shape `(batch, sequence, any)`.
            attention_mask: Shape `(batch, tokens read + sequence)`, or `None`.
            past_key_values: The static cache.
            is_first_iteration: Whether `generate` begins; later masks are made by itself.
            kwargs: Unused; part of transformers' interface.

        Raises:
            ValueError: If the mask does not fit what the cache has read.
        """
        if attention_mask is None:
            return None
        length = inputs_embeds.shape[1]
        for layer in past_key_values.layers if past_key_values is not None and is_first_iteration else ():
            if layer.is_initialized and attention_mask.shape[1] > length:
                check_past(attention_mask[:, :-length], layer)
                break
        return attention_mask[:, -length:]

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        """Return the forward pass, compiled for single tokens; longer inputs are laid out by their length, eagerly."""
        compiled = super().get_compiled_call(compile_config)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
            is_step = given is not None and given.shape[1] == 1
            return (compiled if is_step else self)(*args, **kwargs)

        return call

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Make what generates for many requests at once; see [`lex_hf.inference.batching.BlockBatchingManager`].

        Raises:
            ImportError: If lex_hf is not installed.
        """
        return continuous_batching().init(self, *args, **kwargs)

    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Generate for many requests within a block of code; see [`lex_hf.inference.batching.running`].

        Raises:
            ImportError: If lex_hf is not installed.
        """
        return continuous_batching().running(self, *args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Generate for a list of prompts of any lengths; see [`lex_hf.inference.batching.generate_batch`].

        Raises:
            ImportError: If lex_hf is not installed.
        """
        return continuous_batching().generate_batch(self, *args, **kwargs)

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Stop the manager that `generate_batch(…, persistent_manager=True)` kept."""
        continuous_batching().destroy_kept(self)


def continuous_batching() -> ModuleType:
    """Import what is not saved with a model.

    Raises:
        ImportError: If lex_hf is not installed.
    """
    try:
        return importlib.import_module("lex_hf.inference.batching")
    except ModuleNotFoundError as error:
        raise ImportError("Continuous batching is part of lex_hf: pip install lex-hf") from error

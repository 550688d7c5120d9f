"""Blockwise causal attention for a model of transformers with rotary positions: endless texts, constant memory."""

import contextlib
import inspect
import math
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from lex_hf.errors import plain
from lex_hf.model.generation_lex import LexGenerationMixin
from lex_hf.model.masking_lex import BlockwisePattern
from lex_hf.rope import probe
from lex_hf.rope import turns as turning
from lex_hf.rope.angles import ExactAngles, give_far_angles, modules_with_angles
from lex_hf.rope.reader import ModelFunction, Reader
from lex_hf.rope.scaling import scaled

logger = logging.get_logger(__name__)

_ATTRIBUTE = "_lex_hf_blockwise"
_BATCHING = (
    "init_continuous_batching",
    "continuous_batching_context_manager",
    "generate_batch",
    "destroy_cached_continuous_batching_manager",
)
_CHECKED_TOKENS = 11  # more than five blocks of the two tokens with which a model is tried
_SHIFTED_TOKENS, _SHIFT = 4, 3
_REFUSAL = "cannot be made blockwise"
_Model = TypeVar("_Model", bound=PreTrainedModel)


def blockwise(
    model: _Model,
    training_length: int | None = None,
    *,
    sinks: int = 0,
    layers: Collection[int] | None = None,
    yarn_factor: float | None = None,
) -> _Model:
    """Let a model read and write texts of any length, in constant memory, without training.

    Every layer with full attention attends in blocks of half the training length: a query sees the keys of its own
    block and the one before (LEX paper, arXiv 2212.10554, §3.3), so no two tokens meet that are further apart than in
    training, and a layer's cache holds two blocks. Texts up to the training length are read as before. The model's
    weights, files and code stay what they are; [`restore`] undoes all of it.

    The model is tried on a few tokens first: what its layers attend to, and that its logits in blocks, in one pass and
    in pieces, are those of a dense mask in its own attention.

    Args:
        model: A causal language model of transformers; changed in place. Its layers attend through transformers'
            attention interface, and its positions are rotary, or none.
        training_length: Number of tokens that it was trained to read, even; by default what its configuration says:
            `original_max_position_embeddings` where positions were stretched, else `max_position_embeddings`.
        sinks: Number of tokens at the start of a text that every later token sees as well, at the distance that they
            have when they stand just before its two blocks (StreamingLLM, arXiv 2309.17453, §3.2); blocks begin after
            them and are of `(training_length - sinks) // 2` tokens. For models that look at the first token when
            there is nothing to look at.
        layers: Indices of the layers that read in blocks, of those with full attention; all of them by default. Others
            keep full attention, and memory grows with them.
        yarn_factor: Length of the longest text by the training length: YaRN (arXiv 2309.00071, §3) scales the
            frequencies of layers that keep full attention by it, so that distances beyond the training length are not
            new to them; those that read in blocks need it not. `None` scales nothing.

    Returns:
        The model.

    Raises:
        ValueError: If the model cannot be served, or an argument does not fit; the message says why.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lex_hf import blockwise
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = blockwise(LlamaForCausalLM(LlamaConfig(vocab_size=100, max_position_embeddings=32, **sizes)))
    """
    _check_kind(model)
    config = model.config.get_text_config()
    length = training_length_of(config, training_length)
    if training_length is None:
        _tell_of_stretching(config, length)
    pattern = pattern_of(length, sinks)
    function = ModelFunction(config._attn_implementation)
    with _refused(model, "reading a few tokens through transformers' attention interface failed"):
        seen = probe.examine(model, function.of)
    _check_attention(model, seen)
    _check_positions(model)
    full = [index for index, window in seen.windows.items() if window is None or window > length]
    chosen = _chosen_layers(model, full, layers)
    decoder = _decoder(model, seen.modules[0])
    if "position_ids" not in inspect.signature(decoder.forward).parameters:  # others may swallow them
        raise ValueError(f"{type(model).__name__} {_REFUSAL}: it does not accept position_ids.")
    with _refused(model, "reading a few tokens with a DynamicCache failed"):
        problem = probe.check_cache(model, chosen)
    if problem is not None:
        raise ValueError(f"{type(model).__name__} cannot be made blockwise: {problem}.")
    kept = [index for index in full if index not in chosen]
    far = _far_modules(model, decoder, kept, length, yarn_factor)
    hooks: list[Any] = [
        ExactAngles(module, length, scaled) for module, scaled in zip(modules_with_angles(decoder), far, strict=True)
    ]
    try:
        if yarn_factor is not None:
            hooks += [give_far_angles(layer) for layer in _layers_around(decoder, seen.modules, kept)]
            with _refused(model, "reading a few tokens with scaled frequencies failed"):
                _check_far_angles(model, hooks, yarn_factor)
        with _refused(model, "reading a few tokens in blocks failed"):
            _try(model, decoder, chosen, seen.windows, length, function)
            turns = turning.recognise(model, decoder, chosen, function.of) if sinks else {}
    except BaseException:
        for each in hooks:
            each.remove()
        raise
    for each in hooks:
        if isinstance(each, ExactAngles):
            each.is_learning = False
    reader = Reader(decoder, pattern, chosen, seen.windows, length, config._attn_implementation, turns)
    reader.yarn_factor = yarn_factor
    reader.install(decoder)
    config._attn_implementation_internal = reader.name
    # Too late with the first forward pass: before it, `generate` tells caches that tokens will be taken back.
    prepare = model._prepare_cache_for_generation
    model._prepare_cache_for_generation = partial(reader.prepare_cache, model, prepare)
    for name in _BATCHING:
        setattr(model, name, partial(getattr(LexGenerationMixin, name), model))
    setattr(decoder, _ATTRIBUTE, (reader, hooks))
    return model


def restore(model: _Model) -> _Model:
    """Undo [`blockwise`]: the model is exactly what it was.

    Raises:
        ValueError: If the model was not made blockwise.
    """
    decoder = _find(model)
    if decoder is None:
        raise ValueError(f"This {type(model).__name__} is not blockwise: there is nothing to restore.")
    reader, hooks = getattr(decoder, _ATTRIBUTE)
    for each in (reader, *hooks):
        each.remove()
    decoder.config._attn_implementation_internal = reader.implementation
    for module in model.modules():  # the model itself, or one that it wraps
        for name in ("_prepare_cache_for_generation", *_BATCHING):
            vars(module).pop(name, None)
    delattr(decoder, _ATTRIBUTE)
    return model


@contextlib.contextmanager
def attending_with(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Let a model, in blocks or not, attend with another of transformers' attention functions for a while."""
    reader = reader_of(model)
    before = model.config._attn_implementation if reader is None else reader.implementation
    change = model.set_attn_implementation if reader is None else reader.attend_with
    try:
        change(implementation)
        yield
    finally:
        change(before)


def reader_of(model: nn.Module) -> Reader | None:
    """Return what lets a model read in blocks; `None` if it was not made blockwise."""
    decoder = _find(model)
    return None if decoder is None else getattr(decoder, _ATTRIBUTE)[0]


def _find(model: nn.Module) -> Any:
    """Return the decoder of a model that was made blockwise, or `None`."""
    return next((module for module in model.modules() if hasattr(module, _ATTRIBUTE)), None)


def _check_kind(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}; it must be a model of transformers.")
    name = type(model).__name__
    if _find(model) is not None:
        raise ValueError(f"This {name} is blockwise already; call restore(model) first to change it.")
    if model.config.model_type == "lex":
        raise ValueError(
            "A LEX model has blocks of its own: load it with attention_pattern='blockwise', which is the default."
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; only decoders read in blocks.")
    if not model.can_generate():
        raise ValueError(f"{name} is no causal language model; load it with AutoModelForCausalLM.")


@contextlib.contextmanager
def _refused(model: PreTrainedModel, what: str) -> Iterator[None]:
    """Turn any error of a model's code into a sentence; sentences are left as they are."""
    try:
        yield
    except Exception as error:  # code that was not written for this raises anything
        if isinstance(error, ValueError) and _REFUSAL in str(error):
            raise
        raise ValueError(
            f"{type(model).__name__} cannot be made blockwise: {what} ({type(error).__name__}: {plain(error)})."
        ) from error


def _check_positions(model: PreTrainedModel) -> None:
    """Refuse models that know absolute positions: in blocks, far positions would be new to them."""
    ids = probe.tokens(model, _SHIFTED_TOKENS)
    positions = torch.arange(_SHIFTED_TOKENS, device=ids.device)[None]
    with torch.no_grad(), probe.evaluating(model):
        try:
            near, far = (
                model(input_ids=ids, position_ids=positions + shift, use_cache=False).logits for shift in (0, _SHIFT)
            )
        except (TypeError, IndexError) as error:
            raise ValueError(
                f"{type(model).__name__} cannot be made blockwise: it does not take position_ids, or has a table of "
                f"positions ({plain(error)}); its positions must be rotary, or none."
            ) from error
    # Without angles, positions have no effect at all, or one that half precision may hide.
    tolerance = _rounding(model, near) if modules_with_angles(model) else 0.0
    if not float((near - far).abs().max()) <= tolerance:
        raise ValueError(
            f"{type(model).__name__} {_REFUSAL}: its positions are absolute, and must be rotary, or none."
        )


def _rounding(model: nn.Module, logits: torch.Tensor) -> float:
    """Return the difference up to which two ways to compute logits count as the same.

    Models have float32 angles, and packed weights have scales of the dtype that their products round to.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    coarsest = max(torch.finfo(dtype).eps for dtype in (*dtypes, logits.dtype, torch.float32))
    return coarsest**0.5 * float(logits.abs().max())


def training_length_of(config: Any, given: int | None = None) -> int:
    """Return a training length in tokens: the one given, or what the configuration of a decoder says.

    Raises:
        ValueError: If there is none, or it is not an even number of at least 2.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layers = [each for each in parameters.values() if isinstance(each, dict)]  # of each kind of layer its own
    stretched = [each.get("original_max_position_embeddings") for each in (parameters, *of_layers)]
    most = getattr(config, "max_position_embeddings", None)
    known = next(filter(None, stretched), None) or getattr(config, "original_max_position_embeddings", None) or most
    length = known if given is None else given
    if length is None:
        raise ValueError("training_length: the configuration of the model does not say it; give it, in tokens.")
    if isinstance(length, bool) or not isinstance(length, int) or length < 2 or length % 2:
        raise ValueError(f"training_length = {length!r}: it must be an even number of tokens, at least 2.")
    known = max(filter(None, (known, most)), default=None)
    if known is not None and length > known:
        logger.warning(
            "training_length = %d is more than the %d tokens that the model was trained for: what lies further apart "
            "is new to it.",
            length,
            known,
        )
    return length


def _tell_of_stretching(config: Any, length: int) -> None:
    """Say that a model was made for longer texts than the training length that its configuration gives."""
    most = getattr(config, "max_position_embeddings", None) or length
    if most > length:
        logger.warning(
            "Blocks are for %d tokens, of which most of the training was; positions were then stretched to %d. "
            "blockwise(model, %d), or --blockwise %d on the command line, keeps all of these in sight, with a cache "
            "as much larger.",
            length,
            most,
            most,
            most,
        )


def pattern_of(length: int, sinks: int) -> BlockwisePattern:
    """Return the attention pattern of a training length in tokens, with so many sinks.

    Raises:
        ValueError: If there are as many sinks as tokens in a block, or the number is impossible.
    """
    if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
        raise ValueError(f"sinks = {sinks!r}: it must be a number of tokens, 0 for none.")
    block = (length - sinks) // 2
    if sinks >= block:
        raise ValueError(
            f"sinks = {sinks}: with a training length of {length}, blocks would have {max(block, 0)} tokens, and "
            f"there must be fewer sinks than that: at most {(length - 2) // 3}."
        )
    return BlockwisePattern(block, sinks)


def _check_attention(model: PreTrainedModel, seen: probe.Probe) -> None:
    """Refuse models whose attention does not go where transformers lets others in."""
    name = type(model).__name__
    if not seen.modules and not seen.unmasked:
        raise ValueError(
            f"{name} cannot be made blockwise: it does not leave masks and attention to transformers' attention "
            "interface."
        )
    if seen.unmasked or not seen.is_causal:
        what = type((seen.unmasked or seen.modules)[0]).__name__
        raise ValueError(
            f"{name} cannot be made blockwise: {what} gets masks that transformers' functions for causal masks did "
            "not make."
        )
    if -1 in seen.windows:
        raise ValueError(f"{name} cannot be made blockwise: its attention modules do not know their layer.")


def _chosen_layers(model: PreTrainedModel, full: Collection[int], layers: Collection[int] | None) -> list[int]:
    if not full:
        raise ValueError(
            f"No layer of this {type(model).__name__} sees more tokens than its training length: it reads texts of "
            "any length as it is."
        )
    if layers is None:
        return sorted(full)
    unknown = sorted(set(layers) - set(full))
    if unknown or not layers:
        raise ValueError(f"layers = {sorted(layers)}: those with full attention are {sorted(full)}; choose of these.")
    return sorted(layers)


def _far_modules(
    model: PreTrainedModel, decoder: nn.Module, kept: Collection[int], length: int, factor: float | None
) -> list[nn.Module | None]:
    """Return for each module with angles the scaled one, for layers that keep full attention; `None` if they do not.

    Raises:
        ValueError: If the factor is impossible, no layer keeps full attention, or frequencies cannot be scaled.
    """
    if factor is None:
        return [None] * len(modules_with_angles(decoder))
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < math.inf:
        raise ValueError(
            f"yarn_factor = {factor!r}: it must be at least 1, the longest text by the training length, e.g. 16.0."
        )
    if not kept:
        raise ValueError(
            f"yarn_factor = {factor!r} is for layers that keep full attention, and all read in blocks: give as layers "
            "those that do."
        )
    path = next(name for name, module in model.named_modules() if module is decoder)
    other = scaled(model, "yarn", float(factor), length).get_submodule(path)
    return list(modules_with_angles(other))


def _check_far_angles(model: PreTrainedModel, hooks: Collection[Any], factor: float) -> None:
    """Refuse a factor without effect, as in models whose full layers have no positions."""
    exact = [each for each in hooks if isinstance(each, ExactAngles)]
    ids, logits = probe.tokens(model, _CHECKED_TOKENS), []
    with torch.no_grad(), probe.evaluating(model):
        for takes_near in (False, True):
            for each in exact:
                each.takes_near = takes_near
            logits.append(model(input_ids=ids, use_cache=False).logits)
    for each in exact:
        each.takes_near = False
    if factor > 1 and torch.equal(*logits):
        raise ValueError(
            f"{type(model).__name__} cannot be made blockwise with yarn_factor = {factor!r}: it changes nothing, as "
            "the layers that keep full attention have no rotary positions. They need no factor; leave it out."
        )


def _layers_around(decoder: nn.Module, modules: Collection[nn.Module], chosen: Collection[int]) -> list[nn.Module]:
    """Return the layers of the decoder that attention modules with these indices are in."""
    wanted = {module for module in modules if module.layer_idx in chosen}
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return [layer for each in lists for layer in each if wanted & set(layer.modules())]


def _decoder(model: PreTrainedModel, attention: nn.Module) -> Any:
    """Return the model that holds the list of the layers to which an attention module belongs."""
    name = next(name for name, module in model.named_modules() if module is attention)
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.ModuleList):
            parts = parts[: end - 1]
            while not isinstance(module := model.get_submodule(".".join(parts)), PreTrainedModel):
                parts = parts[:-1]  # a stack of layers within the model that makes masks for it
            return module
    raise ValueError(f"{type(model).__name__} cannot be made blockwise: its layers are no list of modules.")


def _try(
    model: PreTrainedModel,
    decoder: Any,
    chosen: Collection[int],
    windows: dict[int, int | None],
    length: int,
    function: ModelFunction,
) -> None:
    """Compare the logits of blocks of two tokens with those of a dense mask, in one pass and in pieces.

    Raises:
        ValueError: If they differ.
    """
    ids, config = probe.tokens(model, _CHECKED_TOKENS), model.config.get_text_config()
    expected = probe.logits_of_blocks(model, ids, 2, chosen, length, function.of)
    implementation = config._attn_implementation
    reader = Reader(decoder, BlockwisePattern(2), chosen, windows, length, implementation)
    reader.install(decoder)
    config._attn_implementation_internal = reader.name
    try:
        with torch.no_grad(), probe.evaluating(model):
            whole, pieces = model(input_ids=ids, use_cache=False).logits, _in_pieces(model, ids)
    finally:
        config._attn_implementation_internal = implementation
        reader.remove()
    tolerance = _rounding(model, expected)
    for what, found in (("in one pass", whole), ("with its cache", pieces)):
        difference = float((found - expected).abs().max())
        if difference <= tolerance:
            continue
        with torch.no_grad(), probe.evaluating(model):
            own = model(input_ids=ids, use_cache=False).logits - _in_pieces(model, ids)
        if found is pieces and not float(own.abs().max()) <= tolerance:
            raise ValueError(
                f"{type(model).__name__} cannot be made blockwise: its logits in pieces, with a cache, are not "
                "those of one pass, also without blocks."
            )
        raise ValueError(
            f"{type(model).__name__} cannot be made blockwise: its logits {what} differ by {difference:.2g} from "
            "those of a dense mask, so its layers do more than attend to the keys that they are given."
        )


def _in_pieces(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a text that a model reads in several pieces, with a cache."""
    cache, logits = DynamicCache(config=model.config.get_text_config()), []
    for piece in ids.split([5, 1, 3, 1, 1], dim=1):
        logits.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)

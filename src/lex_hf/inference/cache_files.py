"""Caches as safetensors files: read a long text once, continue it as often as you like, in any process."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lex_hf.inference.caches import new_cache
from lex_hf.model.cache_layer_lex import LexCacheLayer
from lex_hf.records import whole_file
from lex_hf.rope.blockwise import reader_of

FORMAT = "lex_hf cache 3"
_STATE = ("keys", "values", "fill", "lengths", "padding", "columns")
_SINKS = ("sink_keys", "sink_values")
_SAMPLE = 64  # numbers of each weight whose bits and places a fingerprint holds, beside a sum over all bits


def save_cache(
    cache: Cache, model: PreTrainedModel, path: str | Path, *, identity: Mapping[str, str] | None = None
) -> None:
    """Write what a model has read to a file of constant size (with blockwise and sliding attention).

    Args:
        cache: The cache, as a forward pass or `generate(..., return_dict_in_generate=True)` returns it.
        model: The model that filled it, a LEX model or one that [`lex_hf.blockwise`] made; the file remembers which
            one it was.
        path: The file to write; it appears under its name only when it is whole.
        identity: What [`identity_of`] returned for the model, if its weights have not changed since; without it, all
            of them are read.

    Raises:
        ValueError: If the cache is empty, or has layers of another kind than two blocks.

    Example:
        >>> import tempfile, torch
        >>> from lex_hf import LexConfig, LexForCausalLM, load_cache, save_cache
        >>> model = LexForCausalLM(LexConfig(num_hidden_layers=1)).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_cache(model(torch.tensor([[1, 2, 3]])).past_key_values, model, f"{folder}/three.safetensors")
        ...     load_cache(f"{folder}/three.safetensors", model).get_seq_length()
        3
    """
    layers = getattr(cache, "layers", [])
    if not layers or not all(isinstance(layer, LexCacheLayer) for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
        raise ValueError(
            f"{type(cache).__name__} is not a LexCache, and not all of its layers are two blocks ({kinds}); pass what "
            "a LEX model returned, or a model whose layers all read in blocks."
        )
    if not all(layer.is_initialized for layer in layers):
        raise ValueError("The cache is empty: let the model read something first.")
    tensors = {
        f"{index}.{name}": tensor for index, layer in enumerate(layers) for name, tensor in _state(layer).items()
    }
    with whole_file(path) as place:
        metadata = {"format": FORMAT, "max_cache_len": str(layers[0].max_cache_len or "")}
        save_file(tensors, place, metadata=metadata | dict(identity or identity_of(model, layers[0].dtype)))


def load_cache(path: str | Path, model: PreTrainedModel, *, identity: Mapping[str, str] | None = None) -> Cache:
    """Read a cache that [`save_cache`] wrote, to the device of the model that continues the text.

    Args:
        path: The file.
        model: The model that filled the cache, in the same dtype.
        identity: As for [`save_cache`].

    Raises:
        ValueError: If the file is no cache, is cut off, or belongs to another model.
        FileNotFoundError: If there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt", device=str(model.device)) as file:
            metadata = file.metadata() or {}
            _check(path, metadata, identity or identity_of(model, model.dtype))
            size = metadata["max_cache_len"]
            cache = new_cache(model, int(size) if size else None)
            for index, layer in enumerate(cache.layers):
                names = (*_STATE, *_SINKS) if layer.pattern.sinks else _STATE
                _restore(layer, {name: file.get_tensor(f"{index}.{name}") for name in names})
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt ({error}): save it again with save_cache.") from error
    return cache


def _state(layer: LexCacheLayer) -> dict[str, torch.Tensor]:
    """Return what a layer must remember, by name."""
    counts = {name: torch.as_tensor(getattr(layer, name)) for name in _STATE[2:]}
    # The storage of full attention may be twice as long as the text.
    end = layer.keys.shape[2] if layer.is_preallocated or layer.block is not None else int(counts["lengths"].max())
    states = {name: getattr(layer, name)[:, :, :end].contiguous() for name in ("keys", "values")}
    return {**states, **counts, **dict(zip(_SINKS, _sinks(layer), strict=False))}


def _sinks(layer: LexCacheLayer) -> tuple[torch.Tensor, ...]:
    return getattr(layer, "sinks", None) or ()


def _restore(layer: LexCacheLayer, state: dict[str, torch.Tensor]) -> None:
    """Make an empty layer the one whose state this is."""
    layer.lazy_initialization(state["keys"][:, :, :0], state["values"][:, :, :0])
    for name, sinks in zip(_SINKS, _sinks(layer), strict=False):
        sinks.copy_(state[name])
    if layer.is_preallocated:
        for name in ("keys", "values", "lengths", "padding", "columns"):
            getattr(layer, name).copy_(state[name])
        return
    layer.keys, layer.values = state["keys"], state["values"]
    layer.fill, layer.columns = int(state["fill"]), int(state["columns"])
    layer.lengths, layer.padding = (
        int(count) if count.dim() == 0 else count for count in (state["lengths"], state["padding"])
    )


def _check(path: Path, metadata: dict[str, str], identity: Mapping[str, str]) -> None:
    """Compare a file's description with the model that continues the text."""
    found = metadata.get("format")
    if found != FORMAT and str(found).startswith("lex_hf cache"):
        raise ValueError(
            f"{path} was written by an earlier version of lex_hf, such as 0.1.0 (its format is {found!r}, not "
            f"{FORMAT!r}), which stored other states: read the text again, and save the cache."
        )
    if found != FORMAT:
        raise ValueError(f"{path} is not a LexCache: its format is {found!r}, not {FORMAT!r}.")
    for name, value in identity.items():
        if metadata.get(name) != value:
            raise ValueError(
                f"{path} was written by another model: its {name} are {metadata.get(name)}, and this model's are "
                f"{value}. Load the model that read the text, with the same attention pattern and dtype."
            )


def identity_of(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, str]:
    """Return what must be the same in the model that filled a cache and the one that continues."""
    source: Any = reader_of(model) or model.config
    return {
        "blocks": json.dumps([[pattern.name, pattern.block] for pattern in source.patterns]),
        "dtype": str(dtype),
        "positions": json.dumps(source.key_fields),
        "weights": _fingerprint(model),
    }


def _fingerprint(model: PreTrainedModel) -> str:
    """Hash all weights that keys and values depend on: not whole, but so that any training or merge shows.

    Of each weight the sum of its bits counts, whose order does not matter, and some numbers at their places.
    """
    decoder = getattr(model, model.base_model_prefix, model)
    digest = hashlib.sha256()
    for name, weight in decoder.named_parameters():
        if not name.startswith("norm."):  # it acts on what leaves the last layer
            for part in _plain(weight.detach()):
                digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
                digest.update(_digest(part))
    return digest.hexdigest()


def _plain(weight: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of which a weight consists; one that is quantised or sharded has several."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [part for name in names for part in _plain(getattr(weight, name))]


def _digest(tensor: torch.Tensor) -> bytes:
    if tensor.device.type == "meta":
        raise ValueError(
            "The weights of the model are offloaded, so a cache cannot be tied to them: load it without offloading to "
            "save or load caches."
        )
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
    bits = tensor.contiguous().flatten().view(words)
    sample = bits[:: max(1, len(bits) // _SAMPLE)]
    return torch.cat((bits.sum(dtype=torch.int64)[None], sample.long())).cpu().numpy().tobytes()

"""Caches as safetensors files: read a long text once, continue it as often as you like, in any process."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from lex_hf.model.cache_lex import LexCache, LexCacheLayer, origins
from lex_hf.model.static_cache_lex import LexStaticCache, LexStaticCacheLayer
from lex_hf.records import whole_file

FORMAT = "lex_hf cache 2"
_SAMPLE = 64  # numbers of each weight whose bits and places a fingerprint holds, beside a sum over all bits


def save_cache(cache: LexCache | LexStaticCache, model: PreTrainedModel, path: str | Path) -> None:
    """Write what a model has read to a file of constant size (with blockwise and sliding attention).

    Args:
        cache: The cache, as a forward pass or `generate(..., return_dict_in_generate=True)` returns it.
        model: The model that filled it; the file remembers which one it was.
        path: The file to write; it appears under its name only when it is whole.

    Raises:
        ValueError: If the cache is empty, or none of LEX.

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
    if not layers or not all(isinstance(layer, (LexCacheLayer, LexStaticCacheLayer)) for layer in layers):
        raise ValueError(f"{type(cache).__name__} is no cache of LEX; pass what a LEX model returned.")
    if not all(layer.is_initialized for layer in layers):
        raise ValueError("The cache is empty: let the model read something first.")
    tensors = {f"{index}.{name}": tensor for index, layer in enumerate(layers) for name, tensor in _state(layer)}
    with whole_file(path) as place:
        save_file(tensors, place, metadata=_description(layers, model))


def load_cache(path: str | Path, model: PreTrainedModel) -> LexCache | LexStaticCache:
    """Read a cache that [`save_cache`] wrote, to the device of the model that shall go on with it.

    Args:
        path: The file.
        model: The model that filled the cache, in the same dtype.

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
            _check(path, metadata, model)
            cache = _empty_cache(metadata, model)
            for index, layer in enumerate(cache.layers):
                names = [name for name, _ in _state(layer)]
                _restore(layer, {name: file.get_tensor(f"{index}.{name}") for name in names})
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}): write it anew with save_cache.") from error
    return cache


def _state(layer: LexCacheLayer | LexStaticCacheLayer) -> list[tuple[str, torch.Tensor]]:
    """What a layer must remember, by name."""
    if isinstance(layer, LexStaticCacheLayer):
        names = ("keys", "values", "positions", "padding", "columns")
        return [(name, getattr(layer, name)) for name in names]
    layer.settle()
    counts = {"fills": layer.fills, "lengths": layer.lengths, "padding": layer.padding, "columns": [layer.columns]}
    end = max(layer.fills, default=0) if layer.block is None else None  # its storage may be twice as long as the text
    states = [
        (name, None if tensor is None else tensor[:, :, :end].contiguous())
        for name, tensor in (("keys", layer.keys), ("values", layer.values))
    ]
    return [*states, *((name, torch.tensor(count)) for name, count in counts.items())]


def _restore(layer: LexCacheLayer | LexStaticCacheLayer, state: dict[str, torch.Tensor]) -> None:
    """Make an empty layer the one whose state this is."""
    layer.lazy_initialization(state["keys"][:, :, :0], state["values"][:, :, :0])
    if isinstance(layer, LexStaticCacheLayer):
        for name, tensor in state.items():
            getattr(layer, name).copy_(tensor)
        return
    layer.reserve(state["keys"].shape[2])
    layer.keys[:, :, : state["keys"].shape[2]] = state["keys"]
    layer.values[:, :, : state["values"].shape[2]] = state["values"]
    layer.fills, layer.lengths, layer.padding = (state[name].tolist() for name in ("fills", "lengths", "padding"))
    layer.columns = int(state["columns"])


def _description(layers: list[Any], model: PreTrainedModel) -> dict[str, str]:
    """What a file says of its cache, and of the model that filled it."""
    lengths = [layer.max_cache_len for layer in layers if isinstance(layer, LexStaticCacheLayer)]
    return {
        "format": FORMAT,
        "max_cache_len": str(max(lengths, default="")),
        **_identity(model, str(layers[0].dtype)),
    }


def _check(path: Path, metadata: dict[str, str], model: PreTrainedModel) -> None:
    """Compare a file's description with the model that shall go on."""
    found = metadata.get("format")
    if found == "lex_hf cache 1":
        raise ValueError(
            f"{path} was written by lex_hf 0.1.0, whose files do not show whether all weights are those of this "
            "model: read the text again, and save the cache."
        )
    if found != FORMAT:
        raise ValueError(f"{path} is no cache of LEX: its format is {found!r}, not {FORMAT!r}.")
    for name, value in _identity(model, str(model.dtype)).items():
        if metadata.get(name) != value:
            raise ValueError(
                f"{path} was written by another model: its {name} are {metadata.get(name)}, and this model's are "
                f"{value}. Load the model that read the text, with the same attention pattern and dtype."
            )


def _identity(model: PreTrainedModel, dtype: str) -> dict[str, str]:
    """What must be the same in the model that filled a cache and the one that goes on."""
    spans = origins(model.config)
    return {
        "blocks": json.dumps([block for block, _ in spans]),
        "dtype": dtype,
        "positions": json.dumps([origin for _, origin in spans]),
        "weights": _fingerprint(model),
    }


def _empty_cache(metadata: dict[str, str], model: PreTrainedModel) -> LexCache | LexStaticCache:
    if metadata["max_cache_len"]:
        return LexStaticCache(model.config, int(metadata["max_cache_len"]))
    return LexCache(model.config)


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

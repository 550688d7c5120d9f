"""Models whose rotary frequencies are scaled, as transformers does it by `rope_parameters`, with the same weights."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from lex_hf.errors import plain
from lex_hf.rope.angles import modules_with_angles

_UNSCALED = ("default", "proportional")


def scaled(model: PreTrainedModel, kind: str, factor: float, training_length: int) -> PreTrainedModel:
    """Return another model with the same weights, in the same memory, and scaled frequencies.

    Args:
        model: A causal language model whose own frequencies are not scaled.
        kind: A `rope_type` of transformers: `"linear"` (position interpolation, arXiv 2306.15595, Eq. 4), `"dynamic"`
            (NTK-aware interpolation whose base grows with the text) or `"yarn"` (arXiv 2309.00071, §3).
        factor: Length of the longest text by the training length, at least 1.
        training_length: Number of tokens that the model was trained to read.

    Raises:
        ValueError: If the model has no `rope_parameters`, or scales by itself already, or they cannot be changed.
    """
    name, config = type(model).__name__, copy.deepcopy(model.config)
    text = config.get_text_config()
    given = getattr(text, "rope_parameters", None)
    if not given:
        raise ValueError(f"The configuration of {name} has no rope_parameters, by which transformers scales.")
    changed = _changed(given, name, kind, factor, training_length)
    text.rope_parameters, text.max_position_embeddings = changed, training_length
    try:
        with no_init_weights(), torch.device("cpu"):  # computes buffers; memory of weights is never written to
            other = type(model)(config)
        other.load_state_dict(model.state_dict(), assign=True)
        other.tie_weights()
        other.to(model.device)
    except Exception as error:  # code of models raises anything
        raise ValueError(f"{name} cannot be made with rope_type {kind!r}: {plain(error)}") from error
    if not any(kind in _types(module) for module in modules_with_angles(other)):
        raise ValueError(f"{name} computes its frequencies without rope_parameters, so they cannot be scaled by them.")
    return other.eval()


def _changed(given: dict[str, Any], name: str, kind: str, factor: float, length: int) -> dict[str, Any]:
    """Return scaled parameters; of models with several kinds of layers, those of full attention are."""
    if isinstance(given.get("full_attention"), dict):
        return {**given, "full_attention": _changed(given["full_attention"], name, kind, factor, length)}
    before = given.get("rope_type", "default")
    if before not in _UNSCALED:
        raise ValueError(
            f"{name} has rope_type {before!r}: it was trained with frequencies that are scaled already, which "
            f"{kind!r} would replace."
        )
    changed = {**given, "rope_type": kind, "factor": float(factor)}
    return changed | ({"original_max_position_embeddings": length} if kind == "yarn" else {})


def _types(module: Any) -> list[str]:
    """Return the kinds of scaling of a module that computes angles."""
    found = getattr(module, "rope_type", ())
    return [found] if isinstance(found, str) else list(found.values() if isinstance(found, dict) else found)

"""Models for measuring and serving: loaded with all of their weights or not at all, and run in evaluation mode.

transformers fills weights that a checkpoint lacks with random numbers and prints a table; a measurement would then be
one of another model.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from accelerate import PartialState
from accelerate.utils import get_cpu_distributed_information
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, get_logger, is_progress_bar_enabled

from lex_hf.errors import explained
from lex_hf.rope.blockwise import blockwise as read_in_blocks
from lex_hf.rope.probe import evaluating as evaluating

logger = get_logger(__name__)

# Options that choose the source of files apply to the tokenizer as they do to the model.
_HUB_OPTIONS = ("cache_dir", "local_files_only", "revision", "token")
_NAMES_SHOWN = 3


def load_for_evaluation(
    model_id: str,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    blockwise: int | Literal["auto"] | None = None,
    sinks: int = 0,
    layers: Collection[int] | None = None,
    yarn_factor: float | None = None,
    **model_kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, with all of its weights, and its tokenizer with the Auto classes.

    Args:
        model_id: Folder or Hub id that holds both.
        device: Device of the model; see [`find_device`].
        dtype: Dtype of the weights, or its name; `None` keeps that of the checkpoint.
        trust_remote_code: Whether code that comes with the model may run.
        blockwise: Training length with which a model with rotary positions is made to read in blocks, in tokens;
            `"auto"` takes it from the configuration, `None` leaves the model as it is. See [`lex_hf.blockwise`].
        sinks: Tokens at the start of a text that a model that reads in blocks sees from everywhere.
        layers: Layers that a model that reads in blocks reads so; all with full attention by default.
        yarn_factor: By which YaRN scales the frequencies of its layers that keep full attention; see there.
        **model_kwargs: Passed to `AutoModelForCausalLM.from_pretrained`, e.g. `attention_pattern="full"`.

    Returns:
        The model, in evaluation mode, and the tokenizer.

    Raises:
        ValueError: If there is no such model or tokenizer, it cannot be read, its weights are not those of the
            model (see [`load_whole`]), the device or the dtype is unknown, the model cannot be made blockwise, or
            there are options of blocks and no blocks.
    """
    blocks = _blocks(blockwise, sinks=sinks, layers=layers, yarn_factor=yarn_factor)
    placement = _placement(device, dtype)
    tokenizer = _load_tokenizer(model_id, trust_remote_code, model_kwargs)
    model = _load_model(model_id, placement, dtype, trust_remote_code, model_kwargs)
    return _in_blocks(model, blockwise, blocks), tokenizer


def load_without_tokenizer(
    model_id: str,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    blockwise: int | Literal["auto"] | None = None,
    sinks: int = 0,
    layers: Collection[int] | None = None,
    yarn_factor: float | None = None,
    **model_kwargs: Any,
) -> PreTrainedModel:
    """Load a model as [`load_for_evaluation`] does, for texts that are token ids already."""
    blocks = _blocks(blockwise, sinks=sinks, layers=layers, yarn_factor=yarn_factor)
    model = _load_model(model_id, _placement(device, dtype), dtype, trust_remote_code, model_kwargs)
    return _in_blocks(model, blockwise, blocks)


def _blocks(blockwise: int | str | None, **options: Any) -> dict[str, Any]:
    """Return the options of blocks that are given; refuse them where there are no blocks."""
    given = {name: value for name, value in options.items() if value}
    if blockwise is None and given:
        name, value = next(iter(given.items()))
        raise ValueError(f"{name} = {value}: only a model that reads in blocks has {name}; give blockwise too.")
    return given


def _in_blocks(model: PreTrainedModel, blockwise: int | str | None, options: dict[str, Any]) -> PreTrainedModel:
    if blockwise is not None:
        read_in_blocks(model, None if isinstance(blockwise, str) else blockwise, **options)
    return model


def _placement(device: str | torch.device | None, dtype: str | torch.dtype | None) -> torch.device:
    """Return the device of a model, after a check of its dtype."""
    placement = find_device(device)
    join_processes(placement)
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (dtype in (None, "auto") or isinstance(named, torch.dtype)):
        raise ValueError(f"dtype = {dtype!r}: it must be a dtype of torch, e.g. 'float32' or 'bfloat16'.")
    return placement


def _load_model(
    model_id: str,
    placement: torch.device,
    dtype: str | torch.dtype | None,
    trust_remote_code: bool,
    model_kwargs: Mapping[str, Any],
) -> PreTrainedModel:
    model = load_whole(
        AutoModelForCausalLM, model_id, dtype=dtype, trust_remote_code=trust_remote_code, **model_kwargs
    )
    return model.to(placement).eval()


def _load_tokenizer(
    model_id: str, trust_remote_code: bool, model_kwargs: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    hub = {name: model_kwargs[name] for name in _HUB_OPTIONS if name in model_kwargs}
    with explained(model_id, "a tokenizer (tokenizer.json, tokenizer_config.json)"):
        return AutoTokenizer.from_pretrained(model_id, trust_remote_code=trust_remote_code, **hub)


def load_whole(model_class: Any, model_id: str, **options: Any) -> PreTrainedModel:
    """Load a model whose weights are all in its checkpoint, with the shapes that its configuration gives them.

    Args:
        model_class: A model class or an Auto class of transformers.
        model_id: Folder or Hub id.
        options: Passed to `from_pretrained`.

    Raises:
        ValueError: If there is no such model, it cannot be read, or weights are missing or of another shape; of a
            LEX model also if there are weights that it does not have. The message names some of them.
    """
    with explained(model_id, "a causal language model (config.json, model.safetensors or its shards)"), _no_table():
        # Without ignore_mismatched_sizes, the shapes would be in the table only.
        model, found = model_class.from_pretrained(
            model_id, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    _check_shapes(model_id, found["mismatched_keys"])
    _check_names(model, model_id, found["missing_keys"], found["unexpected_keys"])
    return model


def check_model(model_id: str, *, trust_remote_code: bool = False, **model_kwargs: Any) -> None:
    """Check that [`load_for_evaluation`] would load a model and its tokenizer, without reading its weights.

    Raises:
        ValueError: If not.
    """
    _load_tokenizer(model_id, trust_remote_code, model_kwargs)
    check_checkpoint(AutoModelForCausalLM, model_id, trust_remote_code=trust_remote_code, **model_kwargs)


def check_checkpoint(model_class: Any, model_id: str, **options: Any) -> None:
    """Check a checkpoint as [`load_whole`] does, by the names and shapes of the weights, without reading them."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        load_whole(model_class, model_id, device_map="meta", **options)
    finally:
        if shown:
            enable_progress_bar()


def join_processes(device: torch.device) -> None:
    """Join the processes of a launcher, if there is one; "cuda" is then a GPU of this process alone."""
    # By default, accelerate overlooks processes without accelerators. It fixes the device once and for all, so a
    # single process is left as it is.
    several = get_cpu_distributed_information().world_size > 1
    PartialState(cpu=several and device.type == "cpu")


def _check_shapes(model_id: str, mismatched: Collection[tuple[str, Collection[int], Collection[int]]]) -> None:
    if mismatched:
        shapes = [f"{name} {tuple(stored)} instead of {tuple(wanted)}" for name, stored, wanted in sorted(mismatched)]
        raise ValueError(
            f"{model_id!r} has weights of other shapes than its config.json gives the model: {_some(shapes)}. Restore "
            "the config.json that belongs to the weights, or save the model again."
        )


def _check_names(model: PreTrainedModel, model_id: str, missing: Collection[str], unexpected: Collection[str]) -> None:
    name = type(model).__name__
    others = f"the checkpoint holds {len(unexpected)} weights that {name} does not have: {_some(sorted(unexpected))}"
    if missing:
        renamed = f" Were they renamed? Besides, {others}." if unexpected else ""
        raise ValueError(
            f"{model_id!r} lacks {len(missing)} of the weights of {name}, which would be filled with random numbers: "
            f"{_some(sorted(missing))}.{renamed} Save the whole model again, or train what it lacks first."
        )
    if unexpected and model.config.model_type == "lex":
        raise ValueError(
            f"{model_id!r} does not agree with its config.json: {others}. Restore the config.json that belongs to the "
            "weights, or save the model again with the class it is used with."
        )
    if unexpected:
        logger.warning("%s: %s; they are not used.", model_id, others)


def _some(names: list[str]) -> str:
    """A few of many names."""
    return ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")


@contextmanager
def _no_table() -> Iterator[None]:
    """Keep transformers from printing its table of missing weights, which an error replaces."""
    report = logging.getLogger("transformers.modeling_utils")

    def passes(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    report.addFilter(passes)
    try:
        yield
    finally:
        report.removeFilter(passes)


def find_device(device: str | torch.device | None) -> torch.device:
    """Return a device on which models can run.

    Args:
        device: Its name; `None` means a CUDA device if there is one, else the CPU. `"gpu"` is another word for
            `"cuda"`.

    Raises:
        ValueError: If torch knows no such device, or does not find it here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        placement = torch.device("cuda" if device == "gpu" else device)
        backend = torch.get_device_module(placement.type)  # "meta" has none: nothing is computed there
    except RuntimeError as error:
        raise ValueError(f"device = {str(device)!r}: it must be a device of torch, e.g. 'cpu' or 'cuda:1'.") from error
    count = backend.device_count() if backend.is_available() else 0
    if count == 0:
        raise ValueError(f"device = {str(device)!r}: torch finds no {placement.type.upper()} device here; use 'cpu'.")
    if (placement.index or 0) >= count:
        raise ValueError(
            f"device = {str(device)!r}: torch finds {count} {placement.type.upper()} device{'s' * (count > 1)} here, "
            f"counted from 0; use '{placement.type}:0'."
        )
    return placement

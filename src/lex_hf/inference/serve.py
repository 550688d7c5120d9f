"""A model served over HTTP by `transformers serve`, which otherwise knows only transformers' own classes."""

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import typer
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available

from lex_hf.errors import plain
from lex_hf.evaluation.loading import check_checkpoint
from lex_hf.inference.packed_weights import PackedWeightsConfig
from lex_hf.model.modeling_lex import LexForCausalLM
from lex_hf.rope.blockwise import blockwise as read_in_blocks

logger = logging.get_logger(__name__)


def serve(
    model: str,
    *,
    host: str = "localhost",
    port: int = 8000,
    blockwise: int | Literal["auto"] | None = None,
    sinks: int = 0,
    quantization_config: PackedWeightsConfig | None = None,
    options: Sequence[str] = (),
) -> None:
    """Serve a model with an API like OpenAI's, until the process is interrupted.

    Chat, completions, both with streaming, and the list of models, which holds this one. `transformers chat MODEL
    http://HOST:PORT` and OpenAI's clients talk to it. Requests are answered one after the other, each with a cache of
    constant size.

    Args:
        model: Folder or Hub id of a causal language model with its tokenizer, LEX or one of transformers' own;
            `id@revision` names a revision. Chat needs a tokenizer with a chat template.
        host: Address to listen on.
        port: Port to listen on.
        blockwise: Training length with which a model with rotary positions reads in blocks, in tokens; `"auto"` takes
            it from the configuration, `None` leaves the model as it is. See [`lex_hf.blockwise`].
        sinks: Tokens at the start of a text that a model that reads in blocks sees from everywhere.
        quantization_config: How weights are packed; `None` leaves them as they are.
        options: Further options of the command `transformers serve`, as typed, e.g. `["--device", "cuda:1"]`.

    Raises:
        ImportError: If the packages of the extra `serve` are not installed; the message says how to get them.
        ValueError: For continuous batching, which LEX does not support, or a model that is missing, cannot be
            served, or lacks weights.
    """
    _check_options(model, options)
    if not is_serve_available():
        raise ImportError("Serving needs more packages: pip install 'lex-hf[serve]'")
    # Not `import transformers...`: the server looks models up in its own module object.
    manager = importlib.import_module("transformers.cli.serving.model_manager")
    manager.transformers.LexForCausalLM = LexForCausalLM
    _check_model(model, manager)
    if blockwise is not None:
        manager.ModelManager._load_model = _in_blocks(manager.ModelManager._load_model, blockwise, sinks)
    if quantization_config is not None:
        manager.ModelManager.get_quantization_config = lambda self: quantization_config
    # Its own list is that of the Hub's cache; a server of one model serves none of those.
    entry = {"id": model, "object": "model", "owned_by": "", "created": int(time.time())}
    manager.ModelManager.get_gen_models = staticmethod(lambda cache_dir=None: [entry])

    command = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    command.command()(importlib.import_module("transformers.cli.serve").Serve)
    arguments = [model, "--host", host, "--port", str(port), *options]
    command(arguments, prog_name="lex-hf serve", standalone_mode=False)


def _in_blocks(load: Callable[..., Any], length: int | Literal["auto"], sinks: int) -> Callable[..., Any]:
    """Return what loads a model and makes it blockwise."""

    def load_in_blocks(*args: Any, **kwargs: Any) -> Any:
        return read_in_blocks(load(*args, **kwargs), None if length == "auto" else length, sinks=sinks)

    return load_in_blocks


def _check_options(model: str, options: Sequence[str]) -> None:
    """Refuse options that cannot work, before anything is loaded."""
    if model.startswith("-"):
        raise ValueError(f"{model} is an option, not a MODEL: give lex-hf serve MODEL, and then the options.")
    for option in options:
        if option.startswith(("--continuous-batching", "--cb-")):
            raise ValueError(
                f"{option}: continuous batching uses paged caches, which do not support blocks. Leave it out: "
                "requests are then answered one after the other. For many prompts at once, call model.generate() "
                "with a left-padded batch."
            )


def _check_model(model: str, manager: ModuleType) -> None:
    """Refuse models on which the server would fail with a traceback; warn if it cannot chat."""
    name, _, revision = model.partition("@")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision or "main")
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main")
    except Exception as error:  # damaged files make the libraries raise anything
        raise ValueError(f"{model} is not a folder or Hub id of a model with its tokenizer: {plain(error)}") from error
    architecture = (config.architectures or ["no architecture"])[0]
    known = getattr(manager.transformers, architecture, None)
    if known is None or not known.can_generate():
        raise ValueError(
            f"{model} holds {architecture}, which cannot be served: it must be LexForCausalLM or another model of "
            "transformers that generates."
        )
    if getattr(config, "quantization_config", None) is None:  # such weights have other names and shapes
        check_checkpoint(known, name, revision=revision or "main")
    if tokenizer.chat_template is None:
        where = f"{name}/chat_template.jinja" if Path(name).is_dir() else "tokenizer.chat_template, and save it"
        logger.warning(
            "The tokenizer of %s has no chat template: completions work, chat does not. To chat, write one to %s.",
            model,
            where,
        )

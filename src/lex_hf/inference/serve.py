"""A model served over HTTP: loaded, put behind transformers' server, and run until it is told to stop."""

import inspect
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from transformers import CompileConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available

from lex_hf.evaluation.loading import load_for_evaluation
from lex_hf.inference.batching import BlockBatchingManager
from lex_hf.inference.packed_weights import PackedWeightsConfig
from lex_hf.inference.serving.limits import ServingLimits
from lex_hf.rope.blockwise import reader_of

logger = logging.get_logger(__name__)

_HERE = ("localhost", "127.0.0.1", "::1")
_EVERYWHERE = ("", "0.0.0.0", "::")


def serve(
    model: str,
    *,
    host: str = "localhost",
    port: int = 8000,
    grace: float = 30.0,
    log_level: str = "info",
    **options: Any,
) -> None:
    """Serve a model with an API like OpenAI's, until the process is told to stop.

    Chat, completions, both with streaming, the list of models, which holds this one, health, and metrics.
    `transformers chat MODEL http://HOST:PORT` and OpenAI's clients talk to it. Requests run at once, in the rows of
    one batch, and each gets the answer that it would get alone.

    Args:
        model: As for [`load_app`].
        host: Address to listen on.
        port: Port to listen on.
        grace: Seconds in which running requests may finish when the server is told to stop.
        log_level: Level of the log of HTTP requests.
        options: Those of [`load_app`].

    Raises:
        ImportError: If the packages of the extra `serve` are not installed, or transformers is too old; the message
            says how to get them.
        ValueError: If a limit is impossible, or the model is missing, lacks weights, or cannot be served.
    """
    check_grace(grace)
    app = load_app(model, host=host, **options)
    # Here, and not above: its packages may be missing.
    from lex_hf.inference.serving.server import run

    run(app, host, port, grace, log_level)


def load_app(
    model: str,
    *,
    host: str = "localhost",
    blockwise: int | Literal["auto"] | None = None,
    sinks: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    attn_implementation: str | None = None,
    quantization_config: PackedWeightsConfig | None = None,
    trust_remote_code: bool = False,
    compile: bool = False,
    rows: int | None = None,
    piece: int | None = None,
    seed: int | None = None,
    max_waiting: int | None = None,
    max_body_bytes: int | None = None,
    max_prompt_tokens: int | None = None,
    max_new_tokens: int | None = None,
    session_bytes: int = 0,
    session_folder: str | Path | None = None,
    allowed_hosts: Collection[str] = (),
    enable_cors: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Any:
    """Load a model, and make the app of its server; see [`lex_hf.inference.serving.app.build_app`].

    Args:
        model: Folder or Hub id of a causal language model with its tokenizer, LEX or with rotary positions and
            `blockwise`; `id@revision` names a revision. Chat needs a tokenizer with a chat template.
        host: Address that the server will listen on, by whose name it may be called.
        blockwise: Training length with which a model with rotary positions reads in blocks, in tokens; `"auto"` takes
            it from the configuration. See [`lex_hf.blockwise`].
        sinks: Tokens at the start of a text that a model that reads in blocks sees from everywhere.
        device: Device of the model; a GPU if there is one.
        dtype: Dtype of the weights, or its name; that of the checkpoint by default.
        attn_implementation: Attention function; transformers' choice by default.
        quantization_config: How weights are packed; `None` leaves them as they are.
        trust_remote_code: Whether code that comes with the model may run.
        compile: Whether steps are compiled, before the server listens.
        rows: Requests that are written at once; by default as many as memory allows, at most 32 on a CPU, else 256.
        piece: Tokens of prompts that are read between two steps at most, which bounds how long answers pause for a
            prompt.
        seed: Seed of requests without one; by default another one each time.
        max_waiting: Requests that may wait for a row; further ones are answered 429. See [`ServingLimits`], also for
            the other limits.
        max_body_bytes: Bytes of the body of a request at most.
        max_prompt_tokens: Tokens of a prompt at most.
        max_new_tokens: Tokens of an answer at most.
        session_bytes: Bytes for what finished requests leave behind, from which a longer text, e.g. of a chat, goes
            on; 0 keeps nothing.
        session_folder: Where to keep it, and share it with other servers of the same model; by default in memory.
        allowed_hosts: Names by which the server may be called, beside IP addresses, `host` and, if it listens on all
            addresses, the name of the machine; `*` for any.
        enable_cors: Whether pages of any origin may use the server from a browser.
        chat_template_kwargs: Variables of the chat template, which requests may override.
        labels: Labels of its metrics, which tell several servers apart.

    Returns:
        The app, whose batch runs.

    Raises:
        ImportError: If the packages of the extra `serve` are not installed, or transformers is too old; the message
            says how to get them.
        ValueError: If a limit is impossible, or the model is missing, lacks weights, or cannot be served.
    """
    check_serving(model)
    limits = ServingLimits(
        hosts=_hosts(host, allowed_hosts),
        **_given(
            max_waiting=max_waiting,
            max_body_bytes=max_body_bytes,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
        ),
    )
    name, _, revision = model.partition("@")
    choices = _given(
        revision=revision or None, attn_implementation=attn_implementation, quantization_config=quantization_config
    )
    network, tokenizer = load_for_evaluation(
        name,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        blockwise=blockwise,
        sinks=sinks,
        **choices,
    )
    config = ContinuousBatchingConfig(max_requests_per_batch=rows, max_batch_tokens=piece, seed=seed)
    if compile:
        config.decode_compile_config = CompileConfig(dynamic=False)
    hints = None
    if max_prompt_tokens and max_new_tokens:
        hints = WorkloadHints(max_prompt_length=max_prompt_tokens, max_generated_length=max_new_tokens)
    manager = _manager(model, network, config, hints, session_bytes=session_bytes, session_folder=session_folder)
    if tokenizer.chat_template is None:
        _warn_without_template(model, name)
    # Here, and not above: their packages may be missing.
    from lex_hf.inference.serving.app import build_app

    app = build_app(
        model,
        network,
        tokenizer,
        manager,
        limits,
        chat_template_kwargs=chat_template_kwargs,
        enable_cors=enable_cors,
        labels=labels,
    )
    logger.warning("%d requests at once; %.1f MiB a row.", manager.rows.size, manager.rows.row_bytes / 2**20)
    return app


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not left to a default."""
    return {name: value for name, value in options.items() if value is not None}


def _warn_without_template(model: str, name: str) -> None:
    where = f"{name}/chat_template.jinja" if Path(name).is_dir() else "tokenizer.chat_template, and save it"
    logger.warning(
        "The tokenizer of %s has no chat template: completions work, chat does not. To chat, write one to %s.",
        model,
        where,
    )


def check_grace(grace: float) -> None:
    """Refuse what is no number of seconds.

    Raises:
        ValueError: If it is none.
    """
    if not 0 <= grace < float("inf"):
        raise ValueError(f"grace = {grace}: it must be a number of seconds, at least 0.")


def check_serving(model: str) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        ImportError: If packages are missing.
        ValueError: If the model is an option.
    """
    if model.startswith("-"):
        raise ValueError(f"{model} is an option, not a MODEL: give lex-hf serve MODEL, and then the options.")
    if not is_serve_available():
        raise ImportError("Serving needs more packages: pip install 'lex-hf[serve]'")
    try:
        from transformers.cli.serving.server import build_server

        known = set(inspect.signature(build_server).parameters)
    except ImportError:
        known = set()
    if not {"chat_handler", "completion_handler", "generation_state", "enable_cors"} <= known:
        raise ImportError("Serving needs a newer transformers than this: pip install -U 'transformers[serving]'")


def _manager(
    name: str, model: PreTrainedModel, config: ContinuousBatchingConfig, hints: WorkloadHints | None, **options: Any
) -> BlockBatchingManager:
    """Make the batch.

    Raises:
        ValueError: If the model cannot be served.
    """
    if model.config.model_type != "lex" and reader_of(model) is None:
        raise ValueError(
            f"{name} is {type(model).__name__}, which does not read in blocks: give --blockwise auto, with which its "
            f"cache has a constant size; or serve it as it is with transformers serve {name}."
        )
    try:
        manager = BlockBatchingManager(model, None, config, hints, **options)
    except ValueError as error:
        if "workload_hints" not in str(error):
            raise
        raise ValueError(
            f"{name} has layers with full attention, whose caches grow with the text: say how long texts become, with "
            "--max-prompt-tokens and --max-new-tokens."
        ) from error
    if config.decode_compile_config is not None:
        manager.warmup()
    return manager


def _hosts(host: str, allowed: Collection[str]) -> set[str] | None:
    """Return the names by which a server may be called; `None` for any."""
    if "*" in allowed:
        return None
    names = {host, *allowed}
    if host in (*_HERE, *_EVERYWHERE):
        names |= set(_HERE)
    if host in _EVERYWHERE:
        names |= {socket.gethostname(), socket.getfqdn()}
    return {name.lower().rstrip(".") for name in names}

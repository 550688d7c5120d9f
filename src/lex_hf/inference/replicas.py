"""Several servers of one model under Ray Serve, which spreads requests over them and starts those anew that die.

A session may be anywhere: what was read of it is a file of constant size in a folder that all replicas share, so its
next request goes on from there at whichever replica it ends up.
"""

import inspect
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from lex_hf.inference.serve import check_grace, check_serving, load_app

NAME = "lex-hf"
_ROWS = 256  # at most, where they are not given
_MORE = 64  # requests beside those that the app takes: for its health, its metrics, and those that it turns away


class Replica:
    """A server in a process of Ray's: the app that [`lex_hf.inference.serve.serve`] serves.

    Args:
        model: As for `serve`.
        options: Those of [`lex_hf.inference.serve.load_app`].
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._loaded = load_app(model, labels={"replica": f"{socket.gethostname()}:{os.getpid()}"}, **options)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the app that answers; Ray asks for it."""
        return self._loaded

    def check_health(self) -> None:
        """Raise an error if generation has failed: Ray then replaces this replica.

        Raises:
            RuntimeError: Why.
        """
        trouble = self._loaded.state.engine.trouble()
        if trouble is not None:
            raise RuntimeError(trouble)


def deployment(
    model: str,
    *,
    replicas: int = 2,
    cpus: float = 1.0,
    gpus: float = 0.0,
    grace: float = 30.0,
    log_level: str = "info",
    **options: Any,
) -> Any:
    """Describe replicas of a server to Ray: `ray.serve.run(deployment(MODEL))` starts them.

    Args:
        model: As for [`lex_hf.inference.serve.serve`]; a folder must be there on every machine.
        replicas: Number of replicas.
        cpus: Cores of a replica, which are also the threads that it computes with.
        gpus: GPUs of a replica; 0 for one that computes on the CPU.
        grace: Seconds in which running requests may finish when a replica is stopped.
        log_level: Level of Ray Serve's log of HTTP requests.
        options: Those of [`lex_hf.inference.serve.load_app`]. Sessions need a `session_folder`, which all replicas
            see under the same name.

    Returns:
        A `ray.serve.Application`.

    Raises:
        ImportError: If the packages of the extra `ray` are not installed.
        TypeError: If an option is unknown.
        ValueError: If the numbers, or the options together, are impossible.

    Example:
        >>> from ray import serve  # doctest: +SKIP
        >>> serve.run(deployment("my_model", session_bytes=2**31, session_folder="/shared"))  # doctest: +SKIP
    """
    options = _checked(model, replicas, cpus, gpus, grace, options)
    serve = _ray_serve()
    most = (options.get("rows") or _ROWS) + options["max_waiting"] + _MORE
    described = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        # The app has a queue of its own, and says 429 when that is full.
        max_ongoing_requests=most,
        max_queued_requests=most,
        graceful_shutdown_timeout_s=grace,
        logging_config={"log_level": log_level.upper()},
        max_constructor_retry_count=1,  # a model that cannot be loaded cannot be loaded the next time
    )
    return described.bind(model, options)


def run(model: str, *, host: str = "localhost", port: int = 8000, address: str | None = None, **options: Any) -> None:
    """Serve a model from several processes, until this one is told to stop.

    Args:
        model: As for [`deployment`].
        host: Address to listen on.
        port: Port to listen on.
        address: A Ray cluster, e.g. `"auto"` for the one that this machine belongs to; by default one is started here,
            which only this machine reaches.
        options: Those of [`deployment`].

    Raises:
        ImportError: If the packages of the extra `ray` are not installed.
        TypeError: If an option is unknown.
        ValueError: If the numbers, or the options together, are impossible.
        RuntimeError: If a replica cannot be started, e.g. since the model cannot be loaded; its log says why.
    """
    application = deployment(model, host=host, **options)
    serve = _ray_serve()
    import ray

    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1")
    else:
        ray.init(address)
    try:
        # On a cluster every machine takes requests for all replicas.
        where = "HeadOnly" if address is None else "EveryNode"
        serve.start(proxy_location=where, http_options={"host": host, "port": port})
        with _Signals() as told:
            serve.run(application, name=NAME)
            told.wait()
        serve.delete(NAME)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


class _Signals:
    """Notes SIGTERM and Ctrl-C; a second one has its usual effect."""

    def __enter__(self) -> threading.Event:
        self._told = threading.Event()
        self._before = {each: signal.signal(each, self._note) for each in (signal.SIGINT, signal.SIGTERM)}
        return self._told

    def _note(self, number: int, frame: Any) -> None:
        self._told.set()
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self._restore()


def _ray_serve() -> Any:
    """Import Ray Serve.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise ImportError(
            f"Replicas run under Ray Serve, which is not installed ({error}). The extra 'ray' brings it: "
            "pip install 'lex-hf[ray]'"
        ) from error
    return serve


def _checked(
    model: str, replicas: int, cpus: float, gpus: float, grace: float, options: dict[str, Any]
) -> dict[str, Any]:
    """Check what replicas would refuse only after they have started, and return their options."""
    from lex_hf.inference.serving.limits import ServingLimits

    unknown = options.keys() - (inspect.signature(load_app).parameters.keys() - {"model", "labels"})
    if unknown:
        raise TypeError(
            f"Unknown options of replicas: {', '.join(sorted(unknown))}. See lex_hf.inference.serve.load_app."
        )
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas = {replicas!r}: it must be a whole number, at least 1.")
    if not 0 < cpus < float("inf") or not 0 <= gpus < float("inf"):
        raise ValueError(f"cpus = {cpus}, gpus = {gpus}: a replica has some of a CPU, and 0 or more GPUs.")
    check_grace(grace)
    device, folder = options.get("device"), options.get("session_folder")
    if not gpus and device not in (None, "cpu"):
        raise ValueError(f"device = {device!r}, but gpus = 0: say how many GPUs a replica has.")
    if options.get("session_bytes") and folder is None:
        raise ValueError("session_bytes needs session_folder: replicas share sessions as files in a folder.")
    waiting = options.get("max_waiting")
    found = {**options, "max_waiting": ServingLimits().max_waiting if waiting is None else waiting}
    ServingLimits(max_waiting=found["max_waiting"])
    check_serving(model)
    if not gpus:
        found["device"] = "cpu"
    if folder is not None:  # replicas may run in other folders
        found["session_folder"] = str(Path(folder).absolute())
    return found

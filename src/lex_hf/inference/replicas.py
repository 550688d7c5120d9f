"""Several servers of one model under Ray Serve, which spreads requests over them and starts those anew that die.

A session may be anywhere: what was read of it is a file of constant size in a folder that all replicas share, so its
next request goes on from there at whichever replica it ends up.
"""

import inspect
import os
import re
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lex_hf.inference.serve import check_grace, check_serving, load_app

NAME = "lex-hf"
REPLICAS, CPUS = 2, 1.0
LOOPBACK = "127.0.0.1"
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
    replicas: int = REPLICAS,
    cpus: float = CPUS,
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
            on the loopback.
        options: Those of [`deployment`].

    Raises:
        ImportError: If the packages of the extra `ray` are not installed.
        TypeError: If an option is unknown.
        ValueError: If the numbers, or the options together, are impossible, there is no room for so many replicas, or
            they cannot start, e.g. since the model cannot be loaded.
        RuntimeError: If Ray was imported before, so that it would listen on other addresses of this machine.
    """
    if not port:
        raise ValueError("port = 0: replicas need a port of their own, which all machines use.")
    if address is None:
        # Before Ray is imported: else it listens on all addresses of this machine, whatever it is told later.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Replicas have a port for each other on all addresses nonetheless: there Ray asks for its token.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    application = deployment(model, host=host, **options)
    serve = _ray_serve()
    import ray

    if address is None:
        ray.init("local", include_dashboard=False, _node_ip_address=LOOPBACK)
    else:
        ray.init(address)
    try:
        _check_place(ray, address)
        _check_room(ray.cluster_resources(), **options)
        # On a cluster every machine takes requests for all replicas.
        where = "HeadOnly" if address is None else "EveryNode"
        serve.start(proxy_location=where, http_options={"host": host, "port": port})
        with _Signals() as told:
            _start(serve, model, application)
            told.wait()
        serve.delete(NAME)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()


def _start(serve: Any, model: str, application: Any) -> None:
    """Start replicas, and wait until they are ready.

    Raises:
        ValueError: If one cannot start.
    """
    try:
        serve.run(application, name=NAME)
    except RuntimeError as error:  # it says that this was not possible; the log of the replica has the error itself
        messages = [each.message for each in serve.status().applications[NAME].deployments.values()]
        said = re.findall(r"^[\w.]+: .+", "\n".join(messages), re.MULTILINE)
        raise ValueError(f"A replica of {model} could not start: {said[-1] if said else error}") from error


def _check_place(ray: Any, address: str | None) -> None:
    """Refuse to go on if a Ray that was meant for this machine alone can be reached from others.

    Raises:
        RuntimeError: If it can.
    """
    place = ray.util.get_node_ip_address()
    if address is None and place != LOOPBACK:
        raise RuntimeError(
            f"Ray listens on {place}, since it was imported before: set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, or give "
            "the address of a cluster."
        )


def _check_room(
    found: Mapping[str, float], replicas: int = REPLICAS, cpus: float = CPUS, gpus: float = 0.0, **_: Any
) -> None:
    """Refuse replicas for which a cluster has no room: Ray would wait for further machines.

    Raises:
        ValueError: If it has too few cores or GPUs.
    """
    for name, kind, each in (("cpus", "CPU", cpus), ("gpus", "GPU", gpus)):
        there = found.get(kind, 0)
        if replicas * each > there:
            raise ValueError(
                f"{replicas} replicas with {name} = {each:g} need {replicas * each:g}, and there are {there:g}: take "
                f"fewer replicas or {name}, or more machines."
            )


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

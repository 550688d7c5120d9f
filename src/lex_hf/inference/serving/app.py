"""The app: transformers' server with a batch behind its routes, and what it lacks."""

import inspect
import json
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.server import build_server

from lex_hf.inference.batching import BlockBatchingManager
from lex_hf.inference.serving.engine import Engine
from lex_hf.inference.serving.gate import Gate
from lex_hf.inference.serving.handlers import Chat, Completions, check_model
from lex_hf.inference.serving.limits import RefusedError, ServingLimits
from lex_hf.inference.serving.metrics import FORMAT, Metrics
from lex_hf.inference.serving.visits import Visits

_KEPT = ("/v1/chat/completions", "/v1/completions", "/v1/models")  # of transformers' routes; nothing unloads the model
_MALFORMED = "The body must be a JSON object, sent with Content-Type: application/json."


class OneModel:
    """What transformers' server takes for the manager of its models: one, which stays.

    Args:
        model_id: Its name.
        engine: Answers for it; it ends with the app.
    """

    def __init__(self, model_id: str, engine: Engine) -> None:
        self.model_id, self.engine, self.created = model_id, engine, int(time.time())

    def entry(self) -> dict[str, Any]:
        """Return the model as OpenAI lists it."""
        return {"id": self.model_id, "object": "model", "owned_by": "", "created": self.created}

    def get_gen_models(self) -> list[dict[str, Any]]:
        """Return all models."""
        return [self.entry()]

    def shutdown(self) -> None:
        """End with the app."""
        self.engine.close()


class _Absent:
    """The handler of a route that this server does not have."""


def build_app(
    model_id: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    manager: BlockBatchingManager,
    limits: ServingLimits | None = None,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    enable_cors: bool = False,
) -> FastAPI:
    """Make the app of a server: chat, completions, the model, health and metrics.

    Args:
        model_id: Name by which requests call the model.
        model: The model, which `manager` generates with.
        tokenizer: Its tokenizer.
        manager: From `model.init_continuous_batching()`; it is started here, and destroyed with the app.
        limits: Limits of the server.
        chat_template_kwargs: Variables of the chat template, which requests may override.
        enable_cors: Whether pages of any origin may use the server from a browser.

    Returns:
        The app. `app.state.engine` and `app.state.visits` are what runs in it.

    Raises:
        ValueError: If the manager is that of another model.
    """
    if manager.model is not model:
        raise ValueError("The manager generates with another model: make it with model.init_continuous_batching().")
    limits = ServingLimits() if limits is None else limits
    engine, metrics = Engine(manager, tokenizer, limits), Metrics()
    visits = Visits(manager.counts()["rows"] + limits.max_waiting, metrics)
    only = OneModel(model_id, engine)
    handlers = {
        "chat_handler": Chat(model_id, engine, chat_template_kwargs),
        "completion_handler": Completions(model_id, engine),
    }
    names = [name for name in inspect.signature(build_server).parameters if name.endswith("_handler")]
    app = build_server(
        only,
        generation_state=None,  # its one use is /health, which is another one here
        enable_cors=enable_cors,
        **{name: handlers.get(name, _Absent()) for name in names},
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in _KEPT]
    _add_routes(app, only, visits, metrics)
    _add_errors(app)
    app.add_middleware(Gate, limits=limits, visits=visits)
    app.state.engine, app.state.visits = engine, visits
    return app


def _add_routes(app: FastAPI, only: OneModel, visits: Visits, metrics: Metrics) -> None:
    """Mount what transformers' server lacks."""

    @app.get("/health")
    def health() -> JSONResponse:
        reason = "The server is stopping." if visits.is_stopping else only.engine.trouble()
        status = {"status": "ok"} if reason is None else {"status": "unhealthy", "reason": reason}
        return JSONResponse(status, status_code=200 if reason is None else 503)

    @app.get("/metrics")
    def figures() -> PlainTextResponse:
        return PlainTextResponse(metrics.render(only.engine.manager.counts()), media_type=FORMAT)

    @app.post("/load_model")
    def load_model(body: dict[str, Any]) -> PlainTextResponse:
        """Say that the model is loaded: `transformers chat` begins with that question."""
        check_model(body.get("model"), only.model_id)
        event = {"status": "ready", "model": only.model_id, "cached": True}
        return PlainTextResponse(f"data: {json.dumps(event)}\n\n", media_type="text/event-stream")

    @app.get("/v1/models/{name:path}")
    def one_model(name: str) -> JSONResponse:
        check_model(name, only.model_id)
        return JSONResponse(only.entry())


def _add_errors(app: FastAPI) -> None:
    """Word all errors as OpenAI does."""

    @app.exception_handler(RefusedError)
    async def refused(request: Request, refusal: RefusedError) -> JSONResponse:
        return JSONResponse(refusal.body(), refusal.status, dict(refusal.headers))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        # What was sent is not repeated: it may hold what JSON cannot say.
        return JSONResponse(RefusedError(400, _MALFORMED).body(), 400)

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> JSONResponse:
        message = _MALFORMED if error.status_code == 400 else str(error.detail)
        if error.status_code in (404, 405):
            message = (
                f"There is no {request.method} {request.url.path} here. There are: POST /v1/chat/completions, POST "
                "/v1/completions, GET /v1/models, GET /health, GET /metrics."
            )
        return JSONResponse(RefusedError(error.status_code, message).body(), error.status_code, error.headers)

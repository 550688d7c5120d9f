"""Chat and completions: transformers' handlers, whose requests run in one batch."""

import inspect
import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from openai.types import Completion, CompletionUsage
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import (
    BaseHandler,
    ReasoningText,
    ToolCall,
    build_response_parser,
    get_response_template,
)

from lex_hf.errors import plain
from lex_hf.inference.serving.answers import Answer
from lex_hf.inference.serving.engine import Engine
from lex_hf.inference.serving.fields import Query, check_template, read_query
from lex_hf.inference.serving.limits import RefusedError


class BatchHandler(BaseHandler):
    """Answers requests from the batch; what they look like is transformers' own handlers' business.

    Args:
        model_id: Name of the model.
        engine: The batch.
        template: Variables of the chat template where a request does not say otherwise.
    """

    _is_chat = False

    def __init__(self, model_id: str, engine: Engine, template: Mapping[str, Any] | None = None) -> None:
        super().__init__(None, None, dict(template or {}))
        self.model_id, self.engine = model_id, engine

    async def handle_request(self, body: dict[str, Any], request_id: str) -> StreamingResponse | JSONResponse:
        """Answer a request.

        Args:
            body: Its JSON.
            request_id: Its name for the client, which need not be unique.

        Raises:
            RefusedError: If it is malformed, asks for what is not done, or fails.
        """
        query, answer = await self.engine.answer(lambda: self._read(body), self._parser)
        if query.is_streamed:
            return StreamingResponse(self._events(request_id, query, answer), media_type="text/event-stream")
        items = [item async for items in answer.pieces() for item in items]
        return JSONResponse(self._whole(request_id, items, answer, _usage(answer)))

    def _read(self, body: dict[str, Any]) -> tuple[Query, list[int]]:
        check_model(body.get("model"), self.model_id)
        query = read_query(body, self._is_chat, self.engine.limits)
        ids = self._encode(query)
        most = self.engine.limits.max_prompt_tokens
        if not ids:
            raise RefusedError(400, "The prompt is empty: give at least one character.")
        if len(ids) > most:
            message = f"The prompt has {len(ids):,} tokens, and {most:,} are allowed: shorten it."
            raise RefusedError(400, message, "context_length_exceeded")
        return query, ids

    async def _events(self, request_id: str, query: Query, answer: Answer) -> AsyncIterator[str]:
        """Yield an answer while it is written."""
        try:
            for chunk in self._first(request_id):
                yield chunk
            calls = 0
            async for items in answer.pieces():
                chunks = []
                for item in items:
                    chunks.append(self._piece(request_id, item, calls))
                    calls += isinstance(item, ToolCall)
                yield "".join(chunks)
            usage = _usage(answer)
            yield self._last(request_id, answer.finish_reason, None if query.has_usage_apart else usage)
            if query.has_usage_apart:
                yield self._numbers(request_id, usage)
            yield "data: [DONE]\n\n"
        except RefusedError as refusal:  # the status was sent long ago
            yield f"data: {json.dumps(refusal.body())}\n\n"

    def _parser(self, query: Query, ids: list[int]) -> Any:
        """Return what tells thoughts and calls of tools from text, or `None`."""
        return None

    def _first(self, request_id: str) -> list[str]:
        """Return what a stream begins with."""
        return []

    @abstractmethod
    def _encode(self, query: Query) -> list[int]:
        """Return the ids of a prompt."""

    @abstractmethod
    def _whole(self, request_id: str, items: list[Any], answer: Answer, usage: CompletionUsage) -> dict[str, Any]:
        """Return an answer that is sent at once."""

    @abstractmethod
    def _piece(self, request_id: str, item: Any, place: int) -> str:
        """Return a piece of a stream; `place` is the number of calls of tools before it."""

    @abstractmethod
    def _last(self, request_id: str, reason: str | None, usage: CompletionUsage | None) -> str:
        """Return the piece that says why a stream ends."""

    def _numbers(self, request_id: str, usage: CompletionUsage) -> str:
        """Return the piece that has nothing but the numbers of tokens."""
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = {"id": request_id, "object": name, "created": int(time.time()), "model": self.model_id, "choices": []}
        return f"data: {json.dumps({**chunk, 'usage': usage.model_dump(exclude_none=True)})}\n\n"


class Completions(BatchHandler, CompletionHandler):
    """`/v1/completions`: a text is continued."""

    def _encode(self, query: Query) -> list[int]:
        prompt: Any = query.prompt
        return list(self.engine.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)

    def _whole(self, request_id: str, items: list[Any], answer: Answer, usage: CompletionUsage) -> dict[str, Any]:
        choice = {"text": "".join(items), "index": 0, "logprobs": None, "finish_reason": answer.finish_reason}
        completion = Completion(
            id=request_id,
            created=int(time.time()),
            model=self.model_id,
            choices=[choice],
            object="text_completion",
            usage=usage,
        )
        return completion.model_dump(exclude_none=True)

    def _piece(self, request_id: str, item: Any, place: int) -> str:
        return self._build_chunk_sse(request_id, self.model_id, text=item)

    def _last(self, request_id: str, reason: str | None, usage: CompletionUsage | None) -> str:
        return self._build_chunk_sse(request_id, self.model_id, finish_reason=reason, usage=usage)


class Chat(BatchHandler, ChatCompletionHandler):
    """`/v1/chat/completions`: messages are answered."""

    _is_chat = True

    def _encode(self, query: Query) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer.chat_template is None:
            raise RefusedError(
                400,
                f"The tokenizer of {self.model_id} has no chat template, so messages cannot be made a prompt: use "
                "/v1/completions, or save a chat_template.jinja with the model.",
            )
        check_template(query.template, inspect.signature(tokenizer.apply_chat_template).parameters)
        self._check_tools(query)
        try:
            inputs = tokenizer.apply_chat_template(
                query.prompt,
                tools=query.tools,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self.chat_template_kwargs | query.template,
            )
        except Exception as error:  # templates run into anything with messages that they do not expect
            raise RefusedError(400, f"The chat template of the model does not take this: {plain(error)}") from error
        return list(inputs["input_ids"])

    def _check_tools(self, query: Query) -> None:
        """Refuse tools of which the model would not hear, or whose calls would remain text."""
        messages = query.prompt
        has_calls = any("tool_calls" in message for message in messages if isinstance(message, dict))
        template = str(self.engine.tokenizer.chat_template)
        is_known = get_response_template(self.engine.tokenizer, self.engine.manager.model) is not None
        if (query.tools and not (is_known and "tools" in template)) or (has_calls and "tool_calls" not in template):
            raise RefusedError(400, "tools: the chat template of this model has no tools. Leave them out.")

    def _parser(self, query: Query, ids: list[int]) -> Any:
        return build_response_parser(self.engine.tokenizer, self.engine.manager.model, ids, tools=query.tools)

    def _first(self, request_id: str) -> list[str]:
        return [self._build_chunk_sse(request_id, role="assistant", model=self.model_id)]

    def _whole(self, request_id: str, items: list[Any], answer: Answer, usage: CompletionUsage) -> dict[str, Any]:
        calls = [item for item in items if isinstance(item, ToolCall)]
        thoughts = "".join(item for item in items if isinstance(item, ReasoningText))
        return self._build_completion(
            request_id,
            "".join(item for item in items if isinstance(item, str) and not isinstance(item, ReasoningText)),
            self.model_id,
            finish_reason=answer.finish_reason,
            usage=usage,
            tool_calls=[_call(request_id, call, place) for place, call in enumerate(calls)] or None,
            reasoning_content=thoughts or None,
        )

    def _piece(self, request_id: str, item: Any, place: int) -> str:
        if isinstance(item, ToolCall):
            calls = [{"index": place, **_call(request_id, item, place)}]
            return self._build_chunk_sse(request_id, model=self.model_id, tool_calls=calls)
        field = "reasoning_content" if isinstance(item, ReasoningText) else "content"
        return self._build_chunk_sse(request_id, model=self.model_id, **{field: item})

    def _last(self, request_id: str, reason: str | None, usage: CompletionUsage | None) -> str:
        return self._build_chunk_sse(request_id, finish_reason=reason, model=self.model_id, usage=usage)


def check_model(asked: Any, model_id: str) -> None:
    """Refuse a request for another model.

    Args:
        asked: The model that a request names; `None` for the one there is.
        model_id: Name of the model that is served.

    Raises:
        RefusedError: If it is another one.
    """
    if asked is not None and not isinstance(asked, str):
        raise RefusedError(400, "model must be the name of a model.")
    if asked not in (None, model_id, f"{model_id}@main"):
        raise RefusedError(
            404, f"There is no model {asked!a:.200} here: this server has {model_id}.", "model_not_found"
        )


def _usage(answer: Answer) -> CompletionUsage:
    prompt, new = answer.prompt_tokens, answer.tokens
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new)


def _call(request_id: str, call: ToolCall, place: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"{request_id}_tool_call_{place}", "type": "function", "function": function}

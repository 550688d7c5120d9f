"""The fields of a request: each is honoured, without effect whatever it says, or refused."""

import json
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from lex_hf.inference.serving.limits import RefusedError, ServingLimits

LARGEST_SEED = 2**63 - 1
DEFAULT_NEW_TOKENS = 1024  # as transformers' server has it, where neither the request nor the model says anything
COOLEST = 0.0001  # lower temperatures leave float32
MOST_STOPS, LONGEST_STOP = 4, 256  # the number is OpenAI's
_MOST_BIASED, _MOST_ENDS = 1024, 16

# What no answer depends on.
_LABELS = {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
# What is not done, with the values that do not ask for it.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
_HONOURED = {
    "frequency_penalty",
    "generation_config",
    "logit_bias",
    "max_tokens",
    "model",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
}
_OF_MESSAGES = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}
_OF_CHAT = {"chat_template_kwargs", "max_completion_tokens", "messages", "tool_choice", "tools"}
KNOWN = _HONOURED | _OF_CHAT | _LABELS | set(_REFUSED)
# Of a GenerationConfig, which `transformers chat` sends: its numbers with least and most, and what changes nothing.
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (COOLEST, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0.01, 1),
    "epsilon_cutoff": (0, 0.99),
    "eta_cutoff": (0, 0.99),
    "repetition_penalty": (0.01, 100),
}
_WITHOUT_EFFECT = {"_from_model_config", "bos_token_id", "pad_token_id", "transformers_version", "use_cache"}


@dataclass
class Query:
    """What a request asks for.

    Attributes:
        prompt: A text, ids of tokens, or messages.
        is_streamed: Whether the answer is sent while it is written.
        has_usage_apart: Whether a stream ends with a piece that has nothing but the numbers of tokens.
        changes: Fields of `GenerationConfig` in which it differs from the model's.
        seed: Seed of sampling.
        stops: Strings that end the text.
        frequency_penalty: What each occurrence of a token in the answer takes from its score.
        presence_penalty: What the first one takes.
        template: Variables of the chat template.
        tools: Tools that the answer may call.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    is_streamed: bool
    has_usage_apart: bool
    changes: dict[str, Any]
    seed: int | None
    stops: tuple[str, ...]
    frequency_penalty: float
    presence_penalty: float
    template: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None


def read_query(body: Mapping[str, Any], is_chat: bool, limits: ServingLimits) -> Query:
    """Read the body of a request.

    Args:
        body: The JSON of the request.
        is_chat: Whether it is for chat, and not for a completion.
        limits: Limits of the server.

    Raises:
        RefusedError: If it is malformed, or asks for what is not done.
    """
    _check_text(body)
    _check_names(body, is_chat)
    fields = {name: value for name, value in body.items() if value is not None}
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise _refusal("tool_choice", choice, "'auto' or 'none'")
    tools = _typed(fields, "tools", list, "a list of tools") or None
    options = _typed(fields, "stream_options", dict, "an object") or {}
    return Query(
        prompt=_messages(fields) if is_chat else _prompt(fields),
        is_streamed=bool(_typed(fields, "stream", bool, "true or false")),
        has_usage_apart=options.get("include_usage") is True,
        changes=_changes(fields, limits),
        seed=_integer(fields, "seed", 0, LARGEST_SEED),
        stops=_stops(fields),
        frequency_penalty=_number(fields, "frequency_penalty", -2, 2) or 0.0,
        presence_penalty=_number(fields, "presence_penalty", -2, 2) or 0.0,
        template=_typed(fields, "chat_template_kwargs", dict, "an object") or {},
        tools=tools if choice == "auto" else None,
    )


def _check_text(body: Mapping[str, Any]) -> None:
    """Refuse what JSON allows, or Python reads as JSON, and nothing can be done with."""
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise RefusedError(
            400, f"The body holds a lone surrogate, {error.object[error.start]!a}, which is no text: send UTF-8."
        ) from None
    except (ValueError, RecursionError):
        raise RefusedError(400, "The body holds NaN or an infinite number, or is nested too deeply.") from None


def _check_names(body: Mapping[str, Any], is_chat: bool) -> None:
    known = _HONOURED | (_OF_CHAT if is_chat else {"prompt"})
    unknown = sorted(set(body) - known - _LABELS - set(_REFUSED))
    if unknown:
        raise RefusedError(
            400, f"There is no field {_short(unknown[0])}. Fields are: {', '.join(sorted(known | _LABELS))}."
        )
    for name, harmless in _REFUSED.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in harmless):
            raise RefusedError(400, f"{name} = {_short(value)}: this server does not do that. Leave {name} out.")


def _changes(fields: Mapping[str, Any], limits: ServingLimits) -> dict[str, Any]:
    """Return the fields of `GenerationConfig` that a request asks for."""
    changes = _generation_config(fields, limits)
    temperature = _number(fields, "temperature", 0, 2)
    top_p = _number(fields, "top_p", 0, 1)
    if temperature is not None and 0 < temperature < COOLEST:
        raise _refusal("temperature", temperature, f"0, which takes the most probable token, or {COOLEST} to 2")
    if temperature:
        changes["temperature"] = temperature
    if top_p is not None:
        changes["top_p"] = top_p
    if temperature is not None or top_p is not None:
        changes["do_sample"] = temperature != 0
    for name in ("max_tokens", "max_completion_tokens"):  # the second is the newer one
        most = _integer(fields, name, 1, limits.max_new_tokens)
        if most is not None:
            changes["max_new_tokens"] = most
    bias = _typed(fields, "logit_bias", dict, "an object of token ids and numbers")
    if bias:
        changes["sequence_bias"] = _bias(bias)
    return changes


def _bias(bias: Mapping[str, Any]) -> list[list[Any]]:
    if len(bias) > _MOST_BIASED:
        raise RefusedError(400, f"logit_bias has {len(bias)} entries: at most {_MOST_BIASED} are allowed.")
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise _refusal("logit_bias", token, "an object whose names are ids of tokens")
    return [[[int(token)], _number(bias, token, -100, 100)] for token in bias if bias[token] is not None]


def _generation_config(fields: Mapping[str, Any], limits: ServingLimits) -> dict[str, Any]:
    """Read the GenerationConfig that `transformers chat` sends as a text of JSON."""
    text = _typed(fields, "generation_config", str, "a text of JSON")
    try:
        config = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise _refusal("generation_config", text, "an object of JSON as a text")
    changes: dict[str, Any] = {}
    given = {name: value for name, value in config.items() if value is not None and name not in _WITHOUT_EFFECT}
    for name in given:
        if name in NUMBERS:
            changes[name] = _number(given, name, *NUMBERS[name])
        elif name == "do_sample":
            changes[name] = _typed(given, name, bool, "true or false")
        elif name in ("top_k", "max_new_tokens", "min_new_tokens"):
            most = 2**31 if name == "top_k" else limits.max_new_tokens
            changes[name] = _integer(given, name, int(name == "max_new_tokens"), most)
        elif name == "eos_token_id":
            changes[name] = _ids(given[name], name, _MOST_ENDS)
        else:
            known = sorted({*NUMBERS, "do_sample", "eos_token_id", "max_new_tokens", "min_new_tokens", "top_k"})
            raise RefusedError(
                400, f"generation_config: {_short(name)} is not used here. What is used: {', '.join(known)}."
            )
    return changes


def _ids(value: Any, name: str, most: int) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    if not 0 < len(ids) <= most or not all(type(each) is int and 0 <= each < 2**31 for each in ids):
        raise _refusal(name, value, f"one to {most:,} ids of tokens")
    return ids


def _prompt(fields: Mapping[str, Any]) -> str | list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]  # as LangChain sends it
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        return _ids(prompt, "prompt", len(prompt))
    if not isinstance(prompt, str):
        raise _refusal("prompt", prompt, "a text, or a list of token ids; send several prompts as several requests")
    if not prompt:
        raise RefusedError(400, "The prompt is empty: give at least one character.")
    return prompt


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refusal("messages", messages, 'a list of messages, e.g. [{"role": "user", "content": "Hello"}]')
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: Any) -> dict[str, Any]:
    """Check a message, and return it with its content as one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _refusal(name, message, 'an object like {"role": "user", "content": "Hello"}')
    given = {key: value for key, value in message.items() if value is not None and value != []}  # lists: annotations
    if unknown := sorted(
        given.keys() - {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}
    ):
        raise RefusedError(400, f"{name}: this server does not use {_short(unknown[0])}. Leave it out.")
    content = given.setdefault("content", "" if "tool_calls" in given else None)
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise _refusal(
                    f"{name}.content", part, 'text, {"type": "text", "text": "…"}: this model reads no other'
                )
        content = " ".join(part["text"] for part in content)  # as transformers' server joins them
    if not isinstance(content, str):
        raise _refusal(f"{name}.content", content, "a text")
    for key in ("name", "reasoning_content", "tool_call_id"):
        _typed(given, key, str, "a text")
    if "tool_calls" in given:
        given["tool_calls"] = _calls(f"{name}.tool_calls", given["tool_calls"])
    return {**given, "content": content}


def _calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Return calls of tools with their arguments as templates take them: as objects."""
    try:
        functions = [dict(each["function"]) for each in calls]
        for function in functions:
            if not isinstance(function["name"], str):
                raise TypeError
            if isinstance(function["arguments"], str):
                function["arguments"] = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        allowed = 'a list like [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]'
        raise _refusal(name, calls, allowed) from None
    return [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    stop = fields.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(each, str) and 0 < len(each) <= LONGEST_STOP for each in stops)
    ):
        raise _refusal("stop", stop, f"at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters")
    return tuple(stops)


def _typed(fields: Mapping[str, Any], name: str, kind: type, allowed: str) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise _refusal(name, value, allowed)
    return value


def _number(fields: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _refusal(name, value, f"a number from {least} to {most}")
    return float(value)


def _integer(fields: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise _refusal(name, value, f"a whole number from {least} to {most}")
    return value


def _refusal(name: str, value: Any, allowed: str) -> RefusedError:
    return RefusedError(400, f"{name} = {_short(value)}: it must be {allowed}.")


def _short(value: Any) -> str:
    return reprlib.repr(value)


def check_template(names: Collection[str], taken: Collection[str]) -> None:
    """Refuse variables of a chat template that would be arguments of the function that fills it in.

    Args:
        names: Names of the variables.
        taken: Names of the arguments.

    Raises:
        RefusedError: If there is one.
    """
    if found := sorted(set(names) & set(taken)):
        raise RefusedError(400, f"chat_template_kwargs: {found[0]} is no variable of the template. Leave it out.")

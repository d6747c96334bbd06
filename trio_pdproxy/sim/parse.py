"""From a request body to the work it asks for, or to the error body vLLM answers.

The order of the checks is the API server's: content type, JSON, types, model, then the values. Every error
here comes before any work, also for a stream, and leaves no block held.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from trio_pdproxy.sim import render
from trio_pdproxy.sim.model import Prompt, chat_prompt, ids_prompt, text_prompt
from trio_pdproxy.sim.settings import SimSettings

Kind = Literal["completions", "chat", "responses", "messages"]

KINDS: dict[str, Kind] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}

_PROMPT_FIELD: dict[Kind, str] = {
    "completions": "prompt",
    "chat": "messages",
    "responses": "input",
    "messages": "messages",
}

_JSON_TYPES: dict[str, tuple[tuple[type, ...], str, str]] = {
    "model": ((str,), "string_type", "Input should be a valid string"),
    "stream": ((bool,), "bool_type", "Input should be a valid boolean"),
    "max_tokens": ((int,), "int_type", "Input should be a valid integer"),
    "max_output_tokens": ((int,), "int_type", "Input should be a valid integer"),
    "input": ((str, list), "string_type", "Input should be a valid string"),
    "max_completion_tokens": ((int,), "int_type", "Input should be a valid integer"),
    "min_tokens": ((int,), "int_type", "Input should be a valid integer"),
    "n": ((int,), "int_type", "Input should be a valid integer"),
    "temperature": ((int, float), "float_type", "Input should be a valid number"),
    "messages": ((list,), "list_type", "Input should be a valid list"),
    "prompt": ((str, list), "string_type", "Input should be a valid string"),
    "tokens": ((list,), "list_type", "Input should be a valid list"),
    "stream_options": ((dict,), "model_attributes_type", "Input should be a valid dictionary"),
    "kv_transfer_params": ((dict,), "dict_type", "Input should be a valid dictionary"),
}


class Refusal(Exception):
    """The request is answered with this error and nothing else happens."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.kind = kind
        self.body = render.error(message, kind, param, status)


@dataclass(frozen=True, slots=True)
class Work:
    """A valid request. `transfer` is None where the engine would not use the params it was given."""

    kind: Kind
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int
    """Already cut to what the context leaves for the longest prompt."""
    stream: bool
    include_usage: bool
    transfer: dict[str, Any] | None
    recomputes: bool
    """D: computes the prompt itself, although it was given a transfer."""
    keeps_blocks: bool
    """A prefill leg: P keeps its blocks for D, whether or not D will use them."""
    request_id: str | None
    """The body's own `request_id`, used where the header is not."""


def parse(raw: bytes, content_type: str, *, kind: Kind, settings: SimSettings) -> Work:
    """Raises Refusal with vLLM's status and body."""
    body = _decode(raw, content_type)
    needed = _PROMPT_FIELD[kind]
    _check_types(body, needed)
    _check_model(body, settings)
    if kind == "responses":
        _check_store(body)
    prompts = _prompts(body[needed]) if kind == "completions" else (_conversation(body, needed),)
    stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options is not None and not stream:
        text = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
        raise _bad(text, "stream_options")
    max_tokens = _max_tokens(body, prompts, settings, kind)
    n = 1 if kind not in ("completions", "chat") or body.get("n") is None else int(body["n"])
    if n < 1:
        raise _bad(f"n must be at least 1, got {n}.")
    if n > settings.max_n:
        more = "To increase this limit, set the VLLM_MAX_N_SEQUENCES environment variable."
        raise _bad(f"n must be at most {settings.max_n}, got {n}. {more}")
    if n > 1 and body.get("temperature") == 0:
        raise _bad(f"n must be 1 when using greedy sampling, got {n}.")
    params = body.get("kv_transfer_params")
    prefill = bool(params and params.get("do_remote_decode"))
    # The engine recomputes a prompt whose own logprobs are asked for, and beam search knows no transfer.
    beam = bool(body.get("use_beam_search"))
    recomputes = body.get("prompt_logprobs") is not None or bool(body.get("echo") and body.get("logprobs"))
    return Work(
        kind=kind,
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        transfer=params if params and not beam else None,
        recomputes=recomputes and not prefill,
        keeps_blocks=prefill and not beam,
        request_id=body["request_id"] if isinstance(body.get("request_id"), str) else None,
    )


def parse_count(raw: bytes, content_type: str, *, settings: SimSettings) -> Prompt:
    """The prompt of a request that only wants it counted (/tokenize, count_tokens). Raises Refusal."""
    body = _decode(raw, content_type)
    needed = "prompt" if "prompt" in body else "messages"
    _check_types(body, needed)
    _check_model(body, settings)
    return _prompts(body["prompt"])[0] if needed == "prompt" else _conversation(body, needed)


def parse_ids(raw: bytes, content_type: str, *, settings: SimSettings) -> list[int]:
    """The token ids of /detokenize. Raises Refusal."""
    body = _decode(raw, content_type)
    _check_types(body, "tokens")
    _check_model(body, settings)
    tokens = body["tokens"]
    if tokens and not _is_ids(tokens):
        raise _schema("int_type", "body.tokens.0", "Input should be a valid integer", tokens[0])
    return list(tokens)


def _check_model(body: dict[str, Any], settings: SimSettings) -> None:
    model = body.get("model")
    if model is not None and model != settings.model:
        text = f"The model `{model}` does not exist. Valid aliases: {settings.model}."
        raise Refusal(404, text, "NotFoundError", "model")


def _check_store(body: dict[str, Any]) -> None:
    """Without VLLM_ENABLE_RESPONSES_API_STORE nothing is kept."""
    if body.get("background"):
        text = "This vLLM engine does not support `store=True` and therefore does not support the background mode."
        raise Refusal(400, text, "invalid_request_error", "background")
    if (previous := body.get("previous_response_id")) is not None:
        raise Refusal(404, f"Response with id '{previous}' not found.", "invalid_request_error", "response_id")


def _decode(raw: bytes, content_type: str) -> dict[str, Any]:
    if content_type.partition(";")[0].strip().lower() != "application/json":
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refusal(400, text, "Bad Request")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _schema("json_invalid", "body.1", "JSON decode error", {}) from None
    if not isinstance(body, dict):
        raise _schema("model_attributes_type", "body", "Input should be a valid dictionary", body)
    return body


def _check_types(body: dict[str, Any], needed: str) -> None:
    if needed not in body:
        raise _schema("missing", f"body.{needed}", "Field required", body)
    for name, (types, kind, text) in _JSON_TYPES.items():
        value = body.get(name)
        if value is None and name != needed:
            continue
        # bool is an int to Python, but not in a request.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _schema(kind, f"body.{name}", text, value)


def _conversation(body: dict[str, Any], needed: str) -> Prompt:
    messages = body[needed]
    if isinstance(messages, str):  # only /v1/responses takes one
        messages = [{"role": "user", "content": messages}]
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _schema("dict_type", f"body.{needed}.{index}", "Input should be a valid dictionary", message)
    system = body.get("system") or body.get("instructions")
    if needed != "prompt" and system:
        messages = [{"role": "system", "content": system}, *messages]
    return chat_prompt(messages)


def _prompts(prompt: str | list[Any]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (text_prompt(prompt),)
    if prompt and all(isinstance(item, str) for item in prompt):
        return tuple(text_prompt(item) for item in prompt)
    if prompt and _is_ids(prompt):
        return (ids_prompt(prompt),)
    if prompt and all(_is_ids(item) for item in prompt):
        return tuple(ids_prompt(item) for item in prompt)
    raise _schema("string_type", "body.prompt", "Input should be a valid string", prompt)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _max_tokens(body: dict[str, Any], prompts: tuple[Prompt, ...], settings: SimSettings, kind: Kind) -> int:
    longest = max(prompt.tokens for prompt in prompts)
    if longest > settings.max_model_len:
        text = (
            f"This model's maximum context length is {settings.max_model_len} tokens. However, your prompt "
            f"contains {longest} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise _bad(text, "input_tokens")
    asked = body.get("max_output_tokens" if kind == "responses" else "max_tokens")
    if kind == "chat" and body.get("max_completion_tokens") is not None:
        asked = body["max_completion_tokens"]
    if asked is None:
        asked = settings.default_max_tokens
    allowed: int = min(asked, settings.max_model_len - longest)
    if allowed < 1:
        raise _bad(f"max_tokens must be at least 1, got {allowed}.", "max_tokens")
    least = body.get("min_tokens") or 0
    if least > allowed:
        raise _bad(f"min_tokens must be less than or equal to max_tokens={allowed}, got {least}.")
    return allowed


def _bad(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, message, "BadRequestError", param)


def _schema(kind: str, where: str, text: str, value: object) -> Refusal:
    """The body of a request that failed its schema: the message is a Python dict's repr, sizes bounded."""
    if isinstance(value, list | dict):
        value = f"<{type(value).__name__} of {len(value)} items>" if value else value
    detail = {"type": kind, "loc": where, "msg": text, "input": value}
    message = f"1 validation error:\n  {''.join(itertools.islice(str(detail), 1000))}"
    return Refusal(400, message, "Bad Request", where)

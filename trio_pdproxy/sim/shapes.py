"""How each endpoint says the same things: the answers of /v1/responses and /v1/messages, and the choice among all."""

from __future__ import annotations

from typing import Any, Protocol

from trio_pdproxy.sim.parse import Kind
from trio_pdproxy.sim.render import CompletionShape, Counts, encode


class Shape(Protocol):
    """Writes the answers to one request."""

    def early(self) -> list[bytes]: ...
    def opening(self) -> list[bytes]: ...
    def token(self, choice: int, token: str, *, last: bool) -> bytes: ...
    def closing(self, counts: Counts, *, include_usage: bool) -> list[bytes]: ...
    def failure(self, message: str, *, opened: bool) -> list[bytes] | None: ...
    def failure_body(self, message: str) -> bytes: ...
    def whole(self, texts: list[str], counts: Counts, transfer: object) -> bytes: ...


def shape_for(kind: Kind, *, response_id: str, model: str, created: int, choices: int, prompt_tokens: int) -> Shape:
    if kind == "responses":
        return ResponsesShape(response_id, model, created)
    if kind == "messages":
        return MessagesShape(response_id, model, prompt_tokens)
    return CompletionShape(chat=kind == "chat", response_id=response_id, model=model, created=created, choices=choices)


class ResponsesShape:
    """/v1/responses: speaks before there is any KV, numbers its events, has no [DONE], and is cut when it fails."""

    def __init__(self, response_id: str, model: str, created: int) -> None:
        self._item = "msg_" + response_id.removeprefix("resp_")
        self._response = {"id": response_id, "created_at": created, "model": model, "object": "response"}
        self._sequence = 0
        self._text = ""

    def early(self) -> list[bytes]:
        response = {
            **self._response,
            "output": [],
            "status": "in_progress",
            "usage": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def opening(self) -> list[bytes]:
        item = {"id": self._item, "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return [
            self._event("response.output_item.added", item=item, output_index=0),
            self._event("response.content_part.added", **self._place(), part=part),
        ]

    def token(self, choice: int, token: str, *, last: bool) -> bytes:
        self._text += token
        return self._event("response.output_text.delta", **self._place(), delta=token, logprobs=[])

    def closing(self, counts: Counts, *, include_usage: bool) -> list[bytes]:
        response = self._complete(self._text, counts, None)
        (item,) = response["output"]
        (part,) = item["content"]
        return [
            self._event("response.output_text.done", **self._place(), logprobs=[], text=self._text),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", item=item, output_index=0),
            self._event("response.completed", response=response),
            b"\n",
        ]

    def failure(self, message: str, *, opened: bool) -> list[bytes] | None:
        return None

    def failure_body(self, message: str) -> bytes:
        return encode(_error(message))

    def whole(self, texts: list[str], counts: Counts, transfer: object) -> bytes:
        return encode(self._complete(texts[0], counts, transfer))

    def _complete(self, text: str, counts: Counts, transfer: object) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"annotations": [], "text": text, "type": "output_text", "logprobs": None}]
        item = {"id": self._item, "content": content, "role": "assistant", "status": "completed", "type": "message"}
        usage = {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached or 0, "cached_tokens_per_turn": []},
            "output_tokens": counts.completion,
            "total_tokens": counts.prompt + counts.completion,
        }
        return {
            **self._response,
            # Every simulated answer ends at its last allowed token.
            "incomplete_details": {"reason": "max_output_tokens"},
            "output": [item],
            "status": "incomplete",
            "usage": usage,
            "kv_transfer_params": transfer,
            "ec_transfer_params": None,
        }

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item, "output_index": 0}

    def _event(self, kind: str, **more: object) -> bytes:
        data = {**more, "sequence_number": self._sequence, "type": kind}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(data))


class MessagesShape:
    """/v1/messages: named events, no [DONE], errors in a shape of their own."""

    def __init__(self, response_id: str, model: str, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._message: dict[str, Any] = {
            "id": response_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": model,
        }

    def early(self) -> list[bytes]:
        return []

    def opening(self) -> list[bytes]:
        return [self._start(), _named("content_block_start", content_block={"type": "text", "text": ""}, index=0)]

    def _start(self) -> bytes:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        more = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        return _named("message_start", message=self._message | more)

    def token(self, choice: int, token: str, *, last: bool) -> bytes:
        return _named("content_block_delta", delta={"type": "text_delta", "text": token}, index=choice)

    def closing(self, counts: Counts, *, include_usage: bool) -> list[bytes]:
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        return [
            _named("content_block_stop", index=0),
            _named("message_delta", delta=delta, usage=self._usage(counts)),
            _named("message_stop"),
        ]

    def failure(self, message: str, *, opened: bool) -> list[bytes] | None:
        error = _named("error", error={"type": "internal_error", "message": message})
        return [error] if opened else [self._start(), error]

    def failure_body(self, message: str) -> bytes:
        return messages_error(message, "InternalServerError")

    def whole(self, texts: list[str], counts: Counts, transfer: object) -> bytes:
        said = {"content": [{"type": "text", "text": texts[0]}], "stop_reason": "max_tokens"}
        params = {} if transfer is None else {"kv_transfer_params": transfer}  # this API leaves out what is null
        return encode({**self._message, **said, "usage": self._usage(counts), **params})

    @staticmethod
    def _usage(counts: Counts) -> dict[str, int]:
        if counts.cached is None:
            return {"input_tokens": counts.prompt, "output_tokens": counts.completion}
        return {
            "input_tokens": counts.prompt - counts.cached,
            "output_tokens": counts.completion,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached,
        }


def messages_error(message: str, kind: str) -> bytes:
    """An error body as /v1/messages writes it."""
    return encode({"type": "error", "error": {"type": kind, "message": message}})


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


def _named(kind: str, **more: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **more}))

"""How each endpoint says the same things: the answers of /v1/responses and /v1/messages, and the choice among all."""

from __future__ import annotations

from typing import Any, Protocol

from trio_pdproxy.sim.parse import Kind
from trio_pdproxy.sim.render import CompletionShape, encode


class Shape(Protocol):
    """Writes the answers to one request; `counts` are prompt and completion tokens."""

    def early(self) -> list[bytes]: ...
    def opening(self) -> list[bytes]: ...
    def token(self, choice: int, token: str, *, last: bool) -> bytes: ...
    def closing(self, counts: tuple[int, int], *, include_usage: bool) -> list[bytes]: ...
    def failure(self, message: str) -> list[bytes] | None: ...
    def failure_body(self, message: str) -> bytes: ...
    def whole(self, texts: list[str], counts: tuple[int, int], transfer: object) -> bytes: ...


def shape_for(kind: Kind, *, response_id: str, model: str, created: int, choices: int) -> Shape:
    if kind == "responses":
        return ResponsesShape(response_id, model, created)
    if kind == "messages":
        return MessagesShape(response_id, model)
    return CompletionShape(chat=kind == "chat", response_id=response_id, model=model, created=created, choices=choices)


class ResponsesShape:
    """/v1/responses: speaks before there is any KV, has no [DONE], and is cut when it fails."""

    def __init__(self, response_id: str, model: str, created: int) -> None:
        self._item = "msg_" + response_id
        self._response = {"id": response_id, "created_at": created, "model": model, "object": "response"}
        self._sequence = 0
        self._text = ""

    def early(self) -> list[bytes]:
        response = {**self._response, "output": [], "status": "in_progress", "usage": None}
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def opening(self) -> list[bytes]:
        item = {"id": self._item, "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
        return [self._event("response.output_item.added", output_index=0, item=item)]

    def token(self, choice: int, token: str, *, last: bool) -> bytes:
        self._text += token
        place = {"item_id": self._item, "output_index": choice, "content_index": 0}
        return self._event("response.output_text.delta", **place, delta=token, logprobs=[])

    def closing(self, counts: tuple[int, int], *, include_usage: bool) -> list[bytes]:
        response = self._complete(self._text, counts, None)
        return [
            self._event("response.output_item.done", output_index=0, item=response["output"][0]),
            self._event("response.completed", response=response),
        ]

    def failure(self, message: str) -> list[bytes] | None:
        return None

    def failure_body(self, message: str) -> bytes:
        return encode(_error(message))

    def whole(self, texts: list[str], counts: tuple[int, int], transfer: object) -> bytes:
        return encode(self._complete(texts[0], counts, transfer))

    def _complete(self, text: str, counts: tuple[int, int], transfer: object) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"annotations": [], "text": text, "type": "output_text", "logprobs": None}]
        item = {
            "id": self._item,
            "content": content,
            "role": "assistant",
            "status": "completed",
            "type": "message",
        }
        usage = {"input_tokens": counts[0], "output_tokens": counts[1], "total_tokens": sum(counts)}
        return {
            **self._response,
            "output": [item],
            "status": "completed",
            "usage": usage,
            "kv_transfer_params": transfer,
        }

    def _event(self, kind: str, **more: object) -> bytes:
        data = {**more, "sequence_number": self._sequence, "type": kind}
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(data))


class MessagesShape:
    """/v1/messages: named events, no [DONE], errors in a shape of their own."""

    def __init__(self, response_id: str, model: str) -> None:
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
        message = {**self._message, "usage": {"input_tokens": 0, "output_tokens": 0}}
        block = {"type": "text", "text": ""}
        return [
            _named("message_start", message=message),
            _named("content_block_start", index=0, content_block=block),
        ]

    def token(self, choice: int, token: str, *, last: bool) -> bytes:
        return _named("content_block_delta", index=choice, delta={"type": "text_delta", "text": token})

    def closing(self, counts: tuple[int, int], *, include_usage: bool) -> list[bytes]:
        usage = {"input_tokens": counts[0], "output_tokens": counts[1]}
        return [
            _named("content_block_stop", index=0),
            _named("message_delta", delta={"stop_reason": "max_tokens"}, usage=usage),
            _named("message_stop"),
        ]

    def failure(self, message: str) -> list[bytes] | None:
        return [_named("error", error={"type": "internal_error", "message": message})]

    def failure_body(self, message: str) -> bytes:
        return messages_error(message, "InternalServerError")

    def whole(self, texts: list[str], counts: tuple[int, int], transfer: object) -> bytes:
        usage = {"input_tokens": counts[0], "output_tokens": counts[1]}
        said = {"content": [{"type": "text", "text": texts[0]}], "stop_reason": "max_tokens", "usage": usage}
        return encode({**self._message, **said, "kv_transfer_params": transfer})


def messages_error(message: str, kind: str) -> bytes:
    """An error body as /v1/messages writes it."""
    return encode({"type": "error", "error": {"type": kind, "message": message}})


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}


def _named(kind: str, **more: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **more}))

"""The bytes of vLLM's answers (0.32): error bodies, whole answers, and the events of a stream."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
INTERNAL = "Internal server error"
ENGINE_DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def error(message: str, kind: str, param: str | None, code: int) -> bytes:
    """An error body as the API server writes it."""
    return encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_frame(message: str, kind: str = "InternalServerError", code: int = 500) -> bytes:
    """An error inside a stream: the one place where vLLM's JSON has spaces. [DONE] follows it."""
    told = (encode(message), encode(kind), code)
    return b'data: {"error": {"message": %b, "type": %b, "param": null, "code": %d}}\n\n' % told


INTERNAL_ERROR = error(INTERNAL, "InternalServerError", None, 500)


class Counts(NamedTuple):
    """Tokens of a request. `cached` is None where the engine does not tell."""

    prompt: int
    completion: int
    cached: int | None = None


def usage(counts: Counts, *, whole: bool) -> dict[str, Any]:
    """As completions and chat tell it: with nulls in a whole answer, without in a stream."""
    told: dict[str, Any] = {
        "prompt_tokens": counts.prompt,
        "total_tokens": counts.prompt + counts.completion,
        "completion_tokens": counts.completion,
    }
    if counts.cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": counts.cached}
        if whole:
            told["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": None}
    elif whole:
        told["prompt_tokens_details"] = None
    if whole:
        told["completion_tokens_details"] = None
    return told


class CompletionShape:
    """Completions and chat. Everything but the token is written once, for all events."""

    def __init__(self, *, chat: bool, response_id: str, model: str, created: int, choices: int) -> None:
        self.chat = chat
        self.id = response_id
        self._common: dict[str, Any] = {
            "id": response_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._events = [self._split(choice) for choice in range(choices)]

    def early(self) -> list[bytes]:
        """What is sent before there is any KV."""
        return []

    def opening(self) -> list[bytes]:
        """What is sent before the first token."""
        return [self._role(choice) for choice in range(len(self._events))] if self.chat else []

    def closing(self, counts: Counts, *, include_usage: bool) -> list[bytes]:
        """What is sent after the last token."""
        body = {**self._common, "choices": [], "usage": usage(counts, whole=False)}
        return [b"data: " + encode(body) + b"\n\n", DONE] if include_usage else [DONE]

    def failure(self, message: str, *, opened: bool) -> list[bytes] | None:
        """What ends a stream that failed; None: it is cut. A chat says its role first, also when that is all."""
        opening = [] if opened else self.opening()
        return [*opening, error_frame(message), DONE]

    def failure_body(self, message: str) -> bytes:
        """The body of a 500."""
        return error(message, "InternalServerError", None, 500)

    def _role(self, choice: int) -> bytes:
        delta = {"role": "assistant", "content": ""}
        body: dict[str, Any] = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event([body])

    def token(self, choice: int, token: str, *, last: bool) -> bytes:
        """The event of one token. Tokens are plain ASCII without quotes: no escaping."""
        before, after, after_last = self._events[choice]
        return before + token.encode("ascii") + (after_last if last else after)

    def whole(self, texts: list[str], counts: Counts, transfer: object) -> bytes:
        """A whole answer; `transfer` is its kv_transfer_params (null unless it is a prefill leg's)."""
        choices: list[dict[str, Any]] = []
        for index, text in enumerate(texts):
            end = {"logprobs": None, "finish_reason": "length", "stop_reason": None, "token_ids": None}
            said = {"message": _message(text)} if self.chat else {"text": text}
            choices.append({"index": index, **said, **end, "routed_experts": None})
            if not self.chat:
                choices[-1].update(prompt_logprobs=None, prompt_token_ids=None)
        body = {**self._common, "choices": choices, "service_tier": None, "system_fingerprint": None}
        if self.chat:
            body["object"] = "chat.completion"
        body["usage"] = usage(counts, whole=True)
        if self.chat:
            body.update(prompt_logprobs=None, prompt_token_ids=None, prompt_text=None)
        return encode({**body, "kv_transfer_params": transfer, "ec_transfer_params": None, "metrics": None})

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        return b"data: " + encode({**self._common, "choices": choices}) + b"\n\n"

    def _split(self, choice: int) -> tuple[bytes, bytes, bytes]:
        mark = "\x00"
        written = []
        for reason in (None, "length"):
            body: dict[str, Any]
            if self.chat:
                body = {
                    "index": choice,
                    "delta": {"content": mark},
                    "logprobs": None,
                    "finish_reason": reason,
                }
                if reason:
                    body["stop_reason"] = None
                body["token_ids"] = None
            else:
                body = {"index": choice, "text": mark, "logprobs": None, "finish_reason": reason}
                body.update(stop_reason=None, prompt_token_ids=None, token_ids=None)
            written.append(self._event([body]).split(b"\\u0000"))
        (before, after), (_, after_last) = written
        return before, after, after_last


def _message(text: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }

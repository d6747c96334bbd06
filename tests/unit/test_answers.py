"""What a client may see of an engine's answer, and what the proxy learns of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_pdproxy.core import sse
from trio_pdproxy.core.errors import Dialect, Fault, ProxyError, as_event, next_sequence_number
from trio_pdproxy.core.plan import (
    APIS,
    NOTHING_SAID,
    Api,
    read_prefill_answer,
    shown_answer,
    shown_block,
    tokens_in,
)

CHAT, RESPONSES, MESSAGES = (APIS[p] for p in ("/v1/chat/completions", "/v1/responses", "/v1/messages"))
PARAMS = {"remote_engine_id": "p"}
PREFILL: dict[str, dict[str, Any]] = {
    CHAT.path: {
        "usage": {
            "prompt_tokens": 192,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 160, "created_cache_tokens": 0, "multimodal_tokens": None},
        },
    },
    RESPONSES.path: {"usage": {"input_tokens": 192, "input_tokens_details": {"cached_tokens": 160}}},
    MESSAGES.path: {
        "usage": {"input_tokens": 32, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 160},
    },
}


def said(api: Api) -> Any:
    return read_prefill_answer(api, msgspec.json.encode(PREFILL[api.path] | {"kv_transfer_params": PARAMS}))


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=lambda api: api.path)
def test_prefill_tells_the_prompts_tokens_and_how_many_were_cached(api: Api) -> None:
    assert (said(api).prompt_tokens, said(api).cached_tokens) == (192, 160)


@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=lambda api: api.path)
@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b'{"usage":null}', b'{"usage":[]}', b'{"usage":{"prompt_tokens_details":null}}', b'{"usage":{'],
)
def test_an_answer_that_does_not_tell_changes_nothing(api: Api, answer: bytes) -> None:
    found = read_prefill_answer(api, answer)
    assert found.cache == NOTHING_SAID.cache
    assert found.cached_tokens is None


def test_decodes_own_count_of_what_was_cached_is_replaced_and_all_else_stays() -> None:
    chat = {"choices": [], "usage": {"prompt_tokens": 192, "prompt_tokens_details": {"cached_tokens": 192}}}
    shown = json.loads(shown_answer(msgspec.json.encode(chat), said(CHAT).cache))
    assert shown["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
    assert shown["usage"]["prompt_tokens"] == 192
    message = {"usage": {"input_tokens": 0, "output_tokens": 4, "cache_read_input_tokens": 192}}
    shown = json.loads(shown_answer(msgspec.json.encode(message), said(MESSAGES).cache))
    assert shown["usage"] == {
        "input_tokens": 32,
        "output_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 160,
    }


def test_a_streams_last_usage_is_put_right_and_every_other_byte_stays() -> None:
    before = b'data: {"choices":[{"delta":{"content":"\\"choices\\":[] \\u00e9"}}]}\n\n: a comment\n\n'
    last = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":192}}\n\n'
    block = before + last + b"data: [DONE]\n\n"
    assert CHAT.mark in block
    assert CHAT.mark not in before, "generated text does not look like it"
    shown = shown_block(CHAT, block, said(CHAT).cache)
    assert shown.startswith(before)
    assert shown.endswith(b"\n\ndata: [DONE]\n\n")
    (event,) = [e for e in sse.events(shown) if b"prompt_tokens_details" in e]
    assert json.loads(event)["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
    assert shown_block(CHAT, block, {}) == block


def test_the_events_of_responses_lose_what_is_the_engines_own() -> None:
    response = {
        "id": "resp_1",
        "usage": {"input_tokens": 192},
        "kv_transfer_params": PARAMS,
        "ec_transfer_params": None,
    }
    event = msgspec.json.encode({"response": response, "sequence_number": 9, "type": "response.completed"})
    shown = shown_block(RESPONSES, b"event: response.completed\ndata: " + event + b"\n\n\n", said(RESPONSES).cache)
    assert shown.startswith(b"event: response.completed\ndata: {")
    assert shown.endswith(b"}\n\n\n")
    (data,) = sse.events(shown)
    found = json.loads(data)
    assert set(found["response"]) == {"id", "usage"}
    assert found["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 160}
    assert (found["sequence_number"], found["type"]) == (9, "response.completed")


@given(st.binary(max_size=60), st.sampled_from(list(APIS.values())))
def test_no_bytes_of_an_engine_make_its_readers_raise(data: bytes, api: Api) -> None:
    for block in (data, b"data: {" + api.mark + b":" + data + b"\n\n", b'data: {"usage":' + data):
        shown_block(api, block, said(CHAT).cache)
        shown_answer(block, said(CHAT).cache)
        read_prefill_answer(api, block)
        tokens_in(api, block)


def test_generated_tokens_are_read_from_whole_answers_and_last_events() -> None:
    assert tokens_in(CHAT, b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}') == (3, 4)
    assert tokens_in(RESPONSES, b'{"response":{"usage":{"input_tokens":3,"output_tokens":4}}}') == (3, 4)
    assert tokens_in(MESSAGES, b'{"usage":{"input_tokens":3,"output_tokens":4}}') == (3, 4)
    assert tokens_in(CHAT, b"[DONE]") == (None, None)


# --- errors -----------------------------------------------------------------------------------------


def test_each_dialect_has_its_own_body_and_event() -> None:
    error = ProxyError("no", status=502, fault=Fault.DECODE, code="stream_broken")
    assert json.loads(error.body(Dialect.ANTHROPIC)) == {
        "type": "error",
        "error": {"type": "api_error", "message": "no"},
    }
    assert error.body(Dialect.RESPONSES) == error.body(Dialect.OPENAI)
    after = b'event: x\ndata: {"sequence_number":7,"type":"x"}\n\n'
    event = error.event(Dialect.RESPONSES, after=after)
    assert event.startswith(b"event: error\ndata: ")
    assert json.loads(sse.events(event)[0]) == {
        "type": "error",
        "code": "stream_broken",
        "message": "no",
        "param": None,
        "sequence_number": 8,
    }
    assert error.event(Dialect.ANTHROPIC) == b"event: error\ndata: " + error.body(Dialect.ANTHROPIC) + b"\n\n"
    for dialect in Dialect:
        (data,) = sse.events(error.event(dialect))
        assert sse.error_event(data), dialect


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropics_names_follow_the_status(status: int, kind: str) -> None:
    error = ProxyError("no", status=status, fault=Fault.PROXY, code="x")
    assert json.loads(error.body(Dialect.ANTHROPIC))["error"]["type"] == kind


def test_a_number_in_generated_text_is_not_taken_for_an_events() -> None:
    data = msgspec.json.encode({"delta": '"sequence_number":99', "sequence_number": 4})
    assert next_sequence_number(b"event: x\ndata: " + data + b"\n\n") == 5
    assert next_sequence_number(b"") == 0


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"no","type":"t","param":"n","code":400}}',
        b'{\n  "error": {"message": "no"}\n}',
        b'{"detail":"Not Found"}',
        b"",
        b"<html>\r\n",
    ],
)
def test_any_body_becomes_one_event(dialect: Dialect, body: bytes) -> None:
    event = as_event(body, dialect)
    assert event.endswith(b"\n\n")
    assert len(sse.events(event)) == 1
    if dialect is Dialect.RESPONSES:
        assert json.loads(sse.events(event)[0])["type"] == "error"


@pytest.mark.parametrize(
    ("data", "is_error"),
    [
        (b'{"type":"error","code":"x","message":"m","param":null,"sequence_number":1}', True),
        (b'{"type":"error","error":{"type":"internal_error","message":"m"}}', True),
        (b'{"type":"response.failed","response":{"error":{"message":"m"}}}', True),
        (b'{"type":"response.completed","response":{"error":null}}', False),
        (b'{"type":"response.output_text.delta","delta":"\\"type\\":\\"error\\""}', False),
        (b'{"choices":[{"text":"\\"error\\": {}"}]}', False),
    ],
)
def test_errors_inside_streams_are_told_from_text(data: bytes, is_error: bool) -> None:
    assert (sse.error_event(data) is not None) is is_error

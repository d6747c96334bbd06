"""/v1/responses and /v1/messages through both engines, and what one engine answers, on simulated engines."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
import trio

from trio_pdproxy.core import sse
from trio_pdproxy.sim import Fault, SeenRequest, SimSettings, expected_chat
from trio_pdproxy.testing import Rig, Streamed, open_rig, until

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
SAID: list[dict[str, Any]] = [{"role": "user", "content": "why is the sky blue"}]
TOKENS = 6
TEXT = expected_chat(SAID, TOKENS)
DETAILS = SimSettings(prompt_tokens_details=True)


def body_of(path: str, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "sim", **more}
    if path == RESPONSES:
        return {"input": SAID, "max_output_tokens": TOKENS} | body
    return {"messages": SAID, "max_tokens": TOKENS} | body


async def ask(rig: Rig, path: str, **more: Any) -> httpx.Response:
    return await rig.client.post(path, json=body_of(path, **more))


async def stream(rig: Rig, path: str, **more: Any) -> Streamed:
    return await rig.stream(path, **body_of(path, **more))


def events_of(answer: Streamed) -> list[dict[str, Any]]:
    return [msgspec.json.decode(event) for event in answer.events]


def text_of(path: str, answer: dict[str, Any]) -> str:
    part = answer["output"][0]["content"][0] if path == RESPONSES else answer["content"][0]
    return str(part["text"])


def last(rig: Rig) -> tuple[SeenRequest, SeenRequest]:
    return rig.p.requests[-1], rig.d.requests[-1]


# --- both engines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_a_whole_answer_comes_by_transfer_without_the_engines_own_fields(path: str) -> None:
    async with open_rig() as rig:
        before = rig.p.pushes
        response = await ask(rig, path)
        assert response.status_code == 200
        assert text_of(path, response.json()) == TEXT
        assert "transfer_params" not in response.text
        assert rig.p.pushes == before + 1
        await rig.quiet()
        assert rig.report.outcome == "ok"
        assert rig.report.completion_tokens == TOKENS
        assert rig.report.prompt_tokens


@pytest.mark.parametrize(
    ("path", "delta"), [(RESPONSES, "response.output_text.delta"), (MESSAGES, "content_block_delta")]
)
async def test_a_stream_comes_by_transfer_and_is_passed_on_in_whole(path: str, delta: str) -> None:
    async with open_rig() as rig:
        before = rig.p.pushes
        answer = await stream(rig, path)
        assert (answer.status, answer.complete) == (200, True)
        events = events_of(answer)
        said = [event["delta"] for event in events if event["type"] == delta]
        assert "".join(piece if isinstance(piece, str) else piece["text"] for piece in said) == TEXT
        assert events[-1]["type"] in ("response.completed", "message_stop")
        assert b"transfer_params" not in answer.raw
        assert rig.p.pushes == before + 1
        await rig.quiet()
        assert rig.report.completion_tokens == TOKENS


async def test_a_responses_stream_keeps_every_event_in_order_under_one_id() -> None:
    async with open_rig() as rig:
        answer = await stream(rig, RESPONSES)
        events = events_of(answer)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events][:3] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
        ]
        ids = {event["response"]["id"] for event in events if "response" in event}
        assert len(ids) == 1
        assert ids.pop().startswith("resp_")
        names = [line[7:] for line in answer.raw.decode().splitlines() if line.startswith("event: ")]
        assert names == [event["type"] for event in events]


async def test_the_legs_of_responses_are_paired_by_the_bodys_request_id_never_the_clients() -> None:
    async with open_rig() as rig:
        seen: set[str] = set()
        for _ in range(2):
            assert (await ask(rig, RESPONSES, request_id="mine", store=True, top_logprobs=3)).status_code == 200
            p, d = last(rig)
            assert p.body["request_id"] == d.body["request_id"] == f"resp_{p.id}"
            assert p.body["kv_transfer_params"]["transfer_id"] == d.body["kv_transfer_params"]["transfer_id"] == p.id
            assert d.body["kv_transfer_params"]["remote_request_id"] == f"resp_{p.id}_0"
            assert (p.body["max_output_tokens"], p.body["stream"], p.body["store"]) == (1, False, False)
            assert "top_logprobs" not in p.body
            assert (d.body["max_output_tokens"], d.body["store"], d.body["top_logprobs"]) == (TOKENS, True, 3)
            seen.add(p.body["request_id"])
        assert len(seen) == 2
        await rig.quiet()
        assert rig.report.dropped == ("request_id",)


async def test_the_prefill_leg_of_messages_asks_for_one_token_and_keeps_the_prompt() -> None:
    async with open_rig() as rig:
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        more = {"system": "be kind", "tools": tools, "thinking": {"type": "disabled"}, "stop_sequences": ["zzz"]}
        assert (await ask(rig, MESSAGES, **more)).status_code == 200
        p, d = last(rig)
        assert (p.body["max_tokens"], p.body["stream"]) == (1, False)
        assert "request_id" not in p.body
        for leg in (p, d):
            assert {name: leg.body[name] for name in more} == more
        await rig.quiet()


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("streamed", [False, True])
async def test_no_client_can_steer_the_connector(path: str, streamed: bool) -> None:
    async with open_rig() as rig:
        evil = {"do_remote_prefill": True, "remote_host": "evil.example", "remote_port": 1, "tp_size": 99}
        more = {"kv_transfer_params": evil, "vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": 1}}
        answer = await ask(rig, path, stream=streamed, request_id="x", **more)
        assert answer.status_code == 200
        for leg in last(rig):
            assert b"evil.example" not in leg.raw
            assert leg.body["vllm_xargs"] == {}
        await rig.quiet()


# --- what prefill saw -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("streamed", [False, True])
async def test_cached_tokens_are_those_that_prefill_found(path: str, streamed: bool) -> None:
    """A decode engine counts whatever was transferred to it as cached."""
    async with open_rig(sim=DETAILS) as rig:
        found: list[tuple[int, int]] = []
        for _ in range(2):
            if streamed:
                more = {"stream_options": {"include_usage": True}} if path == CHAT else {}
                answer = await stream(rig, path, **more)
                usages = [e.get("usage") or e.get("response", {}).get("usage") for e in map(_json, answer.events)]
                usage = [u for u in usages if u][-1]
            else:
                usage = (await ask(rig, path)).json()["usage"]
            found.append(_cached(usage))
        prompt = found[0][0]
        assert found == [(prompt, 0), (prompt, (prompt - 1) // 16 * 16)]
        await rig.quiet()
        assert (rig.report.prompt_tokens, rig.report.cached_tokens) == found[1]


def _json(event: bytes) -> dict[str, Any]:
    return {} if event == b"[DONE]" else json.loads(event)


def _cached(usage: dict[str, Any]) -> tuple[int, int]:
    """The prompt's tokens, and how many of them were cached."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


async def test_where_prefill_does_not_tell_decodes_word_stays() -> None:
    async with open_rig() as rig:
        usage = (await ask(rig, CHAT)).json()["usage"]
        assert usage["prompt_tokens_details"] is None
        assert "cache_read_input_tokens" not in (await ask(rig, MESSAGES)).json()["usage"]


# --- errors, each in its API's shape ----------------------------------------------------------------


async def test_before_the_first_output_event_a_failure_is_an_honest_status() -> None:
    """The first two events of /v1/responses come before there is any KV: they commit nothing."""
    async with open_rig() as rig:
        refusal = b'{"error":{"message":"no","type":"BadRequestError","param":null,"code":400}}'
        rig.p.faults.add(Fault("before_head", "status", status=400, body=refusal, times=None))
        answer = await stream(rig, RESPONSES)
        assert (answer.status, answer.raw) == (400, refusal)
        rig.p.faults.clear()
        await until(lambda: not rig.app.active, 5)
        assert rig.app.recent[-1].outcome == "client_error"


async def test_a_responses_stream_that_dies_after_its_early_events_is_tried_elsewhere() -> None:
    async with open_rig(decode=2) as rig:
        for engine in rig.cluster.decode[:1]:
            engine.faults.add(Fault("mid_body", "reset", after=2))
        answer = await stream(rig, RESPONSES)
        assert answer.status == 200
        events = events_of(answer)
        assert events[-1]["type"] == "response.completed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        await rig.quiet()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_an_error_right_behind_what_opens_a_stream_is_still_an_honest_status(path: str) -> None:
    """vLLM says a chat's role, or its message_start, and then that the transfer failed: all in one go."""
    async with open_rig() as rig:
        rig.d.faults.add(Fault("mid_body", "sse_error", after=0, times=None))
        answer = await stream(rig, path)
        assert answer.status in (500, 502)
        assert b"error" in answer.raw
        assert b"role" not in answer.raw
        rig.d.faults.clear()
        await rig.quiet()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_such_an_error_sends_the_request_to_another_pair(path: str) -> None:
    async with open_rig(decode=2) as rig:
        rig.cluster.decode[0].faults.add(Fault("mid_body", "sse_error", after=0, times=None))
        for _ in range(4):
            answer = await stream(rig, path)
            assert answer.status == 200
            assert b"error" not in answer.raw
        await rig.quiet()


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_stream_that_breaks_ends_in_its_apis_own_error_event(path: str) -> None:
    async with open_rig() as rig:
        rig.d.faults.add(Fault("mid_body", "reset", after=5))
        answer = await stream(rig, path, **({"max_output_tokens": 50} if path == RESPONSES else {"max_tokens": 50}))
        assert (answer.status, answer.complete) == (200, False)
        assert b"[DONE]" not in answer.raw
        frames = answer.raw.decode().removesuffix("\n\n").split("\n\n")
        name, _, data = frames[-1].rpartition("\n")
        error = json.loads(data.removeprefix("data: "))
        assert sse.error_event(data.removeprefix("data: ").encode())
        if path == CHAT:
            assert name == ""
            assert set(error["error"]) == {"message", "type", "param", "code"}
        else:
            assert name == "event: error"
            assert error["type"] == "error"
        if path == RESPONSES:
            before = json.loads(frames[-2].rpartition("data: ")[2])
            assert error["sequence_number"] == before["sequence_number"] + 1
            assert {"code", "message", "param"} < set(error)
        if path == MESSAGES:
            assert set(error["error"]) == {"type", "message"}
        await rig.quiet()


async def test_on_messages_what_the_proxy_itself_says_has_anthropics_shape() -> None:
    async with open_rig() as rig:
        cases = [
            (await rig.client.post(MESSAGES, content=b"{", headers={"content-type": "application/json"}), 400),
            (await rig.client.post(MESSAGES, json={"model": "sim"}), 400),
            (await rig.client.get(MESSAGES), 405),
            (await rig.client.post(MESSAGES + "/batches", json={}), 404),
            (await rig.client.post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"}), 415),
        ]
        for response, status in cases:
            assert response.status_code == status
            answer = response.json()
            assert answer["type"] == "error"
            assert set(answer["error"]) == {"type", "message"}
            assert answer["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
            assert response.headers["x-request-id"]
        assert not rig.d.requests


async def test_an_engines_own_refusal_keeps_its_shape() -> None:
    async with open_rig() as rig:
        answer = (await ask(rig, MESSAGES, model="nope")).json()
        assert answer == {
            "type": "error",
            "error": {"type": "NotFoundError", "message": "The model `nope` does not exist. Valid aliases: sim."},
        }
        assert (await ask(rig, RESPONSES, model="nope")).json()["error"]["type"] == "NotFoundError"
        await rig.quiet()


# --- what only one engine can answer ----------------------------------------------------------------


async def test_a_background_response_is_refused_because_nobody_could_fetch_it() -> None:
    async with open_rig() as rig:
        response = await ask(rig, RESPONSES, background=True)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "background"
        assert not rig.d.requests


@pytest.mark.parametrize("more", [{"previous_response_id": "resp_1"}, {"tools": [{"type": "web_search_preview"}]}])
async def test_what_prefill_cannot_know_goes_to_a_decode_engine_alone(more: dict[str, Any]) -> None:
    async with open_rig() as rig:
        before = len(rig.p.requests)
        await ask(rig, RESPONSES, **more)
        assert len(rig.p.requests) == before
        assert "kv_transfer_params" not in rig.d.requests[-1].body
        await rig.quiet()
        assert rig.report.kind == "decode_only"


async def test_tools_that_the_client_calls_go_through_both_engines() -> None:
    async with open_rig() as rig:
        tools = [{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "g"}]
        assert (await ask(rig, RESPONSES, tools=tools)).status_code == 200
        await rig.quiet()
        assert rig.report.kind == "push"


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/tokenize", {"prompt": "hello"}, {"count": 5, "tokens": [104, 101, 108, 108, 111]}),
        ("/detokenize", {"tokens": [104, 105]}, {"prompt": "hi"}),
        ("/v1/messages/count_tokens", {"messages": SAID}, {"input_tokens": 41}),
    ],
)
async def test_questions_about_tokens_are_one_engines_to_answer(
    path: str, body: dict[str, Any], answer: dict[str, Any]
) -> None:
    async with open_rig() as rig:
        before = len(rig.p.requests)
        response = await rig.client.post(path, json={"model": "sim", "kv_transfer_params": {}, **body})
        assert response.status_code == 200
        assert answer.items() <= response.json().items()
        assert len(rig.p.requests) == before
        assert rig.d.requests[-1].body == {"model": "sim", **body}
        await rig.quiet()
        assert rig.report.route == path
        refused = await rig.client.post(path, json={"model": "nope", **body})
        assert refused.status_code == 404
        assert ("type" in refused.json()) == path.startswith(MESSAGES)


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"]
)
async def test_what_the_engines_model_cannot_do_is_its_own_404(path: str) -> None:
    async with open_rig() as rig:
        response = await rig.client.post(path, json={"model": "sim", "input": "x"})
        assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})
        await rig.quiet()


async def test_a_question_about_tokens_is_asked_of_another_engine_if_one_fails() -> None:
    async with open_rig(decode=2) as rig:
        rig.cluster.decode[0].faults.add(Fault("before_head", "reset", path="/tokenize", times=None))
        for _ in range(3):
            response = await rig.client.post("/tokenize", json={"prompt": "hi"})
            assert response.status_code == 200
        await rig.quiet()


async def test_two_clients_with_one_id_get_their_own_answers() -> None:
    """Two live requests of one id would get each other's KV, with a 200 and no log record."""
    async with open_rig(sim=SimSettings(prefill_base=0.05)) as rig:
        texts: dict[tuple[str, int], str] = {}

        async def one(path: str, number: int) -> None:
            said = [{"role": "user", "content": f"client {number}"}]
            body = body_of(path, request_id="resp_same") | {"input" if path == RESPONSES else "messages": said}
            headers = {"x-request-id": "same"}
            response = await rig.client.post(path, json=body, headers=headers)
            assert response.headers["x-request-id"] == "same"
            answer = response.json()
            texts[path, number] = answer["choices"][0]["message"]["content"] if path == CHAT else text_of(path, answer)

        async with trio.open_nursery() as nursery:
            for path in (CHAT, RESPONSES, MESSAGES):
                for number in range(8):
                    nursery.start_soon(one, path, number)
        for (_, number), text in texts.items():
            assert text == expected_chat([{"role": "user", "content": f"client {number}"}], TOKENS)
        await rig.quiet()

"""What a proxy can see of an engine, over memory streams and on virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import trio
import trio.testing

from trio_pdproxy.sim import Cluster, SimEngine, SimSettings, build_cluster, expected_chat, expected_text
from trio_pdproxy.sim.client import Client
from trio_pdproxy.sim.faults import Fault, What, Where

PROMPT = "a prompt of more than one block, so that something can be cached"
BLOCKS = 4
ERROR_FRAME = (
    b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", '
    b'"param": null, "code": 500}}\n\n'
)


class Rig:
    """A P and a D without sockets, and clients of them."""

    def __init__(self, nursery: trio.Nursery, cluster: Cluster) -> None:
        self.nursery = nursery
        self.p = cluster.prefill[0]
        self.d = cluster.decode[0]
        self.cluster = cluster

    def connect(self, engine: SimEngine) -> Client:
        ours, theirs = trio.testing.memory_stream_pair()
        self.nursery.start_soon(engine.serve_stream, theirs)
        return Client(ours)

    async def post(
        self, engine: SimEngine, body: object, request_id: str = "id", path: str = "/v1/completions"
    ) -> tuple[int, bytes]:
        client = self.connect(engine)
        await client.post(path, body, {"x-request-id": request_id})
        status, _ = await client.head()
        answer = await client.body()
        await client.stream.aclose()
        return status, answer

    async def start(self, engine: SimEngine, body: object, request_id: str = "id") -> Client:
        """Send and leave it there until the engine is quiet."""
        client = self.connect(engine)
        await client.post("/v1/completions", body, {"x-request-id": request_id})
        await trio.testing.wait_all_tasks_blocked()
        return client

    def prefill_body(self, prompt: object = PROMPT, **more: object) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **more}

    def decode_body(self, prompt: object = PROMPT, **more: object) -> dict[str, Any]:
        params = {"do_remote_prefill": True, "remote_request_id": "any", **self.p.coordinates}
        return {"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params, **more}


@asynccontextmanager
async def open_rig(settings: SimSettings | None = None) -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        yield Rig(nursery, build_cluster(settings=settings))
        nursery.cancel_scope.cancel("test is over")


def text_of(events: bytes) -> str:
    """The joined text of an SSE body that must end with [DONE]."""
    frames = events.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    said = ""
    for frame in frames[:-2]:
        for choice in json.loads(frame.removeprefix("data: "))["choices"]:
            said += choice.get("text") or choice.get("delta", {}).get("content", "")
    return said


# --------------------------------------------------------------------- pairs


@pytest.mark.parametrize("order", ["decode first", "prefill first", "3 s apart"])
async def test_a_pair(autojump_clock: trio.testing.MockClock, order: str) -> None:
    async with open_rig() as rig:
        if order == "prefill first":
            status, answer = await rig.post(rig.p, rig.prefill_body())
            assert status == 200
            assert (rig.p.blocks_held, rig.p.running, rig.p.pushes) == (BLOCKS, 0, 0)
        client = await rig.start(rig.d, rig.decode_body(stream=True))
        assert (await client.head())[0] == 200
        if order != "prefill first":
            assert (rig.d.blocks_held, rig.d.running, rig.d.waiting) == (BLOCKS, 0, 1)
            await trio.sleep(3 if order == "3 s apart" else 0)
            status, answer = await rig.post(rig.p, rig.prefill_body())
        events = await client.body()
        assert text_of(events) == expected_text(PROMPT, 4)
        params = json.loads(answer)["kv_transfer_params"]
        assert params["remote_request_id"].startswith("cmpl-id-0-")
        assert {name: params[name] for name in rig.p.coordinates} == rig.p.coordinates
        assert params["transfer_mode"] == "push"
        assert rig.p.pushes == 1
        for engine in rig.cluster.engines:
            assert (engine.blocks_held, engine.running, engine.waiting, engine.orphans) == (0, 0, 0, 0)
        assert rig.d.core.prompt_tokens == {"external_kv_transfer": len(PROMPT)}


async def test_every_engine_says_the_same(autojump_clock: trio.testing.MockClock) -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with open_rig() as rig:
        for engine in rig.cluster.engines:
            _, answer = await rig.post(engine, {"prompt": PROMPT, "max_tokens": 4, "seed": 7})
            body = json.loads(answer)
            assert body["choices"][0]["text"] == expected_text(PROMPT, 4)
            assert body["id"] == "cmpl-id"
            assert body["kv_transfer_params"] is None
            chat = {"messages": messages, "max_tokens": 9, "max_completion_tokens": 3}
            _, answer = await rig.post(engine, chat, path="/v1/chat/completions")
            body = json.loads(answer)
            assert body["choices"][0]["message"]["content"] == expected_chat(messages, 3)
            assert body["usage"]["completion_tokens"] == 3
            assert body["id"] == "chatcmpl-id"


async def test_a_chat_pair_streams_roles_and_usage(autojump_clock: trio.testing.MockClock) -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with open_rig() as rig:
        client = rig.connect(rig.d)
        body = rig.decode_body(stream=True, stream_options={"include_usage": True}) | {"messages": messages}
        await client.post("/v1/chat/completions", body, {"x-request-id": "c"})
        prefill = rig.prefill_body() | {"messages": messages}
        status, _ = await rig.post(rig.p, prefill, "c", "/v1/chat/completions")
        assert status == 200
        _, headers = await client.head()
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        events = await client.body()
        assert text_of(events) == expected_chat(messages, 4)
        first, *_, last, _, _ = events.decode().split("\n\n")
        assert '"delta":{"role":"assistant","content":""}' in first
        assert '"choices":[],"usage":{"prompt_tokens"' in last


async def test_lists_and_n_pair_one_by_one(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        prompts = [PROMPT, "another"]
        client = await rig.start(rig.d, rig.decode_body(prompts, n=2))
        assert rig.d.waiting == 4
        await rig.post(rig.p, rig.prefill_body(prompts, n=2))
        await client.head()
        choices = json.loads(await client.body())["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["text"] for choice in choices] == [
            expected_text(prompt, 4, k) for prompt in prompts for k in (0, 1)
        ]
        assert rig.p.pushes == 4


async def test_n_on_one_leg_only_hangs_and_a_rescue_frees_it(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        await rig.start(rig.d, rig.decode_body(n=2))
        await rig.post(rig.p, rig.prefill_body())
        await trio.sleep(100)
        assert (rig.d.waiting, rig.d.blocks_held) == (2, 2 * BLOCKS)
        await rig.post(rig.p, rig.prefill_body(n=2))
        await trio.testing.wait_all_tasks_blocked()
        assert rig.d.blocks_held == 0


async def test_two_requests_with_one_id_are_swapped_and_it_stays(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a, b = PROMPT, PROMPT[::-1]
    async with open_rig() as rig:
        first = await rig.start(rig.d, rig.decode_body(a), "same")
        second = await rig.start(rig.d, rig.decode_body(b), "same")
        await rig.post(rig.p, rig.prefill_body(b), "same")
        await rig.post(rig.p, rig.prefill_body(a), "same")
        for client, other in ((first, b), (second, a)):
            assert (await client.head())[0] == 200
            assert json.loads(await client.body())["choices"][0]["text"] == expected_text(other, 4)
        _, answer = await rig.post(rig.d, {"prompt": a, "max_tokens": 4}, "fresh")
        assert json.loads(answer)["choices"][0]["text"] == expected_text(b, 4)


# ------------------------------------------------- /v1/responses, /v1/messages


def words_of(events: bytes, kind: str) -> str:
    """The joined deltas of named events."""
    said = ""
    for frame in events.decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = frame.partition("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
        if name == f"event: {kind}":
            delta = json.loads(data.removeprefix("data: "))["delta"]
            said += delta if isinstance(delta, str) else delta["text"]
    return said


async def test_responses_pair_by_the_body_and_speak_early(autojump_clock: trio.testing.MockClock) -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with open_rig() as rig:
        body = rig.decode_body(stream=True) | {"input": "hello", "max_output_tokens": 4, "request_id": "resp_1"}
        client = rig.connect(rig.d)
        await client.post("/v1/responses", body, {"x-request-id": "not looked at"})
        await client.head()
        early = await client.piece() + await client.piece()
        assert b"event: response.created\n" in early
        assert b"event: response.in_progress\n" in early
        assert rig.p.pushes == 0
        prefill = rig.prefill_body() | {"input": "hello", "max_output_tokens": 1, "request_id": "resp_1"}
        status, answer = await rig.post(rig.p, prefill, "another", "/v1/responses")
        assert status == 200
        assert json.loads(answer)["kv_transfer_params"]["remote_request_id"].startswith("resp_1_0-")
        events = await client.body()
        assert words_of(events, "response.output_text.delta") == expected_chat(messages, 4)
        assert events.rstrip().endswith(b'"type":"response.completed"}')
        assert b'"kv_transfer_params":null' in events


async def test_a_failed_responses_stream_is_cut(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        body = rig.decode_body(stream=True) | {"input": "hello"}
        body["kv_transfer_params"]["remote_engine_id"] = "nobody"
        client = rig.connect(rig.d)
        await client.post("/v1/responses", body)
        await client.head()
        with pytest.raises(h11.RemoteProtocolError):
            await client.body()
        assert (await rig.post(rig.d, body | {"stream": False}, path="/v1/responses"))[0] == 500


async def test_messages(autojump_clock: trio.testing.MockClock) -> None:
    messages = [{"role": "user", "content": "hello"}]
    path = "/v1/messages"
    async with open_rig() as rig:
        body = rig.decode_body(stream=True) | {"messages": messages}
        client = rig.connect(rig.d)
        await client.post(path, body, {"x-request-id": "m"})
        status, answer = await rig.post(rig.p, rig.prefill_body() | {"messages": messages}, "m", path)
        assert (status, json.loads(answer)["id"]) == (200, "chatcmpl-m")
        await client.head()
        events = await client.body()
        assert words_of(events, "content_block_delta") == expected_chat(messages, 4)
        assert events.startswith(b"event: message_start\n")
        assert events.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
        _, answer = await rig.post(rig.d, {"messages": messages, "max_tokens": 0}, path=path)
        message = "max_tokens must be at least 1, got 0."
        error = {"type": "BadRequestError", "message": message}
        assert json.loads(answer) == {"type": "error", "error": error}
        body["kv_transfer_params"]["remote_engine_id"] = "nobody"
        status, answer = await rig.post(rig.d, body, path=path)
        assert status == 200
        assert [line for line in answer.split(b"\n") if line.startswith(b"event:")] == [
            b"event: message_start",
            b"event: error",
        ]
        assert (await rig.post(rig.d, body | {"stream": False}, path=path))[0] == 500


# ------------------------------------------------------------------ the debt


async def test_closing_d_before_the_push_frees_nothing_until_it_comes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_rig() as rig:
        client = await rig.start(rig.d, rig.decode_body(stream=True))
        await client.stream.aclose()
        await trio.sleep(1000)
        assert (rig.d.blocks_held, rig.d.waiting, rig.d.running, rig.d.orphans) == (BLOCKS, 0, 0, 1)
        assert rig.d.requests[0].how == "aborted"
        await rig.post(rig.p, rig.prefill_body())
        assert (rig.d.blocks_held, rig.d.orphans, rig.p.blocks_held) == (0, 0, 0)


async def test_closing_d_while_it_decodes_frees_it(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(SimSettings(itl=1.0)) as rig:
        client = await rig.start(rig.d, rig.decode_body(stream=True))
        await rig.post(rig.p, rig.prefill_body())
        await client.head()
        await client.piece()
        assert rig.d.running == 1
        await client.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert (rig.d.blocks_held, rig.d.running) == (0, 0)


async def test_closing_p_during_the_prefill_never_pushes(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(SimSettings(prefill_base=1.0)) as rig:
        await rig.start(rig.d, rig.decode_body())
        client = await rig.start(rig.p, rig.prefill_body())
        assert rig.p.running == 1
        await client.stream.aclose()
        await trio.sleep(10)
        assert (rig.p.blocks_held, rig.p.pushes, rig.d.blocks_held, rig.d.waiting) == (0, 0, BLOCKS, 1)
        assert rig.p.requests[0].how == "aborted"


async def test_the_lease_of_a_prefill_that_nobody_wants(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        await rig.post(rig.p, rig.prefill_body())
        await trio.sleep(29.9)
        assert rig.p.blocks_held == BLOCKS
        await trio.sleep(0.2)
        assert (rig.p.blocks_held, rig.p.expired) == (0, 1)
        client = await rig.start(rig.d, rig.decode_body())
        await trio.sleep(100)
        assert rig.d.waiting == 1, "P has forgotten; D waits without end"
        await rig.post(rig.p, rig.prefill_body())
        await client.head()
        assert json.loads(await client.body())["choices"][0]["text"] == expected_text(PROMPT, 4)


async def test_a_shorter_rescue_loses_ds_blocks(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        await rig.start(rig.d, rig.decode_body())
        await rig.post(rig.p, rig.prefill_body("short"))
        await rig.post(rig.p, rig.prefill_body())
        await trio.sleep(100)
        assert (rig.d.blocks_held, rig.d.waiting) == (BLOCKS, 1)
        assert rig.p.blocks_held == 0


async def test_a_dead_p_is_silence_and_a_new_id_cures_it(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        await rig.start(rig.d, rig.decode_body())
        await rig.post(rig.p, rig.prefill_body())
        before = rig.decode_body()
        for same_id in (True, False):
            await rig.p.restart(same_id=same_id)
            await rig.start(rig.d, before, f"old {same_id}")
            await rig.post(rig.p, rig.prefill_body(), f"old {same_id}")
        assert (rig.d.waiting, rig.d.blocks_held) == (2, 2 * BLOCKS)
        await rig.start(rig.d, rig.decode_body(), "new")
        await rig.post(rig.p, rig.prefill_body(), "new")
        assert (rig.d.waiting, rig.d.blocks_held) == (2, 2 * BLOCKS)


async def test_d_gone_after_registering_fails_the_push_and_leaves_it_to_the_lease(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_rig() as rig:
        await rig.start(rig.d, rig.decode_body())
        await rig.d.restart()
        status, _ = await rig.post(rig.p, rig.prefill_body())
        assert status == 200
        assert (rig.p.core.failed_transfers, rig.p.blocks_held, rig.d.blocks_held) == (1, BLOCKS, 0)
        await trio.sleep(31)
        assert (rig.p.blocks_held, rig.p.expired) == (0, 1)


async def test_params_that_d_cannot_follow(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        body = rig.decode_body()
        body["kv_transfer_params"]["remote_engine_id"] = "nobody"
        status, answer = await rig.post(rig.d, body)
        assert status == 500
        assert json.loads(answer)["error"]["type"] == "InternalServerError"
        status, answer = await rig.post(rig.d, body | {"stream": True})
        assert (status, answer) == (200, ERROR_FRAME + b"data: [DONE]\n\n")
        assert trio.current_time() < 1
        body["kv_transfer_params"]["remote_port"] = 9
        await rig.post(rig.d, body)
        assert trio.current_time() >= 5
        assert (rig.d.blocks_held, rig.d.waiting, rig.d.core.failed_transfers) == (0, 0, 3)


async def test_a_missing_key_kills_d_and_all_it_runs(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        other = await rig.start(rig.d, rig.decode_body(stream=True), "other")
        body = rig.decode_body()
        del body["kv_transfer_params"]["tp_size"]
        status, answer = await rig.post(rig.d, body)
        assert status == 500
        assert b"EngineCore encountered an issue" in answer
        await other.head()
        events = await other.body()
        assert b"EngineCore encountered an issue" in events
        assert events.endswith(b"data: [DONE]\n\n")
        assert not rig.d.alive
        assert await rig.connect(rig.d).stream.receive_some(1) == b""
        await rig.d.revive()
        assert (await rig.post(rig.d, {"prompt": "x"}))[0] == 200


async def test_too_many_ranks_kill_the_side_channel_of_p(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        body = rig.decode_body()
        body["kv_transfer_params"]["tp_size"] = 2
        assert (await rig.post(rig.d, body))[0] == 500
        assert rig.p.core.side_channel_broken.is_set()
        assert (await rig.post(rig.d, rig.decode_body()))[0] == 500


async def test_sequences_queue_for_seats_and_for_blocks(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(SimSettings(max_num_seqs=1, num_blocks=6, itl=1.0)) as rig:
        first = await rig.start(rig.d, {"prompt": PROMPT, "max_tokens": 3})
        second = await rig.start(rig.d, {"prompt": PROMPT, "max_tokens": 3, "stream": True})
        assert (await second.head())[0] == 200, "the head comes before any seat"
        assert (rig.d.running, rig.d.waiting, rig.d.blocks_held) == (1, 1, BLOCKS)
        await first.head()
        await first.body()
        assert text_of(await second.body()) == expected_text(PROMPT, 3)
        await rig.post(rig.p, rig.prefill_body(), "held")
        assert (await rig.post(rig.p, rig.prefill_body(), "waits for the lease"))[0] == 200
        assert trio.current_time() > 30


@pytest.mark.parametrize("extra", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
async def test_d_recomputes_what_needs_prompt_logprobs(
    autojump_clock: trio.testing.MockClock, extra: dict[str, object]
) -> None:
    async with open_rig() as rig:
        await rig.post(rig.p, rig.prefill_body(**extra))
        status, _ = await rig.post(rig.d, rig.decode_body(**extra))
        assert status == 200
        assert (rig.d.core.prompt_tokens["local_compute"], rig.p.blocks_held) == (len(PROMPT), BLOCKS)


# -------------------------------------------------------------- HTTP surface


@pytest.mark.parametrize(
    ("body", "status", "kind", "says"),
    [
        ({"prompt": "x", "model": "nope"}, 404, "NotFoundError", "The model `nope` does not exist."),
        ({"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens must be at least 1, got 0."),
        ({"prompt": "x" * 4096}, 400, "BadRequestError", "max_tokens must be at least 1, got 0."),
        ({"prompt": "x" * 4097, "stream": True}, 400, "BadRequestError", "4096 tokens. However"),
        (
            {"prompt": "x", "max_tokens": 1, "min_tokens": 5},
            400,
            "BadRequestError",
            "min_tokens must be less than or equal to max_tokens=1, got 5.",
        ),
        ({"prompt": "x", "stream_options": {}}, 400, "BadRequestError", "Stream options can only be"),
        ({"prompt": "x", "n": 2, "temperature": 0}, 400, "BadRequestError", "n must be 1 when using greedy"),
        ({"max_tokens": 1}, 400, "Bad Request", "'type': 'missing', 'loc': 'body.prompt'"),
        ({"prompt": "x", "max_tokens": "many"}, 400, "Bad Request", "'loc': 'body.max_tokens'"),
        ({"prompt": "x", "n": 16385}, 400, "BadRequestError", "n must be at most 16384, got 16385."),
        ({"prompt": "x", "n": True}, 400, "Bad Request", "'loc': 'body.n'"),
        ({"prompt": [1, "x"]}, 400, "Bad Request", "'loc': 'body.prompt'"),
        ([1], 400, "Bad Request", "'loc': 'body'"),
    ],
)
async def test_errors(body: object, status: int, kind: str, says: str) -> None:
    async with open_rig() as rig:
        for engine in rig.cluster.engines:
            got, answer = await rig.post(engine, body)
            error = json.loads(answer)["error"]
            assert (got, error["type"], error["code"]) == (status, kind, status)
            assert says in error["message"]
            assert engine.blocks_held == 0


async def test_d_may_allow_less_than_p() -> None:
    cluster = build_cluster(settings=SimSettings(), decode_settings=SimSettings(max_model_len=10))
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery, cluster)
        assert (await rig.post(rig.p, rig.prefill_body()))[0] == 200
        assert (await rig.post(rig.d, rig.decode_body()))[0] == 400
        nursery.cancel_scope.cancel("test is over")


async def test_values_that_are_fine(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        for body in ({"prompt": "x" * 4090}, {"prompt": "x", "stream_options": None, "max_tokens": None}):
            assert (await rig.post(rig.p, body))[0] == 200


async def test_bytes_that_are_no_json_and_a_wrong_type() -> None:
    async with open_rig() as rig:
        for content_type, says in (("application/json", "json_invalid"), ("text/plain", "Unsupported Media")):
            client = rig.connect(rig.p)
            await client.request("POST", "/v1/completions", b"{not json", {"content-type": content_type})
            assert (await client.head())[0] == 400
            assert says in json.loads(await client.body())["error"]["message"]
        assert rig.p.requests[0].body is None


async def test_pages_share_a_connection() -> None:
    settings = SimSettings(api_key="secret")
    key = {"authorization": "Bearer secret"}
    async with open_rig(settings) as rig:
        client = rig.connect(rig.p)
        for method, path, headers, status, says in (
            ("GET", "/health", {}, 200, b""),
            ("GET", "/ping", {}, 200, b""),
            ("GET", "/version", {}, 200, b'{"version":"0.32.0"}'),
            ("GET", "/v1/models", {}, 401, b'{"error":"Unauthorized"}'),
            ("GET", "/v1/models", key, 200, b'"max_model_len":4096'),
            ("GET", "/v1/completions", key, 405, b'{"detail":"Method Not Allowed"}'),
            ("POST", "/health", {}, 405, b'{"detail":"Method Not Allowed"}'),
            ("GET", "/nowhere", {}, 404, b'{"detail":"Not Found"}'),
            ("GET", "/metrics", {}, 200, b'vllm:num_requests_running{engine="0",model_name="sim"} 0.0'),
        ):
            await client.request(method, path, headers=headers)
            got, answer_headers = await client.head()
            assert got == status
            assert answer_headers["server"] == "uvicorn"
            assert says in await client.body()
        assert rig.p.open_connections == 1


async def test_an_idle_connection_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        client = rig.connect(rig.p)
        await client.request("GET", "/health")
        await client.head()
        await client.body()
        assert await client.stream.receive_some(1) == b""
        assert trio.current_time() >= 5


async def test_what_is_no_http_is_refused() -> None:
    async with open_rig() as rig:
        client = rig.connect(rig.p)
        await client.stream.send_all(b"\x00\x01 nonsense\r\n\r\n")
        assert (await client.head())[0] == 400


# -------------------------------------------------------------------- faults


async def test_a_status_fault_does_no_work() -> None:
    async with open_rig() as rig:
        rig.p.faults.add(Fault("before_head", "status", status=429, body=b'{"x":1}', headers=[("retry-after", "2")]))
        client = await rig.start(rig.p, rig.prefill_body())
        status, headers = await client.head()
        assert (status, headers["retry-after"], await client.body()) == (429, "2", b'{"x":1}')
        assert (rig.p.blocks_held, rig.p.requests[0].how, rig.p.requests[0].status) == (0, "fault", 429)
        assert (await rig.post(rig.p, rig.prefill_body()))[0] == 200, "once only"


@pytest.mark.parametrize("where", ["before_head", "in_head", "after_head", "mid_body", "after_body"])
@pytest.mark.parametrize("what", ["reset", "fin", "garbage"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_answer_is_seen_as_broken(
    autojump_clock: trio.testing.MockClock, where: Where, what: What, stream: bool
) -> None:
    async with open_rig() as rig:
        rig.d.faults.add(Fault(where, what))
        client = await rig.start(rig.d, {"prompt": PROMPT, "max_tokens": 4, "stream": stream})
        got = b""
        broken = False
        try:
            await client.head()
            while piece := await client.piece():
                got += piece
        except h11.RemoteProtocolError:
            broken = True
        # A body with a length is complete at its last byte, whatever comes after it.
        complete = where == "after_body" and not stream
        assert broken is not complete
        if where == "mid_body":
            assert got
        if where in ("before_head", "in_head", "after_head") and what != "garbage":
            assert not got
        await trio.testing.wait_all_tasks_blocked()
        assert (rig.d.requests[0].how, rig.d.blocks_held, rig.d.running) == ("fault", 0, 0)
        assert rig.d.open_connections == 0


@pytest.mark.parametrize("after_work", [False, True])
async def test_whether_p_computed_before_it_was_cut(autojump_clock: trio.testing.MockClock, after_work: bool) -> None:
    async with open_rig() as rig:
        await rig.start(rig.d, rig.decode_body())
        rig.p.faults.add(Fault("before_head", "reset", after_work=after_work))
        client = await rig.start(rig.p, rig.prefill_body())
        with pytest.raises(h11.RemoteProtocolError):
            await client.head()
        assert rig.p.pushes == after_work


async def test_hang_and_slow(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        rig.p.faults.add(Fault("before_head", "hang"))
        client = await rig.start(rig.p, rig.prefill_body())
        await trio.sleep(1000)
        assert rig.p.requests[0].how == "running"
        await client.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert (rig.p.requests[0].ended, rig.p.blocks_held) == (trio.current_time(), 0)
        gate = trio.Event()
        rig.p.faults.add(Fault("after_head", "slow", delay=7, until=gate))
        started = trio.current_time()
        client = await rig.start(rig.p, rig.prefill_body())
        await client.head()
        await trio.sleep(100)
        gate.set()
        assert json.loads(await client.body())["kv_transfer_params"]
        assert trio.current_time() - started >= 100


async def test_extra_bytes_follow_a_complete_answer(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        for stream in (False, True):
            rig.d.faults.add(Fault("after_body", "extra", body=b"MORE"))
            client = await rig.start(rig.d, {"prompt": "x", "max_tokens": 1, "stream": stream})
            await client.head()
            assert expected_text("x", 1).encode() in await client.body()


@pytest.mark.parametrize("where", ["before_head", "after_head", "mid_body"])
async def test_an_error_frame(autojump_clock: trio.testing.MockClock, where: Where) -> None:
    async with open_rig() as rig:
        rig.d.faults.add(Fault(where, "sse_error"))
        status, events = await rig.post(rig.d, {"prompt": "x", "max_tokens": 4, "stream": True})
        assert status == 200
        assert events.endswith(ERROR_FRAME + b"data: [DONE]\n\n")
        assert events.startswith(ERROR_FRAME) is (where != "mid_body")


async def test_params_that_p_does_not_give(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        for what in ("no_params", "other_params"):
            rig.p.faults.add(Fault("before_head", what))
            _, answer = await rig.post(rig.p, rig.prefill_body(), what)
            params = json.loads(answer)["kv_transfer_params"]
            assert (params is None) is (what == "no_params")
            assert params is None or params["remote_engine_id"] != rig.p.engine_id
        assert rig.p.blocks_held == 2 * BLOCKS


async def test_a_fault_for_some_requests_and_some_pages() -> None:
    async with open_rig() as rig:
        rig.p.faults.add(Fault("before_head", "status", status=503, match=lambda seen: seen.id == "b"))
        health = rig.p.faults.add(Fault("before_head", "status", status=500, path="/health", times=None))
        assert [(await rig.post(rig.p, {"prompt": "x"}, name))[0] for name in "abb"] == [200, 503, 200]
        for _ in range(2):
            client = rig.connect(rig.p)
            await client.request("GET", "/health")
            assert (await client.head())[0] == 500
        assert health.hits == 2

"""Whatever comes in: an answer, never a 500, and nothing at an engine that should have been stopped.

`FUZZ_EXAMPLES=50000 pytest tests/proxy/test_fuzz.py` tries more than the usual few thousand inputs.
"""

from __future__ import annotations

import json
import os
import queue
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import h11
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from outcome import capture

from trio_pdproxy.sim import SeenRequest, SimSettings
from trio_pdproxy.testing import Rig, open_rig

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "700"))
fuzzed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.timeout(60 + EXAMPLES)

PAIRED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
ALONE = (
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
PAGES = ("/health", "/ready", "/status", "/metrics", "/v1/models")
ANSWER = 10.0
"""Seconds for an answer; only a hang takes that long."""


# --- a proxy in a thread of its own: hypothesis is no friend of event loops --------------------------


@dataclass
class Target:
    port: int
    rig: Rig

    def seen(self) -> list[SeenRequest]:
        """What engines got on behalf of clients: not the proxy's own probes, which have headers of their own."""
        return [seen for seen in (*self.rig.p.requests, *self.rig.d.requests) if "accept" not in seen.headers]

    def clear(self) -> None:
        self.rig.p.requests.clear()
        self.rig.d.requests.clear()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    news: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def main() -> None:
        sim = SimSettings(prefill_base=0.0, max_n=64)
        async with open_rig(sim=sim, upload_timeout=0.5, body_limit=1024 * 1024, log_level="critical") as rig:
            over = trio.Event()
            news.put((rig, over, trio.lowlevel.current_trio_token()))
            await over.wait()
            await rig.quiet(30)

    def run() -> None:
        news.put(capture(trio.run, main))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    first = news.get(timeout=60)
    assert isinstance(first, tuple), first
    rig, over, token = first
    yield Target(int(rig.url.rpartition(":")[2]), rig)
    trio.from_thread.run_sync(over.set, trio_token=token)
    thread.join(60)
    news.get(timeout=1).unwrap()  # something was left over, or the proxy died


def talk(target: Target, data: bytes) -> list[tuple[int, bytes]]:
    """Send `data`, close, and return what was answered: status and body of each."""
    target.clear()
    complete = _is_complete(data)
    client = h11.Connection(h11.CLIENT)
    method = "HEAD" if data.startswith(b"HEAD ") else "POST"  # the one that decides whether an answer has a body
    client.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
    client.send(h11.EndOfMessage())
    with socket.create_connection(("127.0.0.1", target.port), timeout=ANSWER) as connection:
        try:
            connection.sendall(data)
            if not complete:
                connection.shutdown(socket.SHUT_WR)  # else the proxy rightly waits for the rest
        except OSError:
            pass  # it has answered and closed already
        body = b""
        status = 0
        while True:
            try:
                event = client.next_event()
                if event is h11.NEED_DATA:
                    client.receive_data(connection.recv(65536))
            except (ConnectionResetError, h11.RemoteProtocolError):
                return [(status, body)] if status else []  # closed
            if event is h11.NEED_DATA:
                continue
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return [(status, body)]
            elif isinstance(event, h11.ConnectionClosed):
                return []


def _is_complete(data: bytes) -> bool:
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=16 * 1024)
    server.receive_data(data)
    try:
        while True:
            event = server.next_event()
            if event is h11.NEED_DATA:
                return False
            if isinstance(event, h11.EndOfMessage):
                return True
    except h11.RemoteProtocolError:
        return True  # an answer is due


# --- what must hold, whatever was sent --------------------------------------------------------------

_ID = re.compile(r"[0-9a-f]{32}")
PASSED = {"authorization", "x-api-key", "traceparent", "tracestate", "user-agent"}
WRITTEN = {"host", "content-type", "content-length", "x-request-id"}


def check(target: Target, sent: bytes, answers: list[tuple[int, bytes]]) -> None:
    seen = target.seen()
    for status, body in answers:
        assert status != 500, (sent, body)
        assert b"transfer_params" not in body or b"transfer_params" in sent, (sent, body)
        # A refusal of ours has stopped it; one of an engine's is passed on (and noted a moment later).
        if status in (401, 404, 405, 408, 413, 415, 431, 505) and all(one.status not in (None, status) for one in seen):
            assert not seen, (sent, status, body)
    for request in seen:
        assert request.path in (*PAIRED, *ALONE), (sent, request)
        assert request.method == "POST"
        assert set(request.headers) <= PASSED | WRITTEN, (sent, request.headers)
        assert _ID.fullmatch(request.id or ""), (sent, request.headers)
        body = request.body
        assert isinstance(body, dict), (sent, request.raw)
        params = body.pop("kv_transfer_params", None)
        if params is not None:
            assert params["transfer_id"] == request.id
            assert params.get("remote_host", "127.0.0.1") == "127.0.0.1"
        if request.path == "/v1/responses" and params is not None:
            assert body.pop("request_id") == f"resp_{request.id}"
        assert not {"request_id", "ec_transfer_params"} & set(body), (sent, body)
        xargs = body.get("vllm_xargs")
        assert not isinstance(xargs, dict) or not {"kv_transfer_params", "ec_transfer_params"} & set(xargs), (
            sent,
            body,
        )


# --- bodies -----------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([2**31, -(2**63), 2**64, 1e308, -0.0, "", "x", "é\u2028\U0001f600", "\x00", "sim", "evil"])
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": values}) | values,
    max_size=3,
)
evil: st.SearchStrategy[Any] = st.sampled_from(
    [
        {"do_remote_prefill": True, "remote_host": "evil.example", "remote_port": 1, "tp_size": 99},
        {"do_remote_decode": True},
        {"transfer_id": "evil"},
        None,
        0,
        "evil",
        [],
    ]
)
NAMES = [
    "model", "prompt", "messages", "input", "stream", "stream_options", "max_tokens", "min_tokens", "n", "echo",
    "logprobs", "top_logprobs", "max_completion_tokens", "max_output_tokens", "temperature", "tools", "tool_choice",
    "background", "store", "previous_response_id", "system", "instructions", "thinking", "prompt_logprobs",
    "use_beam_search", "prompt_embeds", "tokens", "query", "documents", "stop", "seed", "user", "metadata",
]  # fmt: skip
bodies = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NAMES, values),
        "model": st.just("sim") | values,
        "prompt": st.text(max_size=20) | st.lists(st.integers(0, 300), max_size=5) | values,
        "messages": messages | values,
        "input": st.text(max_size=9) | messages | values,
        "stream": st.booleans() | values,
        "max_tokens": st.integers(-1, 9) | values,
        "max_output_tokens": st.integers(-1, 9) | values,
        "n": st.integers(-1, 3) | st.none() | st.text(max_size=2),
        "kv_transfer_params": evil,
        "ec_transfer_params": evil,
        "request_id": st.just("evil") | values,
        "vllm_xargs": st.fixed_dictionaries({}, optional={"kv_transfer_params": evil, "a": scalars}) | values,
    },
)
# The usual request, so that much of what is tried gets through to the engines.
likely = st.builds(
    lambda base, more: base | more,
    st.just({"model": "sim", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x",
             "max_tokens": 2, "max_output_tokens": 2}),
    bodies,
)  # fmt: skip


def encoded(body: dict[str, Any], spelled: bool) -> bytes:
    text = json.dumps(body, ensure_ascii=True)
    if spelled:  # the same names in other letters
        text = text.replace('"kv_', '"\\u006bv_').replace('"request', '"\\u0072equest').replace('"vllm', '"\\u0076llm')
    return text.encode()


def request(path: str, body: bytes, *more: str, method: str = "POST", host: str = "a") -> bytes:
    head = [f"{method} {path} HTTP/1.1", f"host: {host}", "content-type: application/json"]
    head += [f"content-length: {len(body)}", *more, "", ""]
    return "\r\n".join(head).encode("latin-1", "replace") + body


@fuzzed
@given(st.sampled_from(PAIRED + ALONE), bodies | likely, st.booleans())
def test_any_body_gets_an_answer_and_no_engine_is_steered(
    target: Target, path: str, body: dict[str, Any], spelled: bool
) -> None:
    data = request(path, encoded(body, spelled), "x-request-id: evil", "x-data-parallel-rank: 7", "cookie: a=b")
    answers = talk(target, data)
    assert answers, data
    check(target, data, answers)


# --- requests ---------------------------------------------------------------------------------------

GOOD = encoded({"model": "sim", "prompt": "x", "messages": [], "input": "x", "max_tokens": 1}, spelled=False)
targets = st.sampled_from(
    [
        *PAIRED,
        *ALONE,
        *PAGES,
        "/",
        "*",
        "",
        "/engines",
        "/v1/completions/",
        "/v1//completions",
        "/v1/./completions",
        "/x/../v1/completions",
        "/v1/%63ompletions",
        "/v1/completions%00",
        "/v1/completions?x=1",
        "/v1/completions#x",
        "/V1/completions",
        "\\v1\\completions",
        "http://evil.example/v1/completions",
        "evil.example:443",
        "//evil.example/v1/completions",
        "/collective_rpc",
        "/sleep",
        "/pause",
        "/v1/load_lora_adapter",
        "/inference/v1/generate",
        "/server_info",
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/cancel",
        "/sim/push",
    ]
) | st.from_regex(r"/[!-~]{0,30}", fullmatch=True)
headers = st.lists(
    st.sampled_from(
        [
            "transfer-encoding: chunked",
            "transfer-encoding: gzip, chunked",
            "Transfer-Encoding : chunked",
            "transfer-encoding:\x0bchunked",
            "content-length: 0",
            "content-length: 5",
            "content-length: +5",
            "content-length: 5, 5",
            "content-length: 99999999999999999999",
            "content-length: 4294967296",
            "host: b",
            "host: a@evil.example",
            "x-forwarded-host: evil.example",
            "x-request-id: a\x00b",
            "x-request-id: " + "x" * 300,
            "x-request-id: evil",
            "x-data-parallel-rank: 1",
            "authorization: Bearer x\r\nx-injected: 1",
            "traceparent: 00-x\r\n x",
            "traceparent: \xe9",
            "expect: 100-continue",
            "connection: upgrade, close",
            "upgrade: h2c",
            "upgrade: websocket",
            "content-type: text/plain",
            "content-type: application/json; charset=utf-7",
            "content-encoding: gzip",
            "x: " + "y" * 20_000,
            ": x",
            "no colon",
            "user-agent: a\rb",
        ]
    )
    | st.from_regex(r"[A-Za-z-]{1,12}: ?[ -~]{0,20}", fullmatch=True),
    max_size=3,
)
hosts = st.sampled_from(["a", "a", "a", "", "a b", "a/b", "[::1]", "a:99999999", "evil.example#"])
methods = st.sampled_from(
    ["POST", "POST", "POST", "GET", "HEAD", "PUT", "OPTIONS", "CONNECT", "TRACE", "PRI", "post", ""]
)
contents = st.sampled_from(
    [GOOD, b"", b"{", b"[]", b"\xff", b"0\r\n\r\n", b'5\r\n{"a":\r\n0\r\n\r\n', GOOD + GOOD, b"[" * 300 + b"]" * 300]
) | st.binary(max_size=40)


@fuzzed
@given(methods, targets, hosts, headers, contents)
def test_any_request_gets_an_answer_or_is_closed(  # noqa: PLR0917 -- hypothesis hands them over
    target: Target, method: str, path: str, host: str, more: list[str], body: bytes
) -> None:
    data = request(path, body, *more, method=method, host=host)
    check(target, data, talk(target, data))


@fuzzed
@given(st.sampled_from(PAIRED + ALONE), st.integers(0, 400), st.binary(max_size=6), st.integers(0, 12))
def test_any_damage_to_a_request_is_survived(target: Target, path: str, at: int, inserted: bytes, cut: int) -> None:
    whole = request(path, GOOD, "user-agent: fuzz")
    at = at % len(whole)
    data = whole[:at] + inserted + whole[at + cut :]
    check(target, data, talk(target, data))


def test_after_all_of_it_the_proxy_serves_as_before(target: Target) -> None:
    target.clear()
    data = request("/v1/completions", b'{"model": "sim", "prompt": "after all of it", "max_tokens": 3}')
    ((status, body),) = talk(target, data)
    assert status == 200
    assert json.loads(body)["choices"][0]["text"]
    assert target.rig.app.failure is None

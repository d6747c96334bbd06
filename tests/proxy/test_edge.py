"""What somebody who means harm would try at the edge: each is tried, each is refused or without effect."""

from __future__ import annotations

import re

import pytest
import trio

from trio_pdproxy.core.plan import DEPTH_LIMIT
from trio_pdproxy.testing import Rig, open_rig
from trio_pdproxy.web import guard

JSON = {"content-type": "application/json"}
HIDDEN = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 31\r\n\r\n"
HIDDEN += b'{"model": "sim", "prompt": "h"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


async def exchanged(rig: Rig, data: bytes, seconds: float = 0.5) -> bytes:
    """Everything that comes back for `data` until the connection is closed or silent."""
    host, port = rig.url.removeprefix("http://").split(":")
    answer = b""
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(data)
        with trio.move_on_after(seconds):
            while piece := await stream.receive_some():
                answer += piece
    return answer


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN),
        b"Content-Length: 0, %d\r\n\r\n" % len(HIDDEN),
        b"Content-Length: +0\r\n\r\n",
        b"Content-Length: 0x0\r\n\r\n",
        b"Content-Length : 0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b" Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_no_second_request_can_be_smuggled_behind_a_first_one(framing: bytes) -> None:
    """Two parsers that do not agree where the first ends would see the second, and give its answer to somebody else."""
    async with open_rig() as rig:
        before = len(rig.d.requests)
        answer = await exchanged(rig, HEAD + framing + HIDDEN)
        assert all(status in (b"400", b"415", b"501") for status in re.findall(rb"HTTP/1\.1 (\d+)", answer)), answer
        assert len(rig.d.requests) == before, "the hidden one has reached an engine"


async def test_a_path_that_others_may_read_differently_is_no_path() -> None:
    async with open_rig() as rig:
        before = len(rig.d.requests)
        for path in (
            b"/v1/completions#a",
            b"/v1/completions;a",
            b"/v1/completions%2f",
            b"/v1/completions/..",
            b"/./v1/completions",
            b"/v1%2fcompletions",
            b"//v1/completions",
            b"/V1/COMPLETIONS",
            b"http://a/v1/completions",
            b"/collective_rpc",
            b"/v1/load_lora_adapter",
            b"/inference/v1/generate",
            b"/metrics/../v1/completions",
            b"/engines",
        ):
            body = b'{"model": "sim", "prompt": "h"}'
            head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            answer = await exchanged(rig, head % (path, len(body)) + body, 0.3)
            assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400", b"HTTP/1.1 405")), (path, answer)
        assert len(rig.d.requests) == before


@pytest.mark.parametrize(
    "header",
    [
        b"X-Request-Id: a\r\nX-Injected: b",
        b"X-Request-Id: a\rX-Injected: b",
        b"X-Request-Id: a\x00b",
        b"X-Request-Id: a b",
        b"X-Request-Id: \xe9",
        b"X-Request-Id: " + b"a" * 201,
        b"Traceparent: 00-a\r\n X-Injected: b",
        b"Authorization: Bearer a\r\n\tX-Injected: b",
        b"User-Agent: a\r\nX-Injected: b",
        b"X-Data-Parallel-Rank: 7",
        b"X-Forwarded-For: evil",
        b"Connection: x-request-id, content-type",
        b"Cookie: X-Injected=b",
    ],
)
async def test_no_header_of_a_clients_becomes_another_one_anywhere(header: bytes) -> None:
    async with open_rig() as rig:
        before = len(rig.d.requests)
        body = b'{"model": "sim", "prompt": "h", "max_tokens": 1}'
        data = HEAD + header + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        answer = await exchanged(rig, data)
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert b"x-injected" not in head
        assert b"\r\nx-request-id: " in head or head.startswith(b"http/1.1 400")
        await rig.quiet()
        for seen in (*rig.p.requests, *rig.d.requests[before:]):
            assert "x-injected" not in seen.headers
            assert "x-data-parallel-rank" not in seen.headers
            assert "cookie" not in seen.headers
            assert len(seen.headers["x-request-id"]) == 32


async def test_json_that_is_deep_enough_to_hurt_is_refused_and_what_people_write_is_not() -> None:
    async with open_rig() as rig:
        for depth, status in ((DEPTH_LIMIT - 1, 200), (DEPTH_LIMIT, 400), (100_000, 400)):
            for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
                inner = opened * depth + b"1" + closed * depth
                content = b'{"model": "sim", "prompt": "x", "metadata": ' + inner + b"}"
                response = await rig.client.post("/v1/completions", content=content, headers=JSON)
                assert response.status_code == status, (depth, response.text[:200])
        wide = b'{"model": "sim", "prompt": "x", "metadata": [' + b",".join([b"[{}]"] * 5000) + b"]}"
        assert (await rig.client.post("/v1/completions", content=wide, headers=JSON)).status_code == 200
        quoted = b'{"model": "sim", "prompt": "' + b'[{\\"[' * 500 + b'"}'
        assert (await rig.client.post("/v1/completions", content=quoted, headers=JSON)).status_code == 200


async def test_an_upload_that_only_trickles_ends_as_one_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "SLOWEST_UPLOAD", 100)
    async with open_rig(upload_timeout=0.5) as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        answer = b""
        async with await trio.open_tcp_stream(host, int(port)) as stream, trio.open_nursery() as nursery:

            async def trickle() -> None:
                await stream.send_all(HEAD + b"Content-Length: 100000\r\n\r\n")
                while True:
                    await stream.send_all(b" ")
                    await trio.sleep(0.1)

            async def listen() -> None:
                nonlocal answer
                answer = bytes(await stream.receive_some())
                nursery.cancel_scope.cancel("answered")

            with trio.fail_after(20):
                nursery.start_soon(trickle)
                await listen()
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        await rig.quiet()


async def test_too_large_a_head_is_refused_and_no_engine_is_asked() -> None:
    async with open_rig() as rig:
        answer = await exchanged(rig, HEAD + b"X: " + b"y" * 100_000 + b"\r\n\r\n")
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
        answer = await exchanged(rig, HEAD + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + b"\r\n")
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer
        assert not rig.d.requests

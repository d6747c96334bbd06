"""Bad input gets a clear error in OpenAI's shape and costs no engine anything."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import trio

from trio_pdproxy.testing import Rig, open_rig, until

GOOD = b'{"model": "sim", "prompt": "x"}'
JSON = {"content-type": "application/json"}
UPLOAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


async def refused(
    rig: Rig,
    status: int,
    *,
    content: bytes | AsyncIterator[bytes] = GOOD,
    method: str = "POST",
    path: str = "/v1/completions",
    headers: dict[str, str] = JSON,
) -> dict[str, str | None]:
    """Send it; it is refused with `status` and nothing went to any engine. The error's members."""
    before = len(rig.p.requests), len(rig.d.requests)
    response = await rig.client.request(method, path, content=content, headers=headers)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, str | None] = msgspec.json.decode(response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    await rig.quiet()
    assert (len(rig.p.requests), len(rig.d.requests)) == before
    return error


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": "sim", "prompt": "x"} x', "invalid_json"),
        (b'{"model": "sim", "prompt": NaN}', "invalid_json"),
        (b"[]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b"7", "not_an_object"),
        (b'{"prompt": "\xff"}', "invalid_utf8"),
        (b'{"\xff": 1, "prompt": "x"}', "invalid_utf8"),
        (b'{"prompt": ' + b"[" * 100_000, "too_deep"),
        (b'{"prompt": "x", "a": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, "too_deep"),
        (b'{"model": "sim"}', "missing_field"),
        (b'{"prompt": null}', "missing_field"),
        (b'{"prompt": 7}', "wrong_type"),
        (b'{"prompt": {"a": 1}}', "wrong_type"),
        (b'{"prompt": "x", "stream": "yes"}', "wrong_type"),
        (b'{"prompt": "x", "stream": 1}', "wrong_type"),
        (b'{"prompt": "x", "model": 1}', "wrong_type"),
        (b'{"prompt": "x", "max_tokens": "many"}', "wrong_type"),
        (b'{"prompt": "x", "n": []}', "wrong_type"),
        (b'{"prompt": "x", "stream_options": true}', "wrong_type"),
        (b'{"prompt": "x", "vllm_xargs": "x"}', "wrong_type"),
    ],
)
async def test_a_bad_completion_is_a_400(content: bytes, code: str) -> None:
    async with open_rig() as rig:
        error = await refused(rig, 400, content=content)
        assert error["code"] == code
        assert error["type"] == "invalid_request_error"


async def test_a_bad_chat_is_a_400() -> None:
    async with open_rig() as rig:
        for content, code in (
            (b'{"model": "sim"}', "missing_field"),
            (b'{"messages": "hello"}', "wrong_type"),
            (b'{"messages": null}', "wrong_type"),
            (b'{"messages": [], "max_completion_tokens": "x"}', "wrong_type"),
        ):
            error = await refused(rig, 400, content=content, path="/v1/chat/completions")
            assert error["code"] == code
            assert error["param"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
    ],
)
async def test_another_content_type_is_a_415(headers: dict[str, str]) -> None:
    async with open_rig() as rig:
        assert (await refused(rig, 415, headers=headers))["code"] == "unsupported_media_type"


async def test_json_with_its_charset_is_taken() -> None:
    async with open_rig() as rig:
        headers = {"content-type": 'application/json; charset="UTF-8"'}
        response = await rig.client.post("/v1/completions", content=GOOD, headers=headers)
        assert response.status_code == 200


async def test_an_unknown_path_is_a_404_and_a_wrong_method_a_405() -> None:
    async with open_rig() as rig:
        for path in ("/", "/v1", "/v1/completions/", "/v1//completions", "/v2/completions", "/v1/%63ompletions"):
            assert (await refused(rig, 404, path=path))["code"] == "not_found"
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert (await refused(rig, 405, method=method))["code"] == "method_not_allowed"
        response = await rig.client.get("/v1/completions")
        assert response.headers["allow"] == "POST"
        response = await rig.client.post("/health")
        assert response.status_code == 405


async def test_a_body_over_the_limit_is_a_413_however_it_is_declared() -> None:
    async with open_rig(body_limit=1024) as rig:
        large = b'{"prompt": "' + b"x" * 2000 + b'"}'
        assert (await refused(rig, 413, content=large))["code"] == "body_too_large"

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(large), 100):
                yield large[start : start + 100]

        assert (await refused(rig, 413, content=pieces()))["code"] == "body_too_large"
        assert (await rig.post(prompt="x" * 800)).status_code == 200


async def test_an_upload_that_stands_still_is_a_408() -> None:
    async with open_rig(upload_timeout=0.1) as rig:
        answer = await raw(rig, UPLOAD)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"upload_timeout"' in answer
        await rig.quiet()
        assert rig.d.requests == []


async def raw(rig: Rig, data: bytes) -> bytes:
    """What comes back for `data` on a plain connection, until it is closed or silent."""
    host, port = rig.url.removeprefix("http://").split(":")
    answer = b""
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        await stream.send_all(data)
        with trio.move_on_after(1):
            while piece := await stream.receive_some():
                answer += piece
                if b'"error"' in answer:
                    break
    return answer


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a b\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a@b\r\n", 400),
        (b"POST http://elsewhere/v1/completions HTTP/1.1\r\nHost: a\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\n", 400),
        (b"POST /v1/../v1/completions HTTP/1.1\r\nHost: a\r\n", 404),
        (b"nonsense\r\n", 400),
    ],
)
async def test_what_two_parsers_could_read_differently_is_refused(head: bytes, status: int) -> None:
    async with open_rig() as rig:
        before = len(rig.d.requests)
        answer = await raw(rig, head + b"Content-Type: application/json\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert len(rig.d.requests) == before


async def test_a_client_that_leaves_while_uploading_costs_nothing() -> None:
    async with open_rig() as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            await stream.send_all(UPLOAD)
            await until(lambda: rig.app.active, 1)
        await rig.quiet()
        assert rig.report.outcome == "disconnect"
        assert rig.d.requests == []

"""Requests that come to the app straight and those that h11 reads: nobody can tell them apart, in any order."""

from __future__ import annotations

import gc
import os
import re
import time

import pytest
import trio

from tests.faults.client import Client, connected, read_answer, request
from tests.proxy.test_change import administered
from trio_pdproxy import serve
from trio_pdproxy.sim import Fault, SimSettings, expected_text, open_cluster
from trio_pdproxy.testing import Rig, open_rig, until
from trio_pdproxy.testing.schedules import masked
from trio_pdproxy.web import plain

BY_H11 = "TE: trailers\r\n"
"""Makes a request an unusual one."""
KINDS = pytest.mark.parametrize("kind", ["", BY_H11], ids=["straight", "by h11"])
DATE = re.compile(rb"date: [^\r]+")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The paths of the requests that come straight."""
    seen: list[bytes] = []
    begin = plain.PlainRequest.run

    async def run(self: plain.PlainRequest, app: plain.App, scope: dict[str, object]) -> None:
        seen.append(bytes(scope["raw_path"]))  # type: ignore[call-overload]
        await begin(self, app, scope)

    monkeypatch.setattr(plain.PlainRequest, "run", run)
    return seen


async def raw_answer(rig: Rig, data: bytes) -> tuple[bytes, str, bytes]:
    """The head, the framing, and the body without it: where a stream's chunks end is chance."""
    async with connected(rig.url) as client:
        await client.send(data)
        while (got := read_answer(client.raw, closed=client.ended)).end == "open":
            await client.more()
        assert (got.end, got.rest) == ("complete", b"")
        head = client.raw.partition(b"\r\n\r\n")[0]
        return DATE.sub(b"date: now", masked(head)), got.framing, masked(got.body)


@pytest.mark.skipif("PUBLIC_SENDS" in os.environ, reason="there all is h11's")
async def test_the_client_sees_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = counted(monkeypatch)
    bodies: list[tuple[str, object]] = [
        ("/v1/completions", {"model": "sim", "prompt": "same", "max_tokens": 3}),
        ("/v1/completions", {"model": "sim", "prompt": "same", "max_tokens": 3, "stream": True}),
        ("/v1/completions", {"model": "sim", "prompt": "same", "max_tokens": -1}),
        ("/v1/completions", {"model": "nope", "prompt": "same"}),
        ("/v1/completions", b"no json"),
        ("/v1/completions", b""),
        ("/v1/completions", {"prompt": "x" * 10_000}),
        ("/v1/chat/completions", {"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/messages", {"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ]
    async with open_rig(body_limit=5000) as rig:
        for path, body in bodies:
            before = len(straight)
            usual = await raw_answer(rig, request(body, path=path))
            assert straight[before:] == [path.encode()]
            assert usual == await raw_answer(rig, request(body, path=path, headers=BY_H11))
            assert len(straight) == before + 1


async def ask(client: Client, prompt: str, headers: str = "") -> None:
    await client.send(request({"model": "sim", "prompt": prompt, "max_tokens": 3, "stream": True}, headers=headers))


async def is_served(client: Client, prompt: str) -> None:
    got = await client.answer()
    assert (got.status, got.end, got.text) == (200, "complete", expected_text(prompt, 3))


async def test_both_kinds_take_turns_on_one_connection() -> None:
    async with open_rig() as rig, connected(rig.url) as client:
        kinds = ["", BY_H11, BY_H11, "", "", BY_H11, ""]
        for number, headers in enumerate(kinds):
            await ask(client, f"{number}", headers)
            await is_served(client, f"{number}")
        for number, headers in enumerate(kinds):  # all before the first answer
            await ask(client, f"{number}", headers)
        for number in range(len(kinds)):
            await is_served(client, f"{number}")


@pytest.mark.parametrize("pause", [0.0, 0.002])
async def test_a_request_may_come_in_any_pieces(pause: float) -> None:
    data = request({"model": "sim", "prompt": "pieces", "max_tokens": 3})
    head = data.index(b"\r\n\r\n") + 4
    cuts = [1, 30, head - 3, head, head + 1, len(data) - 1]
    async with open_rig() as rig, connected(rig.url) as client:
        client.stream.setsockopt(6, 1, 1)  # TCP_NODELAY
        for cut in cuts:
            await client.send(data[:cut])
            await trio.sleep(pause)
            await client.send(data[cut:])
            await is_served(client, "pieces")
        for at in range(0, len(data), 7):
            await client.send(data[at : at + 7])
            await trio.sleep(pause / 10)
        await is_served(client, "pieces")


def prefill_goes_on(rig: Rig, *, times: int = 1) -> trio.Event:
    """The next prefill legs have not ended before the event is set."""
    free = trio.Event()
    for _ in range(times):
        rig.p.faults.add(Fault("after_head", "slow", until=free))
    return free


async def test_the_debts_of_one_request_do_not_hide_that_the_next_ones_client_leaves() -> None:
    """Both come on one connection: the first is answered, its prefill leg has not ended; then it does."""
    async with open_rig(sim=SimSettings(itl=0.005), drain_grace=30) as rig:
        free = prefill_goes_on(rig)
        async with connected(rig.url) as client:
            await ask(client, "first")
            await is_served(client, "first")
            await client.send(request({"model": "sim", "prompt": "x", "max_tokens": 4000, "stream": True}))
            await client.until(b"data: ")
            assert rig.app.active == 2
            free.set()
            await until(lambda: rig.app.active == 1)
            await client.leave("close")
            await until(lambda: rig.d.requests[-1].how == "aborted")
        await rig.quiet()


async def test_debts_of_several_requests_do_not_keep_their_connection_from_the_next() -> None:
    async with open_rig(drain_grace=30) as rig:
        free = prefill_goes_on(rig, times=3)
        async with connected(rig.url) as client:
            for number in range(5):
                await ask(client, f"{number}")
                await is_served(client, f"{number}")
            await until(lambda: rig.app.active == 3)
            free.set()
            await until(lambda: rig.app.active == 0)
            for number in range(3):
                await ask(client, f"{number}")
                await is_served(client, f"{number}")
        await rig.quiet()


# -- the ends of connections -----------------------------------------------------------------------


@KINDS
async def test_whoever_is_refused_before_the_body_came_is_closed_on(kind: str) -> None:
    """Also where Quart-Trio, told that the client has gone, cancels who is just closing the connection."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{kind}Content-Length: 900000000\r\n\r\n".encode()
    async with open_cluster() as cluster, administered(cluster) as (rig, admin):
        for url in (rig.url, str(admin.base_url).rstrip("/")):
            async with connected(url) as client:
                await client.send(head)
                await client.until_ended()
                assert client.raw.startswith(b"HTTP/1.1 4")


@KINDS
async def test_half_a_request_is_refused(kind: str) -> None:
    async with open_rig() as rig, connected(rig.url) as client:
        await client.send(request({"model": "sim", "prompt": "half"}, headers=kind)[:-4])
        await client.leave("half_close")
        await client.until_ended()
        assert client.raw.startswith(b"HTTP/1.1 400 ")


@KINDS
async def test_an_idle_connection_is_closed_in_time_whatever_is_owed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its client sends the next request into a connection that nobody reads."""
    monkeypatch.setattr(serve, "KEEP_ALIVE", 0.3)
    async with open_rig(drain_grace=60) as rig:
        free = prefill_goes_on(rig)
        async with connected(rig.url) as client:
            await ask(client, "first", kind)
            await is_served(client, "first")
            await client.until_ended()
            assert rig.app.active == 1
        free.set()
        await rig.quiet()


@pytest.mark.skipif("PUBLIC_SENDS" in os.environ, reason="there the app has no word for it but to return")
@KINDS
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_breaks_is_cut_before_its_debts_are_settled(kind: str, n: int) -> None:
    async with open_rig(drain_grace=60, sim=SimSettings(itl=0.005)) as rig:
        free = prefill_goes_on(rig)
        rig.d.faults.add(Fault("mid_body", "reset", after=6))
        async with connected(rig.url) as client:
            body = {"model": "sim", "prompt": "x", "max_tokens": 20, "stream": True, "n": n}
            await client.send(request(body, headers=kind))
            await client.until(b"stream_broken")
            await client.until_ended()
            assert rig.app.active == 1
        free.set()
        await rig.quiet()
        assert rig.report.outcome == "cut"


@pytest.mark.skipif("PUBLIC_SENDS" in os.environ, reason="there the app has no word for it but to return")
@KINDS
@pytest.mark.parametrize("next_kind", ["", BY_H11], ids=["straight next", "by h11 next"])
async def test_a_request_behind_a_stream_that_is_cut_is_never_begun(kind: str, next_kind: str) -> None:
    """It waits for that stream's end, which does not come; debts are settled only later."""
    async with open_rig(drain_grace=60, sim=SimSettings(itl=0.005)) as rig:
        free = prefill_goes_on(rig)
        rig.d.faults.add(Fault("mid_body", "reset", after=6))
        async with connected(rig.url) as client:
            body = {"model": "sim", "prompt": "x", "max_tokens": 20, "stream": True}
            await client.send(request(body, headers=kind))
            await client.until(b"data: ")
            await ask(client, "behind it", next_kind)
            await client.until_ended()
            assert client.raw.count(b"HTTP/1.1 ") == 1
            assert rig.app.active == 1
        free.set()
        await rig.quiet()
        assert len(rig.d.requests) == 1


@pytest.mark.skipif("PUBLIC_SENDS" in os.environ, reason="there all is h11's")
async def test_an_idle_connection_holds_nothing_of_its_requests() -> None:
    async with open_rig(sim=SimSettings(max_model_len=100_000)) as rig, connected(rig.url) as client:
        for number in range(3):
            await ask(client, f"{number} " + "x" * 40_000)
            await is_served(client, f"{number} " + "x" * 40_000)
        await rig.quiet()
        rig.app.recent.clear()
        gc.collect()
        held = [thing for thing in gc.get_objects() if isinstance(thing, plain.PlainRequest)]
        # One may be left where the interpreter keeps what a finished coroutine returned last.
        assert sum(len(b"".join(one._pieces)) > 40_000 for one in held) <= 1


async def test_a_request_that_comes_when_the_idle_time_is_up_is_answered_or_never_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "KEEP_ALIVE", 0.15)
    async with open_rig() as rig:
        for number in range(8):
            async with connected(rig.url) as client:
                await ask(client, "first")
                await is_served(client, "first")
                asked = len(rig.d.requests)
                await trio.sleep(0.1)
                await client.send(request({"model": "sim", "prompt": f"{number}", "max_tokens": 3}))
                time.sleep(0.1)  # noqa: ASYNC251  the loop is late: both are there when it goes on
                with trio.fail_after(5):
                    while not client.ended and not client.raw:
                        await client.more()
                await rig.quiet()
                assert bool(client.raw) == (len(rig.d.requests) > asked)


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
async def test_bytes_behind_a_request_that_is_answered_early_hold_nothing_up(path: str) -> None:
    """Its body comes to its end as the answer closes the connection, and there is more: h11 waits for the next request
    to begin, which it never does. At which of the body's pieces that happens is chance."""
    head = f"{'GET' if path == '/health' else 'POST'} {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    large = b"401\r\n" + b"x" * 1025 + b"\r\n"
    with trio.fail_after(20):
        async with open_rig(body_limit=1024, shutdown_grace=60) as rig:
            for number in range(120):
                async with connected(rig.url) as client:
                    await client.send(head.encode() + large + b"1\r\nx\r\n" * (number % 6) + b"0\r\n\r\n\r\n")
                    await client.leave("half_close")
                    await client.until_ended()
                    assert client.raw.startswith(b"HTTP/1.1 200 " if path == "/health" else b"HTTP/1.1 413 ")

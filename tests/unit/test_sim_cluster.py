"""The engines on real sockets: listeners, resets, restarts, the side channel, the transport over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import h11
import pytest
import trio
import trio.testing

from trio_pdproxy.sim import Fault, HttpTransport, SimEngine, SimSettings, expected_text, open_cluster
from trio_pdproxy.sim.client import Client, call
from trio_pdproxy.sim.side_channel import ask

PATH = "/v1/completions"


def decode_body(p: SimEngine, **more: object) -> dict[str, object]:
    params = {"do_remote_prefill": True, "remote_request_id": "any", **p.coordinates}
    return {"prompt": "hello", "max_tokens": 3, "request_id": "r", "kv_transfer_params": params} | more


PREFILL = {
    "prompt": "hello",
    "max_tokens": 1,
    "request_id": "r",
    "kv_transfer_params": {"do_remote_decode": True},
}


async def head_and_body(client: Client) -> None:
    await client.head()
    await client.body()


async def served_by(p: SimEngine, d: SimEngine, request_id: str = "r") -> str:
    """One pair; the text that D says."""
    answers: dict[str, bytes] = {}

    async def leg(engine: SimEngine, body: object) -> None:
        status, answers[engine.role] = await call(engine.url, PATH, body)
        assert status == 200

    with trio.fail_after(5):
        async with trio.open_nursery() as legs:
            legs.start_soon(leg, p, PREFILL | {"request_id": request_id})
            legs.start_soon(leg, d, decode_body(p, request_id=request_id))
    text = json.loads(answers["decode"])["choices"][0]["text"]
    assert isinstance(text, str)
    return text


async def test_a_pair_and_the_side_channel() -> None:
    async with open_cluster(prefill=2) as cluster:
        d = cluster.decode[0]
        for p in cluster.prefill:
            assert await served_by(p, d) == expected_text("hello", 3)
            assert (p.pushes, p.blocks_held, d.blocks_held) == (1, 0, 0)
            host, _, port = p.side_channel.rpartition(":")
            with trio.fail_after(2):
                compatibility, metadata = await ask(host, int(port))
            assert metadata["engine_id"] == p.engine_id
            assert compatibility == d.core.compatibility_hash
        other = SimEngine("decode", settings=SimSettings(model="other"))
        assert other.core.compatibility_hash != d.core.compatibility_hash


async def test_a_question_for_an_unknown_rank_is_the_last_one() -> None:
    async with open_cluster() as cluster:
        p = cluster.prefill[0]
        host, _, port = p.side_channel.rpartition(":")
        for rank in ((0, 7), (0, 0)):
            with trio.move_on_after(0.15) as scope:
                await ask(host, int(port), rank)
            assert scope.cancelled_caught
        async with await trio.open_tcp_stream(p.host, p.port) as stream:
            client = Client(stream)
            await client.request("GET", "/health")
            assert (await client.head())[0] == 200


async def test_kill_resets_and_revive_comes_back_under_a_new_id() -> None:
    async with open_cluster() as cluster:
        p, d = cluster.prefill[0], cluster.decode[0]
        async with await trio.open_tcp_stream(d.host, d.port) as stream:
            client = Client(stream)
            await client.post(PATH, decode_body(p, stream=True))
            assert (await client.head())[0] == 200
            old, port, side = d.engine_id, d.port, d.side_channel
            await d.kill()
            with pytest.raises(trio.BrokenResourceError):
                await client.piece()
        assert d.requests[0].how == "aborted"
        with pytest.raises(OSError, match=r".*"):
            await call(d.url, PATH, {"prompt": "x"})
        await d.revive()
        assert (d.engine_id != old, d.port, d.side_channel, d.blocks_held) == (True, port, side, 0)
        # Not the old id: its registration waits at P for a D that is no more.
        assert await served_by(p, d, "fresh") == expected_text("hello", 3)
        await p.restart(same_id=True)
        assert p.alive


async def test_a_fatal_request_ends_the_server() -> None:
    async with open_cluster() as cluster:
        d = cluster.decode[0]
        fatal = {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}
        assert (await call(d.url, PATH, fatal))[0] == 500
        await trio.sleep(0.15)
        assert not d.alive
        with pytest.raises(OSError, match=r".*"):
            await call(d.url, PATH, {"prompt": "x"})
        await d.revive()
        assert (await call(d.url, PATH, {"prompt": "x"}))[0] == 200


async def test_reset_and_fin_differ_on_sockets() -> None:
    async with open_cluster() as cluster:
        d = cluster.decode[0]
        for what, error in (("reset", trio.BrokenResourceError), ("fin", h11.RemoteProtocolError)):
            d.faults.add(Fault("after_head", what))  # type: ignore[arg-type]  # a literal of the loop
            async with await trio.open_tcp_stream(d.host, d.port) as stream:
                client = Client(stream)
                await client.post(PATH, {"prompt": "x", "stream": True})
                with pytest.raises(error):
                    await head_and_body(client)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert d.open_connections == 0


async def test_a_half_closed_connection_is_a_disconnect() -> None:
    async with open_cluster() as cluster:
        p, d = cluster.prefill[0], cluster.decode[0]
        async with await trio.open_tcp_stream(d.host, d.port) as stream:
            await Client(stream).post(PATH, decode_body(p))
            await stream.send_eof()
            with trio.fail_after(2):
                assert await stream.receive_some(1) == b""
        assert (d.requests[0].how, d.orphans) == ("aborted", 1)


@asynccontextmanager
async def strangers(handshake_timeout: float = 5.0) -> AsyncIterator[tuple[SimEngine, SimEngine]]:
    """A P and a D that share nothing but the network."""
    settings = SimSettings(handshake_timeout=handshake_timeout)
    async with trio.open_nursery() as nursery:
        p = SimEngine("prefill", settings=settings, fabric=HttpTransport())
        d = SimEngine("decode", settings=settings, fabric=HttpTransport())
        for engine in (p, d):
            await nursery.start(engine.serve)
        yield p, d
        nursery.cancel_scope.cancel("test is over")


async def test_engines_of_two_processes_pair() -> None:
    async with strangers() as (p, d):
        assert await served_by(p, d) == expected_text("hello", 3)
        assert (p.pushes, p.blocks_held, d.blocks_held) == (1, 0, 0)
        assert (await call(p.url, PATH, PREFILL))[0] == 200
        assert p.blocks_held == 1
        assert (await call(d.url, PATH, decode_body(p)))[0] == 200
        assert (p.pushes, p.blocks_held, d.blocks_held) == (2, 0, 0)


async def test_strangers_forget_as_much_as_neighbours() -> None:
    async with strangers() as (p, d):
        assert await served_by(p, d) == expected_text("hello", 3)
        before = decode_body(p)
        await p.restart(same_id=True)
        with trio.move_on_after(0.1):
            await call(d.url, PATH, before)
        await p.restart()
        assert await served_by(p, d) == expected_text("hello", 3)
        assert (d.orphans, d.blocks_held) == (1, 1)
        before["kv_transfer_params"] = {**p.coordinates, "do_remote_prefill": True, "remote_request_id": "x"}
        await d.restart()
        with trio.move_on_after(0.1):
            await call(d.url, PATH, before | {"request_id": "gone"})
        await d.restart()
        assert (await call(p.url, PATH, PREFILL | {"request_id": "gone"}))[0] == 200
        assert (p.core.failed_transfers, p.blocks_held) == (1, 1)


async def test_a_stranger_with_wrong_coordinates() -> None:
    async with strangers(0.1) as (p, d):
        wrong = decode_body(p)
        params = {**p.coordinates, "do_remote_prefill": True, "remote_request_id": "x"}
        for change in ({"remote_engine_id": "nobody"}, {"remote_port": 9}, {"tp_size": 3}):
            assert (await call(d.url, PATH, wrong | {"kv_transfer_params": params | change}))[0] == 500
        assert (d.blocks_held, d.core.failed_transfers) == (0, 3)

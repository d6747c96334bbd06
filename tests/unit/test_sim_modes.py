"""Pull mode and data-parallel ranks: over memory streams on virtual time, and on sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import trio
import trio.testing
import zmq

from trio_pdproxy.sim import (
    Cluster,
    HttpTransport,
    SimEngine,
    SimSettings,
    build_cluster,
    expected_chat,
    expected_text,
    open_cluster,
)
from trio_pdproxy.sim.client import Client, call
from trio_pdproxy.sim.faults import Fault
from trio_pdproxy.sim.side_channel import SideChannel, ask

PATH = "/v1/completions"
PROMPT = "a prompt of more than one block, so that something can be cached"
OTHER = PROMPT[::-1]
BLOCKS = 4
PULL = SimSettings(mode="pull")


class Rig:
    """Engines without sockets, and clients of them."""

    def __init__(self, nursery: trio.Nursery, cluster: Cluster) -> None:
        self.nursery = nursery
        self.cluster = cluster
        self.p = cluster.prefill[0]
        self.d = cluster.decode[0]

    async def start(self, engine: SimEngine, body: object, path: str = PATH, **headers: str) -> Client:
        """Send, and leave it there until the engine is quiet. `X_y` in a name is X-y."""
        ours, theirs = trio.testing.memory_stream_pair()
        self.nursery.start_soon(engine.serve_stream, theirs)
        client = Client(ours)
        await client.post(path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        await trio.testing.wait_all_tasks_blocked()
        return client

    async def post(
        self, engine: SimEngine, body: object, path: str = PATH, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        client = await self.start(engine, body, path, **headers)
        status, _ = await client.head()
        answer = json.loads(await client.body())
        await client.stream.aclose()
        return status, answer

    async def prefill(self, prompt: object = PROMPT, path: str = PATH, **more: Any) -> dict[str, Any]:
        """A prefill leg that succeeds; the params that P answers."""
        body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **more}
        status, answer = await self.post(self.p, body, path)
        assert status == 200
        params = answer["kv_transfer_params"]
        assert isinstance(params, dict)
        return params

    async def decode(self, params: object, prompt: object = PROMPT, **more: Any) -> tuple[int, str]:
        """A decode leg; its status, and its text or error."""
        status, answer = await self.post(self.d, decode_body(params, prompt, **more))
        return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def decode_body(params: object, prompt: object = PROMPT, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params, **more}


@asynccontextmanager
async def open_rig(settings: SimSettings, decode_settings: SimSettings | None = None) -> AsyncIterator[Rig]:
    async with trio.open_nursery() as nursery:
        yield Rig(nursery, build_cluster(settings=settings, decode_settings=decode_settings))
        nursery.cancel_scope.cancel("test is over")


def metric(page: bytes, name: str) -> float:
    (line,) = [line for line in page.decode().splitlines() if line.startswith(f"vllm:{name}{{")]
    return float(line.rpartition(" ")[2])


async def metrics_of(rig: Rig, engine: SimEngine) -> bytes:
    ours, theirs = trio.testing.memory_stream_pair()
    rig.nursery.start_soon(engine.serve_stream, theirs)
    client = Client(ours)
    await client.request("GET", "/metrics")
    await client.head()
    return await client.body()


# ---------------------------------------------------------------------- pull


async def test_d_reads_what_p_holds_and_needs_no_common_id(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL) as rig:
        params = await rig.prefill()
        assert (params["transfer_mode"], params["remote_blocks_expiry_time"]) == ("pull", None)
        assert len(params["remote_block_ids"][0]) == BLOCKS
        assert {name: params[name] for name in rig.p.coordinates} == rig.p.coordinates
        assert (rig.p.blocks_held, rig.p.pushes, rig.p.expired) == (BLOCKS, 0, 0)
        await trio.sleep(20)
        assert await rig.decode(params) == (200, expected_text(PROMPT, 4))
        for engine in rig.cluster.engines:
            assert (engine.blocks_held, engine.running, engine.waiting, engine.orphans) == (0, 0, 0, 0)
        assert (rig.d.pulls, rig.p.stale_pulls, rig.p.pushes) == (1, 0, 0)
        assert rig.d.core.prompt_tokens == {"external_kv_transfer": len(PROMPT)}
        assert metric(await metrics_of(rig, rig.d), "nixl_xfer_time_seconds_count") == 1
        assert metric(await metrics_of(rig, rig.p), "nixl_xfer_time_seconds_count") == 0


async def test_the_text_is_that_of_the_blocks_that_were_read(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL) as rig:
        assert await rig.decode(await rig.prefill(OTHER)) == (200, expected_text(OTHER, 4))
        assert await rig.decode(None) == (200, expected_text(OTHER, 4)), "and it stays"


@pytest.mark.parametrize(("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/responses", "input")])
async def test_chat_and_responses(autojump_clock: trio.testing.MockClock, path: str, field: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with open_rig(PULL) as rig:
        params = await rig.prefill(path=path, **{field: messages, "max_output_tokens": 1})
        body = {field: messages, "max_tokens": 4, "max_output_tokens": 4, "kv_transfer_params": params}
        status, answer = await rig.post(rig.d, body, path)
        assert status == 200
        assert expected_chat(messages, 4) in json.dumps(answer)
        assert (rig.d.pulls, rig.p.blocks_held, rig.d.blocks_held) == (1, 0, 0)


async def test_a_stream_reads_before_its_head(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL) as rig:
        client = await rig.start(rig.d, decode_body(await rig.prefill(), stream=True))
        assert (await client.head())[0] == 200
        assert rig.d.pulls == 1
        assert expected_text(PROMPT, 1).encode() in await client.body()


async def test_what_nobody_reads_is_held_to_the_lease(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL) as rig:
        await rig.prefill()
        assert await rig.decode(None) == (200, expected_text(PROMPT, 4))
        await trio.sleep(29)
        assert rig.p.blocks_held == BLOCKS
        await trio.sleep(2)
        assert (rig.p.blocks_held, rig.p.expired) == (0, 1)


async def test_a_read_after_the_lease_is_stale_and_wrong_once_p_has_used_the_blocks_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_rig(replace(PULL, num_blocks=BLOCKS)) as rig:
        for again, text in ((None, PROMPT), (OTHER, OTHER)):
            params = await rig.prefill()
            await trio.sleep(31)
            if again:
                await rig.prefill(again)
            assert await rig.decode(params) == (200, expected_text(text, 4))
        assert (rig.p.stale_pulls, rig.p.blocks_held) == (2, BLOCKS)
        assert metric(await metrics_of(rig, rig.p), "nixl_num_notifications_after_expiry_total") == 2
        # A part of another prompt's blocks is nobody's text.
        params = await rig.prefill()
        await trio.sleep(31)
        await rig.prefill("short")
        status, said = await rig.decode(params, PROMPT)
        assert (status, rig.p.stale_pulls) == (200, 3)
        assert said not in (expected_text(PROMPT, 4), expected_text(OTHER, 4), expected_text("short", 4))


async def test_a_second_read_is_stale(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL) as rig:
        params = await rig.prefill()
        for stale in (0, 1):
            assert await rig.decode(params) == (200, expected_text(PROMPT, 4))
            assert rig.p.stale_pulls == stale


async def test_ds_queue_keeps_the_lease_alive(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL, replace(PULL, max_num_seqs=1, itl=1.0)) as rig:
        await rig.start(rig.d, {"prompt": "busy", "max_tokens": 100, "stream": True})
        params, unused = await rig.prefill(), await rig.prefill()
        client = await rig.start(rig.d, decode_body(params))
        assert rig.d.waiting == 1
        await trio.sleep(40)
        assert (rig.p.blocks_held, rig.p.expired) == (BLOCKS, 1), "only what is waited for"
        assert (await client.head())[0] == 200
        assert trio.current_time() > 90
        assert json.loads(await client.body())["choices"][0]["text"] == expected_text(PROMPT, 4)
        assert (rig.p.stale_pulls, rig.p.blocks_held) == (0, 0)
        assert unused["remote_request_id"] != params["remote_request_id"]


@pytest.mark.parametrize(
    "fatal", ["no remote_block_ids", "no tp_size", "a list of prompts", "fewer blocks than the prompt has"]
)
async def test_what_d_dies_of(autojump_clock: trio.testing.MockClock, fatal: str) -> None:
    async with open_rig(PULL) as rig:
        prompt: object = [PROMPT, "another"] if fatal == "a list of prompts" else PROMPT
        params = await rig.prefill("short" if fatal.startswith("fewer") else prompt)
        params.pop(fatal.removeprefix("no "), None)
        status, said = await rig.decode(params, prompt)
        assert (status, "EngineCore encountered an issue" in said) == (500, True)
        assert not rig.d.alive
        held = rig.p.blocks_held
        assert held > 0
        await rig.d.revive()
        assert (await rig.decode(await rig.prefill())) == (200, expected_text(PROMPT, 4))
        assert rig.p.blocks_held == held


async def test_other_keys_that_miss_make_d_wait_for_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL) as rig:
        params = await rig.prefill()
        del params["remote_request_id"]
        await rig.start(rig.d, decode_body(params))
        await trio.sleep(1000)
        assert (rig.d.waiting, rig.d.blocks_held, rig.d.alive) == (1, BLOCKS, True)


async def test_a_wrong_engine_id_fails_and_p_holds_to_the_lease(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL) as rig:
        rig.p.faults.add(Fault("before_head", "other_params"))
        wrong = await rig.prefill()
        assert await rig.decode(wrong) == (500, "Internal server error")
        assert (rig.d.blocks_held, rig.d.waiting, rig.d.core.failed_transfers) == (0, 0, 1)
        assert (rig.p.blocks_held, rig.p.stale_pulls) == (BLOCKS, 0)
        await trio.sleep(31)
        assert rig.p.blocks_held == 0


async def test_a_p_that_has_gone_or_come_back_fails_the_read(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL) as rig:
        await rig.decode(await rig.prefill())
        before = await rig.prefill()
        await rig.p.kill()
        assert (await rig.decode(before))[0] == 500
        for same_id, status in ((True, 500), (False, 200)):
            await rig.p.restart(same_id=same_id)
            assert (await rig.decode(before))[0] == 500
            assert (await rig.decode(await rig.prefill()))[0] == status
        assert rig.d.blocks_held == 0


async def test_a_recomputed_prompt_frees_p_at_once(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL) as rig:
        assert (await rig.decode(await rig.prefill(), prompt_logprobs=1))[0] == 200
        assert (rig.p.blocks_held, rig.p.stale_pulls, rig.d.pulls) == (0, 0, 0)
        assert rig.d.core.prompt_tokens == {"local_compute": len(PROMPT)}
        wrong = await rig.prefill() | {"remote_engine_id": "nobody"}
        assert (await rig.decode(wrong, prompt_logprobs=1))[0] == 200
        assert rig.p.blocks_held == BLOCKS


async def test_a_client_that_leaves_during_the_first_contact_leaves_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_rig(PULL) as rig:
        params = await rig.prefill() | {"remote_port": 9}
        client = await rig.start(rig.d, decode_body(params))
        assert rig.d.waiting == 1
        await client.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert (rig.d.blocks_held, rig.d.waiting, rig.d.orphans) == (0, 0, 0)


async def test_push_and_pull_do_not_pair(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(PULL, SimSettings()) as rig:
        assert rig.p.core.compatibility_hash != rig.d.core.compatibility_hash
        assert (await rig.decode(await rig.prefill()))[0] == 500


# --------------------------------------------------------------------- ranks


RANKS = SimSettings(dp_size=2)


def of_rank(p: SimEngine, rank: int) -> dict[str, object]:
    return {"do_remote_prefill": True, "remote_request_id": "any", **p.coordinates_of(rank)}


async def test_each_rank_has_an_id_and_a_port() -> None:
    async with open_rig(RANKS) as rig:
        p, d = rig.p, rig.d
        assert p.rank_ids == tuple(f"{p.engine_id.removesuffix('_dp0')}_dp{rank}" for rank in (0, 1))
        assert p.engine_id == p.rank_ids[0]
        assert (p.side_channel, d.side_channel) == ("127.0.0.1:5600", "127.0.0.1:5602")
        assert [p.coordinates_of(rank)["remote_port"] for rank in (0, 1)] == [5600, 5601]
        assert p.coordinates == p.coordinates_of(0)
        assert d.rank_ids == (d.engine_id,)
        assert p.core.compatibility_hash == d.core.compatibility_hash
        before = p.rank_ids
        await p.restart(same_id=True)
        assert p.rank_ids == before
        await p.restart()
        assert not set(p.rank_ids) & set(before)


async def test_ranks_alternate_unless_one_is_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(RANKS) as rig:
        told = [(await rig.prefill())["remote_engine_id"] for _ in range(4)]
        assert tuple(told) == 2 * rig.p.rank_ids
        body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        for header, rank in (("1", 1), ("1", 1), ("0", 0), ("+1", 1), ("one", 0), ("", 1)):
            status, answer = await rig.post(rig.p, body, X_data_parallel_rank=header)
            assert (status, answer["kv_transfer_params"]["remote_engine_id"]) == (200, rig.p.rank_ids[rank])
            assert answer["kv_transfer_params"]["remote_port"] == 5600 + rank
            assert rig.p.requests[-1].rank == rank
        assert rig.p.blocks_held == 10 * BLOCKS


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
async def test_a_rank_that_does_not_exist(path: str) -> None:
    async with open_rig(RANKS) as rig:
        body = {"prompt": PROMPT, "messages": [], "max_tokens": 1}
        for engine, rank, ranks in ((rig.p, "2", 2), (rig.p, "-1", 2), (rig.d, "1", 1)):
            status, answer = await rig.post(engine, body, path, X_data_parallel_rank=rank)
            assert (status, answer["error"]["type"]) == (400, "BadRequestError")
            assert answer["error"]["message"] == f"data_parallel_rank {rank} is out of range [0, {ranks})."
            assert (engine.requests[-1].rank, engine.blocks_held) == (None, 0)
        if path == PATH:
            client = await rig.start(rig.d, body | {"stream": True}, X_data_parallel_rank="1")
            assert (await client.head())[0] == 200
            error = b'{"message": "data_parallel_rank 1 is out of range [0, 1).", "type": "BadRequestError", "param"'
            events = await client.body()
            assert events.startswith(b'data: {"error": ' + error)
            assert events.endswith(b'"code": 400}}\n\ndata: [DONE]\n\n')
            status, answer = await rig.post(rig.d, {"input": "x"}, "/v1/responses", X_data_parallel_rank="7")
            assert status == 200, "not looked at there"


async def test_the_rank_that_was_asked_for_pairs_and_another_one_does_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    async with open_rig(RANKS) as rig:
        for rank in (0, 1):
            client = await rig.start(rig.d, decode_body(of_rank(rig.p, rank)), X_request_id=f"id {rank}")
            await rig.post(rig.p, body, X_request_id=f"id {rank}", X_data_parallel_rank=str(rank))
            assert (await client.head())[0] == 200
            assert json.loads(await client.body())["choices"][0]["text"] == expected_text(PROMPT, 4)
        assert (rig.p.pushes, rig.p.blocks_held, rig.d.blocks_held) == (2, 0, 0)
        assert metric(await metrics_of(rig, rig.p), "nixl_xfer_time_seconds_count") == 2

        await rig.start(rig.d, decode_body(of_rank(rig.p, 0)), X_request_id="crossed")
        await rig.post(rig.p, body, X_request_id="crossed", X_data_parallel_rank="1")
        assert metric(await metrics_of(rig, rig.p), "kv_cache_usage_perc") == BLOCKS / (2 * RANKS.num_blocks)
        await trio.sleep(100)
        assert (rig.d.waiting, rig.d.blocks_held, rig.p.expired) == (1, BLOCKS, 1)
        await rig.post(rig.p, body, X_request_id="crossed", X_data_parallel_rank="0")
        assert (rig.d.waiting, rig.d.blocks_held, rig.p.pushes) == (0, 0, 3)


async def test_an_id_and_a_port_of_different_ranks_do_not_shake_hands(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(RANKS) as rig:
        mixed = of_rank(rig.p, 0) | {"remote_port": of_rank(rig.p, 1)["remote_port"]}
        assert (await rig.decode(mixed))[0] == 500


async def test_ranks_die_together(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(RANKS, RANKS) as rig:
        waiting = await rig.start(rig.d, decode_body(of_rank(rig.p, 0)), X_data_parallel_rank="0")
        fatal = decode_body({"do_remote_prefill": True})
        assert (await rig.post(rig.d, fatal, X_data_parallel_rank="1"))[0] == 500
        assert (await waiting.head())[0] == 500
        assert not rig.d.alive


async def test_pull_from_every_rank(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(replace(RANKS, mode="pull")) as rig:
        for _ in range(4):
            assert await rig.decode(await rig.prefill()) == (200, expected_text(PROMPT, 4))
        params = await rig.prefill()
        crossed = params | rig.p.coordinates_of(1)
        assert (await rig.decode(crossed))[0] == 200
        assert (rig.d.pulls, rig.p.stale_pulls, rig.p.blocks_held) == (5, 1, BLOCKS)


# ---------------------------------------------------------------- on sockets


async def answer_of(engine: SimEngine, body: object) -> dict[str, Any]:
    status, answer = await call(engine.url, PATH, body)
    assert status == 200
    decoded = json.loads(answer)
    assert isinstance(decoded, dict)
    return decoded


async def pulled_pair(p: SimEngine, d: SimEngine) -> str:
    body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = (await answer_of(p, body))["kv_transfer_params"]
    text = (await answer_of(d, decode_body(params)))["choices"][0]["text"]
    assert isinstance(text, str)
    return text


async def test_every_rank_answers_on_its_own_port() -> None:
    async with open_cluster(settings=RANKS) as cluster:
        p, d = cluster.prefill[0], cluster.decode[0]
        host, _, port = p.side_channel.rpartition(":")

        async def ids() -> list[object]:
            with trio.fail_after(5):
                return [(await ask(host, int(port) + rank))[1]["engine_id"] for rank in (0, 1)]

        assert tuple(await ids()) == p.rank_ids
        assert d.rank_ids == (d.engine_id,)
        await p.restart()
        assert p.side_channel == f"{host}:{port}"
        assert tuple(await ids()) == p.rank_ids
        # A question that one rank cannot answer is no matter of the other's.
        for number, rank, silent in ((int(port), (0, 7), True), (int(port), (0, 0), True), (int(port) + 1, (0, 0), 0)):
            with trio.move_on_after(0.2 if silent else 5) as scope:
                await ask(host, number, rank)
            assert scope.cancelled_caught == bool(silent)


async def test_a_taken_port_after_the_first_one() -> None:
    async with open_cluster() as cluster:
        taken = int(cluster.prefill[0].side_channel.rpartition(":")[2])
        p = SimEngine("prefill", settings=RANKS, side_port=taken - 1)
        with (
            trio.fail_after(5),
            pytest.RaisesGroup(pytest.RaisesExc(OSError, match="side channel"), flatten_subgroups=True),
        ):
            await p.serve()


class Router:
    """A socket for which the ports in `taken` are taken, and which gets 7000 or 7002 if any will do."""

    linger = 0
    taken = (7001,)
    picks = iter((7000, 7002))
    closed: ClassVar[list[int]] = []

    def bind(self, address: str) -> None:
        port = address.rpartition(":")[2]
        self.port = next(self.picks) if port == "*" else int(port)
        if self.port in self.taken:
            raise zmq.ZMQError(zmq.EADDRINUSE)

    def getsockopt_string(self, option: int) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def close(self, linger: int) -> None:
        self.closed.append(self.port)


def test_a_picked_port_is_given_up_if_the_next_one_is_taken() -> None:
    class Context:
        def socket(self, kind: int) -> Router:
            return Router()

    side = SideChannel("127.0.0.1")
    assert side.port_of(1) == 0
    routers = side._bind(Context(), 2)
    assert [router.port for router in routers] == [side.port_of(0), side.port_of(1)] == [7002, 7003]
    assert Router.closed == [7000, 7001]


@pytest.mark.parametrize("apart", [False, True])
async def test_reading_on_sockets(apart: bool) -> None:
    settings = SimSettings(mode="pull", dp_size=2, handshake_timeout=0.2)
    async with trio.open_nursery() as nursery:
        if apart:
            p = SimEngine("prefill", settings=settings, fabric=HttpTransport())
            d = SimEngine("decode", settings=replace(settings, dp_size=1), fabric=HttpTransport())
            for engine in (p, d):
                await nursery.start(engine.serve)
            cluster = Cluster([p], [d])
        else:
            cluster = build_cluster(settings=settings)
            p, d = (SimEngine(e.role, settings=e.settings, fabric=e.fabric) for e in cluster.engines)
            for engine in (p, d):
                await nursery.start(engine.serve)
        with trio.fail_after(5):
            for _ in range(2):
                assert await pulled_pair(p, d) == expected_text(PROMPT, 4)
            assert (d.pulls, p.stale_pulls, p.blocks_held, d.blocks_held) == (2, 0, 0, 0)
            # Remembered, but of another life.
            body = {"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            params = (await answer_of(p, body))["kv_transfer_params"]
            await p.restart(same_id=True)
            assert (await call(d.url, PATH, decode_body(params)))[0] == 500
            await p.kill()
            assert (await call(d.url, PATH, decode_body(params)))[0] == 500
            await p.revive()
            assert await pulled_pair(p, d) == expected_text(PROMPT, 4)
        nursery.cancel_scope.cancel("test is over")


async def test_pushing_to_a_rank_of_another_process() -> None:
    async with trio.open_nursery() as nursery:
        engines = [SimEngine(role, settings=RANKS, fabric=HttpTransport()) for role in ("prefill", "decode")]
        for engine in engines:
            await nursery.start(engine.serve)
        p, d = engines
        said: list[object] = []

        async def leg(body: dict[str, Any]) -> None:
            said.append((await answer_of(d, body))["choices"][0]["text"])

        with trio.fail_after(5):
            async with trio.open_nursery() as legs:
                for rank in (0, 1):  # both alternate, so rank n of D meets rank n of P
                    legs.start_soon(leg, decode_body(of_rank(p, rank), request_id=f"id {rank}"))
                    while d.waiting <= rank:  # noqa: ASYNC110  an engine sets no event
                        await trio.sleep(0.001)
                for rank in (0, 1):
                    body = {"prompt": PROMPT, "max_tokens": 1, "request_id": f"id {rank}"}
                    await answer_of(p, body | {"kv_transfer_params": {"do_remote_decode": True}})
        assert said == 2 * [expected_text(PROMPT, 4)]
        assert [request.rank for request in d.requests] == [0, 1]
        assert (p.pushes, p.blocks_held, d.blocks_held) == (2, 0, 0)
        nursery.cancel_scope.cancel("test is over")

"""NIXL's side channel: a ZeroMQ ROUTER per data-parallel rank that answers GET_META with the engine's metadata.

A question is msgpack `(b"get_meta_msg", pp_rank, tp_rank)`; the answer (connector version 14) has two frames:
msgpack of `{compatibility_hash, agent_metadata_bytes}`, and of the engine's perf_counter. As on real engines,
one question that cannot be answered (a rank that does not exist, bytes that are no msgpack) ends the listener
for good, while /health goes on saying 200.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import trio
import zmq

from trio_pdproxy.sim.core import EngineCore

GET_META = b"get_meta_msg"


_ATTEMPTS = 50


def handshake_payload(core: EngineCore) -> bytes:
    """The first frame of the answer. Two keys are ours (see `http_transport`); a real decoder skips them."""
    settings = core.settings
    metadata = {
        "engine_id": core.engine_id,
        "agent_metadata": b"sim",
        "kv_caches_base_addr": [0],
        "device_id": 0,
        "num_blocks": settings.num_blocks,
        "block_lens": [settings.block_size],
        "block_strides": [settings.block_size],
        "kv_cache_layout": "HND",
        "block_size": settings.block_size,
        "ssm_sizes": (0, 0),
        "attn_backend_name": "SIM",
        "physical_blocks_per_logical_kv_block": 1,
        "dcp_size": settings.dcp_size,
        "pcp_size": 1,
        "sim_url": core.url,
        "sim_life": core.life,
    }
    encode = msgspec.msgpack.encode
    return encode({"compatibility_hash": core.compatibility_hash, "agent_metadata_bytes": encode(metadata)})


async def ask(host: str, port: int, rank: tuple[int, int] = (0, 0)) -> tuple[str, dict[str, Any]]:
    """An engine's compatibility hash and metadata. Waits without end: put a deadline around it."""
    context = zmq.Context()
    try:
        socket: Any = context.socket(zmq.REQ)
        socket.connect(f"tcp://{host}:{port}")
        socket.send(msgspec.msgpack.encode((GET_META, *rank)), zmq.NOBLOCK)
        while not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            await trio.lowlevel.wait_readable(socket.getsockopt(zmq.FD))
        payload = msgspec.msgpack.decode(socket.recv_multipart(zmq.NOBLOCK)[0])
        return payload["compatibility_hash"], msgspec.msgpack.decode(payload["agent_metadata_bytes"])
    finally:
        context.destroy(linger=0)


class SideChannel:
    """Listens on host:port (0 picks one) while `serve` runs; of several ranks, on that port and those after it."""

    def __init__(self, host: str, port: int = 0) -> None:
        self.host = host
        self.port = port

    def port_of(self, rank: int) -> int:
        return self.port + rank if self.port else 0

    async def serve(
        self, ranks: Sequence[EngineCore], *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Answer until cancelled, or until every rank's side channel is broken. Starts with the first port."""
        context = zmq.Context()
        try:
            routers = self._bind(context, len(ranks))
            for rank, core in enumerate(ranks):
                core.host, core.port = self.host, self.port_of(rank)
            task_status.started(self.port)
            async with trio.open_nursery() as nursery:
                for router, core in zip(routers, ranks, strict=True):
                    nursery.start_soon(_serve_rank, router, core)
        finally:
            context.destroy(linger=0)

    def _bind(self, context: Any, count: int) -> list[Any]:
        """One socket a rank, on consecutive ports. A picked one is given up if those after it are taken."""
        for attempt in range(_ATTEMPTS):
            routers = [context.socket(zmq.ROUTER) for _ in range(count)]
            first = self.port
            try:
                for rank, router in enumerate(routers):
                    router.linger = 0
                    router.bind(f"tcp://{self.host}:{first + rank or '*'}")
                    first = first or int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            except zmq.ZMQError as error:
                if self.port or count == 1 or attempt + 1 == _ATTEMPTS:
                    raise OSError(error.errno, f"cannot listen on the side channel: {error}") from error
                for router in routers:
                    router.close(0)
                continue
            self.port = first
            return routers
        raise AssertionError("unreachable")


async def _serve_rank(router: Any, core: EngineCore) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_answer_all, router, core)
        await core.side_channel_broken.wait()
        nursery.cancel_scope.cancel("side channel broken")
    router.close(0)


async def _answer_all(router: Any, core: EngineCore) -> None:
    while True:
        # The descriptor only says "look again": what is there is in EVENTS, to be read until empty.
        while router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            try:
                identity, empty, message = router.recv_multipart(zmq.NOBLOCK)
                _, pp_rank, tp_rank = msgspec.msgpack.decode(message)
                if not (0 <= pp_rank < core.settings.pp_size and 0 <= tp_rank < core.settings.tp_size):
                    raise KeyError((pp_rank, tp_rank))
            except (msgspec.DecodeError, KeyError, TypeError, ValueError):
                core.side_channel_broken.set()
                return
            clock = msgspec.msgpack.encode(time.perf_counter())
            router.send_multipart([identity, empty, handshake_payload(core), clock], zmq.NOBLOCK)
        await trio.lowlevel.wait_readable(router.getsockopt(zmq.FD))

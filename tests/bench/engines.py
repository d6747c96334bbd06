"""A prefill and a decode engine that cost next to nothing: `python -m tests.bench.engines`.

They say what vLLM 0.32 says over HTTP and NIXL's side channel as far as the proxies under test need it: a decode leg is
answered with 200 and its headers at once, and with the first event once its prefill leg is done. Both run in one
process, on one clock, so that the gap between the arrivals of two legs is known exactly. What the project's simulator
(`trio_pdproxy.sim`) knows of scheduling, blocks and faults is left out: it would be the bottleneck here.

The first line of standard output is JSON: the ports. `GET /bench/stats` (either port) tells and forgets what was seen,
`GET /bench/busy` tells what is going on now, `GET /bench/finish` ends the streams that go on until they are told.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any, Literal, cast

import httptools
import msgspec
import zmq

from tests.bench import words
from tests.bench.loop import run

Role = Literal["prefill", "decode"]
ENGINE_ID = "bench-prefill-engine"
HOST = "127.0.0.1"

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_HEAD = (
    b"HTTP/1.1 %b\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)


class Body(msgspec.Struct):
    """Of a request body, what engines go by."""

    prompt: msgspec.Raw = msgspec.Raw(b'""')
    max_tokens: int | None = 16
    stream: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None


class Transfer:
    """Two legs that belong together, by their id."""

    __slots__ = ("decode", "decode_at", "pays", "prefill_at", "pushed")

    def __init__(self) -> None:
        self.prefill_at: float | None = None
        self.decode_at: float | None = None
        self.decode: Leg | None = None
        self.pushed = False
        self.pays = 0
        """Prefill legs of it under way."""


class Pair:
    """Both engines' state, and what they have seen."""

    def __init__(self) -> None:
        self.transfers: dict[str, Transfer] = {}
        self.side_channel_port = 0
        self.gaps: list[float] = []
        self.legs = {"prefill": 0, "decode": 0}
        self.busy = {"prefill": 0, "decode": 0}
        self.connections = {"prefill": 0, "decode": 0}
        self.events = 0
        """Of streams without a fixed count."""
        self.finished = 0
        """How often such streams were told to finish."""

    def transfer(self, name: str) -> Transfer:
        return self.transfers.setdefault(name, Transfer())

    def met(self, name: str, transfer: Transfer) -> None:
        """A transfer whose both legs have arrived and whose KV is pushed is over."""
        if transfer.pushed and transfer.decode_at is not None:
            self.transfers.pop(name, None)

    def stats(self) -> dict[str, object]:
        seen: dict[str, object] = {"gaps": self.gaps, "legs": dict(self.legs), "events": self.events}
        self.gaps = []
        self.events = 0
        self.legs = {"prefill": 0, "decode": 0}
        return seen

    def doing(self) -> dict[str, object]:
        """`held`: decode legs whose KV blocks nothing will ever free, because no prefill leg of theirs is under way."""
        held = sum(t.decode_at is not None and not t.pushed and not t.pays for t in self.transfers.values())
        return {"busy": self.busy, "connections": self.connections, "held": held}


class Leg:
    """One leg: its answer, as far as it has got."""

    def __init__(self, engine: EngineProtocol, ask: words.Ask, name: str | None, params: dict[str, Any]) -> None:
        self.engine = engine
        self.pair = engine.pair
        self.role: Role = engine.role
        self.ask = ask
        self.name = name
        self.params = params
        self.sent = 0
        self.begun = 0.0
        self.finished = self.pair.finished
        self.timer: asyncio.TimerHandle | None = None
        self.over = False
        self.pair.legs[self.role] += 1
        self.pair.busy[self.role] += 1

    # -- prefill ---------------------------------------------------------------------------------

    def prefill(self) -> None:
        if self.name is not None:
            transfer = self.pair.transfer(self.name)
            transfer.prefill_at = time.perf_counter()
            transfer.pays += 1
            if transfer.decode_at is not None:
                self.pair.gaps.append(transfer.decode_at - transfer.prefill_at)
        if self.ask.prefill:
            self.timer = self.engine.loop.call_later(self.ask.prefill / 1000, self.prefilled)
        else:
            self.prefilled()

    def prefilled(self) -> None:
        told = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": ENGINE_ID,
            "remote_request_id": f"cmpl-{self.name or 'probe'}-0",
            "remote_host": HOST,
            "remote_port": self.pair.side_channel_port,
            "remote_num_tokens": 8,
            "tp_size": 1,
            "pp_size": 1,
            "transfer_mode": "push",
        }
        if self.ask.stream:
            self.engine.write(_STREAM_HEAD + words.burst_chunks(self.ask.tag, 1))
        else:
            self.answer_whole(words.TRANSFER_KEY + msgspec.json.encode(told) + b"}")
        transfer = self.pair.transfers.get(self.name) if self.name is not None else None
        if transfer is not None:
            transfer.pushed = True
        self.finish()
        if transfer is not None and self.name is not None:
            if transfer.decode is not None:
                transfer.decode.speak()
            self.pair.met(self.name, transfer)

    # -- decode ----------------------------------------------------------------------------------

    def decode(self) -> None:
        if self.ask.stream:
            self.engine.write(_STREAM_HEAD)
        if self.name is None or not self.params.get("do_remote_prefill"):
            self.speak()  # asked alone: it computes the prompt too
            return
        transfer = self.pair.transfer(self.name)
        transfer.decode = self
        transfer.decode_at = time.perf_counter()
        if transfer.prefill_at is not None:
            self.pair.gaps.append(transfer.decode_at - transfer.prefill_at)
        if transfer.pushed:
            self.speak()
            self.pair.met(self.name, transfer)

    def speak(self) -> None:
        """The KV is there."""
        if self.over:
            return
        if not self.ask.stream:
            self.answer_whole(words.TRANSFER_KEY + b"null}")
            self.finish()
        elif self.ask.every:
            self.begun = self.engine.loop.time()
            self.next_event()
        else:
            self.engine.write(words.burst_chunks(self.ask.tag, self.ask.count))
            self.finish()

    def next_event(self) -> None:
        self.sent += 1
        if not self.ask.count:
            self.pair.events += 1
        if self.sent >= self.ask.count if self.ask.count else self.finished != self.pair.finished:
            self.engine.write(words.event_chunk(self.ask.tag) + words.end_chunks())
            self.finish()
            return
        self.engine.write(words.event_chunk(self.ask.tag))
        self.timer = self.engine.loop.call_at(self.begun + self.sent * self.ask.every / 1000, self.next_event)

    # -- both ------------------------------------------------------------------------------------

    def answer_whole(self, rest: bytes) -> None:
        body = words.Ask(self.ask.tag, stream=False).answer() + rest
        self.engine.write(_HEAD % (b"200 OK", len(body), body))

    def finish(self) -> None:
        """It is over, answered or not."""
        if self.over:
            return
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
        self.pair.busy[self.role] -= 1
        if self.role == "prefill" and self.name is not None and (transfer := self.pair.transfers.get(self.name)):
            transfer.pays -= 1
            if transfer.decode_at is None and not transfer.pushed:
                del self.pair.transfers[self.name]  # aborted before a decode leg came
        if self.engine.leg is self:
            self.engine.leg = None


class EngineProtocol(asyncio.Protocol):
    """One connection to an engine. Requests are not pipelined to engines."""

    def __init__(self, pair: Pair, role: Role, loop: asyncio.AbstractEventLoop) -> None:
        self.pair = pair
        self.role = role
        self.loop = loop
        self.leg: Leg | None = None
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.request_id: str | None = None
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self.pair.connections[self.role] += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.pair.connections[self.role] -= 1
        self.transport = None
        if self.leg is not None:
            self.leg.finish()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if self.transport is not None:
                self.transport.close()

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    # -- httptools calls these -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url = b""
        self.request_id = None
        self.body = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self.request_id = value.decode()

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        if self.parser.get_method() == b"GET":
            self.page()
            return
        body = msgspec.json.decode(b"".join(self.body), type=Body)
        self.body = []
        ask = words.read_prompt(
            bytes(memoryview(body.prompt)[:64]), count=body.max_tokens or 1, stream=bool(body.stream)
        )
        params = body.kv_transfer_params or {}
        self.leg = leg = Leg(self, ask, params.get("transfer_id") or self.request_id, params)
        if self.role == "prefill":
            leg.prefill()
        else:
            leg.decode()

    def page(self) -> None:
        path = self.url.partition(b"?")[0]
        said: object = {}
        status = b"200 OK"
        if path == b"/version":
            said = {"version": "0.32.0"}
        elif path == b"/v1/models":
            card = {"id": words.MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": words.MODEL}
            said = {"object": "list", "data": [{**card, "parent": None, "max_model_len": 1 << 24}]}
        elif path == b"/bench/stats":
            said = self.pair.stats()
        elif path == b"/bench/busy":
            said = self.pair.doing()
        elif path == b"/bench/finish":
            self.pair.finished += 1
        elif path not in (b"/health", b"/ping"):
            status, said = b"404 Not Found", {"error": "no such page"}
        body = json.dumps(said).encode()
        self.write(_HEAD % (status, len(body), body))


def serve_side_channel(pair: Pair) -> None:
    """Answer GET_META for ever, in a thread of its own (one question every few seconds)."""
    metadata = {"engine_id": ENGINE_ID, "block_size": 16, "num_blocks": 1 << 20, "dcp_size": 1, "agent_metadata": b""}
    encode = msgspec.msgpack.encode
    answer = encode({"compatibility_hash": "bench", "agent_metadata_bytes": encode(metadata)})
    socket: Any = zmq.Context().socket(zmq.REP)
    pair.side_channel_port = socket.bind_to_random_port(f"tcp://{HOST}")

    def answering() -> None:
        while True:
            socket.recv()
            socket.send_multipart([answer, encode(time.perf_counter())])

    threading.Thread(target=answering, daemon=True).start()


async def main() -> None:
    loop = asyncio.get_running_loop()
    pair = Pair()
    serve_side_channel(pair)
    ports = {}
    servers = []
    roles: tuple[Role, Role] = ("prefill", "decode")
    for role in roles:
        server = await loop.create_server(lambda role=role: EngineProtocol(pair, role, loop), HOST, 0, backlog=2048)  # type: ignore[misc]
        servers.append(server)
        ports[role] = server.sockets[0].getsockname()[1]
    print(json.dumps({**ports, "side_channel": pair.side_channel_port, "engine_id": ENGINE_ID}), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    sys.exit(run(main()))

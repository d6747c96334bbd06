"""Both legs of a push, sent by hand: what the proxy has to do, in its simplest form, to compare it with."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import Any, cast

import httpx
import msgspec
import trio
import zmq

GET_META = b"get_meta_msg"
MODEL = "tiny"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """What D must be told to find P."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1


def get_meta(side_channel: str, *, seconds: float = 10.0) -> dict[str, Any]:
    """Ask a side channel who it is (blocking). Rank (0, 0) only: asking for a rank that does not exist
    kills the listener for good.
    """
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(seconds * 1000))
        socket.connect(f"tcp://{side_channel}")
        socket.send(msgspec.msgpack.encode((GET_META, 0, 0)))
        outer = msgspec.msgpack.decode(socket.recv_multipart()[0])
    metadata = outer["agent_metadata_bytes"]
    return {
        **cast(dict[str, Any], msgspec.msgpack.decode(metadata)),
        "compatibility_hash": outer["compatibility_hash"],
    }


async def learn(side_channel: str) -> Coordinates:
    meta = await trio.to_thread.run_sync(get_meta, side_channel)
    host, _, port = side_channel.rpartition(":")
    return Coordinates(meta["engine_id"], host, int(port))


def prefill_params(transfer_id: str) -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def decode_params(transfer_id: str, p: Coordinates) -> dict[str, Any]:
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": p.engine_id,
        "remote_host": p.host,
        "remote_port": p.port,
        "tp_size": p.tp_size,
        "remote_request_id": transfer_id,  # must be there; nothing pairs by it
        "transfer_id": transfer_id,
    }


async def complete(url: str, body: dict[str, Any], *, request_id: str | None = None) -> dict[str, Any]:
    """POST /v1/completions, greedy; the parsed answer. Raises on anything but 2xx."""
    headers = {"X-Request-Id": request_id} if request_id is not None else {}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        response = await client.post(
            "/v1/completions", json={"model": MODEL, "temperature": 0, **body}, headers=headers
        )
        assert response.is_success, f"{url}: {response.status_code} {response.text}"
        return cast(dict[str, Any], response.json())


async def pair(
    prefill_url: str,
    decode_url: str,
    p: Coordinates,
    prompt: str,
    *,
    tokens: int = 8,
    again_after: float = math.inf,
) -> str:
    """Send both legs at once with one fresh id; the text D answers. The first handshake of two engines can outlast P's
    lease where they are starved of CPU: `again_after` seconds of D's silence P's leg is sent again."""
    request_id = str(uuid.uuid4())
    answer: dict[str, Any] = {}
    answered = trio.Event()

    async def prefill_leg() -> None:
        body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": prefill_params(request_id)}
        while not answered.is_set():
            await complete(prefill_url, body, request_id=request_id)
            with trio.move_on_after(again_after):
                await answered.wait()

    async def decode_leg() -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "kv_transfer_params": decode_params(request_id, p)}
        answer.update(await complete(decode_url, body, request_id=request_id))
        answered.set()

    async with trio.open_nursery() as legs:
        legs.start_soon(prefill_leg)
        legs.start_soon(decode_leg)
    return str(answer["choices"][0]["text"])

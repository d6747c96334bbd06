"""Asking an engine who it is, over NIXL's side channel.

vLLM's NIXL connector listens on a ZeroMQ socket and tells whoever asks its engine id and a hash over all that
two engines must have in common to pair (version, model name, KV layout, push or pull, ...). It costs the
engine milliseconds and holds nothing, so it is asked again and again: a restarted engine has a new id, and a
decode engine that is given an old one waits for ever.

Only rank (pp 0, tp 0) is ever asked for: a question about a rank that does not exist raises in the engine's
listener thread, and its side channel is dead from then on while /health stays 200 (vLLM 0.32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import trio
import zmq

# (message, pipeline rank, tensor rank)
_QUESTION = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))


@dataclass(frozen=True, slots=True)
class Meta:
    """What an engine says of itself over the side channel."""

    engine_id: str
    compatibility_hash: str
    block_size: int | None = None
    num_blocks: int | None = None
    dcp_size: int = 1


class SideChannelError(Exception):
    """The side channel did not answer, or not with what NIXL says."""


class SideChannelSilentError(SideChannelError):
    """It did not answer in time: nobody is there, or its machine is starved just now."""


class SideChannel(Protocol):
    """How the side channel is asked; tests put their own here."""

    async def ask(self, host: str, port: int) -> Meta:
        """Who listens at `host:port`. Raises `SideChannelError`; always answers within its own deadline."""
        ...


class _Payload(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


class _Agent(msgspec.Struct):
    engine_id: str
    block_size: int | None = None
    num_blocks: int | None = None
    dcp_size: int = 1


class ZmqSideChannel:
    """The real one: pyzmq in a worker thread, which a receive timeout of `timeout` seconds always brings back."""

    def __init__(self, timeout: float = 2.0) -> None:
        self._timeout = timeout
        # Apart from trio's own threads, so that many silent engines cannot starve name resolution.
        self._limiter = trio.CapacityLimiter(16)

    async def ask(self, host: str, port: int) -> Meta:
        return await trio.to_thread.run_sync(self._ask, host, port, limiter=self._limiter)

    def _ask(self, host: str, port: int) -> Meta:
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        milliseconds = int(self._timeout * 1000)
        # A context per question: nothing has to be closed later, whatever becomes of the caller.
        try:
            with zmq.Context() as context, context.socket(zmq.REQ) as socket:
                socket.setsockopt(zmq.IPV6, 1)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVTIMEO, milliseconds)
                socket.setsockopt(zmq.SNDTIMEO, milliseconds)
                socket.connect(f"tcp://{place}")
                socket.send(_QUESTION)
                frames = socket.recv_multipart()
        except zmq.Again:
            raise SideChannelSilentError(
                f"no answer from the side channel {place} within {self._timeout:g} s "
                "(is it a NIXL engine, and is VLLM_NIXL_SIDE_CHANNEL_HOST set to an address others can reach?)"
            ) from None
        except zmq.ZMQError as error:  # also: no file descriptors left for a context
            raise SideChannelError(f"side channel {place}: {error}") from None
        return read_meta(frames[0], place)


def read_meta(payload: bytes, place: str) -> Meta:
    """Understand a GET_META answer. Raises `SideChannelError`."""
    try:
        outer = msgspec.msgpack.decode(payload, type=_Payload)
        agent = msgspec.msgpack.decode(outer.agent_metadata_bytes, type=_Agent)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise SideChannelError(f"what answers at {place} is no NIXL side channel this version knows: {error}") from None
    return Meta(
        engine_id=agent.engine_id,
        compatibility_hash=outer.compatibility_hash,
        block_size=agent.block_size,
        num_blocks=agent.num_blocks,
        dcp_size=agent.dcp_size,
    )

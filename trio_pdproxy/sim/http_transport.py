"""KV transfers between simulated engines of different processes.

D finds P through the side channel it was given, as real engines do: P's metadata carries two keys of our own,
`sim_url` (where P serves HTTP) and `sim_life` (which of the lives of that engine, or rank, this is).
Registrations go to `/sim/register` on P, writes to `/sim/push` on D, reads to `/sim/pull` on P.
A peer that is remembered from an earlier life is never reached again under that id: a push is then never heard
of, a pull fails.
"""

from __future__ import annotations

from collections.abc import Iterable

import h11
import msgspec
import trio

from trio_pdproxy.sim.client import call
from trio_pdproxy.sim.core import EngineCore, TransferFailed
from trio_pdproxy.sim.kv import Finished, Pull, Registration
from trio_pdproxy.sim.side_channel import ask

REGISTER = "/sim/register"
PUSH = "/sim/push"
PULL = "/sim/pull"

_CALL_TIMEOUT = 5.0


class RegisterCall(msgspec.Struct):
    """To P: the registration, and the life of P that it is meant for."""

    life: str
    registration: Registration


class PushCall(msgspec.Struct):
    """To D: what was written for which request, and the life of D that asked for it."""

    life: str
    request_id: str
    done: Finished


class PullCall(msgspec.Struct):
    """To P: what D does with P's blocks, and the life of P that it is meant for."""

    life: str
    pull: Pull


class HttpTransport:
    """Reaches any simulated engine whose side channel and HTTP port can be reached."""

    def attach(self, core: EngineCore) -> None:
        """Nothing to do: an engine is found at its addresses."""

    def detach(self, core: EngineCore) -> None:
        """Nothing to do: its ports are closed."""

    async def register(self, decode: EngineCore, registration: Registration) -> None:
        url, life = await _peer(decode, registration)
        await _call(url, REGISTER, RegisterCall(life, registration))

    async def push(self, prefill: EngineCore, registration: Registration, done: Finished) -> bool:
        life = prefill.agents.setdefault(registration.decode_engine_id, registration.decode_life)
        if life != registration.decode_life:
            return False
        message = PushCall(registration.decode_life, registration.request_id, done)
        status, _ = await _call(registration.decode_url, PUSH, message)
        return status == 200

    async def pull(self, decode: EngineCore, pull: Pull) -> str:
        url, life = await _peer(decode, pull)
        status, key = await _call(url, PULL, PullCall(life, pull))
        if status != 200:
            raise TransferFailed
        return key.decode()


async def answer(ranks: Iterable[EngineCore], path: str, body: bytes) -> tuple[int, bytes]:
    """Serve a peer's call; returns the status and body to answer. 409: the call was meant for another life."""
    lives = {core.life: core for core in ranks}
    try:
        if path == REGISTER:
            register = msgspec.json.decode(body, type=RegisterCall)
            if (core := lives.get(register.life)) is None:
                return 409, b""
            await core.accept(register.registration)
            return 200, b""
        if path == PUSH:
            push = msgspec.json.decode(body, type=PushCall)
            core = lives.get(push.life)
            return 200 if core is not None and core.receive(push.request_id, push.done) else 409, b""
        if path == PULL:
            pull = msgspec.json.decode(body, type=PullCall)
            core = lives.get(pull.life)
            return (409, b"") if core is None else (200, core.answer(pull.pull).encode())
    except msgspec.DecodeError:
        return 400, b""
    return 404, b""


async def _peer(decode: EngineCore, message: Registration | Pull) -> tuple[str, str]:
    """Where the P it is meant for serves, and which of its lives D knows."""
    known = decode.agents.get(message.remote_engine_id)
    if not isinstance(known, tuple):
        known = await _shake_hands(decode, message)
        decode.agents[message.remote_engine_id] = known
    url, life = known
    return url, life


async def _shake_hands(decode: EngineCore, message: Registration | Pull) -> tuple[str, str]:
    rank = (message.pp_size - 1, message.tp_size - 1)
    address = (message.remote_host, message.remote_port)
    with trio.move_on_after(decode.settings.handshake_timeout):
        compatibility_hash, metadata = await ask(*address, rank=rank)
        if metadata.get("engine_id") != message.remote_engine_id:
            raise TransferFailed
        if compatibility_hash != decode.compatibility_hash:
            raise TransferFailed
        return str(metadata["sim_url"]), str(metadata["sim_life"])
    raise TransferFailed


async def _call(url: str, path: str, message: msgspec.Struct) -> tuple[int | None, bytes]:
    """The peer's status and answer, None if it could not be reached. Never cancelled half-way."""
    with trio.move_on_after(_CALL_TIMEOUT, shield=True):
        try:
            return await call(url, path, message)
        except (OSError, h11.RemoteProtocolError):
            return None, b""
    return None, b""

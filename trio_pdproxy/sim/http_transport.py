"""KV transfers between simulated engines of different processes.

D finds P through the side channel it was given, as real engines do: P's metadata carries two keys of our own,
`sim_url` (where P serves HTTP) and `sim_life` (which of the engine's lives this is). Registrations go to
`/sim/register` on P, writes to `/sim/push` on D. A peer that is remembered from an earlier life is never
reached again under that id, and nobody is told.
"""

from __future__ import annotations

import h11
import msgspec
import trio

from trio_pdproxy.sim.client import call
from trio_pdproxy.sim.core import EngineCore, TransferFailed
from trio_pdproxy.sim.kv import Finished, Registration
from trio_pdproxy.sim.side_channel import ask

REGISTER = "/sim/register"
PUSH = "/sim/push"

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


class HttpTransport:
    """Reaches any simulated engine whose side channel and HTTP port can be reached."""

    def attach(self, core: EngineCore) -> None:
        """Nothing to do: an engine is found at its addresses."""

    def detach(self, core: EngineCore) -> None:
        """Nothing to do: its ports are closed."""

    async def register(self, decode: EngineCore, registration: Registration) -> None:
        known = decode.agents.get(registration.remote_engine_id)
        if not isinstance(known, tuple):
            known = await _shake_hands(decode, registration)
            decode.agents[registration.remote_engine_id] = known
        url, life = known
        await _call(url, REGISTER, RegisterCall(life, registration))

    async def push(self, prefill: EngineCore, registration: Registration, done: Finished) -> bool:
        life = prefill.agents.setdefault(registration.decode_engine_id, registration.decode_life)
        if life != registration.decode_life:
            return False
        message = PushCall(registration.decode_life, registration.request_id, done)
        return await _call(registration.decode_url, PUSH, message) == 200


async def answer(core: EngineCore, path: str, body: bytes) -> int:
    """Serve a peer's call; returns the status to answer. 409: the call was meant for another life."""
    try:
        if path == REGISTER:
            register = msgspec.json.decode(body, type=RegisterCall)
            if register.life != core.life:
                return 409
            await core.accept(register.registration)
            return 200
        if path == PUSH:
            push = msgspec.json.decode(body, type=PushCall)
            return 200 if push.life == core.life and core.receive(push.request_id, push.done) else 409
    except msgspec.DecodeError:
        return 400
    return 404


async def _shake_hands(decode: EngineCore, registration: Registration) -> tuple[str, str]:
    rank = (registration.pp_size - 1, registration.tp_size - 1)
    address = (registration.remote_host, registration.remote_port)
    with trio.move_on_after(decode.settings.handshake_timeout):
        compatibility_hash, metadata = await ask(*address, rank=rank)
        if metadata.get("engine_id") != registration.remote_engine_id:
            raise TransferFailed
        if compatibility_hash != decode.compatibility_hash:
            raise TransferFailed
        return str(metadata["sim_url"]), str(metadata["sim_life"])
    raise TransferFailed


async def _call(url: str, path: str, message: msgspec.Struct) -> int | None:
    """The peer's status, None if it could not be reached. Never cancelled half-way."""
    with trio.move_on_after(_CALL_TIMEOUT, shield=True):
        try:
            status, _ = await call(url, path, message)
            return status
        except (OSError, h11.RemoteProtocolError):
            return None
    return None

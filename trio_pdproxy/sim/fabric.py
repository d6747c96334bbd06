"""How KV travels between simulated engines: what NIXL is to real ones.

`Transport` is all that an engine core knows of it. `Fabric` connects the engines of one process.
"""

from __future__ import annotations

from typing import Protocol

import trio

from trio_pdproxy.sim.core import EngineCore, TransferFailed
from trio_pdproxy.sim.kv import Finished, Pull, Registration


class Transport(Protocol):
    """Carries registrations from D to P and writes from P to D."""

    def attach(self, core: EngineCore) -> None:
        """The engine can be reached from now on."""

    def detach(self, core: EngineCore) -> None:
        """The engine is gone. Peers that remember it are not told."""

    async def register(self, decode: EngineCore, registration: Registration) -> None:
        """Hand D's registration to P. Raises TransferFailed if the first contact with that P fails.

        A P that D remembers and that has gone, or come back under its old id, is silence: D waits for ever.
        Once P has the registration this is neither cancelled nor does it fail.
        """

    async def push(self, prefill: EngineCore, registration: Registration, done: Finished) -> bool:
        """Write into D's blocks. False: the write failed, which only P learns."""

    async def pull(self, decode: EngineCore, pull: Pull) -> str:
        """Hand D's message to P and return its answer. Raises TransferFailed, also if that P has gone."""


class Fabric:
    """Connects engines in one process, by engine id."""

    def __init__(self) -> None:
        self._cores: dict[str, EngineCore] = {}

    def attach(self, core: EngineCore) -> None:
        self._cores[core.engine_id] = core

    def detach(self, core: EngineCore) -> None:
        if self._cores.get(core.engine_id) is core:
            del self._cores[core.engine_id]

    async def register(self, decode: EngineCore, registration: Registration) -> None:
        peer = await self._peer(decode, registration)
        if peer is not None:
            await peer.accept(registration)

    async def push(self, prefill: EngineCore, registration: Registration, done: Finished) -> bool:
        current = self._cores.get(registration.decode_engine_id)
        known = prefill.agents.setdefault(registration.decode_engine_id, current)
        if current is None or current is not known:
            return False
        return current.receive(registration.request_id, done)

    async def pull(self, decode: EngineCore, pull: Pull) -> str:
        peer = await self._peer(decode, pull)
        if peer is None:
            raise TransferFailed
        return peer.answer(pull)

    async def _peer(self, decode: EngineCore, message: Registration | Pull) -> EngineCore | None:
        """The P it is meant for; None if D remembers one of that id that is no more."""
        known = decode.agents.get(message.remote_engine_id)
        if known is None:
            known = await self._shake_hands(decode, message)
            decode.agents[message.remote_engine_id] = known
        current = self._cores.get(message.remote_engine_id)
        return current if current is known else None

    async def _shake_hands(self, decode: EngineCore, message: Registration | Pull) -> EngineCore:
        """D asks the side channel it was given for its metadata and checks whose it is."""
        address = (message.remote_host, message.remote_port)
        listening = [
            core
            for core in self._cores.values()
            if (core.host, core.port) == address and not core.side_channel_broken.is_set()
        ]
        if listening and (
            message.tp_size > listening[0].settings.tp_size or message.pp_size > listening[0].settings.pp_size
        ):
            # D asks for ranks that do not exist, and that question is the end of P's side channel.
            listening[0].side_channel_broken.set()
            listening = []
        if not listening:
            await trio.sleep(decode.settings.handshake_timeout)
            raise TransferFailed
        peer = listening[0]
        if peer.engine_id != message.remote_engine_id:
            raise TransferFailed
        if peer.compatibility_hash != decode.compatibility_hash:
            raise TransferFailed
        return peer

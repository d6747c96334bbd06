"""A proxy's pool kept informed about the engines the launcher owns, so that it need not find out by failing.

The pool looks at every engine itself; this only says when to look. A restarted engine keeps its address and has a
new engine id, which the pool learns before anybody is sent there.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import trio

from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.engines.pool import Pool

from .errors import LaunchError
from .plan import EngineCommand
from .running import EngineSet
from .supervise import EngineEvent, State

log = logging.getLogger("trio_pdproxy.launch")

LOOK_SECONDS = 1.0


async def keep_told(engines: EngineSet, pool: Pool) -> None:
    """Tell `pool` what happens to `engines`, until cancelled: who ends is taken out of use at once, who is ready again
    is looked at at once, who is given up is drained and removed, and comes back should it be started after all."""
    send, receive = trio.open_memory_channel[EngineEvent](1024)

    def pass_on(event: EngineEvent) -> None:
        if event.state in (State.BACKING_OFF, State.GIVEN_UP):
            for engine in _known(pool, event.name):
                engine.doubt("its process ended" if event.state is State.GIVEN_UP else "it is being restarted")
        send.send_nowait(event)

    engines.on_event(pass_on)
    try:
        async with trio.open_nursery() as nursery:
            async for event in receive:
                if event.state is State.READY:
                    _welcome(pool, engines.named(event.name).command)
                elif event.state is State.GIVEN_UP and _known(pool, event.name):
                    nursery.start_soon(_remove, pool, event.name)
    finally:
        engines.off_event(pass_on)


async def restart_stranded(engines: EngineSet, pool: Pool, least: int) -> None:
    """Restart decode engines that hold the KV of `least` stranded requests or more, until cancelled: nothing else frees
    it. One at a time, once it has finished what it has, and only while another decode engine is usable. `keep_told`
    must be running: it takes the engine back."""
    ours = {engine.name for engine in engines.decode}
    while True:
        await trio.sleep(LOOK_SECONDS)
        for engine in list(pool.decode):
            another = any(other.usable for other in pool.decode if other is not engine)
            if engine.name in ours and engine.stranded >= least and engine.usable and another:
                log.warning("decode engine %s holds what nothing frees: it is restarted", engine.name)
                await _remove(pool, engine.name)
                with suppress(LaunchError):  # what becomes of it then is the restart policy's
                    await engines.restart(engine.name)


def _known(pool: Pool, name: str) -> list[Engine]:
    return [engine for engine in pool.engines if engine.spec.name == name]


def _welcome(pool: Pool, command: EngineCommand) -> None:
    known = _known(pool, command.name)
    for engine in known:
        engine.poked.set()
    if not known:
        pool.add(command.role, command.spec)


async def _remove(pool: Pool, name: str) -> None:
    with suppress(KeyError):  # an operator was quicker
        await pool.remove(name)

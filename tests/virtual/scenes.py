"""Requests to be given up at every step, each in a scene of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.virtual.rows import D400, ONE_PLACE, P400, PLAIN, breaks, busy, says
from trio_pdproxy.sim import Fault, SimSettings
from trio_pdproxy.testing import MemoryRig

LARGE = 600_000
"""Characters: more than a first send and more than the network takes without being read."""


async def nothing(rig: MemoryRig) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    prepare: Callable[[MemoryRig], Awaitable[None]] = nothing
    body: dict[str, Any] = field(default_factory=dict)
    pairs: tuple[int, int] = (1, 1)
    sim: SimSettings = PLAIN
    settings: dict[str, Any] = field(default_factory=dict)
    strands: bool = False


def faults(*, p: tuple[Fault, ...] = (), d: tuple[Fault, ...] = ()) -> Callable[[MemoryRig], Awaitable[None]]:
    """The same ones each time; of several engines of a role, whichever is asked first meets them."""

    async def prepare(rig: MemoryRig) -> None:  # noqa: ASYNC124  one of several
        for engines, script in ((rig.cluster.prefill, p), (rig.cluster.decode, d)):
            for fault in script:
                fault.hits = 0
            for engine in engines:
                engine.faults.faults = list(script)

    return prepare


async def dead_connections(rig: MemoryRig) -> None:
    """Kept-alive connections that the engines have closed, and the proxy does not know yet."""
    await rig.visit(max_tokens=1)
    await rig.ended()
    for engine in rig.app.pool.engines:
        assert engine.connections.idle
    for sim in rig.cluster.engines:
        for connection in list(sim._connections):
            connection.reset()


async def no_place(rig: MemoryRig) -> None:
    """The only place is taken for another second."""
    await busy(rig, 1)


STREAM: dict[str, Any] = {"stream": True, "max_tokens": 2}
WHOLE: dict[str, Any] = {"max_tokens": 2}

SCENES = [
    Scene("a stream", body=STREAM),
    Scene("an answer in one piece", body=WHOLE),
    Scene("prefill fails and is rescued", faults(p=(says(500),)), STREAM),
    Scene("prefill is busy and is rescued", faults(p=(says(429, P400),)), WHOLE),
    Scene("prefill fails for good", faults(p=(breaks("reset", times=None),)), STREAM, strands=True),
    Scene("prefill hangs", faults(p=(breaks("hang"),)), STREAM),
    Scene("decode breaks and another pair serves", faults(d=(breaks("reset"),)), STREAM, (2, 2)),
    Scene("decode refuses", faults(d=(says(422, D400),)), STREAM, sim=SimSettings(prefill_base=1)),
    Scene("decode breaks in mid-stream", faults(d=(Fault("mid_body", "reset", after=1),)), STREAM),
    Scene("two choices", body={**STREAM, "n": 2}, sim=SimSettings(prefill_base=1)),
    Scene(
        "a short and a long prompt",
        body={**STREAM, "prompt": ["x" * 16, "y" * 200]},
        sim=SimSettings(prefill_per_token=0.05, itl=0.1),
    ),
    Scene("a large body", body={**STREAM, "prompt": "x" * LARGE}, sim=SimSettings(max_model_len=LARGE + 10)),
    Scene("decode alone", body={**STREAM, "echo": True, "logprobs": 1}),
    Scene("a lapsed lease", faults(d=(breaks("slow", delay=40),)), STREAM),
    Scene("dead connections", dead_connections, STREAM),
    Scene("a stream of /v1/responses", body={**STREAM, "path": "/v1/responses", "input": "hello"}),
    Scene("pings", body=STREAM, sim=SimSettings(prefill_base=1), settings={"ping_interval": 0.4}),
]

QUEUED = Scene("queued", no_place, STREAM, settings={**ONE_PLACE, "queue_timeout": 5})

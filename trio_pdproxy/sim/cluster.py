"""Several simulated engines that can reach each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import trio

from trio_pdproxy.sim.core import Role
from trio_pdproxy.sim.engine import SimEngine
from trio_pdproxy.sim.fabric import Fabric, Transport
from trio_pdproxy.sim.settings import SimSettings


@dataclass(frozen=True, slots=True)
class Cluster:
    prefill: list[SimEngine]
    decode: list[SimEngine]

    @property
    def engines(self) -> list[SimEngine]:
        return [*self.prefill, *self.decode]


def build_cluster(
    *,
    prefill: int = 1,
    decode: int = 1,
    settings: SimSettings | None = None,
    decode_settings: SimSettings | None = None,
    host: str = "127.0.0.1",
    fabric: Transport | None = None,
) -> Cluster:
    """Engines on one fabric that listen to nothing: for in-memory streams (`SimEngine.serve_stream`).

    Their ports are made up (8100, 8101 ... for P, 8200 ... for D; side channels 5600 ...) and all distinct.
    `decode_settings`: where D differs from P; without them it does in `dp_size`, which is then P's alone.
    """
    shared = fabric if fabric is not None else Fabric()
    of_p, of_d = _settings(settings, decode_settings)

    def make(role: Role, number: int, port: int, side_port: int) -> SimEngine:
        name = f"{role}-{number}"
        own = of_p if role == "prefill" else of_d
        return SimEngine(role, name=name, settings=own, fabric=shared, host=host, port=port, side_port=side_port)

    return Cluster(
        [make("prefill", number, 8100 + number, 5600 + number * of_p.dp_size) for number in range(prefill)],
        [
            make("decode", number, 8200 + number, 5600 + prefill * of_p.dp_size + number * of_d.dp_size)
            for number in range(decode)
        ],
    )


@asynccontextmanager
async def open_cluster(
    *,
    prefill: int = 1,
    decode: int = 1,
    settings: SimSettings | None = None,
    decode_settings: SimSettings | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[Cluster]:
    """Engines with real listeners on free ports of `host`; they are gone, connections and all, at the end.

    Settings are as in `build_cluster`.
    """
    fabric = Fabric()
    of_p, of_d = _settings(settings, decode_settings)

    def make(role: Role, number: int) -> SimEngine:
        own = of_p if role == "prefill" else of_d
        return SimEngine(role, name=f"{role}-{number}", settings=own, fabric=fabric, host=host)

    cluster = Cluster(
        [make("prefill", number) for number in range(prefill)],
        [make("decode", number) for number in range(decode)],
    )
    async with trio.open_nursery() as nursery:
        for engine in cluster.engines:
            await nursery.start(engine.serve)
        try:
            yield cluster
        finally:
            nursery.cancel_scope.cancel("cluster closed")


def _settings(settings: SimSettings | None, decode_settings: SimSettings | None) -> tuple[SimSettings, SimSettings]:
    of_p = settings or SimSettings()
    return of_p, decode_settings or replace(of_p, dp_size=1)

"""The interface of all that finds engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from trio_pdproxy.config import EngineSpec, Role
from trio_pdproxy.core.reach import NotAllowedError, check_host

log = logging.getLogger("trio_pdproxy.discovery")

_ANYWHERE = ("0.0.0.0/0", "::/0")


@dataclass(frozen=True, slots=True)
class Found:
    """One engine that a source knows of."""

    role: Role
    spec: EngineSpec
    ready: bool = True
    """Its source finds it fit for requests. Whether it is, the pool finds out for itself before it is used."""


Tell = Callable[[Iterable[Found]], None]
"""Told the whole set of engines; whoever is missing in it has gone."""


class Source(Protocol):
    """Something that knows which engines there are."""

    name: str
    """For logs and /status: dns, kubernetes, the file's name."""

    @property
    def trouble(self) -> str | None:
        """Why what was told last may be out of date; None while the source answers."""

    async def watch(self, tell: Tell) -> None:
        """Call `tell` first when the set is known and then whenever it has changed, until cancelled.

        While the source does not answer, or not with what it should, nothing is told: `trouble` says why, the log says
        it once, and it is asked again. So an outage of the source empties nothing.
        """
        ...


@lru_cache(maxsize=4096)
def may_be_an_engine(address: str) -> bool:
    """Whether an engine can be at this IP address: never at a link-local one, which is where clouds keep their
    metadata, nor at one that is no host's. Such a one is logged, once."""
    try:
        check_host(address, [address], _ANYWHERE)
    except NotAllowedError as error:
        log.error("left out: %s", error)
        return False
    return True

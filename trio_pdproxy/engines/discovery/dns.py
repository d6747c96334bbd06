"""Engines of headless services (or of any names), by asking DNS again and again.

Two kinds of questions, told apart by their form:

- `_http._tcp.prefill.llm`: SRV records, one an engine, with its port. `_nixl._tcp` of the same name tells each
  target's side channel port, as Kubernetes does for a headless service whose ports are named `http` and `nixl`.
- `prefill.llm:8000`: A and AAAA records, each address an engine at that port.

Engines are reached by address, not by name, so that no request ever waits for DNS. What names nothing (no such name, no
record) takes nothing away: it is how a name server looks that has lost its zone or not yet loaded it, and engines
that are really gone are found out by their health checks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.name
import dns.resolver
import trio

from trio_pdproxy.config import ROLES, Address, EngineSpec, Role, Settings
from trio_pdproxy.engines.discovery.source import Found, Tell, may_be_an_engine

log = logging.getLogger("trio_pdproxy.discovery")

SIDE_CHANNEL_PORT = 5600
"""vLLM's default."""

LIFETIME = 5.0
"""Seconds for one question, all its retries at all name servers included."""

NIXL = "_nixl"
"""The service of side channels, as vLLM deployments name that port."""


class QuestionError(Exception):
    """A question has no usable answer now; the text says why."""


@dataclass(frozen=True, slots=True)
class _Place:
    address: str
    port: int
    side_channel_port: int


class DnsSource:
    """The engines that the settings `prefill_dns` and `decode_dns` name. Each name is a question of its own: one that
    fails keeps what it said last, the others go on."""

    name = "dns"

    def __init__(self, settings: Settings) -> None:
        self.trouble: str | None = None
        self._interval = settings.discovery_interval
        self._questions: list[tuple[Role, str]] = [
            (role, text)
            for role in ROLES
            for text in (settings.prefill_dns if role == "prefill" else settings.decode_dns)
        ]
        self._last: dict[tuple[Role, str], frozenset[_Place]] = {}
        self._resolver = _resolver(settings.dns_server)

    async def watch(self, tell: Tell) -> None:
        while True:
            before = dict(self._last)
            troubles = await self._ask_all()
            self._note(troubles)
            if self._last != before:
                tell(self._found())
            await trio.sleep(self._interval)

    async def _ask_all(self) -> list[str]:
        troubles: list[str] = []

        async def ask(question: tuple[Role, str]) -> None:
            try:
                self._last[question] = await self._ask(question[1])
            except QuestionError as error:
                troubles.append(f"{question[1]}: {error}")

        async with trio.open_nursery() as nursery:
            for question in self._questions:
                nursery.start_soon(ask, question)
        return sorted(troubles)

    def _note(self, troubles: list[str]) -> None:
        trouble = "; ".join(troubles) or None
        if trouble is not None and self.trouble is None:
            log.warning("dns: %s. What it said last stays", trouble)
        elif trouble is None and self.trouble is not None:
            log.info("dns answers again")
        self.trouble = trouble

    def _found(self) -> Iterable[Found]:
        for role, text in self._questions:
            for place in sorted(self._last.get((role, text), ()), key=lambda place: (place.address, place.port)):
                url = f"http://{Address(place.address, place.port)}"
                yield Found(role, EngineSpec(url=url, side_channel=Address(place.address, place.side_channel_port)))

    # -- questions -------------------------------------------------------------------------------

    async def _ask(self, text: str) -> frozenset[_Place]:
        """The engines that this question names: at least one. Raises `QuestionError`."""
        if text.startswith("_"):
            places = await self._services(text)
        else:
            host, _, port = text.rpartition(":")
            places = [_Place(a, int(port), SIDE_CHANNEL_PORT) for a in await self._addresses(host.strip("[]"))]
        allowed = frozenset(place for place in places if may_be_an_engine(place.address))
        if not allowed:
            raise QuestionError("it names no engine")
        return allowed

    async def _services(self, text: str) -> list[_Place]:
        answer = await self._records(text, "SRV")
        try:
            _, rest = text.split(".", 1)
            sides = await self._records(f"{NIXL}.{rest}", "SRV")
        except _NothingError:
            sides = []  # no port of that name: the default's
        side_ports = {record.target: record.port for record in sides}
        places: list[_Place] = []

        async def resolve(target: dns.name.Name, port: int) -> None:
            side_port = side_ports.get(target, SIDE_CHANNEL_PORT)
            places.extend(_Place(address, port, side_port) for address in await self._addresses(target.to_text()))

        try:
            async with trio.open_nursery() as nursery:
                for record in answer:
                    nursery.start_soon(resolve, record.target, record.port)
        except* QuestionError as group:
            # Half an answer would drain the engines of the other half.
            raise QuestionError(str(group.exceptions[0])) from group
        return places

    async def _addresses(self, host: str) -> list[str]:
        """The host's IPv4 addresses, or if it has none its IPv6 ones: an engine with both is one engine."""
        try:
            return [record.address for record in await self._records(host, "A")]
        except _NothingError:
            return [record.address for record in await self._records(host, "AAAA")]

    async def _records(self, name: str, kind: str) -> list[Any]:
        try:
            with trio.fail_after(LIFETIME + 1):
                answer = await self._resolver.resolve(name, kind, lifetime=LIFETIME, search=True)
        except dns.resolver.NXDOMAIN:
            raise _NothingError("there is no such name") from None
        except dns.resolver.NoAnswer:
            raise _NothingError(f"it has no {kind} record") from None
        except dns.exception.DNSException as error:
            raise QuestionError(str(error)) from None
        except (OSError, trio.TooSlowError) as error:
            raise QuestionError(f"no name server can be asked ({error})") from None
        return list(answer)


class _NothingError(QuestionError):
    """The name server says that there is no such record."""


def _resolver(server: Address | None) -> dns.asyncresolver.Resolver:
    # No cache: what is asked again is asked because it may have changed.
    resolver = dns.asyncresolver.Resolver(configure=server is None)
    if server is not None:
        resolver.nameservers = [server.host]
        resolver.port = server.port
    return resolver

"""Engines found by DNS, under load, from a real name server (dnsmasq)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.discovery.scene import HTTP_PORT, SIDE_PORT, Engines, load, proxied, until_usable, while_loaded
from tests.proxy.test_commands import free_port
from trio_pdproxy.config import ConfigError, Settings, load_settings
from trio_pdproxy.engines.discovery.dns import DnsSource
from trio_pdproxy.engines.discovery.source import Found
from trio_pdproxy.sim import SimEngine
from trio_pdproxy.testing import until

DNSMASQ = shutil.which("dnsmasq", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

needs_dnsmasq = pytest.mark.skipif(DNSMASQ is None, reason="dnsmasq is not installed (Debian: dnsmasq-base)")


class NameServer:
    """dnsmasq on a port of its own, with the records that were written last."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._config = folder / "dnsmasq.conf"
        self._process: trio.Process | None = None

    async def serve(self, records: Iterable[str]) -> None:
        """Be started anew with these records: as a name server that reloads, it is away for a moment."""
        await self.stop()
        settings = ["no-resolv", "no-hosts", f"port={self.port}", "listen-address=127.0.0.1", "bind-interfaces"]
        settings += ["user=root", "local=/llm/", "local-ttl=0", "pid-file="]
        self._config.write_text("\n".join([*settings, *records, ""]))
        assert DNSMASQ is not None
        self._process = await trio.lowlevel.open_process(
            [DNSMASQ, "--keep-in-foreground", f"--conf-file={self._config}"], stderr=subprocess.DEVNULL
        )

    async def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
            self._process = None

    async def of(self, *engines: SimEngine) -> None:
        """The records of headless services `prefill.llm` and `decode.llm` whose pods these are."""
        records = []
        for engine in engines:
            name, service = f"{engine.name}.{engine.role}.llm", f"{engine.role}.llm"
            records += [f"host-record={name},{engine.host}"]
            records += [f"srv-host=_http._tcp.{service},{name},{HTTP_PORT}"]
            records += [f"srv-host=_nixl._tcp.{service},{name},{SIDE_PORT}"]
        await self.serve(records)


@asynccontextmanager
async def name_server(folder: Path) -> AsyncIterator[NameServer]:
    server = NameServer(folder)
    try:
        yield server
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 10):
            await server.stop()


def named(engine: SimEngine) -> str:
    return f"{engine.host}:{engine.port}"


@needs_dnsmasq
async def test_engines_of_headless_services_come_and_go_under_load_and_no_request_fails(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery, name_server(tmp_path) as dns:
        engines = Engines(nursery)
        p0, d0 = await engines.start("p0", "prefill"), await engines.start("d0", "decode")
        await dns.of(p0, d0)
        async with proxied(
            discovery="dns",
            prefill_dns="_http._tcp.prefill.llm",
            decode_dns="_http._tcp.decode.llm",
            dns_server=dns.address,
        ) as (app, client):
            await until_usable(app, named(p0), named(d0))
            async with load(client) as seen:
                await while_loaded(seen)
                d1, p1 = await engines.start("d1", "decode"), await engines.start("p1", "prefill")
                await dns.of(p0, p1, d0, d1)
                await until_usable(app, *map(named, (p0, p1, d0, d1)))
                await dns.of(p1, d1)
                await until_usable(app, *map(named, (p1, d1)))
                for gone in ("p0", "d0"):
                    await engines.finished(gone)
                    engines.stop(gone)
                await while_loaded(seen)
                # Nothing at all any more, then no name server: neither is a reason to stop.
                await dns.of()
                await until(lambda: "no such name" in str(app.followers[0].source.trouble), 10)
                await while_loaded(seen)
                await dns.stop()
                await until(lambda: "no such name" not in str(app.followers[0].source.trouble), 15)
                await while_loaded(seen)
                assert app.followers[0].status()["trouble"] is not None
                assert {engine.name for engine in app.pool.engines} == {named(p1), named(d1)}
                d2 = await engines.start("d2", "decode")
                await dns.of(p1, d1, d2)
                await until_usable(app, *map(named, (p1, d1, d2)))
                assert app.followers[0].status()["trouble"] is None
            assert seen.failures == []
        nursery.cancel_scope.cancel()


async def test_ready_says_that_dns_does_not_answer() -> None:
    async with proxied(
        discovery="dns", prefill_dns="p.llm:80", decode_dns="d.llm:80", dns_server=f"127.0.0.1:{free_port()}"
    ) as (app, client):
        await until(lambda: app.followers[0].source.trouble, 15)
        ready = await client.get("/ready")
    assert ready.status_code == 503
    assert "dns: " in ready.text
    assert "there is none" in ready.text


@needs_dnsmasq
async def test_address_records_and_many_of_them(tmp_path: Path) -> None:
    async with name_server(tmp_path) as dns:
        # 120 addresses do not fit into one datagram: the answer comes over TCP.
        decode = [f"127.0.{10 + number // 250}.{1 + number % 250}" for number in range(120)]
        await dns.serve(
            ["host-record=p.llm,127.0.8.1,fd00::1", "host-record=p6.llm,fd00::2"]
            + [f"host-record=d.llm,{address}" for address in decode]
            + ["host-record=metadata.llm,169.254.169.254"]
        )
        settings = Settings(
            discovery="dns",
            prefill_dns="p.llm:8100, p6.llm:8100, metadata.llm:80, no-such.llm:1",
            decode_dns=["d.llm:8200"],
            dns_server=dns.address,
            discovery_interval=0.2,
        )
        source, told = DnsSource(settings), list[list[Found]]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.watch, lambda found: told.append(list(found)))
            await until(lambda: told and len(told[-1]) == 122, 10)
            nursery.cancel_scope.cancel()
        urls = {found.spec.url for found in told[-1] if found.role == "prefill"}
        # One of an engine's two addresses is enough; where metadata lives, no engine is.
        assert urls == {"http://127.0.8.1:8100", "http://[fd00::2]:8100"}
        assert {found.spec.side_channel.port for found in told[-1]} == {5600}
        assert "no-such.llm" in str(source.trouble)
        assert "metadata.llm" in str(source.trouble)


def test_a_question_that_is_none_is_told_with_all_other_problems() -> None:
    for flags, words in (
        ({"discovery": "dns", "prefill_dns": "http._tcp.x", "decode_dns": "d.llm:80"}, "neither"),
        ({"discovery": "dns", "prefill_dns": "_http.x", "decode_dns": "d.llm:80"}, "_SERVICE._PROTOCOL"),
        ({"discovery": "dns", "prefill_dns": "p.llm:80"}, "no decode engine"),
        ({"prefill_dns": "p.llm:80", "decode": "http://d", "prefill": "http://p"}, "discovery"),
        ({"discovery": "carrier pigeon"}, "dns"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_settings(environ={}, flags=flags)
        assert words in str(caught.value), str(caught.value)
    assert load_settings(environ={"PDPROXY_DISCOVERY": "Kubernetes"}).discovery == "kubernetes"

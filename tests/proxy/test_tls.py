"""TLS on both sides: what clients are shown and asked for, and how https engines are checked."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trustme

from trio_pdproxy import serve
from trio_pdproxy.config import Settings
from trio_pdproxy.serve import serving
from trio_pdproxy.sim import Cluster, open_cluster
from trio_pdproxy.testing import Rig, until
from trio_pdproxy.testing.rig import open_rig_on, spec_of
from trio_pdproxy.web.app import create_app

BODY = {"model": "sim", "prompt": "x", "max_tokens": 2}


class Authority:
    """A CA of its own, and what it has signed, as files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._ca = trustme.CA()
        self.ca = folder / f"{name}-ca.pem"
        self._ca.cert_pem.write_to_path(str(self.ca))

    def issue(self, whom: str) -> tuple[Path, Path]:
        """A certificate (with its chain) and its key."""
        cert, key = self._folder / f"{self._name}-{whom}.pem", self._folder / f"{self._name}-{whom}.key"
        signed = self._ca.issue_cert(whom)
        signed.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(blob.bytes() for blob in signed.cert_chain_pems))
        return cert, key

    def trusted(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """How a client trusts this authority, and what it shows."""
        context = ssl.create_default_context(cafile=self.ca)
        if shown is not None:
            context.load_cert_chain(*shown)
        return context


@asynccontextmanager
async def served(cluster: Cluster, **settings: Any) -> AsyncIterator[str]:
    engines: dict[str, Any] = {"prefill": [spec_of(cluster.prefill[0])], "decode": [spec_of(cluster.decode[0])]}
    configured = Settings(**engines, bind="127.0.0.1:0", warm_up=False, **settings)
    app = create_app(configured)
    async with serving(app, configured) as url:
        await until(lambda: not app.missing(), 10)
        yield url


async def post(url: str, context: ssl.SSLContext) -> httpx.Response:
    async with httpx.AsyncClient(verify=context, trust_env=False, timeout=10) as client:
        return await client.post(f"{url}/v1/completions", json=BODY)


async def by_hand(url: str, context: ssl.SSLContext, *, to_the_end: bool = False) -> bytes:
    """What comes back, if anything. With TLS 1.3 a client learns only then that its certificate is not taken."""
    host, port = url.removeprefix("https://").split(":")
    stream = await trio.open_ssl_over_tcp_stream(host, int(port), ssl_context=context, https_compatible=True)
    with suppress(trio.BrokenResourceError):
        async with stream:
            await stream.send_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            said = bytes(await stream.receive_some())
            while to_the_end and await stream.receive_some():
                pass
            return said
    return b""


async def test_clients_speak_https_to_the_certificate_they_are_shown(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    cert, key = ours.issue("127.0.0.1")
    async with open_cluster() as cluster, served(cluster, tls_cert_file=cert, tls_key_file=key) as url:
        assert url.startswith("https://")
        response = await post(url, ours.trusted())
        assert (response.status_code, response.http_version) == (200, "HTTP/1.1")
        with pytest.raises(httpx.ConnectError):
            await post(url, others.trusted())
        host, port = url.removeprefix("https://").split(":")
        async with await trio.open_tcp_stream(host, int(port)) as plain:
            await plain.send_all(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n\r\n")
            with trio.move_on_after(2):
                assert not (await plain.receive_some()).startswith(b"HTTP/1.1 200")


async def test_an_idle_connection_is_closed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "KEEP_ALIVE", 0.3)
    ours = Authority(tmp_path, "ours")
    cert, key = ours.issue("127.0.0.1")
    async with open_cluster() as cluster, served(cluster, tls_cert_file=cert, tls_key_file=key) as url:
        with trio.fail_after(5):
            assert (await by_hand(url, ours.trusted(), to_the_end=True)).startswith(b"HTTP/1.1 200 ")


async def test_clients_without_a_certificate_stay_outside_where_one_is_asked_for(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    cert, key = ours.issue("127.0.0.1")
    settings = {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": ours.ca}
    async with open_cluster() as cluster, served(cluster, **settings) as url:
        assert (await post(url, ours.trusted(ours.issue("a-client")))).status_code == 200
        assert await by_hand(url, ours.trusted(ours.issue("by-hand")))
        before = len(cluster.decode[0].requests)
        for context in (ours.trusted(), ours.trusted(others.issue("a-client"))):
            assert not await by_hand(url, context)
        assert len(cluster.decode[0].requests) == before


@asynccontextmanager
async def behind_tls(cluster: Cluster, context: ssl.SSLContext) -> AsyncIterator[dict[str, str]]:
    """Each engine once more, behind TLS: its name -> its https url."""

    urls: dict[str, str] = {}
    async with trio.open_nursery() as nursery:
        for engine in (*cluster.prefill, *cluster.decode):

            async def serve(stream: trio.SocketStream, engine=engine) -> None:  # type: ignore[no-untyped-def]
                secure = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
                # Of a handshake that the other side gives up.
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await engine.serve_stream(secure)

            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            await nursery.start(trio.serve_listeners, serve, listeners)
            urls[engine.name] = f"https://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        yield urls
        nursery.cancel_scope.cancel("over")


@asynccontextmanager
async def in_front(cluster: Cluster, urls: dict[str, str], *, ready: bool, **files: Any) -> AsyncIterator[Rig]:
    """The proxy in front of the https engines."""
    p, d = cluster.prefill[0], cluster.decode[0]
    async with open_rig_on(
        cluster,
        ready=ready,
        prefill_spec={"url": urls[p.name]},
        decode_spec={"url": urls[d.name]},
        **files,
    ) as rig:
        yield rig


async def test_https_engines_are_checked_and_shown_a_certificate(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ours.ca))
    context.load_cert_chain(*ours.issue("127.0.0.1"))
    context.verify_mode = ssl.CERT_REQUIRED
    cert, key = ours.issue("the-proxy")
    shown = {"engine_cert_file": cert, "engine_key_file": key}
    async with open_cluster() as cluster, behind_tls(cluster, context) as urls:
        async with in_front(cluster, urls, ready=True, engine_ca_file=ours.ca, **shown) as rig:
            for _ in range(3):
                assert (await rig.post()).status_code == 200
            answer = await rig.stream(max_tokens=20)
            assert (answer.status, answer.complete) == (200, True)
            await rig.quiet()
        for files in ({"engine_ca_file": others.ca, **shown}, {"engine_ca_file": ours.ca}, shown):
            async with in_front(cluster, urls, ready=False, **files) as rig:
                await trio.sleep(0.2)
                assert rig.app.missing(), "an engine that is not what it should be is not used"
                assert (await rig.post()).status_code == 503

"""A Kubernetes API on this machine: kmock's emulator, with what a watcher needs of a real one added to it.

kmock has the HTTP, the objects' addresses, the verbs and the streams; added are versions, label selectors, pages, 410
and authorization, as the Kubernetes API conventions describe them. It runs on asyncio, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import copy
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp.web
import attrs
import kmock
import trio
from aiohttp.test_utils import RawTestServer

Json = dict[str, Any]


def selected(pod: Json, selector: str) -> bool:
    """Equality-based selectors, which the proxy's defaults are."""
    wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
    labels = pod["metadata"].get("labels", {})
    return all(labels.get(name) == value for name, value in wanted.items())


@attrs.define(kw_only=True)
class VersionedApi(kmock.KubernetesEmulator):
    """Pods with versions. Of `log`, every change so far, only what came after `forgotten` can be watched."""

    pods: dict[str, Json] = attrs.field(factory=dict)
    log: list[tuple[int, Json]] = attrs.field(factory=list)
    version: int = 100
    forgotten: int = 0
    epoch: int = 0
    """Watches of an earlier one end."""
    changed: asyncio.Condition = attrs.field(factory=asyncio.Condition)
    down: bool = False
    token: str | None = None
    seen: list[str] = attrs.field(factory=list)
    """What was asked: list, watch, or 401, 503."""
    watching: list[asyncio.BaseTransport] = attrs.field(factory=list)

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        raw = request._raw_request
        assert raw is not None
        if self.down:
            self.seen.append("503")
            return aiohttp.web.Response(status=503, text="the API server is down")
        if self.token is not None and raw.headers.get("authorization") != f"Bearer {self.token}":
            self.seen.append("401")
            status = {"kind": "Status", "code": 401, "message": "Unauthorized", "reason": "Unauthorized"}
            return aiohttp.web.json_response(status, status=401)
        self.seen.append(str(request.action.value) if request.action else "?")
        if request.action is kmock.action.WATCH and raw.transport is not None:
            self.watching.append(raw.transport)
        return await super()._handle(request)

    async def _serve_list(self, request: kmock.Request) -> Any:
        selector = request.params.get("labelSelector", "")
        pods = [pod for _, pod in sorted(self.pods.items()) if selected(pod, selector)]
        start, limit = int(request.params.get("continue") or 0), int(request.params["limit"])
        page = pods[start : start + limit]
        more = str(start + len(page)) if start + len(page) < len(pods) else ""
        metadata = {"resourceVersion": str(self.version), "continue": more}
        return {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": page}

    async def _serve_watch(self, request: kmock.Request) -> AsyncIterator[Any]:
        yield b""
        since, epoch = int(request.params["resourceVersion"]), self.epoch
        if since < self.forgotten:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            yield {"type": "ERROR", "object": status}
            return
        while epoch == self.epoch:
            for version, event in list(self.log):
                if version > since and selected(event["object"], request.params["labelSelector"]):
                    yield event
            async with self.changed:
                if since == self.version and epoch == self.epoch:
                    await self.changed.wait()
                else:
                    since = self.version


class Emulator:
    """The API as a test sees it, from its trio side."""

    def __init__(self, api: VersionedApi, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.api = api
        self.url = url
        self._loop = loop

    async def put(self, pod: Json) -> None:
        """Add a pod, or change it."""
        await self._run(self._change("MODIFIED" if pod["metadata"]["name"] in self.api.pods else "ADDED", pod))

    async def delete(self, name: str) -> None:
        """The end of a pod."""
        await self._run(self._change("DELETED", self.api.pods[name]))

    async def end_watches(self) -> None:
        """As the API server does when their time is up."""

        async def end() -> None:
            async with self.api.changed:
                self.api.epoch += 1
                self.api.changed.notify_all()

        await self._run(end())

    async def cut_watches(self) -> None:
        """Their connections break."""

        async def cut() -> None:
            for transport in self.api.watching:
                transport.abort()  # type: ignore[attr-defined]
            self.api.watching.clear()

        await self._run(cut())

    async def forget(self) -> None:
        """What was watched so far cannot be taken up any more."""

        async def forget() -> None:
            async with self.api.changed:
                self.api.version += 1
                self.api.forgotten = self.api.version
                self.api.log.clear()

        await self._run(forget())

    async def _change(self, kind: str, pod: Json) -> None:
        async with self.api.changed:
            self.api.version += 1
            pod = copy.deepcopy(pod)
            pod["metadata"]["resourceVersion"] = str(self.api.version)
            if kind == "DELETED":
                del self.api.pods[pod["metadata"]["name"]]
            else:
                self.api.pods[pod["metadata"]["name"]] = pod
            self.api.log.append((self.api.version, {"type": kind, "object": pod}))
            self.api.changed.notify_all()

    async def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        await trio.to_thread.run_sync(future.result, 10)


@contextmanager
def emulated(*, token: str | None = None, tls: ssl.SSLContext | None = None) -> Iterator[Emulator]:
    """An API server with no pods until the block ends."""
    ready = threading.Event()
    made: list[Emulator] = []
    stops: list[Callable[[], object]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        async with VersionedApi(token=token) as api:
            api.resources["v1/pods"] = {"namespaced": True, "kind": "Pod"}  # type: ignore[assignment]
            server = RawTestServer(api)
            await server.start_server(ssl=tls)
            scheme = "http" if tls is None else "https"
            made.append(Emulator(api, loop, f"{scheme}://127.0.0.1:{server.port}"))
            ready.set()
            await stop.wait()
            for transport in api.watching:
                transport.abort()  # type: ignore[attr-defined]
            await server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20), "the emulator does not start"
        yield made[0]
    finally:
        stops[0]()
        thread.join(20)

"""One HTTP request, as Hypercorn hands it over: the relay paths served here, everything else by Quart.

The relay does without Quart's request and response objects, and not only for speed: a Quart response sends its status
before its body is asked for, and the exchange holds the status until the decode engine's first byte.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from os import urandom
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, HTTPScope
from quart.asgi import ASGIHTTPConnection
from quart_trio.asgi import TrioASGIHTTPConnection

from trio_pdproxy.core.errors import Fault, ProxyError
from trio_pdproxy.core.plan import APIS, Api, read_plan
from trio_pdproxy.core.report import Report
from trio_pdproxy.exchange import run_exchange
from trio_pdproxy.web import guard
from trio_pdproxy.web.direct import EXTENSION, Direct
from trio_pdproxy.web.plain import BODY
from trio_pdproxy.web.sink import AsgiSink, answer

if TYPE_CHECKING:
    from quart.wrappers import Request

    from trio_pdproxy.web.app import ProxyApp

log = logging.getLogger("trio_pdproxy.web")


class _GoneError(Exception):
    """The client left while its body was being read."""


class ProxyConnection(TrioASGIHTTPConnection):
    """See the module. Made by Quart for each request, with `app` and `scope`."""

    app: ProxyApp

    def __init__(self, app: ProxyApp, scope: HTTPScope) -> None:
        super().__init__(app, scope)
        self._finishing = False

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        request_id = guard.client_request_id(self.scope["headers"]) or urandom(16).hex()
        try:
            guard.check(self.scope)
            headers = self._admit()
        except ProxyError as error:
            dialect = guard.dialect_of(self.scope["raw_path"])
            # Who was refused for how it frames requests must not have its next bytes read as one of them.
            await answer(send, error, request_id, dialect, close=True)
            return
        api = APIS.get(self.scope["raw_path"].decode("ascii"))
        if api is None:
            await self._quart(receive, send)
        else:
            await self._relay(api, headers, request_id, receive, send)

    def _admit(self) -> guard.Headers:
        """The client's headers without what is not for engines. Raises `ProxyError`."""
        if self.app.gate is None or not guard.needs_key(self.scope["raw_path"]):
            return self.scope["headers"]
        return self.app.gate.admit(self.scope["headers"])

    # -- the relay -------------------------------------------------------------------------------

    async def _relay(
        self,
        api: Api,
        headers: guard.Headers,
        request_id: str,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
    ) -> None:
        report = Report(request_id=request_id, route=api.path, stream=False, accepted=trio.current_time())
        self.app.active += 1
        try:
            await self._exchange(api, headers, report, receive, send)
        finally:
            self.app.active -= 1
            self.app.observe(report)

    async def _exchange(
        self,
        api: Api,
        headers: guard.Headers,
        report: Report,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
    ) -> None:
        pool = self.app.usable_pool()
        try:
            if pool is None:
                raise self.app.not_serving()
            settings = self.app.settings
            plan = read_plan(
                api,
                await self._read_body(receive),
                headers,
                session_header=settings.affinity_header.encode(),
                min_prefill_tokens=settings.min_prefill_tokens,
            )
        except ProxyError as error:
            report.status, report.outcome = error.status, _outcome(error)
            await answer(send, error, report.request_id, api.dialect)
            return
        except _GoneError:
            report.outcome = "disconnect"
            return
        plan = self.app.traced(plan, report, self.scope["headers"])
        report.planned = trio.current_time()
        offered: Direct | None = self.scope["extensions"].get(EXTENSION)  # type: ignore[assignment]  # not a dict
        sink = AsgiSink(send, offered)
        exchange = partial(run_exchange, plan, pool, sink, report)
        try:
            if offered is None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_watch_client, receive, sink, nursery.cancel_scope)
                    await exchange()
                    nursery.cancel_scope.cancel("the exchange is over")
            else:
                await _until_left(offered, sink, exchange)
        except* Exception as group:
            await self._failed(group, sink, send, report, api)

    async def _failed(
        self, group: ExceptionGroup[Exception], sink: AsgiSink, send: ASGISendCallable, report: Report, api: Api
    ) -> None:
        """A fault of ours. It must not cross into Quart, which would drop what comes together with a cancellation."""
        log.error("request %s failed in the proxy", report.request_id, exc_info=group)
        report.outcome = "proxy_error"
        if not sink.started:
            report.status = 500
            error = ProxyError("the proxy failed", status=500, fault=Fault.PROXY, code="internal_error")
            await answer(send, error, report.request_id, api.dialect)

    async def _read_body(self, receive: ASGIReceiveCallable) -> bytes:
        """The whole body, within its limit. Each piece has a deadline, and all have one that grows with what came."""
        settings = self.app.settings
        limit = settings.body_limit
        length = guard.declared_length(self.scope["headers"])
        if (length or 0) > limit:
            raise guard.too_large(limit)
        whole: Any = self.scope["extensions"].get(BODY)
        if whole is not None:
            return whole  # type: ignore[no-any-return]
        pieces: list[bytes] = []
        size = 0
        begun = trio.current_time()
        with trio.CancelScope() as scope:
            while True:
                # Who sends a byte a minute is not silent, and must not hold a connection for days either.
                slowest = begun + settings.upload_timeout + size / guard.SLOWEST_UPLOAD
                scope.deadline = min(trio.current_time() + settings.upload_timeout, slowest)
                event: Any = await receive()
                if event["type"] == "http.disconnect":
                    raise _GoneError
                piece = event.get("body", b"")
                size += len(piece)
                if size > limit:
                    raise guard.too_large(limit)
                pieces.append(piece)
                # With a declared length the end is known before it is told.
                if size == length or not event.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        raise ProxyError(
            f"the body came too slowly: nothing for {settings.upload_timeout:g} s, or less than "
            f"{guard.SLOWEST_UPLOAD} bytes/s",
            status=408,
            fault=Fault.CLIENT,
            code="upload_timeout",
        )

    # -- everything else -------------------------------------------------------------------------

    async def _quart(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def sending(event: ASGISendEvent) -> None:
            if event["type"] == "http.response.body" and not event.get("more_body", False):
                self._finishing = True
            await send(event)

        await super().__call__(receive, sending)

    async def handle_messages(  # type: ignore[override]  # Quart-Trio's signature, not Quart's
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        # Quart-Trio cancels as soon as the client is reported gone, and Hypercorn reports that from within the last
        # send of a normal answer: the cancelled send then never arms the keep-alive timer (see AsgiSink).
        await ASGIHTTPConnection.handle_messages(self, request, receive)
        if not self._finishing:
            nursery.cancel_scope.cancel("the client is gone")


async def _until_left(offered: Direct, sink: AsgiSink, exchange: Callable[..., Awaitable[object]]) -> None:
    """What `_watch_client` does, without a task: the server says when the client has left."""
    scope: trio.CancelScope

    def leave() -> None:
        if not sink.finishing:
            scope.cancel("the client is gone")

    def begun(its_scope: trio.CancelScope) -> None:
        nonlocal scope
        scope = its_scope
        offered.on_lost = leave
        if offered.lost:
            leave()

    try:
        await exchange(begun=begun)
    finally:
        # While this request's debts are settled another one may have begun on the connection.
        if offered.on_lost is leave:
            offered.on_lost = None


async def _watch_client(receive: ASGIReceiveCallable, sink: AsgiSink, scope: trio.CancelScope) -> None:
    """Cancel `scope` when the client leaves; a report that comes with the response's own end is none."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not sink.finishing:
        scope.cancel("the client is gone")


def _outcome(error: ProxyError) -> str:
    return "client_error" if error.fault is Fault.CLIENT else "proxy_error"

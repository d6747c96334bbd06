"""The app's core task: the nursery in which its engines are watched, from startup to shutdown.

Ours and not Quart-Trio's because a task that dies there leaves a server that goes on answering 200 to /health. Here
its death is logged, /health and the relay say 503 from then on, and `app.core_died` tells whoever serves the app.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, LifespanScope

from trio_pdproxy.config import ConfigError
from trio_pdproxy.core.errors import only
from trio_pdproxy.exchange import keep_warm
from trio_pdproxy.web.auth import watch_keys

if TYPE_CHECKING:
    from trio_pdproxy.web.app import ProxyApp

log = logging.getLogger("trio_pdproxy.web")

LAST_SPANS = 3.0
"""Seconds for the traces that have not been sent yet, at shutdown."""


class Lifespan:
    def __init__(self, app: ProxyApp, scope: LifespanScope) -> None:
        self.app = app

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        await receive()  # lifespan.startup
        try:
            # Not at import: every worker process imports the app again, and a test or a library sets it up itself.
            self.app.configure(os.environ)
        except ConfigError as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        started = False
        try:
            async with trio.open_nursery() as nursery:
                self.app.nursery = nursery
                nursery.start_soon(self.app.pool.run)
                if self.app.siblings is not None:
                    await nursery.start(self.app.siblings.run)
                for follower in self.app.followers:
                    nursery.start_soon(follower.run)
                if self.app.gate is not None and self.app.settings.client_keys_file is not None:
                    nursery.start_soon(watch_keys, self.app.gate, self.app.settings.client_keys_file)
                if self.app.settings.warm_up:
                    nursery.start_soon(keep_warm, self.app.pool)
                await self.app.startup()
                started = True
                await send({"type": "lifespan.startup.complete"})
                await receive()  # lifespan.shutdown
                await self.app.shutdown()
                nursery.cancel_scope.cancel("shutdown")
        except* Exception as group:
            log.critical("the proxy's core task died", exc_info=group)
            self.app.core_failed(str(only(group, Exception)))
        if not started:
            await send({"type": "lifespan.startup.failed", "message": self.app.failure or "startup failed"})
            return
        if self.app.failure is not None:
            await receive()  # still to come: the server stops when it is told to
        if self.app.tracing is not None:
            with trio.move_on_after(LAST_SPANS):
                await trio.to_thread.run_sync(self.app.tracing.shutdown, abandon_on_cancel=True)
        await send({"type": "lifespan.shutdown.complete"})

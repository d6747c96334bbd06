"""Where the client's bytes go."""

from __future__ import annotations

from typing import Protocol

from trio_pdproxy.engines.wire import Headers


class Sink(Protocol):
    """The client's side of one exchange.

    `start` once at most, then `write` any number of times, then `finish` once: a response that is not finished is
    seen by the client as truncated. Each may block (that is the back-pressure) and be cancelled.
    """

    @property
    def started(self) -> bool:
        """The status line is out: nothing can take it back."""
        ...

    async def start(self, status: int, headers: Headers) -> None: ...

    async def write(self, data: bytes) -> None: ...

    async def finish(self) -> None: ...

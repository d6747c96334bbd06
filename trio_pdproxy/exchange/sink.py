"""Where the client's bytes go."""

from __future__ import annotations

from typing import Protocol

from trio_pdproxy.engines.wire import Headers


class Sink(Protocol):
    """The client's side of one exchange.

    `start` once at most, then `write` any number of times, then `finish` or `cut` once: a response that is not finished
    is seen by the client as truncated. Each may block (that is the back-pressure) and be cancelled.
    """

    @property
    def started(self) -> bool:
        """The status line is out: nothing can take it back."""
        ...

    @property
    def takes_at_once(self) -> bool:
        """Whether `write_now` ever takes anything, now that the response has started."""
        ...

    async def start(self, status: int, headers: Headers) -> None: ...

    def write_now(self, data: bytes) -> bool:
        """Take `data` (at least one byte), without a checkpoint. True: it is out. False: `flush` it before anything
        else is written."""
        ...

    def pass_on(self, framed: bytes) -> bool:
        """`write_now` for one whole chunk of HTTP/1.1's chunked coding, framing and all. Only where `takes_at_once`."""
        ...

    async def flush(self) -> None: ...

    async def write(self, data: bytes) -> None:
        """Both of them, behind what is still to be flushed."""
        ...

    async def finish(self) -> None: ...

    async def cut(self) -> None:
        """Instead of `finish`: no more comes. The client sees the response as truncated: at once where it can be told,
        else when the exchange has ended, debts included."""
        ...

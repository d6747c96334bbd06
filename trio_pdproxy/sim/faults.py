"""What can be made to go wrong, where in an answer, and for which requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import trio

Where = Literal["before_head", "in_head", "after_head", "mid_body", "after_body"]
What = Literal["status", "reset", "fin", "hang", "slow", "garbage", "extra", "sse_error", "no_params", "other_params"]
How = Literal["running", "complete", "aborted", "fault"]

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass(slots=True, eq=False)
class SeenRequest:
    """A request as the engine saw it. `id` is the X-Request-Id header; times are trio's."""

    id: str | None
    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case; of a repeated header the last value."""
    raw: bytes
    body: Any
    """The decoded JSON, or None if it was none."""
    started: float
    ended: float | None = None
    how: How = "running"
    """`aborted`: the client left (or the engine was killed) before the answer was complete."""
    status: int | None = None
    rank: int | None = None
    """The data-parallel rank that was given the work; None if it was refused or a fault came first."""

    @property
    def transfer(self) -> dict[str, Any] | None:
        """The leg's `kv_transfer_params`."""
        params = self.body.get("kv_transfer_params") if isinstance(self.body, dict) else None
        return params if isinstance(params, dict) else None


@dataclass(slots=True, eq=False)
class Fault:
    """One way of failing.

    where: `before_head` acts before any work of the engine (nothing computed, registered or pushed), unless
      `after_work` is set; `in_head` after half of the head's bytes; `after_head`; `mid_body` after `after`
      events of a stream or half of another body; `after_body` after the body's last byte but, on a chunked
      answer, before the chunk that ends it.
    what:
      status        answer `status`, `body` and `headers` and do no work at all (always before the head)
      reset, fin    cut the connection: with a TCP reset, or cleanly
      hang          say no more until the client closes the connection
      slow          wait `delay` seconds (and for `until`), then go on as if nothing had been
      garbage       bytes that are no HTTP (`body`, if given), then a clean close
      extra         the whole answer, and then more bytes than were declared (`where` is not used)
      sse_error     the stream's own error event and end ([DONE] where there is one; /v1/responses is cut instead);
                    a 500 on an answer that is no stream
      no_params     P answers 200 without kv_transfer_params (it did compute, and pushes)
      other_params  P answers with another engine id (it did compute, and pushes)
    `delay` comes before the deed in every case. `path` None means the generation endpoints; name another
    path ("/health") for a fault there. `times` None: for ever.
    """

    where: Where
    what: What
    path: str | None = None
    match: Callable[[SeenRequest], bool] | None = None
    times: int | None = 1
    delay: float = 0.0
    until: trio.Event | None = None
    status: int = 500
    body: bytes | None = None
    headers: Iterable[tuple[str, str]] = ()
    after: int = 1
    after_work: bool = False
    hits: int = 0
    """How many requests it has met."""

    def matches(self, seen: SeenRequest) -> bool:
        if self.times is not None and self.hits >= self.times:
            return False
        if self.path is None and seen.path not in GENERATION_PATHS:
            return False
        if self.path is not None and self.path != seen.path:
            return False
        return self.match is None or self.match(seen)


@dataclass(slots=True)
class FaultScript:
    """The faults of one engine. For each request the first one that matches is used, and only that one."""

    faults: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def clear(self) -> None:
        self.faults.clear()

    def take(self, seen: SeenRequest) -> Fault | None:
        for fault in self.faults:
            if fault.matches(seen):
                fault.hits += 1
                return fault
        return None

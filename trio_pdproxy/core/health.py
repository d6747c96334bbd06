"""When an engine is left alone, and when a failure is no longer repeated: pure state, the time handed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LONGEST_EJECTION = 60.0
"""Seconds: an engine that keeps failing is tried again at least this often."""

BURST = 10.0
"""Retries that may come at once, whatever came before."""


class Circuit(Enum):
    CLOSED = "closed"
    """It gets requests."""
    OPEN = "open"
    """It gets none."""
    HALF_OPEN = "half_open"
    """It gets one at a time: the next outcome decides."""


@dataclass(slots=True)
class Breaker:
    """A circuit breaker fed with the outcomes of real requests.

    `eject_after` failures in a row open it for `eject_time` seconds, twice as long each time the trial after that
    fails again. `tick(now)` lets a rested one be tried. What a client did wrong is neither success nor failure: it is
    not told here.
    """

    eject_after: int
    eject_time: float
    circuit: Circuit = Circuit.CLOSED
    failures: int = 0
    """In a row."""
    ejections: int = 0
    """In a row: since the last success."""
    until: float = 0.0

    def failed(self, now: float) -> bool:
        """One more failure; whether it opened the circuit."""
        self.failures += 1
        if self.circuit is Circuit.OPEN:
            return False  # one that was under way before
        if self.circuit is Circuit.CLOSED and self.failures < self.eject_after:
            return False
        self.circuit = Circuit.OPEN
        self.until = now + min(self.eject_time * 2**self.ejections, LONGEST_EJECTION)
        self.ejections += 1
        return True

    def succeeded(self) -> bool:
        """One success; whether it closed the circuit. One that was under way when it opened does not."""
        if self.circuit is Circuit.OPEN:
            return False
        closed = self.circuit is Circuit.HALF_OPEN
        self.circuit = Circuit.CLOSED
        self.failures = self.ejections = 0
        return closed

    def tick(self, now: float) -> bool:
        """Whether it has just become half open."""
        if self.circuit is not Circuit.OPEN or now < self.until:
            return False
        self.circuit = Circuit.HALF_OPEN
        return True


@dataclass(slots=True)
class RetryBudget:
    """Retries in proportion to requests: `ratio` of a retry is earned by each request, at most `BURST` are kept."""

    ratio: float
    left: float = BURST

    def earn(self) -> None:
        self.left = min(BURST, self.left + self.ratio)

    def spend(self) -> bool:
        """Whether one more retry is allowed; it is spent then."""
        if self.left < 1:
            return False
        self.left -= 1
        return True


def back_off(attempt: int, draw: float) -> float:
    """Seconds before the `attempt`-th retry (1, 2, ...): 25 ms, doubled each time up to half a second, half of it by
    chance (`draw` in 0..1), so that what failed together does not come back together."""
    longest: float = min(0.025 * 2 ** (attempt - 1), 0.5)
    return longest * (0.5 + 0.5 * draw)

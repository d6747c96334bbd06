"""Which engines serve a request: pure functions over the engines of the pool as they stand.

A policy is one function; what it must know is in `Candidate`. The counters are the proxy's own and exact at the
instant of choosing; nothing here asks an engine or changes one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """One engine as a policy sees it."""

    @property
    def name(self) -> str: ...
    @property
    def inflight(self) -> int: ...
    @property
    def max_inflight(self) -> int: ...
    @property
    def usable(self) -> bool: ...
    @property
    def compatibility(self) -> str | None:
        """Engines pair if these are equal; None is not known, and taken on trust."""


C = TypeVar("C", bound=Candidate)


def compatible(prefill: Candidate, decode: Candidate) -> bool:
    """Whether the two may be given one request."""
    ours, theirs = prefill.compatibility, decode.compatibility
    return ours is None or theirs is None or ours == theirs


def round_robin(candidates: Sequence[C], turn: int) -> Sequence[C]:
    """The candidates in order of preference, each one first in its turn."""
    if len(candidates) < 2:
        return candidates
    start = turn % len(candidates)
    return [*candidates[start:], *candidates[:start]]


def _open(candidates: Iterable[C], avoid: Collection[str]) -> list[C]:
    return [c for c in candidates if c.usable and c.name not in avoid]


def choose_pair(
    prefill: Iterable[C], decode: Iterable[C], turn: int, avoid: Collection[str] = ()
) -> tuple[C, C] | None:
    """The pair whose turn it is, both usable, compatible and with a free place; None if there is none.

    `avoid` are names of engines that failed this request already: never chosen.
    """
    partners = round_robin(_open(decode, avoid), turn)
    for p in round_robin(_open(prefill, avoid), turn):
        if p.inflight >= p.max_inflight:
            continue
        for d in partners:
            if d.inflight < d.max_inflight and compatible(p, d):
                return p, d
    return None


def choose_one(candidates: Iterable[C], turn: int, avoid: Collection[str] = ()) -> C | None:
    """The single engine whose turn it is, usable and with a free place; None if there is none."""
    for candidate in round_robin(_open(candidates, avoid), turn):
        if candidate.inflight < candidate.max_inflight:
            return candidate
    return None


def any_pair(prefill: Iterable[C], decode: Iterable[C], avoid: Collection[str] = ()) -> bool:
    """Whether a pair would be there if places were free: only then does waiting for one make sense."""
    partners = _open(decode, avoid)
    return any(compatible(p, d) for p in _open(prefill, avoid) for d in partners)


def any_one(candidates: Iterable[C], avoid: Collection[str] = ()) -> bool:
    """The same for a single engine."""
    return bool(_open(candidates, avoid))

"""Blocks, leases and the pairing of the two legs: pure bookkeeping, given its ids and times.

The rules are those of vLLM's push connector (`nixl/push_worker.py`, `nixl/push_scheduler.py`, 0.32); a pull
needs no pairing: D names P's request and its blocks, and reads them whatever they hold by then.
- P and D pair by the request id, first exactly, then without its random suffix; of several candidates the
  oldest is taken. Nothing else is compared: two live requests with one id can get each other's KV.
- P keeps the blocks of a finished prefill until they are pushed or the lease ends, whichever is first.
- A registration of D is consumed by the first push and never times out.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)

_T = TypeVar("_T")


def base_request_id(request_id: str) -> str:
    """The id without the `-<8 hex>` that each engine adds by itself."""
    return _SUFFIX.sub("", request_id)


@dataclass(slots=True)
class BlockPool:
    """Which request holds which blocks, and whose KV is in them: a free block keeps it until it is used again.

    Block 0 is nobody's, as on real engines. Of the free ones, those never used go first, then the longest free.
    """

    total: int
    held: dict[str, list[int]] = field(default_factory=dict)
    in_use: int = 0
    _keys: dict[int, str] = field(default_factory=dict)
    _freed: deque[int] = field(default_factory=deque)

    def take(self, request_id: str, count: int, key: str = "") -> bool:
        """Reserve `count` blocks for a request that holds none yet; False if there are not that many.

        `key`: of the prompt whose KV will be in them.
        """
        if self.in_use + count > self.total:
            return False
        fresh = range(len(self._keys) + 1, min(len(self._keys) + count, self.total) + 1)
        blocks = [*fresh, *(self._freed.popleft() for _ in range(count - len(fresh)))]
        self._keys.update(dict.fromkeys(blocks, key))
        self.held[request_id] = blocks
        self.in_use += count
        return True

    def give(self, request_id: str) -> None:
        """Return what the request holds; a request that holds nothing is no error."""
        blocks = self.held.pop(request_id, ())
        self._freed.extend(blocks)
        self.in_use -= len(blocks)

    def read(self, blocks: Sequence[int]) -> str:
        """The key of the prompt whose KV is in these blocks; of a mixture, a key that no prompt has."""
        keys = {self._keys.get(block, "") for block in blocks}
        if len(keys) == 1:
            return keys.pop()
        return hashlib.sha256("|".join(self._keys.get(block, "") for block in blocks).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Registration:
    """D's message to P: here are my blocks for this request, write the KV into them."""

    request_id: str
    blocks: int
    decode_engine_id: str
    decode_url: str
    decode_life: str
    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True, slots=True)
class Pull:
    """D's message to P about P's own request of this id, which has been computed.

    read: D reads these blocks, and P need not keep them. release: P need not keep them, D does not want them.
    renew: D will read them later.
    """

    request_id: str
    blocks: tuple[int, ...]
    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    pp_size: int = 1
    what: Literal["read", "release", "renew"] = "read"


@dataclass(frozen=True, slots=True)
class Finished:
    """A prefill that P has computed: its blocks, and the key of the prompt whose KV is in them."""

    request_id: str
    blocks: int
    key: str


class _Waiting(Generic[_T]):
    """What waits for its partner. Kept by base id: a match among thousands must not scan them."""

    def __init__(self) -> None:
        self.by_base: dict[str, dict[str, _T]] = {}

    def add(self, request_id: str, item: _T) -> None:
        self.by_base.setdefault(base_request_id(request_id), {})[request_id] = item

    def pop_match(self, request_id: str) -> _T | None:
        """The item with this id, else the oldest one with this base id."""
        candidates = self.by_base.get(base_request_id(request_id))
        if not candidates:
            return None
        return self.remove(request_id if request_id in candidates else next(iter(candidates)))

    def remove(self, request_id: str) -> _T | None:
        base = base_request_id(request_id)
        candidates = self.by_base.get(base, {})
        item = candidates.pop(request_id, None)
        if not candidates:
            self.by_base.pop(base, None)
        return item


@dataclass(slots=True)
class PushLedger:
    """P's side of the pairing. Each method returns the partner that was found and removes it, or None."""

    registrations: _Waiting[Registration] = field(default_factory=_Waiting)
    finished: _Waiting[Finished] = field(default_factory=_Waiting)
    leases: dict[str, float] = field(default_factory=dict)

    def register(self, registration: Registration) -> Finished | None:
        found = self.finished.pop_match(registration.request_id)
        if found is None:
            self.registrations.add(registration.request_id, registration)
        return found

    def finish(self, done: Finished, expires: float) -> Registration | None:
        """The lease runs from here, found or not: it is what frees the blocks of a push that fails."""
        self.leases[done.request_id] = expires
        found = self.registrations.pop_match(done.request_id)
        if found is None:
            self.finished.add(done.request_id, done)
        return found

    def pushed(self, request_id: str) -> None:
        """The write has succeeded: the lease is over."""
        self.leases.pop(request_id, None)

    def hold(self, request_id: str, expires: float) -> None:
        """Begin a lease that is no push's."""
        self.leases[request_id] = expires

    def pulled(self, request_id: str) -> bool:
        """The lease is over because D has read; False if there was none (any more)."""
        return self.leases.pop(request_id, None) is not None

    def renew(self, request_id: str, expires: float) -> None:
        """Let a lease that has not ended run longer."""
        if self.leases.pop(request_id, None) is not None:
            self.leases[request_id] = expires

    def expire(self, now: float) -> list[str]:
        """Forget the prefills whose lease has ended and return their ids."""
        over: list[str] = []
        # Leases are added in the order of their ends: a clock does not go back and the length is constant.
        for request_id, expires in self.leases.items():
            if expires > now:
                break
            over.append(request_id)
        for request_id in over:
            del self.leases[request_id]
            self.finished.remove(request_id)
        return over

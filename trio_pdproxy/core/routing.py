"""Which engines serve a request: pure functions over the engines of the pool as they stand.

A policy is one function and one row of `POLICIES`: of candidates that may all be taken (usable, with a free place, not
tried already) it picks one. What it must know of the request is in the `Wish`, chance included, so the same wish and
the same counters give the same choice: also in another proxy in front of the same engines.
The counters are the proxy's own and exact at the instant of choosing; an engine's /metrics lag behind by seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Protocol, TypeVar

AFFINITY_BYTES = 512
"""Of a prompt (as it stands in the request): what has these in common shares a prefix worth going to the same engine
for. Some hundred tokens: longer than what all chats begin with, shorter than most system prompts."""

LOAD_BOUND = 1.25
"""An engine preferred for affinity is passed over while it has more than this times the mean number in flight, so that
one hot prefix cannot drown it (consistent hashing with bounded loads, Mirrokni et al. 2018)."""


SLOTS = 4096
"""Keys are told apart by this many values: enough for hundreds of engines to have even shares, few enough to keep."""


class Candidate(Protocol):
    """One engine as a policy sees it."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int:
        """A number made of the name (see `stable_hash`)."""

    @property
    def inflight(self) -> int: ...
    @property
    def max_inflight(self) -> int: ...
    @property
    def compatibility(self) -> str | None:
        """Engines pair if these are equal; None is not known, and taken on trust."""


C = TypeVar("C", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a policy may know of one request."""

    turn: int = 0
    """Counts the choices of this pool."""
    prefix: bytes = b""
    """The prompt's beginning."""
    session: bytes | None = None
    """The client's session header; None where it sent none."""
    draw: int = 0
    """A random number of 64 bits."""


class Policy(Protocol):
    def __call__(self, candidates: Sequence[C], wish: Wish) -> C:
        """One of `candidates`, of which there is at least one."""


def round_robin(candidates: Sequence[C], wish: Wish) -> C:
    """Each in its turn, whatever it costs."""
    return candidates[wish.turn % len(candidates)]


def least_inflight(candidates: Sequence[C], wish: Wish) -> C:
    """The one with the least to do; among equals, each in its turn."""
    start = wish.turn % len(candidates)
    return min((*candidates[start:], *candidates[:start]), key=_inflight)


def power_of_two(candidates: Sequence[C], wish: Wish) -> C:
    """The less busy of two drawn at random: nearly as even as the least busy of all, and no herd runs to the same one
    where several proxies see the same engines."""
    count = len(candidates)
    first = candidates[wish.draw % count]
    second = candidates[(wish.draw >> 32) % count]
    return second if second.inflight < first.inflight else first


def prefix_affinity(candidates: Sequence[C], wish: Wish) -> C:
    """The same engine for the same beginning of a prompt, whose KV it then has already; bounded by load."""
    return _preferred(candidates, wish.prefix)


def session_affinity(candidates: Sequence[C], wish: Wish) -> C:
    """The same engine for the same session header, bounded by load; where there is none, the least busy."""
    if wish.session is None:
        return least_inflight(candidates, wish)
    return _preferred(candidates, wish.session)


POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "least_inflight": least_inflight,
    "power_of_two": power_of_two,
    "prefix_affinity": prefix_affinity,
    "session_affinity": session_affinity,
}
"""By name. A policy of your own is one more row, made before the settings that name it."""


def _preferred(candidates: Sequence[C], key: bytes) -> C:
    """Rendezvous hashing: each engine bids with a hash of key and itself, the highest that is not overloaded wins. An
    engine that comes or goes moves no key but its own."""
    limit = LOAD_BOUND * (sum(map(_inflight, candidates)) + 1) / len(candidates)
    for index in _ranking(stable_hash(key) % SLOTS, tuple(map(_seed, candidates))):
        if candidates[index].inflight < limit:
            return candidates[index]
    raise AssertionError("the least busy has at most the mean")


@lru_cache(maxsize=SLOTS)
def _ranking(slot: int, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The bidders by their bids, highest first. Remembered: it is the same for every request of a slot."""
    bids = [int.from_bytes(blake2b(b"%d %d" % (slot, seed), digest_size=8).digest(), "big") for seed in seeds]
    return tuple(sorted(range(len(seeds)), key=bids.__getitem__, reverse=True))


def stable_hash(data: bytes) -> int:
    """63 bits, the same everywhere."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> 1


# -- pairs ---------------------------------------------------------------------------------------


def compatible(prefill: Candidate, decode: Candidate) -> bool:
    """Whether the two could be given one request."""
    ours, theirs = prefill.compatibility, decode.compatibility
    return ours is None or theirs is None or ours == theirs


Pairs = Mapping[C, Sequence[C]]
"""Of each usable prefill engine, the usable decode engines that may be given the same request."""


def choose_pair(
    pairs: Pairs[C],
    wish: Wish,
    avoid: Collection[str] = (),
    *,
    policies: tuple[Policy, Policy] = (round_robin, least_inflight),
) -> tuple[C, C] | None:
    """A pair with a free place at both, as the policies (prefill's, decode's) want it; None if there is none.

    `avoid` are names of engines that failed this request already: never chosen.
    """
    senders = free(pairs, avoid)
    while senders:
        sender = policies[0](senders, wish)
        if receivers := free(pairs[sender], avoid):
            return sender, policies[1](receivers, wish)
        senders.remove(sender)
    return None


def choose_one(
    candidates: Iterable[C], wish: Wish, avoid: Collection[str] = (), *, policy: Policy = least_inflight
) -> C | None:
    """A single one with a free place, as the policy wants it; None if there is none."""
    open_ones = free(candidates, avoid)
    return policy(open_ones, wish) if open_ones else None


def any_pair(pairs: Pairs[C], avoid: Collection[str] = ()) -> bool:
    """Whether a pair would be there if places were free: only then does waiting for one make sense."""
    return any(p.name not in avoid and any(d.name not in avoid for d in partners) for p, partners in pairs.items())


def any_one(candidates: Iterable[C], avoid: Collection[str] = ()) -> bool:
    """The same for a single engine."""
    return any(c.name not in avoid for c in candidates)


def free(candidates: Iterable[C], avoid: Collection[str] = ()) -> list[C]:
    """Those with a place left, in the order they came."""
    if not avoid:
        return [c for c in candidates if c.inflight < c.max_inflight]
    return [c for c in candidates if c.inflight < c.max_inflight and c.name not in avoid]


_inflight = attrgetter("inflight")
_seed = attrgetter("seed")

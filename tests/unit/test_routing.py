"""Routing: never over a cap, never the avoided, fair, the same everywhere, and quick."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trio_pdproxy.core import routing
from trio_pdproxy.core.routing import LOAD_BOUND, POLICIES, Wish, stable_hash


@dataclass(eq=False)
class Fake:
    name: str
    inflight: int = 0
    max_inflight: int = 1_000_000
    compatibility: str | None = None
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = stable_hash(self.name.encode())


def fakes(letter: str, count: int) -> list[Fake]:
    return [Fake(f"{letter}{number}") for number in range(count)]


def engines(letter: str) -> st.SearchStrategy[list[Fake]]:
    one = st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from([None, "hash a", "hash b"]))
    return st.lists(one, max_size=4).map(lambda found: [Fake(f"{letter}{i}", *each) for i, each in enumerate(found)])


def pairs_of(prefill: list[Fake], decode: list[Fake]) -> dict[Fake, list[Fake]]:
    return {p: partners for p in prefill if (partners := [d for d in decode if routing.compatible(p, d)])}


wishes = st.builds(
    Wish,
    turn=st.integers(0, 1000),
    prefix=st.binary(max_size=40),
    session=st.none() | st.binary(max_size=40),
    draw=st.integers(0, 2**64 - 1),
)
avoided = st.frozensets(st.sampled_from([f"{letter}{i}" for letter in "pd" for i in range(4)]))
policies = st.sampled_from(sorted(POLICIES))


def fits(engine: Fake, avoid: frozenset[str]) -> bool:
    return engine.inflight < engine.max_inflight and engine.name not in avoid


@given(engines("p"), engines("d"), wishes, avoided, st.tuples(policies, policies))
def test_a_pair_is_chosen_exactly_where_one_is_free_pairable_and_not_avoided(
    prefill: list[Fake], decode: list[Fake], wish: Wish, avoid: frozenset[str], names: tuple[str, str]
) -> None:
    first, second = names
    pairs = pairs_of(prefill, decode)
    possible = {(p, d) for p, partners in pairs.items() for d in partners if fits(p, avoid) and fits(d, avoid)}
    chosen = routing.choose_pair(pairs, wish, avoid, policies=(POLICIES[first], POLICIES[second]))
    assert chosen in possible if possible else chosen is None


@given(engines("d"), wishes, avoided, policies)
def test_one_engine_is_chosen_exactly_where_one_is_free_and_not_avoided(
    decode: list[Fake], wish: Wish, avoid: frozenset[str], policy: str
) -> None:
    possible = {d for d in decode if fits(d, avoid)}
    chosen = routing.choose_one(decode, wish, avoid, policy=POLICIES[policy])
    assert chosen in possible if possible else chosen is None


@given(engines("p"), engines("d"), avoided)
def test_waiting_makes_sense_exactly_where_only_places_are_missing(
    prefill: list[Fake], decode: list[Fake], avoid: frozenset[str]
) -> None:
    pairs = pairs_of(prefill, decode)
    for engine in (*prefill, *decode):
        engine.inflight = 0
    assert routing.any_pair(pairs, avoid) == (routing.choose_pair(pairs, Wish(), avoid) is not None)
    assert routing.any_one(decode, avoid) == (routing.choose_one(decode, Wish(), avoid) is not None)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(wish=wishes, loads=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_policy_is_a_function_of_wish_and_counters(policy: str, wish: Wish, loads: list[int]) -> None:
    candidates = [Fake(f"e{i}", load) for i, load in enumerate(loads)]
    again = [Fake(f"e{i}", load) for i, load in enumerate(loads)]
    chosen = POLICIES[policy](candidates, wish)
    assert chosen in candidates
    assert POLICIES[policy](again, wish).name == chosen.name


@given(st.integers(1, 12), st.integers(1, 40))
def test_round_robin_is_fair_to_every_engine(count: int, rounds: int) -> None:
    candidates = fakes("e", count)
    seen = Counter(POLICIES["round_robin"](candidates, Wish(turn=turn)).name for turn in range(count * rounds))
    assert set(seen.values()) == {rounds}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 100))
def test_least_inflight_takes_one_of_the_least_busy(loads: list[int], turn: int) -> None:
    candidates = [Fake(f"e{i}", load) for i, load in enumerate(loads)]
    assert POLICIES["least_inflight"](candidates, Wish(turn=turn)).inflight == min(loads)


def test_least_inflight_gives_equals_their_turns() -> None:
    candidates = fakes("e", 4)
    assert len({POLICIES["least_inflight"](candidates, Wish(turn=turn)).name for turn in range(4)}) == 4


def test_power_of_two_never_takes_the_busier_of_its_two() -> None:
    candidates = [Fake("idle"), Fake("busy", 100)]
    chosen = Counter(POLICIES["power_of_two"](candidates, Wish(draw=draw << 32 | 1)).name for draw in range(64))
    assert chosen["idle"] == 32
    chosen = Counter(POLICIES["power_of_two"](candidates, Wish(draw=draw << 32)).name for draw in range(64))
    assert chosen["idle"] == 64


@given(st.binary(max_size=40), st.integers(2, 10))
def test_the_same_prefix_goes_to_the_same_engine_and_only_a_lost_engine_moves_its_own(
    prefix: bytes, count: int
) -> None:
    candidates = fakes("e", count)
    wish = Wish(prefix=prefix)
    chosen = POLICIES["prefix_affinity"](candidates, wish)
    for lost in candidates:
        left = [candidate for candidate in candidates if candidate is not lost]
        moved = POLICIES["prefix_affinity"](left, wish)
        assert (moved is chosen) == (lost is not chosen)


def test_prefixes_spread_over_all_engines() -> None:
    candidates = fakes("e", 8)
    seen = Counter(POLICIES["prefix_affinity"](candidates, Wish(prefix=b"%d" % n)).name for n in range(4000))
    assert len(seen) == 8
    assert max(seen.values()) < 1.2 * 4000 / 8
    assert min(seen.values()) > 0.8 * 4000 / 8


@given(st.lists(st.integers(0, 60), min_size=2, max_size=8), st.binary(max_size=40))
def test_a_hot_prefix_never_drowns_an_engine(loads: list[int], prefix: bytes) -> None:
    candidates = [Fake(f"e{i}", load) for i, load in enumerate(loads)]
    chosen = POLICIES["prefix_affinity"](candidates, Wish(prefix=prefix))
    assert chosen.inflight < LOAD_BOUND * (sum(loads) + 1) / len(loads)


def test_a_hot_prefix_in_flight_stays_within_the_bound_and_hits_otherwise() -> None:
    """Eight engines, sixteen shared prefixes, requests that come and go at random load."""
    candidates = fakes("p", 8)
    has: set[tuple[bytes, str]] = set()
    hits = total = 0
    running: list[Fake] = []
    for number in range(20_000):
        prefix = b"prefix %d" % (number * 7 % 16)
        chosen = POLICIES["prefix_affinity"](candidates, Wish(prefix=prefix))
        hits += (prefix, chosen.name) in has
        has.add((prefix, chosen.name))
        total += 1
        chosen.inflight += 1
        running.append(chosen)
        if len(running) > 512:
            running.pop(0).inflight -= 1
        if len(running) == 512:
            assert max(c.inflight for c in candidates) <= LOAD_BOUND * 512 / 8 + 1
    # What is sent away goes to the next in that prefix's own ranking, which soon has it too.
    assert hits / total > 0.99
    assert len(has) <= 16 * 4


def test_session_affinity_follows_the_header_and_without_it_the_load() -> None:
    candidates = [*fakes("e", 4), Fake("idle")]
    for candidate in candidates[:4]:
        candidate.inflight = 1
    assert POLICIES["session_affinity"](candidates, Wish()).name == "idle"
    for candidate in candidates:
        candidate.inflight = 0
    chosen = {POLICIES["session_affinity"](candidates, Wish(session=b"42", turn=turn)).name for turn in range(5)}
    assert len(chosen) == 1


def test_an_unknown_compatibility_is_taken_on_trust_and_a_known_one_is_kept() -> None:
    a, b, unknown = Fake("a", compatibility="a"), Fake("b", compatibility="b"), Fake("u")
    assert routing.compatible(a, unknown)
    assert routing.compatible(unknown, b)
    assert routing.compatible(a, a)
    assert not routing.compatible(a, b)


def test_a_hash_is_the_same_in_every_process() -> None:
    assert stable_hash(b"prefill-0") == 3421414446147742471
    assert stable_hash(b"a") != stable_hash(b"b")
    assert 0 <= stable_hash(b"x") < 2**63


def test_a_policy_of_ones_own_is_one_more_row() -> None:
    def last(candidates: list[Fake], wish: Wish) -> Fake:
        return candidates[-1]

    chosen = routing.choose_one(fakes("e", 3), Wish(), policy=last)  # type: ignore[arg-type]
    assert chosen is not None
    assert chosen.name == "e2"

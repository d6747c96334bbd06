"""Routing: never over a cap, never the avoided, never the incompatible, and each in its turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from trio_pdproxy.core import routing


@dataclass(frozen=True)
class Fake:
    name: str
    inflight: int = 0
    max_inflight: int = 1
    usable: bool = True
    compatibility: str | None = None


def engines(letter: str) -> st.SearchStrategy[list[Fake]]:
    one = st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans(), st.sampled_from([None, "hash a", "hash b"]))
    return st.lists(one, max_size=4).map(lambda found: [Fake(f"{letter}{i}", *each) for i, each in enumerate(found)])


avoided = st.sets(st.sampled_from([f"{letter}{i}" for letter in "pd" for i in range(4)]))


def fits(engine: Fake, avoid: set[str]) -> bool:
    return engine.usable and engine.inflight < engine.max_inflight and engine.name not in avoid


@given(engines("p"), engines("d"), st.integers(0, 50), avoided)
def test_a_pair_is_chosen_exactly_where_one_is_free_usable_compatible_and_not_avoided(
    prefill: list[Fake], decode: list[Fake], turn: int, avoid: set[str]
) -> None:
    possible = {
        (p, d) for p in prefill for d in decode if fits(p, avoid) and fits(d, avoid) and routing.compatible(p, d)
    }
    chosen = routing.choose_pair(prefill, decode, turn, avoid)
    assert chosen in possible if possible else chosen is None


@given(engines("d"), st.integers(0, 50), avoided)
def test_one_engine_is_chosen_exactly_where_one_is_free_usable_and_not_avoided(
    decode: list[Fake], turn: int, avoid: set[str]
) -> None:
    possible = {d for d in decode if fits(d, avoid)}
    chosen = routing.choose_one(decode, turn, avoid)
    assert chosen in possible if possible else chosen is None


@given(engines("p"), engines("d"), avoided)
def test_waiting_makes_sense_exactly_where_only_places_are_missing(
    prefill: list[Fake], decode: list[Fake], avoid: set[str]
) -> None:
    def emptied(found: list[Fake]) -> list[Fake]:
        return [Fake(e.name, 0, e.max_inflight, e.usable, e.compatibility) for e in found]

    pair = routing.choose_pair(emptied(prefill), emptied(decode), 0, avoid)
    assert routing.any_pair(prefill, decode, avoid) == (pair is not None)
    assert routing.any_one(decode, avoid) == (routing.choose_one(emptied(decode), 0, avoid) is not None)


@given(st.integers(1, 5), st.integers(1, 5))
def test_round_robin_is_fair_to_every_engine(prefills: int, decodes: int) -> None:
    prefill = [Fake(f"p{i}") for i in range(prefills)]
    decode = [Fake(f"d{i}") for i in range(decodes)]
    seen: Counter[str] = Counter()
    rounds = prefills * decodes
    for turn in range(rounds):
        chosen = routing.choose_pair(prefill, decode, turn)
        assert chosen is not None
        seen.update(engine.name for engine in chosen)
    assert {seen[p.name] for p in prefill} == {decodes}
    assert {seen[d.name] for d in decode} == {prefills}


@given(st.integers(0, 6), st.integers(0, 100))
def test_round_robin_loses_and_invents_nobody(count: int, turn: int) -> None:
    found = [Fake(f"d{i}") for i in range(count)]
    order = routing.round_robin(found, turn)
    assert sorted(e.name for e in order) == [e.name for e in found]
    if found:
        assert order[0] is found[turn % count]


def test_a_full_engine_passes_its_turn_on() -> None:
    decode = [Fake("d0", 1, 1), Fake("d1")]
    assert routing.choose_one(decode, 0) is decode[1]


def test_a_prefill_engine_without_a_partner_passes_its_turn_on() -> None:
    prefill = [Fake("p0", compatibility="a"), Fake("p1", compatibility="b")]
    decode = [Fake("d0", 1, 1, compatibility="a"), Fake("d1", compatibility="b")]
    assert routing.choose_pair(prefill, decode, 0) == (prefill[1], decode[1])


def test_an_unknown_compatibility_is_taken_on_trust_and_a_known_one_is_kept() -> None:
    a, b, unknown = Fake("a", compatibility="a"), Fake("b", compatibility="b"), Fake("u")
    assert routing.compatible(a, unknown)
    assert routing.compatible(unknown, b)
    assert routing.compatible(a, a)
    assert not routing.compatible(a, b)

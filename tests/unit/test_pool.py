"""Places at engines and the queue in front of them: exact, fair, bounded, and never a place lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_pdproxy.config import Settings
from trio_pdproxy.core import routing
from trio_pdproxy.core.errors import Fault, ProxyError
from trio_pdproxy.core.plan import Coordinates
from trio_pdproxy.engines.coordinates import Meta, SideChannelError
from trio_pdproxy.engines.engine import About, Engine
from trio_pdproxy.engines.pool import Pool, Taken, Want


def make(prefill: int = 1, decode: int = 1, *, cap: int = 1, **more: Any) -> Pool:
    """A pool of usable engines p0.. and d0.. that take `cap` requests each."""
    pool = Pool(
        Settings(
            prefill=[
                f"http://127.0.0.1:{8100 + i};name=p{i};side_channel=127.0.0.1:{5600 + i}" for i in range(prefill)
            ],
            decode=[f"http://127.0.0.1:{8200 + i};name=d{i};side_channel=127.0.0.1:{5700 + i}" for i in range(decode)],
            **{
                "prefill_max_inflight": cap,
                "decode_max_inflight": cap,
                "warm_up": False,
                "decode_policy": "round_robin",
            }
            | more,
        )
    )
    for engine in pool.engines:
        bring_up(engine)
    pool.changed()
    return pool


def bring_up(engine: Engine, compatibility: str | None = None) -> None:
    engine.up = engine.looked = True
    if engine.role == "prefill":
        engine.coordinates = Coordinates(engine.name, *engine.side_channel, tp_size=1)
    if compatibility is not None:
        engine.about = About(meta=Meta(engine.name, compatibility))


def names(taken: Taken) -> list[str]:
    return [engine.name for engine in taken]


def give_back(pool: Pool, taken: Taken) -> None:
    for engine in taken:
        pool.give_back(engine)


class Request:
    """A request in a task of its own, so that it can wait and be cancelled."""

    def __init__(self, pool: Pool, nursery: trio.Nursery, *, pair: bool = True, avoid: tuple[str, ...] = ()) -> None:
        self.pool = pool
        self.scope = trio.CancelScope()
        self.taken: Taken | None = None
        self.error: ProxyError | None = None
        self.over = trio.Event()
        self.pair, self.avoid = pair, avoid
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        with self.scope:
            try:
                self.taken = await self.pool.take(Want(pair=self.pair, avoid=frozenset(self.avoid)))
            except ProxyError as error:
                self.error = error
        self.over.set()

    @property
    def waiting(self) -> bool:
        return not self.over.is_set()


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


# --- taking and giving back -------------------------------------------------------------------------


async def test_a_pair_has_a_place_at_both_and_one_engine_is_a_decode_engine() -> None:
    pool = make()
    pair = await pool.take(Want(pair=True))
    assert names(pair) == ["p0", "d0"]
    assert [engine.inflight for engine in pool.engines] == [1, 1]
    give_back(pool, pair)
    one = await pool.take(Want(pair=False))
    assert names(one) == ["d0"]
    assert [engine.inflight for engine in pool.engines] == [0, 1]
    give_back(pool, one)
    assert [engine.inflight for engine in pool.engines] == [0, 0]


async def test_a_place_given_back_twice_is_a_bug_that_is_seen() -> None:
    pool = make()
    taken = await pool.take(Want(pair=False))
    give_back(pool, taken)
    with pytest.raises(AssertionError, match="d0 was given back twice"):
        give_back(pool, taken)


async def test_each_engine_has_its_turn() -> None:
    pool = make(2, 3, cap=100)
    seen: Counter[str] = Counter()
    for _ in range(12):
        seen.update(names(await pool.take(Want(pair=True))))
    assert seen == {"p0": 6, "p1": 6, "d0": 4, "d1": 4, "d2": 4}


async def test_pairs_and_single_engines_do_not_take_each_others_turns() -> None:
    pool = make(2, 2, cap=100)
    seen: Counter[str] = Counter()
    for _ in range(10):
        seen.update(names(await pool.take(Want(pair=True))))
        await pool.take(Want(pair=False))
    assert seen == {"p0": 5, "p1": 5, "d0": 5, "d1": 5}


async def test_the_avoided_are_not_taken_even_where_nothing_else_is_free() -> None:
    pool = make(2, 2, cap=100)
    for _ in range(6):
        assert names(await pool.take(Want(pair=True, avoid=frozenset(("p0", "d1"))))) == ["p1", "d0"]


async def test_a_rescues_place_is_beyond_the_cap_and_returns() -> None:
    pool = make()
    taken = await pool.take(Want(pair=True))
    with pool.place(taken[0]):
        assert taken[0].inflight == 2
    with pytest.raises(KeyError), pool.place(taken[0]):
        raise KeyError
    assert taken[0].inflight == 1


# --- what cannot be served --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("down", "pair", "words"),
    [
        (["p0"], True, "no usable prefill engine (p0: it is down)"),
        (["d0"], True, "no usable decode engine (d0: it is down)"),
        (["d0"], False, "no usable decode engine (d0: it is down)"),
        (["p0", "d0"], True, "no usable prefill engine (p0: it is down); no usable decode engine (d0: it is down)"),
    ],
)
async def test_where_no_engine_could_serve_the_refusal_is_at_once_and_says_why(
    down: list[str], pair: bool, words: str
) -> None:
    pool = make(health_interval=7)
    for engine in pool.engines:
        if engine.name in down:
            engine.up, engine.why = False, "it is down"
    pool.changed()
    with pytest.raises(ProxyError) as caught:
        await pool.take(Want(pair=pair))
    error = caught.value
    assert (error.status, error.code, error.retry_after, error.fault) == (503, "no_usable_engine", 7, Fault.PROXY)
    assert error.message == words
    assert pool.missing(pair) == words.split("; ")


async def test_a_prefill_engine_that_is_down_does_not_keep_one_from_a_decode_engine() -> None:
    pool = make()
    pool.prefill[0].up = False
    pool.changed()
    assert pool.missing(pair=False) == []
    assert names(await pool.take(Want(pair=False))) == ["d0"]


async def test_engines_that_cannot_pair_are_refused_with_what_differs() -> None:
    pool = make()
    bring_up(pool.prefill[0], "a")
    bring_up(pool.decode[0], "b")
    pool.changed()
    with pytest.raises(ProxyError, match=r"p0 .* and decode engine d0 .* cannot pair") as caught:
        await pool.take(Want(pair=True))
    assert caught.value.status == 503


async def test_where_every_engine_failed_this_request_already_it_is_refused() -> None:
    pool = make()
    with pytest.raises(ProxyError, match="no engine left to try") as caught:
        await pool.take(Want(pair=True, avoid=frozenset(("d0",))))
    assert caught.value.status == 503
    assert [engine.inflight for engine in pool.engines] == [0, 0]


# --- the queue --------------------------------------------------------------------------------------


async def test_the_queue_is_served_in_the_order_of_arrival(nursery: trio.Nursery) -> None:
    pool = make()
    first = await pool.take(Want(pair=True))
    requests = []
    for _ in range(10):
        requests.append(Request(pool, nursery))
        await settle()
    assert pool.waiting == 10
    taken: Taken | None = first
    for i, request in enumerate(requests):
        assert taken is not None
        give_back(pool, taken)
        await settle()
        assert [r.waiting for r in requests] == [False] * (i + 1) + [True] * (9 - i)
        taken = request.taken


async def test_a_newcomer_does_not_overtake_who_waits_for_the_same(nursery: trio.Nursery) -> None:
    pool = make()
    taken = await pool.take(Want(pair=True))
    waiter = Request(pool, nursery)
    await settle()
    give_back(pool, taken)  # granted, but it has not run yet
    newcomer = Request(pool, nursery)
    await settle()
    assert waiter.taken is not None
    assert newcomer.waiting


async def test_an_engine_that_comes_back_serves_who_waits_before_a_newcomer(nursery: trio.Nursery) -> None:
    pool = make(2, 2)
    pool.prefill[1].up = False
    pool.changed()
    await pool.take(Want(pair=True))
    waiter = Request(pool, nursery)
    await settle()
    pool.prefill[1].up = True
    pool.changed()
    newcomer = Request(pool, nursery)
    await settle()
    assert waiter.taken is not None
    assert newcomer.waiting


async def test_who_waits_for_a_pair_does_not_hold_up_who_needs_a_decode_engine_alone(nursery: trio.Nursery) -> None:
    pool = make(1, 2)
    pair = await pool.take(Want(pair=True))
    Request(pool, nursery)
    await settle()
    assert names(await pool.take(Want(pair=False))) == ["d1"]
    late = Request(pool, nursery, pair=False)
    await settle()
    pool.give_back(pair[1])  # prefill is still taken: the pair goes on waiting
    await settle()
    assert late.taken is not None


async def test_who_waits_for_one_engine_does_not_hold_up_who_may_have_another(nursery: trio.Nursery) -> None:
    pool = make(2, 2)
    first = await pool.take(Want(pair=True))
    assert names(first) == ["p0", "d0"]
    retry = Request(pool, nursery, avoid=("p1",))
    await settle()
    assert names(await pool.take(Want(pair=True))) == ["p1", "d1"]
    assert retry.waiting


async def test_who_stands_behind_one_that_cannot_be_served_is_served(nursery: trio.Nursery) -> None:
    pool = make(2, 2)
    taken = [await pool.take(Want(pair=True)), await pool.take(Want(pair=True))]
    choosy = Request(pool, nursery, avoid=("p1",))
    await settle()
    easy = Request(pool, nursery)
    await settle()
    give_back(pool, next(each for each in taken if names(each)[0] == "p1"))
    await settle()
    assert choosy.waiting
    assert easy.taken is not None


async def test_a_full_queue_refuses_with_429_at_once(nursery: trio.Nursery) -> None:
    pool = make(queue_size=2)
    taken = await pool.take(Want(pair=True))
    waiting = [Request(pool, nursery) for _ in range(2)]
    await settle()
    with pytest.raises(ProxyError) as caught:
        await pool.take(Want(pair=True))
    error = caught.value
    assert (error.status, error.code, error.retry_after, error.fault) == (429, "queue_full", 1, Fault.BUSY)
    waiting[0].scope.cancel()
    await settle()
    assert pool.waiting == 1
    Request(pool, nursery)
    await settle()
    assert pool.waiting == 2
    give_back(pool, taken)


async def test_without_a_queue_nobody_waits() -> None:
    pool = make(queue_size=0)
    await pool.take(Want(pair=True))
    with pytest.raises(ProxyError) as caught:
        await pool.take(Want(pair=True))
    assert caught.value.code == "queue_full"


async def test_who_waits_too_long_is_refused_with_429(autojump_clock: trio.testing.MockClock) -> None:
    pool = make(queue_timeout=30)
    taken = await pool.take(Want(pair=True))
    with pytest.raises(ProxyError, match="within 30 s") as caught:
        await pool.take(Want(pair=True))
    assert (caught.value.status, caught.value.code) == (429, "queue_timeout")
    assert trio.current_time() == pytest.approx(30, abs=0.01)
    assert pool.waiting == 0
    give_back(pool, taken)
    assert [engine.inflight for engine in pool.engines] == [0, 0]


async def test_a_place_that_comes_at_the_deadline_is_taken_or_stays_free(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    for _ in range(20):
        pool = make(queue_timeout=30)
        taken = await pool.take(Want(pair=True))
        request = Request(pool, nursery)
        await trio.sleep(30)
        give_back(pool, taken)
        await settle()
        assert (request.taken is None) == (request.error is not None)
        assert [engine.inflight for engine in pool.engines] == ([0, 0] if request.taken is None else [1, 1])
        assert pool.waiting == 0


async def test_a_cancelled_waiter_that_is_granted_a_place_gives_it_to_the_next(nursery: trio.Nursery) -> None:
    pool = make()
    taken = await pool.take(Want(pair=True))
    first = Request(pool, nursery)
    await settle()
    second = Request(pool, nursery)
    await settle()
    first.scope.cancel()  # it will run with this, and
    give_back(pool, taken)  # with a place that it cannot use
    await settle()
    assert first.taken is None
    assert second.taken is not None
    assert [engine.inflight for engine in pool.engines] == [1, 1]


@pytest.mark.parametrize("granted_first", [True, False])
async def test_a_grant_and_a_cancellation_in_the_same_instant_lose_no_place(
    granted_first: bool, nursery: trio.Nursery
) -> None:
    pool = make()
    taken = await pool.take(Want(pair=True))
    request = Request(pool, nursery)
    await settle()
    if granted_first:
        give_back(pool, taken)
        request.scope.cancel()
    else:
        request.scope.cancel()
        give_back(pool, taken)
    await settle()
    assert pool.waiting == 0
    used = 0 if request.taken is None else 1
    assert [engine.inflight for engine in pool.engines] == [used, used]
    assert not granted_first or request.taken is not None


async def test_those_who_wait_are_refused_when_the_last_engine_goes(nursery: trio.Nursery) -> None:
    pool = make()
    await pool.take(Want(pair=True))
    pair, one = Request(pool, nursery), Request(pool, nursery, pair=False)
    await settle()
    pool.prefill[0].up = False
    pool.changed()
    await settle()
    assert pair.error is not None
    assert pair.error.status == 503
    assert one.waiting
    assert pool.waiting == 1


async def test_those_who_wait_are_served_when_an_engine_comes(nursery: trio.Nursery) -> None:
    pool = make(2, 2)
    pool.decode[1].up = False
    pool.changed()
    await pool.take(Want(pair=True))
    request = Request(pool, nursery)
    await settle()
    pool.changed()
    await settle()
    assert request.waiting
    pool.decode[1].up = True
    pool.changed()
    await settle()
    assert request.taken is not None
    assert names(request.taken) == ["p1", "d1"]


# --- any sequence of events -------------------------------------------------------------------------

events = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.booleans(), st.sampled_from([(), ("p0",), ("d0",), ("p1", "d1")])),
        st.tuples(st.just("give"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("flip"), st.sampled_from(["p0", "p1", "d0", "d1"])),
        st.tuples(st.just("later"), st.sampled_from([1, 40])),
        st.tuples(st.just("settle")),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(events, st.integers(1, 2))
def test_after_any_sequence_of_events_no_place_is_lost_and_nobody_waits_for_what_is_free(
    sequence: list[tuple[Any, ...]], cap: int
) -> None:
    async def main() -> None:
        pool = make(2, 2, cap=cap, queue_size=5, queue_timeout=30)
        requests: list[Request] = []
        async with trio.open_nursery() as nursery:
            for event in sequence:
                held = [request for request in requests if request.taken is not None]
                match event:
                    case ("take", pair, avoid):
                        requests.append(Request(pool, nursery, pair=pair, avoid=avoid))
                    case ("give", i) if held:
                        request = held[i % len(held)]
                        taken, request.taken = request.taken, None
                        give_back(pool, taken or ())
                    case ("cancel", i) if requests:
                        requests[i % len(requests)].scope.cancel()
                    case ("flip", name):
                        engine = next(engine for engine in pool.engines if engine.name == name)
                        engine.up = not engine.up
                        pool.changed()
                    case ("later", seconds):
                        await trio.sleep(seconds)
                    case ("settle",):
                        await settle()
                for engine in pool.engines:
                    assert 0 <= engine.inflight <= cap
                assert pool.waiting <= 5
            await settle()
            for request in requests:
                if request.waiting:
                    choose = (
                        routing.choose_pair(pool.roster.pairs, routing.Wish(), request.avoid)
                        if request.pair
                        else routing.choose_one(pool.roster.receivers, routing.Wish(), request.avoid)
                    )
                    assert choose is None, "waits for what is free"
            await trio.sleep(31)
            assert pool.waiting == 0
            for request in requests:
                assert not request.waiting
                give_back(pool, request.taken or ())
        assert [engine.inflight for engine in pool.engines] == [0, 0, 0, 0]

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# --- its life ---------------------------------------------------------------------------------------


async def test_it_runs_once_every_engine_was_looked_at_and_closes_its_connections_at_the_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Silent:
        async def ask(self, host: str, port: int) -> Meta:
            await trio.lowlevel.checkpoint()
            raise SideChannelError("silent")

    async def refuse(host: str, port: int) -> trio.abc.Stream:
        await trio.sleep(0.1)
        raise OSError(111, "Connection refused")

    pool = Pool(Settings(prefill=["http://a:1"], decode=["http://b:1"]), side_channel=Silent(), dial=refuse)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        assert [engine.usable for engine in pool.engines] == [False, False]
        assert all("Connection refused" in engine.why for engine in pool.engines)
        with pytest.raises(ProxyError):
            await pool.take(Want(pair=True))
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert [engine.connections.open for engine in pool.engines] == [0, 0]


async def test_who_comes_before_every_engine_was_asked_waits_for_that(autojump_clock: trio.testing.MockClock) -> None:
    pool = Pool(Settings(prefill=["http://a:1"], decode=["http://b:1"], warm_up=False, queue_timeout=20))
    async with trio.open_nursery() as nursery:
        first, second = Request(pool, nursery), Request(pool, nursery, pair=False)
        await settle()
        assert [first.waiting, second.waiting] == [True, True]
        pool.prefill[0].looked, pool.prefill[0].why = True, "connection refused"
        pool.changed()
        await settle()
        assert [first.waiting, second.waiting] == [True, True]
        bring_up(pool.decode[0])
        pool.changed()
        await settle()
        assert first.error is not None
        assert first.error.status == 503
        assert "connection refused" in str(first.error)
        assert second.taken == (pool.decode[0],)
        nursery.cancel_scope.cancel()


async def test_who_waits_for_engines_that_are_never_asked_is_told_so_in_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pool = Pool(Settings(prefill=["http://a:1"], decode=["http://b:1"], queue_timeout=20))
    begun = trio.current_time()
    with pytest.raises(ProxyError) as raised:
        await pool.take(Want(pair=True))
    assert raised.value.status == 503
    assert "not asked yet" in str(raised.value)
    assert trio.current_time() - begun == pytest.approx(20)


async def test_who_comes_while_a_pair_has_its_first_transfer_waits_for_that(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pool = make(warm_up=True)
    p, d = pool.engines
    async with trio.open_nursery() as nursery:
        first, second = Request(pool, nursery), Request(pool, nursery)
        await settle()
        assert first.waiting
        pool.roster.failed_to_warm(p, d)
        await settle()
        assert [first.error and first.error.status, second.error and second.error.status] == [503, 503]
        pool.roster.warmed(p, d)
        assert await pool.take(Want(pair=True)) == (p, d)


async def test_who_comes_while_the_last_engine_is_asked_again_waits_for_that(
    autojump_clock: trio.testing.MockClock,
) -> None:
    pool = make(prefill=2)
    for engine in pool.prefill:
        engine.doubt("failed 3 times in a row")
    async with trio.open_nursery() as nursery:
        one, other = Request(pool, nursery), Request(pool, nursery, avoid=("p0",))
        await settle()
        assert [one.waiting, other.waiting] == [True, True]
        pool.prefill[1].up = False
        pool.changed()
        await settle()
        assert [one.waiting, other.error and other.error.status] == [True, 503]
        pool.prefill[0].doubts_settled = pool.prefill[0].doubts
        pool.changed()
        await settle()
        assert one.taken is not None
        assert names(one.taken) == ["p0", "d0"]

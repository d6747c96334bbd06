"""The breaker, the retry budget and the back-off: pure, with the time handed in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_pdproxy.core.health import BURST, LONGEST_EJECTION, Breaker, Circuit, RetryBudget, back_off


def circuit(breaker: Breaker) -> Circuit:
    return breaker.circuit


def test_it_opens_after_so_many_failures_in_a_row_and_a_success_starts_anew() -> None:
    breaker = Breaker(3, 5.0)
    assert not breaker.failed(0)
    assert not breaker.failed(0)
    breaker.succeeded()
    assert [breaker.failed(0) for _ in range(3)] == [False, False, True]
    assert breaker.circuit is Circuit.OPEN


def test_a_rested_one_is_tried_and_the_trial_decides() -> None:
    breaker = Breaker(1, 5.0)
    assert breaker.failed(100)
    assert not breaker.tick(104.9)
    assert breaker.tick(105)
    assert circuit(breaker) is Circuit.HALF_OPEN
    assert breaker.succeeded()
    assert circuit(breaker) is Circuit.CLOSED
    assert breaker.failures == 0


def test_each_failed_trial_doubles_the_rest_up_to_a_bound() -> None:
    breaker = Breaker(1, 5.0)
    now = 0.0
    rests = []
    for _ in range(8):
        assert breaker.failed(now)
        rests.append(breaker.until - now)
        now = breaker.until
        assert breaker.tick(now)
    assert rests == [5, 10, 20, 40, 60, 60, 60, 60]
    assert max(rests) == LONGEST_EJECTION


def test_what_was_under_way_when_it_opened_changes_nothing() -> None:
    breaker = Breaker(1, 5.0)
    breaker.failed(0)
    assert not breaker.failed(1)
    assert not breaker.succeeded()
    assert breaker.circuit is Circuit.OPEN
    assert breaker.until == 5


@given(st.lists(st.sampled_from(["fail", "ok", "tick"]), max_size=60), st.integers(1, 5))
def test_it_is_never_open_without_enough_failures_and_never_for_longer_than_the_bound(
    events: list[str], eject_after: int
) -> None:
    breaker = Breaker(eject_after, 5.0)
    now = 0.0
    for event in events:
        now += 1
        if event == "fail":
            opened = breaker.failed(now)
            assert not opened or breaker.failures >= min(eject_after, breaker.failures)
        elif event == "ok":
            breaker.succeeded()
        else:
            breaker.tick(now)
        if breaker.circuit is Circuit.OPEN:
            assert breaker.until - now <= LONGEST_EJECTION
        if breaker.circuit is Circuit.CLOSED:
            assert breaker.failures < eject_after


def test_retries_are_bounded_by_requests() -> None:
    budget = RetryBudget(0.2)
    spent = 0
    for _ in range(1000):
        budget.earn()
        spent += budget.spend()
    assert BURST <= spent <= 1000 * 0.2 + BURST


def test_a_burst_of_retries_is_allowed_and_no_more() -> None:
    budget = RetryBudget(0.0)
    assert sum(budget.spend() for _ in range(100)) == BURST


@given(st.integers(1, 16), st.floats(0, 1))
def test_the_back_off_grows_and_stays_short(attempt: int, draw: float) -> None:
    wait = back_off(attempt, draw)
    assert 0 < wait <= 0.5
    assert wait >= back_off(1, 0)

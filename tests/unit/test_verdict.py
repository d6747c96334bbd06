"""The verdict over the whole product of facts: total, consistent, and no debt ever forgotten."""

from __future__ import annotations

from itertools import product

import pytest

from trio_pdproxy.core.verdict import Debt, Decode, Facts, Instead, Prefill, Step, Verdict, decide

EVERYTHING = [
    Facts(prefill, decode, rescued, lapsed, several)
    for prefill, decode in product(Prefill, Decode)
    for rescued, lapsed, several in product((False, True), repeat=3)
]
ALL = {facts: decide(facts) for facts in EVERYTHING}

SPOKEN = {Decode.SPEAKING, Decode.CUT, Decode.DONE}
PREFILL_FAILED = {Prefill.REFUSED, Prefill.REJECTED, Prefill.BUSY, Prefill.FAILED}


def proven(facts: Facts) -> bool:
    """By the words of the rule: nothing sent, refused, or the engine's own refusal or error."""
    if facts.decode in (Decode.UNSENT, Decode.REFUSED, Decode.REJECTED):
        return True
    return facts.decode is Decode.FAILED and not facts.several


def test_every_combination_has_a_verdict() -> None:
    assert len(ALL) == len(Prefill) * len(Decode) * 8
    assert all(isinstance(verdict, Verdict) for verdict in ALL.values())


def test_nothing_is_owed_only_and_always_where_the_decode_engine_is_proven_to_hold_nothing() -> None:
    for facts, verdict in ALL.items():
        assert (verdict.debt is Debt.NONE) == proven(facts), facts


def test_a_debt_is_paid_only_by_a_200_in_time_or_by_the_decode_engine_having_spoken() -> None:
    for facts, verdict in ALL.items():
        if verdict.debt is Debt.PAID:
            spoke = facts.decode is Decode.DONE or (facts.decode in SPOKEN and not facts.several)
            assert spoke or (facts.prefill is Prefill.OK and not facts.lapsed), facts


def test_one_sequence_that_speaks_does_not_pay_for_the_others() -> None:
    for facts, verdict in ALL.items():
        if facts.several and facts.decode in (Decode.SPEAKING, Decode.CUT) and facts.prefill is not Prefill.OK:
            assert verdict.debt in (Debt.CARRY, Debt.RESCUE, Debt.STRANDED), facts


def test_a_prefill_leg_that_runs_is_carried_on_while_anything_may_be_owed() -> None:
    for facts, verdict in ALL.items():
        if facts.prefill in (Prefill.PENDING, Prefill.LATE) and verdict.debt not in (Debt.NONE, Debt.PAID):
            assert verdict.debt is Debt.CARRY, facts


def test_a_dispatch_is_rescued_once() -> None:
    for facts, verdict in ALL.items():
        if facts.rescued:
            assert verdict.debt is not Debt.RESCUE, facts


def test_a_failed_prefill_leg_is_rescued_before_its_debt_is_stranded() -> None:
    for facts, verdict in ALL.items():
        if facts.prefill in PREFILL_FAILED and not facts.rescued:
            assert verdict.debt is not Debt.STRANDED, facts


def test_an_engine_with_other_coordinates_is_not_asked_to_rescue() -> None:
    for facts, verdict in ALL.items():
        if facts.prefill is Prefill.FOREIGN:
            assert verdict.debt in (Debt.NONE, Debt.PAID, Debt.STRANDED), facts


def test_the_verdict_on_a_running_dispatch_leaves_something_to_wait_for() -> None:
    """WAIT needs somebody who will move: a silent decode engine, with a leg or a rescue that may still pay."""
    for facts, verdict in ALL.items():
        if verdict.step is Step.WAIT:
            assert facts.decode in (Decode.UNSENT, Decode.WAITING), facts
            assert facts.prefill in (Prefill.UNSENT, Prefill.PENDING, Prefill.OK) or verdict.debt is Debt.RESCUE, facts


def test_nothing_but_the_decode_engines_bytes_is_given_after_its_first_body_byte() -> None:
    for facts, verdict in ALL.items():
        if facts.decode in SPOKEN:
            assert verdict.step in (Step.RELAY, Step.CUT, Step.END), facts
        else:
            assert verdict.step not in (Step.RELAY, Step.CUT, Step.END), facts


def test_no_second_pair_after_the_commit_and_none_on_a_clients_fault() -> None:
    for facts, verdict in ALL.items():
        if facts.decode in SPOKEN or facts.decode is Decode.REJECTED:
            assert verdict.step is not Step.ANOTHER_PAIR, facts
        if facts.prefill is Prefill.REJECTED:
            assert verdict.step is not Step.ANOTHER_PAIR, facts


def test_a_clean_end_is_given_only_for_a_complete_answer() -> None:
    for facts, verdict in ALL.items():
        assert (verdict.step is Step.END) == (facts.decode is Decode.DONE), facts


def test_an_engines_words_are_given_only_where_it_refused() -> None:
    for facts, verdict in ALL.items():
        if verdict.step is Step.PREFILL_ANSWER:
            assert facts.prefill is Prefill.REJECTED, facts
        if verdict.step is Step.DECODE_ANSWER:
            assert facts.decode is Decode.REJECTED, facts
        if verdict.instead is Instead.PREFILL_SAID:
            assert facts.prefill in (Prefill.BUSY, Prefill.FAILED), facts
        if verdict.instead is Instead.DECODE_SAID:
            assert facts.decode is Decode.FAILED, facts


def test_an_error_is_named_exactly_where_one_may_be_needed() -> None:
    for facts, verdict in ALL.items():
        assert (verdict.instead is not None) == (verdict.step in (Step.ANOTHER_PAIR, Step.FAIL)), facts


def test_a_clients_fault_outranks_every_failure_of_the_other_engine() -> None:
    for facts, verdict in ALL.items():
        if facts.decode is Decode.REJECTED:
            assert verdict.step is Step.DECODE_ANSWER, facts
        elif facts.prefill is Prefill.REJECTED and facts.decode not in {*SPOKEN, Decode.WAITING}:
            assert verdict.step is Step.PREFILL_ANSWER, facts


def test_the_clients_half_does_not_depend_on_how_many_sequences_there_are() -> None:
    for facts, verdict in ALL.items():
        twin = ALL[Facts(facts.prefill, facts.decode, facts.rescued, facts.lapsed, not facts.several)]
        assert verdict.step is twin.step, facts


def test_a_lapsed_lease_changes_nothing_but_the_debt_of_a_prefill_that_answered() -> None:
    for facts, verdict in ALL.items():
        if facts.prefill is not Prefill.OK:
            twin = ALL[Facts(facts.prefill, facts.decode, facts.rescued, not facts.lapsed, facts.several)]
            assert verdict == twin, facts


P, D, S, O, I = Prefill, Decode, Step, Debt, Instead  # noqa: E741 -- the table reads better


@pytest.mark.parametrize(
    ("prefill", "decode", "more", "verdict"),
    [
        # decode leg not sent
        (P.REJECTED, D.UNSENT, "", Verdict(S.PREFILL_ANSWER, O.NONE)),
        (P.BUSY, D.UNSENT, "", Verdict(S.ANOTHER_PAIR, O.NONE, I.PREFILL_SAID)),
        (P.FAILED, D.UNSENT, "", Verdict(S.ANOTHER_PAIR, O.NONE, I.PREFILL_SAID)),
        (P.REFUSED, D.UNSENT, "", Verdict(S.ANOTHER_PAIR, O.NONE, I.BAD_GATEWAY)),
        (P.LATE, D.UNSENT, "", Verdict(S.FAIL, O.NONE, I.TIMEOUT)),
        # decode leg sent, nothing of it yet
        (P.PENDING, D.WAITING, "", Verdict(S.WAIT, O.CARRY)),
        (P.OK, D.WAITING, "", Verdict(S.WAIT, O.PAID)),
        (P.REJECTED, D.WAITING, "", Verdict(S.WAIT, O.RESCUE)),
        (P.REJECTED, D.WAITING, "rescued", Verdict(S.PREFILL_ANSWER, O.STRANDED)),
        (P.FAILED, D.WAITING, "", Verdict(S.WAIT, O.RESCUE)),
        (P.FAILED, D.WAITING, "rescued", Verdict(S.ANOTHER_PAIR, O.STRANDED, I.PREFILL_SAID)),
        (P.REFUSED, D.WAITING, "rescued", Verdict(S.ANOTHER_PAIR, O.STRANDED, I.BAD_GATEWAY)),
        (P.FOREIGN, D.WAITING, "", Verdict(S.ANOTHER_PAIR, O.STRANDED, I.BAD_GATEWAY)),
        (P.LATE, D.WAITING, "", Verdict(S.FAIL, O.CARRY, I.TIMEOUT)),
        (P.OK, D.WAITING, "lapsed", Verdict(S.WAIT, O.RESCUE)),
        (P.OK, D.WAITING, "lapsed rescued", Verdict(S.WAIT, O.STRANDED)),
        (P.OK, D.LATE, "", Verdict(S.FAIL, O.PAID, I.TIMEOUT)),
        (P.OK, D.LATE, "lapsed rescued", Verdict(S.FAIL, O.STRANDED, I.TIMEOUT)),
        # decode failed before its first body byte
        (P.REJECTED, D.REJECTED, "", Verdict(S.DECODE_ANSWER, O.NONE)),
        (P.PENDING, D.REJECTED, "", Verdict(S.DECODE_ANSWER, O.NONE)),
        (P.PENDING, D.FAILED, "", Verdict(S.ANOTHER_PAIR, O.NONE, I.DECODE_SAID)),
        (P.PENDING, D.FAILED, "several", Verdict(S.ANOTHER_PAIR, O.CARRY, I.DECODE_SAID)),
        (P.PENDING, D.REFUSED, "", Verdict(S.ANOTHER_PAIR, O.NONE, I.BAD_GATEWAY)),
        (P.PENDING, D.BROKEN, "", Verdict(S.ANOTHER_PAIR, O.CARRY, I.BAD_GATEWAY)),
        (P.FAILED, D.BROKEN, "", Verdict(S.ANOTHER_PAIR, O.RESCUE, I.BAD_GATEWAY)),
        (P.OK, D.BROKEN, "", Verdict(S.ANOTHER_PAIR, O.PAID, I.BAD_GATEWAY)),
        # after it
        (P.PENDING, D.SPEAKING, "", Verdict(S.RELAY, O.PAID)),
        (P.FAILED, D.SPEAKING, "several", Verdict(S.RELAY, O.RESCUE)),
        (P.PENDING, D.SPEAKING, "several", Verdict(S.RELAY, O.CARRY)),
        (P.FAILED, D.CUT, "", Verdict(S.CUT, O.PAID)),
        (P.FAILED, D.CUT, "several rescued", Verdict(S.CUT, O.STRANDED)),
        (P.PENDING, D.DONE, "several", Verdict(S.END, O.PAID)),
    ],
)
def test_the_table_of_the_design(prefill: Prefill, decode: Decode, more: str, verdict: Verdict) -> None:
    flags = dict.fromkeys(more.split(), True)
    assert decide(Facts(prefill, decode, **flags)) == verdict

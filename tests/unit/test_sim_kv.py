"""The pairing, the leases and the language model: pure."""

from __future__ import annotations

import pytest

from trio_pdproxy.sim.kv import BlockPool, Finished, PushLedger, Registration, base_request_id
from trio_pdproxy.sim.model import chat_prompt, ids_prompt, text_prompt, tokens_of


def registration(request_id: str, blocks: int = 1) -> Registration:
    return Registration(request_id, blocks, "d", "", "", "p", "127.0.0.1", 5600)


@pytest.mark.parametrize(
    ("request_id", "base"),
    [
        ("cmpl-a-0-0123abcd", "cmpl-a-0"),
        ("1_cmpl-a-0-0123abcd", "1_cmpl-a-0"),
        ("cmpl-a-0", "cmpl-a-0"),
        ("chatcmpl-a-0123abcde", "chatcmpl-a-0123abcde"),
    ],
)
def test_base_request_id(request_id: str, base: str) -> None:
    assert base_request_id(request_id) == base


def test_a_registration_meets_a_prefill_in_either_order() -> None:
    for first in ("register", "finish"):
        ledger = PushLedger()
        done = Finished("cmpl-a-0-00000001", 1, "key")
        asked = registration("cmpl-a-0-00000002")
        if first == "register":
            assert ledger.register(asked) is None
            assert ledger.finish(done, 30.0) is asked
        else:
            assert ledger.finish(done, 30.0) is None
            assert ledger.register(asked) is done
        assert not ledger.registrations.by_base
        assert not ledger.finished.by_base


def test_of_two_with_one_id_the_oldest_is_taken_and_an_exact_id_wins() -> None:
    ledger = PushLedger()
    first, second = registration("cmpl-a-0-00000001"), registration("cmpl-a-0-00000002")
    ledger.register(first)
    ledger.register(second)
    assert ledger.finish(Finished("cmpl-a-0-00000002", 1, "k"), 1.0) is second
    assert ledger.finish(Finished("cmpl-a-0-00000003", 1, "k"), 1.0) is first


def test_a_lease_ends_and_a_push_ends_it_early() -> None:
    ledger = PushLedger()
    ledger.finish(Finished("a", 1, "k"), 10.0)
    ledger.finish(Finished("b", 1, "k"), 11.0)
    ledger.pushed("a")
    assert ledger.expire(10.9) == []
    assert ledger.expire(11.0) == ["b"]
    assert ledger.register(registration("b")) is None, "the prefill is forgotten with its lease"


def test_blocks() -> None:
    pool = BlockPool(3)
    assert pool.take("a", 2)
    assert not pool.take("b", 2)
    pool.give("a")
    pool.give("a")
    assert pool.in_use == 0
    assert pool.take("b", 3)


def test_a_block_keeps_its_kv_until_it_is_used_again() -> None:
    pool = BlockPool(5)
    assert pool.take("a", 2, "A")
    assert pool.take("b", 2, "B")
    a, b = pool.held["a"], pool.held["b"]
    assert len({*a, *b}) == 4
    assert 0 not in a + b
    pool.give("a")
    pool.give("b")
    assert (pool.read(a), pool.read(b), pool.in_use) == ("A", "B", 0)
    assert pool.take("c", 2, "C"), "the block that was never used, and then the one that is free for longest"
    assert set(pool.held["c"]) == {5, a[0]}
    assert pool.read(pool.held["c"]) == "C"
    assert pool.read(a) not in "ABC"
    assert pool.read(b) == "B"
    assert pool.read([99]) == ""


def test_a_lease_can_be_renewed_while_it_runs() -> None:
    ledger = PushLedger()
    for name in "abc":
        ledger.hold(name, 10.0)
    ledger.renew("a", 15.0)
    ledger.renew("never held", 15.0)
    assert ledger.pulled("b")
    assert not ledger.pulled("b")
    assert ledger.expire(12.0) == ["c"]
    assert not ledger.pulled("c")
    assert ledger.expire(15.0) == ["a"]


def test_text_is_a_function_of_the_prompt() -> None:
    assert text_prompt("abc") == ids_prompt(list(b"abc"))
    assert ids_prompt([1000, 2]).tokens == 2
    keys = {text_prompt(f"prompt {number}").key for number in range(100)}
    keys.add(chat_prompt([{"role": "user", "content": "prompt 1"}]).key)
    assert len(keys) == 101
    first_tokens = {tokens_of(key, choice, 1)[0] for key in keys for choice in (0, 1)}
    assert len(first_tokens) == 202
    key = text_prompt("abc").key
    assert tokens_of(key, 0, 20)[:3] == tokens_of(key, 0, 3)


def test_a_chat_counts_all_of_its_parts() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    assert chat_prompt([{"role": "user", "content": parts}]) == chat_prompt([{"role": "user", "content": "abc"}])

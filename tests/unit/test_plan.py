"""From a request to the bodies of its legs: what is rewritten, what is dropped, what is refused, what stays."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_pdproxy.core import plan as plans
from trio_pdproxy.core.errors import Fault, ProxyError
from trio_pdproxy.core.plan import APIS, Api, Coordinates, Kind, Plan, read_plan

COMPLETIONS, CHAT = APIS["/v1/completions"], APIS["/v1/chat/completions"]
JSON = (b"content-type", b"application/json")
WHERE = Coordinates("the-engine", "10.0.0.1", 5600, tp_size=2, pp_size=3, dcp_size=4)
FORBIDDEN = ("kv_transfer_params", "ec_transfer_params", "request_id")
MESSAGES: list[object] = [{"role": "user", "content": "hi"}]


def read(body: bytes | dict[str, Any], api: Api = COMPLETIONS, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Plan:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_plan(api, raw, (JSON, *headers))


def refused(body: bytes | dict[str, Any], api: Api = COMPLETIONS) -> ProxyError:
    with pytest.raises(ProxyError) as caught:
        read(body, api)
    assert caught.value.fault is Fault.CLIENT
    return caught.value


def prefill_leg(body: bytes | dict[str, Any], api: Api = COMPLETIONS) -> dict[str, Any]:
    return json.loads(read(body, api).prefill_body("the-id"))  # type: ignore[no-any-return]


def decode_leg(body: bytes | dict[str, Any], api: Api = COMPLETIONS) -> dict[str, Any]:
    return json.loads(read(body, api).decode_body("the-id", WHERE))  # type: ignore[no-any-return]


# --- the prefill leg --------------------------------------------------------------------------------


@pytest.mark.parametrize("api", [COMPLETIONS, CHAT], ids=lambda api: api.path)
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({}, {"max_tokens": 1, "stream": False}),
        ({"max_tokens": 100}, {"max_tokens": 1}),
        ({"max_tokens": None}, {"max_tokens": 1}),
        ({"max_tokens": 0}, {"max_tokens": 1}),
        ({"stream": True}, {"stream": False}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": False, "stream_options": ...}),
        ({"min_tokens": 5}, {"min_tokens": ...}),
        ({"logprobs": 1}, {"logprobs": ...}),
        ({"top_logprobs": 3}, {"top_logprobs": ...}),
        ({"echo": True}, {"echo": ...}),
        ({"n": 3}, {"n": 3}),
        ({"seed": 1, "temperature": 0.5, "stop": ["x"]}, {"seed": 1, "temperature": 0.5, "stop": ["x"]}),
        ({"truncate_prompt_tokens": 7, "cache_salt": "s"}, {"truncate_prompt_tokens": 7, "cache_salt": "s"}),
        ({"priority": 3, "something_new": {"a": [1]}}, {"priority": 3, "something_new": {"a": [1]}}),
    ],
)
def test_the_prefill_leg_asks_for_one_token_and_keeps_what_shapes_the_prompt(
    api: Api, sent: dict[str, Any], expected: dict[str, Any]
) -> None:
    leg = prefill_leg({"prompt": "x", "messages": MESSAGES} | sent, api)
    for name, value in expected.items():
        assert leg.get(name, ...) == value, name
    assert (leg["prompt"], leg["messages"]) == ("x", MESSAGES)


def test_in_chat_max_completion_tokens_would_beat_max_tokens_and_goes() -> None:
    leg = prefill_leg({"messages": MESSAGES, "max_completion_tokens": 8}, CHAT)
    assert "max_completion_tokens" not in leg
    assert leg["max_tokens"] == 1


def test_chat_keeps_tools_and_template_arguments_on_the_prefill_leg() -> None:
    sent = {
        "messages": MESSAGES,
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"a": 1},
        "tool_choice": "auto",
    }
    leg = prefill_leg(sent, CHAT)
    assert {name: leg[name] for name in sent} == sent


def test_both_legs_carry_the_same_transfer_id_and_the_decode_leg_all_coordinates() -> None:
    assert prefill_leg({"prompt": "x"})["kv_transfer_params"] == {"do_remote_decode": True, "transfer_id": "the-id"}
    assert decode_leg({"prompt": "x"})["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "the-engine",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": 3,
        "dcp_size": 4,
        "remote_request_id": "cmpl-the-id",
        "transfer_id": "the-id",
    }
    chat = decode_leg({"messages": MESSAGES}, CHAT)
    assert chat["kv_transfer_params"]["remote_request_id"] == "chatcmpl-the-id"


def test_the_decode_leg_is_the_clients_request_otherwise() -> None:
    sent = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 2, "max_tokens": 9}
    leg = decode_leg(sent)
    del leg["kv_transfer_params"]
    assert leg == sent


def test_one_plan_serves_many_dispatches_and_none_changes_it() -> None:
    plan = read({"prompt": "x", "min_tokens": 2})
    alone = plan.alone_body()
    bodies = [plan.prefill_body("a"), plan.decode_body("a", WHERE)]
    plan.prefill_body("b")
    plan.decode_body("b", WHERE)
    assert [plan.prefill_body("a"), plan.decode_body("a", WHERE)] == bodies
    assert plan.alone_body() == alone
    assert json.loads(alone) == {"prompt": "x", "min_tokens": 2}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text().filter(lambda name: name not in FORBIDDEN), values), st.booleans())
def test_members_the_proxy_does_not_know_reach_both_legs_as_the_client_wrote_them(
    members: dict[str, Any], ascii_only: bool
) -> None:
    known = {name for name, _ in COMPLETIONS.shapes} | set(COMPLETIONS.prefill_drops)
    sent = {name: value for name, value in members.items() if name not in known} | {"prompt": "x"}
    plan = read(json.dumps(sent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
    for leg in (json.loads(plan.prefill_body("i")), json.loads(plan.decode_body("i", WHERE))):
        assert {name: leg[name] for name in sent} == sent


def test_numbers_and_spelling_of_a_value_are_not_changed() -> None:
    raw = b'{"prompt":"\\u00e9\\/", "seed":12345678901234567890123, "temperature":1.50e-1}'
    for leg in (read(raw).prefill_body("i"), read(raw).decode_body("i", WHERE), read(raw).alone_body()):
        assert b'"\\u00e9\\/"' in leg
        assert b":12345678901234567890123" in leg
        assert b":1.50e-1" in leg


# --- what a client may not bring --------------------------------------------------------------------

EVIL = b'{"do_remote_prefill":true,"remote_host":"evil"}'


def spelled(name: str) -> list[bytes]:
    """The same member name in JSON's many spellings."""
    plain = name.encode()
    return [
        plain,
        b"\\u006b" + plain[1:] if plain[:1] == b"k" else b"\\u0072" + plain[1:],
        plain[:-1] + b"\\u00%02x" % plain[-1],
        b"".join(b"\\u%04x" % c for c in plain),
        b"".join(b"\\u%04X" % c for c in plain),
    ]


@pytest.mark.parametrize("name", ["kv_transfer_params", "request_id"])
@pytest.mark.parametrize("spelling", range(5))
@pytest.mark.parametrize(
    "frame",
    [
        b'{"%b":%b,"prompt":"x"}',
        b'{"prompt":"x","%b":%b}',
        b'{"a":1,"%b":%b,"prompt":"x","b":2}',
        b'{"%b" \t\n: %b  ,"prompt":"x"}',
    ],
)
@pytest.mark.parametrize("value", [EVIL, b"null", b'"text"', b"[]", b"1"])
def test_forbidden_members_are_dropped_and_counted_wherever_and_however_they_are_written(
    name: str, spelling: int, frame: bytes, value: bytes
) -> None:
    plan = read(frame % (spelled(name)[spelling], value))
    assert plan.dropped == (name,)
    assert b"evil" not in plan.prefill_body("i") + plan.decode_body("i", WHERE) + plan.alone_body()
    assert name not in json.loads(plan.alone_body())
    for leg in (plan.prefill_body("i"), plan.decode_body("i", WHERE)):
        assert leg.count(b'"kv_transfer_params"') == 1
        assert "request_id" not in json.loads(leg)


def test_duplicates_of_a_forbidden_member_are_all_dropped() -> None:
    keys = spelled("kv_transfer_params")
    raw = b"{" + b",".join(b'"%b":%b' % (key, EVIL) for key in keys * 2) + b',"prompt":"x"}'
    plan = read(raw)
    assert plan.dropped == ("kv_transfer_params",)
    assert b"evil" not in plan.prefill_body("i") + plan.decode_body("i", WHERE) + plan.alone_body()


def test_of_a_duplicate_member_one_goes_on_and_both_legs_agree_which() -> None:
    plan = read(b'{"prompt":"first","n":1,"prompt":"second","n":2,"\\u006e":3}')
    legs = [plan.prefill_body("i"), plan.decode_body("i", WHERE), plan.alone_body()]
    for leg in legs:
        assert leg.count(b'"prompt"') == leg.count(b'"n"') == 1
        assert (json.loads(leg)["prompt"], json.loads(leg)["n"]) == ("second", 3)
    assert plan.several


@pytest.mark.parametrize("key", spelled("kv_transfer_params"))
@pytest.mark.parametrize("door", [b"vllm_xargs", b"\\u0076llm_xargs"])
def test_the_second_door_through_vllm_xargs_is_shut_and_its_other_members_pass(key: bytes, door: bytes) -> None:
    plan = read(b'{"prompt":"x","%b":{"a":1.0,"%b":%b,"%b":%b}}' % (door, key, EVIL, key, EVIL))
    assert plan.dropped == ("vllm_xargs.kv_transfer_params",)
    for leg in (plan.prefill_body("i"), plan.decode_body("i", WHERE), plan.alone_body()):
        assert b"evil" not in leg
        assert json.loads(leg)["vllm_xargs"] == {"a": 1.0}


def test_of_duplicate_vllm_xargs_only_a_cleaned_one_is_left() -> None:
    plan = read(b'{"vllm_xargs":{"kv_transfer_params":%b},"prompt":"x","vllm_xargs":{"kv_transfer_params":1}}' % EVIL)
    assert json.loads(plan.alone_body()) == {"prompt": "x", "vllm_xargs": {}}


def test_vllm_xargs_without_the_forbidden_stays_byte_for_byte() -> None:
    raw = b'{ "b" : 1.00 , "a":"\\u0041" }'
    assert raw in read(b'{"prompt":"x","vllm_xargs":' + raw + b"}").alone_body()


def test_a_forbidden_name_inside_something_else_is_the_clients_text() -> None:
    plan = read({"prompt": '{"kv_transfer_params": 1}', "metadata": {"kv_transfer_params": 1, "request_id": "x"}})
    assert plan.dropped == ()
    assert json.loads(plan.alone_body())["metadata"] == {"kv_transfer_params": 1, "request_id": "x"}


def test_only_listed_headers_pass_and_none_that_steers_an_engine() -> None:
    passed = (
        (b"authorization", b"Bearer x"),
        (b"traceparent", b"00-1"),
        (b"tracestate", b"a=b"),
        (b"user-agent", b"me"),
    )
    steering = tuple(
        (name, b"x")
        for name in (b"x-request-id", b"x-data-parallel-rank", b"x-session-id", b"host", b"content-length", b"cookie")
    )
    assert read({"prompt": "x"}, headers=(*steering, *passed)).headers == passed


def test_a_clients_headers_are_not_shown_where_a_plan_is_logged() -> None:
    assert "secret" not in repr(read({"prompt": "x"}, headers=((b"authorization", b"Bearer secret"),)))


# --- what kind of request it is ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ({}, ""),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": None}, ""),
        ({"echo": True, "logprobs": 1}, "echo with logprobs"),
        ({"echo": True, "logprobs": 0}, "echo with logprobs"),
        ({"echo": True}, ""),
        ({"logprobs": 1}, ""),
        ({"echo": False, "logprobs": 1}, ""),
        ({"echo": True, "logprobs": None}, ""),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"use_beam_search": False}, ""),
    ],
)
def test_what_would_make_decode_ignore_the_transfer_goes_to_decode_alone(sent: dict[str, Any], reason: str) -> None:
    plan = read({"prompt": "x"} | sent)
    assert (plan.kind, plan.reason) == (Kind.DECODE_ONLY if reason else Kind.PUSH, reason)


@pytest.mark.parametrize(
    ("sent", "several"),
    [
        ({"prompt": "x"}, False),
        ({"prompt": [1, 2, 3]}, False),
        ({"prompt": ["x"]}, True),
        ({"prompt": ["x", "y"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": "[["}, False),
        ({"prompt": "x", "n": 1}, False),
        ({"prompt": "x", "n": None}, False),
        ({"prompt": "x", "n": 2}, True),
        ({"prompt_embeds": ["e", "f"]}, True),
        ({"prompt": "x", "prompt_embeds": "e"}, True),
        ({"prompt": "x", "prompt_embeds": None}, False),
    ],
)
def test_several_transfers_are_seen_from_n_and_from_lists_of_prompts(sent: dict[str, Any], several: bool) -> None:
    assert read(sent).several is several


def test_several_transfers_are_seen_whatever_white_space_a_client_writes() -> None:
    for space in (b"", b"\n", b" " * 62, b" " * 63, b" " * 1000):
        assert read(b'{"prompt":[' + space + b'"x", "y"]}').several


def test_chat_has_several_transfers_only_by_n() -> None:
    assert not read({"messages": MESSAGES}, CHAT).several
    assert read({"messages": MESSAGES, "n": 2}, CHAT).several


@pytest.mark.parametrize(
    ("literal", "stream"), [(b"true", True), (b" true ", True), (b"false", False), (b"null", False)]
)
def test_stream_is_read(literal: bytes, stream: bool) -> None:
    assert read(b'{"prompt":"x","stream":%b}' % literal).stream is stream


def test_a_request_that_does_not_say_stream_is_none() -> None:
    assert not read({"prompt": "x"}).stream


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b" ", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"prompt":"x"', "invalid_json"),
        (b'{"prompt":"x"} {}', "invalid_json"),
        (b'{"prompt":"x",}', "invalid_json"),
        (b"{'prompt':'x'}", "invalid_json"),
        (b'{"prompt":"x","a":NaN}', "invalid_json"),
        (b'{"prompt":"x","a":01}', "invalid_json"),
        (b'{"prompt":"x","stream":TRUE}', "invalid_json"),
        (b'{"prompt":"a\nb"}', "invalid_json"),
        (b'{"prompt":"\\ud800"}', "invalid_json"),
        (b'{"prompt":"x","\\ud800":1}', "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        (b"\x00", "invalid_json"),
        (b'{"prompt":"x"}'.decode().encode("utf-16"), "invalid_utf8"),
        (b'{"prompt":"\xff"}', "invalid_utf8"),
        (b'{"prompt":"\xed\xa0\x80"}', "invalid_utf8"),
        (b"[]", "not_an_object"),
        (b"null", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"1", "not_an_object"),
        (b'{"prompt":"x","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too_deep"),
        (b'{"prompt":"x","a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "too_deep"),
        (b'{"prompt":"x","vllm_xargs":{"kv_transfer_params":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "too_deep"),
        (b"{}", "missing_field"),
        (b'{"prompt":null}', "missing_field"),
        (b'{"prompt":null,"prompt_embeds":null}', "missing_field"),
        (b'{"prompt":1}', "wrong_type"),
        (b'{"prompt":{}}', "wrong_type"),
        (b'{"prompt":"x","stream":1}', "wrong_type"),
        (b'{"prompt":"x","stream":"true"}', "wrong_type"),
        (b'{"prompt":"x","n":"2"}', "wrong_type"),
        (b'{"prompt":"x","n":true}', "wrong_type"),
        (b'{"prompt":"x","max_tokens":[]}', "wrong_type"),
        (b'{"prompt":"x","min_tokens":"1"}', "wrong_type"),
        (b'{"prompt":"x","model":1}', "wrong_type"),
        (b'{"prompt":"x","stream_options":true}', "wrong_type"),
        (b'{"prompt":"x","vllm_xargs":[{"kv_transfer_params":1}]}', "wrong_type"),
        (b'{"prompt":"x","vllm_xargs":"{}"}', "wrong_type"),
    ],
    ids=lambda value: repr(value[:36]) if isinstance(value, bytes) else value,
)
def test_bad_input_is_the_clients_fault_and_says_what(body: bytes, code: str) -> None:
    error = refused(body)
    assert (error.status, error.code) == (400, code)
    assert error.message
    if code in ("wrong_type", "missing_field"):
        assert error.param
        assert f"`{error.param}`" in error.message
    json.loads(error.body())


def test_chat_needs_messages_in_an_array() -> None:
    assert refused({}, CHAT).param == "messages"
    assert refused({"messages": None}, CHAT).code == "wrong_type"
    assert refused({"messages": "hi"}, CHAT).code == "wrong_type"
    assert refused({"messages": MESSAGES, "max_completion_tokens": "8"}, CHAT).param == "max_completion_tokens"


@given(st.binary(max_size=80), st.sampled_from(list(APIS.values())))
def test_no_bytes_make_the_reader_raise_anything_else(body: bytes, api: Api) -> None:
    for text in (body, b'{"prompt":' + body, b'{"prompt":"x","vllm_xargs":{' + body + b"}}"):
        with suppress(ProxyError):
            plan = read_plan(api, text, [JSON])
            json.loads(plan.prefill_body("i"))
            json.loads(plan.decode_body("i", WHERE))


@pytest.mark.parametrize(
    "content_type",
    [
        b"application/json",
        b"Application/JSON",
        b"application/json; charset=utf-8",
        b'application/json ;charset="UTF-8"',
        b"application/json; profile=x",
    ],
)
def test_json_content_types_are_taken(content_type: bytes) -> None:
    read_plan(COMPLETIONS, b'{"prompt":"x"}', [(b"content-type", content_type)])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"content-type", b"")],
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"application/jsonp")],
        [(b"content-type", b"application/x-www-form-urlencoded")],
        [(b"content-type", b"multipart/form-data; boundary=application/json")],
        [(b"content-type", b"application/json; charset=latin-1")],
        [JSON, (b"content-type", b"text/plain")],
    ],
    ids=repr,
)
def test_other_content_types_are_answered_415_before_any_engine_is_asked(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(ProxyError) as caught:
        read_plan(COMPLETIONS, b'{"prompt":"x"}', headers)
    assert (caught.value.status, caught.value.fault) == (415, Fault.CLIENT)


# --- what engines answer ----------------------------------------------------------------------------


def test_a_prefill_answer_tells_who_it_was() -> None:
    told = {"remote_engine_id": "e", "tp_size": 2, "pp_size": 3, "dcp_size": 4, "remote_block_ids": [[1]], "more": None}
    assert plans.told_in(json.dumps({"id": "x", "kv_transfer_params": told}).encode()) == plans.Told(
        "e", 2, 3, 4, "pull"
    )
    assert plans.told_in(b'{"kv_transfer_params":{"remote_engine_id":"e"}}') == plans.Told("e")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"<html>",
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":{}}',
        b'{"kv_transfer_params":[]}',
        b'{"kv_transfer_params":{"remote_engine_id":null}}',
        b'{"kv_transfer_params":{"remote_engine_id":""}}',
        b'{"kv_transfer_params":{"remote_engine_id":1}}',
        b'{"kv_transfer_params":{"remote_engine_id":"e","tp_size":"2"}}',
        b'{"kv_transfer_params":{"remote_engine_id":"\xff"}}',
        b'{"choices":[{"kv_transfer_params":{"remote_engine_id":"e"}}]}',
        b'{"a":' + b"[" * 100_000,
    ],
    ids=lambda answer: repr(answer[:50]),
)
def test_an_answer_that_names_no_engine_is_not_taken_for_one_that_does(answer: bytes) -> None:
    assert plans.told_in(answer) is None


@given(st.binary(max_size=60))
def test_no_answer_makes_its_readers_raise(data: bytes) -> None:
    for answer in (
        data,
        b'{"kv_transfer_params":' + data,
        b'{"kv_transfer_params":{"remote_engine_id":' + data + b"}}",
    ):
        plans.told_in(answer)
        plans.shown_answer(answer, {})


def test_a_client_never_sees_kv_transfer_params_and_the_rest_stays_as_it_was() -> None:
    answer = b'{"id": "x", "choices":[{"text":"\\u00e9", "p":1.0}],"kv_transfer_params": {"a":1},"usage" : null}'
    shown = plans.shown_answer(answer, {})
    assert json.loads(shown) == {"id": "x", "choices": [{"text": "é", "p": 1.0}], "usage": None}
    assert b"kv_transfer" not in shown
    assert b'[{"text":"\\u00e9", "p":1.0}]' in shown


@pytest.mark.parametrize(
    "answer",
    [
        b'{ "id" : 1.0 }',
        b'{"choices":[{"text":"\\"kv_transfer_params\\""}]}',
        b'{"choices":[{"kv_transfer_params":1} ]}',
        b'["kv_transfer_params"]',
        b'{"kv_transfer_params"',
        b"",
    ],
)
def test_an_answer_with_nothing_to_hide_is_the_same_bytes(answer: bytes) -> None:
    assert plans.shown_answer(answer, {}) == answer


# --- the other APIs ---------------------------------------------------------------------------------

RESPONSES, ANTHROPIC = APIS["/v1/responses"], APIS["/v1/messages"]


def test_responses_are_paired_by_the_bodys_request_id_and_ask_prefill_for_one_token() -> None:
    sent = {
        "input": "x",
        "max_output_tokens": 9,
        "stream": True,
        "store": True,
        "top_logprobs": 2,
        "request_id": "mine",
    }
    p, d = prefill_leg(sent, RESPONSES), decode_leg(sent, RESPONSES)
    assert p["request_id"] == d["request_id"] == "resp_the-id"
    assert d["kv_transfer_params"]["remote_request_id"] == "resp_the-id_0"
    assert (p["max_output_tokens"], p["stream"], p["store"], "top_logprobs" in p) == (1, False, False, False)
    assert (d["max_output_tokens"], d["stream"], d["store"], d["top_logprobs"]) == (9, True, True, 2)


def test_messages_ask_prefill_for_one_token_and_have_no_id_in_the_body() -> None:
    sent = {"messages": MESSAGES, "max_tokens": 9, "stream": True, "request_id": "mine", "system": "s"}
    p, d = prefill_leg(sent, ANTHROPIC), decode_leg(sent, ANTHROPIC)
    assert (p["max_tokens"], p["stream"], p["system"]) == (1, False, "s")
    assert "request_id" not in p
    assert "request_id" not in d
    assert d["kv_transfer_params"]["remote_request_id"] == "chatcmpl-the-id"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, ""),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": None}, ""),
        ({"tools": [{"type": "function", "name": "f"}, {"type": "custom"}]}, ""),
        ({"tools": [{"type": "mcp"}]}, "built-in tools"),
        ({"tools": [{"type": 1}]}, ""),
        ({"tools": []}, ""),
    ],
)
def test_what_prefill_cannot_know_goes_to_decode_alone(more: dict[str, Any], reason: str) -> None:
    plan = read({"input": "x"} | more, RESPONSES)
    assert (plan.kind, plan.reason) == (Kind.DECODE_ONLY if reason else Kind.PUSH, reason)


def test_background_is_refused_on_responses_and_unknown_elsewhere() -> None:
    assert refused({"input": "x", "background": True}, RESPONSES).code == "unsupported"
    assert read({"input": "x", "background": False}, RESPONSES).kind is Kind.PUSH
    assert read({"prompt": "x", "background": True}).kind is Kind.PUSH


@pytest.mark.parametrize("api", plans.ALONE, ids=lambda api: api.path)
def test_what_one_engine_answers_is_cleaned_and_otherwise_its_own(api: Api) -> None:
    plan = read({"anything": [1], "kv_transfer_params": {}, "request_id": "x"}, api)
    assert plan.kind is Kind.DECODE_ONLY
    assert json.loads(plan.alone_body()) == {"anything": [1]}
    assert plan.dropped == ("kv_transfer_params", "request_id")
    assert plan.prefix == b""


def test_depth_counts_what_is_nested_and_not_what_is_quoted() -> None:
    limit = plans.DEPTH_LIMIT
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
        read(b'{"prompt":"x","a":' + opened * (limit - 1) + b"1" + closed * (limit - 1) + b"}")
        assert refused(b'{"prompt":"x","a":' + opened * limit + b"1" + closed * limit + b"}").code == "too_deep"
    for text in (b"[" * 1000, b'\\"[' * 1000, b"\\\\", b'\\\\\\"[{' * 1000):
        read(b'{"prompt":"' + text + b'","a":["' + text + b'"]}')
    read(b'{"prompt":[' + b",".join([b"[1]"] * 10_000) + b"]}")


def test_a_header_with_a_line_end_in_it_goes_nowhere() -> None:
    for value in (b"a\r\nx: y", b"a\nb", b"a\rb", b"a\x00b"):
        assert read({"prompt": "x"}, headers=((b"traceparent", value),)).headers == ()

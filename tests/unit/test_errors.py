"""What the proxy itself says to a client."""

from __future__ import annotations

import json

import pytest

from trio_pdproxy.core import sse
from trio_pdproxy.core.errors import Fault, ProxyError, bad_request


def error(**more: object) -> ProxyError:
    values: dict[str, object] = {"status": 503, "fault": Fault.PROXY, "code": "a_code"} | more
    return ProxyError('say "no"\nplease ü', **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", Fault)
def test_the_body_is_openais_error_shape_and_names_the_fault(fault: Fault) -> None:
    assert json.loads(error(fault=fault, param="n").body()) == {
        "error": {"message": 'say "no"\nplease ü', "type": fault.value, "param": "n", "code": "a_code"}
    }


def test_a_member_that_is_not_known_is_null_not_missing() -> None:
    assert json.loads(error().body())["error"]["param"] is None


def test_the_event_is_one_well_formed_event_that_a_reader_takes_for_an_error() -> None:
    event = error().event()
    assert event.endswith(b"\n\n")
    assert b"[DONE]" not in event
    (data,) = sse.events(event)
    assert data == error().body()
    found = sse.error_event(data)
    assert found is not None
    assert found["code"] == "a_code"


def test_retry_after_is_a_header_only_where_it_was_given() -> None:
    assert error().headers() == [(b"content-type", b"application/json")]
    assert error(retry_after=0).headers() == [(b"content-type", b"application/json"), (b"retry-after", b"0")]


def test_headers_of_one_error_are_not_those_of_another() -> None:
    error().headers().append((b"x", b"y"))
    assert error().headers() == [(b"content-type", b"application/json")]


def test_a_bad_request_is_the_clients_fault() -> None:
    bad = bad_request("no", param="n")
    assert (bad.status, bad.fault, bad.code, bad.param) == (400, Fault.CLIENT, "invalid_request", "n")
    assert str(bad) == "no"

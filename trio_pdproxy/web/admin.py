"""Changing the engines while serving: an app of its own, for a listener of its own, behind a token of its own.

GET /engines                    what there is (as in /status)
POST /engines                   {"role": "decode", "engine": "http://10.0.0.3:8200;name=d3"}
POST /engines/NAME/drain        no new requests for it; what it has in hand may finish
POST /engines/NAME/resume       takes one that was drained into use again
DELETE /engines/NAME            drain, then forget: answered at once (202), done when nothing is in hand
GET /timelines[?last=N]         the last exchanges, for `trio-pdproxy trace`
"""

from __future__ import annotations

import hmac
import logging
from typing import TYPE_CHECKING, Literal

import msgspec
import trio
from pydantic import ValidationError
from quart import Response, request
from quart_trio import QuartTrio

from trio_pdproxy.config import EngineSpec, Settings
from trio_pdproxy.core.errors import Fault, ProxyError, bad_request
from trio_pdproxy.core.reach import NotAllowedError, check_host
from trio_pdproxy.engines.engine import Engine
from trio_pdproxy.web.routes import timelines_response

if TYPE_CHECKING:
    from trio_pdproxy.web.app import ProxyApp

log = logging.getLogger("trio_pdproxy.admin")


class _Addition(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["prefill", "decode"]
    engine: str


def create_admin_app(app: ProxyApp, settings: Settings) -> QuartTrio:
    """The admin paths for `app`, as an ASGI app. Every request needs `Authorization: Bearer <admin_token>`."""
    admin = QuartTrio("trio_pdproxy.admin")
    admin.config["MAX_CONTENT_LENGTH"] = 64 * 1024
    admin.config["BODY_TIMEOUT"] = 10
    token = settings.admin_token
    assert token is not None, "the settings demand one"
    expected = f"Bearer {token.get_secret_value()}".encode()

    @admin.before_request
    async def authorise() -> Response | None:
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if hmac.compare_digest(given, expected):
            return None
        log.warning("an admin request without the right token from %s", request.remote_addr)
        return _error(
            ProxyError("the admin token is missing or wrong", status=401, fault=Fault.CLIENT, code="unauthorized")
        )

    @admin.errorhandler(ProxyError)
    async def failed(error: ProxyError) -> Response:
        return _error(error)

    @admin.get("/engines")
    async def engines() -> Response:
        return _json({"engines": [engine.status() for engine in app.pool.engines]})

    @admin.post("/engines")
    async def add() -> Response:
        try:
            addition = msgspec.json.decode(await request.get_data(), type=_Addition)
            spec = EngineSpec.parse(addition.engine)
        except (msgspec.DecodeError, ValidationError) as error:
            raise bad_request(f"not an engine: {_first_line(error)}", code="bad_engine") from None
        await _check_reach(spec, settings.admin_allow)
        try:
            added = app.pool.add(addition.role, spec)
        except ValueError as error:
            raise ProxyError(str(error), status=409, fault=Fault.CLIENT, code="taken") from None
        return _json({"engines": [engine.status() for engine in added]}, 201)

    @admin.post("/engines/<name>/drain")
    async def drain(name: str) -> Response:
        return _json({"engines": [engine.status() for engine in _drain(app, name)]})

    @admin.post("/engines/<name>/resume")
    async def resume(name: str) -> Response:
        engines = _named(app, name)
        app.pool.resume(name)
        return _json({"engines": [engine.status() for engine in engines]})

    @admin.delete("/engines/<name>")
    async def remove(name: str) -> Response:
        draining = _drain(app, name)
        # In the app's own nursery: the removal outlives this request, and ends with the app at the latest.
        app.nursery.start_soon(app.pool.remove, name)
        return _json({"engines": [engine.status() for engine in draining]}, 202)

    @admin.get("/timelines")
    async def timelines() -> Response:
        return await timelines_response(app)

    return admin


def _drain(app: ProxyApp, name: str) -> list[Engine]:
    _named(app, name)
    return app.pool.drain(name)


def _named(app: ProxyApp, name: str) -> list[Engine]:
    try:
        return app.pool.roster.named(name)
    except KeyError:
        raise ProxyError(f"there is no engine {name}", status=404, fault=Fault.CLIENT, code="not_found") from None


async def _check_reach(spec: EngineSpec, allowed: tuple[str, ...]) -> None:
    """Both the engine's address and its side channel's: the proxy connects to either."""
    for host in {spec.address.host, spec.side_channel.host}:
        try:
            found = await trio.socket.getaddrinfo(host, None, type=trio.socket.SOCK_STREAM)
            check_host(host, [str(entry[4][0]) for entry in found], allowed)
        except OSError as error:
            raise bad_request(f"{host}: {error.strerror or error}", code="unknown_host") from None
        except NotAllowedError as error:
            raise ProxyError(str(error), status=403, fault=Fault.CLIENT, code="not_allowed") from None


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(problem["msg"] for problem in error.errors(include_input=False, include_url=False))
    return str(error).partition("\n")[0]


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status=status, content_type="application/json")


def _error(error: ProxyError) -> Response:
    return Response(error.body(), status=error.status, content_type="application/json")

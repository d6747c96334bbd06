"""The ordinary routes: is it alive, is it ready, what does it see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import trio
from quart import Blueprint, Response, current_app, request

from trio_pdproxy.core.errors import ProxyError
from trio_pdproxy.engines.wire import EngineError
from trio_pdproxy.web.guard import nothing_at

if TYPE_CHECKING:
    from trio_pdproxy.engines.engine import Engine
    from trio_pdproxy.web.app import ProxyApp

routes = Blueprint("routes", __name__)


def _app() -> ProxyApp:
    return cast("ProxyApp", current_app._get_current_object())  # type: ignore[attr-defined]


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status=status, content_type="application/json")


@routes.get("/health")
async def health() -> Response:
    """200 while the process can serve; 503 once its core task died."""
    app = _app()
    if app.failure is not None:
        return _json({"status": "failed", "why": app.failure}, 503)
    return _json({"status": "ok"})


@routes.get("/ready")
async def ready() -> Response:
    """200 with at least one usable pair, else 503 that names what is missing."""
    missing = _app().missing()
    return _json({"ready": not missing, "missing": missing}, 503 if missing else 200)


@routes.get("/status")
async def status() -> Response:
    return _json(_app().status())


@routes.get("/metrics")
async def metrics() -> Response:
    try:
        text, content_type = await _app().metrics_text()
    except ProxyError as error:
        return _failed(error)
    return Response(text, content_type=content_type)


@routes.get("/timelines")
async def timelines() -> Response:
    """The last exchanges. On the admin listener always, here only where `expose_timelines` says so."""
    app = _app()
    if not (app.started.is_set() and app.settings.expose_timelines):
        return _failed(nothing_at(b"/timelines"))
    return await timelines_response(app)


async def timelines_response(app: ProxyApp) -> Response:
    """`?last=N`: the last N of them."""
    try:
        return Response(await app.all_timelines(request.args.get("last", type=int)), content_type="application/json")
    except ProxyError as error:
        return _failed(error)


def _failed(error: ProxyError) -> Response:
    return Response(error.body(), status=error.status, headers=_text(error.headers()))


@routes.get("/v1/models")
async def models() -> Response:
    """The models of the live decode engines, each once. Where none lists any, what the first of them says instead."""
    app = _app()
    pool = app.usable_pool()
    if pool is None:
        return _failed(app.not_serving())
    found: dict[str, dict[str, Any]] = {}
    refusals: dict[str, Response] = {}
    headers = _credentials(app)

    async def ask(engine: Engine) -> None:
        try:
            response = await engine.call("GET", "/v1/models", headers=headers)
            if response.status_code != 200:
                content_type = response.headers.get("content-type")
                refusals[engine.name] = Response(response.content, response.status_code, content_type=content_type)
                return
            listed = msgspec.json.decode(response.content, type=_Models).data
        except (EngineError, msgspec.DecodeError):
            return  # the others answer; the monitor finds out about this one
        for model in listed:
            found.setdefault(str(model.get("id")), model)

    async with trio.open_nursery() as nursery:
        for engine in pool.decode:
            if engine.usable:
                nursery.start_soon(ask, engine)
    if found:
        return _json({"object": "list", "data": [found[name] for name in sorted(found)]})
    return refusals[min(refusals)] if refusals else _failed(pool.unavailable(pair=False))


def _credentials(app: ProxyApp) -> dict[str, str] | None:
    """With which key engines are asked on behalf of a client; None: with the proxy's own."""
    if app.settings.auth != "pass_through":
        return None
    given = request.headers.get("Authorization", "")
    return {"authorization": given if given.isascii() else ""}


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


def _text(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}

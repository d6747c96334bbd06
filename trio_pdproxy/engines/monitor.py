"""Watching one engine: is it there, who is it, and what must decode engines be told of it.

A restarted engine comes back with a new engine id, and whoever is sent there with the old one hangs. So who it is is
asked at every look (the side channel answers in milliseconds and holds nothing), and what follows from it is
learned again whenever the answer is another.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from uuid import uuid4

import msgspec
import trio

from trio_pdproxy.config import Settings
from trio_pdproxy.core.plan import Coordinates, Told, told_in
from trio_pdproxy.engines.coordinates import Meta, SideChannel, SideChannelError, SideChannelSilentError
from trio_pdproxy.engines.engine import About, Engine
from trio_pdproxy.engines.wire import EngineError, SilentError

log = logging.getLogger("trio_pdproxy.engines")

PROBE_TIMEOUT = 30.0
"""Seconds for the one-token probe: a cold engine compiles or loads on its first request."""


TOLERATED_MISSES = 2
"""Probes in a row that a usable engine may miss before it counts as down. One that refuses is down at once."""

WORKING = 5.0
"""Seconds after it answered a request (or sent a piece of a stream) in which a missed probe says nothing."""


class _UnusableError(Exception):
    """The engine cannot be used; the text says why."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str | None = None


async def watch(
    engine: Engine,
    side_channel: SideChannel,
    settings: Settings,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Look at `engine` every `health_interval`, and at once when poked, until cancelled.

    Started after the first look. The engine says itself when it has become usable or unusable (`on_change`).
    """
    first = True
    while True:
        engine.poked = trio.Event()
        before, identity = engine.usable, _identity(engine.about.meta)
        await look(engine, side_channel)
        engine.looked = True
        engine.tick()
        if engine.usable != before or not engine.usable or _identity(engine.about.meta) != identity:
            engine.on_change()  # whoever waits for it waits in vain, or no longer
        if engine.usable != before or first:
            _tell(engine)
        await engine.connections.expire()
        if first:
            task_status.started()
            first = False
        with trio.move_on_after(settings.health_interval):
            await engine.poked.wait()
            await trio.sleep(0.1)  # whatever pokes it may need that long to be over


async def look(engine: Engine, side_channel: SideChannel) -> None:
    """One look. Never raises for anything the engine does; the result is in `engine`."""
    doubts = engine.doubts
    try:
        await _check_health(engine)
        meta = await _ask_meta(engine, side_channel)
        if engine.doubted or not engine.up or _identity(engine.about.meta) != _identity(meta):
            engine.coordinates = None
            engine.on_change()  # nobody may be sent there meanwhile
            engine.about = await _about(engine, meta)
            if engine.role == "prefill":
                await _learn_coordinates(engine, meta)
    except SilentError as error:
        engine.misses += 1
        at_work = trio.current_time() - engine.heard < WORKING
        if engine.usable and (engine.misses < TOLERATED_MISSES or at_work):
            return  # requests say that it works; on a starved machine it is the probe that is late
        engine.up = False
        engine.why = str(error)
    except (_UnusableError, EngineError) as error:
        engine.up = False
        engine.why = str(error)
    else:
        engine.up = True
        engine.misses = 0
        engine.doubts_settled = doubts  # one that came meanwhile stands


def _identity(meta: Meta | None) -> tuple[str, str] | None:
    return None if meta is None else (meta.engine_id, meta.compatibility_hash)


def _tell(engine: Engine) -> None:
    if engine.usable:
        identity = engine.about.meta.engine_id if engine.about.meta else "unknown (no side channel)"
        log.info("%s engine %s is usable: engine id %s", engine.role, engine.name, identity)
    else:
        log.warning("%s engine %s is not usable: %s", engine.role, engine.name, engine.why)


async def _check_health(engine: Engine) -> None:
    response = await engine.call("GET", "/health")
    if response.status_code != 200:
        raise _UnusableError(f"GET /health answered {response.status_code}")


async def _ask_meta(engine: Engine, side_channel: SideChannel) -> Meta | None:
    try:
        return await side_channel.ask(*engine.side_channel)
    except SideChannelError as error:
        if engine.role == "prefill" and engine.spec.engine_id is None:
            if isinstance(error, SideChannelSilentError):
                raise SilentError(str(error)) from None
            raise _UnusableError(str(error)) from None
        # A decode engine is used without: only the check that it can pair is lost.
        return None


async def _about(engine: Engine, meta: Meta | None) -> About:
    version = await engine.call("GET", "/version")
    models = await engine.call("GET", "/v1/models")
    if models.status_code != 200:
        raise _UnusableError(f"GET /v1/models answered {models.status_code} (is its API key configured here?)")
    try:
        first = msgspec.json.decode(models.content, type=_Models).data[0]
    except (msgspec.DecodeError, IndexError):
        raise _UnusableError("GET /v1/models answered no list of models: is this a vLLM server?") from None
    try:
        number = msgspec.json.decode(version.content, type=_Version).version
    except msgspec.DecodeError:
        number = None
    return About(version=number, model=first.id, max_model_len=first.max_model_len, meta=meta)


async def _learn_coordinates(engine: Engine, meta: Meta | None) -> None:
    """Id from the side channel, sizes and mode from a one-token probe (it holds one block for the lease); the
    configuration's word is taken over both. All of it before any decode engine is told: a missing or wrong size
    kills that engine."""
    spec = engine.spec
    engine_id = spec.engine_id or (meta.engine_id if meta else None)
    if spec.engine_id is not None and engine.rank is not None:
        engine_id = f"{spec.engine_id}_dp{engine.rank}"  # as vLLM names its ranks
    told: Told | None = None
    if spec.tp_size is None:
        told = await _probe(engine)
        if engine_id is not None and told.remote_engine_id != engine_id:
            raise _UnusableError(
                f"it calls itself {told.remote_engine_id}, but {spec.side_channel.host}:{engine.side_channel[1]} says "
                f"{engine_id}: that side channel is another engine's, or engine_id or dp_size is wrong here"
            )
        engine.about = replace(engine.about, mode=told.transfer_mode)
    tp_size = spec.tp_size or (told.tp_size if told else 1)
    assert engine_id is not None
    host, port = engine.side_channel
    engine.coordinates = Coordinates(
        engine_id=engine_id,
        host=host,
        port=port,
        tp_size=tp_size,
        pp_size=spec.pp_size or (told.pp_size if told else 1),
        dcp_size=spec.dcp_size or (told.dcp_size if told else meta.dcp_size if meta else 1),
    )


async def _probe(engine: Engine) -> Told:
    body = {
        "model": engine.about.model,
        "prompt": "a",
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    response = await engine.call(
        "POST",
        "/v1/completions",
        content=msgspec.json.encode(body),
        headers={"content-type": "application/json", "x-request-id": uuid4().hex} | _rank_header(engine),
        within=PROBE_TIMEOUT,
    )
    if response.status_code != 200:
        raise _UnusableError(f"the one-token probe was answered {response.status_code}: {response.text[:200]}")
    told = told_in(response.content)
    if told is None:
        raise _UnusableError(
            "it answers without kv_transfer_params: start it with "
            '--kv-transfer-config \'{"kv_connector": "NixlPushConnector", ...}\''
        )
    return told


def _rank_header(engine: Engine) -> dict[str, str]:
    return {} if engine.rank is None else {"x-data-parallel-rank": str(engine.rank)}

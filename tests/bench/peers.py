"""The proxies that are compared: how each is started, with one worker, in front of the benchmark's engines.

Each has its own defaults, log lines included; only what would refuse the loads (limits on requests in
flight) is raised.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.bench import floor, router
from tests.bench.processes import Cores, Started

DIRECT = "direct"
NGINX = "nginx"
ROUTER = "vllm-router"
BASELINE = "asyncio"
OURS = "ours"
FALLBACK = "ours-hypercorn"
TWO = "ours-2-workers"
FLOOR = "hypercorn-floor"

ABOUT = {
    DIRECT: "the decode engine alone",
    NGINX: "nginx as a plain reverse proxy to the decode engine",
    ROUTER: "vllm-router (Rust), P/D mode, both legs at once",
    BASELINE: "the vLLM demo's shape: FastAPI, uvicorn, uvloop, aiohttp",
    OURS: "trio-pdproxy serve",
    FALLBACK: "hypercorn trio_pdproxy:app (public sends)",
    TWO: "hypercorn trio_pdproxy:app --workers 2",
    FLOOR: "an app on hypercorn that only passes chunks on",
}

MANY = 1 << 16
"""Requests in flight that nobody refuses."""


@dataclass(slots=True)
class Engines:
    """Where the engines are."""

    prefill: int
    decode: int
    side_channel: int
    engine_id: str


def _never() -> Peer:
    raise AssertionError("this peer has no process")


@dataclass(slots=True)
class Peer:
    """A proxy under test."""

    name: str
    port: int
    started: Started | None = None
    """None: there is no process (direct)."""
    ready_path: str | None = None
    """Where it says 200 once it can serve pairs; None: it can as soon as it answers."""
    warm_ups: int = 3
    tells_gap: bool = False
    again: Callable[[], Peer] = field(default=_never, repr=False)
    """Start another one of it."""


class SkippedError(Exception):
    """This peer cannot be run here; the text says why."""


def start(name: str, engines: Engines, cores: Cores, folder: Path, *, install: bool) -> Peer:
    """Start a peer. Raises `SkippedError`."""
    port = _free_port()
    if name == DIRECT:
        return Peer(DIRECT, engines.decode, warm_ups=1)
    make = _MAKERS[name]
    argv, env = make(port, engines, folder, install)
    log = folder / f"{name}-{port}.log"
    where = cores.all if name == TWO else cores.proxy
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PDPROXY_")}
    started = Started(argv, cores=where, log=log, env=inherited | env)
    ours = name in (OURS, FALLBACK, TWO)
    return Peer(
        name,
        port,
        started,
        ready_path="/ready" if ours else None,
        # Each of several workers warms its pairs up by itself.
        warm_ups=8,
        tells_gap=ours and name != TWO,
        again=lambda: start(name, engines, cores, folder, install=install),
    )


_Made = tuple[Sequence[str], dict[str, str]]


def _nginx(port: int, engines: Engines, folder: Path, _install: bool) -> _Made:
    command = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if command is None:
        raise SkippedError("there is no nginx here (apt-get install nginx-light)")
    prefix = folder / f"nginx-{port}"
    prefix.mkdir()
    conf = prefix / "nginx.conf"
    conf.write_text(
        f"""
{"user root;" if os.getuid() == 0 else ""}
daemon off;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {prefix}/pid;
error_log {prefix}/error.log;
events {{ worker_connections 10000; }}
http {{
    access_log off;
    client_max_body_size 0;
    client_body_buffer_size 8m;
    keepalive_requests 1000000000;
    {" ".join(f"{kind}_temp_path {prefix}/{kind};" for kind in ("proxy", "fastcgi", "uwsgi", "scgi"))}
    client_body_temp_path {prefix}/body;
    upstream decode {{ server 127.0.0.1:{engines.decode}; keepalive 2000; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=2048;
        location / {{
            proxy_pass http://decode;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""
    )
    return [command, "-p", str(prefix), "-c", str(conf), "-e", str(prefix / "error.log")], {}


def _router(port: int, engines: Engines, _folder: Path, install: bool) -> _Made:
    command = router.find(install=install)
    if isinstance(command, str):
        raise SkippedError(command)
    argv = [str(command), "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
    argv += ["--prefill", f"http://127.0.0.1:{engines.prefill}", "--decode", f"http://127.0.0.1:{engines.decode}"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())]
    argv += ["--max-concurrent-requests", str(MANY), "--queue-size", str(MANY)]
    return argv, {}


def _baseline(port: int, engines: Engines, _folder: Path, _install: bool) -> _Made:
    if missing := [name for name in ("fastapi", "uvicorn", "uvloop", "aiohttp") if find_spec(name) is None]:
        raise SkippedError(f"{', '.join(missing)} not installed (pip install --group bench)")
    argv = [sys.executable, "-m", "tests.bench.baseline", "--port", str(port)]
    argv += ["--prefill", f"127.0.0.1:{engines.prefill}", "--decode", f"127.0.0.1:{engines.decode}"]
    argv += ["--engine-id", engines.engine_id, "--side-channel-port", str(engines.side_channel)]
    return argv, {}


def _ours(port: int, engines: Engines, _folder: Path, _install: bool) -> _Made:
    argv = [sys.executable, "-m", "trio_pdproxy", "serve", "--bind", f"127.0.0.1:{port}"]
    return argv, _settings(engines)


def _hypercorn(workers: int) -> Callable[[int, Engines, Path, bool], _Made]:
    def made(port: int, engines: Engines, _folder: Path, _install: bool) -> _Made:
        argv = [sys.executable, "-m", "hypercorn", "trio_pdproxy:app", "--worker-class", "trio"]
        argv += ["--workers", str(workers), "--backlog", "2048", "--bind", f"127.0.0.1:{port}"]
        return argv, _settings(engines)

    return made


def _floor(port: int, engines: Engines, _folder: Path, _install: bool) -> _Made:
    argv = [sys.executable, "-m", "hypercorn", "tests.bench.floor:app", "--worker-class", "trio"]
    return [*argv, "--backlog", "2048", "--bind", f"127.0.0.1:{port}"], {floor.DECODE: str(engines.decode)}


def _settings(engines: Engines) -> dict[str, str]:
    return {
        "PDPROXY_PREFILL": f"http://127.0.0.1:{engines.prefill};side_channel=127.0.0.1:{engines.side_channel}",
        "PDPROXY_DECODE": f"http://127.0.0.1:{engines.decode}",
        "PDPROXY_PREFILL_MAX_INFLIGHT": str(MANY),
        "PDPROXY_DECODE_MAX_INFLIGHT": str(MANY),
    }


_MAKERS: dict[str, Callable[[int, Engines, Path, bool], _Made]] = {
    NGINX: _nginx,
    ROUTER: _router,
    BASELINE: _baseline,
    OURS: _ours,
    FALLBACK: _hypercorn(1),
    TWO: _hypercorn(2),
    FLOOR: _floor,
}


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port

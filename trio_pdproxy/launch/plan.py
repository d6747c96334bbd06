"""From a script to the exact command and environment of each engine, and the proxy's settings. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from uuid import uuid4

from pydantic import ValidationError

from trio_pdproxy.config import ROLES, Address, ConfigError, EngineSpec, Role, Settings
from trio_pdproxy.config.problems import problems_of

from . import presets
from .environment import EngineEnvironment, environment_folder
from .ports import choose_run
from .script import Restart, Script
from .script_rules import DEFAULT_PORTS, DEFAULT_SIDE_PORTS

KEY_VARIABLE = "VLLM_API_KEY"
# Settings that the environment gives over the script's, as it does over a file's.
_PREFIX = "PDPROXY_"


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One engine to be: its name, where it listens, how it is started.

    `side_channel_ports`: one for each data-parallel rank. `env`: what is set in the launcher's own environment, None
    for what is removed. A new engine id (`${engine_id}`) is made for each start: see `argv` and `environ`.
    """

    name: str
    role: Role
    index: int
    host: str
    port: int
    side_channel_ports: range
    words: tuple[str, ...]
    env: Mapping[str, str | None]
    places: Mapping[str, str]
    spec: EngineSpec
    """What the proxy is told of it."""

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Every host and port it will listen on."""
        return [(self.host, port) for port in (self.port, *self.side_channel_ports)]

    def fresh(self) -> dict[str, str]:
        """What `${...}` stands for in one start."""
        return {**self.places, "engine_id": str(uuid4())}

    def argv(self, places: Mapping[str, str] | None = None) -> list[str]:
        return [_filled(word, places or self.fresh()) for word in self.words]

    def changes(self, places: Mapping[str, str] | None = None) -> dict[str, str | None]:
        """`env` with its places filled in."""
        places = places or self.fresh()
        return {name: None if value is None else _filled(value, places) for name, value in self.env.items()}

    def environ(self, base: Mapping[str, str], places: Mapping[str, str] | None = None) -> dict[str, str]:
        """The whole environment of one start, over the launcher's own."""
        env = dict(base)
        for name, value in self.changes(places).items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return env


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything a script comes to. `settings` is None where the script wants no proxy."""

    engines: tuple[EngineCommand, ...]
    external: Mapping[Role, tuple[EngineSpec, ...]]
    settings: Settings | None
    logs: Path
    model: str
    """What clients call it."""
    ready_timeout: float
    stop_grace: float
    nice: int
    restart: Restart
    secrets: Mapping[str, str]
    """Environment that is not in the commands, so that it is not shown: the API key."""

    def of(self, role: Role) -> list[EngineCommand]:
        return [engine for engine in self.engines if engine.role == role]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Every host and port the engines will listen on."""
        return [address for engine in self.engines for address in engine.addresses]


def make_plan(
    script: Script,
    *,
    name: str = "launch",
    found: EngineEnvironment | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, object] | None = None,
) -> LaunchPlan:
    """The plan for a script. Free ports are looked for where it says `auto`.

    name -- the script's, for the default folder of logs
    found -- the engine environment for the cpu preset; by default where it is, or would be
    flags -- settings of the proxy over those of the environment and the script

    Raises `ConfigError` where the proxy's settings do not fit or the environment has no `${VARIABLE}`,
    `PortInUseError` where no port is free.
    """
    if found is None and presets.own_vllm(script):
        found = EngineEnvironment(environment_folder(environ), 0.0)
    ports = _choose(script)
    devices = _devices(script)
    engines = tuple(
        _engine(
            script,
            role,
            number,
            ports=ports[role, number],
            devices=devices.get((role, number)),
            found=found,
            environ=environ,
        )
        for role in ROLES
        for number in range(script.of(role).count)
    )
    external = {role: script.of(role).external for role in ROLES}
    settings = None if script.proxy is False else _settings(script, engines, external, environ, flags or {})
    key = settings.api_key.get_secret_value() if settings and settings.api_key else environ.get("PDPROXY_API_KEY")
    return LaunchPlan(
        engines,
        external,
        settings,
        script.logs if script.logs is not None else state_home(environ) / name,
        presets.served_model(script),
        script.ready_timeout or presets.READY_TIMEOUTS[script.preset],
        script.stop_grace,
        presets.NICE[script.preset] if script.nice is None else script.nice,
        script.restart,
        {KEY_VARIABLE: key} if key else {},
    )


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where logs go by default: trio-pdproxy in the user's state folder (XDG), or what systemd names."""
    if named := environ.get("LOGS_DIRECTORY"):
        return Path(named.partition(":")[0])
    xdg = environ.get("XDG_STATE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path(environ.get("HOME") or Path.home(), ".local", "state")
    return base / "trio-pdproxy"


def _engine(
    script: Script,
    role: Role,
    number: int,
    *,
    ports: tuple[int, int],
    devices: str | None,
    found: EngineEnvironment | None,
    environ: Mapping[str, str],
) -> EngineCommand:
    engines = script.of(role)
    host = engines.host or script.host
    port, side = ports
    ranks = script.ranks_of(role)
    name = f"{role[0]}{number}"
    words = presets.command(script, role, found)
    env = presets.environment(script, role, found)
    if devices is not None:
        env.setdefault("CUDA_VISIBLE_DEVICES", devices)
    places = {
        "name": name,
        "role": role,
        "index": str(number),
        "host": host,
        "port": str(port),
        "side_channel_port": str(side),
        "model": presets.model_of(script),
        "served_model_name": presets.served_model(script),
        "devices": devices or "",
        "kv_transfer_config": presets.flag_words({"x": presets.kv_transfer_config(script, role)})[-1],
    }
    used = _variables([*words, *(value for value in env.values() if value)], places, environ, name)
    cap = engines.max_inflight
    if cap is None and script.preset != "sim" and engines.command is None:
        seqs = presets.flags(script, role).get("max-num-seqs")
        cap = min(int(str(seqs)), 256) if role == "decode" and str(seqs).isdecimal() else None
    spec = EngineSpec(
        url=f"http://{Address(host, port)}",
        side_channel=Address(host, side),
        name=name,
        max_inflight=cap,
        lease=script.lease if role == "prefill" else None,
        dp_size=ranks if role == "prefill" and ranks > 1 else None,
    )
    return EngineCommand(
        name, role, number, host, port, range(side, side + ranks), tuple(words), env, places | used, spec
    )


def _variables(
    texts: Iterable[str], places: Mapping[str, str], environ: Mapping[str, str], engine: str
) -> dict[str, str]:
    """The environment variables that the texts name as ${VARIABLE}."""
    names = {name for text in texts for name in Template(text).get_identifiers()}
    wanted = {name for name in names if name not in places and name != "engine_id"}
    if missing := sorted(name for name in wanted if name not in environ):
        text = f"the environment has no {', '.join(missing)}, which the script names as ${{...}}"
        raise ConfigError([(engine, text)])
    return {name: environ[name] for name in wanted}


def _filled(text: str, places: Mapping[str, str]) -> str:
    return Template(text).substitute(places)


def _settings(
    script: Script,
    engines: tuple[EngineCommand, ...],
    external: Mapping[Role, tuple[EngineSpec, ...]],
    environ: Mapping[str, str],
    flags: Mapping[str, object],
) -> Settings:
    """The proxy's settings: flags over PDPROXY_* over the script. The engines are always the script's."""
    assert script.proxy is not False
    values: dict[str, object] = {"lease": script.lease} | script.proxy
    for name in Settings.model_fields:
        text = environ.get(_PREFIX + name.upper(), "").strip()
        if text and name not in ROLES:
            # A secret and its file are one setting.
            values.pop(name.removesuffix("_file"), None)
            values.pop(f"{name}_file", None)
            values[name] = text
    values |= {name: value for name, value in flags.items() if value is not None}
    for role in ROLES:
        values[role] = [*(engine.spec for engine in engines if engine.role == role), *external[role]]
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = problems_of(error, known=Settings.model_fields)
        raise ConfigError((".".join(map(str, problem.loc)), problem.message) for problem in problems) from None


def _choose(script: Script) -> dict[tuple[Role, int], tuple[int, int]]:
    """HTTP and first side-channel port of each engine."""
    chosen: dict[tuple[Role, int], tuple[int, int]] = {}
    taken: set[int] = set()
    for role in ROLES:
        engines = script.of(role)
        host = engines.host or script.host
        ranks = script.ranks_of(role)
        first = DEFAULT_PORTS[role] if engines.port is None else engines.port
        side = DEFAULT_SIDE_PORTS[role] if engines.side_channel_port is None else engines.side_channel_port
        for number in range(engines.count):
            port = first + number if first else choose_run(1, host, taken)
            side_port = side + number * ranks if side else choose_run(ranks, host, taken)
            chosen[role, number] = port, side_port
    return chosen


def _devices(script: Script) -> dict[tuple[Role, int], str]:
    """CUDA_VISIBLE_DEVICES of each engine, where the launcher sets it."""
    split: dict[tuple[Role, int], str] = {}
    following = 0
    for role in ROLES:
        engines = script.of(role)
        each = script.devices_needed(role)
        given = engines.devices
        if given is None:
            if script.preset != "cuda" or engines.command is not None:
                continue
            given = tuple(str(number) for number in range(following, following + each * engines.count))
            following += len(given)
        if not given:
            continue
        for number in range(engines.count):
            split[role, number] = ",".join(given[number * each : (number + 1) * each])
    return split

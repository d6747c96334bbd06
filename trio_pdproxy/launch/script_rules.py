"""What must hold between the values of a launch script: found before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from string import Template
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trio_pdproxy.config import ROLES, Role, Settings
from trio_pdproxy.config.problems import Loc, Problem, problems_of

if TYPE_CHECKING:
    from .script import Script

KV_CONFIG = "kv-transfer-config"
PLACES = (
    "name",
    "role",
    "index",
    "host",
    "port",
    "side_channel_port",
    "model",
    "served_model_name",
    "devices",
    "kv_transfer_config",
    "engine_id",
)
"""What may be written as ${...} in commands, flags and environment, besides upper-case environment variables."""

DEFAULT_PORTS: Mapping[Role, int] = {"prefill": 8100, "decode": 8200}
DEFAULT_SIDE_PORTS: Mapping[Role, int] = {"prefill": 5600, "decode": 5700}


def contradictions(script: Script) -> Iterator[Problem]:
    """What is wrong between values."""
    if script.preset == "cuda" and script.model is None and any(_preset_command(script, role) for role in ROLES):
        yield Problem((), "model is required: a name on the Hugging Face hub, or a folder", between=True)
    if not any(script.of(role).count for role in ROLES):
        yield Problem(("prefill", "count"), "there is nothing to start: both counts are 0")
    for role in ROLES:
        yield from _of_role(script, role)
    yield from _twice(script)
    yield from _of_proxy(script)


def _preset_command(script: Script, role: Role) -> bool:
    engines = script.of(role)
    return engines.count > 0 and engines.command is None


def _of_role(script: Script, role: Role) -> Iterator[Problem]:
    engines = script.of(role)
    own: tuple[tuple[Loc, Mapping[str, Any]], ...] = (((), script.flags), ((role,), engines.flags))
    for loc, flags in own:
        if "api-key" in flags:
            words = "a process list would show the key: set PDPROXY_API_KEY, the proxy and the engines both take it"
            yield Problem((*loc, "flags", "api-key"), words)
        config = flags.get(KV_CONFIG)
        if isinstance(config, Mapping) and (config.get("engine_id") not in (None, "${engine_id}")):
            words = (
                "leave engine_id out: an engine that comes back with its old id makes every request to it hang. "
                "Where a command needs one, write ${engine_id}, which is new at each start"
            )
            yield Problem((*loc, "flags", KV_CONFIG), words)
    for flag in ("tensor", "pipeline", "data"):
        size = script.flags_of(role).get(f"{flag}-parallel-size")
        if size is not None and (isinstance(size, bool) or not str(size).isdecimal() or int(size) < 1):
            yield Problem((role, "flags", f"{flag}-parallel-size"), f"must be a whole number, not {size!r}")
            return
    if engines.devices:
        need = script.devices_needed(role) * engines.count
        if len(engines.devices) != need:
            text = (
                f"{len(engines.devices)} devices for {engines.count} engines that need {script.devices_needed(role)} "
                f"each (tensor x pipeline x data parallel size): name {need}"
            )
            yield Problem((role, "devices"), text)
    if not engines.count and not engines.external and script.proxy is not False:
        text = f"the proxy needs a {role} engine: start one (count), or name those that run elsewhere (external)"
        yield Problem((role, "count"), text)
    for loc, words in _texts(script, role):
        yield from _places(loc, words)


def _texts(script: Script, role: Role) -> Iterator[tuple[Loc, str]]:
    """Every text in which places are replaced."""
    engines = script.of(role)
    for word in engines.command or ():
        yield (role, "command"), word
    for word in (script.vllm or ()) if role == "prefill" else ():
        yield ("vllm",), word
    both: list[tuple[Loc, Mapping[str, Any], Mapping[str, str | None]]] = [((role,), engines.flags, engines.env)]
    if role == "prefill":
        both.append(((), script.flags, script.env))
    for loc, flags, env in both:
        for name, value in flags.items():
            yield (*loc, "flags", name), value if isinstance(value, str) else json.dumps(value)
        for name, given in env.items():
            yield (*loc, "env", name), given or ""


def _places(loc: Loc, text: str) -> Iterator[Problem]:
    template = Template(text)
    if not template.is_valid():
        yield Problem(loc, f"a lone $ in {text!r}: write $$ for a dollar sign")
        return
    for name in template.get_identifiers():
        if name not in PLACES and not name.isupper():
            known = ", ".join(f"${{{place}}}" for place in PLACES)
            yield Problem(loc, f"there is no ${{{name}}}; there are {known} and environment variables in upper case")


def _twice(script: Script) -> Iterator[Problem]:
    """Ports and devices that two engines would share."""
    ports: dict[tuple[str, int], str] = {}
    devices: dict[tuple[str, str], Role] = {}
    for role in ROLES:
        engines = script.of(role)
        host = engines.host or script.host
        runs = (
            ("port", engines.port, DEFAULT_PORTS[role], 1),
            ("side_channel_port", engines.side_channel_port, DEFAULT_SIDE_PORTS[role], script.ranks_of(role)),
        )
        for what, given, default, each in runs:
            first = default if given is None else given
            for number in range(engines.count * each if first else 0):
                port = first + number
                owner = f"{role[0]}{number // each}'s {what}"
                if port > 65535:
                    yield Problem((role, what), f"{owner} would be {port}: choose a lower one")
                    break
                if (other := ports.setdefault((host, port), owner)) != owner:
                    yield Problem((role, what), f"{owner} would be {port}, which is {other} already")
                    break
        for device in engines.devices or ():
            if devices.setdefault((host, device), role) != role:
                yield Problem((role, "devices"), f"device {device} is the prefill engines' already")


def _of_proxy(script: Script) -> Iterator[Problem]:
    if script.proxy is False:
        return
    given = dict(script.proxy)
    for name in ROLES:
        if given.pop(name, None) is not None:
            yield Problem(("proxy", name), f"the engines are the script's: write them under {name} (external)")
    # What is not given here follows from the script.
    filled = {"lease": script.lease} | given
    stand_ins = {"prefill": ["http://127.0.0.1:1;side_channel=127.0.0.1:3"], "decode": ["http://127.0.0.1:2"]}
    try:
        Settings.model_validate(filled | stand_ins)
    except ValidationError as error:
        for problem in problems_of(error, known=Settings.model_fields):
            yield Problem(("proxy", *problem.loc), problem.message)

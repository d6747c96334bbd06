"""What is wrong with a launch script's plan that can be seen without starting it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trio_pdproxy.check.findings import Finding, Level, loopback
from trio_pdproxy.engines.connections import KEEPALIVE
from trio_pdproxy.launch import LaunchPlan, MissingProgramError, PortInUseError, Script, presets
from trio_pdproxy.launch.ports import require_free
from trio_pdproxy.launch.program import require_program

# What two engines must have in common, as flags; both or neither.
_SHARED = ("block-size", "kv-cache-dtype", "dtype", "quantization", "attention-backend", "max-model-len", "revision")


def script_findings(script: Script, plan: LaunchPlan, *, running: bool = False) -> list[Finding]:
    """Everything that can be seen of `plan` before a start, errors first.

    running -- its engines are up: that their ports are taken is as it should be
    """
    found = [*_machine(script, plan, running), *_between_roles(script), *_hosts(script, plan)]
    if script.keep_alive <= KEEPALIVE:
        what = f"keep_alive is {script.keep_alive:g} s, and the proxy keeps idle connections for {KEEPALIVE:g} s"
        found.append(
            Finding(Level.WARNING, "keep_alive", "", what, "leave it at 75: requests meet closing connections")
        )
    for engine in plan.of("decode"):
        seqs = presets.flags(script, "decode").get("max-num-seqs")
        cap = engine.spec.max_inflight
        if cap is not None and str(seqs).isdecimal() and cap > int(str(seqs)):
            what = f"max_inflight is {cap}, and it runs {seqs} requests at once (max-num-seqs)"
            advice = "lower max_inflight: what waits there longer than the lease finds its KV gone and hangs"
            found.append(Finding(Level.WARNING, "max_inflight", engine.name, what, advice))
    return sorted(found, key=lambda finding: finding.level is Level.WARNING)


def _machine(script: Script, plan: LaunchPlan, running: bool) -> Iterator[Finding]:
    """Programs, model, ports."""
    for engine in plan.engines:
        try:
            require_program(engine.argv(), engine.environ(os.environ))
        except MissingProgramError as error:
            advice = "see `vllm` and `command` in the script"
            if presets.own_vllm(script):
                advice = "run `trio-pdproxy engines install`; launch does it too, at the first start"
            level = Level.WARNING if presets.own_vllm(script) else Level.ERROR
            yield Finding(level, "no_program", engine.name, str(error), advice)
        if not running:
            try:
                require_free(engine.addresses)
            except PortInUseError as error:
                yield Finding(Level.ERROR, "port_in_use", engine.name, str(error), "end that process, or choose `port`")
    model = script.model or ""
    if script.preset != "sim" and model.startswith(("/", ".")) and not Path(model).exists():
        yield Finding(
            Level.ERROR, "no_model", "", f"the model {model} does not exist", "name a folder, or a hub's name"
        )


def _between_roles(script: Script) -> Iterator[Finding]:
    """Flags by which prefill and decode engines would come to different compatibility hashes."""
    if script.preset == "sim" or not (script.prefill.count and script.decode.count):
        return
    if script.prefill.command is not None or script.decode.command is not None:
        return
    p, d = presets.flags(script, "prefill"), presets.flags(script, "decode")
    for flag in _SHARED:
        if p.get(flag) != d.get(flag):
            what = f"{flag} differs: {p.get(flag, 'not set')} for prefill, {d.get(flag, 'not set')} for decode"
            level = Level.WARNING if flag == "max-model-len" else Level.ERROR
            yield Finding(level, "cannot_pair", "", what, "write it under the script's own flags, for both roles")
    connectors = [_connector(flags) for flags in (p, d)]
    if connectors[0] != connectors[1]:
        what = f"the connectors differ: {connectors[0]} for prefill, {connectors[1]} for decode"
        advice = "push and pull never pair: use `mode`, for every engine"
        yield Finding(Level.ERROR, "mixed_modes", "", what, advice)
    for connector in set(connectors):
        if connector is None or not str(connector).startswith("Nixl"):
            what = f"the connector {connector} is no NIXL connector"
            yield Finding(Level.ERROR, "no_connector", "", what, "leave kv_connector to `mode`: push or pull")


def _connector(flags: Mapping[str, Any]) -> object:
    config = flags.get("kv-transfer-config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return config
    return config.get("kv_connector") if isinstance(config, Mapping) else None


def _hosts(script: Script, plan: LaunchPlan) -> Iterator[Finding]:
    """An engine here that says localhost to those elsewhere."""
    elsewhere = [spec for specs in plan.external.values() for spec in specs if not loopback(spec.address.host)]
    for engine in plan.engines:
        if elsewhere and loopback(engine.host):
            far = elsewhere[0]
            what = f"it listens on {engine.host}, and {far.name} is on another host ({far.address.host})"
            advice = "set `host` to an address of this machine that the other one reaches"
            yield Finding(Level.ERROR, "side_channel_on_localhost", engine.name, what, advice)

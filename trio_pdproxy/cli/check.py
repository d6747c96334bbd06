"""`trio-pdproxy check`: what is wrong with a configuration, a launch script, or running engines, in words."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from trio_pdproxy.cli.options import settings_from, settings_options
from trio_pdproxy.config import ConfigError, Settings

if TYPE_CHECKING:
    from trio_pdproxy.check import EngineFacts, Finding


@click.command()
@click.argument("script", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@settings_options
def check(script: Path | None, as_json: bool, **params: object) -> None:
    """Look at running engines (as configured for `serve`), or at a launch SCRIPT and its engines if they run.

    Asks every engine as the proxy would, in a few seconds and beside running traffic; each prefill engine is sent one
    token, which holds one KV block there for its lease.

    Exit code 0: nothing that keeps requests from being served; 1: errors were found; 2: wrong configuration.
    """
    from trio_pdproxy.check import Level, findings, gather, script_findings

    found: list[Finding] = []
    facts: list[EngineFacts] = []
    settings: Settings | None
    if script is not None:
        from trio_pdproxy.launch import load_script, make_plan
        from trio_pdproxy.launch.ports import is_free

        try:
            wanted = load_script(script)
            plan = make_plan(wanted, name=script.stem)
        except ConfigError as error:
            click.echo(f"trio-pdproxy check: {error}", err=True)
            sys.exit(2)
        # Engines of this very script that run: then its ports are theirs.
        running = bool(plan.engines) and not any(is_free(engine.host, engine.port) for engine in plan.engines)
        found += script_findings(wanted, plan, running=running)
        settings = plan.settings if running else None
    else:
        settings = settings_from(params)
    if settings is not None:
        facts = trio.run(gather, settings)
        found += findings(facts, settings)
    if as_json:
        click.echo(json.dumps(_as_json(facts, found), indent=1))
    else:
        click.echo(_as_text(facts, found))
    sys.exit(1 if any(finding.level is Level.ERROR for finding in found) else 0)


def _as_text(facts: Sequence[EngineFacts], found: Sequence[Finding]) -> str:
    lines = [_engine(one) for one in facts]
    for finding in found:
        engine = f"{finding.engine}: " if finding.engine else ""
        lines += [f"{finding.level.value}: {engine}{finding.what}", f"  what to do: {finding.advice}"]
    counts = [f"{sum(finding.level.value == level for finding in found)} {level}s" for level in ("error", "warning")]
    lines.append(", ".join(counts) if found else "nothing is wrong")
    return "\n".join(lines)


def _engine(one: EngineFacts) -> str:
    if one.unreachable is not None:
        return f"{one.role:8} {one.name}  not reachable"
    parts = [f"vLLM {one.version}" if one.version else "no vLLM", f"model {one.model}" if one.model else ""]
    parts.append(one.told.transfer_mode if one.told is not None else "")
    parts.append(f"engine id {one.meta.engine_id}" if one.meta is not None else "")
    if one.loads:
        load = one.loads[-1]
        parts.append(f"{load.running:g} running, {load.waiting:g} waiting, {100 * load.kv_usage:.2g} % of KV in use")
    return f"{one.role:8} {one.name}  {', '.join(part for part in parts if part)}"


def _as_json(facts: Sequence[EngineFacts], found: Sequence[Finding]) -> dict[str, object]:
    engines = [
        {
            "name": one.name,
            "role": one.role,
            "url": one.spec.url,
            "reachable": one.unreachable is None,
            "version": one.version,
            "model": one.model,
            "engine_id": one.meta.engine_id if one.meta else None,
            "mode": one.told.transfer_mode if one.told else None,
        }
        for one in facts
    ]
    problems = [
        {"level": f.level.value, "code": f.code, "engine": f.engine, "what": f.what, "advice": f.advice} for f in found
    ]
    return {"engines": engines, "findings": problems}

"""A plan as shell commands, ready to paste: what the launcher would run, and nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from trio_pdproxy.config import ROLES, EngineSpec, Settings
from trio_pdproxy.config.settings import SECRETS

from .plan import KEY_VARIABLE, EngineCommand, LaunchPlan

_INDENT = "  "


def commands(plan: LaunchPlan) -> str:
    """One command for each engine and one for the proxy, each after a comment that says what it is.

    Secrets stand there as the variable they are read from.
    """
    parts = [_engine(plan, engine) for engine in plan.engines]
    if plan.settings is not None:
        parts.append(_proxy(plan.settings))
    return "\n\n".join(parts) + "\n"


def _engine(plan: LaunchPlan, engine: EngineCommand) -> str:
    places = engine.fresh()
    changes = engine.changes(places)
    env = ["env", *(word for name, value in changes.items() if value is None for word in ("-u", name))]
    shown = [shlex.join(env)] if changes or plan.secrets else []
    shown += [shlex.quote(f"{name}={value}") for name, value in changes.items() if value is not None]
    if plan.secrets:
        shown.append(f'{KEY_VARIABLE}="$PDPROXY_API_KEY"')
    if plan.nice:
        shown.append(f"nice -n {plan.nice}")
    shown += _lines(engine.argv(places))
    where = f"{engine.url}, side channel {engine.spec.side_channel}"
    return f"# {engine.role} engine {engine.name}: {where}\n" + f" \\\n{_INDENT}".join(shown)


def _lines(argv: list[str]) -> Iterator[str]:
    """The program in one line, then each option with its values in one."""
    line: list[str] = []
    for word in argv:
        if word.startswith("--") and line:
            yield shlex.join(line)
            line = []
        line.append(word)
    yield shlex.join(line)


def _proxy(settings: Settings) -> str:
    shown = ["trio-pdproxy serve"]
    for role in ROLES:
        specs: tuple[EngineSpec, ...] = settings.prefill if role == "prefill" else settings.decode
        shown += [f"--{role} {shlex.quote(str(spec))}" for spec in specs]
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        if name in ROLES or name in SECRETS or name.removesuffix("_file") in SECRETS or value is None:
            continue
        text = ",".join(value) if isinstance(value, tuple) and not hasattr(value, "port") else str(value)
        shown.append(f"--{name.replace('_', '-')} {shlex.quote(text.lower() if isinstance(value, bool) else text)}")
    env = [f'{variable}="${variable}"' for name in SECRETS if getattr(settings, name) for variable in [_variable(name)]]
    if env:
        shown[0] = " ".join(["env", *env, shown[0]])
    return f"# the proxy: http://{settings.bind}\n" + f" \\\n{_INDENT}".join(shown)


def _variable(name: str) -> str:
    return f"PDPROXY_{name.upper()}"

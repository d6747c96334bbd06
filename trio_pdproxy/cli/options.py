"""The settings as flags: one flag per setting, made from the model, so that none can be forgotten."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic.fields import FieldInfo

from trio_pdproxy.config import ROLES, ConfigError, Settings, load_settings
from trio_pdproxy.config.settings import SECRETS

F = TypeVar("F", bound=Callable[..., Any])

_METAVARS = {
    "float": "SECONDS",
    "int": "N",
    "Address": "HOST:PORT",
    "str": "NAME",
    "bool": "true|false",
    "tuple": "WORD,...",
    "Path": "PATH",
}


def settings_options(command: F) -> F:
    """Add `--config`, `--prefill`, `--decode` (both repeatable) and a flag for every other setting.

    A flag that is not given passes None (or ()) to the command, so that environment and file count; all
    values come as text and are checked together by `settings_from`. Secrets get no flag.
    """
    options = [
        click.option(
            "--config",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="YAML file with settings. Default: the one PDPROXY_CONFIG names.",
        )
    ]
    options += [_option(name, field) for name, field in Settings.model_fields.items() if _is_flag(name)]
    for option in reversed(options):
        command = option(command)
    return command


def settings_from(params: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """The settings for a command's parameters, over the environment (default: the process's), over the file.

    Parameters that are no settings are left alone. When anything is wrong, every problem is printed on
    stderr and the process ends with code 2 (`click.exceptions.Exit`).
    """
    flags = {name: value for name, value in params.items() if name in Settings.model_fields}
    try:
        return load_settings(file=params.get("config"), environ=os.environ if environ is None else environ, flags=flags)
    except ConfigError as error:
        context = click.get_current_context(silent=True)
        click.echo(f"{context.command_path if context else 'trio-pdproxy'}: {error}", err=True)
        raise click.exceptions.Exit(2) from None


def config_file(params: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Path | None:
    """The configuration file that `settings_from` reads, if any."""
    named = (os.environ if environ is None else environ).get("PDPROXY_CONFIG")
    given: Path | None = params.get("config")
    return given or (Path(named) if named else None)


def _is_flag(name: str) -> bool:
    return name.removesuffix("_file") not in SECRETS


def _option(name: str, field: FieldInfo) -> Callable[[F], F]:
    flag = "--" + name.replace("_", "-")
    if name in ROLES:
        return click.option(
            flag, name, multiple=True, metavar="URL[;KEY=VALUE]...", help=f"{field.description} Repeatable."
        )
    return click.option(flag, name, metavar=_metavar(name, field), help=f"{field.description} [{_default(field)}]")


def _metavar(name: str, field: FieldInfo) -> str:
    if name == "body_limit":
        return "BYTES"
    annotation = field.annotation
    if choices := getattr(annotation, "__args__", ()):
        if all(isinstance(choice, str) for choice in choices):
            return "|".join(choices)
        annotation = choices[0]
    return _METAVARS[annotation.__name__ if annotation is not None else ""]


def _default(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "shown_default" in extra:
        return f"default: {extra['shown_default']}"
    value = field.default
    return f"default: {value:g}" if isinstance(value, float) else f"default: {value}"

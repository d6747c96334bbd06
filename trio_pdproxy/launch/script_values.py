"""Single values of a launch script as people write them, each read to the one form the rest of the launcher sees.

Every function raises `ValueError` with a sentence that says what to write instead.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from trio_pdproxy.config import values as v

_FLAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*(\.[A-Za-z0-9_.-]+)?")


def flag_name(name: str) -> str:
    """vLLM reads max_model_len and max-model-len alike; what follows a dot (compilation-config.mode) is a JSON name."""
    option, dot, inner = name.strip().removeprefix("--").partition(".")
    return option.replace("_", "-") + dot + inner


def flags(value: object) -> object:
    """vLLM's flags: one spelling of the names, values that can be written on a command line."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("write flags as a mapping: `max-model-len: 8192`, true for a flag without a value")  # noqa: TRY004
    read: dict[str, object] = {}
    for name, given in value.items():
        flag = flag_name(str(name))
        if not _FLAG.fullmatch(flag):
            raise ValueError(f"{name!r} is not the name of a flag")
        read[flag] = given
    return read


def env(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("write the environment as a mapping: `NAME: value`, null to remove a variable")  # noqa: TRY004
    read: dict[str, str | None] = {}
    for name, given in value.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"{name!r} is not the name of an environment variable")
        if isinstance(given, bool) or not (given is None or isinstance(given, (str, int, float))):
            raise ValueError(f"the value of {name} must be text or a number (write '1' or '0' for true or false)")
        read[str(name)] = None if given is None else str(given)
    return read


def command(value: object) -> object:
    """A command as text (split as a shell would) or as a list of words."""
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"the command cannot be split into words: {error}") from None
    elif isinstance(value, (list, tuple)):
        words = [str(word) for word in value]
    else:
        raise ValueError("write a command as text or as a list of words")  # noqa: TRY004
    if not words:
        raise ValueError("the command is empty")
    return tuple(words)


def port(value: object) -> object:
    if value == "auto":
        return 0
    number = v.count(value)
    if not 1 <= number <= 65535:
        raise ValueError("write a port from 1 to 65535, or auto")
    return number


def devices(value: object) -> object:
    """GPUs: `[0, 1]`, `0,1`, `0-3`, or ids such as MIG-...; null leaves CUDA_VISIBLE_DEVICES alone."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    if not isinstance(value, (list, tuple)):
        raise ValueError("write devices as a list: [0, 1], or as 0-3")  # noqa: TRY004
    named: list[str] = []
    for item in value:
        if span := re.fullmatch(r"(\d+)-(\d+)", str(item)):
            named += [str(number) for number in range(int(span[1]), int(span[2]) + 1)]
        else:
            named.append(str(item))
    if len(set(named)) != len(named):
        raise ValueError("a device is named twice")
    return tuple(named)


def host(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("write a host name or an address")  # noqa: TRY004
    name = v.host(value.strip().strip("[]"))
    if name in ("0.0.0.0", "::"):
        raise ValueError("write an address that the other engines and the proxy can reach, not every interface")
    return name


def writable(value: object) -> object:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise ValueError("write text, numbers, lists or mappings") from None
    return value


_TEXT_MAP = {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}}
_FLAG_MAP = {"type": "object", "additionalProperties": True}
Flags = Annotated[dict[str, Any], BeforeValidator(flags), AfterValidator(writable), WithJsonSchema(_FLAG_MAP)]
Env = Annotated[dict[str, str | None], BeforeValidator(env), WithJsonSchema(_TEXT_MAP)]
Command = Annotated[
    tuple[str, ...],
    BeforeValidator(command),
    WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}}),
]
Port = Annotated[int, BeforeValidator(port), WithJsonSchema({"type": ["integer", "string"]})]
Devices = Annotated[
    tuple[str, ...],
    BeforeValidator(devices),
    WithJsonSchema({"type": ["array", "string", "integer"], "items": {"type": ["integer", "string"]}}),
]
Host = Annotated[str, BeforeValidator(host), WithJsonSchema({"type": "string"})]

"""Problems found in a configuration, and their way through pydantic.

pydantic reports all wrong *fields* of a model, but runs no check *between* fields while one of them
is wrong, and words its messages for programmers. The models here therefore collect `Problem`s
themselves and raise them together, as one ordinary `ValidationError` whose messages a user can act on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

Loc = tuple[int | str, ...]
# Never repeated in a message: they are secrets, or may hold one.
_NOT_SHOWN = frozenset({"url", "api_key", "admin_token", "client_keys"})


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    `loc`: where in the settings, as pydantic counts it: ("prefill", 0, "lease").
    `message`: what is wrong and what to do, without the place.
    `between`: the problem lies between several values (or in something missing), not in one value.
    `also`: the other places that take part in it.
    """

    loc: Loc
    message: str
    between: bool = False
    also: tuple[Loc, ...] = ()


def hint(name: str, known: Iterable[str], form: Callable[[str], str] = str) -> str:
    """`; did you mean X?` for a mistyped name, or nothing. `form` writes the name as the user would."""
    near = get_close_matches(name.lower().replace("-", "_"), list(known), n=1, cutoff=0.7)
    return f"; did you mean {form(near[0])}?" if near else ""


def problems_of(error: ValidationError, *, known: Iterable[str], prefix: Loc = ()) -> list[Problem]:
    """What `error` says, in a user's words. `known` are the names there are, for hints on others."""
    return [_problem(details, list(known), prefix) for details in error.errors(include_url=False)]


def raise_together(title: str, problems: Iterable[Problem]) -> None:
    """Raise one `ValidationError` that holds all `problems`; return if there are none."""
    lines = [
        InitErrorDetails(
            type=PydanticCustomError("config", "{problem}", {"problem": p.message, "found": p}),
            loc=p.loc,
            input=None,  # the value itself could be a secret
        )
        for p in problems
    ]
    if lines:
        raise ValidationError.from_exception_data(title, lines, hide_input=True)


def _problem(details: Mapping[str, Any], known: list[str], prefix: Loc) -> Problem:
    context = details.get("ctx", {})
    loc = prefix + tuple(details["loc"])
    found = context.get("found")
    if isinstance(found, Problem):
        return Problem(prefix + found.loc, found.message, found.between, found.also)
    name = str(details["loc"][-1]) if details["loc"] else ""
    match details["type"]:
        case "extra_forbidden":
            return Problem(loc, f"there is no such setting{hint(name, known)}")
        case "missing":
            return Problem(loc, "is required")
        case "value_error":
            message = str(context["error"])
        case "model_type" | "dict_type":
            return Problem(loc, "write an engine as URL[;key=value]... or as a mapping with a url")
        case _:
            message = str(details["msg"]).replace("Input should", "should").replace("String should", "should")
    value = details.get("input")
    shown = isinstance(value, (str, int, float)) and name not in _NOT_SHOWN and len(str(value)) <= 60
    return Problem(loc, f"{message}, not {value!r}" if shown else message)

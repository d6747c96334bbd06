"""How long work reports where it is. The launcher never prints: whoever calls it decides how to show this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """`what` is being done; `done` of `total` where that is countable (total 0: it is not)."""

    what: str
    done: int = 0
    total: int = 0


Progress = Callable[[Step], None]


def silent(_step: Step) -> None:
    """The `Progress` that shows nothing."""

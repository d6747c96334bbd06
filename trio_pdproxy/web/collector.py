"""Python's cycle collector, in a process that does nothing but serve."""

from __future__ import annotations

import gc

ALLOCATIONS = 10_000
"""Containers more than were freed before the collector looks (Python's default: 700)."""


def spare() -> None:
    """Look at less, and less often. For the process of a server's own command: a library's host decides for itself.

    What was imported lives as long as the process and is never looked at again. The rest of what there is, that of
    every open stream included, is looked at a few times a minute instead of several times a second, which at 512
    streams was a tenth of the relay's CPU. Exchanges leave hardly any cycles, and those left wait in a few MB.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, 20, 100)

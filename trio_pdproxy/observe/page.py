"""Timelines as one HTML page: no network, no library, light and dark.

The drawing is done in the page (`page.html`) from the JSON that is put into it, so that one can sort and zoom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

import msgspec

from trio_pdproxy.observe.timeline import Spread, Timeline, spread

_PLACE = b"/*DATA*/"


class _Group(msgspec.Struct):
    name: str
    timelines: Sequence[Timeline]
    figures: dict[str, Spread | None]


def html_page(groups: Mapping[str, Sequence[Timeline]]) -> bytes:
    """The page for one or several named groups of timelines (the modes that a benchmark compares, say). All groups are
    drawn on the same scale."""
    data = msgspec.json.encode([_Group(name, lines, figures(lines)) for name, lines in groups.items()])
    # Inside a script element only these could end it, or begin a comment.
    data = data.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    template = files("trio_pdproxy.observe").joinpath("page.html").read_bytes()
    assert template.count(_PLACE) == 1
    return template.replace(_PLACE, data)


def figures(timelines: Sequence[Timeline]) -> dict[str, Spread | None]:
    """The page's percentiles, in seconds, by what they are of."""
    pairs = [line for line in timelines if line.tries and line.tries[-1].prefill is not None]
    done = [line for line in timelines if line.outcome == "ok"]
    return {
        "decode-start gap": spread(line.gap for line in pairs),
        "time to first token": spread(line.first_byte for line in done if line.stream),
        "prefill leg": spread(_length(line) for line in pairs),
        "proxy's own time before the legs": spread(_overhead(line) for line in timelines),
        "whole answer": spread(line.last_byte for line in done),
    }


def _length(line: Timeline) -> float | None:
    leg = line.tries[-1].prefill
    return None if leg is None or leg.sent is None or leg.end is None else leg.end - leg.sent


def _overhead(line: Timeline) -> float | None:
    """Until the first leg is out, the wait in the queue not counted."""
    if not line.tries or line.planned is None or line.leased is None:
        return None
    leg = line.tries[0].prefill or line.tries[0].decode
    return None if leg.sent is None else leg.sent - (line.leased - line.planned)

"""The figures as a picture: one panel a load, one row a peer, in plain SVG."""

from __future__ import annotations

from html import escape

from tests.bench.figures import Results
from tests.bench.peers import BASELINE, DIRECT, FALLBACK, FLOOR, NGINX, OURS, ROUTER, TWO
from tests.bench.report import MAIN, number

COLOURS = {
    DIRECT: "#9aa0a6",
    NGINX: "#7fb77e",
    ROUTER: "#d9a441",
    BASELINE: "#b07aa1",
    OURS: "#1f5fbf",
    FALLBACK: "#7ea6e0",
    TWO: "#4a7fcb",
    FLOOR: "#bbbbbb",
}
_WIDTH, _PANEL, _ROW, _LABEL = 1080, 340, 18, 96


def svg(results: Results) -> str:
    """Panels in three columns, each with its own scale from zero; less is better in all of them."""
    panels = [(load, name) for load in results.loads if (name := MAIN[load.partition(" ")[0]]) in results.names(load)]
    height_of = 34 + _ROW * max(1, len(results.peers))
    rows = -(-len(panels) // 3)
    height = 40 + rows * height_of
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="22" font-size="14">What the relay costs (medians; less is better)</text>',
    ]
    for i, (load, name) in enumerate(panels):
        parts += _panel(results, load, name, 12 + (i % 3) * (_PANEL + 16), 40 + (i // 3) * height_of)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(results: Results, load: str, name: str, x: int, y: int) -> list[str]:
    values = [(peer, value) for peer in results.peers if (value := results.value(peer, load, name)) is not None]
    most = max((value for _, value in values), default=0.0) or 1.0
    room = _PANEL - _LABEL - 60
    parts = [f'<text x="{x}" y="{y + 14}" font-weight="bold">{escape(load)}: {escape(name.replace("_", " "))}</text>']
    for row, (peer, value) in enumerate(values):
        top = y + 22 + row * _ROW
        width = max(1.0, room * max(0.0, value) / most)
        parts += [
            f'<text x="{x + _LABEL - 6}" y="{top + 11}" text-anchor="end">{escape(peer)}</text>',
            f'<rect x="{x + _LABEL}" y="{top}" width="{width:.1f}" height="{_ROW - 4}" fill="{COLOURS[peer]}"/>',
            f'<text x="{x + _LABEL + width + 5:.1f}" y="{top + 11}">{number(value)}</text>',
        ]
    return parts

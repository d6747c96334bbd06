"""Small tables that are filled cell by cell, and figures, to be printed when all tests are through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tables:
    """`cell` may be told in any order; rows and columns are shown sorted as they are named."""

    cells: dict[str, dict[tuple[str, str], str]] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)
    leftovers: int = 0
    """Cells after which something was held that the table did not say."""

    def cell(self, title: str, row: str, column: str, text: str) -> None:
        """What was seen; several texts for one place are joined."""
        place = self.cells.setdefault(title, {})
        before = place.get((row, column))
        place[row, column] = text if before is None else f"{before} {text}"

    def figure(self, text: str) -> None:
        self.figures.append(text)

    def render(self) -> Iterator[tuple[str, list[str]]]:
        for title, cells in sorted(self.cells.items()):
            columns = sorted({column for _, column in cells})
            rows = sorted({row for row, _ in cells})
            lines = [["", *(column.lstrip("0123456789 ") for column in columns)]]
            lines += [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
            widths = [max(len(line[i]) for line in lines) for i in range(len(columns) + 1)]
            yield title, ["  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)) for line in lines]
        if self.cells:
            count = sum(len(text.split(" ")) for cells in self.cells.values() for text in cells.values())
            yield "fault cells", [f"{count} cells run, {self.leftovers} with something left over"]
        if self.figures:
            yield "figures", sorted(self.figures)


SEEN = Tables()

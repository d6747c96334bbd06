"""What `launch` shows while engines start: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trio_pdproxy.launch import EngineEvent, LaunchPlan, State
from trio_pdproxy.launch.diagnose import doing

_STYLES = {
    State.WAITING: "dim",
    State.STARTING: "yellow",
    State.READY: "green",
    State.BACKING_OFF: "red",
    State.GIVEN_UP: "bold red",
    State.STOPPED: "dim",
}


@dataclass(slots=True)
class _Row:
    state: State = State.WAITING
    since: float = 0.0
    took: float = 0.0


@dataclass(slots=True)
class Board:
    """The engines of a plan and where each is. `tell` is given the events; `show` draws until its block ends."""

    plan: LaunchPlan
    console: Console
    note: str = ""
    """What all of them together wait for, in words."""
    plain: bool = True
    over: bool = False
    """Everything serves: what happens now is told elsewhere."""
    _rows: dict[str, _Row] = field(default_factory=dict)

    def tell(self, event: EngineEvent) -> None:
        row = self._rows.setdefault(event.name, _Row())
        if event.state is State.READY:
            row.took = event.at - row.since
        row.state, row.since = event.state, event.at
        if self.plain and not self.over:
            self._line(event, row)

    def say(self, note: str) -> None:
        """All engines are there; what is waited for now."""
        self.note = note
        if self.plain:
            self.console.print(note, highlight=False, markup=False, soft_wrap=True)

    def _line(self, event: EngineEvent, row: _Row) -> None:
        words = f"{event.name}  {event.state.value}"
        if event.state is State.READY:
            words += f" after {row.took:.1f} s"
        elif event.state is State.STARTING:
            words += f"  (log: {self.plan.logs / event.name}.log)"
        self.console.print(words, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def show(self) -> Iterator[None]:
        """On a terminal: a table that is kept up to date for as long as the block lasts, and stays as it was then."""
        if not self.console.is_terminal:
            yield
            return
        self.plain = False
        clock = trio.lowlevel.current_clock()  # rich draws from a thread of its own

        def drawn() -> Group:
            return Group(self.table(clock.current_time()), *([Text(self.note, style="dim")] if self.note else ()))

        with Live(get_renderable=drawn, console=self.console, refresh_per_second=4):
            try:
                yield
            finally:
                self.note = ""
        self.plain = True

    def table(self, now: float) -> Table:
        """The table as of `now`."""
        table = Table(box=None, pad_edge=False)
        for title in ("engine", "state", "seconds", "busy with", "url"):
            table.add_column(title, justify="right" if title == "seconds" else "left", no_wrap=title != "busy with")
        for command in self.plan.engines:
            row = self._rows.get(command.name, _Row(since=now))
            seconds = row.took if row.state is State.READY else now - row.since
            waits = ""
            if row.state is State.STARTING:
                waits = doing(self.plan.logs / f"{command.name}.log") or "coming up"
            style = _STYLES[row.state]
            table.add_row(command.name, f"[{style}]{row.state.value}[/]", f"{seconds:.1f}", waits, command.url)
        return table

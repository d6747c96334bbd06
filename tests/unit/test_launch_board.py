"""What is shown while engines start: a table for a terminal, lines for everything else."""

from __future__ import annotations

import io
from pathlib import Path

import trio
from rich.console import Console

from trio_pdproxy.cli.board import Board
from trio_pdproxy.launch import EngineEvent, LaunchPlan, Script, State, make_plan


def plan(tmp_path: Path) -> LaunchPlan:
    return make_plan(Script.model_validate({"preset": "sim", "logs": tmp_path}), environ={})


def text_of(board: Board, now: float) -> list[list[str]]:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(board.table(now))
    return [line.split() for line in console.export_text().splitlines()]


def test_the_table_says_where_each_engine_is_how_long_and_what_it_is_busy_with(tmp_path: Path) -> None:
    board = Board(plan(tmp_path), Console(file=io.StringIO()))
    assert text_of(board, 5)[1][:2] == ["p0", "waiting"]
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        board.tell(EngineEvent(name, "prefill" if role == "prefill" else "decode", State.STARTING, 10.0))
    (tmp_path / "p0.log").write_text("Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00]\n")
    assert text_of(board, 12.5)[1:] == [
        ["p0", "starting", "2.5", "loading", "weights,", "50%", "http://127.0.0.1:8100"],
        ["d0", "starting", "2.5", "coming", "up", "http://127.0.0.1:8200"],
    ]
    board.tell(EngineEvent("p0", "prefill", State.READY, 21.0))
    assert text_of(board, 30)[1] == ["p0", "ready", "11.0", "http://127.0.0.1:8100"]


def test_without_a_terminal_there_is_a_line_for_each_change(tmp_path: Path) -> None:
    out = io.StringIO()
    board = Board(plan(tmp_path), Console(file=out, width=40))
    with board.show():
        board.tell(EngineEvent("p0", "prefill", State.STARTING, 1.0))
        board.tell(EngineEvent("p0", "prefill", State.READY, 3.0))
        board.say("and now?")
        board.over = True
        board.tell(EngineEvent("p0", "prefill", State.GIVEN_UP, 4.0))
    assert out.getvalue() == f"p0  starting  (log: {tmp_path}/p0.log)\np0  ready after 2.0 s\nand now?\n"


async def test_on_a_terminal_the_last_table_stays(tmp_path: Path) -> None:
    out = io.StringIO()
    board = Board(plan(tmp_path), Console(file=out, width=120, force_terminal=True))
    with board.show():
        board.tell(EngineEvent("p0", "prefill", State.READY, trio.current_time()))
        board.say("the proxy waits")
    shown = out.getvalue()
    assert "busy with" in shown
    assert "ready after" not in shown
    last = shown[shown.rindex("engine") :]
    assert "the proxy waits" not in last

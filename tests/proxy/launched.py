"""The commands `launch` and `check` as processes of their own, for tests of both, on simulated and on real engines."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import trio

from trio_pdproxy.engines.transport import open_client
from trio_pdproxy.testing import until

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = [sys.executable, "-m", "trio_pdproxy", "launch"]
SECONDS = 60
"""A whole start on a machine that does other things as well."""


class Launched:
    """The command while it runs, and what it has said."""

    def __init__(self, process: trio.Process, folder: Path) -> None:
        self.process = process
        self.folder = folder

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def url(self) -> str:
        found = re.search(r"proxy +(http://\S+)", self.out)
        assert found is not None, self.out + self.err
        return found[1]

    @property
    def ports(self) -> list[int]:
        return [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", self.out.partition("try it")[0])]

    @property
    def groups(self) -> dict[str, int]:
        """The process group of each engine: the guards are the launcher's children."""
        found = {}
        # Listed by the thread that forked; trio forks in worker threads.
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for pid in " ".join(path.read_text() for path in threads).split():
            words = Path(f"/proc/{pid}/cmdline").read_text()
            found["p0" if "--prefill-port" in words or "kv_producer" in words else "d0"] = int(pid)
        return found

    async def ready(self, seconds: float = SECONDS) -> None:
        await until(lambda: "try it" in self.out or self.process.poll() is not None, seconds, step=0.05)
        assert self.process.returncode is None, self.err

    async def wait(self) -> int:
        with trio.fail_after(SECONDS):
            return await self.process.wait()

    async def ask(self) -> int:
        async with open_client(self.url, timeout=10) as client:
            try:
                body = {"model": "sim", "prompt": "hello", "max_tokens": 4}
                return (await client.post("/v1/completions", json=body)).status_code
            except httpx.HTTPError:
                return 0


@asynccontextmanager
async def launched(folder: Path, script: Path, *args: str, **env: str) -> AsyncIterator[Launched]:
    """Gone at the end of the block whatever happened in it."""
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = await trio.lowlevel.open_process(
            [*COMMAND, str(script), *args],
            stdout=out,
            stderr=err,
            env={**os.environ, **env},
            start_new_session=True,
        )
    try:
        yield Launched(process, folder)
    finally:
        if process.poll() is None:
            process.kill()
        with trio.move_on_after(5, shield=True):
            await process.wait()


async def check(*args: str) -> tuple[int, dict[str, list[dict[str, str]]], str]:
    """Its exit code, what it found as JSON, and stderr."""
    done = await trio.run_process(
        [sys.executable, "-m", "trio_pdproxy", "check", "--json", *args],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or b"{}"), done.stderr.decode()

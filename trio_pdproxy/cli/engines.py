"""`trio-pdproxy engines`: prepare real vLLM engines for this machine's CPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import click
import trio

from trio_pdproxy.launch.environment import ensure_environment, find_environment
from trio_pdproxy.launch.errors import LaunchError
from trio_pdproxy.launch.model import ensure_model
from trio_pdproxy.launch.progress import Progress, Step


@click.group()
def engines() -> None:
    """Prepare real vLLM engines for this machine's CPU."""


@engines.command()
@click.option(
    "--torch-index",
    metavar="URL",
    help="An extra package index with torch's +cpu wheels, for places where pip cannot find them by itself.",
)
def install(torch_index: str | None) -> None:
    """Install the engine environment (about 1.8 GB, once) and make the test model.

    Both go to the user's cache folder; PDPROXY_ENGINES_HOME names another one.
    """
    begun = time.monotonic()
    reused = find_environment() is not None
    try:
        with shown() as progress:
            folder, model = trio.run(partial(_install, torch_index, progress))
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"environment  {folder}")
    click.echo(f"model        {model}")
    click.echo(f"{'found' if reused else 'made'} in {time.monotonic() - begun:.1f} s")


async def _install(torch_index: str | None, progress: Progress) -> tuple[str, str]:
    environment = await ensure_environment(torch_index=torch_index, progress=progress)
    return str(environment.folder), str(await ensure_model(environment, progress=progress))


@contextmanager
def shown() -> Iterator[Progress]:
    """Progress as a bar on a terminal, else as plain lines: one for each new thing, not for each package."""
    if not sys.stderr.isatty():
        last = ""

        def line(step: Step) -> None:
            nonlocal last
            if step.what != last:
                click.echo(step.what, err=True)
                last = step.what

        yield line
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("preparing", total=None)
        yield lambda step: bar.update(task, description=step.what, completed=step.done, total=step.total or None)

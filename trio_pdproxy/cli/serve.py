"""`trio-pdproxy serve`: the proxy in its own server, with a graceful stop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import trio

from trio_pdproxy.cli.options import config_file, settings_from, settings_options
from trio_pdproxy.config import Settings, load_settings


@click.command()
@settings_options
def serve(**params: object) -> None:
    """Serve the proxy until SIGINT or SIGTERM.

    The first signal stops it gracefully (running requests have --shutdown-grace), the second at once. Exit code 0:
    asked to stop; 1: failed while running; 2: wrong configuration; 130 or 143: ended by the second signal.
    """
    settings = settings_from(params)
    file = config_file(params)
    flags = {name: value for name, value in params.items() if name in Settings.model_fields}
    watched = None if file is None else (file, partial(load_settings, file=file, environ=os.environ, flags=flags))
    sys.exit(trio.run(_serve, settings, watched))


async def _serve(settings: Settings, watched: tuple[Path, Callable[[], Settings]] | None) -> int:
    from trio_pdproxy.observe.log import configure
    from trio_pdproxy.serve import ServerError, run
    from trio_pdproxy.web import collector
    from trio_pdproxy.web.app import create_app

    configure(settings.log_level, settings.log_format)
    collector.spare()
    try:
        return await run(
            create_app(settings, watched=watched),
            settings,
            lambda url: click.echo(f"trio-pdproxy listens on {url} (/ready says when engines are usable)", err=True),
        )
    except ServerError as error:
        click.echo(f"trio-pdproxy serve: {error}", err=True)
        return 1

"""`trio-pdproxy serve`: the proxy in its own server, with a graceful stop."""

from __future__ import annotations

import sys

import click
import trio

from trio_pdproxy.cli.options import settings_from, settings_options
from trio_pdproxy.config import Settings


@click.command()
@settings_options
def serve(**params: object) -> None:
    """Serve the proxy until SIGINT or SIGTERM.

    The first signal stops it gracefully (running requests have --shutdown-grace), the second at once. Exit code 0:
    asked to stop; 1: failed while running; 2: wrong configuration; 130 or 143: ended by the second signal.
    """
    settings = settings_from(params)
    sys.exit(trio.run(_serve, settings))


async def _serve(settings: Settings) -> int:
    from trio_pdproxy.observe.log import configure
    from trio_pdproxy.serve import ServerError, run
    from trio_pdproxy.web.app import create_app

    configure(settings.log_level, settings.log_format)
    try:
        return await run(
            create_app(settings),
            settings,
            lambda url: click.echo(f"trio-pdproxy listens on {url} (/ready says when engines are usable)", err=True),
        )
    except ServerError as error:
        click.echo(f"trio-pdproxy serve: {error}", err=True)
        return 1

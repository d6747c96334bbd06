"""TLS on both sides, from files: what clients are shown, and how https engines are checked."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trio_pdproxy.config.problems import Problem

if TYPE_CHECKING:
    from trio_pdproxy.config.settings import Settings

# A certificate, its key, the CA the other side is checked against.
_SIDES = (
    ("tls_cert_file", "tls_key_file", "tls_client_ca_file"),
    ("engine_cert_file", "engine_key_file", "engine_ca_file"),
)


def engine_context(settings: Settings) -> ssl.SSLContext | None:
    """How https engines are spoken to; None where nothing was said about it (the system's CAs then)."""
    if settings.engine_ca_file is None and settings.engine_cert_file is None:
        return None
    context = ssl.create_default_context(cafile=settings.engine_ca_file)
    if settings.engine_cert_file is not None:
        _load_pair(context, settings.engine_cert_file, settings.engine_key_file)
    return context


def tls_problems(settings: Settings, wrong: set[str]) -> Iterator[Problem]:
    """What is wrong with the files, found by reading them as they will be used."""
    for cert_name, key_name, ca_name in _SIDES:
        cert, key, ca = (getattr(settings, name) for name in (cert_name, key_name, ca_name))
        if key is not None and cert is None and cert_name not in wrong:
            yield Problem((key_name,), f"{key_name} needs {cert_name}", between=True)
        if ca_name == "tls_client_ca_file" and ca is not None and cert is None and cert_name not in wrong:
            yield Problem((ca_name,), f"{ca_name} needs {cert_name}: certificates are shown over TLS", between=True)
        if cert is not None and (reason := _reason(lambda: _load_pair(_server(), cert, key))):  # noqa: B023 -- called here
            yield Problem((cert_name,), f"cannot use {' and '.join(map(str, filter(None, (cert, key))))}: {reason}")
        if ca is not None and (reason := _reason(lambda: _server().load_verify_locations(ca))):  # noqa: B023
            yield Problem((ca_name,), f"cannot use {ca}: {reason}")


def _server() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    # An empty password instead of none: OpenSSL would ask for one at the terminal.
    context.load_cert_chain(cert, key, password=lambda: "")


def _reason(load: Callable[[], object]) -> str:
    try:
        load()
    except ssl.SSLError as error:
        return f"no PEM file of what is wanted, or a key that does not fit ({error.reason or 'unreadable'})"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""

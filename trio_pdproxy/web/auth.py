"""Who may ask: the clients' keys, and what of a client's credentials goes on to engines.

    pass_through   everybody comes in here; engines are sent the client's own credentials and judge them
    terminate      a client needs one of the proxy's keys; engines never see it, they are sent their own
    open           everybody comes in; engines are sent their own key

A key comes as `Authorization: Bearer KEY` (OpenAI's clients) or as `x-api-key: KEY` (Anthropic's).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import trio

from trio_pdproxy.config import Settings, split_keys
from trio_pdproxy.config.edits import edited, stamp_of
from trio_pdproxy.core.errors import Fault, ProxyError

log = logging.getLogger("trio_pdproxy.auth")

TOLD_EVERY = 10.0
"""Seconds between two log records about keys that were wrong: guessing must not fill the disk."""

_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})

Headers = list[tuple[bytes, bytes]]


class UnauthorizedError(ProxyError):
    """401. It does not say what was wrong with the key."""

    def __init__(self) -> None:
        super().__init__(
            "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
            status=401,
            fault=Fault.CLIENT,
            code="invalid_api_key",
        )

    def headers(self) -> Headers:
        return [*super().headers(), (b"www-authenticate", b"Bearer")]


class Keys:
    """A set of keys that tells whether one is among them in a time that depends on neither.

    What is compared are digests under a secret of this process: of equal length, and not a client's to choose.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._secret = os.urandom(32)
        self._digests = tuple(self._digest(key.encode()) for key in keys)

    def __len__(self) -> int:
        return len(self._digests)

    def knows(self, key: bytes) -> bool:
        digest = self._digest(key)
        found = False
        for known in self._digests:  # all of them, whichever it is
            found |= hmac.compare_digest(digest, known)
        return found

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret).digest()


class Gate:
    """What `auth` says, applied to each request. `keys` may be replaced while serving."""

    def __init__(self, settings: Settings) -> None:
        self.mode = settings.auth
        self.keys = Keys(split_keys(settings.client_keys.get_secret_value()) if settings.client_keys else ())
        self.refused = 0
        self._told = -TOLD_EVERY

    def admit(self, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
        """The headers without what engines must not be sent. Raises `UnauthorizedError`."""
        listed = list(headers)
        if self.mode == "pass_through":
            return listed
        if self.mode == "terminate" and not self.keys.knows(_key_in(listed)):
            self._tell_refused()
            raise UnauthorizedError
        return [pair for pair in listed if pair[0] not in _CREDENTIALS]

    def _tell_refused(self) -> None:
        self.refused += 1
        now = trio.current_time()
        if now >= self._told + TOLD_EVERY:
            self._told = now
            log.warning("requests without a valid key: %d since the start", self.refused)


def _key_in(headers: Headers) -> bytes:
    """The key a client brings; empty (which is never valid) where it brings none, or several."""
    given = [pair for pair in headers if pair[0] in _CREDENTIALS]
    if len(given) != 1:
        return b""
    name, value = given[0]
    if name == b"x-api-key":
        return value
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


async def watch_keys(gate: Gate, path: Path) -> None:
    """Use every edit of the file of keys at once, until cancelled. A file that cannot be used changes nothing."""
    seen = await stamp_of(path)
    while True:
        stamp = await edited(path, seen)
        if stamp is None:
            continue
        seen = stamp
        try:
            keys = split_keys(await trio.Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            log.error("%s cannot be read, the keys stay as they were: %s", path, getattr(error, "strerror", error))
            continue
        if not keys:
            # Half of an edit, more likely than the wish to lock everybody out.
            log.error("%s holds no key, the keys stay as they were", path)
            continue
        gate.keys = Keys(keys)
        log.info("%s was edited: %d keys are valid", path, len(keys))

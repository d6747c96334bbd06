"""Single values as people write them: addresses, durations, sizes, counts.

Every function here takes what a library caller, a YAML file or an environment variable may hold and
returns the one form the rest of the code sees, or raises `ValueError` with a sentence that says what
to write instead. The sentences never repeat a URL: it could hold a password.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    WithJsonSchema,
)

_DEFAULT_PORTS = {"http": 80, "https": 443}
# Underscores are not legal in a host name, but container networks hand them out.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_DURATION = re.compile(r"(?P<number>[^a-z\s]+)\s*(?P<unit>ms|s|min|m|h)")
_SIZE = re.compile(r"(?P<number>\d+)\s*(?P<unit>[a-z]*)")
_SECONDS_IN = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES_IN = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


class Address(NamedTuple):
    """A host (name, IPv4 or IPv6 without brackets, in canonical form) and a TCP port.

    `str()` gives `host:port`, an IPv6 host in brackets: the form that is also read.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def host(text: str) -> str:
    """A host name in lower case or an IP address in canonical form. IPv6 comes without brackets."""
    if ":" in text:
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            raise ValueError("the IPv6 address is not valid") from None
        if address.scope_id is not None:
            raise ValueError("IPv6 addresses with a zone (%...) are not supported; use a global address")
        return str(address)
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        pass
    name = text.removesuffix(".").lower()
    labels = name.split(".")
    # A name that ends in a number is what is left of a mistyped IPv4 address; no such domain exists.
    if not name or len(name) > 253 or labels[-1].isdigit() or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError("the host is not a valid name or IP address (IPv6 in brackets: [::1])")
    return name


def port(text: str, *, lowest: int = 1) -> int:
    """A port number from `lowest` to 65535."""
    # isdecimal alone takes other alphabets' digits as well.
    if not (text.isascii() and text.isdecimal() and lowest <= int(text[:6]) <= 65535):
        raise ValueError(f"the port must be a number from {lowest} to 65535")
    return int(text)


def address(value: object, *, lowest: int = 1) -> Address:
    """`HOST:PORT` as text (IPv6 in brackets) or as a pair, as an `Address`."""
    if isinstance(value, (tuple, list)) and len(value) == 2:
        value = str(Address(str(value[0]).strip("[]"), value[1]))
    if not isinstance(value, str):
        raise ValueError("write HOST:PORT")  # noqa: TRY004 - pydantic turns only ValueError into a problem
    head, colon, tail = value.strip().rpartition(":")
    if not colon or not head:
        raise ValueError("write HOST:PORT (for every interface: 0.0.0.0:PORT or [::]:PORT)")
    if head.startswith("[") and head.endswith("]"):
        if ":" not in head:
            raise ValueError("only an IPv6 address goes in brackets")
        head = head[1:-1]
    elif ":" in head:
        raise ValueError("write an IPv6 address in brackets: [::1]:PORT")
    return Address(host(head), port(tail, lowest=lowest))


def listen_address(value: object) -> Address:
    """As `address`; port 0 asks the system for a free one."""
    return address(value, lowest=0)


def optional_listen_address(value: object) -> Address | None:
    """As `listen_address`; None and the word `off` (which YAML reads as false) mean: do not listen."""
    off = value is None or value is False or (isinstance(value, str) and value.strip().lower() == "off")
    return None if off else listen_address(value)


def optional_connect_address(value: object) -> Address | None:
    """As `address`; None means: none is named."""
    return None if value is None else address(value)


def off_word(value: object) -> Any:
    """A word in lower case; YAML reads `off` as false."""
    return "off" if value is False else lower(value)


def selector(value: object) -> Any:
    """A Kubernetes label selector, not empty: an empty one selects every pod of the namespace."""
    text = value.strip() if isinstance(value, str) else value
    if not text or (isinstance(text, str) and not all(32 <= ord(c) < 127 for c in text)):
        raise ValueError("write a label selector, such as app=prefill")
    return text


def split_url(value: object) -> tuple[str, Address]:
    """An engine's base URL as scheme and address; the port defaults to the scheme's."""
    if not isinstance(value, str):
        raise ValueError("write http://HOST:PORT")  # noqa: TRY004
    text = value.strip()
    if "@" in text:
        raise ValueError("a URL takes no user or password here; give a key as PDPROXY_API_KEY or api_key_file")
    # urlsplit would silently drop tabs and line ends.
    if any(not 32 < ord(c) < 127 for c in text):
        raise ValueError("a URL holds no spaces and only ASCII (an international name as xn--...)")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise ValueError("not a valid URL; write http://HOST:PORT (IPv6: http://[::1]:PORT)") from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise ValueError("the URL must start with http:// or https://")
    if parts.path not in ("", "/") or "?" in text or "#" in text:
        raise ValueError("the URL ends after the port: the proxy adds the path (no /v1, no query)")
    netloc = parts.netloc
    bare = netloc.endswith("]") or ":" not in netloc
    return parts.scheme, address(f"{netloc}:{_DEFAULT_PORTS[parts.scheme]}" if bare else netloc)


def engine_url(value: object) -> str:
    """An engine's base URL in canonical form: `scheme://host:port`, always with the port."""
    scheme, where = split_url(value)
    return f"{scheme}://{where}"


def optional_url(value: object) -> str | None:
    """As `engine_url`; None means: none is named."""
    return None if value is None else engine_url(value)


def seconds(value: object) -> float:
    """A finite duration in seconds. Text may carry a unit: 500ms, 30s, 2m (or min), 1h."""
    number, factor = value, 1.0
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip().lower())):
        number, factor = match["number"], _SECONDS_IN[match["unit"]]
    try:
        result = math.nan if isinstance(value, bool) else float(number) * factor  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise ValueError("write a duration in seconds, or with a unit: 500ms, 30s, 2m, 1h")
    return result


def size(value: object) -> int:
    """A number of bytes. Text may carry a unit: KiB, MiB, GiB (powers of 1024), kB, MB, GB."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip().lower())):
        factor = _BYTES_IN.get(match["unit"])
        if factor is not None:
            return int(match["number"]) * factor
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError("write a number of bytes, or with a unit: 64KiB, 128MiB, 1GiB")


def count(value: object) -> int:
    """A whole number; digits as text are one too, true and 1.5 are not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    raise ValueError("write a whole number")


def lower(value: object) -> Any:
    """Text in lower case without the space around it; anything else as it is."""
    return value.strip().lower() if isinstance(value, str) else value


def secret(value: SecretStr) -> SecretStr:
    """A key or token that can stand in an HTTP header: visible ASCII; the space around it is cut off."""
    text = value.get_secret_value().strip()
    if not text or any(not 32 < ord(c) < 127 for c in text):
        raise ValueError("must be visible ASCII characters without spaces")
    return SecretStr(text)


def split_keys(text: str) -> tuple[str, ...]:
    """The keys in a text, separated by white space or commas; a word that begins with `#` ends its line."""
    words: list[str] = []
    for line in text.splitlines():
        for word in line.replace(",", " ").split():
            if word.startswith("#"):
                break
            words.append(word)
    return tuple(words)


def keys(value: SecretStr) -> SecretStr:
    """Several keys, each as `secret` wants it, with a space between two."""
    words = split_keys(value.get_secret_value())
    if not words:
        raise ValueError("must hold at least one key")
    return SecretStr(" ".join(secret(SecretStr(word)).get_secret_value() for word in words))


def _joined(value: object) -> Any:
    return "\n".join(value) if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value) else value


_AS_TEXT = (PlainSerializer(str, return_type=str), WithJsonSchema({"type": "string", "format": "host:port"}))
_AS_OPTIONAL_TEXT = (
    PlainSerializer(lambda value: None if value is None else str(value), return_type=str | None),
    WithJsonSchema({"type": ["string", "null"], "format": "host:port"}),
)

# What the models' fields are made of.
ConnectAddress = Annotated[Address, PlainValidator(address), *_AS_TEXT]
ListenAddress = Annotated[Address, PlainValidator(listen_address), *_AS_TEXT]
OptionalListenAddress = Annotated[Address | None, PlainValidator(optional_listen_address), *_AS_OPTIONAL_TEXT]
OptionalConnectAddress = Annotated[Address | None, PlainValidator(optional_connect_address), *_AS_OPTIONAL_TEXT]
Url = Annotated[str, BeforeValidator(engine_url)]
OptionalUrl = Annotated[str | None, BeforeValidator(optional_url)]
Selector = Annotated[str, BeforeValidator(selector)]
OffWord = BeforeValidator(off_word)


def texts(value: object) -> Any:
    """Several words: a list of them, or text with commas between them."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


def ratio(value: object) -> float:
    """A share, as a plain number."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("it must be a number such as 0.2")
    return number


Seconds = Annotated[float, BeforeValidator(seconds)]
Size = Annotated[int, BeforeValidator(size)]
Count = Annotated[int, BeforeValidator(count)]
Texts = Annotated[tuple[str, ...], BeforeValidator(texts)]
Ratio = Annotated[float, BeforeValidator(ratio)]
Secret = Annotated[SecretStr, AfterValidator(secret)]
Keys = Annotated[SecretStr, BeforeValidator(_joined), AfterValidator(keys)]
Lower = BeforeValidator(lower)

"""What must hold between settings, each rule with its reason.

A value that is right by itself may still make another one useless or dangerous: these are found at start,
not in the first fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trio_pdproxy.config.engine import ROLES, EngineSpec, Role
from trio_pdproxy.config.problems import Loc, Problem
from trio_pdproxy.config.tls import tls_problems
from trio_pdproxy.config.values import Address, address

if TYPE_CHECKING:
    from trio_pdproxy.config.settings import Settings

# Seconds past a prefill engine's lease after which a silent decode engine is taken to have missed the
# push: one heartbeat of clock and scheduling slack on either side.
RESCUE_MARGIN = 2.0


@dataclass(frozen=True, slots=True)
class _Order:
    """`small` must be less than (or at most, where `equal`) `large`, because of `why`."""

    small: str
    large: str
    equal: bool
    why: str


ORDERS = (
    _Order("connect_timeout", "prefill_timeout", False, "connecting is only the first part of a prefill"),
    _Order("connect_timeout", "first_byte_timeout", False, "connecting comes before the first byte"),
    _Order(
        "prefill_timeout",
        "settle_timeout",
        True,
        "a prefill that nobody waits for any more gets no less time, or decode's KV blocks leak",
    ),
    _Order("drain_grace", "settle_timeout", True, "after the grace the same leg goes on as a settling one"),
    _Order("prefill_timeout", "request_timeout", True, "a prefill is a part of the request"),
    _Order("first_byte_timeout", "request_timeout", True, "the first byte is a part of the request"),
    _Order("queue_timeout", "request_timeout", False, "waiting for a slot is a part of the request"),
    _Order("health_timeout", "health_interval", True, "a probe ends before the next one starts"),
)


def contradictions(
    settings: Settings, engines: Mapping[Role, list[tuple[int, EngineSpec]]], wrong: set[str]
) -> Iterator[Problem]:
    """What is wrong between values; nothing about the names in `wrong`, whose values are not known."""
    for role in ROLES:
        if not engines[role] and role not in wrong and not _found(settings, role):
            yield Problem((role,), _how_to_give(role), between=True)
        yield from _questions(settings, role, wrong)
    if settings.otlp_traces_endpoint is not None and not _tracing_installed():
        why = "traces need OpenTelemetry, which is not installed: pip install 'trio-pdproxy[otel]'"
        yield Problem(("otlp_traces_endpoint",), why)
    for order in ORDERS:
        small, large = getattr(settings, order.small), getattr(settings, order.large)
        if wrong & {order.small, order.large} or small < large or (order.equal and small == large):
            continue
        must = "at most" if order.equal else "less than"
        text = f"{order.small} ({small:g} s) must be {must} {order.large} ({large:g} s): {order.why}"
        yield Problem((order.small,), text, between=True, also=((order.large,),))
    if "first_byte_timeout" not in wrong:
        yield from _late_rescues(settings, engines["prefill"], general=not wrong & {"lease"})
    yield from _twins(engines)
    yield from tls_problems(settings, wrong)
    if (
        settings.auth == "terminate"
        and settings.client_keys is None
        and not wrong & {"client_keys", "client_keys_file"}
    ):
        text = "auth: terminate needs client_keys (PDPROXY_CLIENT_KEYS or client_keys_file): no client could get in"
        yield Problem(("auth",), text, between=True)
    if settings.client_keys is not None and settings.auth != "terminate" and not wrong & {"auth", "client_keys"}:
        text = f"client_keys are only looked at where auth is terminate, and it is {settings.auth}"
        yield Problem(("client_keys",), text, between=True, also=(("auth",),))
    if settings.admin_bind is not None:
        if settings.admin_token is None and not wrong & {"admin_token", "admin_token_file"}:
            text = "admin_bind needs admin_token (PDPROXY_ADMIN_TOKEN or admin_token_file): it must not be open"
            yield Problem(("admin_bind",), text, between=True)
        if settings.admin_bind == settings.bind and settings.bind.port and "bind" not in wrong:
            text = f"admin_bind and bind are both {settings.bind}: the admin paths need an address of their own"
            yield Problem(("admin_bind",), text, between=True, also=(("bind",),))


def _late_rescues(settings: Settings, prefill: list[tuple[int, EngineSpec]], *, general: bool) -> Iterator[Problem]:
    limit = settings.first_byte_timeout
    places: list[tuple[Loc, str, float]] = [(("lease",), "lease", settings.lease)] if general else []
    places += [
        (("prefill", i, "lease"), f"{spec.name}'s lease", spec.lease) for i, spec in prefill if spec.lease is not None
    ]
    if prefill and all(spec.lease is not None for _, spec in prefill):
        places = places[general:]  # no engine uses the general one
    for loc, what, lease in places:
        if lease + RESCUE_MARGIN >= limit:
            text = (
                f"{what} ({lease:g} s) plus {RESCUE_MARGIN:g} s must be less than first_byte_timeout "
                f"({limit:g} s): a lost push can only be repeated after the lease, and needs time to arrive"
            )
            yield Problem(loc, text, between=True, also=(("first_byte_timeout",),))


def _twins(engines: Mapping[Role, list[tuple[int, EngineSpec]]]) -> Iterator[Problem]:
    """Engines that cannot be told apart, and leases where there are none."""
    names: dict[str, Loc] = {}
    channels: dict[Address, tuple[Loc, str]] = {}
    for role in ROLES:
        urls: dict[str, Loc] = {}
        for i, spec in engines[role]:
            loc: Loc = (role, i)
            # One server given twice is one problem, not three.
            if twin := urls.get(spec.url):
                text = f"{spec.url} is given twice as a {role} engine"
                yield Problem(loc, text, between=True, also=(twin,))
            urls.setdefault(spec.url, loc)
            other = names.setdefault(spec.name, loc)
            if other not in (loc, twin):
                text = f"the name {spec.name} is taken by another engine; give this one its own with name"
                yield Problem(loc, text, between=True, also=(other,))
            if role == "prefill":
                other, name = channels.setdefault(spec.side_channel, (loc, spec.name))
                if other not in (loc, twin):
                    text = (
                        f"{spec.name} has the same side channel as {name}, {spec.side_channel}: every "
                        "prefill engine has its own; give it with side_channel (VLLM_NIXL_SIDE_CHANNEL_PORT)"
                    )
                    yield Problem(loc, text, between=True, also=(other,))
            elif spec.lease is not None:
                text = "only prefill engines have a lease: it is how long they keep blocks for a decode engine"
                yield Problem((role, i, "lease"), text, between=True)
            if role == "decode" and spec.dp_size is not None:
                text = "dp_size is for prefill engines: a decode engine spreads its requests over its ranks by itself"
                yield Problem((role, i, "dp_size"), text, between=True)


def _found(settings: Settings, role: Role) -> bool:
    """Whether discovery finds engines of this role."""
    return settings.discovery == "kubernetes" or (
        settings.discovery == "dns" and bool(getattr(settings, f"{role}_dns"))
    )


def _questions(settings: Settings, role: Role, wrong: set[str]) -> Iterator[Problem]:
    name = f"{role}_dns"
    names: tuple[str, ...] = getattr(settings, name)
    if wrong & {name, "discovery"} or not names:
        return
    if settings.discovery != "dns":
        yield Problem((name,), f"{name} is only used with discovery dns", between=True, also=(("discovery",),))
    for text in names:
        try:
            if not text.startswith("_"):
                address(text)
            elif len(text.split(".", 2)) < 3 or not text.split(".", 2)[1].startswith("_"):
                raise ValueError("write _SERVICE._PROTOCOL.NAME")
        except ValueError as error:
            what = f"{text!r} is neither _http._tcp.NAME (SRV) nor NAME:PORT (addresses): {error}"
            yield Problem((name,), what, between=True)


def _how_to_give(role: Role) -> str:
    url = f"http://127.0.0.1:{8100 if role == 'prefill' else 8200}"
    return (
        f"no {role} engine: give one with --{role} {url}, with PDPROXY_{role.upper()}={url}, "
        f"or in the configuration file as `{role}: [{{url: '{url}'}}]`"
    )


def _tracing_installed() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # not even the packages above it
        return False

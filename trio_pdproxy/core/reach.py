"""Where an engine that is added while serving may be: pure decisions on addresses.

Whoever can name an engine makes the proxy connect there and hands it prompts. So what may be named is a list of the
operator's, and some places are never engines.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class NotAllowedError(ValueError):
    """This address may not be an engine's; the text says why."""


def check_host(host: str, resolved: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises `NotAllowedError` unless an engine at `host` (a name or an address, as given) may be added.

    `resolved` are the addresses it stands for now; `allowed` the operator's list: host names, `*.domain`, addresses and
    networks (10.0.0.0/8). Link-local, multicast and unspecified addresses are refused whatever the list says: the first
    are where clouds keep their metadata and credentials. Networks allow addresses only: what a name stands for
    is its owner's to change after it was looked at (DNS rebinding), so a name has to be on the list itself.
    """
    addresses = [_address(text) for text in resolved]
    for address in addresses:
        if address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved:
            raise NotAllowedError(f"{host} is {address}: no engine is at such an address")
    names = [entry.lower() for entry in allowed]
    if any(_names(entry, host.lower()) for entry in names):
        return
    if not _is_address(host):
        raise NotAllowedError(f"{host} is not on the list of what may be added (admin_allow), which has to name it")
    networks = [network for entry in names if (network := _network(entry)) is not None]
    if addresses and all(any(_inside(address, network) for network in networks) for address in addresses):
        return
    raise NotAllowedError(f"{host} is not on the list of what may be added (admin_allow)")


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        # ::ffff:169.254.169.254 is the same place as 169.254.169.254, and a gateway may take these for it, too.
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _network(entry: str) -> Network | None:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def _inside(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network


def _names(entry: str, host: str) -> bool:
    return host.endswith(entry[1:]) if entry.startswith("*.") else host == entry and _network(entry) is None

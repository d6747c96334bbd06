"""Where engines come from while the proxy serves: the configuration file, DNS, Kubernetes.

Each is a `Source` (source.py): it says the whole set of engines whenever that set has changed, and says nothing while
it cannot know. A `Follower` (follow.py) brings the pool to what its source says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trio_pdproxy.config import Settings
from trio_pdproxy.engines.discovery.file import FileSource
from trio_pdproxy.engines.discovery.follow import Follower
from trio_pdproxy.engines.discovery.source import Found, Source
from trio_pdproxy.engines.pool import Pool

__all__ = ["Follower", "Found", "Source", "followers"]


def followers(pool: Pool, watched: tuple[Path, Callable[[], Settings]] | None) -> list[Follower]:
    """One for each source that the pool's settings name; `run` each in a nursery. `watched`: the configuration file
    and how the settings are read again from it."""
    settings = pool.settings
    found: list[Follower] = []
    if watched is not None:
        file = FileSource(settings, *watched)
        found.append(Follower(pool, file, present=file.current))
    # Loaded only where they are used: dnspython is a second's work for a small machine.
    if settings.discovery == "dns":
        from trio_pdproxy.engines.discovery.dns import DnsSource

        found.append(Follower(pool, DnsSource(settings)))
    elif settings.discovery == "kubernetes":
        from trio_pdproxy.engines.discovery.kubernetes import KubernetesSource

        found.append(Follower(pool, KubernetesSource(settings)))
    return found

"""What is asked for, and what all manifests share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trio_pdproxy.config import ROLES, Role, Settings

Manifest = dict[str, Any]
Workload = Literal["deployment", "leaderworkerset"]

PORT, SIDE_CHANNEL_PORT = 8000, 5600
"""Of engines, and the first also of the proxy."""

PART_OF = "trio-pdproxy"


class RenderError(ValueError):
    """What is asked for cannot be rendered; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One model, served by prefill and decode engines behind replicas of the proxy.

    model -- what `vllm serve` is given, the same text for both roles
    proxies -- (fewest, most) replicas of the proxy
    engines -- by role, (fewest, most) engines; a group of pods counts as one
    max_num_seqs -- requests a decode engine runs at once, all proxies together
    grace -- seconds an engine that is to stop has for what it has in hand
    """

    settings: Settings
    model: str
    name: str = "pd"
    namespace: str = "default"
    image: str = "trio-pdproxy:latest"
    engine_image: str = "vllm/vllm-openai:latest"
    proxies: tuple[int, int] = (2, 4)
    engines: Mapping[Role, tuple[int, int]] = field(default_factory=lambda: {"prefill": (1, 1), "decode": (1, 1)})
    workload: Workload = "deployment"
    group_size: int = 2
    gpus: int = 1
    gpu_resource: str = "nvidia.com/gpu"
    tensor_parallel_size: int | None = None
    max_num_seqs: int = 256
    revision: str | None = None
    engine_args: tuple[str, ...] = ()
    grace: int = 300
    monitoring_namespace: str = "monitoring"
    without: frozenset[str] = frozenset()
    """Kinds that are left out, in lower case."""

    def named(self, component: str) -> str:
        return f"{self.name}-{component}"

    def metadata(self, component: str, name: str | None = None, **more: Any) -> Manifest:
        return {
            "name": name or self.named(component),
            "namespace": self.namespace,
            "labels": self.labels(component),
            **more,
        }

    def labels(self, component: str) -> dict[str, str]:
        """Of everything: whose it is, for people and for `kubectl -l`."""
        return {
            "app.kubernetes.io/name": PART_OF,
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
        }

    def selector(self, component: str) -> dict[str, str]:
        """What selects a component's pods. Never changes: a Deployment's cannot."""
        return self.labels(component)

    def pod_labels(self, role: Role) -> dict[str, str]:
        """Of the pods that answer requests: what discovery selects, and the revision."""
        found = self.labels(role) | discovered_by(role, self.settings)
        return found | ({self.settings.revision_label: self.revision} if self.revision else {})

    def replicas(self, count: tuple[int, int]) -> dict[str, int]:
        """The field of that name; not where an autoscaler says how many, which each `apply` would set back."""
        scaled = count[1] > count[0] and "horizontalpodautoscaler" not in self.without
        return {} if scaled else {"replicas": count[0]}

    def check(self) -> None:
        """Raises `RenderError`."""
        for what, (fewest, most) in [("proxies", self.proxies), *self.engines.items()]:
            if not 1 <= fewest <= most:
                raise RenderError(f"{what}: at least 1, and at most no fewer than at least, not {fewest} to {most}")
        for role in ROLES:
            discovered_by(role, self.settings)
        if self.settings.discovery != "kubernetes":
            raise RenderError("discovery must be kubernetes here: the proxies find the engines by their pods")
        if self.workload == "leaderworkerset" and self.group_size < 2:
            raise RenderError("a group has at least 2 pods; one pod an engine is --workload deployment")
        if self.max_num_seqs < self.proxies[1]:
            raise RenderError(f"{self.max_num_seqs} sequences cannot be shared by {self.proxies[1]} proxies")


def discovered_by(role: Role, settings: Settings) -> dict[str, str]:
    """The labels that the selector asks for. Raises `RenderError` where it asks for more than equality."""
    selector = settings.prefill_selector if role == "prefill" else settings.decode_selector
    pairs = [part.strip().replace("==", "=").split("=") for part in selector.split(",")]
    if not all(len(pair) == 2 and all(pair) and not pair[0].endswith("!") for pair in pairs):
        raise RenderError(f"{role}_selector: only name=value[,name=value]... can be made into labels, not {selector!r}")
    return {pair[0].strip(): pair[1].strip() for pair in pairs}

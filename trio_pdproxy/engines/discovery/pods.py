"""What a pod says of the engine in it: a pure function over the pod as the Kubernetes API shows it."""

from __future__ import annotations

import msgspec
from pydantic import ValidationError

from trio_pdproxy.config import Address, EngineSpec, Role
from trio_pdproxy.config.engine import split_spec
from trio_pdproxy.engines.discovery.source import Found, may_be_an_engine

ANNOTATION = "trio-pdproxy/engine"
"""What cannot be seen of a pod, as `key=value;...`: port, side_channel_port, and the keys of an engine's entry that are
not learned (max_inflight, lease, dp_size, ...)."""

HTTP_PORT, NIXL_PORT = "http", "nixl"
"""Names of container ports."""

DEFAULT_PORT, DEFAULT_SIDE_CHANNEL_PORT = 8000, 5600
"""vLLM's own."""

SIDE_CHANNEL_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"


class _Port(msgspec.Struct, rename="camel"):
    container_port: int
    name: str = ""


class _Variable(msgspec.Struct):
    name: str
    value: str = ""


class _Container(msgspec.Struct):
    ports: list[_Port] | None = None
    env: list[_Variable] | None = None


class _Spec(msgspec.Struct):
    containers: list[_Container] = []


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct, rename={"pod_ip": "podIP"}):
    phase: str = ""
    pod_ip: str = ""
    conditions: list[_Condition] | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None
    resource_version: str = ""


class Pod(msgspec.Struct):
    """The part of a pod that matters here."""

    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class BadPodError(ValueError):
    """A pod whose annotation cannot be understood; the text says which and why."""


def engine_in(pod: Pod, role: Role, revision_label: str) -> Found | None:
    """The engine in this pod; None where there is none to use or to keep: it is being deleted, has ended, or has no
    address yet. Raises `BadPodError`."""
    if pod.metadata.deletion_timestamp is not None or pod.status.phase != "Running":
        return None
    address = pod.status.pod_ip
    if not address or not may_be_an_engine(address):
        return None
    fields = _annotated(pod)
    try:
        port = int(fields.pop("port", 0)) or _port(pod, HTTP_PORT) or _other_port(pod) or DEFAULT_PORT
        side_channel = int(fields.pop("side_channel_port", 0)) or _port(pod, NIXL_PORT) or _side_channel_variable(pod)
        labels = pod.metadata.labels or {}
        if revision := labels.get(revision_label):
            fields.setdefault("revision", revision)
        spec = EngineSpec.model_validate(
            {
                "url": f"http://{Address(address, port)}",
                "side_channel": Address(address, side_channel or DEFAULT_SIDE_CHANNEL_PORT),
                "name": pod.metadata.name,
            }
            | fields
        )
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))
        raise BadPodError(f"pod {pod.metadata.name}: {said}") from None
    except ValueError as error:
        raise BadPodError(f"pod {pod.metadata.name}: annotation {ANNOTATION}: {error}") from None
    ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())
    return Found(role, spec, ready)


def _annotated(pod: Pod) -> dict[str, str]:
    text = (pod.metadata.annotations or {}).get(ANNOTATION, "")
    fields, problems = split_spec(f"url;{text}")
    if problems or "@" in text:
        raise BadPodError(f"pod {pod.metadata.name}: annotation {ANNOTATION}: write key=value;key=value, not {text!r}")
    for name in ("url", "side_channel", "name"):
        # Who may annotate a pod decides about that pod, not about where requests go.
        if name in fields and name != "url":
            raise BadPodError(f"pod {pod.metadata.name}: annotation {ANNOTATION}: {name} follows from the pod")
    del fields["url"]
    return fields


def _port(pod: Pod, name: str) -> int:
    return next((p.container_port for c in pod.spec.containers for p in c.ports or () if p.name == name), 0)


def _other_port(pod: Pod) -> int:
    """The only container port besides the side channel's, whatever its name."""
    others = [p.container_port for c in pod.spec.containers for p in c.ports or () if p.name != NIXL_PORT]
    return others[0] if len(others) == 1 else 0


def _side_channel_variable(pod: Pod) -> int:
    values = [v.value for c in pod.spec.containers for v in c.env or () if v.name == SIDE_CHANNEL_VARIABLE]
    return int(values[0]) if values and values[0].isdecimal() else 0

"""All manifests of a plan, and how they are written down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import yaml

from trio_pdproxy.config import ROLES
from trio_pdproxy.render import around, engines, proxy
from trio_pdproxy.render.plan import Manifest, Plan, RenderError

__all__ = ["Plan", "RenderError", "files", "manifests", "text"]


def manifests(plan: Plan) -> list[Manifest]:
    """Everything the plan needs, in an order in which it can be applied. Raises `RenderError`."""
    plan.check()
    return [manifest for manifest in _all(plan) if manifest["kind"].lower() not in plan.without]


def _all(plan: Plan) -> Iterator[Manifest]:
    yield from proxy.access(plan)
    yield proxy.config_map(plan)
    yield proxy.service(plan)
    for role in ROLES:
        yield engines.service(plan, role)
    yield from around.network_policies(plan)
    for role in ROLES:
        yield engines.engines(plan, role)
    yield proxy.deployment(plan)
    for component in (*ROLES, "proxy"):
        yield around.disruption_budget(plan, component)
    if plan.proxies[1] > plan.proxies[0]:
        yield around.proxy_autoscaler(plan)
    for role in ROLES:
        if plan.engines[role][1] > plan.engines[role][0]:
            yield around.engine_autoscaler(plan, role)
    for component in (*ROLES, "proxy"):
        yield around.service_monitor(plan, component)


def text(found: Iterable[Manifest]) -> str:
    """As one YAML stream, for `kubectl apply -f -`."""
    return yaml.dump_all(found, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)


def files(plan: Plan) -> dict[str, str]:
    """File names and contents: one manifest a file, and a kustomization.yaml over them. Raises `RenderError`."""
    written = {f"{m['kind'].lower()}-{m['metadata']['name']}.yaml": text([m]) for m in manifests(plan)}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": plan.namespace,
        "resources": list(written),
    }
    return {**written, "kustomization.yaml": text([kustomization])}


class _Dumper(yaml.SafeDumper):
    """Several lines as several lines, and nothing by reference: these files are read and edited by people."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _block)

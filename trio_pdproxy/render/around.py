"""What stands around the workloads: how many of them, who may disrupt them, who may reach them, who watches them."""

from __future__ import annotations

from trio_pdproxy.config import ROLES, Role
from trio_pdproxy.render.plan import PORT, Manifest, Plan

PER_PROXY = 400
"""Decode legs in flight for which another replica is started: well under what one process was measured to carry."""

WAITING = 4
"""Requests in the proxies' queues, per engine, for which another engine is started."""


def disruption_budget(plan: Plan, component: str) -> Manifest:
    """A drained machine takes one at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": plan.metadata(component),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": plan.selector(component)}},
    }


def proxy_autoscaler(plan: Plan) -> Manifest:
    """By the streams a proxy carries, and by its CPU: it is one event loop. The first needs the proxies' metrics in the
    custom metrics API (prometheus-adapter); without it the second still works."""
    return _autoscaler(
        plan,
        "proxy",
        {"apiVersion": "apps/v1", "kind": "Deployment", "name": plan.named("proxy")},
        plan.proxies,
        [
            {
                "type": "Pods",
                "pods": {
                    "metric": {
                        "name": "pdproxy_inflight_requests",
                        "selector": {"matchLabels": {"leg": "decode"}},
                    },
                    "target": {"type": "AverageValue", "averageValue": str(PER_PROXY)},
                },
            },
            {
                "type": "Resource",
                "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
            },
        ],
    )


def engine_autoscaler(plan: Plan, role: Role) -> Manifest:
    """By the requests that wait in the proxies for a place at an engine."""
    group = plan.workload == "leaderworkerset"
    target = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1" if group else "apps/v1",
        "kind": "LeaderWorkerSet" if group else "Deployment",
        "name": plan.named(role),
    }
    metric = {
        "type": "Object",
        "object": {
            "describedObject": {"apiVersion": "v1", "kind": "Service", "name": plan.named("proxy")},
            "metric": {"name": "pdproxy_num_requests_waiting"},
            "target": {"type": "AverageValue", "averageValue": str(WAITING)},
        },
    }
    return _autoscaler(plan, role, target, plan.engines[role], [metric])


def _autoscaler(
    plan: Plan, component: str, target: Manifest, count: tuple[int, int], metrics: list[Manifest]
) -> Manifest:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": plan.metadata(component),
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": count[0],
            "maxReplicas": count[1],
            "metrics": metrics,
            # Going is slow on purpose: who goes is drained first, and may be missed soon after.
            "behavior": {
                "scaleDown": {
                    "stabilizationWindowSeconds": 600,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
                }
            },
        },
    }


def service_monitor(plan: Plan, component: str) -> Manifest:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": plan.metadata(component),
        "spec": {
            "selector": {"matchLabels": plan.labels(component)},
            "endpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    }


def network_policies(plan: Plan) -> list[Manifest]:
    """Engines are reached by the proxies, by each other (the KV itself takes ports of its own choice) and by whoever
    scrapes them; the proxies by anybody, on their one port."""
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": plan.monitoring_namespace}}}
    members = [*ROLES, *(f"{role}-worker" for role in ROLES if plan.workload == "leaderworkerset")]
    engine = {
        "matchLabels": {
            name: plan.labels("")[name] for name in ("app.kubernetes.io/name", "app.kubernetes.io/instance")
        },
        "matchExpressions": [{"key": "app.kubernetes.io/component", "operator": "In", "values": members}],
    }
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": plan.metadata("engines"),
            "spec": {
                "podSelector": engine,
                "policyTypes": ["Ingress"],
                "ingress": [
                    {
                        "from": [{"podSelector": {"matchLabels": plan.selector("proxy")}}],
                        "ports": [{"port": "http"}, {"port": "nixl"}],
                    },
                    {"from": [{"podSelector": engine}]},
                    {"from": [monitoring], "ports": [{"port": "http"}]},
                ],
            },
        },
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": plan.metadata("proxy"),
            "spec": {
                "podSelector": {"matchLabels": plan.selector("proxy")},
                "policyTypes": ["Ingress"],
                "ingress": [{"ports": [{"port": PORT, "protocol": "TCP"}]}],
            },
        },
    ]

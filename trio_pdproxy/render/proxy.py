"""The proxy: its configuration, its Deployment, what it may see of the cluster."""

from __future__ import annotations

import hashlib
from typing import Any

import yaml

from trio_pdproxy.config import ROLES, Settings
from trio_pdproxy.config.settings import SECRETS
from trio_pdproxy.render.engines import api_key
from trio_pdproxy.render.plan import PORT, Manifest, Plan

UNROUTED = 5
"""Seconds after a pod is marked for deletion until nothing new is routed to it."""

_HERE = frozenset({"bind", "kubernetes_api", "kubernetes_credentials", "kubernetes_namespace", *ROLES})
"""Settings of the place where the manifests are made."""


def configuration(plan: Plan) -> str:
    """proxy.yaml: every setting that differs from its default, and what follows from the plan."""
    settings = plan.settings
    shown = settings.redacted()
    defaults = {name: field.get_default() for name, field in Settings.model_fields.items()}
    secret = {name + form for name in SECRETS for form in ("", "_file")}
    values: dict[str, Any] = {"bind": f"0.0.0.0:{PORT}"} | {
        name: value
        for name, value in shown.items()
        if name not in _HERE | secret and getattr(settings, name) != defaults[name]
    }
    for role in ROLES:
        if specs := (settings.prefill if role == "prefill" else settings.decode):
            values[role] = [str(spec) for spec in specs]
    if settings.settle_timeout == settings.prefill_timeout:
        values.pop("settle_timeout", None)
    if "decode_max_inflight" not in values:
        # Each proxy counts for itself; all of them together must not give an engine more than it runs at once: what
        # queues there beyond the prefill engine's lease hangs.
        values["decode_max_inflight"] = plan.max_num_seqs // plan.proxies[1]
    return yaml.safe_dump(values, sort_keys=False)


def config_map(plan: Plan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": plan.metadata("proxy"),
        "data": {"proxy.yaml": configuration(plan)},
    }


def deployment(plan: Plan) -> Manifest:
    digest = hashlib.sha256(configuration(plan).encode()).hexdigest()[:16]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": plan.metadata("proxy"),
        "spec": {
            **plan.replicas(plan.proxies),
            "selector": {"matchLabels": plan.selector("proxy")},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                # Another configuration is another pod: most settings are read at start only.
                "metadata": {"labels": plan.labels("proxy"), "annotations": {"trio-pdproxy/config": digest}},
                "spec": _pod(plan),
            },
        },
    }


def _pod(plan: Plan) -> Manifest:
    grace = round(plan.settings.shutdown_grace + plan.settings.settle_timeout)
    return {
        "serviceAccountName": plan.named("proxy"),
        "terminationGracePeriodSeconds": UNROUTED + grace + 5,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": plan.selector("proxy")},
            }
        ],
        "containers": [
            {
                "name": "proxy",
                "image": plan.image,
                "command": ["trio-pdproxy", "serve", "--config", "/etc/trio-pdproxy/proxy.yaml"],
                "env": [
                    {"name": "PDPROXY_LOG_FORMAT", "value": "json"},
                    {"name": "PDPROXY_API_KEY", "valueFrom": api_key(plan)},
                ],
                "ports": [{"name": "http", "containerPort": PORT}],
                "readinessProbe": {
                    "httpGet": {"path": "/ready", "port": "http"},
                    "periodSeconds": 2,
                    "failureThreshold": 2,
                },
                "livenessProbe": {
                    "httpGet": {"path": "/health", "port": "http"},
                    "periodSeconds": 10,
                    "timeoutSeconds": 5,
                    "failureThreshold": 6,
                },
                "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(UNROUTED)]}}},
                # One event loop: more than one core is no use to it, another replica is.
                "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "config", "mountPath": "/etc/trio-pdproxy", "readOnly": True}],
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": plan.named("proxy")}}],
    }


def service(plan: Plan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": plan.metadata("proxy"),
        "spec": {
            "selector": plan.selector("proxy"),
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }


def access(plan: Plan) -> list[Manifest]:
    """Who the proxy is in the cluster: it may list and watch pods of its own namespace, and nothing else."""
    name, namespace = plan.named("proxy"), plan.namespace
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": plan.metadata("proxy")},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": plan.metadata("proxy"),
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": plan.metadata("proxy"),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    ]

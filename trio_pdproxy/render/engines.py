"""vLLM engines of one role: a Deployment, or a LeaderWorkerSet where an engine spans several machines."""

from __future__ import annotations

import json
from typing import Any

from trio_pdproxy.config import Role
from trio_pdproxy.render.plan import PORT, SIDE_CHANNEL_PORT, Manifest, Plan

KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

SETTLE = 10
"""Seconds after a pod is marked for deletion until all proxies surely send it nothing new."""

LAST_WORDS = 30
"""Seconds vLLM has for its own end after that."""

START_MINUTES = 60
"""Weights come over the network the first time."""

# Runs in the engine's container before it is told to stop (vLLM cuts what is running when it is): until it has nothing
# in hand and no KV blocks are held for anybody, for `grace` seconds at most.
DRAIN = """\
import time, urllib.request
time.sleep({settle})
end = time.monotonic() + {grace}
names = ("vllm:num_requests_running", "vllm:num_requests_waiting{{", "vllm:kv_cache_usage_perc")
while time.monotonic() < end:
    try:
        page = urllib.request.urlopen("http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except OSError:
        break
    values = [float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(names)]
    if not any(values):
        break
    time.sleep(1)
"""


def drain_script(grace: int, *, settle: int = SETTLE, port: int = PORT) -> str:
    return DRAIN.format(settle=settle, grace=grace, port=port)


def engines(plan: Plan, role: Role) -> Manifest:
    """The workload of this role."""
    replicas = plan.replicas(plan.engines[role])
    if plan.workload == "deployment":
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": plan.metadata(role),
            "spec": {
                **replicas,
                "selector": {"matchLabels": plan.selector(role)},
                # A new one is ready before an old one goes: a roll-out never takes away a place that is needed.
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "progressDeadlineSeconds": 60 * START_MINUTES,
                "template": {"metadata": {"labels": plan.pod_labels(role)}, "spec": _pod(plan, role)},
            },
        }
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": plan.metadata(role),
        "spec": {
            **replicas,
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "leaderWorkerTemplate": {
                "size": plan.group_size,
                "restartPolicy": "RecreateGroupOnPodRestart",
                # Only the leader answers requests, so only it has the labels that discovery and Services go by.
                "leaderTemplate": {"metadata": {"labels": plan.pod_labels(role)}, "spec": _pod(plan, role, rank="0")},
                "workerTemplate": {
                    "metadata": {"labels": plan.labels(f"{role}-worker")},
                    "spec": _pod(plan, role, rank="$(LWS_WORKER_INDEX)"),
                },
            },
        },
    }


def _pod(plan: Plan, role: Role, rank: str | None = None) -> Manifest:
    worker = rank not in (None, "0")
    container: Manifest = {
        "name": "vllm",
        "image": plan.engine_image,
        "command": ["vllm", "serve", plan.model, *_arguments(plan, role, rank)],
        "env": _environment(plan),
        "resources": _resources(plan),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if not worker:
        healthy = {"httpGet": {"path": "/health", "port": "http"}}
        container |= {
            "ports": [
                {"name": "http", "containerPort": PORT},
                {"name": "nixl", "containerPort": SIDE_CHANNEL_PORT},
            ],
            "startupProbe": {**healthy, "periodSeconds": 10, "failureThreshold": 6 * START_MINUTES},
            "readinessProbe": {**healthy, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
            # No liveness probe: vLLM's server ends itself when its engine dies, and a restart of one that is merely
            # busy loses every request in it.
            "lifecycle": {"preStop": {"exec": {"command": ["python3", "-c", drain_script(plan.grace)]}}},
        }
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": SETTLE + plan.grace + LAST_WORDS,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
    }


def _arguments(plan: Plan, role: Role, rank: str | None) -> list[str]:
    transfer: Manifest = {"kv_connector": "NixlPushConnector", "kv_role": KV_ROLES[role]}
    if role == "prefill":
        transfer["kv_connector_extra_config"] = {"kv_lease_duration": round(plan.settings.lease)}
    # No engine_id: vLLM makes a new one at each start, and peers that knew the old one would hang.
    arguments = ["--port", str(PORT), "--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    if role == "decode":
        arguments += ["--max-num-seqs", str(plan.max_num_seqs)]
    parallel = plan.tensor_parallel_size or max(plan.gpus, 1) * (1 if rank is None else plan.group_size)
    if parallel > 1:
        arguments += ["--tensor-parallel-size", str(parallel)]
    if rank is not None:
        arguments += ["--nnodes", str(plan.group_size), "--node-rank", rank]
        arguments += ["--master-addr", "$(LWS_LEADER_ADDRESS)"]
        arguments += ["--headless"] if rank != "0" else []
    return [*arguments, *plan.engine_args]


def _environment(plan: Plan) -> list[Manifest]:
    return [
        # Default: localhost, which no other machine reaches.
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(SIDE_CHANNEL_PORT)},
        # Longer than the proxy keeps an idle connection, so that none is closed just as it is used again.
        {"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": "75"},
        {"name": "VLLM_API_KEY", "valueFrom": api_key(plan)},
    ]


def api_key(plan: Plan) -> Manifest:
    """The key that proxies and engines share, where there is such a Secret."""
    return {"secretKeyRef": {"name": plan.named("api-key"), "key": "api-key", "optional": True}}


def _resources(plan: Plan) -> Manifest:
    if not plan.gpus:
        return {"requests": {"cpu": "4", "memory": "16Gi"}}
    return {"limits": {plan.gpu_resource: str(plan.gpus)}, "requests": {"cpu": "4", "memory": "16Gi"}}


def service(plan: Plan, role: Role) -> Manifest:
    """Headless: each pod has its own record, and ports have names that discovery by DNS asks for."""
    ports: list[dict[str, Any]] = [
        {"name": "http", "port": PORT, "targetPort": "http"},
        {"name": "nixl", "port": SIDE_CHANNEL_PORT, "targetPort": "nixl"},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": plan.metadata(role),
        "spec": {"clusterIP": "None", "selector": plan.selector(role), "ports": ports},
    }

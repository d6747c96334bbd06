"""The two kinds that are no part of Kubernetes: what of their definitions the manifests use, and nothing else.

Written from the API references of LeaderWorkerSet v1 (lws.sigs.k8s.io) and ServiceMonitor v1 (prometheus-operator.dev).
Pod templates are left open here: they are checked as a Deployment's.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def closed(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
COUNT_OR_PERCENT: Schema = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+%$"}]}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
METADATA = closed(["name"], name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS)
TEMPLATE: Schema = {"type": "object", "required": ["spec"]}

LEADER_WORKER_SET = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=METADATA,
    spec=closed(
        ["leaderWorkerTemplate"],
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=closed(
            ["type"],
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=closed(
                [], partition=COUNT, maxUnavailable=COUNT_OR_PERCENT, maxSurge=COUNT_OR_PERCENT
            ),
        ),
        networkConfig=closed(["subdomainPolicy"], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        leaderWorkerTemplate=closed(
            ["workerTemplate"],
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
            leaderTemplate=TEMPLATE,
            workerTemplate=TEMPLATE,
        ),
    ),
)

SERVICE_MONITOR = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "ServiceMonitor"},
    metadata=METADATA,
    spec=closed(
        ["endpoints", "selector"],
        selector=closed([], matchLabels=LABELS),
        namespaceSelector=closed([], any={"type": "boolean"}, matchNames={"type": "array", "items": TEXT}),
        jobLabel=TEXT,
        endpoints={
            "type": "array",
            "items": closed(
                [],
                port=TEXT,
                path=TEXT,
                interval={"type": "string", "pattern": r"^(0|(\d+h)?(\d+m)?(\d+s)?(\d+ms)?)$"},
                scheme={"enum": ["http", "https"]},
            ),
        },
    ),
)

"""`trio-pdproxy render k8s`: what it writes is valid, fits together, and is what discovery looks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import msgspec
import pytest
import trio
import yaml
from click.testing import CliRunner

from tests.proxy.test_commands import run
from tests.render.schemas import LEADER_WORKER_SET, SERVICE_MONITOR
from trio_pdproxy.cli import main
from trio_pdproxy.config import ROLES, Settings, load_settings
from trio_pdproxy.engines.discovery.pods import Pod, engine_in
from trio_pdproxy.render import Plan, RenderError, files, manifests, text
from trio_pdproxy.render.engines import drain_script
from trio_pdproxy.sim import SimSettings
from trio_pdproxy.testing import open_rig, until

Json = dict[str, Any]
SETTINGS = Settings(discovery="kubernetes")
PLANS = {
    "one pair": Plan(SETTINGS, "MODEL"),
    "many": Plan(
        SETTINGS,
        "MODEL",
        namespace="llm",
        engines={"prefill": (2, 8), "decode": (4, 16)},
        revision="r2",
        gpus=8,
        engine_args=("--trust-remote-code",),
    ),
    "groups": Plan(
        SETTINGS,
        "MODEL",
        workload="leaderworkerset",
        group_size=4,
        gpus=8,
        engines={"prefill": (1, 1), "decode": (1, 3)},
    ),
    "bare": Plan(
        SETTINGS,
        "MODEL",
        gpus=0,
        without=frozenset({"servicemonitor", "networkpolicy", "poddisruptionbudget", "horizontalpodautoscaler"}),
    ),
    "by other labels": Plan(
        Settings(discovery="kubernetes", prefill_selector="app=p,tier=llm", decode_selector="app==d"), "MODEL"
    ),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))


def of_kind(found: list[Json], kind: str, name: str | None = None) -> list[Json]:
    return [m for m in found if m["kind"] == kind and name in (None, m["metadata"]["name"])]


def pods(found: list[Json]) -> list[Json]:
    """The pod templates, those of groups too."""
    templates = [m["spec"]["template"] for m in of_kind(found, "Deployment")]
    for group in of_kind(found, "LeaderWorkerSet"):
        template = group["spec"]["leaderWorkerTemplate"]
        templates += [template["leaderTemplate"], template["workerTemplate"]]
    return templates


def matches(selector: Json, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items()
    return all(labels.get(name) == value for name, value in wanted) and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", ())
    )


@every_plan
def test_what_kubernetes_defines_is_valid_to_the_letter(plan: Plan) -> None:
    native = []
    for manifest in manifests(plan):
        if manifest["kind"] == "ServiceMonitor":
            jsonschema.validate(manifest, SERVICE_MONITOR)
        elif manifest["kind"] == "LeaderWorkerSet":
            jsonschema.validate(manifest, LEADER_WORKER_SET)
            for template in pods([manifest]):
                deployment = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
                native.append(manifest | {"apiVersion": "apps/v1", "kind": "Deployment", "spec": deployment})
        else:
            native.append(manifest)
    for manifest in native:
        for version in ("1.32.0", "1.37.0"):
            kubernetes_validate.validate(yaml.safe_load(text([manifest])), version, strict=True)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "lifecycles")),
        ("HorizontalPodAutoscaler", ("spec", "maximum")),
        ("NetworkPolicy", ("spec", "ingres")),
    ],
)
def test_the_validation_would_find_a_wrong_field(kind: str, place: tuple[Any, ...]) -> None:
    manifest = of_kind(manifests(PLANS["many"]), kind)[0]
    inner = manifest
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.37.0", strict=True)


@every_plan
def test_kustomize_builds_on_it(plan: Plan, tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl")
    base, overlay = tmp_path / "base", tmp_path / "overlay"
    base.mkdir()
    overlay.mkdir()
    for name, content in files(plan).items():
        (base / name).write_text(content)
    patch = {"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "registry.example/pd:1"}
    kustomization = {
        "resources": ["../base"],
        "namespace": "other",
        "patches": [{"target": {"kind": "Deployment", "name": plan.named("proxy")}, "patch": yaml.safe_dump([patch])}],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    done = subprocess.run([kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert len(built) == len(manifests(plan))
    assert {m["metadata"]["namespace"] for m in built} == {"other"}
    assert of_kind(built, "RoleBinding")[0]["subjects"][0]["namespace"] == "other"
    proxy = of_kind(built, "Deployment", plan.named("proxy"))[0]
    assert proxy["spec"]["template"]["spec"]["containers"][0]["image"] == "registry.example/pd:1"


@every_plan
def test_what_selects_finds_the_pods_it_should(plan: Plan) -> None:
    found = manifests(plan)
    every_pod = [template["metadata"]["labels"] for template in pods(found)]
    for role in ("prefill", "decode"):
        (service,) = of_kind(found, "Service", plan.named(role))
        (selected,) = [
            p for p in pods(found) if matches({"matchLabels": service["spec"]["selector"]}, p["metadata"]["labels"])
        ]
        names = {port["name"] for port in selected["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} == names == {"http", "nixl"}
        for monitor in of_kind(found, "ServiceMonitor", plan.named(role)):
            assert matches(monitor["spec"]["selector"], service["metadata"]["labels"])
        for budget in of_kind(found, "PodDisruptionBudget", plan.named(role)):
            assert matches(budget["spec"]["selector"], selected["metadata"]["labels"])
    for manifest in of_kind(found, "Deployment"):
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert matches(manifest["spec"]["selector"], labels)
        assert sum(matches(manifest["spec"]["selector"], other) for other in every_pod) == 1
    for policy in of_kind(found, "NetworkPolicy"):
        reached = [labels for labels in every_pod if matches(policy["spec"]["podSelector"], labels)]
        assert len(reached) == (1 if policy["metadata"]["name"] == plan.named("proxy") else len(every_pod) - 1)
    for scaler in of_kind(found, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        (scaled,) = of_kind(found, target["kind"], target["name"])
        assert "replicas" not in scaled["spec"]


@every_plan
def test_discovery_finds_in_the_pods_what_was_rendered(plan: Plan) -> None:
    """The very settings that the proxies get, over the very pods that run."""
    for template in pods(manifests(plan)):
        container = template["spec"]["containers"][0]
        pod = {
            "metadata": {"name": "x", "labels": template["metadata"]["labels"]},
            "spec": {"containers": [{"ports": container.get("ports"), "env": container.get("env")}]},
            "status": {
                "phase": "Running",
                "podIP": "10.1.2.3",
                "conditions": [{"type": "Ready", "status": "True"}],
            },
        }
        for role in ROLES:
            selector = plan.settings.prefill_selector if role == "prefill" else plan.settings.decode_selector
            wanted = dict(part.replace("==", "=").split("=") for part in selector.split(","))
            if not matches({"matchLabels": wanted}, template["metadata"]["labels"]):
                continue
            found = engine_in(_decoded(pod), role, plan.settings.revision_label)
            assert found is not None
            assert found.ready
            assert found.spec.url == "http://10.1.2.3:8000"
            assert str(found.spec.side_channel) == "10.1.2.3:5600"
            assert found.spec.revision == plan.revision
            assert f'"kv_role":"kv_{"producer" if role == "prefill" else "consumer"}"' in " ".join(container["command"])
            break
        else:
            assert container["name"] == "proxy" or "--headless" in container["command"]


def _decoded(pod: Json) -> Pod:
    return msgspec.json.decode(msgspec.json.encode(pod), type=Pod)


def test_the_proxies_get_the_settings_they_were_rendered_from_and_no_secrets(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "discovery: kubernetes\nlease: 60\nprefill_timeout: 90\ndecode_selector: app=d\nadmin_bind: 0.0.0.0:9000\n"
        "prefill: ['http://10.0.0.1:8100;lease=20']\n"
    )
    secrets = {"PDPROXY_API_KEY": "a-secret-key", "PDPROXY_ADMIN_TOKEN": "another-secret"}
    done = run("render", "k8s", "--model", "M", "--config", str(file), "--proxies", "2-8", env=secrets)
    assert done.returncode == 0, done.stderr
    assert "secret-key" not in done.stdout
    assert "another" not in done.stdout
    found = list(yaml.safe_load_all(done.stdout))
    (config,) = of_kind(found, "ConfigMap")
    written = tmp_path / "proxy.yaml"
    written.write_text(config["data"]["proxy.yaml"])
    settings = load_settings(file=written, environ={"PDPROXY_ADMIN_TOKEN": "x"})
    given = load_settings(file=file, environ={"PDPROXY_ADMIN_TOKEN": "x"})
    differ = {n for n in Settings.model_fields if getattr(settings, n) != getattr(given, n)}
    assert differ == {"bind", "decode_max_inflight"}
    assert settings.decode_max_inflight * 8 <= 256
    assert '"kv_lease_duration":60' in done.stdout


async def test_a_pod_waits_before_it_stops_until_it_has_nothing_in_hand() -> None:
    """The preStop script, run as it stands against an engine that is at work."""
    async with open_rig(sim=SimSettings(prefill_base=1.5, itl=0.2)) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(rig.post)
        await until(lambda: rig.p.running)
        script = drain_script(60, settle=0, port=rig.d.port)
        with trio.fail_after(30):
            await trio.run_process([sys.executable, "-c", script])
        assert not rig.d.running
        assert not rig.d.blocks_held


async def test_the_metrics_that_scale_exist() -> None:
    async with open_rig() as rig:
        await rig.post()
        page = (await rig.client.get("/metrics")).text
    for scaler in of_kind(manifests(PLANS["many"]), "HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            inner = metric.get("pods") or metric.get("object")
            if inner is not None:
                assert f"\n{inner['metric']['name']}" in page


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--proxies", "0"], "at least 1"),
        (["--decode", "4-2"], "at most"),
        (["--decode", "many"], "fewest-most"),
        (["--workload", "leaderworkerset", "--group-size", "1"], "at least 2 pods"),
        (["--max-num-seqs", "2"], "cannot be shared"),
        ([], "--model"),
    ],
)
def test_what_cannot_be_rendered_says_why(args: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["render", "k8s", *(["--model", "M"] if args else []), *args])
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_selectors_that_are_no_labels_are_refused() -> None:
    for selector in ("role in (a, b)", "role!=x", "role"):
        with pytest.raises(RenderError, match="selector"):
            manifests(Plan(Settings(discovery="kubernetes", decode_selector=selector), "M"))
    with pytest.raises(RenderError, match="discovery"):
        manifests(Plan(Settings(prefill="http://p", decode="http://d"), "M"))

"""The dashboard and the alert rules: every metric and label in them is one that the proxy has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from trio_pdproxy.core.report import Report
from trio_pdproxy.observe.metrics import EngineState, Metrics, merged

from .test_metrics import dispatch, report

EXAMPLES = Path(__file__).parents[2] / "examples"
ALERTS = EXAMPLES / "prometheus-alerts.yaml"
NAME = re.compile(r"\bpdproxy_\w+")
SELECTOR = re.compile(r"(pdproxy_\w+)\{([^}]*)\}")
GIVEN_BY_PROMETHEUS = {"job", "instance"}


def rendered() -> bytes:
    """What a proxy in use tells: one exchange of each outcome, a retry and a rescue among them."""
    metrics = Metrics(
        lambda: [EngineState("p0", "prefill", True, 1), EngineState("d0", "decode", True, 1)], lambda: 3, lambda: True
    )
    metrics.observe(report())
    metrics.observe(Report("r", "/v1/completions", stream=True, accepted=0.0, outcome="disconnect"))
    metrics.observe(report("ok", dispatch(rescue="failed", rescue_paid=True), dispatch(settled="disconnect")))
    return metrics.render()[0]


def told() -> dict[str, set[str]]:
    """Every sample's name with the labels it comes with."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(rendered().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    return read


def dashboard_expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("where", ["dashboard", "alerts"])
def test_every_metric_and_label_in_the_examples_exists(where: str) -> None:
    expressions = list(dashboard_expressions()) if where == "dashboard" else [rule["expr"] for rule in alert_rules()]
    known = told()
    named = {name for expression in expressions for name in NAME.findall(expression)}
    assert len(named) >= 7
    assert named <= set(known), f"no such metric: {named - set(known)}"
    for expression in expressions:
        for name, selectors in SELECTOR.findall(expression):
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors)) - GIVEN_BY_PROMETHEUS
            assert labels <= known[name], f"{name} has no {labels - known[name]}"
        names = NAME.findall(expression)
        for by in re.findall(r"by \(([^)]*)\)", expression):
            labels = {label.strip() for label in by.split(",")} - GIVEN_BY_PROMETHEUS
            assert labels <= set().union(*(known[name] for name in names)), f"{expression}: by {labels}"


def test_the_dashboard_shows_every_metric_there_is() -> None:
    shown = {name for expression in dashboard_expressions() for name in NAME.findall(expression)}
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in told()}
    assert {re.sub(r"_(bucket|total)$", "", name) for name in shown} == families


def test_label_values_in_selectors_are_ones_that_come() -> None:
    text = rendered().decode()
    for expression in [*dashboard_expressions(), *(rule["expr"] for rule in alert_rules())]:
        for label, values in re.findall(r'(outcome|state|reason)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', expression):
            for value in values.split("|"):
                assert f'{label}="{value}"' in text


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)


def test_alerts_say_what_and_what_to_do() -> None:
    rules = alert_rules()
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
    named = " ".join(rule["alert"] for rule in rules)
    for what in ("Stranded", "NoUsablePair", "LegErrors", "DecodeStartGap"):
        assert what in named


@pytest.mark.parametrize("workers", [1, 2])
def test_promtool_has_nothing_to_say(workers: int) -> None:
    """Where Prometheus's own checker is at hand (Debian: in the package prometheus)."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("there is no promtool here; test_metrics checks what it would")
    text = merged([rendered()] * workers)
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    rules = subprocess.run([promtool, "check", "rules", str(ALERTS)], capture_output=True, timeout=30, check=False)
    assert rules.returncode == 0, rules.stderr


def test_each_alert_fires_when_it_should_and_none_in_peace(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("there is no promtool here")
    shutil.copy(ALERTS, tmp_path)
    shutil.copy(Path(__file__).with_name("alerts.yaml"), tmp_path)
    done = subprocess.run(
        [promtool, "test", "rules", "alerts.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = yaml.safe_load((tmp_path / "alerts.yaml").read_text())["tests"][0]["promql_expr_test"][0]["exp_samples"]
    assert {rule["alert"] for rule in alert_rules()} == {
        re.findall(r'alertname="(\w+)"', sample["labels"])[0] for sample in tested
    }

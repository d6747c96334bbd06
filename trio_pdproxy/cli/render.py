"""`trio-pdproxy render`: what others need to run the proxy, made from its own settings."""

from __future__ import annotations

import os
from pathlib import Path

import click

from trio_pdproxy.cli.options import settings_from

_KINDS = ("servicemonitor", "horizontalpodautoscaler", "networkpolicy", "poddisruptionbudget")


class _Range(click.ParamType[tuple[int, int]]):
    """`2`, or `2-6`: fewest and most."""

    name = "N[-MAX]"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        fewest, _, most = str(value).partition("-")
        if not fewest.isdecimal() or not (most or fewest).isdecimal():
            self.fail(f"write a number, or fewest-most, not {value!r}", param, ctx)
        return int(fewest), int(most or fewest)


RANGE = _Range()


@click.group()
def render() -> None:
    """Write what others need to run the proxy."""


@render.command()
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="YAML file with the proxy's settings.")
@click.option("--model", required=True, help="What `vllm serve` is given; the same text for both roles.")
@click.option("--name", default="pd", show_default=True, help="Begins every object's name.")
@click.option("--namespace", default="default", show_default=True)
@click.option("--image", default="trio-pdproxy:latest", show_default=True, help="The proxy's image.")
@click.option("--engine-image", default="vllm/vllm-openai:latest", show_default=True, help="vLLM's image.")
@click.option("--proxies", type=RANGE, default="2-4", show_default=True, help="Replicas of the proxy.")
@click.option("--prefill", type=RANGE, default="1", show_default=True, help="Prefill engines.")
@click.option("--decode", type=RANGE, default="1", show_default=True, help="Decode engines.")
@click.option(
    "--workload",
    type=click.Choice(["deployment", "leaderworkerset"]),
    default="deployment",
    show_default=True,
    help="leaderworkerset: an engine is a group of pods.",
)
@click.option("--group-size", type=int, default=2, show_default=True, help="Pods of such a group.")
@click.option("--gpus", type=int, default=1, show_default=True, help="GPUs of each pod.")
@click.option("--gpu-resource", default="nvidia.com/gpu", show_default=True)
@click.option("--tensor-parallel-size", type=int, help="Default: all GPUs of an engine.")
@click.option(
    "--max-num-seqs", type=int, default=256, show_default=True, help="Sequences a decode engine runs at once."
)
@click.option("--revision", help="Engines are paired only within the same.")
@click.option("--engine-arg", multiple=True, help="A further argument for `vllm serve`. Repeatable.")
@click.option(
    "--grace", type=int, default=300, show_default=True, help="Seconds an engine has to finish before it stops."
)
@click.option("--monitoring-namespace", default="monitoring", show_default=True, help="Where Prometheus is.")
@click.option(
    "--without", multiple=True, type=click.Choice(_KINDS, case_sensitive=False), help="Leave out. Repeatable."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder for one file an object and a kustomization.yaml. Default: all of them on stdout.",
)
def k8s(config: Path | None, output: Path | None, **params: object) -> None:
    """Kubernetes manifests: engines, proxies, and what stands around them.

    \b
    trio-pdproxy render k8s --model MODEL -o deploy && kubectl apply -k deploy

    Settings come from --config and the environment; discovery is kubernetes. Nothing is sent anywhere.
    """
    from trio_pdproxy.render import RenderError, files, manifests, text
    from trio_pdproxy.render.plan import Plan

    flags = {"config": config}
    environ = {"PDPROXY_DISCOVERY": "kubernetes"} | dict(os.environ)
    settings = settings_from(flags, environ)
    engines = {"prefill": params.pop("prefill"), "decode": params.pop("decode")}
    without = frozenset(str(kind).lower() for kind in params.pop("without"))  # type: ignore[attr-defined]
    arguments = params.pop("engine_arg")
    plan = Plan(settings=settings, engines=engines, without=without, engine_args=arguments, **params)  # type: ignore[arg-type]
    try:
        if output is None:
            click.echo(text(manifests(plan)), nl=False)
            return
        written = files(plan)
    except RenderError as error:
        raise click.UsageError(str(error)) from None
    output.mkdir(parents=True, exist_ok=True)
    for name, content in written.items():
        (output / name).write_text(content, encoding="utf-8")
    click.echo(f"{len(written)} files in {output}: kubectl apply -k {output}", err=True)


@render.command()
def configuration() -> None:
    """The reference of all settings, as Markdown (docs/configuration.md)."""
    from trio_pdproxy.render.reference import configuration

    click.echo(configuration(), nl=False)


@render.command()
def request() -> None:
    """What becomes of a request, from the verdict's tables: a mermaid diagram and a table (in docs/design.md)."""
    from trio_pdproxy.render.reference import request

    click.echo(request(), nl=False)

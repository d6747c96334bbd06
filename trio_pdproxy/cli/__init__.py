"""The command `trio-pdproxy`: one file a command, each loaded only when it is asked for."""

from __future__ import annotations

from importlib import import_module

import click

# name -> (module, attribute, the line that `--help` shows without loading the module)
COMMANDS = {
    "serve": ("trio_pdproxy.cli.serve", "serve", "Serve the proxy."),
    "demo": ("trio_pdproxy.cli.demo", "demo", "Start one prefill and one decode engine and send a chat through."),
    "launch": ("trio_pdproxy.cli.launch", "launch", "Start the engines of a script and the proxy in front."),
    "check": ("trio_pdproxy.cli.check", "check", "Say what is wrong with engines, a configuration or a script."),
    "engines": ("trio_pdproxy.cli.engines", "engines", "Prepare real vLLM engines for this machine's CPU."),
    "bench": ("trio_pdproxy.cli.bench", "bench", "Measure an endpoint, or the legs in sequence against both at once."),
    "trace": ("trio_pdproxy.cli.trace", "trace", "Draw the last exchanges of a proxy."),
    "top": ("trio_pdproxy.cli.top", "top", "Watch a proxy's engines and flows."),
    "render": ("trio_pdproxy.cli.render", "render", "Write Kubernetes manifests."),
    "sim": ("trio_pdproxy.cli.sim", "sim", "Run simulated engines."),
}


class LazyGroup(click.Group):
    """A group whose `--help` costs no command's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trio-pdproxy")
def main() -> None:
    """A proxy for vLLM prefill/decode disaggregation in NIXL push mode."""

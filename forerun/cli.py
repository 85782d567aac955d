"""The command line. Each command is a function in forerun/commands; nothing is decided here."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer

    from forerun import __version__
    from forerun.commands import bench, distill, generate, plan, roles
except KeyboardInterrupt:  # they take half a second
    print("forerun: interrupted", file=sys.stderr)
    sys.exit(130)

app = typer.Typer(
    help="Speculative decoding as a distributed service: the target's own words, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(roles.up)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("plan")(plan.plan)
app.command("distill")(distill.distill)
app.command("demo")(roles.demo)
app.command("coordinator")(roles.coordinator)
app.command("target-worker")(roles.target_worker)
app.command("draft-worker")(roles.draft_worker)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Read by typer."""


if __name__ == "__main__":
    app()

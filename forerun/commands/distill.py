"""`forerun distill`: make a draft for a target out of the target alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forerun.commands import failure
from forerun.commands.options import Device, Dtype, OnDevice, Precision
from forerun.core.errors import ForerunError, InvalidRequest


def distill(
    out: Annotated[Path, typer.Option(help="Folder of the draft; the same command again goes on with what is in it.")],
    target: Annotated[str, typer.Option(help="Folder in transformers' form, hub id, or demo.")] = "demo",
    layers: Annotated[str, typer.Option(help="Of the target: a count, spread evenly, or numbers as 0,14,29.")] = "3",
    head: Annotated[int, typer.Option(min=2, help="Token ids the draft can say: the most frequent ones.")] = 4096,
    tokens: Annotated[int, typer.Option(min=1, help="Data: tokens that the target writes itself.")] = 2_000_000,
    temperatures: Annotated[str, typer.Option(help="Of the answers in the data, joined by commas.")] = "0,0.7,1",
    batch: Annotated[int, typer.Option(min=1, help="Conversations written at once.")] = 64,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a conversation.")] = 384,
    rows: Annotated[int, typer.Option(min=1, help="Conversations of a training step.")] = 16,
    steps: Annotated[int | None, typer.Option(min=1, help="Of training. Default: 4 passes over the data.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Of training, instead of --steps.")] = None,
    learning_rate: Annotated[float, typer.Option(help="At its height.")] = 5e-4,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of the data, to share it; named again: others to train on too. Default: OUT/data."),
    ] = None,
    openings: Annotated[
        Path | None, typer.Option(help="How questions begin, one a line. Default: tasks that people often set.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="A draft of this target to go on from, with other data.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    device: OnDevice = Device.AUTO,
    dtype: Dtype = Precision.BFLOAT16,
    seed: Annotated[int, typer.Option(min=0, help="Of data and training.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with the training in OUT, or begin it afresh.")
    ] = True,
) -> None:
    """Make a small draft for a target, trained on what the target writes and thinks after a question's first words."""
    from forerun.runtime.distill.pipeline import DistillOptions, make_draft
    from forerun.runtime.memory import keep_workspace

    console = Console(stderr=True)
    try:
        asked = DistillOptions(
            target=target,
            out=out,
            data=tuple(data or ()),
            openings=openings,
            start=start,
            layers=layers,
            head=head,
            tokens=tokens,
            temperatures=parse_temperatures(temperatures),
            batch=batch,
            length=length,
            rows=rows,
            steps=steps,
            minutes=minutes,
            learning_rate=learning_rate,
            seed=seed,
            dtype=dtype,
            threads=threads,
            device=device,
            resume=resume,
        )
        keep_workspace()
        result = make_draft(asked, console)
    except ForerunError as error:
        print(f"forerun: {error}", file=sys.stderr)
        raise typer.Exit(failure.FAILED) from error
    except KeyboardInterrupt as error:
        print("forerun: interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(failure.INTERRUPTED) from error
    print(
        f"{out}: accepts {result.greedy.accepted:.3f} greedy, {result.coupled.accepted:.3f} coupled on held-out text, "
        f"at {result.cost:.3f} of the target's pass"
    )


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Raises InvalidRequest."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"temperatures are numbers joined by commas, as 0,0.7,1, not {text!r}") from error

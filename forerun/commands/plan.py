"""`forerun plan`: what speculation should be worth, from acceptance, draft cost and lookahead."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from forerun.core.formulas import expected_tokens, speedup_alternating, speedup_overlapped


def plan(
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="Chance that a drafted token is accepted.")] = 0.8,
    cost: Annotated[float, typer.Option(min=0.0, help="A draft step, in target passes.")] = 0.1,
    branch: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Chance that a correction was among the prepared branches.")
    ] = 0.3,
    most: Annotated[int, typer.Option(min=1, max=64, help="Largest lookahead shown.")] = 8,
) -> None:
    """Print expected tokens per pass and speed-up over plain decoding, by lookahead."""
    table = Table(title=f"acceptance {acceptance:g}, draft step {cost:g} passes, branch hit {branch:g}")
    for heading in ("lookahead", "tokens per pass", "draft, then verify", "overlapped", "overlapped, branches"):
        table.add_column(heading, justify="right")
    for k in range(1, most + 1):
        table.add_row(
            str(k),
            f"{expected_tokens(acceptance, k):.2f}",
            f"{speedup_alternating(acceptance, k, cost):.2f}",
            f"{speedup_overlapped(acceptance, k, cost):.2f}",
            f"{speedup_overlapped(acceptance, k, cost, branch):.2f}",
        )
    Console().print(table)

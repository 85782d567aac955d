"""What overlap is worth for every ratio of costs: the real engines in virtual time (tests/virtual.py), as a table.

python benchmarks/overlap.py [--answers 4]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from forerun.core.formulas import speedup_alternating

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from virtual import decode

ACCEPT, STEP, BRANCH = (0.5, 0.6, 0.7, 0.8, 0.9), (0.05, 0.1, 0.2, 0.4), (0.3, 0.7)


async def main(answers: int) -> None:
    table = Table(title="tokens per pass-time; plain decoding is 1")
    for heading in ("accepted", "step / pass", "in turn, at best", *(f"chains, h={h:g}" for h in BRANCH)):
        table.add_column(heading, justify="right")
    for heading in (*(f"trees, h={h:g}" for h in BRANCH), "5 ms a message, h=0.7"):
        table.add_column(heading, justify="right")
    for accept in ACCEPT:
        for step in STEP:
            seen = [await decode(accept, step, h, answers=answers, chains=c) for c in (True, False) for h in BRANCH]
            seen.append(await decode(accept, step, 0.7, answers=answers, hop_s=0.005))
            turns = max(speedup_alternating(accept, k, step) for k in range(1, 17))
            table.add_row(f"{accept:g}", f"{step:g}", f"{turns:.2f}", *(f"{each.rate:.2f}" for each in seen))
    Console(width=120).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=4, help="of 400 tokens, for each figure")
    asyncio.run(main(parser.parse_args().answers))

"""What a benchmark tells: the machine it ran on, its progress, its tables, and what is wrong."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from forerun.commands.exact import Exactness, Result, ranges
from forerun.commands.runs import Told
from forerun.v1 import generation_pb2

PACKAGES = ("forerun", "grpcio", "torch", "transformers")
PLAIN_WIDTH = 150
"""Columns of a table where there is no terminal to ask."""

MOST_DIFFERENCES = 20
"""Named on stderr, of each run; all are in the JSON file."""


def machine() -> dict[str, Any]:
    """`cores` are those this process may use. Packages that are not installed are null."""
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def cpu_model(cpuinfo: Path) -> str:
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """The runs as `measure.summarise` gives them."""
    drawn = Table(box=None, header_style="bold")
    drawn.add_column("run", no_wrap=True)
    for name in ("prompts", "tokens", "tokens/s", "x plain", "accepted", "tokens/pass", "waiting"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for name in ("TTFT ms p50/p90/p99", "ITL ms p50/p90/p99"):
        drawn.add_column(name, justify="right")
    for run in runs:
        drawn.add_row(
            run["name"],
            str(run["prompts"]),
            str(run["tokens"]),
            _figure(run["tokens_per_s"], 1),
            _figure(run["ratio_to_plain"], 2),
            "-" if run["acceptance_rate"] is None else f"{run['acceptance_rate']:.1%}",
            _figure(run["tokens_per_pass"], 2),
            "-" if run["waiting_share"] is None else f"{run['waiting_share']:.0%}",
            _figures(run["ttft_ms"].values(), 0),
            _figures(run["itl_ms"].values(), 1),
        )
    return drawn


def scenario_table(results: Sequence[Result]) -> Table:
    """A row for each run of each scenario."""
    drawn = Table(box=None, header_style="bold")
    for name in ("scenario", "run"):
        drawn.add_column(name, no_wrap=True)
    for name in ("identical", "tokens/pass", "windows", "branched", "preempted", "continued"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for result in results:
        found = result.figures
        drawn.add_row(
            result.scenario,
            result.run,
            f"{result.exact.identical} of {result.exact.checked}",
            _figure(found["tokens_per_pass"], 2),
            ranges([window for window in map(int, found["windows"]) if window]) or "-",
            str(found["branched"]),
            f"{found['preempted']['times']} in {found['preempted']['answers']}",
            str(found["continued"]),
        )
    return drawn


def show(table: Table) -> None:
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    Console(width=width).print(table)


def tell_exactness(exact: Exactness, where: str = "") -> None:
    """Every difference on stderr, up to a bound."""
    for name, differences in exact.differences.items():
        for difference in differences[:MOST_DIFFERENCES]:
            print(f"forerun: {where}run {name} differs from plain in {difference}", file=sys.stderr)
        if len(differences) > MOST_DIFFERENCES:
            left = len(differences) - MOST_DIFFERENCES
            print(f"forerun: {where}run {name} differs in {left} more questions", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one invocation found, for the JSON file and the exit status."""

    settings: dict[str, Any]
    figures: dict[str, Any]
    passed: bool = True

    def write(self, path: Path, source: dict[str, Any]) -> None:
        """{machine, settings, and the figures}; `source` says where the answers came from."""
        whole = {"machine": machine(), "settings": {**source, **self.settings}, **self.figures}
        path.write_text(json.dumps(whole, indent=2) + "\n")


def served(info: generation_pb2.GetModelInfoResponse) -> dict[str, Any]:
    """What the services say of themselves, as settings."""
    return {
        "model": info.model,
        "model_revision": info.model_revision,
        "numerics_id": info.numerics_id,
        "lookahead": info.lookahead,
        "served_sources": list(info.sources),
        "kv_tokens": info.kv_tokens,
    }


def tell_problems(where: str, problems: Iterable[str]) -> None:
    for problem in problems:
        print(f"forerun: {where}: {problem}", file=sys.stderr)


@contextmanager
def progress(began: str, total: int) -> Iterator[Told]:
    """A bar on stderr, one step for each call with what is going on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(began, total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _figures(values: Iterable[float | None], digits: int) -> str:
    return " / ".join(_figure(value, digits) for value in values)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

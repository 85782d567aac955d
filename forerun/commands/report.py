"""What a benchmark tells: the machine it ran on, and its table."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

PACKAGES = ("forerun", "grpcio", "torch", "transformers")


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
    for name in ("prompts", "tokens", "tokens/s", "x plain", "accepted", "tokens/pass"):
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
            _figures(run["ttft_ms"].values(), 0),
            _figures(run["itl_ms"].values(), 1),
        )
    return drawn


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _figures(values: Iterable[float | None], digits: int) -> str:
    return " / ".join(_figure(value, digits) for value in values)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

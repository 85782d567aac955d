"""core/ decides in plain Python: what it imports is part of its contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BANNED = {"torch", "grpc", "ray", "opentelemetry", "transformers"}

IMPORT_ALL = """
import importlib, json, pkgutil, sys
import forerun.core
names = [info.name for info in pkgutil.walk_packages(forerun.core.__path__, "forerun.core.")]
for name in names + sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([names, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def imported(*more: str) -> tuple[set[str], set[str]]:
    """Names of core's modules, and every top-level package that a fresh interpreter holds after them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *more],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    modules, packages = json.loads(done.stdout)
    return set(modules), set(packages)


def test_core_imports_nothing_heavy() -> None:
    modules, packages = imported()
    files = {path.stem for path in (ROOT / "forerun" / "core").glob("*.py")} - {"__init__"}
    assert modules == {f"forerun.core.{stem}" for stem in files}
    assert {"tree", "walk", "ledger", "noise", "plan"} <= files
    assert "numpy" in packages
    assert not packages & BANNED


def test_a_heavy_import_would_be_seen() -> None:
    assert imported("grpc")[1] & BANNED == {"grpc"}

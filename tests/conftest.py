"""Fixtures that several folders share. Thread counts are stated: torch's defaults oversubscribe two cores."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # cluster.py and models.py are helpers, not tests
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SPEC_BENCH = Path(__file__).parents[2] / "shared" / "data" / "spec_bench_dev.jsonl"
OWN_PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"


def read_prompts(path: Path) -> list[str]:
    return [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def spec_bench() -> list[str]:
    """First turns of the 240 benchmark prompts; they come with the workspace, not with the project."""
    if not SPEC_BENCH.is_file():
        pytest.skip("spec_bench_dev.jsonl is not beside this checkout")
    return read_prompts(SPEC_BENCH)

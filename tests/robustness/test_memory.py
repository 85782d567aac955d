"""What a target says it takes, before its first request, is what it takes after 2,000; and it grows no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import tiny_model

TESTS = Path(__file__).parents[1]
REQUESTS, EVERY = 2000, 100
KV_BYTES = 64 << 20
MIB = 1 << 20


@pytest.mark.timeout(400)
def test_memory_is_what_was_stated_and_stays(tmp_path: Path) -> None:
    """40 MiB of weights and 64 of KV, so that what the allocator and the machine add is small against them."""
    folder = tiny_model(tmp_path / "model", vocab=5120, hidden=512, layers=2, heads=8, kv_heads=8, context=1024)
    arguments = [folder, *map(str, (KV_BYTES, REQUESTS, EVERY))]
    ended = subprocess.run(
        [sys.executable, str(TESTS / "memory_of_requests.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["done"] == REQUESTS and len(told["resident"]) == REQUESTS // EVERY
    assert told["kv_touched"] == told["kv"], "every page of KV was used, or its bound proves nothing"
    assert told["idle"] > 0.9 * told["pages"], "KV is full of known prefixes, the older ones gave way"

    stated = told["weights"] + told["kv"] + told["workspace"]
    taken = [(resident - told["baseline"]) for resident in told["resident"]]
    figures = f"MiB taken: {[round(bytes_ / MIB, 1) for bytes_ in taken]}, stated: {round(stated / MIB, 1)}, {told}"
    assert told["weights"] >= 40 * MIB and told["kv"] == KV_BYTES
    assert abs(taken[-1] - stated) <= 0.10 * stated, figures
    late = taken[-1 - 1000 // EVERY :]
    assert max(late) - min(late) <= 0.02 * stated, figures

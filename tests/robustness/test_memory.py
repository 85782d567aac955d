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


LONG_PASSES = """
import resource, sys, threading

from forerun.runtime.memory import keep_workspace

keep_workspace()

from forerun.core.pages import KV
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm
from forerun.runtime.passes import Run


def lane():
    model = TransformersModel(load_causal_lm(sys.argv[1], "bfloat16"), 8192, 80)
    run = Run(KV(model.pages).extend(4096), tuple(range(128)), 3900, 0)
    for _ in range(4):
        model.forward([run])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        model.forward([run])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


thread = threading.Thread(target=lane)
thread.start()
thread.join()
"""


def test_a_pass_finds_the_memory_of_the_one_before(tmp_path: Path) -> None:
    """Pages that the system has to clear in five passes of 128 rows far into a context: 58,000 if it is not kept."""
    folder = tiny_model(tmp_path / "model", vocab=512, hidden=128, layers=2, heads=8, kv_heads=2, context=8192)
    ended = subprocess.run(
        [sys.executable, "-c", LONG_PASSES, folder],
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 5000

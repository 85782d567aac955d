"""Options that this machine or a simulated model cannot take are refused before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from forerun.core.errors import ModelRefused
from forerun.runtime.serving import LoadOptions, load

CORES = len(os.sched_getaffinity(0))
SIM = "sim:context=512"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": SIM, "tp": 3}, "leave --tp out"),
        ({"model": SIM, "device": "cuda"}, "leave --device cuda out"),
        ({"model": SIM, "threads": CORES + 1}, f"--threads {CORES + 1} .*at most {CORES}$"),
        ({"model": "/no/such", "threads": CORES + 1}, "--threads"),
    ],
)
def test_options_that_do_nothing_or_too_much(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelRefused, match=named):
        load(LoadOptions(**options), draft=False, sequences=1)


@pytest.mark.parametrize("draft", [False, True])
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, draft: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelRefused, match=r"--device cuda: torch .* finds no GPU here"):
        load(LoadOptions("/no/such", device="cuda"), draft=draft, sequences=1)


def test_a_simulated_model_states_its_kv() -> None:
    loaded = load(LoadOptions(SIM, kv_memory=1 << 30), draft=False, sequences=4)
    assert str(loaded.memory()).endswith(
        "KV up to 2 MiB (2,560 tokens), 4 sequences in a pass; "
        "of the 1024 MiB asked for, whole contexts of so many sequences need no more"
    )

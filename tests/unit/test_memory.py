"""How many pages KV gets, and what is said when it is too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.core.errors import ModelRefused
from forerun.core.pages import TILE
from forerun.runtime.memory import MIB, MemoryUse, check_room, free_bytes, kv_budget, kv_pages, resident_bytes


def test_pages_fill_the_budget_but_never_more_than_can_be_used() -> None:
    assert kv_pages(MIB, sequences=4, context_limit=1000, budget=10 * MIB + 5) == 10
    assert kv_pages(MIB, sequences=4, context_limit=1000, budget=1 << 40) == 4 * (8 + 1)


def test_too_little_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ModelRefused, match=r"at least 4\.0 MiB.*there are 3\.0 MiB for it \(--kv-memory\)"):
        kv_pages(2 * MIB, sequences=4, context_limit=1000, budget=3 * MIB)


def test_each_rank_on_a_gpu_gets_what_its_own_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """70 billion parameters in bfloat16 on four GPUs of 80 GB; the third is half full."""
    free = {"cuda:0": 79 << 30, "cuda:1": 79 << 30, "cuda:2": 40 << 30, "cuda:3": 79 << 30}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free[device], 80 << 30))
    share = 141_000_000_000 // 4
    assert kv_budget(list(free), share) == int(0.9 * ((40 << 30) - share))


def test_ranks_on_cpus_share_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.runtime.memory.free_bytes", lambda: 100 * MIB)
    assert kv_budget(["cpu"]) == 25 * MIB
    assert kv_budget(["cpu"] * 3, 20 * MIB) == 10 * MIB // 3


def test_a_group_says_what_each_of_its_ranks_takes() -> None:
    assert str(MemoryUse(0, MIB, MIB, 9, MIB).of_each(3)).startswith("memory of each of 3 ranks: weights 1 MiB")


@pytest.mark.parametrize(("asked", "ranks", "less"), [(103, 1, False), (104, 1, True), (207, 2, False), (208, 2, True)])
def test_kv_that_is_less_than_was_asked_for_says_why(asked: int, ranks: int, less: bool) -> None:
    """Pages are 4 MiB: what does not fill one is not worth a word."""
    said = str(MemoryUse(0, 0, 100 * MIB, 25 * TILE, 0, ranks, 16, asked * MIB))
    assert said.endswith(f"; of the {asked} MiB asked for, whole contexts of so many sequences need no more") is less


def test_what_is_said_at_start() -> None:
    said = str(MemoryUse(100 * MIB, 200 * MIB, 300 * MIB, 38_400, 50 * MIB, sequences=16))
    assert said == (
        "memory: weights 200 MiB, workspace 50 MiB, beside 100 MiB of program; "
        "KV up to 300 MiB (38,400 tokens), 16 sequences in a pass"
    )
    assert resident_bytes() > 10 * MIB


def test_more_than_is_free_is_refused_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.runtime.memory.free_bytes", lambda: 8 << 30)
    check_room(8 << 30)
    with pytest.raises(ModelRefused, match=r"61,440 MiB of memory are asked for, and 8,192 MiB are free \(--kv-memory"):
        check_room(60 << 30)


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_bound_counts_and_files_it_has_read_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """4 MiB of 10 are used, 3 of them by files."""
    monkeypatch.setattr("forerun.runtime.memory.CGROUPS", tmp_path)
    before = free_bytes()
    assert before > 9 * MIB
    folder, prefix = (tmp_path / "memory", "total_") if version == 1 else (tmp_path, "")
    limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    folder.mkdir(exist_ok=True)
    (folder / f"memory.{limit}").write_text(f"{10 * MIB}\n")
    (folder / f"memory.{used}").write_text(f"{4 * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}active_file {MIB}\n{prefix}inactive_file {2 * MIB}\n")
    assert free_bytes() == 9 * MIB
    (folder / f"memory.{limit}").write_text("max\n")
    assert free_bytes() > 9 * MIB

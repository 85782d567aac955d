"""Memory of a worker: how much of it KV may take, and what is said of it at start."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.core.errors import ModelRefused
from forerun.core.pages import TILE

log = logging.getLogger(__name__)

SHARE = 0.25
"""Of the memory that is free once the weights are there, what KV may take unless told: other workers live here too."""

GPU_SHARE = 0.9
"""The same on a GPU, which a worker has to itself; the rest is workspace."""

MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")

KEPT = 1024 * MIB
"""Freed memory that a worker keeps: more than the largest pass needs."""
KEPT_PIECE = 256 * MIB
"""A larger piece is mapped by itself and handed back at once: weights."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes, as stated at start. KV is a bound: what is not used is not touched."""

    baseline: int  # resident before the model was loaded
    weights: int
    kv: int
    kv_tokens: int
    workspace: int  # what the largest passes needed
    ranks: int = 1  # processes that take as much each
    sequences: int = 1  # that are computed together
    asked: int | None = None  # for KV of all ranks; None: nothing was said

    def of_each(self, ranks: int) -> MemoryUse:
        return replace(self, ranks=ranks)

    def __str__(self) -> str:
        each = f" of each of {self.ranks} ranks" if self.ranks > 1 else ""
        return (
            f"memory{each}: weights {self.weights / MIB:.0f} MiB, workspace {self.workspace / MIB:.0f} MiB, "
            f"beside {self.baseline / MIB:.0f} MiB of program; KV up to {self.kv / MIB:.0f} MiB"
            f"{each} ({self.kv_tokens:,} tokens), {self.sequences} sequences in a pass{self._less}"
        )

    @property
    def _less(self) -> str:
        """Why KV is smaller than was asked for, by a page or more."""
        if self.asked is None or self.asked // self.ranks - self.kv < self.kv * TILE // self.kv_tokens:
            return ""
        return f"; of the {self.asked / MIB:.0f} MiB asked for, whole contexts of so many sequences need no more"


def kv_pages(page_bytes: int, sequences: int, context_limit: int, budget: int) -> int:
    """Pages that `budget` bytes hold, but no more than can ever be used. Raises ModelRefused: not even two fit."""
    most = sequences * (-(-context_limit // TILE) + 1)
    pages = min(budget // page_bytes, most)
    if pages < 2:
        raise ModelRefused(
            f"KV needs at least {2 * page_bytes / MIB:.1f} MiB, two pages of {TILE} tokens; "
            f"there are {budget / MIB:.1f} MiB for it (--kv-memory)"
        )
    return pages


def kv_budget(devices: Sequence[str], claimed: int = 0) -> int:
    """Bytes that the KV of each rank may take unless told: a share of what is free once its weights are there.

    devices: of the ranks; those on CPUs share a machine. claimed: bytes of a rank's weights, still to be loaded.
    """
    if devices[0].startswith("cuda"):
        import torch

        return int(GPU_SHARE * min(max(0, torch.cuda.mem_get_info(device)[0] - claimed) for device in devices))
    return int(SHARE * max(0, free_bytes() - len(devices) * claimed)) // len(devices)


def check_room(claimed: int) -> None:
    """Raises ModelRefused for more than is free: it would end the process once it is used, not before."""
    if claimed > (free := free_bytes()):
        raise ModelRefused(
            f"{claimed / MIB:,.0f} MiB of memory are asked for, and {free / MIB:,.0f} MiB are free "
            "(--kv-memory, --max-sequences)"
        )


def free_bytes() -> int:
    """What this process may still take: of the machine, and of its control group if that is bounded."""
    free = _meminfo().get("MemAvailable", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    for folder, limit, used, files in (
        (CGROUPS, "memory.max", "memory.current", ("active_file", "inactive_file")),
        (
            CGROUPS / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_active_file", "total_inactive_file"),
        ),
    ):
        try:
            bound = int((folder / limit).read_text()) - int((folder / used).read_text())
            told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
        # Files that were read, weights above all, give way when memory is needed.
        free = min(free, max(bound + sum(int(told.get(name, 0)) for name in files), 0))
    return free


def resident_bytes() -> int:
    """Of this process; 0 where that is not told."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def keep_workspace() -> None:
    """What a pass frees stays for the next one; to be called before a process starts threads.

    The C library would hand large pieces back, and the system clear every page of them again in the next layer:
    with long prompts that took as long as the products. Threads share one arena, since an arena of a thread's own
    is handed back whatever was asked for. Where the library does not know these options it is said.
    """
    options = (("arenas", -8, 1), ("mmap threshold", -3, KEPT_PIECE), ("trim threshold", -1, KEPT))  # malloc.h
    mallopt = _of_libc("mallopt")
    refused = [name for name, option, value in options if mallopt is None or mallopt(option, value) != 1]
    if refused:
        log.warning("the C library takes no %s: long prompts are slower", ", ".join(refused))


def settle() -> None:
    """For a process that has all it serves with: what is there now is no garbage, and is not searched for it again.

    A full search of some million objects is a pause of several passes.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """What was freed while loading goes back to the system, where the C library knows how."""
    if (trim := _of_libc("malloc_trim")) is not None:
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}

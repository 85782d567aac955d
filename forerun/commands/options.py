"""Options that several commands take, and how their texts become values."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import Annotated

import typer

from forerun.core.errors import InvalidRequest

UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


class Precision(StrEnum):
    """What --dtype takes."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Device(StrEnum):
    """What --device takes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Model = Annotated[str, typer.Option(help="Folder in transformers' form, hub id, demo, or sim:pass=20ms,accept=0.8,...")]
Dtype = Annotated[Precision, typer.Option(help="Of weights and products; attention is float32.")]
KvMemory = Annotated[
    str, typer.Option("--kv-memory", help="Memory of the target's KV, as 2GiB or 512MiB. auto: from what is free.")
]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor parallelism: processes that share the target's weights.")]
Lookahead = Annotated[int, typer.Option(min=0, max=64, help="Nodes checked in a pass, unless a request says.")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Hint sources: distilled, early_exit, a draft's or model's folder, sim:..., ngram, none; joined by commas."
        " Default: distilled where a draft ships for the target, else early_exit; and ngram.",
        show_default=False,
    ),
]
Chains = Annotated[bool, typer.Option("--chains", help="Check the likeliest line of a tree alone.")]
MaxSequences = Annotated[int, typer.Option(min=1, help="Sequences in a pass of the target; more wait.")]
TargetCores = Annotated[str, typer.Option(help="Pin target workers to these cores, as 0,1. Default: all.")]
DraftCores = Annotated[str, typer.Option(help="Pin the draft worker to these cores. Default: all.")]
Cores = Annotated[str, typer.Option(help="Pin this process to these cores, as 0,1. Default: all.")]
OnDevice = Annotated[Device, typer.Option("--device", help="auto: a GPU if torch finds one.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers of the early_exit draft.")]


def parse_size(text: str) -> int | None:
    """Bytes; None for `auto`. Raises InvalidRequest."""
    if text.strip().lower() == "auto":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    size = float(found[1]) * UNITS[found[2]] if found and found[2] in UNITS else 0.0
    if not 1024 <= size < 2**60:
        raise InvalidRequest(
            f"a size is auto, or a number with one of KiB, MiB, GiB, TiB, at least 1 KiB, not {text!r}"
        )
    return int(size)


def parse_cores(text: str) -> tuple[int, ...]:
    """Core numbers, of those this process may use; none for an empty text. Raises InvalidRequest."""
    if not text:
        return ()
    parts = [part.strip() for part in text.split(",")]
    usable = os.sched_getaffinity(0)
    if not all(part.isdecimal() for part in parts) or not {int(part) for part in parts} <= usable:
        raise InvalidRequest(f"cores are numbers joined by commas, of {sorted(usable)} here, not {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))

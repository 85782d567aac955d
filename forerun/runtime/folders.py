"""What a model folder holds, told from file headers before anything is loaded.

Weights are safetensors only. Pickles run whatever code they hold when they are read, so they never are.
Here a cut download, a missing shard or quantised weights end the start in one clear line, in milliseconds for
hundreds of gigabytes. It knows files, neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.errors import ModelRefused

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
WIDTHS = FLOATS | {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
HEADER_LIMIT = 100_000_000
"""Bytes; the same bound as safetensors' own."""

CONVERT = (
    "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('OLD').save_pretrained('NEW')\""
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A weight as the header of its file describes it."""

    file: Path
    dtype: str  # safetensors' name: F32, BF16, ...
    shape: tuple[int, ...]


def weight_files(folder: str) -> list[Path]:
    """The safetensors files that hold the weights, in order of their names. They need not be there."""
    home = Path(folder)
    if (home / INDEX).is_file():
        return [home / name for name in sorted(set(_weight_map(home).values()))]
    if (home / SINGLE).is_file():
        return [home / SINGLE]
    if found := sorted(home.glob("*.safetensors")):
        return found
    if pickles := sorted(path.name for pattern in PICKLES for path in home.glob(pattern)):
        raise ModelRefused(
            f"{folder} holds pickle weights only ({pickles[0]}); reading a pickle runs the code in it, so none is ever "
            f"read. Convert it to safetensors where you trust it: {CONVERT}"
        )
    raise ModelRefused(f"{folder} holds no weights: there are no .safetensors files")


def read_entries(folder: str) -> dict[str, Entry]:
    """Every weight by name. Raises ModelRefused for files that are missing, cut, unreadable or quantised."""
    files = weight_files(folder)
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelRefused(
            f"{folder} lacks {missing[0]!r}, one of {len(missing)} of {len(files)} files of weights that {INDEX} names "
            "and that are not there"
        )
    entries: dict[str, Entry] = {}
    for path in files:
        entries |= _read_header(path)
    if (Path(folder) / INDEX).is_file():
        for name, file in _weight_map(Path(folder)).items():
            if name not in entries or entries[name].file.name != file:
                raise ModelRefused(f"{folder}/{file} holds no {name!r}, though {INDEX} says so")
    for name, entry in entries.items():
        if name.endswith("weight") and entry.dtype not in FLOATS:
            raise ModelRefused(
                f"{name!r} in {entry.file} is of dtype {entry.dtype}; weights of {', '.join(FLOATS)} are served, "
                "quantised ones are not"
            )
    return entries


def check_shapes(folder: str, entries: Mapping[str, Entry], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelRefused for a weight whose shape is not the one that the configuration asks for."""
    for name, shape in wanted.items():
        entry = entries.get(name)
        if entry is None:
            continue
        if entry.shape != shape:
            raise ModelRefused(
                f"{name!r} in {entry.file} is of shape {list(entry.shape)}; {folder}/config.json asks for {list(shape)}"
            )
        if entry.dtype not in FLOATS:
            raise ModelRefused(f"{name!r} in {entry.file} is of dtype {entry.dtype}, not one of {', '.join(FLOATS)}")


def _weight_map(home: Path) -> dict[str, str]:
    try:
        found: Any = json.loads((home / INDEX).read_bytes())["weight_map"]
        named = {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelRefused(f"{home / INDEX} is no index of weights: {type(error).__name__}: {error}") from error
    for file in named.values():
        if Path(file).name != file:
            raise ModelRefused(f"{home / INDEX} names {file!r}, which is no file of this folder")
    return named


def _read_header(path: Path) -> dict[str, Entry]:
    """8 bytes of length, that many bytes of JSON, then the weights without gaps."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or (length <= HEADER_LIMIT and size < 8 + length):
            raise ModelRefused(
                f"{path} is cut off: {size} bytes, less than its header of {8 + length if size >= 8 else 8}"
            )
        if length > HEADER_LIMIT:
            raise ModelRefused(f"{path} is no safetensors file: its header would be {length} bytes long")
        raw = file.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        entries, end = {}, 0
        for name, described in header.items():
            begin, until = map(int, described["data_offsets"])
            entry = entries[name] = Entry(path, str(described["dtype"]), tuple(map(int, described["shape"])))
            held = math.prod(entry.shape) * WIDTHS.get(entry.dtype, 0)
            if begin < 0 or until < begin or (held and until - begin != held):
                raise ValueError(f"{name!r} would lie in bytes {begin} to {until}")
            end = max(end, until)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(f"{path} has no readable header: {type(error).__name__}: {error}") from error
    if size != 8 + length + end:
        cut = "is cut off" if size < 8 + length + end else "is longer than its header says"
        raise ModelRefused(f"{path} {cut}: {size} bytes, and {8 + length + end} are expected")
    return entries

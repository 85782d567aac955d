"""What a model folder holds, told from file headers before anything is loaded.

Weights are safetensors only. Pickles run whatever code they hold when they are read, so they never are.
Here a cut download, a missing shard or quantised weights end the start in one clear line, in milliseconds for
hundreds of gigabytes. It knows files, neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.errors import ModelRefused

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
WIDTHS = FLOATS | {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
HEADER_LIMIT = 100_000_000
"""Bytes; the same bound as safetensors' own."""

LAYER = re.compile(r"(.*?\b)(\d+)\.")
"""The first number in a weight's name is its layer's."""

LFS_POINTER = b"version https://git-lfs"

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
    """The safetensors files that hold the weights, in order of their names. They need not be there.

    An index and a model.safetensors that it does not name are refused: transformers would read the latter alone.
    """
    home = Path(folder)
    if (home / INDEX).is_file():
        named = sorted(set(_weight_map(home).values()))
        if (home / SINGLE).is_file() and (others := [name for name in named if name != SINGLE]):
            raise ModelRefused(
                f"{folder} holds weights twice: remove {INDEX} and what it names ({_told(others)}) to serve {SINGLE}, "
                f"or remove {SINGLE} to serve those"
            )
        return [home / name for name in named]
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


def check_present(folder: str) -> None:
    """Raises ModelRefused for weights that are named and are not there."""
    files = weight_files(folder)
    if missing := [path.name for path in files if not path.is_file()]:
        named = f", one of {len(missing)} of {len(files)} files of weights that {INDEX} names and that are not there"
        raise ModelRefused(f"{folder} lacks {missing[0]!r}{named if len(files) > 1 else ': it leads nowhere'}")


def read_entries(folder: str) -> dict[str, Entry]:
    """Every weight by name. Raises ModelRefused for files that are missing, cut, unreadable or quantised."""
    if (Path(folder) / ADAPTER).is_file():
        raise ModelRefused(
            f"{folder} holds an adapter ({ADAPTER}), which would be left out without a word; merge it into the model's "
            "weights and serve those"
        )
    check_present(folder)
    files = weight_files(folder)
    entries: dict[str, Entry] = {}
    for path in files:
        entries |= _read_header(path)
    if (Path(folder) / INDEX).is_file():
        for name, file in _weight_map(Path(folder)).items():
            if name not in entries or entries[name].file.name != file:
                raise ModelRefused(f"{folder}/{file} holds no {name!r}, though {INDEX} says so")
        if not isinstance(json.loads((Path(folder) / INDEX).read_bytes()).get("metadata"), dict):
            raise ModelRefused(f'{folder}/{INDEX} lacks "metadata", which transformers wants; an empty {{}} would do')
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


def check_depth(folder: str, entries: Iterable[str], wanted: Iterable[str], ignored: Iterable[str]) -> None:
    """Raises ModelRefused for weights of layers beyond the last one that the configuration asks for.

    wanted: names of the whole model's weights, not of an early exit's. ignored: patterns of names that its code leaves.
    """
    depths: dict[str, int] = {}
    for name in wanted:
        for known in (name, name.partition(".")[2]):  # files may lack the name of the inner model
            if found := LAYER.match(known):
                depths[found[1]] = max(depths.get(found[1], 0), int(found[2]) + 1)
    beyond = [
        (int(found[2]) + 1, depths[found[1]], name)
        for name in entries
        if (found := LAYER.match(name)) and int(found[2]) >= depths.get(found[1], math.inf)
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    if beyond:
        held, asked, name = max(beyond)
        raise ModelRefused(
            f"num_hidden_layers is {asked} in {folder}/config.json, and the weights are those of {held} layers "
            f"({name!r}): write {held} there, or remove the weights of the others"
        )


def header_bytes(path: Path) -> int:
    """Length of the header of a safetensors file. Raises ModelRefused for a file that is none, or cut off in it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        began = file.read(len(LFS_POINTER))
    if began == LFS_POINTER:
        raise ModelRefused(f"{path} is a git-lfs pointer, not the weights; `git lfs pull` in its repository gets them")
    length = int.from_bytes(began[:8], "little")
    if size < 8 or (length <= HEADER_LIMIT and size < 8 + length):
        raise ModelRefused(f"{path} is cut off: {size} bytes, less than its header of {8 + length if size >= 8 else 8}")
    if length > HEADER_LIMIT:
        raise ModelRefused(f"{path} is no safetensors file: its header would be {length} bytes long")
    return length


def _told(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, {len(names)} files"


def _weight_map(home: Path) -> dict[str, str]:
    try:
        found: Any = json.loads((home / INDEX).read_bytes())["weight_map"]
        named = {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelRefused(f"{home / INDEX} is no index of weights: {type(error).__name__}: {error}") from error
    if not named:
        raise ModelRefused(f"{home / INDEX} names no file: its weight_map is empty; without it {SINGLE} would be read")
    for file in named.values():
        if Path(file).name != file:
            raise ModelRefused(f"{home / INDEX} names {file!r}, which is no file of this folder")
    return named


def _read_header(path: Path) -> dict[str, Entry]:
    """8 bytes of length, that many bytes of JSON, then the weights without gaps."""
    size, length = path.stat().st_size, header_bytes(path)
    with path.open("rb") as file:
        file.seek(8)
        raw = file.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        entries, ranges = {}, []
        for name, described in header.items():
            begin, until = map(int, described["data_offsets"])
            entry = entries[name] = Entry(path, str(described["dtype"]), tuple(map(int, described["shape"])))
            held = math.prod(entry.shape) * WIDTHS.get(entry.dtype, 0)
            if begin < 0 or until < begin or (held and until - begin != held):
                raise ValueError(f"{name!r} would lie in bytes {begin} to {until}")
            ranges.append((begin, until, name))
        end = 0
        for begin, until, name in sorted(ranges):
            if begin != end:
                raise ValueError(f"{name!r} would lie in bytes {begin} to {until}; the weight before it ends at {end}")
            end = until
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelRefused(f"{path} has no readable header: {type(error).__name__}: {error}") from error
    if size != 8 + length + end:
        cut = "is cut off" if size < 8 + length + end else "is longer than its header says"
        raise ModelRefused(f"{path} {cut}: {size} bytes, and {8 + length + end} are expected")
    return entries

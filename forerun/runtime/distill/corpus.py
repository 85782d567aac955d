"""Conversations on disk: a folder of shards, each whole or not there, each a function of what `about.json` says.

So writing goes on where it stopped, several drafts can be made from the same data, and other data are never mixed in.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from forerun.core.errors import InvalidRequest, ModelRefused
from forerun.runtime.distill.openings import Openings, documents_of
from forerun.runtime.distill.turns import Turns
from forerun.runtime.distill.writing import KEPT, Conversations, Kind, write

ABOUT = "about.json"
FORMAT = 1
HELD_OUT = 16
"""Of so many rows of a shard the last one is never trained on."""


@dataclass(frozen=True, slots=True)
class DataPlan:
    """What decides every token of a shard, beside its number (through its documents, those of the shards before)."""

    target_revision: str
    dtype: str  # of the target
    seed: int
    temperatures: tuple[float, ...]
    rows: int  # conversations written at once: those of a shard
    length: int  # tokens of each
    openings: str = ""  # digest of how questions begin

    @property
    def shard_tokens(self) -> int:
        return self.rows * self.length

    def shards(self, tokens: int) -> int:
        """How many hold at least so many tokens."""
        return -(-tokens // self.shard_tokens)

    def fits(self, folder: Path) -> None:
        """Claims `folder` for this plan. Raises InvalidRequest if it holds data of another one."""
        wanted = self._stated()
        path = folder / ABOUT
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _replace(path, lambda partial: partial.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8"))
            return
        _compare(folder, wanted, "ask for the former, or name another folder for the data")

    def _stated(self) -> dict[str, Any]:
        """As it is in about.json."""
        stated: dict[str, Any] = json.loads(json.dumps(_COMMON | asdict(self)))
        return stated

    def goes_with(self, folder: Path) -> int:
        """How many shards `folder` holds, which may differ in how they were asked for, not in what a row is.

        Raises InvalidRequest: none, or of another target, dtype or length.
        """
        if not (folder / ABOUT).exists():
            raise InvalidRequest(f"{folder} holds no data; only the first folder named is written to")
        _compare(folder, _COMMON | {name: getattr(self, name) for name in ROW}, "they cannot be trained on together")
        found = _read_about(folder)
        if all(found.get(name) == value for name, value in self._stated().items()):
            raise InvalidRequest(f"{folder} is made with the same seed and options as the first: the same data again")
        count = next(number for number in itertools.count() if not shard(folder, number).exists())
        if not count:
            raise InvalidRequest(f"{folder} holds no shard yet")
        return count


_COMMON = {"format": FORMAT, "kept": KEPT}
_BEFORE = {"openings": ""}
"""What data were made with that do not say."""

ROW = ("target_revision", "dtype", "length")
"""Of a plan, what rows that are trained on together share."""


def _compare(folder: Path, wanted: dict[str, Any], advice: str) -> None:
    found = _read_about(folder)
    for name, value in wanted.items():
        if found.get(name) != value:
            raise InvalidRequest(
                f"{folder} holds data made with {name} {found.get(name)!r}, and {value!r} was asked for; {advice}"
            )


def _read_about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        return _BEFORE | dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}; name another folder for the data") from error


def shard(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


def write_shards(
    target: torch.nn.Module,
    turns: Turns,
    vocab_size: int,
    plan: DataPlan,
    count: int,
    folder: Path,
    told: Callable[[int], None],
    openings: Openings | None = None,
) -> None:
    """Write those of the first `count` shards that are not there. told: hears of tokens as they come to be there.

    openings: those whose digest the plan has. Documents within them are answers of the shard before that are trained
    on: what is held out stands nowhere else.
    """
    plan.fits(folder)
    room = plan.length - len(turns.opening) - len(turns.to_answer)
    for number in range(count):
        path = shard(folder, number)
        if path.exists():
            told(plan.shard_tokens)
            continue
        seed = (plan.seed, number)
        documents = documents_of(_parted(_read(shard(folder, number - 1)))[0]) if number and openings else []
        begun = openings.begin(plan.rows, room, documents, seed) if openings else []
        made = write(target, turns, vocab_size, plan.rows, plan.length, plan.temperatures, seed, told, begun)
        small = np.uint16 if vocab_size <= 1 << 16 else np.int32
        arrays: dict[str, NDArray[Any]] = {
            "tokens": made.tokens.astype(small),
            "kinds": made.kinds,
            "temperatures": made.temperatures,
            "top_ids": made.top_ids.astype(small),
            "top_shares": made.top_shares,
        }
        _replace(path, lambda partial, arrays=arrays: save_file(arrays, partial))  # type: ignore[misc]


def read_shards(*folders: tuple[Path, int]) -> tuple[Conversations, Conversations]:
    """(to train on, held out) of the first so many shards of each, all in memory: about 140 bytes a token."""
    learnt: list[Conversations] = []
    kept: list[Conversations] = []
    for folder, count in folders:
        for number in range(count):
            for parts, part in zip((learnt, kept), _parted(_read(shard(folder, number))), strict=True):
                parts.append(part)
    return _joined(learnt), _joined(kept)


def _parted(data: Conversations) -> tuple[Conversations, Conversations]:
    """(to train on, held out) of a shard."""
    held = np.arange(len(data)) % HELD_OUT == min(len(data), HELD_OUT) - 1
    return data.rows(np.flatnonzero(~held)), data.rows(np.flatnonzero(held))


def frequent(data: Conversations, vocab_size: int, count: int, always: tuple[int, ...]) -> NDArray[np.int64]:
    """[count] ids, ascending: `always`, and those that the target is likeliest to say, over all it was asked.

    Expected counts: of what was drawn alone, rare ids would be a matter of luck.
    """
    counts = np.zeros(vocab_size)
    for kinds, ids, shares in zip(data.kinds, data.top_ids, data.top_shares, strict=True):
        spoken = kinds != Kind.TEMPLATE
        counts += np.bincount(ids[spoken].ravel(), shares[spoken].ravel().astype(float), vocab_size)
    counts[list(always)] = np.inf
    order = np.argsort(-counts, kind="stable")[: min(count, vocab_size)]
    return np.sort(order).astype(np.int64)


def _joined(parts: list[Conversations]) -> Conversations:
    return Conversations(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.kinds for part in parts]),
        np.concatenate([part.temperatures for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_shares for part in parts]),
    )


def _read(path: Path) -> Conversations:
    try:
        arrays = load_file(path)
        return Conversations(
            arrays["tokens"], arrays["kinds"], arrays["temperatures"], arrays["top_ids"], arrays["top_shares"]
        )
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelRefused(
            f"{path} is no shard of data: {type(error).__name__}: {error}; delete it, and it is written again"
        ) from error


def _replace(path: Path, fill: Callable[[Path], Any]) -> None:
    """A file that is whole or not there."""
    partial = path.with_suffix(".partial")
    fill(partial)
    partial.rename(path)

"""draft.json: what a draft that `forerun distill` made says of itself, and where those are that ship with Forerun.

Needs neither torch nor transformers, so that whoever starts a draft can find it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.core.errors import ModelRefused
from forerun.runtime.distill import DRAFT
from forerun.runtime.models import revision

FORMAT = 1
SHIPPED = Path(__file__).parents[2] / "drafts"
"""A folder for each draft that is part of this package."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What draft.json says."""

    target: str  # as it was named
    target_revision: str
    layers: tuple[int, ...]  # of the target, ascending
    head: int  # ids
    evaluation: Mapping[str, Any] = field(default_factory=dict)


def is_draft(folder: str) -> bool:
    """Whether `forerun distill` wrote it, and finished."""
    return os.path.isfile(os.path.join(folder, DRAFT))  # False for sim:... too, however long


def shipped(target_folder: str) -> str | None:
    """Folder of the draft that ships for this very revision of a target, wherever that lies; None: there is none."""
    folders = sorted(str(path.parent) for path in SHIPPED.glob(f"*/{DRAFT}"))
    if not folders or not Path(target_folder).is_dir():  # a simulated one lies nowhere
        return None
    wanted = revision(target_folder)
    return next((folder for folder in folders if read_draft(folder).target_revision == wanted), None)


def shipped_draft(target_folder: str) -> str:
    """As `shipped`; raises ModelRefused if there is none, saying how to make one."""
    found = shipped(target_folder)
    if found is None:
        raise ModelRefused(
            f"no draft ships for {target_folder}; make one with `forerun distill --target ... --out FOLDER` and name "
            "that folder, or choose early_exit or ngram"
        )
    return found


def write_draft(folder: Path, draft: Draft) -> None:
    described = {
        "format": FORMAT,
        "target": draft.target,
        "target_revision": draft.target_revision,
        "layers": list(draft.layers),
        "head": draft.head,
        "evaluation": dict(draft.evaluation),
    }
    (folder / DRAFT).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def read_draft(folder: str) -> Draft:
    """Raises ModelRefused for a folder that `forerun distill` did not write, or did not finish."""
    path = Path(folder) / DRAFT
    if not path.is_file():
        raise ModelRefused(f"{folder} is no draft: it holds no {DRAFT}, which `forerun distill` writes last")
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        draft = Draft(
            str(told["target"]),
            str(told["target_revision"]),
            tuple(int(layer) for layer in told["layers"]),
            int(told["head"]),
            dict(told["evaluation"]),
        )
        number = told["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelRefused(f"{path} describes no draft: {type(error).__name__}: {error}") from error
    if number != FORMAT:
        raise ModelRefused(f"{path} is of format {number!r}; this version reads format {FORMAT}")
    if draft.head < 2 or not draft.layers:
        raise ModelRefused(
            f"{path} states {draft.head} ids and {len(draft.layers)} layers; at least 2 and 1 are needed"
        )
    return draft

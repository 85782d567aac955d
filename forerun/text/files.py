"""The small files of a model: where they are and what is in them.

Owns finding them (a folder, or the hub) and reading JSON. Does not know what the keys mean to a
tokenizer or an engine, and never fetches weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.core.errors import ModelRefused

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
)


def locate(model: str) -> Path:
    """The folder that holds the files of `model`; a hub id is fetched into the hub's cache.

    Raises:
        ModelRefused: no such folder, and the hub does not give it either.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelRefused(f"model {model!r} is not a folder on this machine")
    from huggingface_hub import snapshot_download  # not needed, so not loaded, for folders

    try:
        return Path(snapshot_download(model, allow_patterns=list(NAMES)))
    except Exception as error:  # the hub's client raises its own, httpx's and OS errors
        raise ModelRefused(
            f"model {model!r} is not a folder here, and fetching {', '.join(NAMES)} of it "
            f"from the hub failed: {type(error).__name__}: {error}"
        ) from error


def read_json(folder: Path, name: str, *, required: bool = False) -> dict[str, Any]:
    """The object in a file; empty if the file is missing and not `required`."""
    path = folder / name
    if not path.is_file():
        if required:
            raise ModelRefused(f"{path} is missing; a model folder needs tokenizer.json and config.json")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelRefused(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{path} must hold an object, not {type(content).__name__}")
    return content

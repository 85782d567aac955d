"""Files that are no weights: refused in one line, by whoever reads them first."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.core.errors import ModelRefused
from forerun.runtime.folders import read_entries
from forerun.runtime.models import revision

WRONG = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n": "is a git-lfs pointer",
    b"<!DOCTYPE html><html>not found</html>": "is no safetensors file",
    b"\x00\x01": "is cut off: 2 bytes",
}


@pytest.mark.parametrize("content", WRONG)
@pytest.mark.parametrize("read", [revision, read_entries])
def test_what_is_no_weights_is_named(tmp_path: Path, read: object, content: bytes) -> None:
    """The coordinator takes the revision, a worker the entries."""
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert callable(read)
    with pytest.raises(ModelRefused, match=f"^{path} {WRONG[content]}"):
        read(str(tmp_path))

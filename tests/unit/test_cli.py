"""The command line before it is one: Ctrl-C while it is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys

class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
import forerun.cli
"""


@pytest.mark.parametrize("name", ["typer", "grpc"])
def test_an_interrupted_import_ends_quietly(name: str) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(name=name)], capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, b"forerun: interrupted\n")

"""Who may import whom, and what is never imported by whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROLES = ("coordinator", "draft_worker", "target_worker")
TORCH = {"torch", "transformers", "safetensors"}


def imports(folder: str) -> Iterator[tuple[Path, str]]:
    """(file, module) of every import statement, also those inside functions."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield path, node.module


@pytest.mark.parametrize("role", ROLES)
def test_roles_meet_only_over_grpc(role: str) -> None:
    found = list(imports(role))
    assert found
    assert [(path.name, name) for path, name in found if name.split(".")[0] in set(ROLES) - {role}] == []


def test_the_shared_package_imports_no_role() -> None:
    """Except the commands that start one."""
    wrong = [
        (path.name, name)
        for path, name in imports("forerun")
        if name.split(".")[0] in ROLES and path.name != "roles.py"
    ]
    assert wrong == []


def test_torch_lives_in_the_runtime() -> None:
    """`bench --compare transformers` is the comparison itself."""
    for folder in ("forerun", *ROLES):
        wrong = [
            (path.name, name)
            for path, name in imports(folder)
            if name.split(".")[0] in TORCH and "runtime" not in path.parts and path.name != "reference.py"
        ]
        assert wrong == []


def test_files_stay_readable() -> None:
    """One noun per file; a file that grows past this has two."""
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("forerun", *ROLES)
        for path in (ROOT / folder).rglob("*.py")
        if "v1" not in path.parts and (lines := len(path.read_text().splitlines())) > 400
    }
    assert long == {}

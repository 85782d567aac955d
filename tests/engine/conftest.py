"""The tiny target that drafts are made of; a file that wants another defines its own."""

from __future__ import annotations

from typing import Any

import pytest
from models import tiny_model

from forerun.runtime.distill.wide import WIDE
from forerun.runtime.models import load_causal_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("target"), layers=3, eos=1)


@pytest.fixture(scope="module")
def target(folder: str) -> Any:
    return load_causal_lm(folder, "float32", attention=WIDE)

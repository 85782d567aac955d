"""The stages of run.sh that need a GPU and no large model."""

from __future__ import annotations

import pytest
import torch
from gpu import stages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("stage", [stages.attention, stages.model], ids=lambda stage: stage.__name__)
def test_stage(stage: object) -> None:
    report = stages.Report("test")
    stage(report)  # type: ignore[operator]
    assert [check for check in report.checks if not check["passed"]] == []

"""A Generation service without models, and its address."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rpc.fake_generation import FakeGeneration, serving


@pytest.fixture
def fake() -> FakeGeneration:
    return FakeGeneration()


@pytest.fixture
def addr(fake: FakeGeneration) -> Iterator[str]:
    with serving(fake) as address:
        yield address

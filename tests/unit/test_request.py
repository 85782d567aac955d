"""What refuses a request: here only the words of it; what is refused is tested with the services."""

from __future__ import annotations

import pytest

from coordinator.request import Limits, check
from forerun.client import build_request
from forerun.core.errors import InvalidRequest
from forerun.text import TextModel

TEXT = TextModel.load("sim:context=8192")


@pytest.mark.parametrize(
    ("limit", "named"),
    [
        (8192, "at most 8191 fit the context limit of 8192 tokens"),
        (
            639,
            r"at most 638 fit the limit of 639 tokens that the target's KV memory sets \(--kv-memory; .* takes 8192\)",
        ),
    ],
)
def test_a_long_prompt_is_told_what_limits_it(limit: int, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        check(build_request(token_ids=[1] * 9000), TEXT, ["m"], Limits(limit, 100, (), 4, ()))

"""The names every role uses have the numbers of the wire."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import pytest

from forerun.core.params import Finish, Source, Verification
from forerun.v1 import common_pb2, target_pb2


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Source, common_pb2.Source),
        (Verification, common_pb2.Verification),
        (Finish, target_pb2.Finish),
    ],
)
def test_numbers_are_those_of_the_wire(ours: type[IntEnum], theirs: Any) -> None:
    prefix = ours.__name__.upper() + "_"
    wire = dict(theirs.items())
    assert wire.pop(f"{prefix}UNSPECIFIED") == 0
    assert {f"{prefix}{member.name}": member.value for member in ours} == wire


@pytest.mark.parametrize("source", list(Source))
def test_source_labels_parse(source: Source) -> None:
    assert Source.parse(source.label) is source
    assert source.label == source.name.lower()


@pytest.mark.parametrize("label", ["", "MODEL", "medusa"])
def test_an_unknown_source_names_the_known_ones(label: str) -> None:
    with pytest.raises(KeyError, match="model, early_exit, ngram, distilled"):
        Source.parse(label)

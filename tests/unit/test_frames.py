"""Messages share frames, in order, up to a size."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.rpc import frames
from forerun.rpc.frames import packed
from forerun.v1 import attach_pb2, common_pb2, draft_pb2, target_pb2


def emit(number: int, tokens: int = 1) -> target_pb2.TargetEvent:
    seq = common_pb2.Seq(request_id=f"r{number}")
    return target_pb2.TargetEvent(emit=target_pb2.Emit(seq=seq, tokens=[1] * tokens))


def as_it_is(part: tuple[str, Any]) -> tuple[str, Any]:
    return part


def test_what_waits_goes_in_one_frame_in_its_order() -> None:
    gap = draft_pb2.DraftEvent(gap=draft_pb2.Gap(have_len=3))
    (frame,) = packed(attach_pb2.WorkerFrame, [("target", emit(1)), ("draft", gap), ("target", emit(2))], as_it_is)
    assert [event.emit.seq.request_id for event in frame.target] == ["r1", "r2"]
    assert list(frame.draft) == [gap]


def test_a_frame_has_a_bound_and_a_larger_message_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MOST_FRAME_BYTES", 100)
    parts = [("target", emit(number, tokens)) for number, tokens in enumerate((1, 1, 500, 1, 1))]
    made = list(packed(attach_pb2.WorkerFrame, parts, as_it_is))
    assert [[event.emit.seq.request_id for event in frame.target] for frame in made] == [
        ["r0", "r1"],
        ["r2"],
        ["r3", "r4"],
    ]


def test_nothing_makes_no_frame() -> None:
    assert list(packed(attach_pb2.WorkerFrame, [], as_it_is)) == []


def test_an_empty_message_is_sent_too() -> None:
    (frame,) = packed(attach_pb2.WorkerFrame, [("target", target_pb2.TargetEvent())], as_it_is)
    assert len(frame.target) == 1


def test_what_the_wire_cannot_hold_is_left_out_alone() -> None:
    (frame,) = packed(attach_pb2.WorkerFrame, [1, -1, 2], lambda number: ("target", _emit_at(number)))
    assert [event.emit.base_len for event in frame.target] == [1, 2]


def _emit_at(base_len: int) -> target_pb2.TargetEvent:
    return target_pb2.TargetEvent(emit=target_pb2.Emit(base_len=base_len))

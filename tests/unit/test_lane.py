"""One thread computes: in order, the same one from first to last, and it hands errors back."""

from __future__ import annotations

import threading

import pytest

from forerun.rpc.lane import Lane


def test_everything_runs_in_one_thread_in_order() -> None:
    lane, order = Lane("engine"), []
    done = [lane.run(lambda number=number: order.append(number) or threading.get_ident()) for number in range(20)]
    threads = {future.result(5) for future in done}
    assert order == list(range(20))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_an_error_is_its_caller_s_and_the_lane_goes_on() -> None:
    lane = Lane("engine")
    with pytest.raises(ZeroDivisionError):
        lane.run(lambda: 1 // 0).result(5)
    assert lane.run(lambda: 7).result(5) == 7

"""The simulated model does what its name says: acceptance, branch hits, times, and a text that depends on KV."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forerun.core.errors import ModelRefused
from forerun.core.pages import KV
from forerun.runtime import sim
from forerun.runtime.passes import Run
from forerun.runtime.sim import SimModel, SimSpec


def test_acceptance_and_branches_are_as_stated() -> None:
    spec = SimSpec(accept=0.7, branch=0.4, vocab=100, step_s=0.0, pass_s=0.0)
    target, draft = SimModel(spec, draft=False), SimModel(spec, draft=True)
    count, first, second = 6000, 0, 0
    path = KV(target.pages).extend(2)
    for number in range(count):
        prefix = (number % 100, number // 100)
        right = int(target.forward([Run(path, prefix, 0, 1)])[0][0].argmax())
        row = draft.forward([Run(path, prefix, 0, 1)])[0][0]
        order = row.argsort()[::-1]
        first += int(order[0]) == right
        second += int(order[1]) == right
    assert first / count == pytest.approx(0.7, abs=0.02)
    assert second / (count - first) == pytest.approx(0.4, abs=0.04)


def test_times_are_as_stated() -> None:
    slept: list[float] = []
    spec = SimSpec.parse("sim:pass=2s,row=100ms,step=500ms")
    for draft, tokens in ((False, (1, 2, 3)), (True, (1,))):
        model = SimModel(spec, draft, sleep=slept.append)
        model.forward([Run(KV(model.pages).extend(3), tokens, 0, 1)])
    assert slept == pytest.approx([2.3, 0.5], abs=0.1)


@pytest.mark.parametrize("late_s", [0.0, 0.0001, 0.5])
def test_a_pass_ends_when_it_says_or_when_its_process_is_woken(late_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]

    def sleep(seconds: float) -> None:
        assert seconds >= 0.0
        now[0] += seconds + late_s

    def look() -> float:
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(sim, "time", SimpleNamespace(sleep=sleep, perf_counter=look))
    sim._sleep(0.002)
    assert now[0] - 10.0 == pytest.approx(max(0.002, 0.002 - sim.EARLY_S + late_s), abs=5e-6)


def test_text_follows_what_the_columns_hold() -> None:
    model = SimModel(SimSpec(pass_s=0.0), draft=False)
    clean, stale = KV(model.pages).extend(4), KV(model.pages).extend(4)
    model.forward([Run(stale, (9, 9, 9, 9), 0, 1)])
    expected = model.forward([Run(clean, (1, 2, 3), 0, 1)])[0]
    model.forward([Run(stale, (1, 2), 0, 1)])
    assert (model.forward([Run(stale, (3,), 2, 1)])[0] == expected).all()
    assert (model.forward([Run(stale, (3,), 3, 1)])[0] != expected).any()


def test_every_row_costs() -> None:
    assert SimSpec.parse("sim:pass=20ms").pass_of(10) == pytest.approx(0.022)
    assert SimSpec.parse("sim:pass=20ms,row=0ms").pass_of(10) == pytest.approx(0.020)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("sim:speed=3", "'speed'"),
        ("sim:pass=20", "a time such as 20ms"),
        ("sim:pass=fast", "a time such as 20ms"),
        ("sim:accept=lots", "a number"),
        ("sim:accept=1.5", "accept"),
        ("sim:branch=2", "branch"),
        ("sim:vocab=1", "vocab"),
        ("sim:pass_s=1", "'pass_s'"),
    ],
)
def test_what_is_wrong_is_named(model: str, named: str) -> None:
    with pytest.raises(ModelRefused, match=named):
        SimSpec.parse(model)

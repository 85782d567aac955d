"""Ranks as processes: the same answers, and a group that is back in a moment when one of them dies or hangs."""

from __future__ import annotations

import logging
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models import tiny_model
from numpy.typing import NDArray

from forerun.core.errors import GroupLost, ModelRefused
from forerun.core.pages import KV
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm, resolve
from forerun.runtime.parallel import Group, ParallelModel
from forerun.runtime.passes import Run
from forerun.runtime.ranks import GroupSpec

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1.0
BACK_S = 15.0
_RNG = random.Random(7)
TOKENS = tuple(_RNG.randrange(256) for _ in range(140))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def spec(folder: str) -> GroupSpec:
    return GroupSpec(folder, "float32", 2, context_limit=512, pages=16, timeout_s=TIMEOUT_S, ready_s=60.0)


@pytest.fixture(scope="module")
def model(spec: GroupSpec) -> Iterator[ParallelModel]:
    split = ParallelModel(spec)
    yield split
    split.close()


@pytest.fixture
def breakable(model: ParallelModel) -> Iterator[ParallelModel]:
    """For a test that leaves the group broken."""
    yield model
    model.restart()


def whole_text(model: TransformersModel, tokens: tuple[int, ...] = TOKENS) -> NDArray[np.float32]:
    kv = KV(model.pages)
    rows = model.forward([Run(kv.extend(len(tokens)), tokens, 0, len(tokens))])[0]
    kv.release()
    return rows


def one_by_one(model: TransformersModel, company: int = 0) -> NDArray[np.float32]:
    kv, other = KV(model.pages), KV(model.pages)
    rows = []
    for at, token in enumerate(TOKENS):
        runs = [Run(kv.extend(1), (token,), at, 1)]
        if company:
            runs.insert(0, Run(other.extend(company), TOKENS[:company], 0, 1))
        rows.append(model.forward(runs)[-1])
        kv.cached_len = at + 1
    kv.release()
    other.release()
    return np.concatenate(rows)


def greedy(model: TransformersModel, prompt: tuple[int, ...], count: int, chunk: int | None = None) -> list[int]:
    """chunk: rows of a prefill pass; None: the prompt in one piece."""
    kv = KV(model.pages)
    answer: list[int] = []
    while len(answer) < count:
        text = (*prompt, *answer)
        end = len(text) if chunk is None else min(len(text), kv.cached_len + chunk)
        run = Run(kv.extend(end - kv.cached_len), text[kv.cached_len : end], kv.cached_len, 1)
        rows = model.forward([run])[0]
        kv.cached_len = end
        if end == len(text):
            answer.append(int(rows[0].argmax()))
    kv.release()
    return answer


def test_it_says_what_the_whole_model_says(model: ParallelModel, folder: str) -> None:
    whole = TransformersModel(load_causal_lm(folder, "float32"), 512, 16)
    expected = whole_text(whole)
    got = whole_text(model)
    assert np.abs(got - expected).max() < 1e-3
    assert greedy(model, TOKENS[:9], 60) == greedy(whole, TOKENS[:9], 60)


def test_bits_do_not_depend_on_what_shares_a_pass(model: ParallelModel) -> None:
    whole = whole_text(model)
    assert np.array_equal(one_by_one(model), whole)
    assert np.array_equal(one_by_one(model, company=7), whole)


def test_torch_distributed_gives_the_same_bits(model: ParallelModel, spec: GroupSpec) -> None:
    gloo = ParallelModel(replace(spec, shared=False))
    try:
        assert np.array_equal(whole_text(gloo), whole_text(model))
    finally:
        gloo.close()


# --- ends and returns --------------------------------------------------------------------------------


def pass_for_ever(model: ParallelModel, passing: threading.Event) -> None:
    while True:
        whole_text(model)
        passing.set()


def in_a_pass(model: ParallelModel, harm: Callable[[], None]) -> float:
    """Seconds from the harm, done while passes run, to GroupLost."""
    passing = threading.Event()
    done: list[float] = []

    def strike() -> None:
        passing.wait()
        done.append(time.monotonic())
        harm()

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        with pytest.raises(GroupLost):
            pass_for_ever(model, passing)
    finally:
        passing.set()
        thread.join()
    return time.monotonic() - done[0]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("number", "said", "most_s"),
    [
        (signal.SIGKILL, r"rank 1 \(process \d+\) was ended by SIGKILL", 3.0),
        (signal.SIGSTOP, r"rank 1 .*no answer in 1 s|Timed out", TIMEOUT_S + 4.0),
    ],
)
def test_a_rank_that_dies_or_hangs_in_a_pass_ends_the_group_which_comes_back(
    spec: GroupSpec,
    caplog: pytest.LogCaptureFixture,
    number: signal.Signals,
    said: str,
    most_s: float,
    shared: bool,
) -> None:
    model = ParallelModel(replace(spec, shared=shared))
    try:
        before = whole_text(model)
        old = model.pids
        with caplog.at_level(logging.ERROR):
            took = in_a_pass(model, lambda: os.kill(old[0], number))
        assert took < most_s
        assert [record for record in caplog.records if record.levelno == logging.ERROR]
        assert re.search(said, caplog.text)
        assert gone(old[0])
        began = time.monotonic()
        model.restart()
        assert time.monotonic() - began < 10.0
        assert model.pids != old
        assert np.array_equal(whole_text(model), before)
    finally:
        model.close()


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether the process ends in time; its parent, the fork server, may not have noticed yet."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)


class Heard(logging.Handler):
    """Waits for a line of the log."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.event.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard("between passes: rank 1")
    log = logging.getLogger("forerun.runtime.parallel")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def test_a_rank_that_dies_between_passes_is_told_of_at_once(breakable: ParallelModel, heard: Heard) -> None:
    model = breakable
    whole_text(model)
    os.kill(model.pids[0], signal.SIGKILL)
    assert heard.event.wait(10.0)
    with pytest.raises(GroupLost, match="was ended by SIGKILL"):
        whole_text(model)
    with pytest.raises(GroupLost, match="was ended by SIGKILL"):
        whole_text(model)


def test_a_pass_that_rank_0_leaves_ends_the_group(breakable: ParallelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = breakable

    def out_of_memory(batch: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(model.attention, "begin", out_of_memory)
    with pytest.raises(MemoryError):
        whole_text(model)
    monkeypatch.undo()
    with pytest.raises(GroupLost, match="rank 0 left a pass"):
        whole_text(model)


def test_a_rank_that_is_stopped_for_a_moment_is_waited_for(model: ParallelModel) -> None:
    before = whole_text(model)
    os.kill(model.pids[0], signal.SIGSTOP)
    timer = threading.Timer(TIMEOUT_S / 3, os.kill, (model.pids[0], signal.SIGCONT))
    timer.start()
    assert np.array_equal(whole_text(model), before)
    timer.join()


def test_a_rank_that_hangs_while_the_group_restarts_is_replaced(
    model: ParallelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = whole_text(model)
    launch, hanging = Group.launch, list[int]()

    def launched(group: Group) -> None:
        launch(group)
        if not hanging:
            hanging.extend(group.pids)
            os.kill(group.pids[0], signal.SIGSTOP)

    monkeypatch.setattr(Group, "launch", launched)
    began = time.monotonic()
    with pytest.raises(GroupLost, match=r"the ranks were not ready within [5-9](\.\d+)? s"):
        model.restart()
    assert gone(hanging[0])
    model.restart()
    assert time.monotonic() - began < BACK_S
    assert np.array_equal(whole_text(model), before)


HOST = """
import os, sys
from forerun.runtime.parallel import ParallelModel
from forerun.runtime.ranks import GroupSpec
if __name__ == "__main__":
    model = ParallelModel(GroupSpec(sys.argv[1], "float32", 3, 512, 4, timeout_s=60.0))
    print(*model.pids, flush=True)
    sys.stdin.read()
"""


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", heads=6, kv_heads=3, hidden=96)
    script = tmp_path / "host.py"
    script.write_text(HOST)
    host = subprocess.Popen(
        [sys.executable, str(script), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with host:
        assert host.stdout is not None
        pids = [int(word) for word in host.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)  # one that cannot notice anything by itself
        host.kill()
    try:
        assert len(pids) == 2
        assert all(map(gone, pids))
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_heads_that_do_not_divide_end_the_start(spec: GroupSpec) -> None:
    with pytest.raises(ModelRefused, match=r"4 attention heads, 2 KV heads .* possible numbers of ranks: 1, 2"):
        ParallelModel(replace(spec, ranks=3))


# --- SmolLM2 in 3 ranks ------------------------------------------------------------------------------


@pytest.mark.demo_model
@pytest.mark.timeout(600)
def test_smollm2_in_three_ranks_says_what_the_whole_one_says(spec_bench: list[str]) -> None:
    from forerun.text import TextModel

    folder = resolve("demo")
    text = TextModel.load(folder)
    encoded = [tuple(text.encode_chat([("user", prompt)])) for prompt in spec_bench]
    prompts = [prompt for prompt in encoded if len(prompt) <= 120][:3]
    split = ParallelModel(GroupSpec(folder, "float32", 3, text.context_limit, pages=32))
    try:
        answers = [greedy(split, prompt, 24) for prompt in prompts]
        assert [greedy(split, prompt, 24, chunk=17) for prompt in prompts] == answers
        text_ids = (*prompts[0], *answers[0])
        rows = whole_text(split, text_ids)
        kv = KV(split.pages)
        for at in range(0, len(text_ids), 5):
            part = text_ids[at : at + 5]
            got = split.forward([Run(kv.extend(len(part)), part, at, len(part))])[0]
            kv.cached_len = at + len(part)
            assert np.array_equal(got, rows[at : at + 5])
        kv.release()
    finally:
        split.close()
    torch.set_num_threads(1)
    whole = TransformersModel(load_causal_lm(folder, "float32"), text.context_limit, 32)
    assert [greedy(whole, prompt, 24) for prompt in prompts] == answers

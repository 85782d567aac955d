"""How a group of ranks starts: what fails is named, nobody waits for ever, and nobody else gets in."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from models import tiny_model

from forerun.core.errors import GroupLost, ModelRefused
from forerun.runtime.parallel import Group
from forerun.runtime.ranks import GroupSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("llama"))


def spec_of(folder: str) -> GroupSpec:
    return GroupSpec(folder, "float32", 2, context_limit=512, pages=16, timeout_s=1.0, ready_s=60.0)


@pytest.fixture
def group(folder: str, request: pytest.FixtureRequest) -> Iterator[Group]:
    made = Group(replace(spec_of(folder), **getattr(request, "param", {})))
    yield made
    made.stop()


def all_ended(group: Group) -> bool:
    return not any(process.is_alive() for process in group._processes.values())


@pytest.mark.parametrize("group", [{"dtype": "int7"}], indirect=True)
def test_a_rank_that_cannot_start_says_why(group: Group) -> None:
    group.launch()
    with pytest.raises(ModelRefused, match="rank 1 cannot start: dtype 'int7' is not known"):
        group.assemble()
    assert all_ended(group)


@pytest.mark.parametrize("group", [{"context_limit": 1 << 40, "pages": 1 << 40}], indirect=True)
def test_a_rank_that_runs_out_of_memory_says_so(group: Group) -> None:
    group.launch()
    with pytest.raises(ModelRefused, match=r"rank 1 cannot start: (MemoryError|RuntimeError)"):
        group.assemble()


def test_a_rank_that_dies_while_starting_is_named(group: Group) -> None:
    group.launch()
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(GroupLost, match=r"rank 1 .*was ended by SIGKILL"):
        group.assemble()


@pytest.mark.parametrize("group", [{"ready_s": 0.5}], indirect=True)
def test_ranks_have_a_deadline_to_be_ready(group: Group) -> None:
    group.launch()
    os.kill(group.pids[0], signal.SIGSTOP)
    with pytest.raises(GroupLost, match=r"not ready within 0\.5 s"):
        group.assemble()
    assert all_ended(group)


def test_strangers_at_the_port_are_turned_away(
    group: Group, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.runtime.parallel.HANDSHAKE_S", 0.2)
    address = group._server.getsockname()
    silent = socket.create_connection(address)
    with socket.create_connection(address) as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
    turned_away: list[type[BaseException]] = []

    def knock() -> None:
        try:
            Client(address, authkey=b"guessed").close()
        except (AuthenticationError, EOFError, OSError) as error:
            turned_away.append(type(error))

    knocking = threading.Thread(target=knock)
    knocking.start()
    group.launch()
    with caplog.at_level(logging.WARNING):
        group.assemble()
    knocking.join()
    silent.close()
    assert turned_away
    assert caplog.text.count("a stranger at the ranks' port") == 3


def test_one_rank_is_no_group(folder: str) -> None:
    with pytest.raises(ModelRefused, match="2 ranks or more, not 1"):
        Group(replace(spec_of(folder), ranks=1))


TWO_RANKS = """
import sys

from forerun.runtime.parallel import Group
from forerun.runtime.ranks import GroupSpec

if __name__ == "__main__":
    group = Group(GroupSpec(sys.argv[1], "float32", 2, context_limit=512, pages=16, timeout_s=1.0, ready_s=60.0))
    group.launch()
    group.stop()
"""


def test_ranks_run_what_rank_0_runs_wherever_it_was_started(folder: str, tmp_path: Path) -> None:
    """The working directory holds something else of that name: an older checkout, say."""
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    other = tmp_path / "here" / "forerun"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "two_ranks.py"), folder],
        cwd=tmp_path / "here",
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "imported").exists()

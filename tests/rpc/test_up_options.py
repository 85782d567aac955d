"""Options of services: what their texts mean, and the command lines that `up` makes of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coordinator.main import CoordinatorOptions, serve
from forerun.cli import app
from forerun.commands import roles
from forerun.commands.options import parse_cores, parse_size
from forerun.core.errors import InvalidRequest
from forerun.up import PAUSE_S, Running, UpOptions, free_port, next_pause, plan

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "size"),
    [("auto", None), ("2GiB", 2 << 30), ("512 mib", 512 << 20), ("1.5KiB", 1536), ("3MB", 3_000_000), ("7777", 7777)],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "2Gi", "2 GiB more", "1e3", "77"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="a size is auto, or a number"):
        parse_size(text)


def test_cores() -> None:
    assert parse_cores("") == ()
    assert parse_cores(f"{CORES[-1]}, {CORES[0]},{CORES[0]}") == tuple(dict.fromkeys((CORES[-1], CORES[0])))


@pytest.mark.parametrize("text", ["a", "0-1", f"{CORES[-1] + 1}", f"{CORES[0]},"])
def test_bad_cores_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="cores are numbers joined by commas"):
        parse_cores(text)


def arguments(options: UpOptions, name: str) -> dict[str, str]:
    """Option by option, of a service that `up` starts."""
    (service,) = [service for service in plan(options, "sim:", 5, Path()) if service.name == name]
    words = service.arguments[1:]
    return {word: following for word, following in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def test_targets_have_names_and_logs_of_their_own() -> None:
    services = plan(UpOptions("sim:", ("model", "ngram"), targets=3), "sim:", 5, Path("/logs"))
    assert [service.name for service in services] == ["coordinator", "target", "target-2", "target-3", "draft"]
    assert len({service.log for service in services}) == 5
    assert [service.is_target for service in services] == [False, True, True, True, False]
    targets = [service.arguments for service in services if service.is_target]
    assert targets[0] == targets[1] == targets[2], "equal threads too: they compute the same bits"


def test_options_reach_the_workers() -> None:
    core = str(CORES[0])
    options = UpOptions(
        "sim:",
        ("model",),
        lookahead=16,
        max_sequences=32,
        kv_memory=1 << 20,
        tp=2,
        target_cores=(CORES[0],),
        draft_cores=(CORES[0],),
    )
    target = arguments(options, "target")
    expected = {"--lookahead": "16", "--max-sequences": "32", "--kv-memory": "1048576", "--tp": "2", "--cores": core}
    assert target.items() >= expected.items()
    assert target["--threads"] == "1", "the draft has cores of its own"
    assert arguments(options, "draft")["--cores"] == core
    plain = arguments(UpOptions("sim:", ("none",)), "target")
    assert not {"--kv-memory", "--cores"} & set(plain)
    assert plain["--threads"] == str(len(CORES))


def test_a_role_is_pinned_before_it_starts() -> None:
    seen: list[set[int]] = []

    async def serve() -> None:
        seen.append(os.sched_getaffinity(0))

    try:
        roles._run(serve, str(CORES[-1]))
        assert seen == [{CORES[-1]}]
    finally:
        os.sched_setaffinity(0, CORES)
    with pytest.raises(typer.Exit):
        roles._run(serve, str(CORES[-1] + 1))
    assert len(seen) == 1


def test_a_bad_size_ends_the_worker_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pytest.raises(typer.Exit):
        roles.target_worker(["localhost:1"], kv_memory="2 apples")
    assert capsys.readouterr().err.startswith("forerun: a size is auto")


@pytest.mark.parametrize("option", ["--port", "--attach-port", "--metrics-port"])
@pytest.mark.parametrize("port", ["-4", "65536"])
def test_ports_of_a_coordinator_are_ports(option: str, port: str) -> None:
    result = CliRunner().invoke(app, ["coordinator", "--model", "sim:", option, port])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr


@pytest.mark.parametrize("kind", ["port", "attach_port", "metrics_port"])
async def test_a_port_in_use_is_named(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, other = taken.getsockname()[1], free_port()
        ports = {"port": other, "attach_port": free_port(), kind: port}
        with pytest.raises(OSError, match=rf"cannot .* on 127\.0\.0\.1:{port}: "):
            await serve(CoordinatorOptions("sim:", **ports))


async def test_another_port_than_the_one_asked_for_is_refused() -> None:
    with pytest.raises(OSError, match=r"127\.0\.0\.1:-4: gRPC took port \d+; ports are 1 to 65535"):
        await serve(CoordinatorOptions("sim:", port=-4))


def test_a_worker_that_cannot_start_is_tried_ever_more_seldom() -> None:
    pauses = [0.0]
    for _ in range(9):
        pauses.append(next_pause(pauses[-1], lasted=1.0))
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert next_pause(30.0, lasted=PAUSE_S[1]) == 0.5


@pytest.mark.parametrize("log", ["", "INFO memory: 1 MiB; KV up to 2 MiB (9 tokens), 1 sequences in a pass\nnext\n"])
def test_what_kv_may_take_is_passed_on(log: str, tmp_path: Path) -> None:
    services = plan(UpOptions("sim:", ("none",)), "sim:", 5, tmp_path)
    (tmp_path / "target.log").write_text(log)
    assert Running("", services, tmp_path).kv() == ("KV up to 2 MiB (9 tokens), 1 sequences in a pass" if log else "")


def test_a_coordinator_needs_two_ports(capsys: Any) -> None:
    with pytest.raises(typer.Exit):
        roles.coordinator(model="sim:", port=50051, attach_port=50051)
    assert "--port and --attach-port are both 50051" in capsys.readouterr().err


@pytest.mark.parametrize(("tp", "threads"), [(1, 7), (2, 3), (3, 2), (9, 1)])
def test_ranks_divide_the_cores_that_drafts_leave(
    tp: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    coordinator, target, _ = plan(UpOptions(target="sim:", draft=("model", "ngram"), tp=tp), "sim:", 50052, tmp_path)
    given = target.arguments
    assert given[given.index("--threads") + 1] == str(threads)
    wait = coordinator.arguments[coordinator.arguments.index("--target-wait") + 1]
    assert float(wait) >= 60, "a target that is started again loads and measures first"

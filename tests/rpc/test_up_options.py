"""Options of services: what their texts mean, and the command lines that `up` makes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import typer

from forerun.commands import roles
from forerun.commands.options import parse_cores, parse_size
from forerun.core.errors import InvalidRequest
from forerun.up import UpOptions, plan

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "size"),
    [("auto", None), ("2GiB", 2 << 30), ("512 mib", 512 << 20), ("1.5KiB", 1536), ("3MB", 3_000_000), ("77", 77)],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "2Gi", "2 GiB more", "1e3"])
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

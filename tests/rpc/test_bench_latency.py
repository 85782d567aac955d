"""`forerun bench --prefix` and `--interfere` against a service without models: what is asked, what is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from forerun.commands.bench import bench
from forerun.commands.bench_interfere import Interference, gaps_within, longest_gap
from forerun.commands.bench_prefix import Prefix, PrefixPlan
from forerun.v1 import generation_pb2 as pb
from tests.rpc.fake_generation import FakeGeneration, shared_len

app = typer.Typer()
app.command()(bench)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


# --- a shared prefix --------------------------------------------------------------------------------


def test_prefixes_are_shared_or_not_and_both_are_warm(fake: FakeGeneration, addr: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("--addr", addr, "--prefix", "--rounds", "3", "--prompt-tokens", "40", "--json", str(out))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("prompts of 56 tokens, 40 of them shared: time to first token ")
    asked = [list(request.token_ids.token_ids) for request in fake.requests]
    assert {len(ids) for ids in asked} == {56}
    assert not any(2 in ids for ids in asked), "the end token"
    shared = [ids for ids in asked if sum(shared_len(ids, other) >= 40 for other in asked) > 1]
    unshared = [ids for ids in asked if ids not in shared]
    assert (len(shared), len(unshared)) == (5, 5), "two of each to warm up"
    assert len({tuple(ids[40:]) for ids in asked}) == 10, "every question is another"
    order = ["shared" if ids in shared else "unshared" for ids in asked]
    assert order[4:] in (["shared", "unshared", "unshared", "shared", "shared", "unshared"],), "they take turns"
    found = json.loads(out.read_text())["prefix"]
    assert {len(values) for values in found["ttft_ms"].values()} == {3}
    assert found["cached"]["shared"] == [40, 40, 40]
    medians = found["median_ttft_ms"]
    assert found["ratio"] == pytest.approx(medians["shared"] / medians["unshared"])
    assert {request.speculation.mode for request in fake.requests} == {pb.SpeculationParams.OFF}


def test_a_prefix_that_is_not_found_is_told(fake: FakeGeneration, addr: str) -> None:
    fake.remembers = False
    result = run("--addr", addr, "--prefix", "--rounds", "1", "--prompt-tokens", "40")
    assert result.exit_code == 1
    assert "prefix: of a shared prompt 0 tokens were found in KV; most should be" in result.stderr


def test_the_ratio_is_of_medians() -> None:
    found = Prefix(
        PrefixPlan(100, 16, 3),
        {"shared": [0.1, 9.0, 0.2], "unshared": [0.8, 0.9, 0.1]},
        {"shared": [100, 96, 100], "unshared": [0, 60, 0]},
    )
    assert found.ratio == pytest.approx(0.2 / 0.8)
    assert found.problems == ["of an unshared prompt 60 tokens were found in KV"]


# --- a long prompt among others ---------------------------------------------------------------------


def test_streams_decode_while_a_long_prompt_arrives(fake: FakeGeneration, addr: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    real = fake.answer

    def answer(request: pb.GenerateRequest) -> list[int]:
        long = request.WhichOneof("input") == "token_ids"
        return real(request) if long else [5] * 200_000  # more than anybody reads

    fake.answer = answer  # type: ignore[method-assign]
    options = ("--streams", "2", "--rounds", "2", "--prompt-tokens", "300", "--json", str(out))
    result = run("--addr", addr, "--interfere", *options)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["plain", "speculative"]
    long = [request for request in fake.requests if request.WhichOneof("input") == "token_ids"]
    streams = [request for request in fake.requests if request.WhichOneof("input") != "token_ids"]
    assert (len(long), len(streams)) == (4, 8)
    assert {len(request.token_ids.token_ids) for request in long} == {300}
    assert len({tuple(request.token_ids.token_ids) for request in long}) == 4, "a known prompt is not read again"
    plain = [request.speculation.mode == pb.SpeculationParams.OFF for request in streams]
    assert plain == [True] * 4 + [False] * 4
    found = json.loads(out.read_text())["interference"]
    assert [entry["speculation"] for entry in found] == [False, False, True, True]
    assert all(entry["ratio"] > 0 and entry["prefill"] > 0 for entry in found)


def test_streams_that_end_too_early_are_told(fake: FakeGeneration, addr: str) -> None:
    result = run("--addr", addr, "--interfere", "--rounds", "1", "--prompt-tokens", "300")
    assert result.exit_code == 1
    assert "a stream reached its end too early" in result.stderr


def test_gaps() -> None:
    arrivals = [0.0, 1.0, 2.0, 6.0, 7.0]
    assert gaps_within(arrivals, 0.5, 6.5) == [1.0, 4.0]
    assert longest_gap(arrivals, 0.0, 2.0) == 1.0, "the gap of 4 begins as the span ends"
    assert longest_gap(arrivals, 2.5, 3.0) == 4.0, "a gap around the whole span counts"
    assert longest_gap(arrivals, 5.9, 6.5) == 4.0
    assert longest_gap([], 0.0, 1.0) == 0
    assert Interference(True, 0.02, 0.03, 0.04, 0.05, 1.0).ratio == 2.5

"""Drafts that ship: found by the revision of the target, wherever it lies, and served with the target's embedding."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from models import tiny_model

from draft_worker.main import source_of
from forerun.core.errors import ModelRefused
from forerun.core.params import Source
from forerun.runtime.distill import draft as drafts
from forerun.runtime.distill.draft import Draft, shipped, shipped_draft
from forerun.runtime.distill.student import save_student, student_of
from forerun.runtime.distill.wide import WIDE
from forerun.runtime.models import load_causal_lm, revision
from forerun.runtime.serving import LoadOptions, load
from forerun.up import UpOptions, plan

HEAD = tuple(range(0, 256, 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("target"), layers=3, eos=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("other"), layers=3, eos=1, seed=1)


@pytest.fixture
def draft(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only one that ships; its target is called by a name that nothing can be found by."""
    monkeypatch.setattr(drafts, "SHIPPED", tmp_path / "drafts")
    out = tmp_path / "drafts" / "tiny"
    student = student_of(load_causal_lm(target, "float32", attention=WIDE), (0, 2), HEAD, WIDE)
    save_student(student, out, Draft("./gone", revision(target), (0, 2), len(HEAD)))
    return str(out)


def words(options: UpOptions, folder: str) -> list[str]:
    """Command line of the draft that `up` starts."""
    return next(s.arguments for s in plan(options, folder, 5, Path()) if s.name == "draft")


def test_a_draft_is_found_for_a_copy_of_its_target_and_for_no_other(
    target: str, other: str, draft: str, tmp_path: Path
) -> None:
    copy = shutil.copytree(target, tmp_path / "copy")
    assert shipped(str(copy)) == draft
    assert shipped(other) is None
    assert shipped("sim:accept=0.8") is None
    with pytest.raises(ModelRefused, match=r"no draft ships for .*forerun distill"):
        shipped_draft(other)


def test_up_takes_the_shipped_draft_where_there_is_one(target: str, other: str, draft: str) -> None:
    chosen = words(UpOptions(target), target)
    assert chosen[1:5] == ["--model", draft, "--target", target]
    assert chosen == words(UpOptions(target, ("distilled", "ngram")), target)
    assert words(UpOptions(other), other)[1:4] == ["--model", other, "--layers"]
    with pytest.raises(ModelRefused, match="no draft ships"):
        words(UpOptions(other, ("distilled",)), other)


def test_up_tells_a_draft_of_its_own_making_where_its_target_is(target: str, draft: str) -> None:
    assert words(UpOptions(target, (draft,)), target)[1:5] == ["--model", draft, "--target", target]
    assert "--target" not in words(UpOptions(target, (target,)), target)


def test_the_target_of_a_draft_can_be_named(target: str, draft: str) -> None:
    loaded = load(LoadOptions(draft, "float32", target=target), draft=True, sequences=1)
    assert loaded.distilled
    assert load(LoadOptions("distilled", "float32", target=target), draft=True, sequences=1).revision == loaded.revision
    with pytest.raises(ModelRefused, match="name that with --target"):
        load(LoadOptions("distilled", "float32"), draft=True, sequences=1)
    with pytest.raises(ModelRefused, match=r"'./gone', which is not to be had by that name; name its folder"):
        load(LoadOptions(draft, "float32"), draft=True, sequences=1)


def test_a_model_of_its_own_has_no_target(target: str, draft: str) -> None:
    with pytest.raises(ModelRefused, match="--target is for drafts that `forerun distill` made"):
        load(LoadOptions(target, "float32", target=target), draft=True, sequences=1)


def test_hints_say_what_made_them(target: str, draft: str) -> None:
    def source(options: LoadOptions) -> Source:
        return source_of(options, load(options, draft=True, sequences=1))

    assert source(LoadOptions(draft, "float32", target=target)) is Source.DISTILLED
    assert source(LoadOptions(target, "float32", layers=1)) is Source.EARLY_EXIT
    assert source(LoadOptions(target, "float32")) is Source.MODEL

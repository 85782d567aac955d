"""How questions begin, what becomes of a row that was begun, and drafts that go on from drafts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from forerun.cli import app
from forerun.core.errors import InvalidRequest, ModelRefused
from forerun.runtime.distill.corpus import DataPlan, read_shards, write_shards
from forerun.runtime.distill.draft import Draft
from forerun.runtime.distill.openings import BEGUN, OWN, ROOM, Openings, documents_of
from forerun.runtime.distill.student import begin_from, save_student, student_of
from forerun.runtime.distill.turns import Turns
from forerun.runtime.distill.wide import WIDE
from forerun.runtime.distill.writing import Beginning, Conversations, Kind, write
from forerun.runtime.models import revision
from forerun.text import TextModel

VOCAB, END, LENGTH = 256, 1, 96
LINES = "Translate:\nSum up: {document}\n{document}\\nWho was\n"


@pytest.fixture(scope="module")
def text(folder: str) -> TextModel:
    return TextModel.load(folder)


@pytest.fixture
def openings(text: TextModel, tmp_path: Path) -> Openings:
    path = tmp_path / "openings.txt"
    path.write_text(LINES)
    return Openings.read(path, text)


def _spoken(text: TextModel, tokens: tuple[int, ...]) -> str:
    return text.decode(tokens, skip_special_tokens=False)


def test_a_row_that_was_begun_goes_on_by_itself_after_its_answer(target: Any, text: TextModel) -> None:
    turns = Turns.of(text)
    given = tuple(b"Sum up: abc")
    beginnings = [Beginning(given), Beginning(given, complete=True), Beginning()] * 8
    made = write(target, turns, VOCAB, 24, 384, (1.0,), (0, 0), beginnings=beginnings)
    start = len(turns.opening)
    closings = {turns.to_question[0], END}
    ended = 0
    for row, beginning in enumerate(beginnings):
        tokens, kinds = made.tokens[row, start:].tolist(), made.kinds[row, start:]
        if not beginning.tokens:
            assert kinds[0] == Kind.QUESTION and Kind.BEYOND not in kinds
            continue
        assert tuple(tokens[: len(given)]) == given and set(kinds[: len(given)]) == {Kind.TEMPLATE}
        follows = len(given) + len(turns.to_answer)
        if beginning.complete:
            assert tuple(tokens[len(given) : follows]) == turns.to_answer
            assert set(kinds[len(given) : follows]) == {Kind.TEMPLATE} and kinds[follows] == Kind.ANSWER
        else:
            assert kinds[len(given)] == Kind.QUESTION
        answer = np.flatnonzero(kinds == Kind.ANSWER)
        assert len(answer) and (np.diff(answer) == 1).all()  # one, and nothing is put into it
        last = int(answer[-1])
        if last + 1 < len(tokens):
            assert tokens[last] in closings and set(kinds[last + 1 :]) == {Kind.BEYOND}
            ended += 1
        assert not set(tokens[answer[0] : last]) & closings
    assert ended > 4


def test_openings_are_lines_with_or_without_a_document(openings: Openings, text: TextModel) -> None:
    plain, closed, opened = openings.lines
    assert (_spoken(text, plain[0]), plain[1]) == ("Translate:", None)
    assert (_spoken(text, closed[0]), closed[1]) == ("Sum up: ", ())
    assert opened[0] == () and _spoken(text, opened[1] or ()) == "\nWho was"


def test_rows_begin_as_the_openings_say(openings: Openings, text: TextModel) -> None:
    documents = [np.full(200, text.vocabulary.encode(letter, add_special_tokens=False)[0]) for letter in "xyz"]
    begun = openings.begin(400, 100, documents, (3, 1))
    assert begun == openings.begin(400, 100, documents, (3, 1)) != openings.begin(400, 100, documents, (3, 2))
    assert all(len(one.tokens) <= 100 * ROOM for one in begun)
    said = [_spoken(text, one.tokens) for one in begun]
    assert said.count("") == pytest.approx(400 * (1 - BEGUN), abs=30)
    for one, words in zip(begun, said, strict=True):
        assert one.complete == words.startswith("Sum up: ")
        assert not one.complete or words[-1] in "xyz"
        assert words in ("", "Translate:") or one.complete or words.endswith("\nWho was")
    assert len({word[10] for word in said if word.startswith("Sum up: ")}) == 3
    assert {_spoken(text, one.tokens) for one in openings.begin(50, 100, [], (0, 0))} == {"", "Translate:"}


def test_a_document_is_a_whole_answer_without_its_end() -> None:
    kinds = np.array([[0] * 3 + [2] * 50 + [3] * 40, [1] * 43 + [2] * 50, [2] * 20 + [0] * 73], np.uint8)
    tokens = np.arange(3 * 93).reshape(3, 93)
    rows = Conversations(tokens, kinds, np.zeros(3), np.zeros((3, 93, 1)), np.zeros((3, 93, 1)))  # type: ignore[arg-type]
    first, second = documents_of(rows)
    assert first.tolist() == list(range(3, 52)) and second.tolist() == list(range(93 + 43, 93 + 92))


@pytest.mark.parametrize(
    ("written", "reason"), [("\n \n", "holds no opening"), ("{document} and {document}\n", "names more")]
)
def test_bad_openings_are_refused(text: TextModel, tmp_path: Path, written: str, reason: str) -> None:
    path = tmp_path / "openings.txt"
    path.write_text(written)
    with pytest.raises(InvalidRequest, match=reason):
        Openings.read(path, text)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Openings.read(tmp_path / "none.txt", text)


def test_our_own_openings_are_many_and_short(text: TextModel) -> None:
    lines = Openings.read(OWN, text).lines
    assert len(lines) > 100 and max(len(before) + len(after or ()) for before, after in lines) < 100
    assert sum(after is not None for _, after in lines) > 20


def test_later_shards_hold_what_earlier_ones_answered(target: Any, text: TextModel, tmp_path: Path) -> None:
    turns, path = Turns.of(text), tmp_path / "openings.txt"
    path.write_text("{document}\n")
    openings = Openings.read(path, text)
    plan = DataPlan("r", "float32", 0, (1.0,), 16, 200, openings.digest)
    write_shards(target, turns, VOCAB, plan, 2, tmp_path / "data", lambda new: None, openings)
    first, _ = read_shards((tmp_path / "data", 1))
    assert Kind.BEYOND not in first.kinds  # there was no document yet, so no row was begun
    both, _ = read_shards((tmp_path / "data", 2))
    second = both.rows(np.arange(len(first), len(both)))
    begun = [bytes(row.astype(np.uint8)) for row in second.tokens[second.kinds[:, len(turns.opening)] == Kind.TEMPLATE]]
    earlier = [bytes(document.astype(np.uint8)) for document in documents_of(first)]
    assert begun and earlier
    assert all(any(part[:30] in row for part in earlier) for row in begun)  # what is held out stands nowhere else


def test_data_made_otherwise_are_trained_on_together(tmp_path: Path, target: Any, text: TextModel) -> None:
    plan = DataPlan("r", "float32", 0, (0.0,), 2, 40)
    with pytest.raises(InvalidRequest, match="holds no data"):
        plan.goes_with(tmp_path)
    other = dataclasses.replace(plan, seed=1, temperatures=(1.0,), rows=3)
    other.fits(tmp_path)
    with pytest.raises(InvalidRequest, match="holds no shard yet"):
        plan.goes_with(tmp_path)
    write_shards(target, Turns.of(text), VOCAB, other, 2, tmp_path, lambda new: None)
    assert plan.goes_with(tmp_path) == 2
    with pytest.raises(InvalidRequest, match="length 40, and 50 was asked for; they cannot be trained on together"):
        dataclasses.replace(plan, length=50).goes_with(tmp_path)


def test_a_student_goes_on_from_a_draft(folder: str, target: Any, tmp_path: Path) -> None:
    layers, head = (0, 2), range(0, 100, 2)
    former = student_of(target, layers, list(head), WIDE)
    with torch.no_grad():
        for number, weight in enumerate(former.own().values()):
            weight.fill_(0.25 * (number + 1))
    save_student(former, tmp_path, Draft("tiny", revision(folder), layers, len(head)))
    student = student_of(target, layers, list(range(80)), WIDE)
    begin_from(student, str(tmp_path), folder, layers)
    theirs, source = former.own(), target.state_dict()["lm_head.weight"]
    for name, weight in student.own().items():
        if name == "lm_head.weight":
            assert torch.equal(weight[::2], theirs[name][:40]) and torch.equal(weight[1::2], source[1:80:2])
        else:
            assert torch.equal(weight, theirs[name])
    with pytest.raises(ModelRefused, match="has the layers 0,2 of its target, and 0,1 were asked for; say --layers"):
        begin_from(student_of(target, (0, 1), list(head), WIDE), str(tmp_path), folder, (0, 1))


def test_the_command_goes_on_from_a_draft_on_several_folders(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    opened = tmp_path / "openings.txt"
    opened.write_text(LINES)
    asked = ["distill", "--target", folder, "--layers", "0,2", "--head", "100", "--tokens", "3000", "--batch", "16"]
    asked += ["--length", "96", "--rows", "4", "--steps", "3", "--dtype", "float32", "--openings", str(opened)]
    first, second = tmp_path / "first", tmp_path / "second"
    made = CliRunner().invoke(app, [*asked, "--out", str(first)])
    assert made.exit_code == 0, made.output
    further = ["--start", str(first), "--data", str(tmp_path / "more"), "--data", str(first / "data"), "--seed", "1"]
    made = CliRunner().invoke(app, [*asked, "--out", str(second), *further])
    assert made.exit_code == 0, made.output
    card = (second / "README.md").read_text()
    assert "64 conversations" in card and "of 3 kinds" in card
    assert "> > " not in card and "> 3 steps of 4 conversations" in card and "seed 0" in card.partition("> ")[2]
    assert json.loads((tmp_path / "more" / "about.json").read_text())["openings"]
    again = ["--start", str(first), "--data", str(tmp_path / "fresh"), "--data", str(first / "data")]
    for wrong, reason in (
        ([*again, "--seed", "0"], "the same data again"),
        (["--start", str(tmp_path / "none")], "is no draft"),
        (["--start", str(first), "--layers", "0,1"], "say --layers 0,2"),
        ([*again[:4], "--data", str(tmp_path / "fresh")], "named twice"),
    ):
        refused = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "third"), *wrong])
        assert refused.exit_code == 1 and reason in refused.output, refused.output
        assert not (tmp_path / "third").exists() and not (tmp_path / "fresh").exists()
    refused = CliRunner().invoke(app, [*asked, "--out", str(first), "--start", str(first)])
    assert refused.exit_code == 1 and "would be overwritten" in refused.output
    (first / "data" / "about.json").write_text("{}")
    refused = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "third"), *further])
    assert refused.exit_code == 1 and "cannot be trained on together" in refused.output

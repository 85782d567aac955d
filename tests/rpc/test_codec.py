"""Every command and event survives the wire; what no correct peer sends is MalformedMessage, never another error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.errors import MalformedMessage
from forerun.core.messages import (
    Close,
    DraftParams,
    Emit,
    Gap,
    Hinted,
    Refused,
    Start,
    Stop,
    Sync,
    TargetParams,
)
from forerun.core.params import Finish, Sampling, SeqId, Source, Verification
from forerun.core.sequence import Hint
from forerun.core.tree import NodeLaw, TokenTree
from forerun.rpc import codec
from forerun.v1 import common_pb2, draft_pb2, target_pb2

SEQ = SeqId("r", 3)
SAMPLING = Sampling(0.7, 5, 0.9, 0.25, (1 << 64) - 1, Verification.REJECTION)
TARGET_PARAMS = TargetParams(SAMPLING, 9, 2, frozenset({1, 2}), (Source.NGRAM, Source.MODEL), 4, True, True)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

TARGET_COMMANDS = [Start(SEQ, 2, (1, 2, 3), TARGET_PARAMS, PARENT), Stop(SEQ, PARENT)]
TARGET_EVENTS = [
    Emit(SEQ, 4, (5, 6), 1, 2, 1, 24, 10, 20, None, 3, PARENT, (0, (1 << 64) - 1), 6, (2, 0), 1),
    Emit(SEQ, 4, (5,), 0, 0, 1, 0, finish=Finish.LENGTH),
    Gap(SEQ, 7, PARENT),
    Refused(SEQ, "no", True, PARENT),
]
DRAFT_COMMANDS = [
    Sync(SEQ, 0, (1, 2), 16, DraftParams(SAMPLING, 30, frozenset({2}), 7, 99), PARENT),
    Sync(SEQ, 5, (), 0),
    Close(SEQ, PARENT),
]
DRAFT_EVENTS = [Gap(SEQ, 0), Refused(SEQ, "full", True)]


@pytest.mark.parametrize("command", TARGET_COMMANDS)
def test_target_commands(command: Any) -> None:
    wire = target_pb2.TargetCommand.FromString(codec.put_target_command(command).SerializeToString())
    assert codec.target_command_of(wire) == command


@pytest.mark.parametrize("event", TARGET_EVENTS)
def test_target_events(event: Any) -> None:
    wire = target_pb2.TargetEvent.FromString(codec.put_target_event(event).SerializeToString())
    assert codec.target_event_of(wire) == event


@pytest.mark.parametrize("command", DRAFT_COMMANDS)
def test_draft_commands(command: Any) -> None:
    wire = draft_pb2.DraftCommand.FromString(codec.put_draft_command(command).SerializeToString())
    assert codec.draft_command_of(wire) == command


@pytest.mark.parametrize("event", DRAFT_EVENTS)
def test_draft_events(event: Any) -> None:
    wire = draft_pb2.DraftEvent.FromString(codec.put_draft_event(event).SerializeToString())
    assert codec.draft_answer_of(wire) == event


def columns(tree: TokenTree) -> Any:
    return tree.tokens, tree.parents, [round(score, 6) for score in tree.scores], tree.sources, tree.laws


def test_hints_keep_scores_sources_and_laws() -> None:
    tree = TokenTree(7)
    node = tree.add(0, 8, 0.5, Source.MODEL, NodeLaw((8, 9), (0.75, 0.25)))
    tree.add(node, 9, 0.25, Source.NGRAM)
    hint, parent = codec.hint_of(codec.put_hint(Hint(3, (6, 7), tree), PARENT))
    assert (hint.base_len, hint.tail, parent) == (3, (6, 7), PARENT)
    assert columns(hint.tree) == columns(tree)
    relayed = codec.target_command_of(codec.relayed_hint(SEQ, codec.put_hint(hint, "")))
    assert isinstance(relayed, Hinted)
    assert columns(relayed.hint.tree) == columns(tree)


TREES = {
    "no root": {},
    "root with a parent": {"tokens": [1], "parents": [0]},
    "parent after child": {"tokens": [1, 2, 3], "parents": [-1, 2, 0]},
    "parent of itself": {"tokens": [1, 2], "parents": [-1, 1]},
    "twice below one parent": {"tokens": [1, 2, 2], "parents": [-1, 0, 0]},
    "columns differ": {"tokens": [1, 2], "parents": [-1]},
    "scores differ": {"tokens": [1, 2], "parents": [-1, 0], "scores": [1.0]},
    "score above 1": {"tokens": [1, 2], "parents": [-1, 0], "scores": [1.0, 1.5]},
    "score is nan": {"tokens": [1, 2], "parents": [-1, 0], "scores": [1.0, float("nan")]},
    "unknown source": {"tokens": [1, 2], "parents": [-1, 0], "sources": [0, 99]},
    "too many rows": {"tokens": [1] * 1025, "parents": [-1] * 1025},
}


@pytest.mark.parametrize("case", TREES)
def test_malformed_trees(case: str) -> None:
    with pytest.raises(MalformedMessage):
        codec.tree_of(common_pb2.Tree(**TREES[case]))


LAWS = [([1, 2], [0.5]), ([1, 1], [0.5, 0.5]), ([1], [0.0]), ([1], [float("nan")]), ([1], [-1.0])]


@pytest.mark.parametrize(("tokens", "probabilities"), LAWS)
def test_malformed_laws(tokens: list[int], probabilities: list[float]) -> None:
    law = common_pb2.Law(tokens=tokens, probabilities=probabilities)
    with pytest.raises(MalformedMessage, match="laws"):
        codec.tree_of(common_pb2.Tree(tokens=[1, 2], parents=[-1, 0], laws=[common_pb2.Law(), law]))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_hint_or_malformed(data: bytes) -> None:
    try:
        hint, _ = codec.hint_of(data)
    except MalformedMessage:
        return
    assert 0 < len(hint.tail) <= hint.base_len


@pytest.mark.parametrize(
    "sampling",
    [
        common_pb2.Sampling(temperature=float("nan"), top_p=1.0),
        common_pb2.Sampling(temperature=-1.0, top_p=1.0),
        common_pb2.Sampling(temperature=1.0, top_p=0.0),
        common_pb2.Sampling(temperature=1.0, top_p=1.0, min_p=1.0),
        common_pb2.Sampling(temperature=1.0, top_p=1.0, verification=9),  # type: ignore[arg-type]
    ],
)
def test_malformed_sampling(sampling: common_pb2.Sampling) -> None:
    with pytest.raises(MalformedMessage, match="sampling"):
        codec.sampling_of(sampling)


@pytest.mark.parametrize("message", [target_pb2.TargetCommand(), target_pb2.TargetCommand(start=target_pb2.Start())])
def test_malformed_commands(message: target_pb2.TargetCommand) -> None:
    with pytest.raises(MalformedMessage):
        codec.target_command_of(message)


def test_emits_merge_while_unsent() -> None:
    first = Emit(SEQ, 4, (5, 6), 1, 3, 1, 24, 10, 20, cached=2)
    second = Emit(SEQ, 6, (7,), 0, 1, 1, 12, 30, 40, Finish.END_TOKEN)
    merged = first.then(second)
    assert (merged.base_len, merged.tokens, merged.finish, merged.want) == (4, (5, 6, 7), Finish.END_TOKEN, 12)
    assert (merged.accepted, merged.drafted, merged.passes) == (1, 4, 2)
    assert (merged.started_ns, merged.ended_ns, merged.cached) == (10, 40, 2)


def test_merged_emits_keep_a_digest_per_token_and_a_window_per_pass() -> None:
    first = Emit(SEQ, 4, (5, 6), 1, 3, 1, 24, digests=(50, 60), preempted=1, windows=(3,), branched=1)
    second = Emit(SEQ, 6, (7,), 0, 1, 1, 12, digests=(70,), preempted=2, windows=(1,))
    merged = first.then(second)
    assert merged.digests == (50, 60, 70)
    assert merged.windows == (3, 1)
    assert (merged.preempted, merged.branched) == (3, 1)


def test_syncs_merge_while_unsent() -> None:
    params = DraftParams(SAMPLING, 30)
    first = Sync(SEQ, 0, (1, 2, 3), 16, params)
    assert first.then(Sync(SEQ, 3, (4,), 8)) == Sync(SEQ, 0, (1, 2, 3, 4), 8, params)
    assert first.then(Sync(SEQ, 1, (9,), 8)).tokens == (1, 9)
    assert first.then(Sync(SEQ, 7, (9,), 8)) == Sync(SEQ, 7, (9,), 8)

"""What a pass computes: the bounds always hold, and the likeliest nodes come first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.plan import WORTH, Share, Waiting, plan_pass
from forerun.core.tree import ROOT, NodeLaw, TokenTree


def chain(*scores: float) -> TokenTree:
    tree = TokenTree(0)
    node = ROOT
    for token, score in enumerate(scores, 1):
        node = tree.add(node, token, score)
    return tree


def decoding(key: str, tree: TokenTree | None = None, most_nodes: int = 8) -> Waiting[str]:
    return Waiting(key, 1, tree or TokenTree(0), most_nodes)


def prefilling(key: str, debt: int, tree: TokenTree | None = None) -> Waiting[str]:
    return Waiting(key, debt, tree or TokenTree(0), 8)


def test_without_hints_everyone_decodes() -> None:
    plan = plan_pass([decoding("a"), decoding("b")], 16, 8)
    assert plan == [Share("a", 1, (), True), Share("b", 1, (), True)]


def test_a_chain_is_checked_as_far_as_it_pays() -> None:
    assert plan_pass([decoding("a", chain(0.9, 0.9, 0.9))], 16, 8) == [Share("a", 1, (1, 2, 3), True)]
    assert 0.5**4 > WORTH > 0.5**5
    assert plan_pass([decoding("a", chain(*[0.5] * 8))], 16, 8)[0].nodes == (1, 2, 3, 4)
    assert plan_pass([decoding("a", chain(WORTH / 2))], 16, 8)[0].nodes == ()


@pytest.mark.parametrize(("most", "budget", "nodes"), [(0, 16, 0), (2, 16, 2), (8, 4, 3), (8, 1, 0), (8, 9, 8)])
def test_request_and_pass_bound_the_nodes(most: int, budget: int, nodes: int) -> None:
    (share,) = plan_pass([decoding("a", chain(*[1.0] * 10), most)], budget, 8)
    assert share.nodes == tuple(range(1, nodes + 1))


def test_the_likeliest_nodes_of_all_sequences_come_first() -> None:
    """Reach: a 0.9, 0.81, 0.729; b 0.8, 0.08; three nodes fit."""
    waiting = [decoding("b", chain(0.8, 0.1)), decoding("a", chain(0.9, 0.9, 0.9))]
    plan = {share.key: share.nodes for share in plan_pass(waiting, 2 + 3, 8)}
    assert plan == {"a": (1, 2), "b": (1,)}
    plan = {share.key: share.nodes for share in plan_pass(waiting, 2 + 4, 8)}
    assert plan == {"a": (1, 2, 3), "b": (1,)}


def test_the_best_branch_is_followed() -> None:
    tree = TokenTree(0)
    tree.add(ROOT, 1, 0.3)
    best = tree.add(ROOT, 2, 0.6)
    tree.add(best, 3, 0.2)
    tip = tree.add(best, 4, 0.7)
    assert plan_pass([decoding("a", tree)], 16, 8)[0].nodes == (best, tip)


def test_decoding_comes_before_prompts_and_prompts_before_nodes() -> None:
    waiting = [prefilling("new", 20), decoding("old", chain(0.9, 0.9))]
    assert plan_pass(waiting, 9, 8) == [Share("new", 8, (), False), Share("old", 1, (), True)]
    assert plan_pass(waiting, 5, 8) == [Share("new", 4, (), False), Share("old", 1, (), True)]
    assert plan_pass(waiting, 10, 8)[1] == Share("old", 1, (1,), True)


def test_nodes_are_checked_only_where_the_debt_is_paid() -> None:
    tree = chain(0.9, 0.9)
    assert plan_pass([prefilling("a", 12, tree)], 32, 8) == [Share("a", 8, (), False)]
    assert plan_pass([prefilling("a", 8, tree)], 32, 8) == [Share("a", 8, (1, 2), True)]


def test_who_gets_nothing_has_no_share() -> None:
    waiting = [decoding("a"), decoding("b"), prefilling("c", 4)]
    assert plan_pass(waiting, 2, 8) == [Share("a", 1, (), True), Share("b", 1, (), True)]
    assert plan_pass(waiting[::-1], 2, 8) == [Share("b", 1, (), True), Share("a", 1, (), True)]
    assert plan_pass(waiting, 0, 8) == []
    assert plan_pass([], 8, 8) == []


@pytest.mark.parametrize("own_score", [0.0, 0.01, 0.5, 1.0])
def test_a_drawn_node_is_checked_whatever_its_own_score(own_score: float) -> None:
    """DESIGN 4, rejection sampling: whether a node is checked depends on its ancestors, never on its own q,
    which a draft may send as the score (see test_distribution: it biases the text)."""
    tree = TokenTree(0)
    law = NodeLaw((1, 2), (0.99, 0.01))
    above = tree.add(ROOT, 1, 0.9, None, law)
    drawn = tree.add(above, 2, own_score, None, law)
    assert plan_pass([decoding("a", tree)], 16, 8)[0].nodes == (above, drawn)


@pytest.mark.parametrize("own_score", [0.0, 0.3, 1.0])
def test_a_drawn_node_competes_by_its_ancestors(own_score: float) -> None:
    """The same, where two sequences want the one row that is left."""
    tree = TokenTree(0)
    tree.add(ROOT, 2, own_score, None, NodeLaw((1, 2), (0.7, 0.3)))
    plan = plan_pass([decoding("drawn", tree), decoding("other", chain(0.5))], 3, 8)
    usual = TokenTree(0)
    usual.add(ROOT, 1, 0.7, None, NodeLaw((1, 2), (0.7, 0.3)))
    assert [share.nodes for share in plan] == [
        share.nodes for share in plan_pass([decoding("drawn", usual), decoding("other", chain(0.5))], 3, 8)
    ]


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree(0)
    for _ in range(draw(st.integers(0, 10))):
        tree.add(draw(st.integers(0, len(tree) - 1)), draw(st.integers(0, 3)), draw(st.floats(0.0, 1.0)))
    return tree


waiting_lists = st.lists(st.tuples(st.integers(1, 30), trees(), st.integers(0, 6)), max_size=6).map(
    lambda items: [Waiting(str(key), *item) for key, item in enumerate(items)]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(waiting_lists, st.integers(0, 60), st.integers(1, 16))
def test_every_plan_keeps_its_bounds(waiting: list[Waiting[str]], budget: int, chunk: int) -> None:
    plan = plan_pass(waiting, budget, chunk)
    by_key = {item.key: item for item in waiting}
    assert [share.key for share in plan] == [item.key for item in waiting if item.key in {s.key for s in plan}]
    assert sum(share.debt_rows + len(share.nodes) for share in plan) <= budget
    for share in plan:
        item = by_key[share.key]
        assert 1 <= share.debt_rows <= min(item.debt, chunk)
        assert share.pays == (share.debt_rows == item.debt)
        assert share.pays or not share.nodes
        assert len(share.nodes) <= item.most_nodes
        assert share.nodes == () or item.tree.path(share.nodes[-1]) == list(share.nodes)
        assert all(item.tree.reach(node) >= WORTH * (1 - 1e-9) for node in share.nodes)
    spent = sum(share.debt_rows for share in plan)
    owed = sum(min(item.debt, chunk) for item in waiting)
    assert spent == min(budget, owed)  # debts use what there is before any node does


@settings(max_examples=200, deadline=None, derandomize=True)
@given(waiting_lists, st.integers(0, 60))
def test_no_node_left_out_is_likelier_than_one_taken(waiting: list[Waiting[str]], budget: int) -> None:
    """Along the chain that each sequence follows."""
    plan = plan_pass(waiting, budget, 64)
    by_key = {item.key: item for item in waiting}
    taken = [by_key[share.key].tree.reach(node) for share in plan for node in share.nodes]
    for share in plan:
        item = by_key[share.key]
        tip = share.nodes[-1] if share.nodes else ROOT
        best = max((item.tree.reach(child) for child in item.tree.children(tip)), default=0.0)
        if share.pays and len(share.nodes) < item.most_nodes and best >= WORTH * (1 + 1e-9):
            assert sum(s.debt_rows + len(s.nodes) for s in plan) == budget  # only a full pass leaves it out
            assert all(best <= reach * (1 + 1e-9) for reach in taken)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(waiting_lists, st.integers(0, 60), st.integers(1, 16))
def test_a_plan_is_a_function_of_its_arguments(waiting: list[Waiting[str]], budget: int, chunk: int) -> None:
    assert plan_pass(waiting, budget, chunk) == plan_pass(waiting, budget, chunk)

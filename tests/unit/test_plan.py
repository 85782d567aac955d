"""What a pass computes: the bounds always hold, the likeliest nodes come first, and none that does not pay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.cost import Load, PassCost
from forerun.core.plan import FAINT, FEWEST_PROMPT_ROWS, SLOWDOWN, WORTH, Share, Waiting, plan_pass
from forerun.core.tree import ROOT, NodeLaw, TokenTree

UNKNOWN = PassCost()
FLAT = PassCost([(1, 0.05), (256, 0.05)])
LINEAR = PassCost([(1, 0.01), (256, 2.56)])
LAW = NodeLaw((1, 2), (0.7, 0.3))


def staircase(tile: int, first_s: float, step_s: float, most: int = 64) -> PassCost:
    """Rows are padded to tiles: `first_s` for the first, `step_s` for each further one."""
    return PassCost([(rows, first_s + step_s * ((rows - 1) // tile)) for rows in range(1, most + 1)])


def chain(*scores: float, law: NodeLaw | None = None) -> TokenTree:
    tree = TokenTree(0)
    node = ROOT
    for token, score in enumerate(scores, 1):
        node = tree.add(node, token, score, None, law)
    return tree


def decoding(key: str, tree: TokenTree | None = None, most_nodes: int = 8) -> Waiting[str]:
    return Waiting(key, 1, 10, tree or TokenTree(0), most_nodes)


def prefilling(key: str, debt: int, tree: TokenTree | None = None, cached_len: int = 0) -> Waiting[str]:
    return Waiting(key, debt, cached_len, tree or TokenTree(0), 8)


def rows_of(plan: list[Share[str]]) -> dict[str, int]:
    return {share.key: share.debt_rows for share in plan}


def nodes_of(plan: list[Share[str]]) -> dict[str, tuple[int, ...]]:
    return {share.key: share.nodes for share in plan}


def test_without_hints_everyone_decodes() -> None:
    plan = plan_pass([decoding("a"), decoding("b")], 16, 8, UNKNOWN)
    assert plan == [Share("a", 1, (), True), Share("b", 1, (), True)]


def test_a_chain_is_checked_as_far_as_it_pays() -> None:
    assert plan_pass([decoding("a", chain(0.9, 0.9, 0.9))], 16, 8, UNKNOWN) == [Share("a", 1, (1, 2, 3), True)]
    assert 0.5**4 > WORTH > 0.5**5
    assert plan_pass([decoding("a", chain(*[0.5] * 8))], 16, 8, UNKNOWN)[0].nodes == (1, 2, 3, 4)
    assert plan_pass([decoding("a", chain(WORTH / 2))], 16, 8, UNKNOWN)[0].nodes == ()


@pytest.mark.parametrize(("most", "budget", "nodes"), [(0, 16, 0), (2, 16, 2), (8, 4, 3), (8, 1, 0), (8, 9, 8)])
def test_request_and_pass_bound_the_nodes(most: int, budget: int, nodes: int) -> None:
    (share,) = plan_pass([decoding("a", chain(*[1.0] * 10), most)], budget, 8, UNKNOWN)
    assert share.nodes == tuple(range(1, nodes + 1))


def test_the_likeliest_nodes_of_all_sequences_come_first() -> None:
    """Reach: a 0.9, 0.81, 0.729; b 0.8, 0.08; three nodes fit."""
    waiting = [decoding("b", chain(0.8, 0.1)), decoding("a", chain(0.9, 0.9, 0.9))]
    plan = {share.key: share.nodes for share in plan_pass(waiting, 2 + 3, 8, UNKNOWN)}
    assert plan == {"a": (1, 2), "b": (1,)}
    plan = {share.key: share.nodes for share in plan_pass(waiting, 2 + 4, 8, UNKNOWN)}
    assert plan == {"a": (1, 2, 3), "b": (1,)}


def test_decoding_comes_before_prompts_and_prompts_before_nodes() -> None:
    waiting = [prefilling("new", 20), decoding("old", chain(0.9, 0.9))]
    assert plan_pass(waiting, 9, 8, UNKNOWN) == [Share("new", 8, (), False), Share("old", 1, (), True)]
    assert plan_pass(waiting, 5, 8, UNKNOWN) == [Share("new", 4, (), False), Share("old", 1, (), True)]
    assert plan_pass(waiting, 10, 8, UNKNOWN)[1] == Share("old", 1, (1,), True)


def test_nodes_are_checked_only_where_the_debt_is_paid() -> None:
    tree = chain(0.9, 0.9)
    assert plan_pass([prefilling("a", 12, tree)], 32, 8, UNKNOWN) == [Share("a", 8, (), False)]
    assert plan_pass([prefilling("a", 8, tree)], 32, 8, UNKNOWN) == [Share("a", 8, (1, 2), True)]


def test_who_gets_nothing_has_no_share() -> None:
    waiting = [decoding("a"), decoding("b"), prefilling("c", 4)]
    assert plan_pass(waiting, 2, 8, UNKNOWN) == [Share("a", 1, (), True), Share("b", 1, (), True)]
    assert plan_pass(waiting[::-1], 2, 8, UNKNOWN) == [Share("b", 1, (), True), Share("a", 1, (), True)]
    assert plan_pass(waiting, 0, 8, UNKNOWN) == []
    assert plan_pass([], 8, 8, UNKNOWN) == []


def test_siblings_compete_like_any_node() -> None:
    """Reach: best 0.6, worse 0.3, tip 0.42, a leaf below the worse one 0.27."""
    tree = TokenTree(0)
    worse = tree.add(ROOT, 1, 0.3)
    best = tree.add(ROOT, 2, 0.6)
    tree.add(best, 3, 0.01)
    tip = tree.add(best, 4, 0.7)
    leaf = tree.add(worse, 5, 0.9)
    plans = [plan_pass([decoding("a", tree)], 1 + room, 8, UNKNOWN)[0].nodes for room in range(6)]
    assert plans == [(), (best,), (best, tip), (worse, best, tip), *[(worse, best, tip, leaf)] * 2]


def test_a_sibling_is_checked_if_it_is_worth_a_run_of_its_own() -> None:
    """A child of the node before it costs a row alone."""
    tree = chain(0.5, 0.5)
    tree.add(ROOT, 99, 0.4)
    free, dear = PassCost([(1, 1.0), (65, 1.1)]), PassCost([(1, 1.0), (65, 1.1)], branch_s=0.5)
    assert nodes_of(plan_pass([decoding("a", tree)], 100, 64, free)) == {"a": (1, 2, 3)}
    assert nodes_of(plan_pass([decoding("a", tree)], 100, 64, dear)) == {"a": (1, 2)}


def test_a_dear_branch_does_not_stand_before_what_is_cheap_behind_it() -> None:
    """Reach: 0.6, a branch of 0.35 with 0.3 below it, then 0.2 on the line."""
    tree = chain(0.6, 1 / 3)
    tree.add(tree.add(ROOT, 98, 0.35), 99, 0.9)
    dear = PassCost([(1, 1.0), (65, 1.1)], branch_s=0.9)
    assert nodes_of(plan_pass([decoding("a", tree)], 100, 64, dear)) == {"a": (1, 2)}
    assert nodes_of(plan_pass([decoding("a", tree, most_nodes=2)], 100, 64, dear)) == {"a": (1, 2)}
    assert nodes_of(plan_pass([decoding("a", tree)], 3, 64, dear)) == {"a": (1, 2)}
    fair = PassCost([(1, 1.0), (65, 1.1)], branch_s=0.2)
    assert nodes_of(plan_pass([decoding("a", tree)], 100, 64, fair)) == {"a": (1, 2, 3, 4)}


def test_siblings_share_a_chance_of_one() -> None:
    """Two children of 0.9 cannot both be likelier than one of 0.6 elsewhere."""
    tree = TokenTree(0)
    tree.add(ROOT, 1, 0.9)
    tree.add(ROOT, 2, 0.9)
    waiting = [decoding("two", tree), decoding("one", chain(0.6))]
    assert nodes_of(plan_pass(waiting, 3, 8, UNKNOWN)) == {"two": (), "one": (1,)}
    assert nodes_of(plan_pass(waiting, 4, 8, UNKNOWN)) == {"two": (1,), "one": (1,)}


def test_an_estimate_replaces_the_scores() -> None:
    doubted = replace(decoding("a", chain(0.9, 0.9, 0.9)), chance=lambda row, depth: {1: 0.5, 2: 0.5, 3: 0.0}[row])
    assert plan_pass([doubted], 16, 8, FLAT)[0].nodes == (1, 2)
    waiting = [doubted, decoding("b", chain(0.6))]
    assert nodes_of(plan_pass(waiting, 3, 8, FLAT)) == {"a": (), "b": (1,)}


# --- by the cost of a pass ---------------------------------------------------------------------------


def test_an_idle_machine_checks_all_that_can_be_reached() -> None:
    tree = chain(*[0.3] * 6)
    tree.add(ROOT, 9, 0.01)
    tree.add(ROOT, 10, 0.0)
    assert plan_pass([decoding("a", tree)], 64, 8, FLAT)[0].nodes == (1, 2, 3, 4, 5, 6, 7)


def test_a_saturated_machine_checks_none() -> None:
    """Where a row costs as much alone as in company, a guess that may be wrong never pays."""
    waiting = [decoding(str(key), chain(0.9, 0.9)) for key in range(16)]
    assert set(nodes_of(plan_pass(waiting, 256, 8, LINEAR)).values()) == {()}


def test_speculation_shrinks_with_load() -> None:
    """A pass of 1 + rows / 32: what one sequence checks is deep, what each of many checks is not."""
    cost = PassCost([(rows, 1.0 + rows / 32) for rows in (1, 256)])
    checked = []
    for count in (1, 4, 16, 64):
        waiting = [decoding(str(key), chain(*[0.7] * 8)) for key in range(count)]
        checked.append(sum(len(nodes) for nodes in nodes_of(plan_pass(waiting, 512, 8, cost)).values()) / count)
    assert checked == sorted(checked, reverse=True)
    assert checked[0] >= 4 and checked[-1] <= 1


def test_a_tile_of_rows_is_filled() -> None:
    """Rows 2, 3 and 4 are free, the fifth costs as much as the first four."""
    cost = staircase(4, 1.0, 1.0)
    assert plan_pass([decoding("a", chain(*[0.3] * 8))], 64, 8, cost)[0].nodes == (1, 2, 3)
    waiting = [decoding("a", chain(*[0.3] * 8)), decoding("b")]
    assert nodes_of(plan_pass(waiting, 64, 8, cost)) == {"a": (1, 2), "b": ()}


def test_a_step_is_taken_for_all_that_stand_on_it() -> None:
    """Tokens per second after 3 nodes: 4. After 4: 3.3, after 7: 5.3; the first descent is not the end."""
    assert plan_pass([decoding("a", chain(*[1.0] * 7))], 64, 8, staircase(4, 1.0, 0.5))[0].nodes == (*range(1, 8),)
    assert plan_pass([decoding("a", chain(*[1.0] * 4))], 64, 8, staircase(4, 1.0, 0.5))[0].nodes == (1, 2, 3)


def test_a_node_behind_a_long_context_costs_more() -> None:
    cost = PassCost([(1, 1.0), (256, 1.0)], row_tile_s=0.02)
    near, far = decoding("a", chain(0.3)), Waiting("a", 1, 100 * 128, chain(0.3), 8)
    assert plan_pass([near], 64, 8, cost)[0].nodes == (1,)
    assert plan_pass([far], 64, 8, cost)[0].nodes == ()


# --- prompts beside decoding -------------------------------------------------------------------------


def test_a_prompt_makes_a_pass_longer_by_a_bounded_factor() -> None:
    cost = PassCost([(1, 1.0), (101, 2.0), (201, 3.0)])
    rows = rows_of(plan_pass([decoding("old"), prefilling("new", 500)], 400, 300, cost))
    assert rows == {"old": 1, "new": round(100 * (SLOWDOWN - 1))}
    assert rows_of(plan_pass([decoding("old"), prefilling("new", 500)], 400, 300, cost, slowdown=3.0))["new"] == 200
    assert rows_of(plan_pass([prefilling("new", 500)], 400, 300, cost)) == {"new": 300}  # nobody to be slowed down


def test_prompts_move_on_whatever_they_cost() -> None:
    waiting = [decoding("old"), prefilling("a", 500), prefilling("b", 5), prefilling("c", 500)]
    plan = rows_of(plan_pass(waiting, 400, 300, LINEAR))
    assert plan == {"old": 1, "a": FEWEST_PROMPT_ROWS}
    plan = rows_of(plan_pass([waiting[0], *waiting[2:]], 400, 300, LINEAR))
    assert plan == {"old": 1, "b": FEWEST_PROMPT_ROWS}


def test_few_large_chunks_rather_than_many_small_ones() -> None:
    """110 rows fit; 100 go to the first in order, and ten are not worth another run."""
    cost = PassCost([(1, 1.0), (111, SLOWDOWN), (221, 3.0)])
    waiting = [decoding("old"), prefilling("a", 500), prefilling("b", 500)]
    assert rows_of(plan_pass(waiting, 400, 100, cost)) == {"old": 1, "a": 100}
    assert rows_of(plan_pass([waiting[0], *waiting[:0:-1]], 400, 100, cost)) == {"old": 1, "b": 100}
    assert rows_of(plan_pass(waiting, 400, 80, cost)) == {"old": 1, "a": 80, "b": 30}


def test_a_chunk_behind_a_long_context_is_smaller() -> None:
    cost = PassCost([(1, 1.0), (101, 2.0), (201, 3.0)], row_tile_s=0.001)
    chunks = [
        rows_of(plan_pass([decoding("old"), prefilling("new", 500, None, cached)], 400, 300, cost))["new"]
        for cached in (0, 1000, 4000, 1000000)
    ]
    assert chunks == sorted(chunks, reverse=True)
    most = 100 * (SLOWDOWN - 1.0)  # 100 rows double the pass
    assert 0.8 * most < chunks[0] <= most and chunks[2] < 30 and chunks[3] == FEWEST_PROMPT_ROWS


# --- rejection sampling ------------------------------------------------------------------------------


@pytest.mark.parametrize("own_score", [0.0, 0.01, 0.5, 1.0])
def test_a_drawn_node_is_checked_whatever_its_own_score(own_score: float) -> None:
    """DESIGN 4, rejection sampling: whether a node is checked depends on its ancestors, never on its own q,
    which a draft may send as the score (see test_distribution: it biases the text)."""
    drawn = Waiting("a", 1, 10, chain(0.9, own_score, law=LAW), 8, chain_only=True)
    assert plan_pass([drawn], 16, 8, UNKNOWN)[0].nodes == (1, 2)


def test_one_child_of_a_node_is_checked() -> None:
    tree = chain(0.5, 0.5)
    tree.add(ROOT, 7, 0.9)
    assert plan_pass([Waiting("a", 1, 10, tree, 8, chain_only=True)], 16, 8, FLAT)[0].nodes == (3,)


def test_drawn_nodes_are_checked_by_what_happened_before() -> None:
    waiting = Waiting("a", 1, 10, chain(*[0.9] * 8, law=LAW), 8, chain_only=True)
    counts = [
        len(plan_pass([replace(waiting, drawn_chance=chance)], 16, 8, UNKNOWN)[0].nodes) for chance in (0.0, 0.3, 0.9)
    ]
    assert counts == [0, 2, 8]


APART = PassCost([(1, 1.0), (65, 1.5)], tile_s=0.02, branch_s=0.1)
DEAR = PassCost([(1, 1.0), (65, 1.1)], branch_s=0.3)
costs = st.sampled_from([UNKNOWN, FLAT, LINEAR, APART, DEAR, staircase(4, 1.0, 0.5), PassCost([(1, 1.0), (65, 3.0)])])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    st.lists(st.floats(0.0, 1.0), max_size=5),
    costs,
    st.integers(2, 20),
)
def test_what_was_drawn_decides_nothing(
    scores: list[float], others: list[float], guessed: list[float], cost: PassCost, budget: int
) -> None:
    """Two outcomes of one draft, of different scores and lengths (an end token, a faint branch): a depth that
    both reached is checked in both or in neither, and the other sequence of the pass is served the same."""
    plans = []
    for outcome in (scores, others):
        drawn = Waiting("drawn", 1, 10, chain(*outcome, law=LAW), 6, chain_only=True)
        plans.append(nodes_of(plan_pass([drawn, decoding("guessed", chain(*guessed))], budget, 8, cost)))
    shorter = min(len(scores), len(others))
    assert plans[0]["drawn"][:shorter] == plans[1]["drawn"][:shorter]
    assert plans[0].get("guessed") == plans[1].get("guessed")


# --- properties --------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree(0)
    for _ in range(draw(st.integers(0, 10))):
        tree.add(draw(st.integers(0, len(tree) - 1)), draw(st.integers(0, 3)), draw(st.floats(0.0, 1.0)))
    return tree


def reach_of(tree: TokenTree, node: int) -> float:
    """The slow obvious version."""
    chance = 1.0
    while node != ROOT:
        parent = tree.parents[node]
        chance *= tree.scores[node] / max(1.0, sum(tree.scores[child] for child in tree.children(parent)))
        node = parent
    return chance


waiting_lists = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 300), trees(), st.integers(0, 6), st.booleans()), max_size=6
).map(lambda items: [Waiting(str(key), *item) for key, item in enumerate(items)])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(waiting_lists, st.integers(0, 60), st.integers(1, 16), costs)
def test_every_plan_keeps_its_bounds(waiting: list[Waiting[str]], budget: int, chunk: int, cost: PassCost) -> None:
    plan = plan_pass(waiting, budget, chunk, cost)
    by_key = {item.key: item for item in waiting}
    assert [share.key for share in plan] == [item.key for item in waiting if item.key in {s.key for s in plan}]
    assert sum(share.debt_rows + len(share.nodes) for share in plan) <= budget
    for share in plan:
        item = by_key[share.key]
        assert 1 <= share.debt_rows <= min(item.debt, chunk)
        assert share.pays == (share.debt_rows == item.debt)
        assert share.pays or not share.nodes
        assert len(share.nodes) <= item.most_nodes
        assert list(share.nodes) == sorted(set(share.nodes))
        assert all(item.tree.parents[node] in (ROOT, *share.nodes) for node in share.nodes)
        assert not item.chain_only or len({item.tree.parents[node] for node in share.nodes}) == len(share.nodes)
    prompts = sum(share.debt_rows for share in plan if by_key[share.key].debt > 1)
    owed = sum(min(item.debt, chunk) for item in waiting if item.debt > 1)
    decoders = min(budget, sum(item.debt == 1 for item in waiting))
    assert sum(share.debt_rows for share in plan if by_key[share.key].debt == 1) == decoders
    room = min(owed, budget - decoders)
    assert min(FEWEST_PROMPT_ROWS, room) <= prompts <= room
    assert decoders or prompts == room  # nobody decodes: the budget alone bounds prompts


def prefixes(waiting: list[Waiting[str]], plan: list[Share[str]], room: int) -> Iterator[tuple[float, Load, int]]:
    """(tokens, load, nodes) of every prefix of the nodes, best first: the slow obvious version."""
    items, ranked = {item.key: item for item in waiting}, []
    runs = {share.key: Load.of_run(share.debt_rows, items[share.key].cached_len) for share in plan}
    decoding = [load for key, load in runs.items() if items[key].debt == 1]
    load = sum(decoding or runs.values(), Load(0))
    for turn, share in enumerate(plan):
        tree, item = items[share.key].tree, items[share.key]
        if share.pays:
            looked_at = [row for row in range(1, len(tree)) if reach_of(tree, tree.parents[row]) >= FAINT]
            best = sorted((-reach_of(tree, row), tree.depth(row), row) for row in looked_at)
            columns = item.cached_len + item.debt
            ranked += [(*each[:2], turn, each[2], columns, tree.parents[each[2]]) for each in best[: item.most_nodes]]
    tokens = float(len(decoding) or sum(share.pays for share in plan))
    yield tokens, load, 0
    led: set[tuple[int, int]] = set()
    for count, (reach, depth, turn, _, columns, parent) in enumerate(sorted(ranked)[:room], 1):
        tokens -= reach
        apart, tiles = (turn, parent) in led, -(-(columns + depth) // 128)
        led.add((turn, parent))
        load += Load(1, tiles * apart, tiles, branches=int(apart))
        yield tokens, load, count


@settings(max_examples=300, deadline=None, derandomize=True)
@given(waiting_lists, st.integers(0, 60), costs.filter(lambda cost: cost.known))
def test_no_other_number_of_nodes_commits_more_per_second(
    waiting: list[Waiting[str]], budget: int, cost: PassCost
) -> None:
    waiting = [replace(item, chain_only=False) for item in waiting]
    plan = plan_pass(waiting, budget, 64, cost)
    room = budget - sum(share.debt_rows for share in plan)
    tokens, load = expected(waiting, plan)
    rates = [tokens / cost.seconds(load) for tokens, load, _ in prefixes(waiting, plan, room) if load.rows]
    assert not rates or tokens / cost.seconds(load) >= max(rates) * (1 - 1e-9)


def expected(waiting: list[Waiting[str]], plan: list[Share[str]]) -> tuple[float, Load]:
    """(tokens, load) of the plan, its prompts left out beside decoding."""
    items = {item.key: item for item in waiting}
    decodes = any(items[share.key].debt == 1 for share in plan)
    tokens, load = 0.0, Load(0)
    for share in plan:
        item = items[share.key]
        if item.debt == 1 or not decodes:
            load += Load.of_run(share.debt_rows, item.cached_len)
            tokens += share.pays
        led: set[int] = set()
        for node in sorted(share.nodes, key=lambda node: (-reach_of(item.tree, node), item.tree.depth(node), node)):
            apart = item.tree.parents[node] in led
            led.add(item.tree.parents[node])
            tiles = -(-(item.cached_len + item.debt + item.tree.depth(node)) // 128)
            tokens += reach_of(item.tree, node)
            load += Load(1, tiles * apart, tiles, branches=int(apart))
    return tokens, load


@settings(max_examples=200, deadline=None, derandomize=True)
@given(waiting_lists, costs)
def test_a_prompt_that_is_read_changes_no_node_of_those_that_decode(
    waiting: list[Waiting[str]], cost: PassCost
) -> None:
    """A pass that is long already would take in whatever comes cheap then, and be longer still."""
    waiting = [replace(item, debt=1) for item in waiting] or [decoding("one", chain(0.9, 0.8))]
    alone = nodes_of(plan_pass(waiting, 1000, 64, cost))
    beside = nodes_of(plan_pass([*waiting, prefilling("long", 4000)], 1000, 64, cost))
    assert {key: nodes for key, nodes in beside.items() if key != "long"} == alone
    ends = [prefilling(f"ends {number}", 3) for number in range(3)]
    beside = nodes_of(plan_pass([*waiting, *ends], 1000, 64, cost))
    assert {key: nodes for key, nodes in beside.items() if "ends" not in key} == alone


@settings(max_examples=200, deadline=None, derandomize=True)
@given(waiting_lists, st.integers(0, 60), costs.filter(lambda cost: cost not in (APART, DEAR)))
def test_no_node_left_out_is_likelier_than_one_taken(waiting: list[Waiting[str]], budget: int, cost: PassCost) -> None:
    """Unless branches cost what rows do not."""
    waiting = [replace(item, chain_only=False) for item in waiting]
    plan = plan_pass(waiting, budget, 64, cost)
    by_key = {item.key: item for item in waiting}
    taken = [reach_of(by_key[share.key].tree, node) for share in plan for node in share.nodes]
    for share in plan:
        item = by_key[share.key]
        if share.pays and len(share.nodes) < item.most_nodes:
            left = [reach_of(item.tree, row) for row in range(1, len(item.tree)) if row not in share.nodes]
            assert max(left, default=0.0) <= min(taken, default=1.0) * (1 + 1e-9)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(waiting_lists, st.integers(0, 60), st.integers(1, 16), costs)
def test_a_plan_is_a_function_of_its_arguments(
    waiting: list[Waiting[str]], budget: int, chunk: int, cost: PassCost
) -> None:
    assert plan_pass(waiting, budget, chunk, cost) == plan_pass(waiting, budget, chunk, cost)


def test_prompts_move_on_however_many_decode() -> None:
    waiting = [decoding(f"d{number}") for number in range(100)] + [prefilling("new", 100)]
    shares = {share.key: share.debt_rows for share in plan_pass(waiting, 80, 32, PassCost())}
    assert shares["new"] == 16
    assert sum(rows == 1 for rows in shares.values()) == 64


def test_a_chain_follows_the_likeliest_child_whoever_came_first() -> None:
    tree = TokenTree(0)
    tree.add(ROOT, 1, 0.1)
    likely = tree.add(ROOT, 2, 0.9)
    below = tree.add(likely, 3, 0.8)
    (share,) = plan_pass([replace(decoding("a", tree), chain_only=True)], 16, 8, UNKNOWN)
    assert share.nodes == (likely, below)

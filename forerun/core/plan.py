"""Which rows a pass computes: committed tokens that lack KV, then nodes of the trees while they pay.

A decoding sequence owes one row, the last committed token; a new one owes its prompt, in chunks.
Both are the same debt. Nodes are only checked for sequences whose debt is paid in this pass, because
only then do logits exist to judge them. How many is decided by what a pass costs (core/cost.py): the
plan commits the most tokens per second that it can expect, so a full machine checks none by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from forerun.core.cost import Load, PassCost
from forerun.core.pages import TILE
from forerun.core.tree import ROOT, TokenTree

Key = TypeVar("Key", bound=Hashable)

WORTH = 0.04
"""While no cost is known: a node less likely than this is left unchecked."""

FAINT = 0.002
"""What comes after a node less likely than this is not looked at."""

LEAST_PROMPT_ROWS = 16
"""A smaller chunk is hardly worth a run beside that of another prompt."""

FEWEST_PROMPT_ROWS = 4
"""Prompts move on by so many rows a pass whatever that costs the others: even the longest comes to its end."""

SLOWDOWN = 1.5
"""How many times as long as decoding alone prompts may make a pass; single passes are off by half as much again."""

TYPICAL = 0.6
"""Chance of a drawn node whose sequence has no history."""


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Key]):
    """What one sequence could use in the next pass."""

    key: Key
    debt: int  # committed tokens without KV, at least 1: the last one always is
    cached_len: int  # committed tokens with KV
    tree: TokenTree
    most_nodes: int  # bound of this request on checked nodes
    chain_only: bool = False  # rejection sampling: one child per node
    chance: Callable[[int, int], float] | None = None  # (row of tree, its depth), given its parent; None: tree.scores
    drawn_chance: float = TYPICAL  # the same for any node with a law, by what happened before it was drawn


@dataclass(frozen=True, slots=True)
class Share(Generic[Key]):
    """What it gets."""

    key: Key
    debt_rows: int
    nodes: tuple[int, ...]  # rows of the tree: ancestor-closed, ascending, so parents before children
    pays: bool  # the debt is paid: the root and the nodes have logits, and are judged


def plan_pass(
    waiting: Sequence[Waiting[Key]], row_budget: int, chunk: int, cost: PassCost, slowdown: float = SLOWDOWN
) -> list[Share[Key]]:
    """Divide `row_budget` rows, in the order given where it does not reach (rotate it to be fair).

    Decoding first, then prompt chunks of at most `chunk` rows, then nodes, best first over all sequences: of all nodes,
    or of each sequence's likeliest line alone, whichever commits more. Prompts may make a pass `slowdown` times as
    long as decoding alone would; nodes are those that would pay without them, or a pass that is long already would
    grow by all that comes cheap then.
    Returns shares in the order of `waiting`, without those that got nothing.
    """
    debts, load, decoding = _debts(waiting, row_budget, chunk, cost, slowdown)
    paid = [item for item in waiting if debts.get(item.key) == item.debt]
    if decoding.rows:
        alone = sum(item.debt == 1 for item in paid)
        nodes = _nodes(paid, alone, decoding, row_budget - load.rows, cost)
    else:
        nodes = _nodes(paid, len(paid), load, row_budget - load.rows, cost)
    return [
        Share(item.key, debts[item.key], tuple(sorted(nodes.get(item.key, ()))), debts[item.key] == item.debt)
        for item in waiting
        if item.key in debts
    ]


# --- debts -------------------------------------------------------------------------------------------


def _debts(
    waiting: Sequence[Waiting[Key]], row_budget: int, chunk: int, cost: PassCost, slowdown: float
) -> tuple[dict[Key, int], Load, Load]:
    """Rows by key, what they cost together, and what those cost that decode."""
    debts: dict[Key, int] = {}
    load = Load(0)
    spare = min(LEAST_PROMPT_ROWS, row_budget // 4) if any(item.debt > 1 for item in waiting) else 0
    for item in waiting:
        if item.debt == 1 and load.rows < row_budget - spare:
            debts[item.key] = 1
            load += Load.of_run(1, item.cached_len)
    decoding = load
    alone_s = cost.alone(decoding) if debts else 0.0
    limit_s = slowdown * alone_s if alone_s > 0.0 else float("inf")
    given = 0
    for item in waiting:
        most = min(item.debt, chunk, row_budget - load.rows)
        if item.debt == 1 or most < 1:
            continue
        rows = _most_rows(item, most, load, cost, limit_s) if limit_s < float("inf") else most
        rows = max(rows, min(most, FEWEST_PROMPT_ROWS - given))
        if rows < (min(most, LEAST_PROMPT_ROWS) if given >= FEWEST_PROMPT_ROWS else 1):
            break  # a few rows here and there cost more runs than they move prompts
        debts[item.key] = rows
        load += Load.of_run(rows, item.cached_len)
        given += rows
    return debts, load, decoding


def _most_rows(item: Waiting[Key], most: int, load: Load, cost: PassCost, limit_s: float) -> int:
    """Rows of its debt, at most `most`, with which the pass stays within `limit_s` seconds; may be 0."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if cost.seconds(load + Load.of_run(middle, item.cached_len)) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


# --- nodes -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Candidates:
    """Columns, an entry per node that could be checked; `reach` never grows from a node to its child."""

    owner: list[int] = field(default_factory=list)  # index into the paid sequences
    row: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    tiles: list[int] = field(default_factory=list)
    node: list[int] = field(default_factory=list)  # row of the tree, or the depth of a drawn one
    parent: list[int] = field(default_factory=list)

    def add(self, owner: int, row: int, depth: int, reach: float, columns: int, node: int, parent: int) -> None:
        self.owner.append(owner)
        self.row.append(row)
        self.depth.append(depth)
        self.reach.append(reach)
        self.tiles.append((columns + depth + TILE - 1) // TILE)
        self.node.append(node)
        self.parent.append(parent)


def _nodes(paid: Sequence[Waiting[Key]], certain: int, load: Load, room: int, cost: PassCost) -> dict[Key, list[int]]:
    """Rows to check by key: of all nodes, or of all lines, best first, the prefix expected to commit most per second.

    certain: tokens that a pass of `load` commits without any.
    """
    if room < 1:
        return {}
    found = _Candidates()
    for owner, item in enumerate(paid):
        if item.most_nodes > 0:
            columns = item.cached_len + item.debt
            if _is_drawn(item):  # a chain, also where it is not there
                for row, depth, reach in _drawn(item):
                    found.add(owner, row, depth, reach, columns, depth, depth - 1)
            else:
                for row, depth, reach in _guessed(item):
                    found.add(owner, row, depth, reach, columns, row, item.tree.parents[row])
    order = _order(found)
    orders = [order]
    if any(_branches(order, found)):  # a dear branch must not stand before what is cheap behind it
        orders.append(_lines(order, found))
    plans = [_paying(certain, load, _within(paid, found, each, room), found, cost) for each in orders]
    chosen: dict[Key, list[int]] = {}
    for index in max(plans, key=lambda plan: plan[0])[1]:
        item, row = paid[found.owner[index]], found.row[index]
        if row < len(item.tree):  # else a drawn node that was allowed for and is not there
            chosen.setdefault(item.key, []).append(row)
    return chosen


def _order(found: _Candidates) -> list[int]:
    """All candidates, by reach, then depth, then row: so ancestors come first."""
    depths, reach = np.array(found.depth, dtype=np.int64), np.array(found.reach, dtype=np.float64)
    order: list[int] = np.lexsort((depths, -reach)).tolist()  # stable, so rows of equals stay in order
    return order


def _within(paid: Sequence[Waiting[Key]], found: _Candidates, order: list[int], room: int) -> list[int]:
    """The first `room` of `order`, of each sequence as many as it may have."""
    left = [item.most_nodes for item in paid]
    kept: list[int] = []
    for index in order:
        owner = found.owner[index]
        if left[owner] > 0:
            left[owner] -= 1
            kept.append(index)
            if len(kept) == room:
                break
    return kept


def _paying(certain: int, load: Load, ranked: list[int], found: _Candidates, cost: PassCost) -> tuple[float, list[int]]:
    """(tokens per second, the nodes to check): the best (certain + sum of reach) / seconds over every prefix.

    Over every one, since padding makes the cost a staircase: a node that opens a step may pay
    only with those that stand on the same step. While no cost is known the tokens stand for the rate.
    """
    reach = np.array([found.reach[index] for index in ranked], dtype=np.float64)
    tiles = np.array([found.tiles[index] for index in ranked], dtype=np.int64)
    seconds = cost.along(load, tiles, np.array(_branches(ranked, found), dtype=np.bool_), mixing=certain > 1)
    tokens = certain + np.concatenate(([0.0], np.cumsum(reach)))
    if seconds[0] <= 0.0:
        worthy = int(np.count_nonzero(reach >= WORTH))
        return float(tokens[worthy]), ranked[:worthy]
    rates = tokens / seconds
    best = int(np.argmax(rates))  # the first of equals: no row for nothing
    return float(rates[best]), ranked[:best]


def _branches(ranked: list[int], found: _Candidates) -> list[bool]:
    """[ranked] whether a node is a run of its own: another child of its parent comes before it."""
    seen: set[tuple[int, int]] = set()
    apart = []
    for index in ranked:
        above = found.owner[index], found.parent[index]
        apart.append(above in seen)
        seen.add(above)
    return apart


def _lines(ranked: list[int], found: _Candidates) -> list[int]:
    """Of `ranked` those that are on no branch: of each sequence its likeliest line."""
    kept: list[int] = []
    on_line: set[tuple[int, int]] = set()
    for index, branches in zip(ranked, _branches(ranked, found), strict=True):
        owner, parent = found.owner[index], found.parent[index]
        if not branches and (parent == ROOT or (owner, parent) in on_line):
            on_line.add((owner, found.node[index]))
            kept.append(index)
    return kept


def _guessed(item: Waiting[Key]) -> Iterator[tuple[int, int, float]]:
    """(row, depth, reach) of every node worth looking at; siblings share a chance of 1 at most."""
    tree = item.tree
    depths, reaches = [0] * len(tree), [1.0] + [0.0] * (len(tree) - 1)
    for node in range(len(tree)):
        if reaches[node] < FAINT:
            continue  # nor anything below it: a large tree costs no more than its likely part
        children, depth = list(tree.children(node)), depths[node] + 1
        chances = [tree.scores[child] if item.chance is None else item.chance(child, depth) for child in children]
        chances = [min(max(0.0, chance), 1.0) for chance in chances]
        if item.chain_only and children:
            likeliest = max(range(len(children)), key=chances.__getitem__)
            children, chances = [children[likeliest]], [chances[likeliest]]
        together = max(1.0, sum(chances))
        for child, chance in zip(children, chances, strict=True):
            depths[child], reaches[child] = depth, reaches[node] * chance / together
    yield from ((row, depths[row], reaches[row]) for row in range(1, len(tree)) if reaches[row] > 0.0)


def _is_drawn(item: Waiting[Key]) -> bool:
    """Its nodes were drawn from a law (rejection sampling), rather than guessed."""
    return len(item.tree) > 1 and item.tree.laws[1] is not None


def _drawn(item: Waiting[Key]) -> Iterator[tuple[int, int, float]]:
    """The chain of drawn nodes, as long as the request allows, whether it is there or not.

    Whether a drawn node is checked must not depend on what was drawn: neither on its token and score, nor
    on what follows it (its score decides how far a draft goes on, an end token ends the chain), or unlikely
    draws would be judged less often than they are drawn. So all depths compete by a chance that was
    settled beforehand; rows that do not exist are allowed for and left out in the end.
    """
    chain = _first_children(item.tree)
    chance = min(max(0.0, item.drawn_chance), 1.0)
    for depth in range(1, item.most_nodes + 1):
        yield chain[depth] if depth < len(chain) else len(item.tree), depth, chance**depth


def _first_children(tree: TokenTree) -> list[int]:
    """Rows of the chain that was there first, from the root down."""
    chain = [ROOT]
    while (child := next(iter(tree.children(chain[-1])), None)) is not None:
        chain.append(child)
    return chain

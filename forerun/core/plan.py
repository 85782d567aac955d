"""Which rows a pass computes: committed tokens that lack KV, then nodes by their chance to be reached.

A decoding sequence owes one row, the last committed token; a new one owes its prompt, in chunks.
Both are the same debt. Nodes are only checked for sequences whose debt is paid in this pass, because
only then do logits exist to judge them.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from forerun.core.tree import ROOT, TokenTree

Key = TypeVar("Key", bound=Hashable)

WORTH = 0.04
"""A node less likely than this is left unchecked: a further row costs a pass about this fraction."""


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Key]):
    """What one sequence could use in the next pass."""

    key: Key
    debt: int  # committed tokens without KV, at least 1: the last one always is
    tree: TokenTree
    most_nodes: int  # bound of this request on checked nodes


@dataclass(frozen=True, slots=True)
class Share(Generic[Key]):
    """What it gets."""

    key: Key
    debt_rows: int
    nodes: tuple[int, ...]  # a chain of rows below the root, top down
    pays: bool  # the debt is paid: the last rows are the root and the nodes, and they are judged


def plan_pass(waiting: Sequence[Waiting[Key]], row_budget: int, chunk: int) -> list[Share[Key]]:
    """Divide `row_budget` rows, in the order given where it does not reach (rotate it to be fair).

    Decoding first, then prompt chunks of at most `chunk` rows, then nodes, best first over all
    sequences. Returns shares in the order of `waiting`, without those that got nothing.
    """
    left = row_budget
    debts: dict[Key, int] = {}
    for turn in (True, False):  # decoding sequences, then prefilling ones
        for item in waiting:
            if (item.debt == 1) is turn and left > 0:
                debts[item.key] = min(item.debt, chunk, left)
                left -= debts[item.key]
    paid = {item.key: item for item in waiting if debts.get(item.key) == item.debt}
    chains = _best_chains(paid, left)
    return [
        Share(item.key, debts[item.key], tuple(chains.get(item.key, ())), item.key in paid)
        for item in waiting
        if item.key in debts
    ]


def _best_chains(paid: dict[Key, Waiting[Key]], budget: int) -> dict[Key, list[int]]:
    """Grow every sequence's likeliest chain, the likeliest next node of all first."""
    chains: dict[Key, list[int]] = {key: [] for key in paid}
    frontier: list[tuple[float, int, Key, int, float]] = []  # (-rank, tie-break, key, row, reach)
    tie_break = count()

    def offer(key: Key, tip: int, reach: float) -> None:
        item = paid[key]
        best = max(item.tree.children(tip), key=item.tree.scores.__getitem__, default=None)
        if best is None or len(chains[key]) >= item.most_nodes:
            return
        below = reach * item.tree.scores[best]
        # A drawn node (rejection sampling) is checked or not by its ancestors alone: were its own score,
        # which may follow its q, to decide, unlikely draws would be judged less often than they are drawn.
        rank = below if item.tree.laws[best] is None else reach
        if rank >= WORTH:
            heapq.heappush(frontier, (-rank, next(tie_break), key, best, below))

    for key in paid:
        offer(key, ROOT, 1.0)
    while frontier and budget > 0:
        _, _, key, node, reach = heapq.heappop(frontier)
        chains[key].append(node)
        budget -= 1
        offer(key, node, reach)
    return chains

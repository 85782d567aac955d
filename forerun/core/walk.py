"""The walk: from the root along the target's own tokens, as far as the tree was checked.

    committed_len = base_len + accepted + 1        (less what a stop cut off)

The logits that judge a node are those of its parent: `pick` is asked at the parent's row, and the
node is accepted if and only if its token is the answer. Asked lazily, so a pass costs as many picks
as it commits tokens, with speculation or without.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from forerun.core.tree import ROOT, TokenTree

Pick = Callable[[int, int, int | None], int]
"""(row, depth below the root, the checked child or None) -> the target's token after that row.

The child matters to rejection sampling alone, which checks chains; greedy and coupled picks ignore it.
"""


@dataclass(frozen=True, slots=True)
class Walk:
    """What one pass decided."""

    tokens: tuple[int, ...]  # newly committed: accepted ones, then one more unless a stop cut it off
    path: tuple[int, ...]  # rows of the accepted nodes
    ended: bool  # the last token is an end token

    @property
    def accepted(self) -> int:
        return len(self.path)


def walk(tree: TokenTree, checked: Container[int], pick: Pick, ends: Container[int], room: int) -> Walk:
    """Follow the target through the nodes that were `checked` (ancestor-closed; the root always is).

    Args:
        ends: tokens that end the answer where they stand.
        room: tokens that may still be committed, at least 1.
    """
    tokens: list[int] = []
    path: list[int] = []
    node = ROOT
    while True:
        proposal = next((child for child in tree.children(node) if child in checked), None)
        token = pick(node, len(path), proposal)
        tokens.append(token)
        child = tree.child(node, token)
        accepted = child is not None and child in checked
        if accepted:
            assert child is not None
            path.append(child)
            node = child
        if token in ends:
            return Walk(tuple(tokens), tuple(path), ended=True)
        if not accepted or len(tokens) == room:
            return Walk(tuple(tokens), tuple(path), ended=False)

"""The token tree: every guess about one sequence, whoever made it.

Row 0 is the root, the last committed token; `parents[0] == -1` and `parents[i] < i`. A chain is the
tree -1, 0, 1, ... (SpecInfer, EAGLE-2). The tree knows tokens and scores; it does not know which
of them were checked, where their KV lies, or what the target thinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from forerun.core.errors import MalformedMessage
from forerun.core.params import Source

ROOT = 0


@dataclass(frozen=True, slots=True)
class NodeLaw:
    """The k tokens a node was drawn from and their renormalised probabilities (rejection mode)."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one sequence's tree may hold, whatever is sent."""

    most_nodes: int = 1 << 30
    vocab_size: int = 1 << 31
    ends: frozenset[int] = frozenset()  # nothing is kept below one of these
    one_child: bool = False  # rejection mode: the first draw at a position is the only one
    sources: frozenset[Source] | None = None  # None: any

    def allows(self, token: int, law: NodeLaw | None, source: Source | None) -> bool:
        """A drawn token is taken or not by its law: dropping it for what was drawn would bias the answer."""
        if self.sources is not None and source not in self.sources:
            return False
        return (token if law is None else max(law.tokens)) < self.vocab_size


class TokenTree:
    """Columns of nodes. Children of one node carry different tokens."""

    __slots__ = ("_children", "laws", "lookups", "parents", "scores", "sources", "tokens")

    def __init__(self, root_token: int) -> None:
        self.tokens: list[int] = [root_token]
        self.parents: list[int] = [-1]
        self.scores: list[float] = [1.0]  # chance that the target picks the node, given its parent
        self.sources: list[Source | None] = [None]
        self.laws: list[NodeLaw | None] = [None]
        self.lookups: list[float] = [0.0]  # what lookup says of the node, whoever else does; 0: nothing
        self._children: list[dict[int, int]] = [{}]

    @classmethod
    def from_columns(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        scores: Sequence[float] = (),
        sources: Sequence[Source | None] = (),
        laws: Sequence[NodeLaw | None] = (),
    ) -> TokenTree:
        """Build from wire columns; empty optional columns mean defaults.

        Raises:
            MalformedMessage: lengths differ, row 0 is no root, a parent does not precede its child,
                or two children of one node carry one token.
        """
        count = len(tokens)
        if count == 0 or len(parents) != count:
            raise MalformedMessage(f"a tree needs as many parents as tokens, at least 1: {len(parents)} and {count}")
        for name, column in (("scores", scores), ("sources", sources), ("laws", laws)):
            if column and len(column) != count:
                raise MalformedMessage(f"tree column {name} has {len(column)} rows, tokens has {count}")
        if parents[0] != -1:
            raise MalformedMessage(f"row 0 of a tree is its root with parent -1, not {parents[0]}")
        tree = cls(tokens[0])
        for row in range(1, count):
            parent = parents[row]
            if not 0 <= parent < row:
                raise MalformedMessage(f"parent of tree row {row} must be in [0, {row}), not {parent}")
            if tokens[row] in tree._children[parent]:
                raise MalformedMessage(f"tree row {row} repeats token {tokens[row]} below row {parent}")
            tree.add(
                parent,
                tokens[row],
                scores[row] if scores else 0.5,
                sources[row] if sources else None,
                laws[row] if laws else None,
            )
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def node_count(self) -> int:
        """Guessed tokens: every row but the root."""
        return len(self.tokens) - 1

    def add(
        self,
        parent: int,
        token: int,
        score: float,
        source: Source | None = None,
        law: NodeLaw | None = None,
    ) -> int:
        """Row of `token` below `parent`, added if it is not there; the first law stays.

        A score means something beside its source only: a draft's stands for what lookup found too, and of one
        source the best counts.
        """
        found = score if source is Source.NGRAM else 0.0
        known = self._children[parent].get(token)
        if known is not None:
            self.lookups[known] = max(self.lookups[known], found)
            theirs, own = _rank(source), _rank(self.sources[known])
            if theirs > own:
                self.sources[known], self.scores[known] = source, score
            elif theirs == own:
                self.scores[known] = max(self.scores[known], score)
            return known
        row = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.sources.append(source)
        self.laws.append(law)
        self.lookups.append(found)
        self._children.append({})
        self._children[parent][token] = row
        return row

    def child(self, node: int, token: int) -> int | None:
        return self._children[node].get(token)

    def children(self, node: int) -> Iterable[int]:
        return self._children[node].values()

    def likeliest(self, node: int) -> int | None:
        """Its child of the highest score, the first of equals; None if it has none."""
        return max(self.children(node), key=self.scores.__getitem__, default=None)

    def leads(self, node: int) -> bool:
        """Whether it is the likeliest child of its parent, the first of equals."""
        return node == self.likeliest(self.parents[node])

    def path(self, node: int) -> list[int]:
        """Rows from below the root down to `node`; empty for the root."""
        rows: list[int] = []
        while node != ROOT:
            rows.append(node)
            node = self.parents[node]
        rows.reverse()
        return rows

    def depth(self, node: int) -> int:
        depth = 0
        while node != ROOT:
            depth += 1
            node = self.parents[node]
        return depth

    def reach(self, node: int) -> float:
        """Estimated chance that the target's text runs through `node`: the product of scores."""
        chance = 1.0
        while node != ROOT:
            chance *= self.scores[node]
            node = self.parents[node]
        return chance

    def strands(self, nodes: Iterable[int]) -> list[tuple[int, tuple[int, ...]]]:
        """`nodes` (ancestor-closed) as lines: (index of the line it leaves, its rows from the top down).

        The first line leaves nothing (-1) and starts below the root; it may be empty. At a fork the likeliest child
        goes on in the line, each other one begins a line. A line comes after the one it leaves.
        """
        chosen = set(nodes)
        lines: list[tuple[int, tuple[int, ...]]] = []
        todo: list[tuple[int, list[int]]] = [(-1, [])]
        for line, (leaves, rows) in enumerate(todo):
            node = rows[0] if rows else ROOT
            while below := sorted(chosen.intersection(self.children(node)), key=self.scores.__getitem__, reverse=True):
                node = below[0]
                rows.append(node)
                todo.extend((line, [other]) for other in below[1:])
            lines.append((leaves, tuple(rows)))
        return lines

    def depths(self) -> list[int]:
        """Of every row; 0 for the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def descend(self, tokens: Iterable[int]) -> Iterator[int]:
        """Rows met when following `tokens` from the root; ends where the tree does."""
        node = ROOT
        for token in tokens:
            child = self._children[node].get(token)
            if child is None:
                return
            node = child
            yield node

    def graft(self, other: TokenTree, start: int = ROOT, bounds: Bounds | None = None, depth: int = 1 << 30) -> int:
        """Union with what `other` holds below its row `start`, below this root.

        Returns how many nodes were new, or lookup's alone so far.

        Idempotent; independent of order as long as no bound bites. `depth` is the deepest node taken.
        """
        bounds = bounds or Bounds()
        new = 0
        mapped = {start: (ROOT, 0)}
        for row in range(start + 1, len(other.tokens)):
            parent, above = mapped.get(other.parents[row], (-1, 0))
            if parent < 0 or above >= depth:
                continue
            token = other.tokens[row]
            children = self._children[parent]
            known = children.get(token)
            if not bounds.allows(token, other.laws[row], other.sources[row]) or (
                known is None and (self.node_count >= bounds.most_nodes or (bounds.one_child and children))
            ):
                continue
            new += known is None or _rank(other.sources[row]) > _rank(self.sources[known])
            node = self.add(parent, token, other.scores[row], other.sources[row], other.laws[row])
            if token not in bounds.ends:
                mapped[row] = (node, above + 1)
        return new

    def subtree(self, node: int) -> tuple[TokenTree, dict[int, int]]:
        """The tree below `node` with `node` as its root, and new row by old row."""
        below = TokenTree(self.tokens[node])
        mapped = {node: ROOT}
        for row in range(node + 1, len(self.tokens)):
            parent = mapped.get(self.parents[row])
            if parent is not None:
                mapped[row] = below.add(parent, self.tokens[row], self.scores[row], self.sources[row], self.laws[row])
                below.lookups[mapped[row]] = self.lookups[row]
        return below, mapped

    def excerpt(self, nodes: Iterable[int]) -> TokenTree:
        """Self-contained part: `nodes` with all their ancestors, in row order."""
        rows: set[int] = set()
        for node in nodes:
            while node != ROOT and node not in rows:
                rows.add(node)
                node = self.parents[node]
        part = TokenTree(self.tokens[ROOT])
        mapped = {ROOT: ROOT}
        for row in sorted(rows):
            mapped[row] = part.add(
                mapped[self.parents[row]], self.tokens[row], self.scores[row], self.sources[row], self.laws[row]
            )
        return part


def _rank(source: Source | None) -> int:
    """Whose a node is that several guessed."""
    return -2 if source is None else -1 if source is Source.NGRAM else source.value

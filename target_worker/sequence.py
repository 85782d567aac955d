"""One sequence on the target: what it committed, its tree, its KV, and how its tokens are picked."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forerun.core.acceptance import Calibration, Mean
from forerun.core.errors import SequenceRefused
from forerun.core.messages import Start
from forerun.core.ngram import NgramIndex
from forerun.core.pages import KV, TILE, OutOfPages, Pages
from forerun.core.params import MOST_DRAFT_TOKENS, Finish, Source
from forerun.core.patience import Outlook, Patience
from forerun.core.pick import Picker, Proposal
from forerun.core.plan import TYPICAL, Share, Waiting
from forerun.core.sequence import Hint, Landing, TokenSequence
from forerun.core.spans import Record, SpanWindow
from forerun.core.tree import ROOT, Bounds, TokenTree
from forerun.core.walk import Walk, walk
from forerun.core.worth import HintWorth
from forerun.runtime.passes import Row, Run
from target_worker.telling import Telling

MOST_NODES = 256
"""Bound of the hint store of one sequence."""


_SICK = "the model's logits for this sequence are not numbers"


class NotFinite(SequenceRefused):
    """A row that decides a token is no number."""


class TargetSequence:
    """committed_len = len(text.tokens); kv.cached_len of them have KV, the rest is debt."""

    def __init__(
        self,
        link: Hashable,
        start: Start,
        pages: Pages,
        vocab_size: int,
        context_limit: int,
        ngram: bool,
        record: Record,
        trust: Mapping[Source, Calibration],
    ) -> None:
        """trust: what the sequences before learned of each source."""
        self.link = link  # whoever gave it
        self.seq = start.seq
        self.params = start.params
        self.traceparent = start.traceparent
        self.prompt_len = start.prompt_len
        self.most_len = min(context_limit, start.prompt_len + start.params.max_tokens)
        sampling = start.params.sampling
        # What it did not ask for is not kept: nothing would be learned of it. Lookups are this process's own.
        drafts = frozenset(
            source for source in Source if source in self.params.hinted_by and source is not Source.NGRAM
        )
        bounds = Bounds(MOST_NODES, vocab_size, start.params.ends, sampling.chain_only, drafts)
        self.text = TokenSequence(start.tokens, bounds)
        self.kv = KV(pages)
        self.found: int | None = None  # prompt tokens that were in KV when it was first admitted
        self.preempted = 0  # times it lost its KV since the last Emit
        self.settled_rows = 1  # rows of the tree that were there when the last pass was committed
        self.patience = Patience()
        self.leading = Mean(TYPICAL)  # how often the likeliest node of a draft is right
        ends = tuple(sorted(token for token in start.params.ends if token < vocab_size))
        self._picker = Picker(sampling, vocab_size, ends, start.prompt_len + start.params.min_tokens)
        self._ngram = NgramIndex(start.tokens) if ngram and Source.NGRAM in self.params.hinted_by else None
        self.trust = {
            source: trust[source].heir() if source in trust else Calibration()
            for source in Source
            if source in self.params.hinted_by
        }
        self.worth = HintWorth()
        self.hinted = False  # a hint came since the last commit
        self.drafted_for = bool(drafts)
        self.asked = False  # a draft was asked for hints when the last pass was told
        spans = SpanWindow(record, start.traceparent, "verify", "decode.window", start.params.trace_detail)
        self.telling = Telling(spans)
        self._unguessed = False  # its next pass checks nothing
        self.sick = False  # rows of the last pass that decided nothing are no numbers
        self._laid: list[tuple[Run, tuple[int, ...]]] = []  # its runs of the pass, and the nodes each computes

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self.most_len - self.text.committed_len

    @property
    def most_nodes(self) -> int:
        """Nodes that may be checked now: the token after the last of them needs room too."""
        return 0 if self._unguessed else max(0, min(self.params.max_draft_tokens, self.room - 1))

    @property
    def debt(self) -> int:
        return self.text.committed_len - self.kv.cached_len

    @property
    def decoding(self) -> bool:
        return self.debt == 1

    @property
    def pages_due(self) -> int:
        """Pages it still needs to pay its debt and commit one more token."""
        return -(-(self.text.committed_len + 1) // TILE) - len(self.kv.trunk.pages)

    def pages_asked(self) -> int:
        """Available pages that admitting it would claim, what is known of its tokens included."""
        known, idle = self.kv.pages.known_of(self.text.tokens)
        return self.pages_due - known + idle

    # --- KV ------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Start from what is known of its tokens."""
        known = self.kv.adopt(self.text.tokens)
        if self.found is None:
            self.found = min(known, self.prompt_len)

    def preempt(self) -> None:
        """Give its pages to others. It begins again from its tokens, with the same text."""
        self.unlay()
        self.preempted += 1
        self.kv.release(self.text.tokens)

    def lose_kv(self) -> None:
        """All KV of the model is gone, and the pages with it."""
        self._laid.clear()
        self.preempted += 1
        self.kv = KV(self.kv.pages)

    def close(self, *, poisoned: bool = False) -> None:
        """It is over here."""
        self.unlay(poisoned=poisoned)
        self.kv.release(() if poisoned else self.text.tokens, poisoned=poisoned)
        self.telling.close()

    # --- a pass --------------------------------------------------------------------------------

    def waiting(self, chains: bool = False) -> Waiting[TargetSequence]:
        """What the next pass could do for it; asks the n-gram index first."""
        most_nodes = self.most_nodes
        if self._ngram is not None and self.decoding:
            self._look_up(most_nodes)
        return Waiting(
            self,
            self.debt,
            self.kv.cached_len,
            self.text.tree,
            most_nodes,
            chains or self.params.sampling.chain_only,
            self._chance,
            self.trust[next(iter(self.trust))].chance(TYPICAL, 1) if self.trust else TYPICAL,
        )

    def _chance(self, row: int, depth: int) -> float:
        """That the target picks this node, given its parent."""
        tree = self.text.tree
        trust = self.trust.get(tree.sources[row] or Source.MODEL)
        return tree.scores[row] if trust is None else trust.chance(tree.scores[row], depth)

    def _look_up(self, limit: int) -> None:
        assert self._ngram is not None
        guess, score = self._ngram.propose(limit)
        chain, node = TokenTree(self.text.tokens[-1]), ROOT
        for token in guess:
            node = chain.add(node, token, score, Source.NGRAM)
        bounds = replace(self.text.bounds, most_nodes=MOST_NODES + MOST_DRAFT_TOKENS, sources=None)
        self.text.tree.graft(chain, bounds=bounds)

    def lay(self, share: Share[TargetSequence]) -> list[Run]:
        """Its runs of the pass: the debt with the likeliest nodes behind it, then a run for each branch.

        Raises OutOfPages if not even the debt finds pages; guesses that find none are left out.
        """
        start = self.kv.cached_len
        debt = tuple(self.text.tokens[start : start + share.debt_rows])
        lines = self.text.tree.strands(share.nodes)
        try:
            path = self.kv.extend(len(debt) + len(lines[0][1]))
        except OutOfPages:
            # As many as its last page has room for: that depends on nothing that was drawn.
            lines = [(-1, lines[0][1][: -(start + len(debt)) % TILE])]
            path = self.kv.extend(len(debt) + len(lines[0][1]))
        nodes = lines[0][1]
        guessed = tuple(self.text.tree.tokens[node] for node in nodes)
        # A prompt is looked at wherever it fills a page, so that the page is kept and found.
        fills = (start + len(debt)) // TILE > start // TILE
        trunk = Run(path, debt + guessed, start, 1 + len(nodes) if share.pays else int(fills))
        runs: list[Run | None] = [trunk]
        self._laid = [(trunk, nodes)]
        for leaves, nodes in lines[1:]:
            runs.append(self._lay_branch(runs[leaves], nodes))
        return [run for run, _ in self._laid]

    def _lay_branch(self, parent: Run | None, nodes: tuple[int, ...]) -> Run | None:
        """None: there are no pages for it, or for what it leaves."""
        if parent is None:
            return None
        tree = self.text.tree
        start = self.text.committed_len + tree.depth(nodes[0]) - 1
        try:
            path = self.kv.branch(parent.path, start, len(nodes))
        except OutOfPages:
            return None
        run = Run(path, tuple(tree.tokens[node] for node in nodes), start, len(nodes), parent)
        self._laid.append((run, nodes))
        return run

    def unlay(self, *, poisoned: bool = False) -> None:
        """The pass will not happen, or does not count, for it."""
        for run, _ in self._laid[1:]:
            self.kv.drop(run.path, poisoned=poisoned)
        self._laid.clear()

    def pass_begins(self) -> None:
        """A pass that picks tokens begins."""
        self.telling.pass_begins(self.text.committed_len, self.asked and self.most_nodes > 0)

    def take_hint(self, hint: Hint, now: float) -> Landing:
        """A draft's hint arrived at `now`, maybe while the last pass ran."""
        open_len = self.telling.open_len
        serves_open = open_len is not None and self.text.served(hint, open_len)
        landing = self.text.land(hint, depth=max(0, self.room - 1))
        merged = landing is Landing.MERGED
        self.telling.hinted(serves_open, merged, now, merged and self.text.led(hint))
        if landing in (Landing.MERGED, Landing.KNOWN):
            self.patience.hinted(hint.base_len, now)
        self.hinted = True
        return landing

    def prefilled(self, rows: NDArray[np.float32]) -> None:
        """Rows of its prompt were computed. rows: logits of the last one, or of none. Raises NotFinite."""
        if len(rows) and not _finite(rows[-1]):
            raise NotFinite(_SICK)
        ((run, _),) = self._laid
        self._laid.clear()
        self.kv.commit(self.text.tokens, run.start + len(run.tokens), judged=len(rows) > 0)

    def doubts(self, rows: Mapping[int, Row]) -> bool:
        """Its root's row is no number, maybe for a guess in its page: the pass is given up, and done again without."""
        if len(rows) == 1 or _finite(rows[ROOT]):
            return False
        self.unlay(poisoned=True)
        self.kv.cleanse()
        self.text.rewind(self.text.committed_len)
        self._unguessed = True
        return True

    def rows_by_node(self, logits: Sequence[NDArray[np.float32]]) -> dict[int, Row]:
        """Of the root and every node that was computed, from the logits of its runs."""
        ((_, first), *branches) = self._laid
        rows = dict(zip((ROOT, *first), logits[0], strict=True))
        for (_, nodes), computed in zip(branches, logits[1:], strict=True):
            rows.update(zip(nodes, computed, strict=True))
        return rows

    def judge(self, rows: Mapping[int, Row]) -> Walk:
        """Walk the tree by the pass's logits. rows: [vocab] of the root and of every checked node.

        A node whose own row is no numbers ends the walk before it, as it would end plain decoding one pass later.
        Raises NotFinite if the root's is none.
        """
        tree, base_len = self.text.tree, self.text.committed_len
        sound = {node for node, row in rows.items() if _finite(row)}
        if ROOT not in sound:
            raise NotFinite(_SICK)

        def pick(node: int, depth: int, child: int | None) -> int:
            proposal = None if child is None else Proposal(tree.tokens[child], tree.laws[child])
            return self._picker.pick(rows[node], base_len + depth, proposal)

        self.sick = len(sound) < len(rows)
        return walk(tree, sound, pick, self.params.ends, self.room)

    def digests(self, decided: Walk, rows: Mapping[int, Row]) -> tuple[int, ...]:
        """64 bits of the logits that picked each of its tokens; none unless asked for."""
        if not self.params.logits_digest:
            return ()
        hashes = (hashlib.blake2b(rows[node].data, digest_size=8) for node in _judges(decided))
        return tuple(int.from_bytes(each.digest()) for each in hashes)

    @property
    def _knows(self) -> bool:
        """A draft has said how it may go on."""
        return any(source is not Source.NGRAM for source in self.text.tree.sources[1:])

    def want(self, lead: int) -> int:
        """Nodes that a draft should hold ready below the last committed token; lead: per node that may be checked."""
        return self.worth.want(self.most_nodes * lead) if self.drafted_for else 0

    def outlook(self, now: float) -> Outlook | None:
        """What its next pass would gain by waiting for hints; None while drafts do not pay or none is asked."""
        if not self.asked or not self.worth.pays:
            return None
        tree, reach, deepest, depth = self.text.tree, 1.0, ROOT, 0
        while (child := tree.likeliest(deepest)) is not None:
            deepest, depth = child, depth + 1
            reach *= self._chance(child, depth)
            if tree.tokens[child] in self.params.ends:
                return None
        return self.patience.outlook(now, self._knows, reach, self.leading.mean, self.most_nodes - depth)

    def drafted(self, path: Sequence[int]) -> list[int]:
        """Of these nodes, those that a draft sent."""
        sources = self.text.tree.sources
        return [node for node in path if sources[node] is not Source.NGRAM]

    def _brought(self, nodes: Sequence[int]) -> int:
        """How many of these nodes there are thanks to a draft: lookup did not find them."""
        return sum(not self.text.tree.lookups[node] for node in self.drafted(nodes))

    def deepest(self, nodes: Sequence[int]) -> int:
        """Depth of the deepest of them; 0 if there are none."""
        return max(map(self.text.tree.depth, nodes), default=0)

    def fresh(self, path: Sequence[int]) -> int:
        """Of these nodes, those that a draft sent while the pass before this one ran."""
        return sum(node >= self.settled_rows for node in self.drafted(path))

    def commit(self, decided: Walk, checked: Sequence[int], now: float) -> Finish | None:
        """KV is cut to the accepted path, the tree re-rooted below the last token. checked: nodes.

        If rows of nodes that were not accepted are no numbers, what the pass computed is computed again.
        """
        self._learn(decided, checked)
        cached_len = self.text.committed_len + decided.accepted
        tree = self.text.tree
        path = self.text.advance(decided.tokens).path
        left = len(path) < len(decided.tokens) and tree.likeliest(path[-1] if path else ROOT) is not None
        self.telling.committed(self._knows, not left and all(map(tree.leads, path)), now)
        if self.sick:
            self.unlay(poisoned=True)
            self.kv.cleanse()
            self.text.rewind(self.text.committed_len)  # the guess is not checked again
        else:
            self._keep_winner(cached_len, decided.path[-1] if decided.path else ROOT)
        self._unguessed = False
        self.settled_rows = len(self.text.tree)
        if self._ngram is not None:
            self._ngram.extend(decided.tokens)
        if decided.ended:
            return Finish.END_TOKEN
        return Finish.LENGTH if self.room == 0 else None

    def _keep_winner(self, cached_len: int, last: int) -> None:
        """The path of the last accepted node becomes the trunk."""
        for run, nodes in self._laid[1:]:
            if last in nodes:
                self.kv.commit(self.text.tokens, cached_len, run.path)
            else:
                self.kv.drop(run.path)
        if self.kv.cached_len != cached_len:
            self.kv.commit(self.text.tokens, cached_len)
        self._laid.clear()

    def _learn(self, decided: Walk, checked: Sequence[int]) -> None:
        """What the pass says of its sources: nodes whose parent was reached were judged."""
        # A pass says something about a draft only if one was heard: before it attaches, nothing is its fault.
        if self.hinted or not self.worth.pays:
            self.worth.passed(self._brought(decided.path), len(decided.tokens), self._brought(checked))
            self.hinted = False
        tree, reached = self.text.tree, {ROOT, *decided.path}
        judged: dict[Source, list[tuple[float, int, bool]]] = {source: [] for source in self.trust}
        for node in checked:
            if tree.parents[node] not in reached:
                continue
            source, depth, right = tree.sources[node], tree.depth(node), node in reached
            if source in judged:
                judged[source].append((tree.scores[node], depth, right))
                if source is not Source.NGRAM and tree.leads(node):
                    self.leading.see(right)
            if source is not Source.NGRAM and tree.lookups[node] and Source.NGRAM in judged:
                judged[Source.NGRAM].append((tree.lookups[node], depth, right))
        for source, nodes in judged.items():
            if nodes:
                self.trust[source].judged(nodes)
            else:
                self.trust[source].unseen()


def _finite(row: Row) -> bool:
    """Whether a row of logits can be picked from: banned tokens may be -inf, nothing else."""
    return bool(np.isfinite(row.max()))


def _judges(decided: Walk) -> tuple[int, ...]:
    """Nodes after which its tokens were picked, token by token."""
    return (ROOT, *decided.path)[: len(decided.tokens)]

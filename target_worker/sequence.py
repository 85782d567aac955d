"""One sequence on the target: what it committed, its tree, its KV, and how its tokens are picked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from forerun.core.messages import Start
from forerun.core.ngram import NgramIndex
from forerun.core.params import Finish, Source
from forerun.core.patience import Patience
from forerun.core.pick import Picker, Proposal
from forerun.core.plan import Share, Waiting
from forerun.core.sequence import TokenSequence
from forerun.core.spans import Record, SpanWindow
from forerun.core.tree import ROOT, Bounds, TokenTree
from forerun.core.walk import Walk, walk
from forerun.core.worth import HintWorth
from forerun.runtime.passes import Cache, Run

MOST_NODES = 256
"""Bound of the hint store of one sequence."""


class TargetSequence:
    """committed_len = len(text.tokens); kv.cached_len of them have KV, the rest is debt."""

    def __init__(
        self,
        link: Hashable,
        start: Start,
        kv: Cache,
        vocab_size: int,
        context_limit: int,
        ngram: bool,
        record: Record,
    ) -> None:
        self.link = link  # whoever gave it
        self.seq = start.seq
        self.params = start.params
        self.traceparent = start.traceparent
        self.prompt_len = start.prompt_len
        self.most_len = min(context_limit, start.prompt_len + start.params.max_tokens)
        sampling = start.params.sampling
        bounds = Bounds(MOST_NODES, vocab_size, start.params.ends, sampling.chain_only)
        self.text = TokenSequence(start.tokens, bounds)
        self.kv = kv
        self.settled_rows = 1  # rows of the tree that were there when the last pass was committed
        self.patience = Patience()
        ends = tuple(sorted(token for token in start.params.ends if token < vocab_size))
        self._picker = Picker(sampling, vocab_size, ends, start.prompt_len + start.params.min_tokens)
        self._ngram = NgramIndex(start.tokens) if ngram and self._accepts(Source.NGRAM) else None
        self.worth = HintWorth()
        self.hinted = False  # a hint came since the last commit
        self.drafted_for = any(self._accepts(source) for source in Source if source is not Source.NGRAM)
        self.spans = SpanWindow(record, start.traceparent, "verify", "decode.window", start.params.trace_detail)

    def _accepts(self, source: Source) -> bool:
        """Rejection sampling takes one source, fixed beforehand: the first that was asked for."""
        if self.params.max_draft_tokens == 0:
            return False
        sources = self.params.sources[:1] if self.params.sampling.chain_only else self.params.sources
        return source in sources

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self.most_len - self.text.committed_len

    @property
    def most_nodes(self) -> int:
        """Nodes that may be checked now: the token after the last of them needs room too."""
        return max(0, min(self.params.max_draft_tokens, self.room - 1))

    def waiting(self) -> Waiting[TargetSequence]:
        """What the next pass could do for it; asks the n-gram index first."""
        most_nodes = self.most_nodes
        if self._ngram is not None and self.decoding:
            self._look_up(most_nodes)
        return Waiting(self, self.text.committed_len - self.kv.cached_len, self.text.tree, most_nodes)

    @property
    def decoding(self) -> bool:
        return self.text.committed_len - self.kv.cached_len == 1

    def _look_up(self, limit: int) -> None:
        assert self._ngram is not None
        guess, score = self._ngram.propose(limit)
        chain, node = TokenTree(self.text.tokens[-1]), ROOT
        for token in guess:
            node = chain.add(node, token, score, Source.NGRAM)
        self.text.tree.graft(chain, bounds=self.text.bounds)

    def run(self, share: Share[TargetSequence]) -> Run:
        """Its rows of the pass: the debt, then the chain of nodes below the root."""
        start = self.kv.cached_len
        tokens = self.text.tokens[start : start + share.debt_rows]
        tokens += [self.text.tree.tokens[node] for node in share.nodes]
        return Run(self.kv, tuple(tokens), start, logit_rows=1 + len(share.nodes) if share.pays else 0)

    def prefilled(self, rows: int) -> None:
        """Rows of its prompt were computed and nothing was to be decided."""
        self.kv.extend(self.kv.cached_len + rows)

    def judge(self, nodes: Sequence[int], logits: NDArray[np.float32]) -> Walk:
        """Walk the tree by the pass's logits, [1 + len(nodes), vocab], root first."""
        row_of = {ROOT: 0} | {node: row for row, node in enumerate(nodes, start=1)}
        tree, base_len = self.text.tree, self.text.committed_len

        def pick(node: int, depth: int, child: int | None) -> int:
            proposal = None if child is None else Proposal(tree.tokens[child], tree.laws[child])
            return self._picker.pick(logits[row_of[node]], base_len + depth, proposal)

        return walk(tree, frozenset(nodes), pick, self.params.ends, self.room)

    @property
    def wants_hints(self) -> bool:
        """Whether a draft should work for it now."""
        return self.drafted_for and self.worth.pays

    def drafted(self, path: Sequence[int]) -> list[int]:
        """Of these nodes, those that a draft sent."""
        sources = self.text.tree.sources
        return [node for node in path if sources[node] is not Source.NGRAM]

    def fresh(self, path: Sequence[int]) -> int:
        """Of these nodes, those that a draft sent while the pass before this one ran."""
        return sum(node >= self.settled_rows for node in self.drafted(path))

    def commit(self, decided: Walk) -> Finish | None:
        """KV is cut to the accepted path, the tree re-rooted below the last token."""
        # A pass says something about a draft only if one was heard: before it attaches, nothing is its fault.
        if self.hinted or not self.worth.pays:
            self.worth.passed(len(self.drafted(decided.path)), len(decided.tokens))
            self.hinted = False
        self.kv.extend(self.text.committed_len + decided.accepted)
        self.text.advance(decided.tokens)
        self.settled_rows = len(self.text.tree)
        if self._ngram is not None:
            self._ngram.extend(decided.tokens)
        if decided.ended:
            return Finish.END_TOKEN
        return Finish.LENGTH if self.room == 0 else None

"""Commands and events of the workers, as values. The wire form is rpc/codec.py's business.

Lengths: `base_len` is how many tokens stand before those in the message; after an Emit or a Sync
committed_len = base_len + len(tokens).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.core.hits import added
from forerun.core.params import Finish, Sampling, SeqId, Source
from forerun.core.sequence import Hint

# --- coordinator <-> target ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetParams:
    """What one request asks of a target."""

    sampling: Sampling
    max_tokens: int
    min_tokens: int = 0
    ends: frozenset[int] = frozenset()  # end tokens
    sources: tuple[Source, ...] = ()  # hints it accepts, in order of preference
    max_draft_tokens: int = 0  # most nodes checked in a pass
    trace_detail: bool = False
    logits_digest: bool = False  # Emits carry digests

    @property
    def hinted_by(self) -> tuple[Source, ...]:
        """Sources whose hints count. Rejection sampling takes one, fixed beforehand: the first that was asked for."""
        if self.max_draft_tokens == 0:
            return ()
        return self.sources[:1] if self.sampling.chain_only else self.sources


@dataclass(frozen=True, slots=True)
class Start:
    seq: SeqId
    prompt_len: int
    tokens: tuple[int, ...]  # prompt, and what was committed before
    params: TargetParams
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    seq: SeqId
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Hinted:
    """A hint, from a draft or to a target."""

    seq: SeqId
    hint: Hint
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Emit:
    """What one pass, or several merged ones, committed."""

    seq: SeqId
    base_len: int
    tokens: tuple[int, ...]
    accepted: int  # of `drafted`
    drafted: int  # positions guessed: depth of what was checked
    passes: int
    want: int  # nodes that pay now
    started_ns: int = 0
    ended_ns: int = 0
    finish: Finish | None = None
    cached: int = 0  # prompt tokens found in KV
    traceparent: str = ""
    digests: tuple[int, ...] = ()  # 64 bits of the logits that picked each token; empty unless asked for
    preempted: int = 0  # times the sequence lost its KV to others since the Emit before
    windows: tuple[int, ...] = ()  # nodes checked, pass by pass, at least `drafted` in all; empty: not told
    branched: int = 0  # passes whose checked nodes were more than one chain
    hits: tuple[int, ...] = ()  # passes by what was known of their proposal, in the order of core/hits.py; empty: none

    def then(self, later: Emit) -> Emit:
        """Both as one message; `later` must go on where this one ends."""
        return replace(
            later,
            base_len=self.base_len,
            tokens=self.tokens + later.tokens,
            accepted=self.accepted + later.accepted,
            drafted=self.drafted + later.drafted,
            passes=self.passes + later.passes,
            started_ns=self.started_ns,
            cached=self.cached,
            digests=self.digests + later.digests,
            preempted=self.preempted + later.preempted,
            windows=self.windows + later.windows,
            branched=self.branched + later.branched,
            hits=added(self.hits, later.hits) if self.hits or later.hits else (),
        )


# --- coordinator <-> draft -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftParams:
    """What one request asks of a draft."""

    sampling: Sampling
    remaining: int  # tokens the request may still get when it is opened
    ends: frozenset[int] = frozenset()
    ends_from: int = 0  # first position at which an end token may stand
    vocab_size: int = 1 << 31  # the target's: nothing beyond is worth proposing


@dataclass(frozen=True, slots=True)
class Sync:
    """The prefix is what the worker holds up to base_len, then `tokens`: open, advance, rollback, recovery."""

    seq: SeqId
    base_len: int
    tokens: tuple[int, ...]
    want: int
    params: DraftParams | None = None
    traceparent: str = ""

    def then(self, later: Sync) -> Sync:
        """Both as one message, while the first has not been looked at."""
        keep = later.base_len - self.base_len
        if not 0 <= keep <= len(self.tokens):  # it starts over (or leaves a gap, which the worker will say)
            return later
        return replace(
            later,
            base_len=self.base_len,
            tokens=self.tokens[:keep] + later.tokens,
            params=later.params or self.params,
        )


@dataclass(frozen=True, slots=True)
class Close:
    seq: SeqId
    traceparent: str = ""


# --- either worker -> coordinator ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """This worker holds have_len tokens; a message began later."""

    seq: SeqId
    have_len: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """This worker does not serve the sequence; another may, if `retryable`."""

    seq: SeqId
    reason: str
    retryable: bool = False
    traceparent: str = ""


TargetCommand = Start | Hinted | Stop
TargetEvent = Emit | Gap | Refused
DraftCommand = Sync | Close
DraftEvent = Hinted | Gap | Refused
Event = Emit | Hinted | Gap | Refused
Command = Start | Hinted | Stop | Sync | Close

"""The one exception tree. Each type says what its catcher has to do.

Mapped once per boundary: the public API turns them into gRPC statuses, workers into `Refused`,
the command line into an exit status. Messages name the wrong value and what would be right.
"""

from __future__ import annotations


class ForerunError(Exception):
    """Base of everything raised on purpose."""


class InvalidRequest(ForerunError):
    """Refuse this request; the caller has to change it."""


class AlreadyExists(ForerunError):
    """Refuse this request: its id is running."""


class Unavailable(ForerunError):
    """Nobody can serve this now; the caller may try again."""


class WorkerFailed(ForerunError):
    """A worker refused what was checked before: not the caller's fault, and trying again will not help."""


class Exhausted(ForerunError):
    """A bound was reached; the caller may try again later."""


class SequenceRefused(ForerunError):
    """Drop this sequence on this worker; others go on."""


class LedgerConflict(ForerunError):
    """An event contradicts what is committed: give its sender up, keep the ledger."""


class MalformedMessage(ForerunError):
    """A message that no correct peer sends: refuse its sequence, keep the stream."""


class ModelRefused(ForerunError):
    """This model or option cannot be served: fail at start, saying why."""


class Aborted(ForerunError):
    """End this request: its owner said so."""


class GroupLost(ForerunError):
    """A rank of the tensor-parallel group died or hangs: bring the group back, all KV is gone."""

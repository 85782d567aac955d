"""A rank of a tensor-parallel group other than the first: load a share, meet the others, compute what rank 0 sends.

It may run anywhere, as a child process, on another host or in an actor: a `Seat` is all it needs. It decides nothing,
waits for rank 0 without a limit between passes, and ends by itself when rank 0 or another rank is gone.

    rank 0 -> rank:  b"open", then a Batch a pass; b"" ends it
    rank -> rank 0:  {"rank": r} first, then {"state": "loaded"}, {"state": "ready"}, or {"error": "..."}
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Client, Connection

import torch
from transformers import AutoModelForCausalLM  # noqa: F401  imported here for the fork server: a second of every start

from forerun.core.errors import ModelRefused
from forerun.runtime.batch import Batch
from forerun.runtime.exchange import Exchange, PeerLost, SharedEnd, SharedExchange, TorchExchange
from forerun.runtime.forward import TransformersModel
from forerun.runtime.memory import give_back, keep_workspace, settle
from forerun.runtime.shards import ask_rows, connect, load_shard

log = logging.getLogger(__name__)

PEER_LOST = 3
"""Exit status of a rank that ended because another one did."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What all ranks of a group have in common."""

    folder: str
    dtype: str
    ranks: int
    context_limit: int
    pages: int | None = None  # of KV, on each rank
    layers: int | None = None
    threads: int = 1  # of each rank
    device: str = "cpu"  # cuda: rank r computes on GPU r of its machine
    shared: bool = True  # CPU ranks of one machine exchange through shared memory; False: torch.distributed
    timeout_s: float = 5.0  # of every single exchange
    ready_s: float = 600.0  # until all ranks have loaded; a group that starts again has less

    @property
    def backend(self) -> str:
        return "nccl" if self.device.startswith("cuda") else "gloo"

    def device_of(self, rank: int) -> str:
        return f"cuda:{rank % torch.cuda.device_count()}" if self.device == "cuda" else self.device


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank needs to find the others. `key` authenticates it at rank 0 and rank 0 at it."""

    spec: GroupSpec
    rank: int
    control: tuple[str, int]
    key: bytes
    meeting: SharedEnd | str  # str: rendezvous of torch.distributed, tcp://host:port or file:///path

    def exchange(self) -> Exchange:
        spec = self.spec
        if isinstance(self.meeting, SharedEnd):
            return SharedExchange.of(self.meeting, spec.timeout_s)
        return TorchExchange(self.rank, spec.ranks, self.meeting, spec.backend, spec.timeout_s)


class RankModel(TransformersModel):
    """The share of another rank: it computes whole passes and shows its logits to nobody."""

    def _prove(self, exact: bool) -> None:
        """Rank 0 proves for all of them: a pass of one alone would wait for the others."""

    def execute(self, batch: Batch) -> torch.Tensor:
        ask_rows(self._model, batch)
        return super().execute(batch)


def run_child(seat: Seat) -> None:
    """The main function of a child process."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches rank 0, which decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.basicConfig(
        level=os.environ.get("FORERUN_LOG", "INFO").upper(),
        format=f"%(asctime)s %(levelname)s rank {seat.rank} %(name)s: %(message)s",
        stream=sys.stderr,
    )
    sys.exit(run_rank(seat))


def run_rank(seat: Seat) -> int:
    """Take the seat until rank 0 ends it. Returns an exit status; what went wrong is told to rank 0."""
    keep_workspace()
    torch.set_num_threads(seat.spec.threads)
    with Client(seat.control, authkey=seat.key) as control:
        _say(control, rank=seat.rank)
        try:
            _compute(seat, control)
        except (EOFError, ConnectionError):
            log.info("rank 0 is gone")
            return PEER_LOST
        except PeerLost as lost:
            log.warning("%s", lost)
            return PEER_LOST
        except ModelRefused as refusal:
            _say(control, error=str(refusal))
            return 1
        except Exception as error:
            log.exception("rank %d", seat.rank)
            _say(control, error=f"{type(error).__name__}: {error}")
            return 1
    return 0


def _compute(seat: Seat, control: Connection) -> None:
    spec = seat.spec
    exchange = seat.exchange()
    try:
        device = spec.device_of(seat.rank)
        share = load_shard(spec.folder, spec.dtype, spec.layers, seat.rank, spec.ranks, device)
        connect(share, exchange)
        model = RankModel(share, spec.context_limit, spec.pages)
        give_back()
        settle()
        _say(control, state="loaded")
        if control.recv_bytes() != b"open":
            return
        exchange.open()
        _say(control, state="ready")
        while data := control.recv_bytes():
            model.execute(Batch.from_bytes(data))
    finally:
        exchange.close()


def _say(control: Connection, **message: object) -> None:
    control.send_bytes(json.dumps(message).encode())


def _end_with_parent() -> None:
    """At once, even if this process is stopped or stuck: when rank 0's process ends, the fork server does, whose child
    this is (Linux). The fork server lives as long as anybody holds a certain pipe, so this process must not."""
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    held = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_alive_fd", None)
    if held is not None:
        os.close(held)

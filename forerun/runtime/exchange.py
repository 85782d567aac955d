"""How the ranks of one tensor-parallel group show each other their parts of a tensor.

    gather(part)[i] = rank i's part, on every rank

Nothing is ever summed on the way: a ring adds in an order that depends on a row's place, ranks that add the
gathered parts themselves add them in rank order. `TorchExchange` is torch.distributed: NCCL between GPUs, gloo between
hosts. `SharedExchange` is for CPU ranks of one machine: the parts lie in shared memory and only a byte per peer is
sent, which here takes 20 to 80 microseconds where gloo takes 400 to 2,000 (several thread switches a message).

Every wait has an end: a peer that is gone is known at once, one that does not answer after `timeout_s`.
"""

from __future__ import annotations

import mmap
import os
import re
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import reduction
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

SLOT_BYTES = 1 << 20
"""Shared memory of one rank's part; there are two. Larger parts go through in pieces."""


class PeerLost(Exception):
    """A collective did not come to its end. `peer` is the rank it failed with, if that is known."""

    def __init__(self, peer: int | None, why: str) -> None:
        super().__init__(why if peer is None else f"rank {peer} {why}")
        self.peer = peer


class Exchange(Protocol):
    """One rank's end."""

    rank: int
    world: int

    def open(self) -> None:
        """Meet the other ranks. Raises PeerLost."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """[world, *part.shape], in rank order; the same shape on every rank. Valid until the next gather."""
        ...

    def close(self) -> None: ...


# --- one machine -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SharedEnd:
    """What one rank needs to take part; may be passed to a child process."""

    rank: int
    world: int
    memory: Any  # reduction.DupFd
    sockets: Mapping[int, socket.socket]  # by peer


class SharedEnds:
    """The ends of all ranks, made by the one that starts the others."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._memory = os.memfd_create("forerun-exchange")
        os.ftruncate(self._memory, 2 * world * SLOT_BYTES)
        self._sockets: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(world)}
        for one in range(world):
            for other in range(one):
                self._sockets[one][other], self._sockets[other][one] = socket.socketpair()

    def of_child(self, rank: int) -> SharedEnd:
        """To be passed to a process that is being started."""
        return SharedEnd(rank, self.world, reduction.DupFd(self._memory), self._sockets[rank])

    def take(self, rank: int, timeout_s: float) -> SharedExchange:
        """For this process, which owns it from here on."""
        return SharedExchange(rank, self.world, os.dup(self._memory), self._sockets.pop(rank), timeout_s)

    def release(self) -> None:
        """Once the children are started: only while nobody here holds their ends does one's death show as such."""
        os.close(self._memory)
        for sockets in self._sockets.values():
            for end in sockets.values():
                end.close()


class SharedExchange:
    """`Exchange` over shared memory: two slots in turn, so that none is written while a slower rank still reads it.

    A slot is written again after the meeting in between, to which every peer comes when it has read.
    """

    def __init__(
        self, rank: int, world: int, memory: int, sockets: Mapping[int, socket.socket], timeout_s: float
    ) -> None:
        """memory: a file descriptor, owned from here on, as the sockets are."""
        self.rank, self.world = rank, world
        self._timeout_s = timeout_s
        mapped = mmap.mmap(memory, 2 * world * SLOT_BYTES)
        os.close(memory)
        self._slots = torch.frombuffer(mapped, dtype=torch.uint8).view(2, world, SLOT_BYTES)
        self._sockets = dict(sorted(sockets.items()))
        self._turn = 0
        limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for end in self._sockets.values():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @classmethod
    def of(cls, end: SharedEnd, timeout_s: float) -> SharedExchange:
        return cls(end.rank, end.world, end.memory.detach(), end.sockets, timeout_s)

    def open(self) -> None:
        self._meet()

    def gather(self, part: Tensor) -> Tensor:
        raw = part.contiguous().view(-1).view(torch.uint8)
        if raw.numel() <= SLOT_BYTES:
            parts = self._piece(raw)
        else:
            pieces = [self._piece(piece).clone() for piece in raw.split(SLOT_BYTES)]
            parts = torch.cat(pieces, dim=1)
        return parts.view(part.dtype).view(self.world, *part.shape)

    def close(self) -> None:
        for end in self._sockets.values():
            end.close()

    def _piece(self, raw: Tensor) -> Tensor:  # [bytes] -> [world, bytes], a view of the slots
        slots = self._slots[self._turn % 2]
        slots[self.rank, : len(raw)] = raw
        self._meet()
        return slots[:, : len(raw)]

    def _meet(self) -> None:
        """Everybody has come so far. The number of the turn is sent: ranks out of step would mix passes up."""
        self._turn += 1
        turn = bytes([self._turn % 256])
        for speak in (True, False):
            for peer, end in self._sockets.items():
                try:
                    answer = turn[: end.send(turn)] if speak else end.recv(1)
                except BlockingIOError:
                    raise PeerLost(peer, f"has not answered within {self._timeout_s:g} s") from None
                except OSError as error:
                    raise PeerLost(peer, f"is gone ({error.strerror})") from error
                if answer != turn:
                    raise PeerLost(peer, "is out of step" if answer else "is gone")


# --- torch.distributed -------------------------------------------------------------------------------


class TorchExchange:
    """`Exchange` over torch.distributed's default group of this process.

    With NCCL a peer that hangs ends this process: its watchdog aborts it, and whoever watches the process restarts it.
    """

    def __init__(self, rank: int, world: int, rendezvous: str, backend: str, timeout_s: float) -> None:
        """rendezvous: tcp://host:port of rank 0, or file:///path on one machine; a fresh one for every group."""
        self.rank, self.world = rank, world
        self._rendezvous, self._backend, self._timeout_s = rendezvous, backend, timeout_s

    def open(self) -> None:
        try:
            distributed.init_process_group(
                self._backend,
                init_method=self._rendezvous,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=self._timeout_s),
            )
        except RuntimeError as error:
            raise PeerLost(None, _first_line(error)) from error

    def gather(self, part: Tensor) -> Tensor:
        out = part.new_empty((self.world, *part.shape))
        try:
            distributed.all_gather(list(out.unbind(0)), part.contiguous())
        except RuntimeError as error:
            raise PeerLost(None, _first_line(error)) from error
        return out

    def close(self) -> None:
        if distributed.is_initialized():
            with suppress(RuntimeError):
                distributed.destroy_process_group()


def _first_line(error: BaseException) -> str:
    """Without the place in torch's source that the message begins with."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error).strip().partition("\n")[0])

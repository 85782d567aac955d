"""A tensor-parallel model as rank 0 sees it: the same `Model`, and a group of processes behind it.

Rank 0 lives in the target worker's process. It plans, samples and speaks to the world; for a pass it sends the
others the pass as integers and computes its own share, meeting them in every layer (`exchange.py`).

Between passes nothing is pending, for however long. A rank that dies in a pass is known at once, one that hangs
within `timeout_s`; the rest of the group is then killed, `GroupLost` is raised, and `restart` brings up new ranks.
Rank 0 keeps its weights; all KV is gone.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import AuthenticationError, forkserver
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor

from forerun.core.errors import GroupLost, ModelRefused
from forerun.runtime.batch import Batch
from forerun.runtime.exchange import Exchange, PeerLost, SharedEnds, TorchExchange
from forerun.runtime.forward import TransformersModel
from forerun.runtime.memory import MemoryUse
from forerun.runtime.ranks import PEER_LOST, GroupSpec, Seat, run_child
from forerun.runtime.shards import ask_rows, connect, load_shard

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
LAST_WORDS_S = 0.5
"""For how long the processes of a broken group may still show which of them broke it."""

RESTART_LOADS, RESTART_S = 2.0, 5.0
"""A group that starts again has so many times as long as the first one took to load, and so many seconds more."""

_PRELOAD = "forerun.runtime.ranks"


class Group:
    """Ranks 1 to N-1 as child processes of this machine; one life, from `launch` to `stop`."""

    def __init__(self, spec: GroupSpec) -> None:
        if spec.ranks < 2:
            raise ModelRefused(f"a group has 2 ranks or more, not {spec.ranks}")
        self.spec = spec
        self.exchange: Exchange
        self._processes: dict[int, BaseProcess] = {}
        self._controls: dict[int, Connection] = {}
        self._key = secrets.token_bytes(32)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._home = tempfile.mkdtemp(prefix="forerun-group-")  # of a rendezvous, readable by this user only
        self._ending = False
        self.broken: str | None = None  # why, once a rank is gone
        self._asking = threading.Lock()  # of the processes and controls, while a broken group is looked into

    def launch(self) -> None:
        """Start the processes; they load while rank 0 does."""
        atexit.register(self.stop)  # before multiprocessing ends its children, which would look like their death
        spec = self.spec
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOAD])
        _start_fork_server()
        if sys.platform.startswith("linux"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rendezvous = f"file://{self._home}/rendezvous"
        ends = SharedEnds(spec.ranks) if spec.shared and spec.backend == "gloo" else None
        if ends is None:
            self.exchange = TorchExchange(0, spec.ranks, rendezvous, spec.backend, spec.timeout_s)
        else:
            self.exchange = ends.take(0, spec.timeout_s)
        host, port = self._server.getsockname()[:2]
        for rank in range(1, spec.ranks):
            seat = Seat(spec, rank, (host, port), self._key, ends.of_child(rank) if ends else rendezvous)
            process = context.Process(target=run_child, args=(seat,), name=f"forerun-rank-{rank}", daemon=True)
            process.start()
            self._processes[rank] = process
        if ends is not None:
            ends.release()

    def assemble(self) -> None:
        """Until every rank has loaded and met the others. Raises ModelRefused in a rank's words, or GroupLost."""
        began = time.monotonic()
        deadline = began + self.spec.ready_s
        while len(self._controls) < len(self._processes):
            self._await([self._server], deadline)
            self._greet()
        self._expect("loaded", deadline)
        for control in self._controls.values():
            control.send_bytes(b"open")
        try:
            self.exchange.open()
        except PeerLost as lost:
            raise self.fail(lost) from lost
        self._expect("ready", deadline)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        log.info(
            "%d ranks are ready after %.1f s (processes %s)",
            self.spec.ranks,
            time.monotonic() - began,
            ", ".join(str(process.pid) for process in self._processes.values()),
        )

    def send(self, data: bytes) -> None:
        """To every rank. Raises GroupLost."""
        if self.broken is not None:
            raise self.fail(None)
        for rank, control in self._controls.items():
            try:
                control.send_bytes(data)
            except BlockingIOError:
                raise self.fail(PeerLost(rank, f"has not read for {self.spec.timeout_s:g} s")) from None
            except OSError as error:
                raise self.fail(PeerLost(rank, f"is gone ({error.strerror})")) from error

    def fail(self, lost: PeerLost | None) -> GroupLost:
        """End the group loudly. The error names the rank that ended first, as well as can be told."""
        if not self._ending:
            self._ending = True
            with self._asking:
                told = self.broken or self._last_words(None if lost is None else lost.peer)
            self.broken = told or str(lost)
            log.error("the tensor-parallel group is lost: %s", self.broken)
            self.stop()
        return GroupLost(f"the tensor-parallel group is lost: {self.broken}")

    def stop(self) -> None:
        """Kill every rank, stopped ones too."""
        self._ending = True
        atexit.unregister(self.stop)
        self.exchange.close()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join(HANDSHAKE_S)
        for control in self._controls.values():
            control.close()
        self._server.close()
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values() if process.pid is not None]

    # --- starting ------------------------------------------------------------------------------

    def _greet(self) -> None:
        """Let a rank in that knows the key. A stranger is turned away and holds nobody up for long."""
        accepted, _ = self._server.accept()
        _limit(accepted, HANDSHAKE_S)
        control = Connection(accepted.detach())
        try:
            deliver_challenge(control, self._key)
            answer_challenge(control, self._key)
            rank = json.loads(control.recv_bytes())["rank"]
        except (AuthenticationError, EOFError, OSError, ValueError, KeyError) as error:
            log.warning("a stranger at the ranks' port: %s: %s", type(error).__name__, error)
            control.close()
            return
        with socket.socket(fileno=os.dup(control.fileno())) as same:
            _limit(same, self.spec.timeout_s)
        self._controls[rank] = control

    def _expect(self, state: str, deadline: float) -> None:
        """Until every rank has said it."""
        missing = dict(self._controls)
        while missing:
            for ready in self._await(list(missing.values()), deadline):
                rank = next(rank for rank, control in missing.items() if control is ready)
                try:
                    message = json.loads(missing[rank].recv_bytes())
                except (EOFError, OSError):
                    raise self.fail(PeerLost(rank, "ended while starting")) from None
                if "error" in message:
                    self.stop()
                    raise ModelRefused(f"rank {rank} cannot start: {message['error']}")
                if message.get("state") == state:
                    log.info("rank %d is %s", rank, state)
                    del missing[rank]

    def _await(self, waited: Sequence[socket.socket | Connection], deadline: float) -> list[object]:
        """Those of `waited` that have something. Raises GroupLost if a process ends or time runs out."""
        sentinels = {process.sentinel: rank for rank, process in self._processes.items()}
        ready = wait([*waited, *sentinels], max(0.0, deadline - time.monotonic()))
        said = [one for one in ready if not isinstance(one, int)]
        if said:
            return list(said)
        for one in ready:
            if isinstance(one, int):
                raise self.fail(PeerLost(sentinels[one], "ended while starting"))
        raise self.fail(PeerLost(None, f"the ranks were not ready within {self.spec.ready_s:.3g} s"))

    # --- ending --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Tell of a rank that dies while nothing is computed; the next pass would only then find out."""
        wait([process.sentinel for process in self._processes.values()])
        with self._asking:
            if self._ending:
                return
            self.broken = self._last_words(None) or "a rank ended"
        log.error("between passes: %s", self.broken)

    def _last_words(self, suspect: int | None) -> str:
        """Which rank broke the group: one that was killed, else one that says why, else `suspect`, which hangs."""
        deadline = time.monotonic() + LAST_WORDS_S
        running = list(self._processes.values())
        while running and all(process.exitcode in (None, PEER_LOST) for process in self._processes.values()):
            if not wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
                break
            running = [process for process in running if process.exitcode is None]
        for rank, process in self._processes.items():
            status = process.exitcode
            if status is not None and status < 0:
                return f"rank {rank} (process {process.pid}) was ended by {signal.Signals(-status).name}"
        for rank, control in self._controls.items():
            if said := _words(control):
                return f"rank {rank}: {said}"
        for rank, process in self._processes.items():
            if process.exitcode not in (None, PEER_LOST):
                return f"rank {rank} (process {process.pid}) ended with status {process.exitcode}"
        if suspect is not None and suspect in self._processes and self._processes[suspect].exitcode is None:
            return f"rank {suspect} (process {self._processes[suspect].pid}): no answer in {self.spec.timeout_s:g} s"
        return ""


class ParallelModel(TransformersModel):
    """Rank 0's share and its group, as one model. Raises ModelRefused at start, GroupLost in a pass."""

    def __init__(self, spec: GroupSpec, *, exact: bool = True) -> None:
        torch.set_num_threads(spec.threads)  # of the process: a share's bits may depend on it
        self._spec = spec
        self._group = Group(spec)
        try:
            self._group.launch()
            began = time.monotonic()
            share = load_shard(spec.folder, spec.dtype, spec.layers, 0, spec.ranks, spec.device_of(0))
            self._group.assemble()
            self._loaded_s = time.monotonic() - began
            connect(share, self._group.exchange)
            super().__init__(share, spec.context_limit, spec.pages, exact=exact)
        except GroupLost as lost:
            raise ModelRefused(str(lost)) from lost
        except BaseException:
            self._group.stop()
            raise

    def execute(self, batch: Batch) -> Tensor:
        """[len(batch.wanted), vocab] float32 on the CPU."""
        self._group.send(batch.to_bytes())
        ask_rows(self._model, batch)
        try:
            return super().execute(batch)
        except PeerLost as lost:
            raise self._group.fail(lost) from lost
        except BaseException:
            self._group.stop()  # the others are in the middle of a pass that rank 0 left
            self._group.broken = "rank 0 left a pass"
            raise

    def memory(self, baseline: int, resident: int) -> MemoryUse:
        return super().memory(baseline, resident).of_each(self._spec.ranks)

    def restart(self) -> None:
        """A new group for the same weights. Raises GroupLost or ModelRefused if it does not come up.

        It has about as long as the first one took to load: the engine waits, and a rank that hangs can be replaced.
        """
        began = time.monotonic()
        ready_s = min(self._spec.ready_s, RESTART_LOADS * self._loaded_s + RESTART_S)
        self._group.stop()
        self._group = Group(replace(self._spec, ready_s=ready_s))
        self._group.launch()
        self._group.assemble()
        connect(self._model, self._group.exchange)
        self.pages.forget()
        log.warning("the tensor-parallel group is back after %.1f s", time.monotonic() - began)

    def close(self) -> None:
        self._group.stop()

    @property
    def pids(self) -> list[int]:
        """Processes of the other ranks."""
        return self._group.pids


def _start_fork_server() -> None:
    """It looks for what it loads in the working directory first, which may hold another package of that name."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _limit(end: socket.socket, seconds: float) -> None:
    """No read or write of it takes longer."""
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _words(control: Connection) -> str:
    """The error a rank has told of, if any."""
    try:
        while control.poll():
            message = json.loads(control.recv_bytes())
            if "error" in message:
                return str(message["error"])
    except (EOFError, OSError, ValueError):
        pass
    return ""

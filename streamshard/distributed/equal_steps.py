"""`StepAgreement`: whether every rank has a batch for the next step, or any, agreed through the job's key-value store.

For each step each rank adds to one counter, in whose parts it says that it has reported, whether it has a batch, and whether it
lacks even one to pad with. Whoever is last writes the verdict, and the others find it. Asked by the thread that forms batches,
which is ahead of the training loop: by the time the loop wants the batch, the verdict has long been there.

No collective: the loop's own collectives are not disturbed, an iteration that is left early leaves nobody hanging, and a rank
that never comes is an error of the others after the process group's timeout.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed

from streamshard.distributed.job import nonce, running, store
from streamshard.distributed.topology import Topology
from streamshard.errors import UsageError, WorkerError

_begun: Counter[tuple[str, str]] = Counter()  # iterations of a dataset in this process: every process counts alike
_HAS, _LACKS = 1 << 20, 1 << 40  # parts of a step's counter, above the number of ranks that have reported
_PAUSE_S = 0.0002, 0.001  # between two looks for a verdict: first, and at most (with many ranks more, see below)
_STORE_S = 20e-6  # what the store's process needs for a look: all ranks together are to keep it half busy at most


class Verdict(NamedTuple):
    """Of a step: whether all ranks have a batch, whether any has; and `template`, if this rank said that it lacks one."""

    everyone: bool
    someone: bool
    template: bytes | None


class Closed(Exception):  # noqa: N818  (it ends a wait, it is no error)
    """The iteration is over."""


class StepAgreement:
    """The steps of one iteration over the dataset called `name`, by the ranks of `topology`. Peers of a rank agree among those
    of other ranks that came in the same order, so each has the same verdicts. `ask` is for one thread, `close` for any.

    The first one of a job is a collective of all its processes.
    """

    def __init__(self, name: str, topology: Topology) -> None:
        self._topology = topology
        self._closed = False
        self._step = 0
        self._alone = topology.size == 1
        if self._alone:
            return
        if not running():
            raise UsageError(
                f"ranks cannot agree on the number of steps without a process group, and this is rank {topology.rank} of "
                f"{topology.size}: call torch.distributed.init_process_group first, or use remainder='keep'"
            )
        self._store: Any = store()
        life = nonce()
        _begun[life, name] += 1
        self._all = f"streamshard/steps/{life}/{_begun[life, name]}/{name}"
        self._key = ""  # of those who agree with one another

    def ask(self, *, has: bool, give: Callable[[], bytes] | None) -> Verdict:
        """Report on the next step, and wait for the others. `give` makes a template for ranks that lack one; None: this does.

        Raises `WorkerError` naming the ranks that have not reported in time, and `Closed` after `close`.
        """
        if self._alone:
            return Verdict(has, has, None)
        step, self._step = self._step, self._step + 1
        try:
            if step == 0:
                self._key = f"{self._all}/{self._store.add(f'{self._all}/came/{self._topology.rank}', 1)}"
            verdict = self._report(step, has=has, lacks=give is None)
            lacking = verdict[0] == "1"
            template = self._template(step, give) if lacking else None
            if step > 1:
                self._clean(step - 2)
        except torch.distributed.DistError as error:
            raise WorkerError(
                f"the job's store is gone ({str(error).splitlines()[0]}): the process that kept it has ended. Restart the job "
                f"from its last checkpoint"
            ) from error
        return Verdict(verdict[1] == "1", verdict[2] == "1", template)

    def _report(self, step: int, *, has: bool, lacks: bool) -> str:
        key, ranks = f"{self._key}/{step}", self._topology.size
        count = self._store.add(key, 1 + _HAS * has + _LACKS * lacks)
        if count % _HAS == ranks:
            having = count // _HAS % _HAS
            lacking = count >= _LACKS and having > 0
            self._store.set(f"{key}/verdict", f"{int(lacking)}{int(having == ranks)}{int(having > 0)}")
        return str(self._await(f"{key}/verdict", step).decode())

    def _template(self, step: int, give: Callable[[], bytes] | None) -> bytes | None:
        """One of all who have a template writes it down; those who lack one read it, peers the same."""
        key = f"{self._all}/template/{step}"
        if give is None:
            return bytes(self._await(key, step))
        if self._store.add(f"{key}/givers", 1) == 1:
            self._store.set(key, give())
        return None

    def _await(self, key: str, step: int) -> Any:
        pause, most = _PAUSE_S
        most = max(most, 2 * _STORE_S * self._topology.size)
        began = time.monotonic()
        patience = self._store.timeout.total_seconds()
        told = False
        while not self._store.check([key]):
            if self._closed:
                raise Closed
            waited = time.monotonic() - began
            if waited > patience / 2 and not told:
                self._store.set(f"{self._key}/{step}/waits/{self._topology.rank}", "")
                told = True
            if waited > patience:
                raise WorkerError(self._late(step, patience))
            time.sleep(pause)
            pause = min(2 * pause, most)
        return self._store.get(key)

    def _late(self, step: int, patience: float) -> str:
        ranks = range(self._topology.size)
        late = [rank for rank in ranks if not self._store.check([f"{self._key}/{step}/waits/{rank}"])]
        return (
            f"data-parallel ranks {late[:16]} have not said within {patience:g} s (the process group's timeout) whether they "
            f"have a batch for step {step} of this iteration: they have ended, hang, or have left the loop. Restart the job "
            f"from its last checkpoint; every rank must iterate, and leave, at the same step"
        )

    def _clean(self, step: int) -> None:
        """Nobody will ask about `step` again: all have reported on a later one."""
        if self._topology.rank == 0:
            for key in (f"{self._key}/{step}", f"{self._key}/{step}/verdict"):
                self._store.delete_key(key)

    def close(self) -> None:
        """Whoever waits goes on with `Closed`."""
        self._closed = True

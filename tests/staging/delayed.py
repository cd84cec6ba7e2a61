"""A device whose two streams lag behind the program as far as the rules allow, in an order drawn from a seed.

What is asked for is only put on a list. A thread carries it out, one operation at a time from a stream drawn at random, and
only when somebody waits for it or a drawn number of operations has piled up. So an operation that relies on luck instead of
an event meets bad luck soon.
"""

from __future__ import annotations

import random
import threading
from collections import deque

import torch


class Marker:
    """An event: over when the streams' thread has come to it."""

    def __init__(self, streams):
        self.over = False
        self._streams = streams

    def synchronize(self):
        self._streams.wait_for(self)


class DelayedDevice:
    def __init__(self, seed=0, most=30):
        self.allocated = {"host": 0, "memory": 0}
        self.lent = 0
        self._random = random.Random(seed)
        self._most = most
        self._lag = 0
        self._changed = threading.Condition()
        self._streams = {"copy": deque(), "consumer": deque()}
        self._waiting = 0
        self._pinned = set()
        self._stopped = False
        self._thread = threading.Thread(target=self._carry_out, daemon=True)
        self._thread.start()

    # ---- the verbs of a device

    def host(self, size):
        self.allocated["host"] += 1
        memory = torch.empty(size, dtype=torch.uint8)
        self._pinned.add(memory.untyped_storage().data_ptr())
        return memory

    def memory(self, size):
        self.allocated["memory"] += 1
        return torch.full((size,), 0xEE, dtype=torch.uint8)

    def reads(self, tensor):
        return tensor.untyped_storage().data_ptr() in self._pinned

    def copy(self, target, source):
        self._ask("copy", lambda: target.copy_(source))

    def copied(self):
        return self._mark("copy")

    def passed(self):
        return self._mark("consumer")

    def copies_wait(self, event):
        self._ask("copy", event)

    def consumer_waits(self, event):
        self._ask("consumer", event)

    def lend(self, _):
        self.lent += 1

    # ---- for tests

    def compute(self, work):
        """The consumer's own work, on its stream."""
        self._ask("consumer", work)

    def finish(self):
        for stream in self._streams:
            self._mark(stream).synchronize()

    def stop(self):
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def wait_for(self, marker):
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: marker.over, timeout=60)
            self._waiting -= 1
            assert marker.over, "the streams wait for each other"

    def _mark(self, stream):
        marker = Marker(self)

        def over():
            with self._changed:
                marker.over = True
                self._changed.notify_all()

        self._ask(stream, over)
        return marker

    def _ask(self, stream, work):
        with self._changed:
            self._streams[stream].append(work)
            self._changed.notify_all()

    def _carry_out(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._runnable())
                if self._stopped:
                    return
                stream = self._random.choice(self._runnable())
                work = stream.popleft()
                if not stream:
                    self._lag = self._random.randrange(self._most)
            if not isinstance(work, Marker):
                work()

    def _runnable(self):
        if not self._waiting and sum(map(len, self._streams.values())) <= self._lag:
            return []
        return [s for s in self._streams.values() if s and not (isinstance(s[0], Marker) and not s[0].over)]

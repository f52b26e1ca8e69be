"""Waiting for other threads, and making one wait."""

import threading
import time

PATIENCE_SECONDS = 30  # a test that waits so long has failed


class Gate:
    """Stands for `Engine.step`: after some steps the next one waits until the gate is open."""

    def __init__(self, step, free):
        self._step, self._free, self._open, self.arrived = step, free, threading.Event(), threading.Event()

    def __call__(self, request, token):
        self._free -= 1
        if self._free < 0:
            self.arrived.set()
            assert self._open.wait(PATIENCE_SECONDS)
        return self._step(request, token)

    def open(self):
        self._open.set()


def until(condition):
    """Wait for what another thread is about to do."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)

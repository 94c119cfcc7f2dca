"""A contender: a long-lived program that measures on request and sleeps in between."""

import json
import os
import select
import signal
import subprocess
import time


class ContenderError(Exception):
    """The contender gave up, or did not answer in time; it is of no more use."""


class Contender:
    """`command` speaks the protocol of common/request.h; its stderr goes to `log`."""

    def __init__(self, name, command, log, environment=None):
        self.name = name
        self.command = command
        self.log = log
        self.environment = environment or {}
        self.process = None
        self.failure = None

    def start(self, timeout_s=60):
        with open(self.log, "w", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, bufsize=0,
                env={**os.environ, **self.environment}, start_new_session=True)
        self._pending = b""
        self._answer(timeout_s)

    def measure(self, timeout_s=120, **request):
        """The answer to one request, as a dict. Raises ContenderError, and the same one ever after."""
        if self.failure:
            raise ContenderError(self.failure)
        line = " ".join(f"{key}={value}" for key, value in request.items()) + "\n"
        try:
            self.process.stdin.write(line.encode())
        except OSError:
            self._fail("it is gone")
        return self._answer(timeout_s)

    def stop(self):
        if self.process is None:
            return
        try:
            self.process.stdin.close()
        except OSError:
            pass
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()
        self.process = None

    def _answer(self, timeout_s):
        until = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, until - time.monotonic()))
            if not ready:
                self._fail(f"no answer within {timeout_s} s")
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                self._fail(f"it ended (see {self.log})")
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            self._fail(answer["error"])
        return answer

    def _fail(self, words):
        self.failure = f"{self.name}: {words}"
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        raise ContenderError(self.failure)

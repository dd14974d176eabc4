"""A pytest plugin for Keras's own test files: enters the scope of a strategy in each test's `setUp`.

Several processes run the same tests in step: none begins a test before all have ended the one before. `keras_runs.py`
starts them, and goes on behind a test that ended differently on two ranks, or did not end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

VARIANT, RANK, SIZE = (os.environ[f"TFREP_MIRROR_{name}"] for name in ("VARIANT", "RANK", "SIZE"))
FIRST, EVERY, SKIP = (int(os.environ[f"TFREP_MIRROR_{name}"]) for name in ("FIRST", "EVERY", "SKIP"))
FOLDER = Path(os.environ["TFREP_MIRROR_FOLDER"])
_STDERR = os.fdopen(os.dup(2), "w")  # pytest will capture the other one.
_TEST_SECONDS = 180.0
_PEER_SECONDS = 10.0
"""How long the others may go on once a test has failed here: they may wait for what this rank did not reach."""


# Some of Keras's tests import this from the conftest of its repository, which is not installed.
sys.modules.setdefault("conftest", sys.modules[__name__])


def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(backend == "tensorflow", reason=reason)


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: of Keras")
    strategy = make_strategy()
    if strategy is not None:
        enter_in_set_up(strategy)
    config.pluginmanager.register(Records(strategy))


def make_strategy() -> Any:
    """Makes the strategy of this process; None for one device."""
    if VARIANT == "one device":
        return None
    import tfrep_strategy as tfrep

    if VARIANT == "mirrored":
        return tfrep.MirroredStrategy(tfrep.use_logical_cpus(2))
    return tfrep.MultiWorkerStrategy(VARIANT)


def enter_in_set_up(strategy: Any) -> None:
    """Lets every test of Keras run in the scope of a strategy."""
    from keras.src.testing import TestCase

    original = TestCase.setUp

    def set_up(self: Any) -> None:
        original(self)  # It clears the session, and with it every scope.
        scope = strategy.scope()
        scope.__enter__()
        self.addCleanup(scope.__exit__, None, None, None)

    TestCase.setUp = set_up


class Records:
    """Writes what became of each test, and waits for the other ranks."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.number = SKIP
        self.outcome, self.why = "passed", ""

    @pytest.hookimpl(trylast=True)  # After those that are not to be run have been left out.
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[FIRST::EVERY][SKIP:]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.outcome, self.why = "passed", ""
        (FOLDER / f"{self.number}.{RANK}.begun").write_text(item.nodeid, "utf-8")
        faulthandler.dump_traceback_later(_TEST_SECONDS, exit=True, file=_STDERR)
        result = yield
        unnamed = FOLDER / f"{self.number}.{RANK}.part"
        unnamed.write_text(json.dumps([self.outcome, self.why]), "utf-8")
        unnamed.rename(unnamed.with_suffix(".ended"))
        self.meet_peers()
        faulthandler.cancel_dump_traceback_later()
        self.number += 1
        return result

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            (FOLDER / f"{RANK}.finished").touch()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" and self.outcome != "failed":
            self.outcome = report.outcome
            self.why = str(report.longrepr)

    def meet_peers(self) -> None:
        """Returns when all ranks have ended the test alike, and ends the process if they have not."""
        deadline = time.monotonic() + (_PEER_SECONDS if self.outcome == "failed" else _TEST_SECONDS)
        for rank in range(int(SIZE)):
            ended = FOLDER / f"{self.number}.{rank}.ended"
            while not ended.exists():
                if time.monotonic() > deadline:
                    os._exit(1)
                time.sleep(0.002)
            if json.loads(ended.read_text("utf-8"))[0] != self.outcome:
                os._exit(1)  # The ranks may be at different places now.
        if self.outcome == "failed" and int(SIZE) > 1:
            try:
                self.strategy.extended.barrier()
            except Exception:
                os._exit(1)  # They cannot talk any more.

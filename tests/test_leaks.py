"""The check for leaks, on tests that leak."""

from __future__ import annotations

from pathlib import Path

import leaks
import pytest

pytestmark = pytest.mark.lane("package")

pytest_plugins = "pytester"

_CASES = Path(__file__).with_name("leaking_cases.py")


def test_each_leak_fails_its_test_and_is_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE", 0.3)
    options = ["--noconftest", "-p", "leaks", "-p", "no:cacheprovider", "-c", str(pytester.makeini("[pytest]"))]
    run = pytester.inline_run(*options, str(_CASES))
    reports = run.getreports("pytest_runtest_logreport")
    assert all(report.passed for report in reports if report.when != "teardown")
    found = {report.nodeid.rpartition("::")[2]: report.longreprtext for report in reports if report.failed}
    named = {
        "test_process": "::test_process (call)",
        "test_process_without_parent": "time.sleep(60)",
        "test_thread": "thread waiting",
        "test_thread_of_the_package": "thread inside",
        "test_port": "listening port 127.0.0.1:",
        "test_temporary_file": "/tfrep-of-test-",
        "test_file_in_the_working_directory": "/written.txt",
        "test_nothing": "/tfrep-of-module-",  # The last of the module.
    }
    assert found.keys() == named.keys(), found
    for name, text in found.items():
        assert named[name] in text
        assert text.count("\n") == 1, text

"""For the whole repository: tests that need a GPU or the compiled library are skipped, or required."""

from __future__ import annotations

import functools
from collections.abc import Generator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parent / "packages"
NEEDS = ("gpu", "library")

_passed = pytest.StashKey[dict[str, set[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    for need in NEEDS:
        parser.addoption(
            f"--require-{need}",
            action="store_true",
            help=f"fail when no test marked {need} passed (without it they are skipped where they cannot run)",
        )
    parser.addoption("--require-any", action="store_true", help="fail when no test passed at all: all were skipped")


def pytest_configure(config: pytest.Config) -> None:
    passed: dict[str, set[str]] = {need: set() for need in (*NEEDS, "any")}
    config.stash[_passed] = passed


@functools.cache
def why_no_gpu() -> str | None:
    """Why tests marked gpu cannot run, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no CUDA GPU is visible to torch"


@functools.cache
def why_no_library(package: str) -> str | None:
    """Why tests marked library cannot run for a package (import name), or None."""
    from dandan_ops_core import loader

    loaded = loader.load(package)
    return None if loaded.loaded else f"the compiled library is not loaded: {loaded.reason}"


def owner(item: pytest.Item) -> str | None:
    """The import name of the package whose tests folder holds this test."""
    if not item.path.is_relative_to(PACKAGES):
        return None
    return item.path.relative_to(PACKAGES).parts[0].replace("-", "_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = why_no_gpu() if item.get_closest_marker("gpu") else None
        if reason is None and item.get_closest_marker("library") and (package := owner(item)) is not None:
            reason = why_no_library(package)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" and report.passed:
        for need, passed in item.config.stash[_passed].items():
            if need == "any" or item.get_closest_marker(need):
                passed.add(item.nodeid)
    return report


def unmet(config: pytest.Config) -> list[str]:
    """The required kinds of test of which none passed."""
    passed = config.stash[_passed]
    return [need for need in passed if config.getoption(f"--require-{need}") and not passed[need]]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if unmet(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for need in NEEDS:
        if config.getoption(f"--require-{need}"):
            terminalreporter.write_line(f"tests marked {need} that ran and passed: {len(config.stash[_passed][need])}")
    for need in unmet(config):
        reason = why_no_gpu() if need == "gpu" else None
        why = reason or "none was selected, or none passed"
        terminalreporter.write_line(f"error: --require-{need}, but no such test passed: {why}", red=True)

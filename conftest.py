"""Options for the whole repository: what happens to GPU tests."""

from __future__ import annotations

import pytest

_passed_gpu_tests = pytest.StashKey[set]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail when no test marked gpu passed (without it they are skipped where there is no GPU)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_passed_gpu_tests] = set()


def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    reason = _why_no_gpu()
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.when == "call" and report.passed and item.get_closest_marker("gpu"):
        item.config.stash[_passed_gpu_tests].add(item.nodeid)
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--require-gpu") and not session.config.stash[_passed_gpu_tests]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--require-gpu"):
        count = len(config.stash[_passed_gpu_tests])
        if count:
            terminalreporter.write_line(f"{count} GPU test{'s' if count > 1 else ''} ran and passed")
        else:
            reason = _why_no_gpu() or "none was selected or none passed"
            terminalreporter.write_line(f"error: --require-gpu, but no GPU test passed: {reason}", red=True)

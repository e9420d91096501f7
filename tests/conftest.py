"""For every test: kernels go through Triton's interpreter without a GPU, and nothing is left out in silence."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel module is imported


def pytest_collection_modifyitems(config, items):
    """Tests that need GPUs this machine lacks are deselected, which pytest counts, and never skipped."""
    gpus = torch.cuda.device_count()
    wanted = {
        item: 2 if item.get_closest_marker("multigpu") else int(bool(item.get_closest_marker("gpu"))) for item in items
    }
    lacking = [item for item in items if wanted[item] > gpus]
    if lacking:
        config.hook.pytest_deselected(items=lacking)
        items[:] = [item for item in items if wanted[item] <= gpus]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A skipped or expected failure is a hole in the gate: with CI set, it fails the run."""
    if os.environ.get("CI") and _holes(session.config) and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.write_line(f"skipped tests: {_holes(config)}")


def _holes(config):
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    return sum(len(stats.get(kind, ())) for kind in ("skipped", "xfailed", "xpassed"))

"""What holds for every test."""

import signal

import pytest


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> None:
    """A shell that starts the tests in the background has interrupts ignored, in all of its children too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

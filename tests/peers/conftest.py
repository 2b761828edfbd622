"""What the tests with other libraries share."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """torch on one thread: on busy processors its threads take ten times as long for inputs this small."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""What tests of figures share: no window, figures closed after each test, the weights of a real sentence."""

import pytest

import attnc.datasets


@pytest.fixture(autouse=True)
def closed():
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")


@pytest.fixture(scope="session")
def data():
    return attnc.datasets.load("turkish")


@pytest.fixture(scope="session")
def weights(data):
    return attnc.attention_weights(data.query, data.key)

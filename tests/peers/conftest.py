"""Registers the markers of tests that compare with other packages and of those that take long."""


def pytest_configure(config):
    config.addinivalue_line("markers", "peers: compares with another package (make test-peers)")
    config.addinivalue_line("markers", "more: takes long (make test-more)")

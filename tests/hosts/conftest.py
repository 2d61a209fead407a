"""Hosts for a test, or the reason why this machine has none."""

from contextlib import ExitStack

import pytest

from tests.hosts.hosts import NoHosts, hosts


@pytest.fixture
def given_hosts(tmp_path):
    """A function that gives `count` hosts until the test ends; skips where it cannot."""
    with ExitStack() as stack:

        def give(count=2, **options):
            try:
                return stack.enter_context(hosts(tmp_path, count, **options))
            except NoHosts as error:
                pytest.skip(f"needs namespaces and iproute2, and the right to make them: {error}")

        yield give

"""Fixtures for tests on a simulated device."""

from tests.sim.fixtures import simulate

__all__ = ["simulate"]

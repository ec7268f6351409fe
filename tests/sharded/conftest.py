"""Fixtures of a simulated device."""

from tests.tiers.conftest import rig

__all__ = ["rig"]

"""Tests of the build of the wheel."""

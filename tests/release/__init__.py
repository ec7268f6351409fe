"""Tests of what makes the wheel."""

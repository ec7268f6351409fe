"""The small run that tests of the command line change."""

from tests.cli.test_finetune import job

__all__ = ["job"]

"""The engine as the rest of infinity opens it."""

from __future__ import annotations

import errno
import os
import textwrap

import pytest

from tests.native.children import REFUSE
from tests.processes import run_script


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the system call's number is x86-64's")
def test_asking_for_io_uring_where_it_is_blocked_is_a_config_error_with_the_fix() -> None:
    script = f"""
        refuse(425, {errno.EPERM})  # io_uring_setup, as Docker's default profile answers
        import infinity
        from infinity.io.engine import open_engine
        try:
            open_engine(infinity.load_config({{"nvme": {{"engine": "io_uring"}}}}).nvme)
        except infinity.ConfigError as error:
            print(error)
    """
    child = run_script(REFUSE + textwrap.dedent(script))
    assert child.returncode == 0, child.stderr
    out = child.stdout
    assert "seccomp" in out
    assert "Set nvme.engine: auto or threads" in out

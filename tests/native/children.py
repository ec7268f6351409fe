"""A fresh process with the native core alone, for tests of limits, filters and forks: a test process could not undo
these.

The core is loaded from its file, since importing the package would also import torch.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

from infinity import _native

_LOAD = """
import importlib.util, sys
_spec = importlib.util.spec_from_file_location("infinity._native", sys.argv[1])
_native = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_native)
"""


# Fails one system call with the given errno, like a container's seccomp profile.
REFUSE = """
import ctypes, struct

def refuse(number, error):
    load, jump_if_equal, give_back, allow, fail = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    program = b"".join(struct.pack("=HBBI", *line) for line in [
        (load, 0, 0, 0), (jump_if_equal, 0, 1, number), (give_back, 0, 0, fail | error), (give_back, 0, 0, allow)])
    kept = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(kept)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
    assert libc.prctl(22, 2, ctypes.addressof(header), 0, 0) == 0, "PR_SET_SECCOMP"
"""


def run_child(script: str, *arguments: str, prelude: str = "") -> None:
    """Run `script`, in which `_native` is loaded and sys.argv[2:] are `arguments`. Fails when the script fails."""
    command = [sys.executable, "-c", _LOAD + prelude + textwrap.dedent(script), _native.__file__, *arguments]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, f"exit status {child.returncode}\n{child.stdout}\n{child.stderr}"

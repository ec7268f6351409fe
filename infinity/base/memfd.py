"""Memory without a name in any file system, which processes pass to each other as an open file."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL, since Linux 6.3; some systems refuse a memfd without it


def make_memfd() -> int:
    """Return a new memfd of 0 bytes, whose size can be sealed. It is closed in programs that this process starts.

    Raises:
        OSError: the kernel or a seccomp filter refuses.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this Python was built without memfd_create")
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    with suppress(OSError):
        return os.memfd_create("infinity", flags | _NOEXEC_SEAL)
    return os.memfd_create("infinity", flags)

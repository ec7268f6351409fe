"""Ranks in namespaces of their own, as in containers: whether they share memory, and what they say if they do not.

The namespaces are real. They are made in a new user namespace, so root is not needed, and they end with the processes.
Two network namespaces are connected by a pair of virtual Ethernet devices, over which gloo works.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.sharded.shared_homes import SharedHomes
from tests.processes import run
from tests.runtime.over_ranks import train

pytestmark = [
    pytest.mark.cpu_only("several ranks compute on the CPU"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="the command ip (iproute2) is not installed"),
]

HOST = {"weights": "host", "optimizer": "host"}
FLAGS = {"user": 0x10000000, "mnt": 0x00020000, "net": 0x40000000, "uts": 0x04000000}
"""Flags of unshare(2), by the names of the namespaces in /proc/self/ns."""
NETWORK = ["10.77.0.1", "10.77.0.2"]
"""Addresses of the ranks if they have different network namespaces."""
PORT = 29500
LIMIT = timedelta(seconds=60)
REFUSED = 77
"""Exit code: the kernel, or the rights of this process, do not allow a namespace or a device."""


def unshare(*kinds: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(sum(FLAGS[kind] for kind in kinds)):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())} ({', '.join(kinds)})")


def command(*words: str) -> None:
    """Run a command. Raises OSError with its message."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def launch(kind: str, folder: Path) -> int:
    """Be rank 0 in new namespaces, and fork rank 1, whose namespace of this kind is another one."""
    (ours, ready), (go, theirs) = os.pipe(), os.pipe()
    try:
        _enter()
        child = os.fork()
        if not child:
            os.close(theirs)
            _be_rank_1(kind, folder, ready, go)
        os.close(ready)
        if os.read(ours, 1) != b"1":
            raise OSError((folder / "refused").read_text())
        if kind == "net":
            command("ip", "link", "add", "rank0", "type", "veth", "peer", "name", "rank1", "netns", str(child))
            command("ip", "address", "add", f"{NETWORK[0]}/24", "dev", "rank0")
            command("ip", "link", "set", "rank0", "up")
    except OSError as error:
        print(error)
        return REFUSED  # rank 1 reads the end of the pipe
    os.write(theirs, b"1")
    _train(0, kind, folder)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _enter() -> None:
    """Enter a user namespace, as its root, with a network and mounts of its own."""
    maps = {"uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    unshare("user", "net", "mnt")
    for name, text in ({"setgroups": "deny"} | maps).items():
        Path("/proc/self", name).write_text(text)
    command("ip", "link", "set", "lo", "up")


def _be_rank_1(kind: str, folder: Path, ready: int, go: int) -> None:
    code = 1
    try:
        try:
            unshare(kind)
            if kind == "uts":
                socket.sethostname("another")
            elif kind == "mnt":
                command("mount", "-t", "tmpfs", "none", "/dev/shm")
        except OSError as error:
            (folder / "refused").write_text(str(error))
            os._exit(REFUSED)
        os.write(ready, b"1")
        if os.read(go, 1) == b"1":
            if kind == "net":
                command("ip", "address", "add", f"{NETWORK[1]}/24", "dev", "rank1")
                command("ip", "link", "set", "rank1", "up")
            _train(1, kind, folder)
            code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _train(rank: int, kind: str, folder: Path) -> None:
    """Train. Write the result, whether the ranks share memory and the namespace to a file, and stderr to another."""
    os.dup2(os.open(folder / f"stderr of rank {rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = f"rank{rank}" if kind == "net" else "lo"
    host = NETWORK[0] if kind == "net" else "127.0.0.1"
    store = dist.TCPStore(host, PORT, 2, rank == 0, LIMIT, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    shares, made = [], SharedHomes.__init__

    def init(self: SharedHomes, *given: Any) -> None:
        shares.append(True)
        made(self, *given)

    SharedHomes.__init__ = init  # type: ignore[method-assign]
    result = train("", HOST, 1, 2, steps=2)
    told = result, bool(shares), os.readlink(f"/proc/self/ns/{kind}")
    (folder / f"rank {rank}").write_bytes(pickle.dumps(told))
    dist.destroy_process_group()


def lines_of(stderr: Path) -> list[str]:
    """Return the lines, without those of torch's sockets, which look for the names of hosts."""
    return [line for line in stderr.read_text().splitlines() if "[c10d]" not in line]


ANOTHER_NETWORK = (
    "ranks.wire: gloo, as rank 1 could not be given the shared memory (it cannot reach rank 0: another network "
    "namespace, as in another container); results are the same"
)


@pytest.mark.parametrize(
    ("kind", "shared", "said"),
    [
        pytest.param("net", False, [ANOTHER_NETWORK], id="another network"),
        pytest.param("mnt", True, [], id="other mounts"),
        pytest.param("uts", False, [], id="another host name, as of another machine"),
    ],
)
def test_a_rank_in_another_namespace_has_the_same_bits(
    tmp_path: Path, kind: str, shared: bool, said: list[str]
) -> None:
    done = run(launch, kind, tmp_path)
    if done.returncode == REFUSED:
        pytest.skip(f"no namespaces here: {done.stdout.strip()}")
    lines = [lines_of(tmp_path / f"stderr of rank {rank}") for rank in range(2)]
    assert done.returncode == 0, (done.stderr, lines)
    found = [pickle.loads((tmp_path / f"rank {rank}").read_bytes()) for rank in range(2)]
    losses, norms, weights = train("", HOST, 1, 2, steps=2)
    assert [result for result, *_ in found] == [(losses[rank::2], norms, weights) for rank in range(2)]
    assert [shares for _, shares, _ in found] == [shared] * 2
    assert len({namespace for *_, namespace in found}) == 2
    assert lines == [said, []]

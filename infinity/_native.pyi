"""The C++ core: bytes, files and arithmetic. Knows nothing of torch, CUDA, units or Python objects but buffers.

Every buffer argument is a contiguous object with the buffer protocol (memoryview, numpy array); `ValueError` names what
does not fit (size, alignment, read-only), `TypeError` what is no buffer. Calls that wait or compute release the GIL.
"""

from collections.abc import Sequence
from typing import Any, Literal

Buffer = Any
DTypeName = Literal["fp32", "bf16", "fp16"]
MasterName = Literal["weight", "split16", "fp32"]
IOClassName = Literal["weights", "activations", "states"]

class Arena:
    """One anonymous, 2 MiB-aligned mapping of exactly `nbytes` bytes; pages are touched on first use."""

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def huge_pages(self) -> bool: ...
    def view(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of bytes [offset, offset + nbytes), format 'B', that keeps the mapping alive."""
    def discard(self, offset: int, nbytes: int) -> None:
        """Give the pages of a 4 KiB-aligned range back to the system; they read as zeros afterwards."""

class File:
    """One swap file, opened O_CLOEXEC | O_NOFOLLOW, mode 0600, O_DIRECT where the file system takes it.

    Raises:
        OSError: with errno and filename.
    """

    def __init__(self, path: str, *, create: bool = False, direct: bool = True) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    def preallocate(self, nbytes: int) -> None:
        """Reserve the blocks. Raises OSError (ENOSPC, …) after giving back what was taken."""
    def close(self) -> None:
        """Close the descriptor once no request uses it. Idempotent."""

class Failure:
    """Why a request failed. `errno` is 0 where no system call failed."""

    operation: str
    path: str
    offset: int
    nbytes: int
    errno: int
    message: str

class IOFuture:
    """The result of one request. Holds a reference to its buffers; dropping it waits until they are not in use."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait without the GIL; True when done, False when the time passed first. Signals (Ctrl-C) are served."""
    def failure(self) -> Failure | None:
        """None when it went well. RuntimeError while not done."""

class Fault:
    """A fault to inject: `repeat` block operations from `index` on fail with `errno`, or are cut short when it is 0."""

    def __init__(self, index: int, errno: int, repeat: int = 1) -> None: ...

class IOEngine:
    """Requests of any size in, block transfers out, a future per request.

    Raises:
        OSError: engine 'io_uring' where the kernel refuses it; the message says why and what to do.
        ValueError: unknown engine, zero depth, a block that is not a multiple of 4 KiB.
    """

    def __init__(
        self,
        engine: str = "auto",
        *,
        block_bytes: int = 1 << 20,
        queue_depth: int = 32,
        threads: int = 8,
        faults: Sequence[Fault] = (),
    ) -> None: ...
    @property
    def name(self) -> str:
        """'io_uring' or 'threads': what is really used."""
    @property
    def reason(self) -> str: ...
    def read(self, file: File, offset: int, into: Buffer, io_class: IOClassName = "weights") -> IOFuture: ...
    def write(self, file: File, offset: int, data: Buffer, io_class: IOClassName = "weights") -> IOFuture: ...
    def counters(self) -> dict[str, int]:
        """read_bytes_<class>, write_bytes_<class>, operations, retries, short_transfers, busy_ns."""
    def close(self) -> None:
        """Wait for what is in flight and stop the thread; what is queued fails with ECANCELED. Idempotent."""

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Segment:
    """Elements [begin, end) that share hyperparameters: one parameter. `step` counts from 1."""

    begin: int
    end: int

    def __init__(
        self,
        begin: int,
        end: int,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        skip: bool = False,
    ) -> None: ...

def supported_isas() -> list[str]:
    """What this processor and build have, best last: 'baseline', 'avx2', 'avx512'."""

def select_isa() -> str:
    """The best one, or INFINITY_ISA. ValueError when that is unknown or not supported here."""

def adam_update(
    weight: Buffer,
    residual: Buffer | None,
    exp_avg: Buffer,
    exp_avg_sq: Buffer,
    grad: Buffer,
    *,
    weight_dtype: DTypeName,
    master: MasterName,
    grad_dtype: DTypeName,
    segments: Sequence[Segment],
    grad_scale: float,
    pool: ThreadPool,
    isa: str | None = None,
) -> None:
    """One AdamW step in memory on numel = len(exp_avg) / 4 elements."""

def sum_squares(data: Buffer, dtype: DTypeName, pool: ThreadPool, isa: str | None = None) -> float: ...
def accumulate(dst: Buffer, src: Buffer, src_dtype: DTypeName, pool: ThreadPool, isa: str | None = None) -> None:
    """dst (fp32) += src."""

def widen_in_place(data: Buffer, dtype: DTypeName, numel: int) -> None:
    """The first `numel` 16-bit values of `data` become `numel` fp32 values at the same place."""

def encode_split16(master: Buffer, weight: Buffer, residual: Buffer) -> None: ...
def decode_split16(weight: Buffer, residual: Buffer, master: Buffer) -> None: ...
def round_weights(master: Buffer, weight: Buffer, dtype: DTypeName) -> None:
    """fp32 → bf16 (half up) or fp16 (nearest even)."""

class StateStream:
    """Where one state of a job lives: in memory, in a file, or in both (memory is current, updates go to both)."""

    def __init__(self, memory: Buffer | None = None, file: File | None = None, offset: int = 0) -> None: ...

class UpdatePipeline:
    """Read states → Adam → write states, in tiles, all three in flight on C++ threads; jobs in order of submission."""

    def __init__(
        self, engine: IOEngine, pool: ThreadPool, staging: Buffer, tile_numel: int, isa: str | None = None
    ) -> None: ...
    @staticmethod
    def staging_tile_bytes(tile_numel: int) -> int: ...
    def submit(
        self,
        *,
        numel: int,
        weight_dtype: DTypeName,
        master: MasterName,
        grad_dtype: DTypeName,
        segments: Sequence[Segment],
        grad_scale: float,
        weight: StateStream,
        residual: StateStream | None,
        exp_avg: StateStream,
        exp_avg_sq: StateStream,
        grad: Buffer,
    ) -> IOFuture: ...
    def counters(self) -> dict[str, int]:
        """tiles, adam_ns, read_wait_ns, write_wait_ns."""
    def close(self) -> None: ...

"""C++ core: bytes, files and arithmetic.

The core does not know torch, CUDA or units. The only Python objects that it reads are buffers. Every buffer argument is
a contiguous object with the buffer protocol (memoryview, numpy array). A buffer of the wrong size or alignment, or a
read-only buffer, raises a `ValueError` that names the problem. An argument that is not a buffer raises `TypeError`.
While a call waits or computes, it does not hold the GIL.
"""

from collections.abc import Sequence
from typing import Any, Literal

from infinity._native_codec import NESTED_MAP as NESTED_MAP
from infinity._native_codec import NF4_MAP as NF4_MAP
from infinity._native_codec import DecodePart as DecodePart
from infinity._native_codec import WeightDecoder as WeightDecoder
from infinity._native_codec import decode_weights as decode_weights
from infinity._native_codec import encode_weights as encode_weights
from infinity._native_codec import encoded_weight_bytes as encoded_weight_bytes
from infinity._native_codec import nest_scales as nest_scales
from infinity._native_codec import weight_parts as weight_parts
from infinity._native_device import DeviceGate as DeviceGate
from infinity._native_device import LandingFuture as LandingFuture
from infinity._native_device import LandingPiece as LandingPiece
from infinity._native_device import Landings as Landings
from infinity._native_device import UploadPart as UploadPart
from infinity._native_device import Uploads as Uploads

Buffer = Any
DTypeName = Literal["fp32", "bf16", "fp16"]
MasterName = Literal["weight", "split16", "fp32", "none"]
MomentsName = Literal["fp32", "bf16", "int8"]
RuleName = Literal["adamw", "adam", "lion", "adagrad", "sgd"]
FaultName = Literal["error", "cut", "flip", "stale", "misdirect", "delay", "shuffle", "lose", "kill", "kill_after"]
WeightCodec = str  # see _native_codec.pyi
IOClassName = Literal["weights", "activations", "states", "writeback"]

class Arena:
    """One mapping of exactly `nbytes` bytes: anonymous and 2 MiB-aligned, or shared by processes. Pages are touched on
    first use."""

    def __init__(self, nbytes: int, *, huge_pages: bool = True, numa_node: int = -1) -> None: ...
    @staticmethod
    def shared(fd: int, nbytes: int) -> Arena:
        """Map memory that several processes share.

        Args:
            fd: file of at least `nbytes` bytes, such as a memfd; it may be closed afterwards.
            nbytes: bytes to map.

        Raises:
            OSError: the mapping failed.
        """
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def huge_pages(self) -> bool: ...
    def touch(self, pool: ThreadPool) -> None:
        """Make all pages resident, using all threads. The content of the pages does not change."""
    def populate(self, offset: int, nbytes: int) -> None:
        """Take memory for pages, without a change of their content. A kernel before 5.14 takes it at the first write.

        Raises:
            OSError: there is no memory. Without this call, the first write would end the process with SIGBUS.
        """
    def give_back(self) -> None:
        """Return the pages to the system, for all processes that have mapped them. The content of the pages is lost,
        and they read as zeros afterwards."""
    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a writable view of bytes [offset, offset + nbytes), format 'B', that keeps the mapping alive."""

class SharedCounters:
    """Counters, one in each 64 bytes of memory that several processes have mapped.

    What a process wrote before it advanced a counter is visible to every process that has seen the new value.
    """

    def __init__(self, memory: Buffer) -> None: ...
    @property
    def count(self) -> int: ...
    def load(self, index: int) -> int: ...
    def advance(self, index: int, value: int) -> None:
        """Set a counter, and wake the processes that wait for it. Only one process advances a counter."""
    def add(self, index: int) -> int:
        """Add 1, and return the value before. Any process may call this."""
    def wait(self, index: int, value: int, timeout_s: float) -> bool:
        """Wait until a counter is at least `value`, modulo 2**32, and return whether it is."""

class File:
    """Swap file, opened O_CLOEXEC | O_NOFOLLOW, mode 0600, and O_DIRECT if the file system supports it in 4 KiB blocks.

    Raises:
        OSError: with errno and filename.
    """

    def __init__(self, path: str, *, create: bool = False, direct: bool = True, numa_node: int = -1) -> None: ...
    @staticmethod
    def striped(files: Sequence[File], shares: Sequence[int], stripe_bytes: int) -> File:
        """Combine several files into one striped file. Of each sum(shares) stripes, files[i] has shares[i], evenly
        spread.

        Raises:
            ValueError: there is no file, or there are more than 64; a share is outside 1…1024; or stripe_bytes is not a
                multiple of 4 KiB.
        """
    @property
    def path(self) -> str:
        """Path of the first member."""
    @property
    def direct(self) -> bool: ...
    @property
    def alignment(self) -> tuple[int, int]:
        """Alignment of memory and of offsets that direct I/O on the first member needs (STATX_DIOALIGN); 1 without
        direct I/O."""
    def member_bytes(self, member: int, nbytes: int) -> int:
        """Return how many of the first `nbytes` bytes are in `member`."""
    def preallocate(self, nbytes: int) -> None:
        """Reserve the blocks of every member. On an error, free the reserved blocks and raise OSError (ENOSPC, …)."""
    def keep_checksums(self, nbytes: int) -> None:
        """Remember a checksum of each page that is written from now on. Compare each page that is read with its
        checksum.

        Requests must be within the first `nbytes` bytes. Pages that were never written must read as zeros. Call this
        method before the first request.
        """
    def locate(self, offset: int) -> tuple[str, int]:
        """Return the path of the member that holds a byte, and the byte's offset in that member."""
    def remember(self, offset: int, data: Buffer) -> None:
        """Record these complete pages as the file's content from `offset` on; later reads are checked against it."""
    def block_sums(self, offset: int, nbytes: int) -> bytes:
        """Return one little-endian 64-bit sum of checksums for each 256 KiB of complete pages; b'' without
        checksums."""
    def close(self) -> None:
        """Close the descriptor once no request uses it. Idempotent."""

class Failure:
    """Cause of the failure of a request. `errno` is 0 if no system call failed.

    The kinds are:
        io: the device or the system reported an error.
        corruption: a page differs from its checksum.
        timeout: the engine no longer waits for the device, which may still use the memory.
        canceled: the engine was closed first.
        device: the runtime of the compute device returned an error.
    """

    kind: Literal["io", "corruption", "timeout", "canceled", "device"]
    operation: str
    path: str
    offset: int
    nbytes: int
    errno: int
    cause: str
    message: str

class IOFuture:
    """Result of one request.

    The future keeps a reference to the buffers of the request. If the future is freed, it first waits until the buffers
    are no longer in use. After a timeout the device may use the buffers forever, so the buffers are never freed.
    """

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait without the GIL, and return whether the request was done in time. Signals such as Ctrl-C are handled."""
    def failure(self) -> Failure | None:
        """Return the failure; None if the request succeeded. Raises RuntimeError if the request is not done."""

class Fault:
    """Fault to inject into `repeat` block operations, beginning with operation `index`.

    The kinds are:
        error: the operation fails with `errno`.
        cut: only half of the block is moved.
        flip: one bit is wrong.
        stale: nothing is moved, but the operation reports success.
        misdirect: the block next to the right one is read or written.
        delay: the operation completes after operations that were submitted later.
        shuffle: half of the operations complete after up to 16 others, and the device pauses at times; both are random,
            from `seed`.
        lose: the operation never completes.
        kill, kill_after: the process gets SIGKILL before the operation is submitted, or when it is complete.

    Only operations of the named kind ("read", "write", "sync"; "" means all kinds) that begin within bytes [begin, end)
    of their file are counted. A sync moves no data. Only the faults error, stale (reported as done, but not done),
    delay, shuffle, lose, kill and kill_after change a sync.
    """

    def __init__(
        self,
        index: int,
        kind: FaultName,
        errno: int = 0,
        repeat: int = 1,
        *,
        operation: str = "",
        begin: int = 0,
        end: int = 2**64 - 1,
        seed: int = 0,
    ) -> None: ...

class IOEngine:
    """Engine that splits requests of any size into block transfers, and returns a future for each request.

    Each device has its own queue, its own thread and its own ring.

    Args:
        queue_depth, in_flight_bytes: largest number of blocks, and of bytes, in flight per device. I/O classes other
            than 'weights' use at most three quarters of each number.
        threads: number of threads per device, for the engine 'threads'.
        deadline_s: seconds that a block may be in flight. If a block takes longer, all present and later requests of
            its device fail.

    Raises:
        OSError: the engine is 'io_uring', and the kernel refuses io_uring; the message says why and what to do.
        ValueError: the engine is unknown, the queue depth is 0, or the block is not a multiple of 4 KiB.
    """

    def __init__(
        self,
        engine: str = "auto",
        *,
        block_bytes: int = 1 << 20,
        queue_depth: int = 128,
        in_flight_bytes: int = 32 << 20,
        threads: int = 8,
        deadline_s: float = 300.0,
        faults: Sequence[Fault] = (),
        journal: str = "",
    ) -> None: ...
    @property
    def name(self) -> str:
        """Engine in use: 'io_uring' or 'threads'."""
    @property
    def reason(self) -> str: ...
    def read(
        self,
        file: File,
        offset: int,
        into: Buffer,
        io_class: IOClassName = "weights",
        *,
        verify: bool = True,
        after: IOFuture | None = None,
    ) -> IOFuture:
        """Start a read.

        Args:
            file: the file to read.
            offset: bytes from the start of the file.
            into: destination. It must not be used until the request is done.
            io_class: priority class.
            verify: compare the pages with the checksums of the data that was written.
            after: request after which the read starts. If this request fails, the read fails with the same failure.
        """
    def write(
        self,
        file: File,
        offset: int,
        data: Buffer,
        io_class: IOClassName = "weights",
        *,
        after: IOFuture | None = None,
    ) -> IOFuture:
        """Start a write.

        Args:
            file: the file to write to.
            offset: bytes from the start of the file.
            data: the bytes to write. They must not be changed until the request is done.
            io_class: priority class.
            after: request after which the write starts. The write uses the contents that `data` has at that time. If
                this request fails, the write fails with the same failure and writes nothing.
        """
    def sync(self, file: File) -> IOFuture:
        """Start an fdatasync of every member.

        Once the sync is done, writes that were complete before this call survive a power cut. After a failure it is
        unknown which of these writes survive, and a second sync may report success without having written anything.
        """
    def register_memory(self, memory: Buffer) -> str:
        """Register memory with the kernel, which makes transfers cheaper.

        The memory must stay mapped while the engine is open. Returns '' if the kernel registered the memory. Otherwise
        returns the reason of the kernel's refusal (memlock): transfers then take more processor time.
        """
    def counters(self) -> dict[str, int]:
        """Return read_bytes_<class>, write_bytes_<class>, operations, retries, short_transfers, busy_ns, in_flight.

        busy_ns is the time with a block in flight on the busiest device. in_flight is the present number of blocks in
        flight.
        """
    def trace(self, on: bool, *, events_max: int = 1 << 21) -> None:
        """Start or stop recording each request that ends. Requests beyond `events_max` are only counted."""
    def take_trace(self) -> tuple[bytes, int]:
        """Return the events since the last call as `io.events.IO_EVENT` structs, and the number of dropped events.

        Every request whose future is done is included.
        """
    def close(self) -> None:
        """Wait for requests in flight and stop the threads. Queued requests fail with ECANCELED. Idempotent.

        The method does not wait for a device whose deadline has passed.
        """

class ThreadPool:
    """Threads that compute.

    Args:
        threads: number of threads, including the calling thread.
        nice: niceness of the threads, relative to the other threads of this process.
    """

    def __init__(self, threads: int, *, numa_node: int = -1, nice: int = 0) -> None: ...
    @property
    def threads(self) -> int: ...
    def close(self) -> None:
        """Stop the threads once no work uses them. Idempotent. A later use of the pool raises ValueError."""

BLOCK_NUMEL: int
"""Number of elements with a common scale and common random bits. Every parameter begins at a multiple of this
number."""
CUT_NUMEL: int
"""Divisor of the number of elements of every tile."""
CHUNK_NUMEL: int
"""Divisor of the number of elements of a tile with int8 moments, unless the tile is the complete job."""

def task_numel() -> int:
    """Return the number of elements that a thread updates at a time. Their data fits half of a core's L2 cache."""

def moment_bytes(moments: MomentsName, numel: int) -> int:
    """Return the bytes of the first `numel` elements of a moment."""

class Constants:
    """A segment's hyperparameters in the kernel's form: computed in double, then rounded to fp32.

    `decay`, `l2` and the others are explained in csrc/cpu_adam/kernels.hpp, and are used in csrc/cpu_adam/rules.inl.
    """

    rule: RuleName
    uses_exp_avg: bool
    uses_exp_avg_sq: bool
    fresh: bool
    nesterov: bool
    grad_scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    decay: float
    l2: float
    step_size: float
    inverse_bc2_sqrt: float
    eps: float
    initial: float

class Segment:
    """Range of elements [begin, end) with the same hyperparameters: one parameter.

    Args:
        rule: optimizer rule of the step. Hyperparameters that the rule does not use are ignored.
        beta1: momentum, for sgd.
        step: number of the step, from 1.
        index: position of element `begin` among all elements of the model, a multiple of BLOCK_NUMEL. The random bits
            of stochastic rounding depend on `index`, `seed` and `step`.
        skip: leave the elements unchanged.
        fresh: start the moments with this step, and ignore the contents of their buffers; None: do so if `step` is 1.
        grad_scale: factor by which the gradient is multiplied first.
    """

    begin: int
    end: int
    skip: bool

    @property
    def constants(self) -> Constants:
        """The hyperparameters in the kernel's form, for a step outside the kernel.

        In a thread that flushes denormal numbers, a constant that is denormal is zero here, and not in the kernel.
        """
    def __init__(
        self,
        begin: int,
        end: int,
        *,
        rule: RuleName = "adamw",
        lr: float,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        lr_decay: float = 0.0,
        initial_accumulator: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        step: int,
        index: int = 0,
        seed: int = 0,
        skip: bool = False,
        fresh: bool | None = None,
        grad_scale: float = 1.0,
    ) -> None: ...
    def at(self, begin: int, end: int, *, step: int, index: int, fresh: bool, grad_scale: float) -> Segment:
        """Return a segment with the same rule for other elements."""

def supported_isas() -> list[str]:
    """Return the instruction sets of this processor and build, best last: 'baseline', 'avx2', 'avx512'; 'neon'."""

def select_isa() -> str:
    """Return the best instruction set, or the value of INFINITY_ISA. Raises ValueError if this value is unknown or not
    supported."""

def optimizer_update(
    weight: Buffer,
    residual: Buffer | None,
    exp_avg: Buffer | None,
    exp_avg_sq: Buffer | None,
    grad: Buffer,
    *,
    weight_dtype: DTypeName,
    master: MasterName,
    moments: MomentsName = "fp32",
    grad_dtype: DTypeName,
    segments: Sequence[Segment],
    pool: ThreadPool,
    isa: str | None = None,
) -> bool:
    """Compute one step in memory on the elements of `weight`. Return False if a new weight or moment is not finite.

    Raises:
        ValueError: the form of the master does not fit the weight's dtype; a buffer is missing, short, read-only,
            misaligned or overlaps another; or the segments are not sorted, disjoint and within the buffers.
    """

def sums_of_squares(
    data: Buffer, dtype: DTypeName, pool: ThreadPool, isa: str | None = None, *, first: int = 0
) -> list[float]:
    """Return the sum of squares of each part of 65,536 elements, in double precision.

    The result is the same for any number of threads and any instruction set.

    Args:
        data: the elements.
        dtype: dtype of the elements.
        pool: threads to compute with.
        isa: instruction set; None: `select_isa()`.
        first: index of the first element of `data` in a larger array. Each part begins at a multiple of 65,536 in the
            larger array. So the sums of an array can also be computed piece by piece, if the pieces begin at such
            multiples.
    """

def land_gradient(
    dst: Buffer,
    dst_dtype: DTypeName,
    src: Buffer,
    src_dtype: DTypeName,
    *,
    add: bool,
    pool: ThreadPool,
    isa: str | None = None,
    first: int = 0,
) -> list[float]:
    """Compute dst = src, or dst += src. Return the sums_of_squares of the new dst, computed in the same pass.

    dst has the dtype of src, or is fp32. If src is added, dst must be fp32.
    """

def read_modify_write(a: Buffer, b: Buffer, c: Buffer, d: Buffer, pool: ThreadPool, isa: str | None = None) -> None:
    """Compute a += d, b += d, c += d in fp32. The memory traffic is that of AdamW, 28 bytes per element."""

def widen_in_place(data: Buffer, dtype: DTypeName, numel: int) -> None:
    """Convert the first `numel` 16-bit values of `data` to fp32, in place."""

def encode_split16(master: Buffer, weight: Buffer, residual: Buffer) -> None: ...
def decode_split16(weight: Buffer, residual: Buffer, master: Buffer) -> None: ...
def round_weights(master: Buffer, weight: Buffer, dtype: DTypeName) -> None:
    """Convert fp32 to bf16 (half up) or fp16 (nearest even)."""

def decode_moments(
    data: Buffer, moments: MomentsName, *, is_signed: bool, values: Buffer, isa: str | None = None
) -> None:
    """Convert a stored moment to fp32. `is_signed` is true for exp_avg, and false for exp_avg_sq."""

def encode_moments(
    values: Buffer, moments: MomentsName, *, is_signed: bool, data: Buffer, isa: str | None = None
) -> None:
    """Convert fp32 to a stored moment; bf16 is rounded half up."""

class UpdateFuture(IOFuture):
    @property
    def finite(self) -> bool:
        """Whether all new weights and moments that were computed so far are finite."""
    @property
    def computed(self) -> IOFuture:
        """Future that is done once all new values are computed.

        The states in memory then have their new values, and the gradients are no longer read, but writes may be in
        flight. If the update fails before, this future fails, too.
        """
    @property
    def weights(self) -> IOFuture:
        """Future that is done once the new weights are in memory and in the file. It fails like `computed`."""

class StateStream:
    """Location of one state of a job: in memory, in a file, or in both.

    If a state is in both, the memory has the current values, and new values are written to both.

    Args:
        offset, write_offset: offsets in the file at which the state is read, and written; None: the same offset.
        source: memory with the current values, which is not changed. The new values are written to `memory` and the
            file. Not for gradients.
    """

    def __init__(
        self,
        memory: Buffer | None = None,
        file: File | None = None,
        offset: int = 0,
        write_offset: int | None = None,
        *,
        source: Buffer | None = None,
    ) -> None: ...

class UpdatePipeline:
    """Pipeline of updates: C++ threads concurrently read states, compute new values and write states, tile by tile.

    Jobs are done in the order in which they are submitted.
    """

    def __init__(
        self,
        engine: IOEngine,
        pool: ThreadPool,
        staging: Buffer,
        tile_numel: int,
        tile_bytes: int,
        ahead_tiles_max: int = 0,
        isa: str | None = None,
    ) -> None:
        """
        Args:
            engine: engine that moves the states.
            pool: threads that compute.
            staging: memory for at least two tiles more than `ahead_tiles_max`.
            tile_numel: number of elements of a tile.
            tile_bytes: bytes of a tile in the staging (`staging_tile_bytes`).
            ahead_tiles_max: largest number of tiles that may be read ahead.
            isa: instruction set; None: `select_isa()`.
        """
    @staticmethod
    def staging_tile_bytes(
        numel: int, *, weight_dtype: DTypeName, master: MasterName, moments: MomentsName, gradients: bool = False
    ) -> int:
        """Return the bytes of a tile of `numel` elements in the staging, for an update whose states are all in a file.

        If `gradients` is true, the gradients are in a file, too.
        """
    def submit(
        self,
        *,
        numel: int,
        weight_dtype: DTypeName,
        master: MasterName,
        moments: MomentsName = "fp32",
        grad_dtype: DTypeName,
        segments: Sequence[Segment],
        whole: bool = False,
        arithmetic: bool = True,
        weight: StateStream,
        residual: StateStream | None = None,
        exp_avg: StateStream | None = None,
        exp_avg_sq: StateStream | None = None,
        grad: Buffer | StateStream,
        tag: int = 0,
        unit: int | None = None,
        speculative: bool = False,
        ahead: UpdateFuture | None = None,
        after: Sequence[IOFuture] = (),
    ) -> UpdateFuture:
        """Queue the update of one unit.

        Args:
            numel: elements of the job.
            weight_dtype: dtype of the weights.
            master: form of the fp32 master.
            moments: form of the moments.
            grad_dtype: dtype of the gradients.
            segments: hyperparameters, by ranges of elements.
            weight: location of the weights.
            residual: location of the residual, if the master has a residual.
            exp_avg: location of the first moment; may be omitted if no segment's rule uses it.
            exp_avg_sq: location of the second moment; may be omitted if no segment's rule uses it.
            grad: the gradients, or their location.
            whole: write all elements, not only the elements of segments, because the states are written to another
                place.
            arithmetic: if false, read the states and write them back unchanged, to measure the traffic alone.
            tag: any number below 2^64. The trace records the number with the job's tiles and transfers.
            unit: unit that the job belongs to.
            speculative: put the job before the jobs of units that have not begun.
            ahead: a job of `read_ahead`, of the same format and size. The new job takes over the tiles that `ahead` has
                read. If `ahead` failed, the new job fails with the same failure.
            after: futures, such as the futures of gradients in flight from the device. The job is queued once all of
                them are done. A speculative job is then put before the jobs of units that have not begun by that time.
                If one of the futures fails, the job fails with the same failure. Until the job is queued, `ahead`
                continues to read; if the job fails before, `ahead` fails as canceled.

        Raises:
            ValueError: the job is inconsistent, its tiles do not fit the staging, or `ahead` already belongs to another
                job.
        """
    def read_ahead(
        self,
        *,
        numel: int,
        weight_dtype: DTypeName,
        master: MasterName,
        moments: MomentsName = "fp32",
        weight: StateStream | None = None,
        residual: StateStream | None = None,
        exp_avg: StateStream | None = None,
        exp_avg_sq: StateStream | None = None,
        tag: int = 0,
    ) -> UpdateFuture:
        """Start to read a job's tiles before the job is decided.

        Tiles are read while no other job has tiles to read, up to `ahead_tiles_max` tiles. All states that are passed
        must be in a file. Nothing may change these states until `submit` takes over the job, or until the job is
        withdrawn.
        """
    @property
    def ahead_tiles_max(self) -> int:
        """Largest number of tiles that may be read ahead."""
    def lend(self, memory: Buffer) -> None:
        """Add memory to the staging, so that as many more tiles may be read ahead. `reclaim` takes the memory back."""
    def reclaim(self, memory: Buffer) -> bool:
        """Take back memory that `lend` added: start no more tiles in the memory, and wait until it contains no tiles.

        Jobs that read ahead may have tiles in the memory, so they must be taken over or withdrawn before. Returns False
        if a device whose deadline has passed may use the memory forever.
        """
    def withdraw(self, lists: Sequence[Sequence[UpdateFuture]]) -> list[bool]:
        """Withdraw all jobs of each list, if none of the list's jobs has started a tile of its update.

        Jobs that wait for their `after`, and jobs that read ahead, have not started such a tile. Withdrawn jobs fail as
        canceled. For any other list the result is False, and all jobs of the list continue.
        """
    def cancel(self, update: UpdateFuture) -> None:
        """Start no more tiles of a job.

        The job fails as canceled once none of its transfers is in flight, unless all its tiles were started before.
        """
    def counters(self) -> dict[str, int]:
        """Return tiles, ahead (number of tiles that were read ahead), adam_ns, read_wait_ns, write_wait_ns."""
    def trace(self, on: bool, *, events_max: int = 1 << 21) -> None:
        """Start or stop recording tiles, like IOEngine.trace."""
    def take_trace(self) -> tuple[bytes, int]:
        """Return the recorded tiles as `io.events.TILE_EVENT` structs, like IOEngine.take_trace."""
    def close(self) -> None: ...

"""C++ core: bytes, files and arithmetic. It knows no torch, no CUDA and no units. The only Python objects that it knows
are buffers.

Every buffer argument is a contiguous object with the buffer protocol (memoryview, numpy array). If a buffer is not
suitable, a `ValueError` names the problem (size, alignment, read-only). An argument that is not a buffer raises
`TypeError`. Calls that wait or compute release the GIL.
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
WeightCodec = Literal["nf4", "nf4_fp32", "int8", "int8_rows"]
IOClassName = Literal["weights", "activations", "states", "writeback"]

class Arena:
    """One anonymous mapping of exactly `nbytes` bytes, aligned to 2 MiB. A page becomes resident when it is first
    used."""

    def __init__(self, nbytes: int, *, huge_pages: bool = True, numa_node: int = -1) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def huge_pages(self) -> bool: ...
    def touch(self, pool: ThreadPool) -> None:
        """Make all pages resident, with all threads of the pool. The contents of the pages do not change."""
    def give_back(self) -> None:
        """Return the pages to the system. Their contents are lost, and the pages then read as zeros."""
    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a writable view of bytes [offset, offset + nbytes), with format 'B'. The view keeps the mapping
        alive."""

class File:
    """Swap file, opened with O_CLOEXEC | O_NOFOLLOW and mode 0600. If the file system supports O_DIRECT in blocks of 4
    KiB, the file is opened with O_DIRECT, too.

    Raises:
        OSError: the file cannot be opened; the error has errno and filename.
    """

    def __init__(self, path: str, *, create: bool = False, direct: bool = True, numa_node: int = -1) -> None: ...
    @staticmethod
    def striped(files: Sequence[File], shares: Sequence[int], stripe_bytes: int) -> File:
        """Combine several files to one striped file. Of each cycle of sum(shares) stripes, files[i] has shares[i]
        stripes, evenly spread over the cycle.

        Raises:
            ValueError: there are no files, or more than 64; a share is not between 1 and 1024; `stripe_bytes` is not a
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
        """Return how many of the first `nbytes` bytes of the striped file are in `member`."""
    def preallocate(self, nbytes: int) -> None:
        """Reserve the blocks of every member. If this fails, the reserved blocks are freed and OSError is raised
        (ENOSPC, …)."""
    def keep_checksums(self, nbytes: int) -> None:
        """From now on, remember a checksum of each page that is written, and check each page that is read.

        All requests must be within the first `nbytes` bytes. A page that was never written must read as zeros. Call
        this before the first request.
        """
    def locate(self, offset: int) -> tuple[str, int]:
        """Return the path of the member that contains a byte, and the byte's offset in this member."""
    def remember(self, offset: int, data: Buffer) -> None:
        """Record the checksums of complete pages that the file contains from `offset` on. Later reads are compared with
        these checksums."""
    def block_sums(self, offset: int, nbytes: int) -> bytes:
        """Return one little-endian 64-bit sum of checksums for each 256 KiB of complete pages; b'' if the file keeps no
        checksums."""
    def close(self) -> None:
        """Close the descriptor when no request uses it any more. A second call does nothing."""

class Failure:
    """Cause of a failed request. `errno` is 0 if no system call failed.

    The kinds are:
        io: the device or the system reported an error.
        corruption: a page differs from its checksum.
        timeout: the disk did not answer before the deadline, and may still use the memory.
        canceled: the engine was closed before the request was done.
        device: the runtime of the device that computes (the GPU) reported an error.
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
    """Result of one request. The future keeps a reference to the request's buffers. When the future is freed, the
    destructor waits until the buffers are not in use.

    After a timeout the disk may still use the buffers, so they are never freed.
    """

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait without the GIL, and return whether the request is done. Python's signal handlers (Ctrl-C) run during
        the wait."""
    def failure(self) -> Failure | None:
        """Return the failure; None if the request succeeded. Raises RuntimeError if the request is not done."""

class Fault:
    """Fault for tests. It affects `repeat` block operations, beginning with the operation number `index`.

    error: the operation fails with `errno`; cut: only half of the bytes are moved; flip: one bit is wrong; stale: a
        write does not change the file, or a read does not change the memory, and both report success; misdirect: the
        block next to the right one is moved; delay: the operation completes after operations that were submitted later;
        shuffle: half of the operations complete after up to 16 others, and the device pauses now and then, at random
        from `seed`; lose: the operation never completes; kill, kill_after: SIGKILL before the operation is submitted,
        or when it is complete.

    Only operations of the named kind ("read", "write", "sync"; "" means all) that begin within [begin, end) of their
    file are affected and counted. A sync moves no data, so only error, stale (the sync is not done, but reported as
    done), delay, shuffle, lose, kill and kill_after affect it.
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

    Each device has one queue, thread and ring.

    Args:
        queue_depth, in_flight_bytes: limits of the blocks and of the bytes in flight on each device. Other I/O classes
            than 'weights' use at most three quarters of each limit.
        threads: number of threads for each device, in the thread engine.
        deadline_s: seconds that a block may be in flight. After that, infinity no longer waits for the device, and all
            its present and later requests fail.

    Raises:
        OSError: the engine is 'io_uring', and the kernel refuses io_uring; the message says why and what to do.
        ValueError: the engine is unknown, the depth is 0, or the block size is not a multiple of 4 KiB.
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
            into: memory for the bytes; nothing may use it until the request is done.
            io_class: priority class.
            verify: whether the pages are compared with the checksums of the written pages.
            after: request that must be done before this read starts. If the request fails, the read fails with the same
                failure.
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
            data: the bytes; nothing may change them until the request is done.
            io_class: priority class.
            after: request that must be done before this write starts. The write writes what `data` contains at that
                time. If the request fails, the write fails with the same failure and has written nothing.
        """
    def sync(self, file: File) -> IOFuture:
        """Start an fdatasync of every member.

        When the sync is done, all writes that were complete before this call survive a power cut. After a failed sync
        it is unknown which of these writes survive, and a second sync may succeed without writing anything.
        """
    def register_memory(self, memory: Buffer) -> str:
        """Register pages with the kernel, which makes transfers cheaper. The pages must remain mapped as long as the
        engine is open.

        Returns '', or the reason why the kernel refused (memlock). After a refusal, transfers only take more processor
        time.
        """
    def counters(self) -> dict[str, int]:
        """Return read_bytes_<class>, write_bytes_<class>, operations, retries, short_transfers, busy_ns, in_flight.

        busy_ns is the time with a block in flight, on the device for which this time is longest. in_flight is the
        present number of blocks in flight.
        """
    def trace(self, on: bool, *, events_max: int = 1 << 21) -> None:
        """Start or stop the recording of requests that end. After `events_max` requests, further requests are only
        counted."""
    def take_trace(self) -> tuple[bytes, int]:
        """Return the events since the last call as `io.events.IO_EVENT` structs, and the number of dropped events.

        Every request whose future is done is included.
        """
    def close(self) -> None:
        """Wait for requests in flight and stop the threads. Queued requests fail with ECANCELED. A second call does
        nothing.

        Does not wait for a device that did not answer before the deadline.
        """

class ThreadPool:
    """Threads that compute.

    Args:
        threads: number of threads, including the thread that calls.
        nice: niceness of the threads, relative to the other threads of this process.
    """

    def __init__(self, threads: int, *, numa_node: int = -1, nice: int = 0) -> None: ...
    @property
    def threads(self) -> int: ...
    def close(self) -> None:
        """Stop the threads when no work uses them any more. A second call does nothing. A later use of the pool raises
        ValueError."""

BLOCK_NUMEL: int
"""Number of elements that have a common scale and common random bits. Parameters begin at multiples of this number."""
CUT_NUMEL: int
"""Number of elements that divides the length of every tile."""
CHUNK_NUMEL: int
"""Number of elements that divides the length of a tile with int8 moments, unless the tile is the complete job."""

def task_numel() -> int:
    """Return the number of elements that a thread updates at a time. The states of so many elements fit into half of a
    core's L2 cache."""

def moment_bytes(moments: MomentsName, numel: int) -> int:
    """Return the bytes of the first `numel` elements of a moment."""

class Segment:
    """Elements [begin, end) of one parameter, with their hyperparameters.

    Args:
        rule: optimizer rule of the step. Hyperparameters that the rule does not use are ignored.
        beta1: first coefficient of Adam and Lion; the momentum of sgd.
        step: number of the step, from 1.
        index: number of element `begin` among all elements of the model, a multiple of BLOCK_NUMEL. Together with
            `seed` and `step`, it is the key of the random numbers for stochastic rounding.
        skip: whether the elements are left unchanged.
        fresh: whether the moments start with this step, so that the contents of their buffers are ignored; None: this
            is so if `step` is 1.
        grad_scale: factor by which the gradient is multiplied before anything else.
    """

    begin: int
    end: int

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
        """Return a segment with the same rule and hyperparameters for other elements."""

def supported_isas() -> list[str]:
    """Return the instruction sets that this processor and this build support, the best one last: 'baseline', 'avx2',
    'avx512'; 'neon'."""

def select_isa() -> str:
    """Return the best instruction set, or the one that the environment variable INFINITY_ISA names. Raises ValueError
    if the named one is unknown or not supported."""

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
    """Compute one optimizer step on the elements of `weight`, with all states in memory. Return False if a new weight
    or moment is not finite.

    Raises:
        ValueError: the form of the master is not possible for the weight's dtype; a buffer is missing, short,
            read-only, misaligned or overlaps another one; or the segments are not sorted, not disjoint or not within
            the buffers.
    """

def sums_of_squares(
    data: Buffer, dtype: DTypeName, pool: ThreadPool, isa: str | None = None, *, first: int = 0
) -> list[float]:
    """Return partial sums Σ x² in double, one for each 65,536 elements.

    The result is the same for any number of threads and instruction set.

    Args:
        data: the elements.
        dtype: their dtype.
        pool: threads to compute with.
        isa: instruction set; None: `select_isa()`.
        first: index of the first element of `data` in a larger array. A partial sum begins at each multiple of 65,536
            elements of this array. If the array is divided at such multiples, its parts therefore have the same partial
            sums.
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
    """Compute dst = src, or dst += src. Return the result of sums_of_squares for the new dst, which is computed in the
    same pass over memory.

    dst has the dtype of src or is fp32. If src is added, dst must be fp32.
    """

def read_modify_write(a: Buffer, b: Buffer, c: Buffer, d: Buffer, pool: ThreadPool, isa: str | None = None) -> None:
    """Compute a += d, b += d, c += d in fp32, to measure the speed of memory. This is the memory traffic of AdamW, 28
    bytes for each element."""

def widen_in_place(data: Buffer, dtype: DTypeName, numel: int) -> None:
    """Convert the first `numel` 16-bit values of `data` to `numel` fp32 values at the same place."""

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
        """Future that is done when all new values are computed.

        The states in memory are then new, and the gradients are not read any more, but writes may still be in flight.
        If the update fails before that, this future fails, too.
        """
    @property
    def weights(self) -> IOFuture:
        """Future that is done when the new weights are in memory and in the file. If the update fails before that, this
        future fails, too."""

class StateStream:
    """Location of one state of a job: in memory, in a file, or in both. If it is in both, the values in memory are
    read, and new values are written to both.

    Args:
        offset, write_offset: offsets in the file at which the state is read and written; None: the state is written
            where it is read.
        source: memory with the current values, which are not changed. The new values are written to `memory` and to the
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
    """Pipeline of updates. It reads states, computes the optimizer's rule and writes states, tile by tile. The three
    parts run concurrently on C++ threads.

    Jobs are processed in the order in which they are submitted.
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
            tile_numel: elements of a tile.
            tile_bytes: bytes of a tile in the staging (`staging_tile_bytes`).
            ahead_tiles_max: largest number of tiles that may be read ahead.
            isa: instruction set; None: `select_isa()`.
        """
    @staticmethod
    def staging_tile_bytes(
        numel: int, *, weight_dtype: DTypeName, master: MasterName, moments: MomentsName, gradients: bool = False
    ) -> int:
        """Return the bytes of a tile of `numel` elements whose states are in a file. With `gradients`, the gradients
        are in a file, too."""
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
            residual: location of the residual, if the master has one.
            exp_avg: location of the first moment; may be omitted if no segment's rule uses it.
            exp_avg_sq: location of the second moment; may be omitted if no segment's rule uses it.
            grad: the gradients, or their location.
            whole: whether all elements are moved, not only those of segments, because the states are written to another
                place.
            arithmetic: whether new values are computed; False: the states are read and written back unchanged, to
                measure only the transfers.
            tag: any number below 2^64. The trace records it with the job's tiles and their transfers.
            unit: unit to which the job belongs.
            speculative: whether the job is processed before the jobs of units that have not begun.
            ahead: a job of `read_ahead`, of the same format and size. The new job takes over the tiles that this job
                has read; if this job has failed, the new job fails with the same failure.
            after: futures, such as gradients in flight from the device. The job is held until they are done, and then
                queued. If one of them fails, the job fails with the first failure. While the job is held, `ahead`
                continues to read. If the held job fails, `ahead` fails as canceled.

        Raises:
            ValueError: the job is inconsistent; its tiles do not fit into the staging; or `ahead` was taken over
                before, or belongs to a job that is held.
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

        Tiles are read while no other job has tiles to read, up to the number `ahead_tiles_max`. All states in the
        arguments must be in a file. Nothing may change these states until `submit` takes the job over, or the job is
        withdrawn.
        """
    @property
    def ahead_tiles_max(self) -> int:
        """Largest number of tiles that may be read ahead."""
    def lend(self, memory: Buffer) -> None:
        """Add memory to the staging until `reclaim` is called. The number of tiles that may be read ahead increases by
        the number of tiles that fit into the memory."""
    def reclaim(self, memory: Buffer) -> bool:
        """Take back memory that was lent. No more tiles are started in this memory, and the call waits until it
        contains no tiles.

        Jobs that read ahead may have tiles in the memory, so they must be taken over or withdrawn before. Returns False
        if a disk that did not answer before the deadline may still use the memory.
        """
    def withdraw(self, lists: Sequence[Sequence[UpdateFuture]]) -> list[bool]:
        """For each list: if every job is held, reads ahead, or has not started a tile, withdraw all jobs of the list.

        Withdrawn jobs fail as canceled, and the result for their list is True. For any other list the result is False,
        and all its jobs continue.
        """
    def cancel(self, update: UpdateFuture) -> None:
        """Cancel a job: start no more of its tiles.

        When nothing of the job is in flight any more, the job fails as canceled. If all its tiles were started before,
        it ends normally.
        """
    def counters(self) -> dict[str, int]:
        """Return tiles, ahead (number of tiles that were read ahead), adam_ns, read_wait_ns, write_wait_ns."""
    def trace(self, on: bool, *, events_max: int = 1 << 21) -> None:
        """Start or stop the recording of tiles; see IOEngine.trace."""
    def take_trace(self) -> tuple[bytes, int]:
        """Return the recorded tiles as `io.events.TILE_EVENT` structs; see IOEngine.take_trace."""
    def close(self) -> None: ...

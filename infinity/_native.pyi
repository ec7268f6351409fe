"""The C++ core: bytes, files and arithmetic. Knows nothing of torch, CUDA, units or Python objects but buffers.

Every buffer argument is a contiguous object with the buffer protocol (memoryview, numpy array); `ValueError` names what
does not fit (size, alignment, read-only), `TypeError` what is no buffer. Calls that wait or compute release the GIL.
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
    """One anonymous, 2 MiB-aligned mapping of exactly `nbytes` bytes; pages are touched on first use."""

    def __init__(self, nbytes: int, *, huge_pages: bool = True, numa_node: int = -1) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def huge_pages(self) -> bool: ...
    def touch(self, pool: ThreadPool) -> None:
        """Make all pages resident, by all threads; each keeps what it holds."""
    def give_back(self) -> None:
        """Nobody wants what is in it any more: the pages go back to the system, and read as zeros."""
    def view(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of bytes [offset, offset + nbytes), format 'B', that keeps the mapping alive."""

class File:
    """A swap file, opened O_CLOEXEC | O_NOFOLLOW, mode 0600, O_DIRECT where the file system takes it in 4 KiB blocks.

    Raises:
        OSError: with errno and filename.
    """

    def __init__(self, path: str, *, create: bool = False, direct: bool = True, numa_node: int = -1) -> None: ...
    @staticmethod
    def striped(files: Sequence[File], shares: Sequence[int], stripe_bytes: int) -> File:
        """One file over several: of each cycle of sum(shares) stripes, shares[i] lie in files[i], evenly spread.

        Raises:
            ValueError: no file, or more than 64; a share outside 1…1024; stripes that are no multiple of 4 KiB.
        """
    @property
    def path(self) -> str:
        """Of the first member."""
    @property
    def direct(self) -> bool: ...
    @property
    def alignment(self) -> tuple[int, int]:
        """Bytes that direct I/O on the first member asks of memory and of offsets (STATX_DIOALIGN); 1 without it."""
    def member_bytes(self, member: int, nbytes: int) -> int:
        """Bytes of `member` that hold the first `nbytes` bytes."""
    def preallocate(self, nbytes: int) -> None:
        """Reserve the blocks of every member. Raises OSError (ENOSPC, …) after giving back what was taken."""
    def keep_checksums(self, nbytes: int) -> None:
        """From now on remember what is written, page by page, and check what is read; requests lie within `nbytes`.

        Pages never written must read as zeros. Call it before the first request.
        """
    def locate(self, offset: int) -> tuple[str, int]:
        """The member that holds a byte, and where in it."""
    def remember(self, offset: int, data: Buffer) -> None:
        """These whole pages are what the file holds from `offset` on: later reads are checked against them."""
    def block_sums(self, offset: int, nbytes: int) -> bytes:
        """A little-endian 64-bit sum for each 256 KiB of whole pages, of what was remembered; b'' without checksums."""
    def close(self) -> None:
        """Close the descriptor once no request uses it. Idempotent."""

class Failure:
    """Why a request failed. `errno` is 0 where no system call failed.

    `kind`: 'io', 'corruption' (a page differs from its checksum), 'timeout' (the device was given up and may still use
    the memory), 'canceled' (the engine was closed first), 'device' (the runtime of the device that computes refused).
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
    """The result of one request. Holds a reference to its buffers; dropping it waits until they are not in use.

    After a timeout the device may use them for ever: then they are never freed.
    """

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait without the GIL; True when done, False when the time passed first. Signals (Ctrl-C) are served."""
    def failure(self) -> Failure | None:
        """None when it went well. RuntimeError while not done."""

class Fault:
    """A fault to inject into `repeat` block operations from `index` on.

    error: fail with `errno`; cut: move half; flip: one wrong bit; stale: a write leaves the old bytes, a read leaves
    the memory alone, both report success; misdirect: move the block beside the right one; delay: complete after those
    submitted after it; shuffle: half of them complete after up to 16 others, and the device dawdles now and then, by
    chance from `seed`; lose: never complete; kill, kill_after: SIGKILL before it is submitted, or when it is complete.
    Only operations of the kind named ("read", "write", "sync"; "" is all) that begin within [begin, end) of their file
    count. A sync moves nothing: only error, stale (reported and not done), delay, shuffle, lose, kill and
    kill_after change it.
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
    """Requests of any size in, block transfers out, a future per request; one queue, thread and ring per device.

    Args:
        queue_depth, in_flight_bytes: blocks, and bytes, in flight per device, whichever is reached first. At most three
            quarters of each are not weights.
        threads: of the thread engine, per device.
        deadline_s: a device with a block in flight for longer is given up: its requests fail, present and future.

    Raises:
        OSError: engine 'io_uring' where the kernel refuses it; the message says why and what to do.
        ValueError: unknown engine, zero depth, a block that is not a multiple of 4 KiB.
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
        """'io_uring' or 'threads': what is really used."""
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
        """Without `verify` the pages are not compared with what was written.

        With `after` the read begins when that is done, and fails as that does.
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
        """With `after` the write begins when that is done: what is written then is what `data` holds then. It fails as
        `after` does, and has written nothing."""
    def sync(self, file: File) -> IOFuture:
        """fdatasync of every member: what was complete before this call survives a power cut once it is done.

        After a failure nothing is known of any of it, and asking again may succeed without having written a thing.
        """
    def register_memory(self, memory: Buffer) -> str:
        """Have the kernel keep these pages at hand; they must stay mapped as long as the engine is open.

        Returns '' or why it was refused (memlock), which costs processor time only.
        """
    def latencies(self, operation: Literal["read", "write"]) -> list[tuple[int, int]]:
        """(nanoseconds, how many blocks took at most that and more than the entry before), ascending, so far."""
    def counters(self) -> dict[str, int]:
        """read_bytes_<class>, write_bytes_<class>, operations, retries, short_transfers, busy_ns, in_flight.

        busy_ns is the time with a block in flight on the busiest device; in_flight counts blocks now.
        """
    def trace(self, on: bool, *, events_max: int = 1 << 21) -> None:
        """From now on record every request that ends, or no more; those beyond `events_max` are counted only."""
    def take_trace(self) -> tuple[bytes, int]:
        """What was recorded since it was last taken: `io.events.IO_EVENT` structs, and how many were dropped.

        A request whose future is done is in it.
        """
    def close(self) -> None:
        """Wait for what is in flight and stop the threads; what is queued fails with ECANCELED. Idempotent.

        Does not wait for a device that was given up.
        """

class ThreadPool:
    """Args:
    threads: with the one that calls.
    nice: by how much the threads yield to the others of this process, as the command `nice` counts.
    """

    def __init__(self, threads: int, *, numa_node: int = -1, nice: int = 0) -> None: ...
    @property
    def threads(self) -> int: ...
    def close(self) -> None:
        """Stop the threads, once nobody works with them. Idempotent; using the pool afterwards raises ValueError."""

BLOCK_NUMEL: int
"""Elements that share a scale, and random bits: parameters begin at multiples of it."""
CUT_NUMEL: int
"""A tile's length is a multiple of this many elements."""
CHUNK_NUMEL: int
"""With int8 moments a tile that is not the whole job is a multiple of this many elements."""

def task_numel() -> int:
    """Elements a thread updates at a time; its streams fit half of a core's L2 cache."""

def moment_bytes(moments: MomentsName, numel: int) -> int:
    """Bytes of the first `numel` elements of a moment."""

class Segment:
    """Elements [begin, end) that share hyperparameters: one parameter.

    Args:
        rule: what the step computes; hyperparameters it does not know are ignored.
        beta1: momentum, for sgd.
        step: counts from 1.
        index: of element `begin` among all elements of the model, a multiple of BLOCK_NUMEL; with `seed` and `step`
            the key of stochastic rounding.
        skip: leave the elements alone.
        fresh: the moments begin with this step, whatever the buffers hold; None: when `step` is 1.
        grad_scale: the gradient is multiplied by this first.
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
        """The same rule, for other elements."""

def supported_isas() -> list[str]:
    """What this processor and build have, best last: 'baseline', 'avx2', 'avx512'; 'neon'."""

def select_isa() -> str:
    """The best one, or INFINITY_ISA. ValueError when that is unknown or not supported here."""

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
    """One step in memory on as many elements as `weight` holds; False when a new weight or moment is not finite.

    Raises:
        ValueError: the master does not go with the weight, a buffer is missing, short, read-only, misaligned or
            overlaps another, or the segments are not sorted, disjoint and within the buffers.
    """

def sums_of_squares(
    data: Buffer, dtype: DTypeName, pool: ThreadPool, isa: str | None = None, *, first: int = 0
) -> list[float]:
    """Σ x² in double of each partial of 65,536 elements: the same for any number of threads and instruction set.

    Args:
        first: `data` has the elements from this one on of a larger whole. A partial begins wherever the whole has a
            multiple of 65,536; so a whole that is cut there has the same partials in its parts.
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
    """dst = src, or dst += src. Returns the sums_of_squares of the new dst, taken in the same pass.

    dst has the dtype of src or is fp32, and is fp32 to add.
    """

def read_modify_write(a: Buffer, b: Buffer, c: Buffer, d: Buffer, pool: ThreadPool, isa: str | None = None) -> None:
    """a += d, b += d, c += d in fp32: the memory traffic of AdamW, 28 bytes per element."""

def widen_in_place(data: Buffer, dtype: DTypeName, numel: int) -> None:
    """The first `numel` 16-bit values of `data` become `numel` fp32 values at the same place."""

def encode_split16(master: Buffer, weight: Buffer, residual: Buffer) -> None: ...
def decode_split16(weight: Buffer, residual: Buffer, master: Buffer) -> None: ...
def round_weights(master: Buffer, weight: Buffer, dtype: DTypeName) -> None:
    """fp32 → bf16 (half up) or fp16 (nearest even)."""

def decode_moments(
    data: Buffer, moments: MomentsName, *, is_signed: bool, values: Buffer, isa: str | None = None
) -> None:
    """A moment as it is stored → fp32. `is_signed`: exp_avg; not: exp_avg_sq."""

def encode_moments(
    values: Buffer, moments: MomentsName, *, is_signed: bool, data: Buffer, isa: str | None = None
) -> None:
    """fp32 → a moment as it is stored; to bf16 half up."""

class UpdateFuture(IOFuture):
    @property
    def finite(self) -> bool:
        """Whether all new weights and moments that were computed so far are finite."""
    @property
    def computed(self) -> IOFuture:
        """Done once all new values are computed: states in memory are new, and the gradients are not read any more.
        Writes may be under way. Fails with the update, if the update fails before."""
    @property
    def weights(self) -> IOFuture:
        """Done once the new weights are where they go, in memory and in the file. Fails as `computed` does."""

class StateStream:
    """Where one state of a job lives: in memory, in a file, or in both (memory is current, updates go to both).

    Args:
        offset, write_offset: where the state is read from in the file, and written to; None: the same place.
        source: (not of gradients) the current values, which are not changed; the new ones go to `memory` and the file.
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
    """Read states → Adam → write states, in tiles, all three at once on C++ threads. Jobs are done in the order in
    which they are submitted."""

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
            staging: memory for at least two tiles more than `ahead_tiles_max`.
        """
    @staticmethod
    def staging_tile_bytes(
        numel: int, *, weight_dtype: DTypeName, master: MasterName, moments: MomentsName, gradients: bool = False
    ) -> int:
        """Bytes of a tile of `numel` elements whose states are all in a file; with `gradients` these are, too."""
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
        """Queue one unit's update.

        Args:
            exp_avg, exp_avg_sq: may be left out when no segment's rule uses the moment.
            whole: move all elements, not only those that segments touch: the states go to another place.
            arithmetic: False reads the states and writes them back as they are, to measure the traffic alone.
            tag: any number below 2^64; the trace names it with the job's tiles and their transfers.
            unit: that the job belongs to.
            speculative: the job comes before the jobs whose units were not begun.
            ahead: a job of `read_ahead`, of the same format and size. This job takes over the tiles that it has read,
                and its failure if it failed.
            after: the job is held until these are done (gradients on their way from the device), and queued then: a
                speculative job comes before those whose units are not begun then. It fails as the first of them that
                fails. `ahead` goes on reading meanwhile; it fails as canceled if the job fails while it is held.

        Raises:
            ValueError: the job is inconsistent, its tiles do not fit the staging, or `ahead` was taken over before or
                belongs to a job that is held.
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
        """Begin to read a job's tiles before the job is decided, while no other job has tiles to read, and as far as
        `ahead_tiles_max` allows. The states that are given are all in a file. Nothing may change them until `submit`
        takes the job over or it is withdrawn."""
    @property
    def ahead_tiles_max(self) -> int:
        """The most tiles that may be read ahead."""
    def lend(self, memory: Buffer) -> None:
        """Add memory to the staging until it is reclaimed. As many more tiles may be read ahead as fit in it."""
    def reclaim(self, memory: Buffer) -> bool:
        """Take back memory that was lent: start no more tiles there, and wait until none is there. Jobs that read
        ahead, and may have tiles there, must be taken over or withdrawn before. False when a device that was given up
        may use the memory for ever."""
    def withdraw(self, lists: Sequence[Sequence[UpdateFuture]]) -> list[bool]:
        """Take back all jobs of each list, if each of them is held, reads ahead, or has no tile that was started: they
        fail as canceled. Returns False for a list with a job that was begun or is done; then all of it goes on."""
    def cancel(self, update: UpdateFuture) -> None:
        """Start no more tiles of a job. It fails as canceled once nothing of it is in flight, unless all its tiles were
        started before."""
    def counters(self) -> dict[str, int]:
        """tiles, ahead (how many of them were read ahead), adam_ns, read_wait_ns, write_wait_ns."""
    def trace(self, on: bool, *, events_max: int = 1 << 21) -> None:
        """As IOEngine.trace, of tiles."""
    def take_trace(self) -> tuple[bytes, int]:
        """As IOEngine.take_trace: `io.events.TILE_EVENT` structs."""
    def close(self) -> None: ...

"""What `_native` has for a device: its runtime's entry points, and native threads that chain disk, host and device.

Only type stubs: the names are imported from `infinity._native`. Streams and events are the runtime's handles as
integers (`torch.cuda.Stream.cuda_stream`, `torch.cuda.Event.cuda_event`), device addresses are `Tensor.data_ptr()`.
"""

from collections.abc import Sequence

from infinity._native import Buffer, DTypeName, File, IOEngine, IOFuture, ThreadPool

class DeviceGate:
    """The runtime of one device as native threads call it.

    Args:
        device: the number that `enter` is called with.
        copy, record, wait, synchronize: addresses of functions with the signatures of cudaMemcpyAsync, cudaEventRecord,
            cudaStreamWaitEvent and cudaEventSynchronize; `copy` is always called with kind 4 (cudaMemcpyDefault). Each
            returns 0 or an error. They may be ctypes callbacks; these take the GIL.
        enter: address of a function with the signature of cudaSetDevice, or 0. Each native thread that uses the gate
            calls it once.
        keep: what must live as long as the gate: the library, or the callbacks.

    Raises:
        ValueError: one of the four addresses is 0.
    """

    def __init__(
        self,
        device: int,
        *,
        copy: int,
        record: int,
        wait: int,
        synchronize: int,
        enter: int = 0,
        keep: object = None,
    ) -> None: ...

class LandingPiece:
    """What is done to one piece of a landing.

    Args:
        target: the gradient in host memory, of `dtype`.
        source: None: only the sums of squares of `target` are taken, as by `sums_of_squares`. Else `source` is copied
            to `target`, or added to it, as by `land_gradient(target, dtype, source, source_dtype, add=add)`.
        source_dtype: None: `dtype`.
        first: as `sums_of_squares` takes it.

    Raises:
        ValueError: a buffer is misaligned, no whole number of elements or too small, `target` is read-only and has a
            source, or the two overlap.
    """

    def __init__(
        self,
        target: Buffer,
        dtype: DTypeName,
        *,
        source: Buffer | None = None,
        source_dtype: DTypeName | None = None,
        add: bool = False,
        first: int = 0,
    ) -> None: ...

class LandingFuture(IOFuture):
    @property
    def sums(self) -> list[list[float]]:
        """The sums of squares of each piece's target. RuntimeError while not done, and when the landing failed."""

class Landings:
    """A native thread that waits for gradients on their way from the device, and lands them in the order of the calls.

    The bits, and the sums, are those of `sums_of_squares` and `land_gradient`. After an error of the gate nothing lands
    any more: that landing and every later one fail, with a failure of kind 'io' and errno 0.
    """

    def __init__(self, gate: DeviceGate, pool: ThreadPool, isa: str | None = None) -> None: ...
    def land(self, event: int, pieces: Sequence[LandingPiece]) -> LandingFuture:
        """Land `pieces`, in their order, once `event` is reached; 0: there is nothing to wait for.

        The future keeps the buffers, which must not be touched until it is done. It can be the `after` of an update or
        of a write.

        Raises:
            ValueError: a piece cannot land: dtypes that do not go together (see `land_gradient`), or after `close`.
        """
    def close(self) -> None:
        """Wait for all that was given, and stop the thread. Idempotent."""

class UploadPart:
    """A range of a swap file, and where it goes in the device's memory.

    Args:
        offset: bytes, a multiple of 4 KiB.
        nbytes: bytes that are copied to the device. The file is read to the end of the last page of 4 KiB.
        address: of the device's memory.
        verify: compare the pages with what was written.
        after: the part is read once this is done (an update that writes the weights); its upload fails as this does.
    """

    def __init__(
        self,
        file: File,
        offset: int,
        nbytes: int,
        address: int,
        *,
        verify: bool = True,
        after: IOFuture | None = None,
    ) -> None: ...

class Uploads:
    """Weights on their way from swap files to the device, through pieces of the landing memory, on a native thread.

    Jobs are done in the order of the calls. Pieces are read (I/O class 'weights') as far as the landing memory reaches,
    those of the next job while the last ones of a job are copied. A piece is reused when its event is reached; where no
    piece is free the native thread waits for the oldest one.

    Args:
        landing: memory for a piece for each event; 4 KiB-aligned, pinned. The uploads keep it.
        piece_bytes: a multiple of 4 KiB.
        events: handles of events, one per piece, used for nothing else.

    Raises:
        ValueError: the sizes do not fit, or events are missing or not different.
    """

    def __init__(
        self, engine: IOEngine, gate: DeviceGate, landing: Buffer, piece_bytes: int, events: Sequence[int]
    ) -> None: ...
    def upload(self, parts: Sequence[UploadPart], *, stream: int, waits: Sequence[int] = (), ready: int) -> IOFuture:
        """Queue a job: its parts are read and copied in their order.

        The device's memory must not be freed or used, but behind `ready`, until the future has failed or `ready` is
        reached.

        Args:
            stream: on which the copies are queued, as soon as their pieces are read.
            waits: events that the stream waits for before the job's first copy (the last use of the slot).
            ready: event that is recorded behind the last copy.

        Returns:
            A future that is done once the last copy and `ready` are queued: from then on a stream can wait for `ready`.
            It fails once nothing of the job is in flight, neither read nor copy: as a read or an `after` failed; with
            kind 'io' and errno 0 for an error of the gate; with 'canceled'. After a read that failed with 'timeout',
            or an error of the gate that leaves open whether the device still reads a piece, this job and all later
            ones fail with that failure, and the landing memory is never freed.

        Raises:
            ValueError: no parts, a part that is empty, misaligned or not within its file's checksums, or after `close`.
        """
    def cancel(self, future: IOFuture) -> None:
        """Read and copy no more of a job. Its future fails as canceled once nothing of the job is in flight, unless its
        last copy was queued before. Does not wait."""
    def counters(self) -> dict[str, int]:
        """read_bytes, pieces (given to the engine), without_a_piece (pieces that could be read when no piece of the
        landing memory was free)."""
    def close(self) -> None:
        """Wait for all that was given, and until the device has read the landing memory; stop the thread. Jobs that
        wait for the `after` of a part fail as canceled. Idempotent."""

"""Part of `_native` for a device: its runtime's entry points, and native threads that chain disk, host and device.

These are only type stubs: the names are imported from `infinity._native`. Streams and events are the runtime's handles
as integers (`torch.cuda.Stream.cuda_stream`, `torch.cuda.Event.cuda_event`); device addresses are `Tensor.data_ptr()`.
"""

from collections.abc import Sequence

from infinity._native import Buffer, DTypeName, File, IOEngine, IOFuture, ThreadPool

class DeviceGate:
    """Entry points of one device's runtime, for native threads.

    Args:
        device: number that `enter` is called with.
        copy, record, wait, synchronize: addresses of functions with the signatures of cudaMemcpyAsync, cudaEventRecord,
            cudaStreamWaitEvent and cudaEventSynchronize; `copy` is always called with kind 4 (cudaMemcpyDefault). Each
            returns 0 or an error. They may be ctypes callbacks, which take the GIL.
        enter: address of a function with the signature of cudaSetDevice, or 0. Each native thread that uses the gate
            calls it once.
        keep: object that must live as long as the gate: the library, or the callbacks.

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
    """One piece of a landing, with its operation.

    Args:
        target: the gradient in host memory, of `dtype`.
        source: bytes to copy to `target`, or to add to it, like `land_gradient(target, dtype, source, source_dtype,
            add=add)`. None: only take the sums of squares of `target`, like `sums_of_squares`.
        source_dtype: dtype of `source`; None: `dtype`.
        first: see `sums_of_squares`.

    Raises:
        ValueError: a buffer is misaligned, too small or no complete number of elements, `target` is read-only and has a
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
        """Sums of squares of each piece's target. Raises RuntimeError before the landing is done, or if it failed."""

class Landings:
    """Native thread that waits for gradients in flight from the device, and lands them in the order of the calls.

    The bits and the sums are those of `sums_of_squares` and `land_gradient`. After an error of the gate nothing lands
    any more: that landing and every later one fail, with a failure of kind 'io' and errno 0.
    """

    def __init__(self, gate: DeviceGate, pool: ThreadPool, isa: str | None = None) -> None: ...
    def land(self, event: int, pieces: Sequence[LandingPiece]) -> LandingFuture:
        """Land `pieces`, in their order, once `event` has happened; 0 if there is no event to wait for.

        The future keeps the buffers, which must not be touched until it is done. It can be the `after` of an update or
        of a write.

        Raises:
            ValueError: a piece cannot land, because its dtypes do not fit (see `land_gradient`); or `close` was called.
        """
    def close(self) -> None:
        """Wait for all landings that were queued, and stop the thread. Idempotent."""

class UploadPart:
    """Range of a swap file, and its destination in the device's memory.

    Args:
        offset: bytes from the start of the file, a multiple of 4 KiB.
        nbytes: bytes that are copied to the device. The file is read to the end of the last page of 4 KiB.
        address: address of the destination.
        verify: compare the pages with the checksums of what was written.
        after: the part is read once this future is done (an update that writes the weights). If it fails, the upload
            fails with its failure.
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
    """Uploads of weights from swap files to the device, through pieces of a bounce buffer, on a native thread.

    Jobs are done in the order of the calls. Pieces are read (I/O class 'weights') as far as the bounce buffer reaches.
    The pieces of the next job are read while the last ones of a job are copied. A piece is reused when its event has
    happened. If no piece is free, the native thread waits for the oldest one.

    Args:
        bounce: memory with one piece for each event; 4 KiB-aligned, pinned. The uploads keep it alive.
        piece_bytes: bytes of a piece, a multiple of 4 KiB.
        events: handles of events, one per piece, used for nothing else.

    Raises:
        ValueError: the sizes do not fit, or events are missing or not different.
    """

    def __init__(
        self, engine: IOEngine, gate: DeviceGate, bounce: Buffer, piece_bytes: int, events: Sequence[int]
    ) -> None: ...
    def upload(self, parts: Sequence[UploadPart], *, stream: int, waits: Sequence[int] = (), ready: int) -> IOFuture:
        """Queue a job: its parts are read and copied in their order.

        Until the future has failed or `ready` has happened, the device's memory must not be freed, and only work that
        is ordered after `ready` may use it.

        Args:
            parts: the ranges to upload.
            stream: stream on which the copies are queued, as soon as their pieces are read.
            waits: events that the stream waits for before the job's first copy (the last use of the slot).
            ready: event that is recorded after the last copy.

        Returns:
            A future that is done once the last copy and `ready` are queued: from then on a stream can wait for `ready`.
            It fails once nothing of the job is in flight, neither read nor copy. It fails like a read or an `after`
            that failed; with kind 'io' and errno 0 for an error of the gate; or with 'canceled'. Two
            failures end the uploads: a read that failed with 'timeout', and an error of the gate after which the
            device may still read a piece. Then this job and all later ones fail with that failure, and the bounce
            buffer is never freed.

        Raises:
            ValueError: no parts; a part that is empty, misaligned or not within its file's checksums; or `close` was
                called.
        """
    def cancel(self, future: IOFuture) -> None:
        """Read and copy no more of a job. Does not wait.

        The job's future fails as canceled once nothing of the job is in flight, unless its last copy was queued before.
        """
    def counters(self) -> dict[str, int]:
        """Return counters.

        They are read_bytes, pieces (given to the engine) and without_a_piece (pieces that could have been read when no
        piece of the bounce buffer was free).
        """
    def close(self) -> None:
        """Wait for all jobs that were queued, and until the device has read the bounce buffer; stop the thread.

        Jobs that wait for the `after` of a part fail as canceled. Idempotent.
        """

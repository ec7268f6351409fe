"""Part of `_native` for a device: entry points of the device's runtime, and native threads that move data through them.

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
            cudaStreamWaitEvent and cudaEventSynchronize. `copy` is always called with kind 4 (cudaMemcpyDefault). Each
            function returns 0 or an error. The functions may be ctypes callbacks, which take the GIL.
        enter: address of a function with the signature of cudaSetDevice, or 0. Each native thread that uses the gate
            calls this function once.
        keep: object that must live as long as the gate, such as the library or the callbacks.

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
    """One piece of a landing: a gradient in host memory, and the bytes that are copied or added to it.

    Args:
        target: the gradient in host memory, of `dtype`.
        source: bytes to copy to `target`, or to add to `target`, like `land_gradient(target, dtype, source,
            source_dtype, add=add)`. None: only compute the sums of squares of `target`, like `sums_of_squares`.
        source_dtype: dtype of `source`; None: `dtype`.
        first: see `sums_of_squares`.

    Raises:
        ValueError: a buffer is misaligned, too small, or not a whole number of elements; with a source, `target` is
            read-only or overlaps the source.
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

    The results have the bits of `sums_of_squares` and `land_gradient`. After an error of the gate nothing lands any
    more: this landing and every later landing fail, with a failure of kind 'io' and errno 0.
    """

    def __init__(self, gate: DeviceGate, pool: ThreadPool, isa: str | None = None) -> None: ...
    def land(self, event: int, pieces: Sequence[LandingPiece]) -> LandingFuture:
        """Land `pieces`, in their order, once `event` has happened. With event 0, do not wait.

        The returned future keeps the buffers alive. The buffers must not be used until the future is done. The future
        can be the `after` of an update or of a write.

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
        verify: compare the pages with the checksums of the data that was written.
        after: future after which the part is read, such as an update that writes the weights. If this future fails, the
            upload fails with the same failure.
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

    Jobs are done in the order of the calls. As many pieces are read at once (I/O class 'weights') as the bounce buffer
    has. The pieces of the next job are read while the last pieces of a job are copied. A piece of the bounce buffer is
    reused once the event of the piece has happened. If no piece is free, the native thread waits for the oldest piece.

    Args:
        bounce: memory with one piece for each event; 4 KiB-aligned, pinned. The object keeps this memory alive.
        piece_bytes: bytes of a piece, a multiple of 4 KiB.
        events: handles of events, one per piece. The events must have no other use.

    Raises:
        ValueError: the sizes do not fit, an event is missing, or two events are the same.
    """

    def __init__(
        self, engine: IOEngine, gate: DeviceGate, bounce: Buffer, piece_bytes: int, events: Sequence[int]
    ) -> None: ...
    def upload(self, parts: Sequence[UploadPart], *, stream: int, waits: Sequence[int] = (), ready: int) -> IOFuture:
        """Queue a job: its parts are read and copied in their order.

        The device's memory must not be freed until the future has failed or `ready` has happened. Until then, only work
        that is ordered after `ready` may use the memory.

        Args:
            parts: the ranges to upload.
            stream: stream on which the copies are queued. Each copy is queued as soon as its piece is read.
            waits: events that the stream waits for before the job's first copy (the last use of the slot).
            ready: event that is recorded after the last copy.

        Returns:
            A future that is done once the last copy and `ready` are queued. From then on a stream can wait for `ready`.
            If the job fails, the future fails after all reads and copies of the job in flight have ended. It has the
            failure of the failed read, or of the failed future in `after`. After an error of the gate, its failure has
            kind 'io' and errno 0. After `cancel`, its failure has kind 'canceled'. Two failures end all uploads: a read
            that failed with 'timeout', and an error of the gate after which the device may still read a piece. In these
            two cases this job and all later jobs fail, and the bounce buffer is never freed.

        Raises:
            ValueError: there are no parts; a part is empty, misaligned or not within its file's checksums; or `close`
                was called.
        """
    def cancel(self, future: IOFuture) -> None:
        """Stop the reads and copies of a job, without waiting.

        The job's future fails as canceled after all reads and copies of the job in flight have ended. If the last copy
        of the job was queued before this call, the future does not fail.
        """
    def counters(self) -> dict[str, int]:
        """Return counters.

        The counters are read_bytes, pieces (number of reads) and without_a_piece. A read counts in without_a_piece if
        it could have started earlier, when no piece of the bounce buffer was free.
        """
    def close(self) -> None:
        """Wait for all queued jobs, and until the device has read the bounce buffer. Then stop the thread. Idempotent.

        Jobs that wait for the `after` of a part fail as canceled.
        """

"""Part of `_native` for a device: the entry points of the device's runtime, and native threads that move data between
disk, host and device.

These are only type stubs: the names are imported from `infinity._native`. Streams and events are the runtime's handles
as integers (`torch.cuda.Stream.cuda_stream`, `torch.cuda.Event.cuda_event`); device addresses are `Tensor.data_ptr()`.
"""

from collections.abc import Sequence

from infinity._native import Buffer, DTypeName, File, IOEngine, IOFuture, ThreadPool

class DeviceGate:
    """Entry points of one device's runtime, for native threads.

    Args:
        device: number of the device, the argument with which `enter` is called.
        copy, record, wait, synchronize: addresses of functions with the signatures of cudaMemcpyAsync, cudaEventRecord,
            cudaStreamWaitEvent and cudaEventSynchronize; `copy` is always called with kind 4 (cudaMemcpyDefault). Each
            function returns 0 or the number of an error. The functions may be ctypes callbacks, which take the GIL.
        enter: address of a function with the signature of cudaSetDevice, or 0. Each native thread that uses the gate
            calls this function once.
        keep: object that must exist as long as the gate: the library, or the callbacks.

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
    """One piece of a landing: a gradient in host memory, and the operation on it.

    Args:
        target: the gradient in host memory, of `dtype`.
        source: bytes to copy to `target`, or to add to it, like `land_gradient(target, dtype, source, source_dtype,
            add=add)`. None: only compute the sums of squares of `target`; see `sums_of_squares`.
        source_dtype: dtype of `source`; None: `dtype`.
        first: see `sums_of_squares`.

    Raises:
        ValueError: a buffer is misaligned, too small, or not a complete number of elements; `target` is read-only and
            has a source; or `target` and `source` overlap.
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
    """Native thread that waits for gradients in flight from the device, and lands the gradients in the order of the
    calls.

    The bits and the sums are those of `sums_of_squares` and `land_gradient`. After an error of the gate nothing lands
    any more: the landing with the error and every later landing fail, with a failure of kind 'io' and errno 0.
    """

    def __init__(self, gate: DeviceGate, pool: ThreadPool, isa: str | None = None) -> None: ...
    def land(self, event: int, pieces: Sequence[LandingPiece]) -> LandingFuture:
        """Land `pieces`, in their order, when `event` has happened. `event` is 0 if there is no event to wait for.

        The future keeps the buffers alive. Nothing may use the buffers until the future is done. The future can be the
        `after` of an update or of a write.

        Raises:
            ValueError: the dtypes of a piece are not possible (see `land_gradient`); or `close` was called.
        """
    def close(self) -> None:
        """Wait for all landings that were queued, and stop the thread. A second call does nothing."""

class UploadPart:
    """Range of a swap file, and its destination in the device's memory.

    Args:
        offset: bytes from the start of the file, a multiple of 4 KiB.
        nbytes: bytes that are copied to the device. The file is read to the end of the last page of 4 KiB.
        address: address of the destination.
        verify: whether the pages are compared with the checksums of the written pages.
        after: future that must be done before the part is read, such as an update that writes the weights. If the
            future fails, the upload fails with the same failure.
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

    Jobs are done in the order of the calls. Weights are read with the I/O class 'weights', as long as pieces of the
    bounce buffer are free. The reads of the next job begin while the last pieces of a job are copied. A piece is reused
    when its event has happened. If no piece is free, the native thread waits for the oldest piece.

    Args:
        bounce: memory with one piece for each event; 4 KiB-aligned, pinned. The uploads keep it alive.
        piece_bytes: bytes of a piece, a multiple of 4 KiB.
        events: handles of events, one for each piece; nothing else may use these events.

    Raises:
        ValueError: the sizes do not match, events are missing, or two events are the same.
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
            waits: events for which the stream waits before the job's first copy, such as the last use of the slot.
            ready: event that is recorded after the last copy.

        Returns:
            A future that is done when the last copy and `ready` are queued. After that a stream can wait for `ready`.
            If the job fails, the future fails when no read and no copy of the job is in flight any more. Its failure is
            that of a read or of an `after`; or of kind 'io' with errno 0 for an error of the gate; or of kind
            'canceled'. After a read that failed with 'timeout', or an error of the gate after which the device may
            still read a piece, this job and all later jobs fail with the same failure, and the bounce buffer is never
            freed.

        Raises:
            ValueError: no parts; a part that is empty, misaligned or not within its file's checksums; or `close` was
                called.
        """
    def cancel(self, future: IOFuture) -> None:
        """Cancel a job: start no more of its reads and copies. Does not wait.

        When nothing of the job is in flight any more, its future fails as canceled. If its last copy was queued before,
        the future does not fail.
        """
    def counters(self) -> dict[str, int]:
        """Return counters.

        The counters are read_bytes, pieces (number of pieces whose read was started), and without_a_piece (number of
        pieces that could not be read at once, because no piece of the bounce buffer was free).
        """
    def close(self) -> None:
        """Wait for all jobs that were queued, and until the device no longer reads the bounce buffer. Then stop the
        thread.

        Jobs that wait for the `after` of a part fail as canceled. A second call does nothing.
        """

"""What `_native` has for a device: its runtime's entry points, and native threads that chain disk, host and device.

Only type stubs: the names are imported from `infinity._native`. Streams and events are the runtime's handles as
integers (`torch.cuda.Stream.cuda_stream`, `torch.cuda.Event.cuda_event`), device addresses are `Tensor.data_ptr()`.
"""

from collections.abc import Sequence

from infinity._native import Buffer, DTypeName, IOFuture, ThreadPool

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
        source: None: only the sum of squares of `target` is taken, as by `sum_squares`. Else `source` is copied to
            `target`, or added to it, as by `land_gradient(target, dtype, source, source_dtype, add=add)`.
        source_dtype: None: `dtype`.

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
    ) -> None: ...

class LandingFuture(IOFuture):
    @property
    def sums(self) -> list[float]:
        """The sum of squares of each piece's target. RuntimeError while not done, and when the landing failed."""

class Landings:
    """A native thread that waits for gradients on their way from the device, and lands them in the order of the calls.

    The bits, and the sums, are those of `sum_squares` and `land_gradient`. After an error of the gate nothing lands any
    more: that landing and every later one fail, with a failure of kind 'io' and errno 0.
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

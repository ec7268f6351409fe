"""What `_native` has for a device: its runtime's entry points, and native threads that chain disk, host and device.

Only type stubs: the names are imported from `infinity._native`. Streams and events are the runtime's handles as
integers (`torch.cuda.Stream.cuda_stream`, `torch.cuda.Event.cuda_event`), device addresses are `Tensor.data_ptr()`.
"""

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

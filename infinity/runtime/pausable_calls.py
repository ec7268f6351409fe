"""Pausable calls: forwards of several micro-batches that take turns, each in a separate thread, called a lane.

A forward is a call of the user's code. Such a call can be suspended inside a module and continued later only if it runs
in a separate thread. This thread waits while the call is suspended. Only one lane runs at a time, and the thread that
resumes the lanes waits while a lane runs.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from infinity.base.accelerator import Accelerator
from infinity.base.interrupt import interrupts_deferred


class _CallAbandoned(BaseException):
    """Signal that a lane is abandoned.

    The class does not derive from Exception, so `except Exception` in user code does not catch it.
    """


class PausableCall:
    """A call in a separate thread. After `resume`, the call runs until it calls `park` or ends.

    Attributes:
        over: whether the call has ended.
    """

    def __init__(self, call: Callable[[], object], surroundings: TorchThreadState) -> None:
        self._call = call
        self._surroundings = surroundings
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._unwanted = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.over = False

    def resume(self) -> None:
        """Let the call run until it parks or ends.

        A Ctrl-C in the meantime takes effect when this method returns. Raises the error that the call raised.
        """
        with interrupts_deferred():
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="infinity-lane", daemon=True)
                thread.start()  # may fail
                self._thread = thread
            else:
                self._go.release()
            self._back.acquire()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the error's traceback refers to this frame

    def park(self) -> None:
        """Suspend the call until `resume`. Only the call itself calls this method."""
        self._back.release()
        self._go.acquire()
        if self._unwanted:
            raise _CallAbandoned

    def end(self) -> None:
        """Abandon the call, and wait until its thread has ended. A Ctrl-C in the meantime takes effect when this method
        returns."""
        self._unwanted = True
        with interrupts_deferred():
            while self._thread is not None and not self.over:
                self._go.release()
                self._back.acquire()
            if self._thread is not None:
                self._thread.join()
            self._error = None

    def _run(self) -> None:
        try:
            with self._surroundings.here():
                self._surroundings.context.copy().run(self._call)
        except _CallAbandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            del self._call  # the call refers to tensors of the micro-batch
            self.over = True
            self._back.release()


class TorchThreadState:
    """Copy of the state that torch keeps for the thread that makes this object.

    The state consists of the gradient mode, autocast, the function and dispatch modes (a default device is such a mode)
    and the stream.

    Args:
        accelerator: the device that the model computes on; None: the CPU.
    """

    def __init__(self, accelerator: Accelerator | None) -> None:
        self.context = contextvars.copy_context()
        self._accelerator = accelerator
        self._stream = None if accelerator is None else accelerator.current()
        self._gradients = torch.is_grad_enabled()
        self._functions, self._dispatches = _modes()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.device.type]
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in dict.fromkeys(kinds)
        }
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def here(self) -> Iterator[None]:
        """In this context, set the copied state in the thread that calls this."""
        with ExitStack() as entered:
            if self._accelerator is not None:
                entered.enter_context(self._accelerator.on(self._stream))
            functions, dispatches = (len(modes) for modes in _modes())  # number of modes that this thread already has
            for mode in self._functions[functions:]:
                torch._C._push_on_torch_function_stack(mode)
                entered.callback(torch._C._pop_torch_function_stack)
            for mode in self._dispatches[dispatches:]:
                torch._C._push_on_torch_dispatch_stack(mode)
                entered.callback(torch._C._pop_torch_dispatch_stack, None)
            for kind, (enabled, dtype) in self._autocast.items():
                entered.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self._autocast_cache))
            entered.enter_context(torch.set_grad_enabled(self._gradients))
            yield


def _modes() -> tuple[list[Any], list[Any]]:
    """Return this thread's stacks of torch-function modes and of torch-dispatch modes."""
    return _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()

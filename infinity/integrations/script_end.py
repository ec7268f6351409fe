"""The end of a script. The script's threads are joined and its atexit functions run before its models are closed.

Python itself would do this at the end of the process, which is after `infinity run` has closed the models.
"""

from __future__ import annotations

import atexit
import sys
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from infinity.integrations.patches import Patches

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Directories of code that does not belong to a script. Python itself runs the atexit functions of such code.
"""


@contextmanager
def script_end() -> Iterator[None]:
    """Return a context manager for running a script in its block.

    Before the block ends, the script's threads are joined and its atexit functions are run, even if the script fails.
    """
    earlier, functions = set(threading.enumerate()), _AtexitFunctions()
    try:
        with Patches() as patches:
            patches.wrap(atexit, "register", functions.register)
            patches.wrap(atexit, "unregister", functions.unregister)
            yield
    except SystemExit:
        raise
    except BaseException as error:
        _print_awaited_threads(error, earlier)
        raise
    finally:
        try:
            _join(earlier)
        finally:
            functions.run()


class _AtexitFunctions:
    """The atexit functions of a script, each with the `__main__` module at the time of its registration."""

    def __init__(self) -> None:
        self._found: list[tuple[Callable[..., Any], Callable[[], Any], ModuleType]] = []

    def register(self, theirs: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not _is_of_a_script(sys._getframe(2)):
            return theirs(function, *args, **kwargs)
        self._found.append((function, partial(function, *args, **kwargs), sys.modules["__main__"]))
        return function

    def unregister(self, theirs: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._found = [each for each in self._found if each[0] != function]
        theirs(function)

    def run(self) -> None:
        """Run the functions in the reverse order of their registration. If a function raises an error, report the error
        and run the other functions.
        """
        while self._found:
            function, call, main = self._found.pop()
            before, sys.modules["__main__"] = sys.modules["__main__"], main
            try:
                call()
            except BaseException:
                print(f"Exception ignored in atexit callback: {function!r}", file=sys.stderr)
                traceback.print_exc()
            finally:
                sys.modules["__main__"] = before


def _is_of_a_script(frame: FrameType) -> bool:
    ours = str(frame.f_globals.get("__name__")).partition(".")[0] == "infinity"
    return not (ours or frame.f_code.co_filename.startswith(_LIBRARIES))


def _print_awaited_threads(error: BaseException, earlier: Collection[threading.Thread]) -> None:
    """Print the error of a script, and the names of the threads that are joined next.

    A thread may wait for an event that never happens.
    """
    names = [thread.name for thread in threading.enumerate() if _is_waited_for(thread) and thread not in earlier]
    if names:
        said = "".join(traceback.format_exception_only(error)).strip()
        print(
            f"infinity: the script failed ({said}), and the process waits for the script's threads: {', '.join(names)}",
            file=sys.stderr,
        )


def _join(earlier: Collection[threading.Thread]) -> None:
    """Join the threads of the script.

    Args:
        earlier: the threads that existed before the script began.
    """
    while waited := [thread for thread in threading.enumerate() if _is_waited_for(thread) and thread not in earlier]:
        for thread in waited:
            pool = _pool_of(thread)
            if pool is not None:
                pool.shutdown()  # this completes the submitted work
            thread.join()


def _is_waited_for(thread: threading.Thread) -> bool:
    """Return whether the end of the script waits for a thread.

    The end does not wait for the thread of a process pool. This thread ends when Python itself ends, and the processes
    of the pool have no models.
    """
    of_processes = type(thread).__module__ == "concurrent.futures.process"
    return not (thread.daemon or of_processes or thread is threading.current_thread())


def _pool_of(thread: threading.Thread) -> ThreadPoolExecutor | None:
    """Return the thread pool to which a thread belongs; None if it belongs to none.

    A thread of a pool waits for work until the pool is shut down.

    The thread's first argument is a weak reference to the pool.
    """
    first = next(iter(getattr(thread, "_args", ())), None)
    pool = first() if isinstance(first, weakref.ref) else None
    return pool if isinstance(pool, ThreadPoolExecutor) else None

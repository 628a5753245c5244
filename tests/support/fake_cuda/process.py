"""Run functions in a process with a fake CUDA device."""

import ctypes
import hashlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fake_cuda.device import pretend

_TORCH = Path(torch.__file__).parent


class FakeCudaProcess:
    """A process whose torch has a fake CUDA device, as a context manager.

    The process starts at the first :meth:`run`.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "FakeCudaProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> Any:
        """Call ``function(*args)`` in the process. Arguments and results are pickled.

        function: a function at the top level of an importable module.
        timeout: seconds.

        Raises:
            RuntimeError: the function raised an error; the text has its traceback.
        """
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                max_workers=1, mp_context=multiprocessing.get_context("spawn"), initializer=_start
            )
        # torch looks for CUDA when it is imported, so the guard must be preloaded.
        with patch.dict(os.environ, LD_PRELOAD=str(built("guard.cpp"))):
            os.environ.pop("TRITON_INTERPRET", None)
            future = self._pool.submit(_call, function, args)  # starts the process
        return future.result(timeout)


def built(name: str) -> Path:
    """Compile a C++ source in this folder for this release of torch, or find it in the cache.

    Raises:
        RuntimeError: the compiler failed; the text has its output.
    """
    source = Path(__file__).with_name(name)
    key = hashlib.sha256(f"{torch.__version__} {_TORCH}".encode() + source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"fp8_dist_fake_cuda_{os.getuid()}"
    library = folder / f"{source.stem}_{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    abi = int(torch.compiled_with_cxx11_abi())
    command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-std=c++20", "-O2"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{_TORCH / 'include'}", str(source)]
    command += ["-o", str(unfinished), f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}"]
    command += ["-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    unfinished.replace(library)
    return library


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except Exception:  # it may not be picklable
        raise RuntimeError(traceback.format_exc()) from None


def _start() -> None:
    guard = os.environ.pop("LD_PRELOAD")  # not for compilers that this process starts
    ctypes.CDLL(guard).take_over()
    torch.set_num_threads(1)
    pretend()
    # Autograd's thread for the device never ends, which would abort the interpreter at exit.
    Finalize(None, _end, exitpriority=0)


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

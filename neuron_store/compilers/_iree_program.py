"""A compiled program of IREE, loaded. Importing this imports IREE's runtime and numpy."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import weakref
from typing import TYPE_CHECKING, Any

from neuron_store.errors import ArtifactCorrupt, ConfigError, MissingExtra, Unsupported
from neuron_store.streams import open_regular

try:
    import iree.runtime as rt
    import numpy as np
except ImportError as error:
    raise MissingExtra(
        "loading an IREE artifact", "iree", error.name or "iree-base-runtime"
    ) from error

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["IreeProgram"]


# IREE keeps one pool of threads for `local-task` in a process. A child of fork has the pool without
# its threads, and waits for them for ever: when it runs something there, and also when its garbage
# collector frees a program of the parent's (both measured, 3.13). So a child uses the driver that
# has no threads, and what it inherited is never freed.
_threads_of: int | None = None
_devices: dict[str, Any] = {}
_contexts: weakref.WeakSet[Any] = weakref.WeakSet()


def _device(driver: str) -> Any:
    global _threads_of  # noqa: PLW0603  (a fact about the process)
    if driver == "local-task":
        if _threads_of is None:
            _threads_of = os.getpid()
        elif _threads_of != os.getpid():
            driver = "local-sync"
    if driver not in _devices:
        _devices[driver] = rt.get_driver(driver).create_default_device()
    return _devices[driver]


def _keep_inherited() -> None:
    for inherited in (*_contexts, *_devices.values()):
        # A reference that nobody holds: also the interpreter's end must not free it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
    _devices.clear()


os.register_at_fork(after_in_child=_keep_inherited)


def _mapped(file: Path) -> mmap.mmap:
    # IREE's own `VmModule.mmap` opens the file for writing, which a cache in an image refuses.
    descriptor = open_regular(file)
    try:
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


class IreeProgram:
    """The functions of one artifact.

    For one thread at a time, in the process that loaded it: after a fork, load it again.
    """

    def __init__(self, file: Path, *, key: str, driver: str = "local-task") -> None:
        self.key = key
        try:
            device = _device(driver)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"IREE has no driver {driver!r}: {error}") from error
        config = rt.Config(device=device)
        try:
            module = rt.VmModule.wrap_buffer(config.vm_instance, _mapped(file), close_buffer=True)
            context = rt.SystemContext(
                vm_modules=[*config.default_vm_modules, module], config=config
            )
        except IndexError as error:
            # IREE compiles kernels of any number of tensors, and runs those of 32.
            told = re.search(r"binding count \d+ > \d+", str(error))
            reason = f"a kernel has too many tensors ({told[0] if told else str(error)[:200]})"
            raise Unsupported("way to run it", "IREE", f"artifact {key}, {reason}") from error
        except (RuntimeError, ValueError, TypeError) as error:
            raise ArtifactCorrupt(
                key, os.fspath(file.parent), f"IREE cannot load {file.name}: {error}"
            ) from error
        _contexts.add(context)
        self._pid = os.getpid()
        self._module = module
        self._context, self._device = context.vm_context, device
        self._bound = context.modules[module.name]

    @property
    def functions(self) -> tuple[str, ...]:
        """Names that `run` takes."""
        return tuple(
            n for n in self._module.function_names if not n.startswith("__") and "$" not in n
        )

    def entry(self, name: str) -> tuple[Any, Any, Any]:
        """IREE's context, function and device, for a caller that passes buffers itself.

        Raises:
            ConfigError: there is no such function.
        """
        self._check_name(name)
        return self._context, self._module.lookup_function(name), self._device

    def run(self, name: str, *arrays: npt.ArrayLike) -> tuple[npt.NDArray[Any], ...]:
        """Call a function with arrays; its results, in their order, as new arrays.

        Raises:
            ConfigError: there is no such function.
            Unsupported: the program was loaded before a fork.
            ValueError: the arrays are not what the function takes.
        """
        if self._pid != os.getpid():
            raise Unsupported("run", "IreeProgram", "it was loaded before a fork; load it again")
        self._check_name(name)
        try:
            results = self._bound[name](*(np.asarray(a, order="C") for a in arrays))
        except RuntimeError as error:
            raise ValueError(f"{name} of artifact {self.key}: {error}") from error
        if results is None:
            return ()
        if not isinstance(results, tuple | list):
            results = (results,)
        return tuple(np.array(r.to_host() if hasattr(r, "to_host") else r) for r in results)

    def _check_name(self, name: str) -> None:
        if name not in self.functions:
            raise ConfigError(
                f"artifact {self.key} has no function {name!r}; it has {', '.join(self.functions)}"
            )

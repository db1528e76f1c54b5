"""Calls a loaded IREE program with torch tensors, read in place. Imports IREE's runtime."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import iree.runtime as rt
import torch
from torch.utils.dlpack import to_dlpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from neuron_store.compilers._iree_program import IreeProgram

__all__ = ["IreeTensorProgram"]

_HOST = 1  # kDLCPU of DLPack
# IREE imports memory that starts at this boundary, which torch's own allocations do.
_ALIGNMENT = 64


class IreeTensorProgram:
    """The function `main` of a program, from tensors to tensors.

    Safe from threads, and after a fork, when it loads the program again: the threads of IREE's
    device do not exist in the child.
    """

    def __init__(self, load: Callable[[], IreeProgram]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._pid = -1
        self._entry: Any = None
        _open.add(self)
        self._ready()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it; results are new tensors, contiguous, of which no two share memory."""
        with self._lock:
            context, function, device = self._ready()
            given = rt.VmVariantList(len(tensors))
            for tensor in tensors:
                given.push_ref(device.from_dlpack_capsule(to_dlpack(_importable(tensor))))
            returned = rt.VmVariantList(4)
            context.invoke(function, given, returned)
        # Copied, since a tensor on IREE's memory would outlive IREE at the interpreter's end and
        # crash there, and since the compiler may return one buffer for two equal results.
        return [
            torch.from_dlpack(
                device.create_dlpack_capsule(
                    returned.get_as_object(position, rt.HalBufferView), _HOST, 0
                )
            ).clone()
            for position in range(returned.size)
        ]

    def _ready(self) -> tuple[Any, Any, Any]:
        if self._pid != os.getpid():
            self._entry = self._load().entry("main")
            self._pid = os.getpid()
        assert self._entry is not None
        found: tuple[Any, Any, Any] = self._entry
        return found


_open: weakref.WeakSet[IreeTensorProgram] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # What torch keeps for ever would outlive IREE's own tear-down, which then reports leaks.
    for program in list(_open):
        program._entry = None  # noqa: SLF001  (the same module's)


def _importable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT and tensor.numel() else tensor

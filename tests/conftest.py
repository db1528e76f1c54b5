from __future__ import annotations

import signal

from hypothesis import settings

# Those that take minutes, most of them waiting: begun last, one would keep all others waiting.
_FIRST = ("tests/backends/test_nfs.py", "tests/testing/test_worlds.py")


def pytest_configure():
    # How long an example takes says more about the machine than about the code.
    settings.register_profile("neuron_store", deadline=None)
    settings.load_profile("neuron_store")
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))

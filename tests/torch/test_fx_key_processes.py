"""Ranks agree about a key without a word between them."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")

pytestmark = pytest.mark.torch

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.torch.test_fx_key_processes import keys
import json
print(json.dumps(keys()))
"""


def keys():
    """Keys of a static, a dynamic and a branching graph, as the backend would compute them."""
    from torch._dynamo.backends.common import aot_autograd

    from neuron_store.fx_key import graph_components
    from neuron_store.key import compute_key
    from tests.torch.models import Chooser, Llama

    # Ranks differ in what they did before, and so in object ids and in the tracer's counters.
    torch._dynamo.reset()
    found = []

    def keep(gm, inputs):
        components = graph_components(
            gm, inputs, compiler="iree", compiler_version="1", target="x86_64"
        )
        found.append(compute_key(components))
        return gm.forward

    backend = aot_autograd(fw_compiler=keep)
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    model, chooser = Llama(), Chooser()
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        cache = model.new_cache()
        compiled(torch.zeros(1, 6, dtype=torch.int64), torch.arange(6), cache)
        compiled(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4), cache)
        torch.compile(chooser, backend=backend)(torch.ones(3, 8))
    return found


def in_subprocess(tmp_path, rank):
    home = tmp_path / f"home{rank}"
    home.mkdir()
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "PYTHONHASHSEED": str(rank * 7 + 1),
        "HOME": str(home),
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "TMPDIR": str(home),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, os.getcwd()],
        env=env, cwd=home, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return json.loads(done.stdout)


def _child(rank, queue):
    os.environ["RANK"] = str(rank)
    os.environ["HOME"] = f"/nonexistent/{rank}"
    # A forked child has none of the threads that an operator in its parent may have started, and
    # would wait for them.
    torch.set_num_threads(1)
    try:
        queue.put(keys())
    except BaseException as error:
        queue.put(repr(error))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_three_processes_agree_under_fork_and_spawn(method):
    context = mp.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=_child, args=(rank, queue)) for rank in range(3)]
    for child in children:
        child.start()
    found = [queue.get(timeout=300) for _ in children]
    for child in children:
        child.join(60)
    assert len(found[0]) == 3
    assert len(set(found[0])) == 3
    assert found[1:] == [found[0]] * 2
    # The children cannot have agreed with each other alone.
    assert found[0] == keys()


@pytest.mark.slow
def test_processes_of_other_rank_hash_seed_home_and_temporary_directory_agree(tmp_path):
    """Pitfall 11."""
    found = [in_subprocess(tmp_path, rank) for rank in range(3)]
    assert found[1:] == [found[0]] * 2
    assert found[0] == keys()

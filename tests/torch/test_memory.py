"""Whose memory is whose: inputs stay as eager leaves them, outputs share what they share there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")
pytest.importorskip("jax", reason="lowering needs the extra `torch`: run `make torch`")
pytest.importorskip("iree.compiler", reason="compiling needs the extra `iree`")

from neuron_store.compilers.iree import IreeCompiler  # noqa: E402
from neuron_store.errors import UnsupportedOperator  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def compiled(function, **options):
    return torch.compile(function, backend="neuron_store", options={"fallback": "error", **options})


def flat(outputs):
    return outputs if isinstance(outputs, tuple | list) else (outputs,)


def clones(tensors):
    return [tensor.clone() for tensor in tensors]


def floats(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def written(cache, rows):
    cache[2:4] = rows
    return cache * 1


def shifted(window):
    window[:-1] = window[1:].clone()
    return window[0]


def bias_by_index(x, bias, rows):
    return x + bias.index_add(0, rows, torch.ones(2, 8))


ROWS, PLACES = torch.tensor([1, 3]), torch.tensor([[0, 3, 1, 2, 0, 1, 2, 3]])
X, SOURCE = floats(16, 8), -floats(2, 8) - 1
UPDATES = {
    "scatter": (lambda x, i, s: x.scatter(0, i, s), X, PLACES, SOURCE),
    "scatter a value": (lambda x, i: x.scatter(0, i, -1.0), X, PLACES),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), X, PLACES, SOURCE),
    "index_put": (lambda x, r, s: x.index_put((r,), s), X, ROWS, SOURCE),
    "index_put accumulating": (lambda x, r, s: x.index_put((r,), s, True), X, ROWS, SOURCE),
    "index_add": (lambda x, r, s: x.index_add(0, r, s), X, ROWS, SOURCE),
    "index_copy": (lambda x, r, s: x.index_copy(0, r, s), X, ROWS, SOURCE),
    "select_scatter": (lambda x, s: x.select_scatter(s[0], 0, 3), X, SOURCE),
    "slice_scatter": (lambda x, s: x.slice_scatter(s, 0, 2, 4), X, SOURCE),
    "slice_scatter with a step": (lambda x, s: x.slice_scatter(s, 0, 0, 8, 4), X, SOURCE),
    "of a view": (lambda x, s: x.view(8, 16)[:4].reshape(8, 8).index_copy(0, ROWS, s), X, SOURCE),
    "sort": (lambda x: x.sort(0, descending=True).values, X),
    "argsort": (lambda x: x.argsort(0, descending=True), X),
    "topk": (lambda x: x.topk(3).values, X),
    "a parameter": (bias_by_index, X, floats(16, 8), ROWS),
    "of bool": (lambda x, r: x.index_put((r,), torch.tensor(True)), X < 5, ROWS),
    "of int64": (lambda x, r: x.index_put((r,), torch.tensor(7)), X.long(), ROWS),
    "of bfloat16": (lambda x, r, s: x.index_copy(0, r, s), X.bfloat16(), ROWS, SOURCE.bfloat16()),
    "in a branch": (
        lambda x, s: torch.cond(
            x.sum() > 0, lambda x, s: x.index_add(0, ROWS, s), lambda x, s: x + s[0], (x, s)
        ),
        X,
        SOURCE,
    ),
    "a written slice": (written, X, SOURCE),
    "a shifted window": (shifted, X),
}


@pytest.mark.parametrize("what", UPDATES)
@torch.no_grad()
def test_inputs_are_afterwards_what_eager_makes_of_them(cache, what):
    function, *inputs = UPDATES[what]
    expected, given = clones(inputs), clones(inputs)
    want = function(*expected)
    runs = compiled(function)
    for _ in range(2):
        # IREE takes a buffer as its own only where it is aligned, which torch's are.
        assert all(tensor.data_ptr() % 64 == 0 for tensor in given)
        torch.testing.assert_close(runs(*given), want)
        assert [g.tolist() for g in given] == [e.tolist() for e in expected]
        given = clones(inputs)


def test_a_training_step_leaves_its_input_alone(cache):
    x = X.clone().requires_grad_()
    compiled(UPDATES["scatter_add"][0])(x, PLACES, SOURCE).sum().backward()
    assert torch.equal(x.detach(), X)
    torch.testing.assert_close(x.grad, torch.ones_like(x))


def made(views):
    return lambda a: views(a + 1)


SHARING = {
    "none": lambda a: (a + 1, (a + 2)[:2]),
    "a tensor and its part": made(lambda b: (b, b[:2])),
    "two parts": made(lambda b: (b[:4], b[2:], b * 2)),
    "layouts": made(lambda b: (b.t(), b.view(-1), b.unsqueeze(0).expand(3, 6, 4))),
    "pieces": made(lambda b: (*b.split(2), *b.unbind(1), *b.chunk(2, 1))),
    "twice the same": made(lambda b: (b, b)),
    "of a transposed one": made(lambda b: (b.t(), b.t()[0])),
    "other types": made(lambda b: (b.view(torch.int32), b)),
    "inputs": lambda a: (a[:2], a[1:], a + 1),
}
DYNAMIC = ("two parts", "layouts")


@pytest.mark.parametrize(
    ("what", "dynamic"), [*((w, False) for w in SHARING), *((w, True) for w in DYNAMIC)]
)
@torch.no_grad()
def test_outputs_share_memory_as_in_eager(cache, what, dynamic):
    function, x = SHARING[what], floats(6, 4)
    want = function(x.clone())
    got = torch.compile(
        function, backend="neuron_store", options={"fallback": "error"}, dynamic=dynamic
    )(x.clone())

    def pairs(outputs):
        places = [o.untyped_storage().data_ptr() for o in outputs]
        return [[one == other for one in places] for other in places]

    assert pairs(got) == pairs(want)
    assert [g.stride() for g in got] == [w.stride() for w in want]
    want[0].zero_()
    got[0].zero_()
    torch.testing.assert_close(list(got), list(want))


# -- what is loaded -----------------------------------------------------------------------------

RUN = """
import torch
f = torch.compile(lambda a: a * 2 + 1, backend="neuron_store")
with torch.no_grad():
    print(f(torch.ones(3)).tolist())
"""


def test_a_hit_needs_no_right_to_write(cache):
    """A cache that came with an image, or belongs to another user."""
    with torch.no_grad():
        assert compiled(lambda a: a * 2 + 1)(torch.ones(3)).tolist() == [3, 3, 3]
    (entry,) = (p for p in cache.iterdir() if not p.name.startswith("."))
    shut = [*entry.iterdir(), entry, cache]
    for path in shut:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
    try:
        # The owner of everything may write all the same; then only that it is opened to be read.
        opened = []
        real = os.open

        def watched(path, flags, *rest, **facts):
            if str(path).endswith(".vmfb"):
                opened.append(flags & os.O_ACCMODE)
            return real(path, flags, *rest, **facts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", watched)
            (result,) = IreeCompiler().load(entry).run("main", torch.ones(3).numpy())
        assert result.tolist() == [3, 3, 3]
        assert opened == [os.O_RDONLY]
        done = subprocess.run(
            [sys.executable, "-c", RUN], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.stdout == "[3.0, 3.0, 3.0]\n", done.stderr
    finally:
        for path in reversed(shut):
            path.chmod(0o755)


@torch.no_grad()
def test_a_kernel_of_more_tensors_than_iree_runs_is_never_stored(cache, caplog):
    tensors = [torch.ones(3) for _ in range(40)]
    with pytest.raises(UnsupportedOperator, match=r"too many tensors \(binding count \d+ > 32\)"):
        compiled(lambda *a: sum(a))(*tensors)
    torch._dynamo.reset()
    total = compiled(lambda *a: sum(a), fallback="eager")(*tensors)
    assert total.tolist() == [40, 40, 40]
    assert "a graph runs eagerly: a kernel: " in caplog.text
    assert not cache.exists() or [p for p in cache.iterdir() if not p.name.startswith(".")] == []


@torch.no_grad()
def test_a_number_that_makes_a_program_for_each_value_is_told_of_once(cache, caplog, monkeypatch):
    from neuron_store import _torch_graph

    monkeypatch.setattr(_torch_graph, "_MANY", 3)
    shifts = compiled(lambda x, n: x + n)
    for n in range(2, 8):
        assert shifts(torch.ones(3), n).tolist() == [1 + n] * 3
    told = [r.message for r in caplog.records if "combinations of sizes" in r.message]
    assert len(told) == 1
    assert "was made for 3 combinations" in told[0]
    assert "numbers that change as tensors" in told[0]

"""Losses, activations and models: their values and gradients against eager."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch tests need the extra `torch`: run `make torch`")
pytest.importorskip("jax", reason="lowering needs the extra `torch`: run `make torch`")
pytest.importorskip("iree.compiler", reason="compiling needs the extra `iree`")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812  (its name everywhere)

from neuron_store.errors import UnsupportedOperator  # noqa: E402
from tests.torch.models import Llama  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]

_random = torch.Generator().manual_seed(0)
X, Y = (torch.randn(3, 4, generator=_random) * 2 for _ in range(2))
X[0, 0] = 0  # where the absolute value has no derivative
T = torch.rand(3, 4, generator=_random)
TARGETS = torch.tensor([0, 3, 1])

# Several in one graph, which is compiled once.
GROUPS = {
    "losses": [
        lambda x: F.l1_loss(x, Y),
        lambda x: F.mse_loss(x, Y),
        lambda x: F.smooth_l1_loss(x, Y),
        lambda x: F.huber_loss(x, Y),
        lambda x: F.cross_entropy(x, TARGETS),
        lambda x: F.kl_div(x.log_softmax(1), T.softmax(1), reduction="batchmean"),
        lambda x: F.soft_margin_loss(x, Y.sign()),
    ],
    "binary losses": [
        lambda x: F.binary_cross_entropy_with_logits(x, T),
        lambda x: F.binary_cross_entropy_with_logits(x, T, weight=T, pos_weight=T[0]),
        lambda x: F.binary_cross_entropy(x.sigmoid(), T),
    ],
    "activations": [
        F.softplus,
        lambda x: F.softplus(x, 2, 1.0),
        F.hardswish,
        F.hardsigmoid,
        F.elu,
        F.selu,
        F.celu,
        F.logsigmoid,
        F.mish,
        F.glu,
        F.relu6,
        F.softshrink,
        F.hardshrink,
        lambda x: F.threshold(x, 0.1, 20.0),
        lambda x: F.prelu(x, T[0, :1]),
        lambda x: F.gelu(x, approximate="tanh"),
    ],
    # Its gradient saves a tensor of which one place stands for a whole dimension.
    "normalised": [lambda x: F.normalize(x, dim=-1)],
    "reductions": [
        lambda x: x.abs(),
        lambda x: x.prod(),
        lambda x: x.prod(1),
        lambda x: x.std(),
        lambda x: x.std(1, unbiased=False),
        lambda x: x.var(0),
        lambda x: x.logsumexp(1),
        lambda x: x.norm(),
        lambda x: x.cumsum(0),
        lambda x: x.cumprod(1),
        lambda x: x.amax(1),
        lambda x: x.max(1)[0],
        lambda x: x.sort(1)[0],
        lambda x: x.topk(2)[0],
    ],
    "in place": [
        lambda x: (x * 2).zero_() + x,
        lambda x: (x * 2).fill_(3.0) * x,
        lambda x: x * torch.empty(3, 4).fill_(Y[0, 0]),
        lambda x: x.index_fill(0, torch.tensor([1]), 2.0),
    ],
    "arithmetic": [
        lambda x: x.abs() ** 2.5,
        lambda x: (x.abs() + 0.1) ** Y,
        lambda x: 1.5**x,
        lambda x: x**9,
        lambda x: torch.atan2(x, Y),
        lambda x: x.sin() * x.cos(),
        lambda x: (x.abs() + 1).log10(),
        lambda x: torch.addcdiv(x, Y, T + 1),
        lambda x: torch.lerp(x, Y, 0.3),
        lambda x: torch.logaddexp(x, Y),
        lambda x: torch.logit(x.sigmoid()),
        torch.nan_to_num,
        lambda x: F.cosine_similarity(x, Y),
    ],
    "normalisations": [
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.group_norm(x[..., None], 2),
        lambda x: F.layer_norm(x, (4,)),
    ],
    "embeddings": [
        lambda x: F.embedding(torch.tensor([[0, 2], [2, 2]]), x),
        lambda x: F.embedding(torch.tensor([[0, 2], [2, 2]]), x, padding_idx=0),
        lambda x: x[torch.tensor([0, 0, 2])],
        lambda x: x.gather(1, torch.tensor([[0], [1], [2]])),
    ],
}


def compiled(model):
    return torch.compile(model, backend="neuron_store", options={"fallback": "error"})


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def values_and_gradient(function):
    x = X.clone().requires_grad_()
    results = function(x)
    # Weighted, since the plain sum of a softmax, say, has no gradient.
    sum((r * torch.linspace(0.5, 1.5, r.numel()).view(r.shape)).sum() for r in results).backward()
    return [r.detach() for r in results], x.grad


@pytest.mark.parametrize("group", GROUPS)
def test_values_and_gradients_are_those_of_eager(cache, group):
    def function(x):
        return [f(x) for f in GROUPS[group]]

    (values, gradient), (expected, wanted) = map(
        values_and_gradient, (compiled(function), function)
    )
    close(values, expected)
    close(gradient, wanted)


def train(model, run, inputs, loss):
    """The loss, and what one step makes of the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = loss(run(*inputs))
    found.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    return found.detach(), gradients, [*model.parameters()], [*model.buffers()]


def test_a_llama_with_its_embedding_trains_as_in_eager(cache):
    ours = Llama()
    theirs = copy.deepcopy(ours)
    tokens, targets = torch.randint(0, 128, (2, 2, 6))

    def inputs(model):
        return tokens, torch.arange(6), model.new_cache(2)

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    close(
        train(ours, compiled(ours), inputs(ours), loss),
        train(theirs, theirs, inputs(theirs), loss),
    )


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_its_statistics_are_those_of_eager(cache, training):
    ours = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Hardswish()).train(training)
    theirs = copy.deepcopy(ours)

    def loss(y):
        return y.square().sum()

    close(
        train(ours, compiled(ours), (X,), loss),
        train(theirs, theirs, (X,), loss),
    )


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: F.dropout(x, 0.5, training=True), "aten.native_dropout"),
        (lambda x: x + torch.rand(3, 4), "aten.rand"),
    ],
)
def test_random_numbers_are_refused_by_name(cache, function, name):
    with torch.no_grad(), pytest.raises(UnsupportedOperator, match=name):
        compiled(function)(X)

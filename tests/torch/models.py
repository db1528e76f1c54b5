"""Small models with random weights, the shapes of the large ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as f

__all__ = ["Block", "Chooser", "Llama", "mlp"]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.GELU(),
        nn.LayerNorm(32),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )


class Block(nn.Module):
    """A transformer block of the kind that came before Llama."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(f.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Chooser(nn.Module):
    """Takes one of two branches, by its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0, lambda y: torch.sin(self.linear(y)), lambda y: y.cumsum(-1), (x,)
        )


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.to(x.dtype) * self.weight


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm1, self.norm2 = _RMSNorm(width), _RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q = _rotate(self.q(y).view(batch, length, self.heads, self.size).transpose(1, 2), rotation)
        k, v = (
            p(y).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
            for p in (self.k, self.v)
        )
        # The cache is written in place, as serving engines do.
        cache[0].index_copy_(2, positions, _rotate(k, rotation))
        cache[1].index_copy_(2, positions, v)
        repeat = self.heads // self.kv_heads
        k, v = (c.repeat_interleave(repeat, 1) for c in (cache[0], cache[1]))
        y = f.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(f.silu(self.gate(y)) * self.up(y))


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Llama(nn.Module):
    """A decoder with rotary positions, grouped queries, a gated MLP and a cache of `length`."""

    def __init__(
        self,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        kv_heads: int = 2,
        vocabulary: int = 128,
        length: int = 16,
    ) -> None:
        super().__init__()
        self.length, self.kv_heads, self.size = length, kv_heads, width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Layer(width, heads, kv_heads) for _ in range(layers))
        self.norm = _RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer(
            "frequencies", 1.0 / 10000 ** (torch.arange(0, self.size, 2).float() / self.size)
        )

    def new_cache(self, batch: int = 1) -> list[torch.Tensor]:
        """Keys and values of each layer, zero."""
        shape = (2, batch, self.kv_heads, self.length, self.size)
        return [torch.zeros(shape, dtype=self.head.weight.dtype) for _ in self.layers]

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, caches: list[torch.Tensor]
    ) -> torch.Tensor:
        x = self.embed(tokens)
        angles = torch.outer(positions.float(), self.frequencies).repeat(1, 2)
        rotation = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        mask = torch.arange(self.length)[None, :] <= positions[:, None]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rotation, mask, positions, cache)
        return self.head(self.norm(x))

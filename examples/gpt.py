"""A byte-level GPT of ordinary modules, without any code for sharding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte value


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; ``context`` is the longest sequence, in bytes, in a forward."""

    layers: int = 4
    width: int = 192
    heads: int = 6
    context: int = 128
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, time, width)`` to the same shape; position t attends to positions <= t."""
        batch, time, width = x.shape
        # (batch, time, 3 * width) -> three of (batch, heads, time, width / heads)
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One pre-norm transformer layer. The example applies ``fully_shard`` to each."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, time, width)`` to the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Maps bytes to logits of the next byte. Input and output embeddings share one weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialize()
        self.head.weight = self.token.weight

    def _initialize(self) -> None:
        """Draws normal weights. Layers that write to the residual stream get smaller ones."""
        residual_std = 0.02 / (2 * self.config.layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                writes_residual = name.endswith(("attention.out", "mlp.2"))
                nn.init.normal_(module.weight, std=residual_std if writes_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps int64 ``(batch, time)`` with time <= context to logits ``(batch, time, 256)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats per byte, computed in fp32 for logits of any dtype."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, *, seed: int) -> str:
    """Returns ``prompt`` and ``length`` sampled bytes; undecodable bytes are replaced.

    Every rank must call this, because a forward is collective. All ranks sample the same bytes.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    device = next(model.parameters()).device
    for _ in range(length):
        window = torch.tensor([text[-model.config.context :]], device=device)
        logits = model(window)[0, -1].float().cpu()
        probabilities = torch.softmax(logits / 0.8, dim=0)  # temperature
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text).decode(errors="replace")

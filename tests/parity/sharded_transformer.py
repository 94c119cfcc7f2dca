"""A transformer of two layers, changed by parallelize_module and trained for two steps: sharded_transformer.cpp."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               loss_parallel, parallelize_module)

from parity import numbers, only_f64
from sharded_run import on

WORDS, WIDE, HEADS, HIDDEN, SAMPLES, LENGTH = 11, 4, 2, 8, 2, 4


class Attention(nn.Module):
    """No bias for the keys: its gradient would be nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE)
        self.out = nn.Linear(WIDE, WIDE)

    def forward(self, x):
        q, k, v = (layer(x).view(SAMPLES, LENGTH, -1, WIDE // HEADS).transpose(1, 2)
                   for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(SAMPLES, LENGTH, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, HIDDEN), nn.Linear(HIDDEN, WIDE)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDE), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDE), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDE)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, WORDS, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


TENSOR_PLAN = {
    "words": RowwiseParallel(input_layouts=Replicate()),
    **{f"layers.*.attention.{name}": ColwiseParallel() for name in "qkv"},
    "layers.*.attention.out": RowwiseParallel(),
    "layers.*.mlp.up": ColwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(),
    "head": ColwiseParallel(use_local_output=False),
}
SEQUENCE_PLAN = {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm1": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    **{f"layers.*.attention.{name}": ColwiseParallel() for name in "qkv"},
    "layers.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.norm2": SequenceParallel(),
    "layers.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "layers.*.mlp.up": ColwiseParallel(),
    "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


def train_transformer(run, plan):
    """Two steps of SGD. The logits lie sharded over the words, and the loss is taken there. In float32 the gradients of q
    and k are 3e-6 away from those in float64 in a single process of torch: beyond the bound."""
    net = Transformer().to(run.dtype)
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(0.5 * numbers(1 + i, *parameter.shape))
    parallelize_module(net, run.mesh, plan)
    for name, parameter in net.named_parameters():
        run.see(f"param.{name}", parameter)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(2):
        tokens = run.plain_indices(1000 + step, (SAMPLES, LENGTH), WORDS)
        targets = run.plain_indices(2000 + step, (SAMPLES * LENGTH,), WORDS)
        optimizer.zero_grad()
        logits = net(tokens)
        run.see(f"step{step}.logits", logits)
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), targets)
            run.see(f"step{step}.loss", loss)
            loss.backward()
        for name, parameter in net.named_parameters():
            run.see(f"step{step}.grad.{name}", parameter.grad)
        optimizer.step()
    for name, parameter in net.named_parameters():
        run.see(f"end.{name}", parameter)


@on("line")
@only_f64
def transformer_tensor_parallel(run):
    train_transformer(run, TENSOR_PLAN)


@on("line")
@only_f64
def transformer_sequence_parallel(run):
    train_transformer(run, SEQUENCE_PLAN)

"""Operators on a mesh of two ranks, and on one of two by two: the cases of sharded_operators.cpp and sharded_layouts.cpp."""
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from sharded_run import on


# ---- pointwise ----

@on("line")
def gelu_uneven(run):
    x = run.tensor(1, (5, 6), Shard(0), grad=True)
    run.finish(F.gelu(x), x=x)


@on("line")
def add_shard_replicate(run):
    run.finish(run.tensor(1, (5, 6), Shard(0)) + run.tensor(2, (5, 6), Replicate()))


@on("line")
def add_two_shards(run):
    run.finish(run.tensor(1, (4, 6), Shard(0)) + run.tensor(2, (4, 6), Shard(1)))


@on("line")
def add_partials(run):
    run.finish(run.partial(1, (4, 6), Partial()) + run.partial(2, (4, 6), Partial()))


@on("line")
def add_partial_replicate(run):
    run.finish(run.partial(1, (4, 6), Partial()) + run.tensor(2, (4, 6), Replicate()))


@on("line")
def mul_broadcast(run):
    x, row = run.tensor(1, (5, 6), Shard(1), grad=True), run.tensor(2, (6,), Shard(0), grad=True)
    run.finish(x * row, x=x, row=row)


@on("line")
def mul_partial_by_number(run):
    run.finish(run.partial(1, (4, 6), Partial()) * 3)


@on("line")
def tanh_of_partial(run):
    run.finish(torch.tanh(run.partial(1, (4, 6), Partial())))


@on("line")
def where(run):
    x, y = run.tensor(1, (5, 6), Shard(0), grad=True), run.tensor(2, (5, 6), Shard(0), grad=True)
    run.finish(torch.where(x > y, x, y * 2), x=x, y=y)


# ---- products ----

@on("line")
def mm_rows(run):
    a, b = run.tensor(1, (5, 4), Shard(0), grad=True), run.tensor(2, (4, 6), Replicate(), grad=True)
    run.finish(torch.mm(a, b), a=a, b=b)


@on("line")
def mm_contracted(run):
    a, b = run.tensor(1, (5, 4), Shard(1), grad=True), run.tensor(2, (4, 6), Shard(0), grad=True)
    run.finish(torch.mm(a, b), a=a, b=b)


@on("line")
def addmm_columns(run):
    bias, a = run.tensor(1, (6,), Shard(0), grad=True), run.tensor(2, (5, 4), Replicate(), grad=True)
    b = run.tensor(3, (4, 6), Shard(1), grad=True)
    run.finish(torch.addmm(bias, a, b), bias=bias, a=a, b=b)


@on("line")
def bmm_batch(run):
    a, b = run.tensor(1, (4, 3, 5), Shard(0), grad=True), run.tensor(2, (4, 5, 2), Shard(0), grad=True)
    run.finish(torch.bmm(a, b), a=a, b=b)


@on("line")
def matmul_heads(run):
    a, b = run.tensor(1, (2, 4, 3, 5), Shard(1)), run.tensor(2, (2, 4, 5, 3), Shard(1))
    run.finish(torch.matmul(a, b))


@on("line")
def attention_heads(run):
    q, k, v = (run.tensor(tag, (2, 4, 3, 8), Shard(1), grad=True) for tag in (1, 2, 3))
    # torch's DTensor has no rule for the CPU's own kernel, and its other one cannot make the causal mask.
    with sdpa_kernel(SDPBackend.MATH):
        run.finish(F.scaled_dot_product_attention(q, k, v), q=q, k=k, v=v)


@on("line")
def linear_columns(run):
    x, w = run.tensor(1, (2, 4, 6), Replicate(), grad=True), run.tensor(2, (8, 6), Shard(0), grad=True)
    b = run.tensor(3, (8,), Shard(0), grad=True)
    run.finish(F.linear(x, w, b), x=x, w=w, b=b)


@on("line")
def linear_rows(run):
    x, w = run.tensor(1, (2, 4, 6), Shard(2), grad=True), run.tensor(2, (8, 6), Shard(1), grad=True)
    run.finish(F.linear(x, w), x=x, w=w)


@on("line")
def linear_batch(run):
    x, w = run.tensor(1, (4, 3, 6), Shard(0), grad=True), run.tensor(2, (8, 6), Replicate(), grad=True)
    b = run.tensor(3, (8,), Replicate(), grad=True)
    run.finish(F.linear(x, w, b), x=x, w=w, b=b)


# ---- layers and losses ----

@on("line")
def softmax_of_rows(run):
    x = run.tensor(1, (5, 6), Shard(0), grad=True)
    run.finish(torch.softmax(x, 1), x=x)


@on("line")
def softmax_over_shards(run):
    x = run.tensor(1, (5, 6), Shard(1), grad=True)
    run.finish(torch.softmax(x, 1), x=x)


@on("line")
def layer_norm_rows(run):
    x = run.tensor(1, (2, 5, 6), Shard(1), grad=True)
    w, b = run.tensor(2, (6,), Replicate(), grad=True), run.tensor(3, (6,), Replicate(), grad=True)
    run.finish(F.layer_norm(x, (6,), w, b), x=x, w=w, b=b)


@on("line")
def embedding_rows(run):
    table = run.tensor(1, (7, 4), Shard(0), grad=True)
    run.finish(F.embedding(run.indices(2, (2, 3), 7, Replicate()), table), table=table)


@on("line")
def embedding_columns(run):
    table = run.tensor(1, (7, 4), Shard(1), grad=True)
    run.finish(F.embedding(run.indices(2, (2, 3), 7, Replicate()), table), table=table)


@on("line")
def embedding_batch(run):
    table = run.tensor(1, (7, 4), Replicate(), grad=True)
    run.finish(F.embedding(run.indices(2, (4, 3), 7, Shard(0)), table), table=table)


@on("line")
def cross_entropy_over_shards(run):
    logits, targets = run.tensor(1, (6, 8), Shard(1), grad=True), run.indices(2, (6,), 8, Replicate())
    with loss_parallel():
        loss = F.cross_entropy(logits, targets)
        run.see("out", loss)
        loss.backward()
    run.see("grad.logits", logits.grad)


@on("line")
def cross_entropy_of_rows(run):
    logits, targets = run.tensor(1, (6, 5), Shard(0), grad=True), run.indices(2, (6,), 5, Shard(0))
    run.finish(F.cross_entropy(logits, targets, reduction="sum"), logits=logits)


# ---- reductions ----

@on("line")
def sum_all(run):
    x = run.tensor(1, (5, 6), Shard(0), grad=True)
    run.finish(x.sum(), x=x)


@on("line")
def sum_of_rows(run):
    run.finish(run.tensor(1, (5, 6), Shard(0)).sum(1, keepdim=True))


@on("line")
def sum_over_shards(run):
    x = run.tensor(1, (5, 6), Shard(0), grad=True)
    run.finish(x.sum(0), x=x)


@on("line")
def mean_over_shards(run):
    x = run.tensor(1, (4, 6), Shard(0), grad=True)
    run.finish(x.mean(0), x=x)


@on("line")
def mean_uneven(run):
    run.finish(run.tensor(1, (5, 6), Shard(0)).mean(0))


@on("line")
def amax_over_shards(run):
    run.finish(run.tensor(1, (5, 6), Shard(0)).amax(0))


@on("line")
def max_of_rows(run):
    values, indices = run.tensor(1, (5, 6), Shard(0)).max(1)
    run.see("values", values)
    run.see("indices", indices)


@on("line")
def norm_over_shards(run):
    run.finish(torch.linalg.vector_norm(run.tensor(1, (5, 6), Shard(0))))


# ---- views, cat, split ----

@on("line")
def transpose(run):
    run.finish(run.tensor(1, (5, 6), Shard(0)).transpose(0, 1))


@on("line")
def permute(run):
    run.finish(run.tensor(1, (2, 5, 3), Shard(1)).permute(2, 0, 1))


@on("line")
def view_splits(run):
    run.finish(run.tensor(1, (4, 6), Shard(0)).view(2, 2, 6))


@on("line")
def view_merges_outer(run):
    run.finish(run.tensor(1, (2, 4, 6), Shard(0)).view(8, 6))


@on("line")
def view_merges_inner(run):
    run.finish(run.tensor(1, (2, 4, 6), Shard(1)).view(8, 6))


@on("line")
def cat_columns(run):
    x, y = run.tensor(1, (5, 6), Shard(0), grad=True), run.tensor(2, (5, 2), Shard(0), grad=True)
    run.finish(torch.cat([x, y], 1), x=x, y=y)


@on("line")
def cat_over_shards(run):
    run.finish(torch.cat([run.tensor(1, (4, 6), Shard(0)), run.tensor(2, (2, 6), Shard(0))], 0))


@on("line")
def split_columns(run):
    for i, part in enumerate(run.tensor(1, (5, 6), Shard(0)).split(2, 1)):
        run.see(f"part{i}", part)


@on("line")
def select_column(run):
    run.finish(run.tensor(1, (5, 6), Shard(0)).select(1, 2))


# ---- redistribution ----

@on("line")
def shard_to_replicate(run):
    x = run.tensor(1, (5, 6), Shard(0), grad=True)
    run.finish(x.redistribute(placements=[Replicate()]), x=x)


@on("line")
def partial_to_replicate(run):
    run.finish(run.partial(1, (5, 6), Partial()).redistribute(placements=[Replicate()]))


@on("line")
def partial_to_shard(run):
    run.finish(run.partial(1, (5, 6), Partial()).redistribute(placements=[Shard(0)]))


@on("line")
def max_partial_to_replicate(run):
    run.finish(run.partial(1, (5, 6), Partial("max")).redistribute(placements=[Replicate()]))


@on("line")
def shard_to_shard(run):
    x = run.tensor(1, (5, 6), Shard(0), grad=True)
    run.finish(x.redistribute(placements=[Shard(1)]), x=x)


@on("line")
def replicate_to_shard(run):
    x = run.tensor(1, (5, 6), Replicate(), grad=True)
    run.finish(x.redistribute(placements=[Shard(0)]), x=x)


@on("line")
def empty_shard(run):
    run.finish(run.tensor(1, (1, 6), Shard(0)) * 2)


# ---- on two dimensions ----

@on("square")
def twice_sharded(run):
    run.finish(torch.tanh(run.tensor(1, (7, 6), Shard(0), Shard(0))))


@on("square")
def moved_2d(run):
    run.finish(run.tensor(1, (5, 6), Shard(0), Shard(1)).redistribute(placements=[Shard(1), Replicate()]))


@on("square")
def reduced_and_gathered_2d(run):
    run.finish(run.partial(1, (3, 6), Partial(), Shard(0)).redistribute(placements=[Replicate(), Replicate()]))


@on("square")
def mm_2d(run):
    a, b = run.tensor(1, (5, 4), Shard(0), Replicate(), grad=True), run.tensor(2, (4, 6), Replicate(), Shard(1), grad=True)
    run.finish(torch.mm(a, b), a=a, b=b)


@on("square")
def linear_2d(run):
    """Rows of the batch over the first dimension, of the weight over the second: data and tensor parallel."""
    x = run.tensor(1, (4, 3, 6), Shard(0), Replicate(), grad=True)
    w, b = run.tensor(2, (8, 6), Replicate(), Shard(0), grad=True), run.tensor(3, (8,), Replicate(), Shard(0), grad=True)
    run.finish(F.linear(x, w, b), x=x, w=w, b=b)


@on("square")
def sum_2d(run):
    run.finish(run.tensor(1, (5, 6), Shard(0), Shard(1)).sum(0))


@on("square")
def layer_norm_2d(run):
    x = run.tensor(1, (4, 6, 8), Shard(0), Shard(1), grad=True)
    w = run.tensor(2, (8,), Replicate(), Replicate(), grad=True)
    b = run.tensor(3, (8,), Replicate(), Replicate(), grad=True)
    run.finish(F.layer_norm(x, (8,), w, b), x=x, w=w, b=b)

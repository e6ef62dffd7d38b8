"""Trains a small model on the ranks of torch.distributed's nccl backend: collectives one by one, DDP, FSDP, a captured step.

Every loss is compared with one process that computes the whole batch and, with --against, with what --write has kept of a
run on another library. Ranks come from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; ranks beyond the GPUs share them.
The last line of rank 0 says "ok"; what is wrong is said in a line that begins with FAILED.
"""

import argparse
import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn

BATCH = 64
STEPS = 12
RATE = 0.1
# Sums of doubles in another order: what they may differ by.
NEAR = 1e-9
# Collectives that a collector is to see.
WATCHED = 100

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--write", metavar="FILE", help="keep the losses")
parser.add_argument("--against", metavar="FILE", help="losses of another run to compare with")
parser.add_argument("--watched", metavar="FOLDER", help="only %d collectives, once the file go is there; ready says that it may come" % WATCHED)
parser.add_argument("--pause", metavar="SECONDS", type=float, help="only DDP, in which rank 1 pauses for so long")
arguments = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)


def say(*words):
    if rank == 0:
        print(*words, flush=True)


def require(true, *words):
    """Ends the process, and with it soon the job, unless it is true."""
    if not true:
        print("FAILED rank", rank, *words, flush=True)
        sys.stdout.flush()
        os._exit(1)


def make_model():
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    return layers.to(device).double()


def batch(step):
    """Inputs (BATCH, 64) and labels (BATCH,) of a step, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 64, generator=generator, dtype=torch.float64)
    return inputs.to(device), torch.randint(0, 10, (BATCH,), generator=generator).to(device)


def share(step):
    """This rank's part of it."""
    inputs, labels = batch(step)
    part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return inputs[part], labels[part]


def mean_of_ranks(loss):
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def train(model, before_step=lambda step: None):
    """Losses of a model whose gradients its wrapper averages over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        before_step(step)
        inputs, labels = share(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(mean_of_ranks(loss))
    return losses


def train_alone():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_ddp():
    def before_step(step):
        if arguments.pause and step == STEPS // 2 and rank == 1:
            time.sleep(arguments.pause)

    return train(nn.parallel.DistributedDataParallel(make_model(), device_ids=[device.index]), before_step)


def train_fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    strategy = ShardingStrategy.FULL_SHARD
    return train(FullyShardedDataParallel(make_model(), sharding_strategy=strategy, device_id=device, use_orig_params=True))


def train_captured():
    """A whole step, with the all_reduce of its gradients, in a CUDA graph that is replayed on new batches."""
    model = make_model()
    parameters = list(model.parameters())
    inputs, labels = (value.clone() for value in share(0))

    def step():
        for parameter in parameters:
            parameter.grad = None
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= RATE * parameter.grad
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    start = [parameter.detach().clone() for parameter in parameters]
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = step()
    with torch.no_grad():
        for parameter, value in zip(parameters, start):
            parameter.copy_(value)
    losses = []
    for number in range(STEPS):
        for into, value in zip((inputs, labels), share(number)):
            into.copy_(value)
        graph.replay()
        losses.append(mean_of_ranks(loss))
    torch.cuda.synchronize()
    return losses


def collectives():
    x = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(x)
    require(x.eq(world * (world + 1) / 2).all(), "all_reduce", x)
    out = [torch.empty(10, device=device) for _ in range(world)]
    dist.all_gather(out, torch.full((10,), float(rank), device=device))
    require(all(part.eq(number).all() for number, part in enumerate(out)), "all_gather", out)
    mixed = torch.empty(world * 3, device=device)
    dist.all_to_all_single(mixed, torch.full((world * 3,), float(rank), device=device))
    require(mixed.eq(torch.arange(world, device=device).repeat_interleave(3)).all(), "all_to_all", mixed)
    part = torch.empty(5, device=device, dtype=torch.bfloat16)
    ones = torch.ones(5 * world, device=device, dtype=torch.bfloat16)
    dist.reduce_scatter_tensor(part, ones, op=dist.ReduceOp.AVG)
    require(part.eq(1).all(), "reduce_scatter", part)
    root = torch.full((17,), float(rank), device=device)
    dist.broadcast(root, world - 1)
    require(root.eq(world - 1).all(), "broadcast", root)
    total = torch.full((17,), 2.0, device=device)
    dist.reduce(total, 0)
    require(rank != 0 or total.eq(2 * world).all(), "reduce", total)
    if rank == 0:
        dist.send(torch.ones(7, device=device), 1)
    if rank == 1:
        message = torch.zeros(7, device=device)
        dist.recv(message, 0)
        require(message.eq(1).all(), "send and recv", message)
    dist.barrier()
    group = dist.new_group(list(range(world)))
    ones = torch.ones(3, device=device)
    dist.all_reduce(ones, group=group)
    require(ones.eq(world).all(), "all_reduce of a second group", ones)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    require([one["rank"] for one in objects] == list(range(world)), "all_gather_object", objects)


def be_watched(folder):
    x = torch.ones(1000, device=device)
    every = torch.empty(1000 * world, device=device)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(every, x)
    torch.cuda.synchronize()
    # By the store: the collector is to see nothing of it.
    store = dist.distributed_c10d._get_default_store()
    store.add("ready", 1)
    if rank == 0:
        while store.add("ready", 0) < world:
            time.sleep(0.01)
        open(os.path.join(folder, "ready"), "w").close()
    while not os.path.exists(os.path.join(folder, "go")):
        time.sleep(0.01)
    for number in range(WATCHED):
        if number % 2:
            dist.all_gather_into_tensor(every, x)
        else:
            dist.all_reduce(x)
    torch.cuda.synchronize()
    # What has just happened is on its way to the collector.
    time.sleep(0.5)


def difference(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def main():
    start = time.time()
    dist.init_process_group("nccl", device_id=device)
    say("torch", torch.__version__, "nccl", torch.cuda.nccl.version(), "ranks", world, "init %.1f s" % (time.time() - start))
    if arguments.watched:
        be_watched(arguments.watched)
        dist.destroy_process_group()
        say("ok %d collectives" % WATCHED)
        return
    wanted = train_alone()
    losses = {}
    if arguments.pause:
        kinds = {"ddp": train_ddp}
    else:
        collectives()
        say("collectives ok")
        kinds = {"ddp": train_ddp, "fsdp": train_fsdp, "captured": train_captured}
    for kind, run in kinds.items():
        losses[kind] = run()
        off = difference(losses[kind], wanted)
        require(off < NEAR, kind, "losses", losses[kind], "and of one process", wanted)
        say("%s: loss %.6f to %.6f, at most %.1e from one process" % (kind, losses[kind][0], losses[kind][-1], off))
    if arguments.against:
        with open(arguments.against) as file:
            others = json.load(file)
        for kind in losses:
            off = difference(losses[kind], others[kind])
            require(off < NEAR, kind, "losses", losses[kind], "and of the other library", others[kind])
            say("%s: at most %.1e from the other library" % (kind, off))
    if arguments.write and rank == 0:
        with open(arguments.write, "w") as file:
            json.dump(losses, file)
    torch.cuda.synchronize()
    start = time.time()
    dist.destroy_process_group()
    compared = ", as the other library's" if arguments.against else ""
    say("ok losses right%s; destroy_process_group returned after %.2f s" % (compared, time.time() - start))


with contextlib.suppress(KeyboardInterrupt):
    main()

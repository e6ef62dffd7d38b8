"""Trains a small model on the ranks of torch.distributed's nccl backend: collectives one by one, DDP, FSDP, a captured step.

Every loss, of models of several types, is compared with one process that computes the whole batch and, with --against, with
what --write has kept of a run on another library. Ranks come from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which
torchrun sets as well; ranks beyond the GPUs share them.
The last line of rank 0 says "ok"; what is wrong is said in a line that begins with FAILED.
"""

import argparse
import collections
import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn

STEPS = 12
RATE = 0.1
# Types of the models, and what losses may differ by: sums in another order are rounded otherwise, in every step.
TYPES = {"float64": (torch.float64, 1e-9), "float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 1e-3)}
# Collectives that a collector is to see.
WATCHED = 100
# Steps of each model that is observed: before the collector comes, in which DDP finds out how to cut gradients, and while it is there.
BEFORE, OBSERVED = 3, 50
# The longest that a collector is waited for, seconds.
PATIENCE = 120
# Methods of process groups, as versions of PyTorch call them, by what the library is called for.
METHODS = {
    "all_reduce": ["allreduce"],
    "all_gather": ["allgather", "_allgather_base", "all_gather_single"],
    "reduce_scatter": ["_reduce_scatter_base", "reduce_scatter_single"],
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--write", metavar="FILE", help="keep the losses")
parser.add_argument("--against", metavar="FILE", help="losses of another run to compare with")
parser.add_argument("--watched", metavar="FOLDER", help="only %d collectives, once the file go is there; ready says that it may come" % WATCHED)
parser.add_argument("--observed", metavar="FOLDER", help="only DDP and FSDP, first until the file go is there and then some steps, of which rank-N.json there tells how many collectives they called; ready names the processes")
parser.add_argument("--pause", metavar="SECONDS", type=float, help="only DDP, in which rank 1 pauses for so long")
arguments = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Every rank has as many.
BATCH = 64 // world * world
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


def make_model(dtype):
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    return layers.to(device, dtype)


def loss_of(model, inputs, labels):
    """Short types have no digits for how losses differ: those are worked out in float32 at least."""
    dtype = next(model.parameters()).dtype
    outputs = model(inputs.to(dtype))
    return nn.functional.cross_entropy(outputs.to(torch.promote_types(dtype, torch.float32)), labels)


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
    mean = loss.detach().to(torch.float64, copy=True)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


class Training:
    """A model whose gradients its wrapper averages over the ranks."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.losses = []

    def step(self, number):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, *share(number))
        loss.backward()
        self.optimizer.step()
        self.losses.append(mean_of_ranks(loss))


def train(model, before_step=lambda step: None):
    training = Training(model)
    for step in range(STEPS):
        before_step(step)
        training.step(step)
    return training.losses


def train_alone(dtype):
    model = make_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_ddp(dtype):
    return nn.parallel.DistributedDataParallel(make_model(dtype), device_ids=[device.index])


def with_fsdp(dtype):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    strategy = ShardingStrategy.FULL_SHARD
    return FullyShardedDataParallel(make_model(dtype), sharding_strategy=strategy, device_id=device, use_orig_params=True)


def train_ddp(dtype):
    def before_step(step):
        if arguments.pause and step == STEPS // 2 and rank == 1:
            time.sleep(arguments.pause)

    return train(with_ddp(dtype), before_step)


def train_fsdp(dtype):
    return train(with_fsdp(dtype))


def train_captured(dtype):
    """A whole step, with the all_reduce of its gradients, in a CUDA graph that is replayed on new batches."""
    model = make_model(dtype)
    parameters = list(model.parameters())
    inputs, labels = (value.clone() for value in share(0))

    def step():
        for parameter in parameters:
            parameter.grad = None
        loss = loss_of(model, inputs, labels)
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


def count_calls(counts):
    """Counts what process groups are called for from now on."""
    for operation, methods in METHODS.items():
        for method in methods:
            called = getattr(dist.ProcessGroup, method, None)

            def counted(group, *rest, operation=operation, called=called, **named):
                counts[operation] += 1
                return called(group, *rest, **named)

            if called:
                setattr(dist.ProcessGroup, method, counted)


def be_observed(folder):
    """Losses, by kind and type, of a training that a collector comes to and sees some steps of."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    counts = collections.Counter()
    count_calls(counts)

    def hooked(dtype):
        # Otherwise DDP's own code calls for it, where nothing counts.
        model = with_ddp(dtype)
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        return model

    kinds = {"ddp": hooked, "fsdp": with_fsdp}
    trainings = {kind + " " + name: Training(make(dtype)) for name, (dtype, _) in TYPES.items() for kind, make in kinds.items()}
    for training in trainings.values():
        for number in range(BEFORE):
            training.step(number)
    # What is trained before and after.
    other = Training(hooked(torch.float32))
    torch.cuda.synchronize()
    # By the store: the collector is to see nothing of it.
    store = dist.distributed_c10d._get_default_store()
    store.set("pid-%d" % rank, str(os.getpid()))
    begun, go = time.time(), os.path.join(folder, "go")
    if rank == 0:
        pids = [store.get("pid-%d" % number).decode() for number in range(world)]
        ready = os.path.join(folder, "ready")
        with open(ready + ".part", "w") as file:
            file.write(" ".join(pids))
        # Whoever sees it sees all of it.
        os.rename(ready + ".part", ready)
    turn = 0
    while True:
        if rank == 0:
            store.set("go-%d" % turn, str(int(os.path.exists(go))))
            require(time.time() - begun < PATIENCE, "nobody came")
        # All ranks go as many steps.
        if store.get("go-%d" % turn) == b"1":
            break
        other.step(turn)
        turn += 1

    def quiet():
        """A time at which nothing of this rank's runs, by whichever clock."""
        torch.cuda.synchronize()
        time.sleep(0.05)
        now = time.time_ns()
        time.sleep(0.05)
        return now

    start = quiet()
    counts.clear()
    for training in trainings.values():
        for number in range(BEFORE, BEFORE + OBSERVED):
            training.step(number)
    end, calls = quiet(), dict(counts)
    for number in range(10):
        other.step(number)
    torch.cuda.synchronize()
    with open(os.path.join(folder, "rank-%d.json" % rank), "w") as file:
        json.dump({"rank": rank, "pid": os.getpid(), "begin_ns": start, "end_ns": end, "calls": calls}, file)
    say("%d steps before the collector came; then %s" % (turn, calls))
    # What has just happened is on its way to the collector.
    time.sleep(0.5)
    return {kind: training.losses[:STEPS] for kind, training in trainings.items()}


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
    if arguments.observed:
        losses = be_observed(arguments.observed)
    else:
        losses = {}
        if not arguments.pause:
            collectives()
            say("collectives ok")
        kinds = {"ddp": train_ddp} if arguments.pause else {"ddp": train_ddp, "fsdp": train_fsdp, "captured": train_captured}
        for name, (dtype, _) in TYPES.items():
            losses.update({kind + " " + name: run(dtype) for kind, run in kinds.items()})
            if arguments.pause:
                break
    alone = {name: train_alone(dtype) for name, (dtype, _) in TYPES.items()}
    others = {}
    if arguments.against:
        with open(arguments.against) as file:
            others = json.load(file)
    for kind, found in losses.items():
        name = kind.split()[1]
        near = TYPES[name][1]
        off = difference(found, alone[name])
        require(off < near, kind, "losses", found, "and of one process", alone[name])
        say("%s: loss %.6f to %.6f, at most %.1e from one process" % (kind, found[0], found[-1], off))
        if others:
            off = difference(found, others[kind])
            require(off < near, kind, "losses", found, "and of the other library", others[kind])
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

"""Times all_reduce in CUDA graphs of 20 operations, captured on the stream that they run on, one row a size: of the library
that torch.distributed's nccl backend runs on, called through its C interface, and of PyTorch's symmetric memory.

The call through the C interface leaves out what torch.distributed adds: a stream of its own and two events an operation.
Ranks come from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. With --beside FILE the figures that --write has kept of a run
on another library stand in the same table, whose lines begin with "| ".
"""

import argparse
import ctypes
import json
import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

SIZES = [1 << power for power in (3, 10, 12, 15, 18, 20, 21, 22, 24, 26)]
PER_GRAPH = 20
REPLAYS = 30
# The numbers of nccl.h.
FLOAT32, SUM = 7, 0
ID_BYTES = 128

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--name", required=True, help="what the library is called in the table")
parser.add_argument("--write", metavar="FILE", help="keep the figures")
parser.add_argument("--beside", metavar="FILE", help="figures of a run on another library")
arguments = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * ID_BYTES)]


class Library:
    """The library's C interface: the one that PyTorch itself has loaded."""

    def __init__(self):
        # In the process already, under this name; LD_PRELOAD decides which it is.
        self.nccl = ctypes.CDLL("libnccl.so.2")
        self.nccl.ncclGetErrorString.restype = ctypes.c_char_p
        unique = UniqueId()
        if rank == 0:
            self.call("ncclGetUniqueId", ctypes.byref(unique))
        sent = torch.tensor(list(bytes(unique)), dtype=torch.uint8, device=device)
        dist.broadcast(sent, 0)
        ctypes.memmove(ctypes.byref(unique), bytes(sent.cpu().tolist()), ID_BYTES)
        self.comm = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(self.comm), ctypes.c_int(world), unique, ctypes.c_int(rank))

    def call(self, name, *values):
        code = getattr(self.nccl, name)(*values)
        if code != 0:
            raise RuntimeError("%s: %s" % (name, self.nccl.ncclGetErrorString(code).decode()))

    def all_reduce(self, tensor):
        address = ctypes.c_void_p(tensor.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        count = ctypes.c_size_t(tensor.numel())
        self.call("ncclAllReduce", address, address, count, ctypes.c_int(FLOAT32), ctypes.c_int(SUM), self.comm, stream)


def timed(function):
    """Median of the time of one operation in a graph of PER_GRAPH, microseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(PER_GRAPH):
            function()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / PER_GRAPH)
    return sorted(times)[len(times) // 2]


def cell(value):
    return "%.2f" % value if isinstance(value, float) else "-"


def main():
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD.group_name
    library = Library()
    ways = ["one_shot_all_reduce", "two_shot_all_reduce_"]
    figures = {}
    for size in SIZES:
        count = max(size // 4, 4)
        # Sums of zeros stay zeros, however often.
        ordinary = torch.zeros(count, device=device)
        row = figures[str(size)] = {arguments.name: timed(lambda: library.all_reduce(ordinary))}
        shared = symmetric.empty(count, dtype=torch.float32, device=device)
        symmetric.rendezvous(shared, group)
        shared.fill_(0)
        for way in ways:
            # Not every version has every way at every size: a cell stays empty.
            try:
                operation = getattr(torch.ops.symm_mem, way)
                row[way] = timed(lambda: operation(shared, "sum", group))
            except (RuntimeError, AttributeError) as error:
                row[way] = None
                if rank == 0:
                    print("%s of %d bytes: %s" % (way, size, str(error).splitlines()[0]), flush=True)
                torch.cuda.synchronize()
    others = {}
    if arguments.beside:
        with open(arguments.beside) as file:
            others = json.load(file)["micros"]
    if rank == 0:
        names = [arguments.name, *sorted({name for row in others.values() for name in row if name not in ways}), *ways]
        print("| %d GPUs, PyTorch %s, float32, sum, graph of %d, us" % (world, torch.__version__, PER_GRAPH))
        heads = [*names, arguments.name + " / best symm"]
        print("| %-10s" % "bytes" + "".join("%22s" % head for head in heads))
        for size, row in figures.items():
            row.update({name: value for name, value in others.get(size, {}).items() if name not in ways})
            best = min((row[way] for way in ways if row.get(way)), default=None)
            ratio = row[arguments.name] / best if best else None
            cells = [cell(row.get(name)) for name in names] + [cell(ratio)]
            print("| %-10s" % size + "".join("%22s" % text for text in cells), flush=True)
        if arguments.write:
            with open(arguments.write, "w") as file:
                json.dump({"ranks": world, "torch": torch.__version__, "micros": figures}, file)
    library.call("ncclCommDestroy", library.comm)
    dist.destroy_process_group()
    if rank == 0:
        print("ok %d sizes" % len(figures), flush=True)


main()

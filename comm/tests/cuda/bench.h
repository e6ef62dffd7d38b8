// What operations and calls take: eager, and in graphs of 20.
#pragma once

#include "rank.h"

// What the environment's TYPE names, as `TYPES` does; float32 without it.
static const struct Type* timed_type(void) {
  const char* wanted = getenv("TYPE");
  if (wanted == NULL) return &TYPES[F32];
  for (size_t t = 0; t < sizeof TYPES / sizeof TYPES[0]; t++)
    if (!strcmp(TYPES[t].name, wanted)) return &TYPES[t];
  fail("bench: no type %s", wanted);
  return NULL;
}

// `bytes`, as nccl-tests counts them: of the larger buffer of a rank.
static void time_sizes(struct Rank* r, enum Op op, const struct Type* type) {
  const double factor = op == ALL_REDUCE ? 2.0 * (ranks - 1) / ranks : op == SEND_RECV ? 1 : (double)(ranks - 1) / ranks;
  CUevent begin, end;
  CU(cuEventCreate, &begin, 0u);
  CU(cuEventCreate, &end, 0u);
  for (size_t bytes = min_size; bytes <= max_bytes; bytes *= (size_t)sizes_step) {
    const bool is_in_blocks = op == ALL_GATHER || op == REDUCE_SCATTER || op == ALLTOALL || op == GATHER || op == SCATTER;
    const size_t count = bytes / (size_t)type->size / (is_in_blocks ? (size_t)ranks : 1);
    if (count == 0) continue;
    const bool slow = processes && ranks > devices;
    const int iterations = slow ? 3 : bytes <= 65536 ? 100 : bytes <= (4 << 20) ? 30 : 5;
    for (int i = 0; i < 3; i++) enqueue(r, op, type->code, count, 0, 0, r->send, r->recv);
    CU(cuStreamSynchronize, r->stream);
    double best = 1e9, host = 1e9;
    for (int repeat = 0; repeat < 3; repeat++) {
      barrier();
      double start = now();
      for (int i = 0; i < iterations; i++) enqueue(r, op, type->code, count, 0, 0, r->send, r->recv);
      double called = (now() - start) / iterations;
      CU(cuStreamSynchronize, r->stream);
      double took = (now() - start) / iterations;
      if (took < best) best = took;
      if (called < host) host = called;
    }
    // A graph of 20.
    double graph_best = 0;
    if (bytes <= (4 << 20) && !slow) {
      CUgraph graph;
      CUgraphExec exec;
      CU(cuStreamBeginCapture, r->stream, 1u);
      for (int i = 0; i < 20; i++) enqueue(r, op, type->code, count, 0, 0, r->send, r->recv);
      CU(cuStreamEndCapture, r->stream, &graph);
      CU(cuGraphInstantiate, &exec, graph, 0ull);
      CU(cuGraphLaunch, exec, r->stream);
      CU(cuStreamSynchronize, r->stream);
      graph_best = 1e9;
      for (int repeat = 0; repeat < 5; repeat++) {
        barrier();
        CU(cuEventRecord, begin, r->stream);
        CU(cuGraphLaunch, exec, r->stream);
        CU(cuEventRecord, end, r->stream);
        CU(cuStreamSynchronize, r->stream);
        float milliseconds;
        CU(cuEventElapsedTime, &milliseconds, begin, end);
        if (milliseconds / 20e3 < graph_best) graph_best = milliseconds / 20e3;
      }
      CU(cuGraphExecDestroy, exec);
      CU(cuGraphDestroy, graph);
    }
    shared->numbers[r->rank] = best;
    barrier();
    if (r->rank == 0) {
      for (int i = 1; i < ranks; i++) best = shared->numbers[i] > best ? shared->numbers[i] : best;
      printf("row %s %d%s %zu eager_us %.2f host_us %.2f graph_us %.2f bus_GBps %.2f\n", OP_NAMES[op], ranks,
             processes ? "p" : "t", bytes, best * 1e6, host * 1e6, graph_best * 1e6, bytes / best * factor / 1e9);
      fflush(stdout);
    }
    barrier();
  }
}

static void run_bench(struct Rank* r) {
  double start = now();
  open_rank(r, 0);
  double init = now() - start;
  buffers(r, max_bytes);
  // For copy engines.
  if (getenv("WINDOWS") != NULL) {
    void* window;
    NC(CommWindowRegister(r->comm, (void*)r->send, max_bytes, &window, 1));
    NC(CommWindowRegister(r->comm, (void*)r->recv, max_bytes, &window, 1));
  }
  if (r->rank == 0) printf("init %.0f ms\n", init * 1e3);
  for (int op = 0; op < OPS; op++)
    if (is_wanted(op, op == ALL_REDUCE)) time_sizes(r, op, timed_type());
  NC(CommDestroy(r->comm));
}

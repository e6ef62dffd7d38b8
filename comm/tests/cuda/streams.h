// Operations of one communicator in several streams: each comes after the one before, whatever stream that was in and whether it is still there.
#pragma once

#include "rank.h"

static void multiply(struct Rank* r, CUstream stream) {
  NC(AllReduce((void*)r->recv, (void*)r->recv, 2, F32, SUM, r->comm, stream));
}
// By another kernel: the graph that was launched last is another one in turn.
static void add_others(struct Rank* r, CUstream stream) {
  NC(AllReduce((void*)r->send, (void*)r->send, 2, BF16, SUM, r->comm, stream));
}

static void run_streams(struct Rank* r) {
  enum { ROUNDS = 8, BEFORE = 5, AFTER = 2 };
  open_rank(r, 0);
  buffers(r, 4096);
  for (int round = 0; round < ROUNDS; round++) {
    const bool captured = round % 2, is_gone = round / 2 % 2, is_new = round < ROUNDS / 2;
    if (round > 0 && is_new) {
      barrier();
      r->comm = new_comm(r, 0);
    }
    CUstream first, second, last;
    CU(cuStreamCreate, &first, 1u);
    CU(cuStreamCreate, &second, 1u);
    CU(cuStreamCreate, &last, 1u);
    // Pinned: a copy to other memory holds its context until it is over, and ranks may share one.
    float *const ones = (float*)r->in, *const found = (float*)r->out;
    enum { BYTES = 2 * sizeof(float) };
    ones[0] = ones[1] = 1;
    CU(cuMemcpyHtoDAsync, r->recv, ones, (size_t)BYTES, first);
    CU(cuStreamSynchronize, first);
    barrier();
    if (r->rank == 0) printf("round %d\n", round);
    // All calls of the others are over before the last one's first: none waits for anything.
    const bool is_late = r->rank == ranks - 1;
    if (is_late) barrier();
    for (int i = 0; i < BEFORE; i++) {
      add_others(r, first);
      multiply(r, first);
      if (i % 2) add_others(r, first);
    }
    if (is_gone) CU(cuStreamDestroy, first);
    CUgraph graph;
    CUgraphExec exec;
    if (captured) CU(cuStreamBeginCapture, second, 1u);
    for (int i = 0; i < AFTER; i++) multiply(r, second);
    if (captured) {
      CU(cuStreamEndCapture, second, &graph);
      // To make a graph and to upload it the driver may wait for all that the GPU has to do, which another rank's kernels may share.
      if (!is_late) barrier();
      barrier();
      CU(cuGraphInstantiate, &exec, graph, 0ull);
      CU(cuGraphUpload, exec, second);
      barrier();
      // And so are those with replays, the first of them behind an eager operation.
      if (is_late) barrier();
      multiply(r, last);
      CU(cuGraphLaunch, exec, second);
    }
    multiply(r, last);
    // The replay of a graph that is older than what is before it.
    if (captured) CU(cuGraphLaunch, exec, second);
    multiply(r, last);
    const float wanted = powf((float)ranks, BEFORE + AFTER + 2 + (captured ? AFTER + 1 : 0));
    CU(cuMemcpyDtoHAsync, found, r->recv, (size_t)BYTES, last);
    if (!is_late) barrier();
    CU(cuStreamSynchronize, last);
    for (int i = 0; i < 2; i++)
      if (found[i] != wanted)
        fail("streams: round %d (%s, the first stream %s): %g, not %g", round, captured ? "captured" : "eager", is_gone ? "destroyed" : "kept",
             (double)found[i], (double)wanted);
    if (captured) {
      CU(cuGraphExecDestroy, exec);
      CU(cuGraphDestroy, graph);
    }
    if (!is_gone) CU(cuStreamDestroy, first);
    CU(cuStreamDestroy, second);
    CU(cuStreamDestroy, last);
    if (round < ROUNDS / 2 - 1 || round == ROUNDS - 1) NC(CommDestroy(r->comm));
  }
  barrier();
  if (r->rank == 0) printf("ok %d rounds\n", ROUNDS);
}

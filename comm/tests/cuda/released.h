// Whatever an operation waits for, ncclCommAbort and ncclCommRevoke return within a second, and the stream goes on.
#pragma once

#include "rank.h"

static const char* WAITS[] = {"a short all_reduce", "a long all_reduce", "a receive", "a long send", "a graph"};
enum { WAIT_CASES = sizeof WAITS / sizeof WAITS[0] };
static const size_t LONG_COUNT = 4 << 20;

// What the other ranks never come to.
static void wait_in_vain(struct Rank* r, int what) {
  void *send = (void*)r->send, *recv = (void*)r->recv;
  CUgraph graph;
  CUgraphExec exec;
  switch (what) {
    case 0: NC(AllReduce(send, recv, 1000, F32, 0, r->comm, r->stream)); break;
    case 1: NC(AllReduce(send, recv, LONG_COUNT, F32, 0, r->comm, r->stream)); break;
    case 2: NC(Recv(recv, 1000, F32, 1, r->comm, r->stream)); break;
    case 3: NC(Send(send, LONG_COUNT, F32, 1, r->comm, r->stream)); break;
    default:
      CU(cuStreamBeginCapture, r->stream, 1u);
      NC(AllReduce(send, recv, 1000, F32, 0, r->comm, r->stream));
      CU(cuStreamEndCapture, r->stream, &graph);
      CU(cuGraphInstantiate, &exec, graph, 0ull);
      CU(cuGraphLaunch, exec, r->stream);
      CU(cuGraphDestroy, graph);
  }
}

static void run_released(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, 32 << 20);
  double worst = 0;
  for (int round = 0; round < 2 * WAIT_CASES; round++) {
    const bool revokes = round % 2;
    // On the stream in which the one before was released.
    if (round > 0) r->comm = new_comm(r, 0);
    reduce_once(r);
    barrier();
    if (r->rank == 0) {
      wait_in_vain(r, round / 2);
      usleep(200000);
      if (CALL(cuStreamQuery, r->stream) != CUDA_ERROR_NOT_READY) fail("released: %s does not wait", WAITS[round / 2]);
      const double start = now();
      if (revokes) NC(CommRevoke(r->comm, 0));
      else NC(CommAbort(r->comm));
      CU(cuStreamSynchronize, r->stream);
      const double took = now() - start;
      if (took > 1) fail("released: %s of %s took %.2f s", revokes ? "revoke" : "abort", WAITS[round / 2], took);
      if (took > worst) worst = took;
      if (revokes) NC(CommDestroy(r->comm));
    }
    barrier();
    if (r->rank != 0) NC(CommAbort(r->comm));
    barrier();
  }
  if (r->rank == 0) printf("ok %d waits released, the longest after %.0f ms\n", 2 * WAIT_CASES, worst * 1e3);
}

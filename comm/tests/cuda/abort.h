// Communicators that are aborted, and ranks that die.
#pragma once
#include "rank.h"

// Rank 0's kernel begins when its communicator has been aborted, and all that can be given back has been.
static void run_late(struct Rank* r) {
  static atomic_int gate;
  const Comm comm = new_comm(r, 3);
  barrier();
  if (r->rank == 0) {
    CU(cuLaunchHostFunc, r->stream, hold, (void*)&gate);
    NC(AllReduce((void*)r->send, (void*)r->recv, 1000, F32, 0, comm, r->stream));
    NC(CommAbort(comm));
    // A thread of the library gives memory back.
    usleep(100000);
    atomic_store(&gate, 1);
    CU(cuStreamSynchronize, r->stream);
  }
  barrier();
  if (r->rank != 0) NC(CommAbort(comm));
  barrier();
}

// Rank 0 waits for the others in vain.
static void run_abort(struct Rank* r) {
  open_rank(r, 0);
  Comm first = r->comm;
  const Comm second = new_comm(r, 1);
  buffers(r, 8 << 20);
  CUstream other;
  CU(cuStreamCreate, &other, 1u);
  enqueue(r, ALL_REDUCE, F32, 1000, 0, 0, r->send, r->recv);
  r->comm = second;
  enqueue(r, SEND_RECV, F32, 1000000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  barrier();
  if (r->rank == 0) {
    NC(AllReduce((void*)r->send, (void*)r->recv, 1000000, F32, 0, first, r->stream));
    CUstream stream = r->stream;
    r->stream = other;
    enqueue(r, SEND_RECV, F32, 1000000, 0, 0, r->send, r->recv + (4 << 20));
    r->stream = stream;
    usleep(300000);
    if (CALL(cuStreamQuery, r->stream) != CUDA_ERROR_NOT_READY) fail("abort: the operation is not stuck");
    double start = now();
    NC(CommAbort(first));
    double aborted = now();
    CU(cuStreamSynchronize, r->stream);
    double done = now();
    if (CALL(cuStreamQuery, other) != CUDA_ERROR_NOT_READY) fail("abort: the other communicator's operation is not stuck");
    NC(CommAbort(second));
    double last = now();
    CU(cuStreamSynchronize, other);
    printf("%s abort returned in %.1f ms (another communicator stuck), stream free %.1f ms later; the other's abort %.1f ms\n",
           last - start < 1 ? "ok" : "FAILED", (aborted - start) * 1e3, (done - aborted) * 1e3, (last - done) * 1e3);
    fflush(stdout);
    barrier();
  } else {
    barrier();
    NC(CommAbort(first));
    NC(CommAbort(second));
  }
  barrier();
  run_late(r);
  // And again from the beginning.
  open_rank(r, 2);
  reduce_once(r);
  barrier();
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok a new communicator works after the aborts\n");
}

// The last rank dies while the others wait for it (processes only).
static void run_death(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, 8 << 20);
  reduce_once(r);
  barrier();
  if (r->rank == ranks - 1) {
    usleep(200000);
    kill(getpid(), SIGKILL);
  }
  double start = now();
  NC(AllReduce((void*)r->send, (void*)r->recv, 1000000, F32, 0, r->comm, r->stream));
  Code async = 0;
  while (now() - start < 20 && async == 0) {
    NC(CommGetAsyncError(r->comm, &async));
    usleep(1000);
  }
  double noticed = now() - start - 0.2;
  char text[200];
  snprintf(text, sizeof text, "%s", nccl.GetLastError(r->comm));
  CU(cuStreamSynchronize, r->stream);
  double free = now() - start - 0.2;
  start = now();
  NC(CommAbort(r->comm));
  double ended = now() - start;
  if (r->rank == 0)
    printf("%s death of a rank: error %d after %.0f ms, stream free after %.0f ms, abort in %.0f ms: %s\n",
           async && ended < 1 ? "ok" : "FAILED", async, noticed * 1e3, free * 1e3, ended * 1e3, text);
}

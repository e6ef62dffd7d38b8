// Communicators that come and go beside a kernel that waits: to give their memory back the driver waits for it.
#pragma once
#include "rank.h"

// Of the driver without a GPU (libcuda.cpp, ringsight_mock_memory); zeros elsewhere.
struct Held { unsigned long long waited, allocations, opened, registered; };
static struct Held held(void) {
  static void (*figures)(struct Held*);
  if (figures == NULL) *(void**)&figures = dlsym(RTLD_DEFAULT, "ringsight_mock_memory");
  struct Held now = {0};
  if (figures != NULL) figures(&now);
  return now;
}

// Waits until so much is left.
static void await_held(struct Held wanted, const char* when) {
  struct Held left;
  double start = now();
  while (left = held(), left.allocations != wanted.allocations || left.opened != wanted.opened || left.registered != wanted.registered) {
    if (now() - start > 20)
      fail("%s: %llu allocations, %llu open ones, %llu ranges, not %llu, %llu, %llu", when, left.allocations, left.opened,
           left.registered, wanted.allocations, wanted.opened, wanted.registered);
    usleep(10000);
  }
}

// A communicator that is made, used, and destroyed or aborted; how long the latter takes.
static double come_and_go(struct Rank* r, int which, bool aborted) {
  open_rank(r, which);
  reduce_once(r);
  barrier();
  double start = now();
  if (aborted) NC(CommAbort(r->comm));
  else NC(CommDestroy(r->comm));
  double took = now() - start;
  barrier();
  return took;
}

// `kept`: nothing is given back, and new communicators get what ended ones left.
static void run_ended(struct Rank* r, bool kept) {
  // More than there are graphs for.
  enum { TIMES = 20 };
  // Whoever waits for the kernel waits for good.
  alarm(120);
  open_rank(r, 0);
  CUstream stream = r->stream;
  Comm stuck = r->comm;
  buffers(r, 1 << 20);
  reduce_once(r);
  barrier();
  struct Held before = held();
  barrier();
  come_and_go(r, 1, false);
  if (!kept) await_held(before, "a communicator has ended, and nothing runs");
  barrier();

  if (r->rank == 0) {
    NC(AllReduce((void*)r->send, (void*)r->recv, 1000, F32, 0, stuck, stream));
    usleep(100000);
  }
  barrier();
  double longest = 0;
  struct Held first = {0};
  for (int i = 0; i < TIMES; i++) {
    double took = come_and_go(r, 1 + i % 3, false);
    longest = took > longest ? took : longest;
    usleep(20000);
    if (i == 0) first = held();
    barrier();
  }
  struct Held last = held();
  if (last.allocations != first.allocations)
    fail("%llu allocations after %d communicators, %llu after one", last.allocations, TIMES, first.allocations);
  barrier();
  // What an abort leaves to kernels of other processes is theirs until this one ends.
  double took = come_and_go(r, 1, !processes);
  longest = took > longest ? took : longest;
  if (r->rank == 0 && CALL(cuStreamQuery, stream) != CUDA_ERROR_NOT_READY) fail("the operation is not stuck");
  if (held().waited != 0) fail("%llu calls have waited for a kernel", held().waited);
  if (longest > 10) fail("the end of a communicator took %.1f s", longest);
  barrier();

  if (r->rank != 0) NC(AllReduce((void*)r->send, (void*)r->recv, 1000, F32, 0, stuck, stream));
  CU(cuStreamSynchronize, stream);
  if (!kept) await_held(before, "the kernel has ended");
  if (kept && held().allocations != first.allocations) fail("%llu allocations, %llu before", held().allocations, first.allocations);
  barrier();
  NC(CommDestroy(stuck));
  barrier();
  if (r->rank == 0) printf("ok %d communicators have ended beside a kernel that waits, none in more than %.0f s\n", TIMES + 1, 10.0);
}

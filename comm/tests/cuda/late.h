// Ranks that come late, and what the watchdog says of them.
#pragma once

#include "fault.h"
#include "rank.h"

// The last rank comes late: to the third replay of a graph, with the fourth queued behind it on the others; to an operation
// whose stream is busy; and to one that it has not called.
static void run_awaited(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, 1 << 20);
  const bool late = r->rank == ranks - 1;
  CUgraph graph;
  CUgraphExec exec;
  CU(cuStreamBeginCapture, r->stream, 1u);
  enqueue(r, ALL_REDUCE, F32, 5000, 0, 0, r->send, r->recv);
  enqueue(r, ALL_REDUCE, F32, 10, 0, 0, r->send, r->recv);
  CU(cuStreamEndCapture, r->stream, &graph);
  CU(cuGraphInstantiate, &exec, graph, 0ull);
  CU(cuGraphDestroy, graph);
  for (int i = 0; i < 2; i++) CU(cuGraphLaunch, exec, r->stream);
  CU(cuStreamSynchronize, r->stream);
  barrier();
  if (late) await_verdict("Verdict: NOT_LAUNCHED (late): ", ", replay 3\n");
  for (int i = 0; i < 2; i++) CU(cuGraphLaunch, exec, r->stream);
  CU(cuStreamSynchronize, r->stream);
  barrier();
  atomic_int flag = 0;
  if (late) CU(cuLaunchHostFunc, r->stream, hold, (void*)&flag);
  CU(cuGraphLaunch, exec, r->stream);
  if (late) {
    await_verdict("Verdict: QUEUED_BEHIND_COMPUTE (late): ", ", replay 5\n");
    atomic_store(&flag, 1);
  }
  CU(cuStreamSynchronize, r->stream);
  CU(cuGraphExecDestroy, exec);
  barrier();
  if (late) await_verdict("Verdict: NOT_LAUNCHED (late): ", "AllGather");
  enqueue(r, ALL_GATHER, F32, 1000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok three times late\n");
}

// One rank comes late to a group in which all send to all, themselves included: the others are done with what they have with each other,
// and wait in the same launch for the one that is late.
static void run_latecomer(struct Rank* r) {
  enum { COUNT = 1000, LONG_AFTER_US = 2000000 };
  open_rank(r, 0);
  buffers(r, 8 << 20);
  reduce_once(r);
  barrier();
  if (r->rank == ranks - 1) {
    await_verdict("Verdict: NOT_LAUNCHED (late): ", "");
    // By then what does not move counts as stuck.
    usleep(LONG_AFTER_US);
    const char* hang = strstr(logged(), "(hang)");
    if (hang != NULL) fail("latecomer: while ranks wait for the last one: %s", hang);
  }
  NC(GroupStart());
  for (int peer = 0; peer < ranks; peer++) {
    const size_t at = (size_t)peer * COUNT * 4;
    NC(Send((void*)(r->send + at), COUNT, TYPES[F32].code, peer, r->comm, r->stream));
    NC(Recv((void*)(r->recv + at), COUNT, TYPES[F32].code, peer, r->comm, r->stream));
  }
  NC(GroupEnd());
  CU(cuStreamSynchronize, r->stream);
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok once late\n");
}

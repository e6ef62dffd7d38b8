// One rank comes late to a group in which all send to all, themselves included: the others are done with what they have with each other,
// and wait in the same launch for the one that is late.
#pragma once

#include "rank.h"

static void run_latecomer(struct Rank* r) {
  enum { COUNT = 10058, LONG_AFTER_US = 2000000 };
  open_rank(r, 0);
  buffers(r, 8 << 20);
  enqueue(r, ALL_REDUCE, F32, 1000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  barrier();
  if (r->rank == ranks - 1) {
    await_verdict("Verdict: NOT_LAUNCHED (late): ", "");
    // By then what does not move counts as stuck.
    usleep(LONG_AFTER_US);
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

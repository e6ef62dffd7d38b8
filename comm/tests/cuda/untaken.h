// A send ends before its message is taken. The sender's communicator may end then, and its memory be another's, which the receiver must not
// write to any more when it comes to it.
#pragma once
#include "rank.h"

static void run_untaken(struct Rank* r) {
  enum { MESSAGES = 5, COUNT = 1000 };
  // Taken within the time for which the sender waits for that, and after it.
  static const int held_ms[] = {300, 3000};
  double took[2];
  for (int round = 0; round < 2; round++) {
    atomic_int gates[2] = {0, 0};
    if (round == 0) {
      open_rank(r, 0);
      buffers(r, 1 << 20);
    } else {
      r->comm = new_comm(r, 0);
    }
    struct Case c = {SEND_RECV, &TYPES[F32], COUNT, 0, 0, 1};
    fill(r, &c, r->in);
    CU(cuMemcpyHtoDAsync, r->send, r->in, (size_t)COUNT * 4, r->stream);
    CU(cuStreamSynchronize, r->stream);
    barrier();
    Comm before = r->comm;
    if (r->rank == 0) {
      NC(Send((void*)r->send, COUNT, F32, 1, r->comm, r->stream));
      CU(cuStreamSynchronize, r->stream);
    } else {
      CU(cuLaunchHostFunc, r->stream, hold, (void*)&gates[0]);
      NC(Recv((void*)r->recv, COUNT, F32, 0, r->comm, r->stream));
    }
    barrier();
    const double start = now();
    if (r->rank == 0) {
      NC(CommDestroy(before));
      took[round] = now() - start;
      if ((round == 1 && took[round] < 0.2) || took[round] > 20) fail("untaken: the sender's end took %.2f s", took[round]);
      NC(GetUniqueId(&shared->id[1]));
    } else {
      usleep((useconds_t)held_ms[round] * 1000);
      if (round == 0) {
        shared->numbers[1] = now();
        atomic_store(&gates[0], 1);
      }
    }
    barrier();
    if (r->rank == 0 && round == 0 && start + took[round] < shared->numbers[1]) fail("untaken: the sender ended before its message was taken");
    // With memory that was had before, if any is left.
    NC(CommInitRank(&r->comm, ranks, shared->id[1], r->rank));
    barrier();
    if (r->rank == 1) {
      atomic_store(&gates[0], 1);
      CU(cuStreamSynchronize, r->stream);
      NC(CommDestroy(before));
      CU(cuLaunchHostFunc, r->stream, hold, (void*)&gates[1]);
    }
    barrier();
    // More than there are slots, before the first is taken.
    for (int i = 0; i < MESSAGES; i++) {
      if (r->rank == 0) {
        c.salt = 10 + i;
        fill(r, &c, r->in);
        CU(cuMemcpyHtoDAsync, r->send, r->in, (size_t)COUNT * 4, r->stream);
        NC(Send((void*)r->send, COUNT, F32, 1, r->comm, r->stream));
      } else {
        NC(Recv((void*)(r->recv + (CUdeviceptr)i * COUNT * 4), COUNT, F32, 0, r->comm, r->stream));
      }
      if (i == 2) {
        usleep(50000);
        barrier();
        atomic_store(&gates[1], 1);
      }
      if (r->rank == 0) CU(cuStreamSynchronize, r->stream);
    }
    CU(cuStreamSynchronize, r->stream);
    if (r->rank == 1) {
      CU(cuMemcpyDtoHAsync, r->out, r->recv, (size_t)MESSAGES * COUNT * 4, r->stream);
      CU(cuStreamSynchronize, r->stream);
      for (int i = 0; i < MESSAGES; i++)
        for (int at = 0; at < COUNT; at++) {
          const float want = (float)element(10 + i, 0, (size_t)at, false), is = ((float*)r->out)[i * COUNT + at];
          if (is != want) fail("untaken: message %d: element %d is %g, not %g", i, at, is, want);
        }
    }
    barrier();
    NC(CommDestroy(r->comm));
    barrier();
  }
  if (r->rank == 0) printf("ok ends after %.2f s and %.2f s\n", took[0], took[1]);
}

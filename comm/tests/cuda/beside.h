// What a caller does while another thread captures in the mode in which no thread of the process may do what might wait.
#pragma once
#include "rank.h"

enum { IS_CAPTURED = 1 };
struct Beside {
  int device;
  CUdeviceptr place;
  CUstream stream;
  CUgraph graph;
  volatile bool begun, stop;
};

static void* capture_beside(void* argument) {
  struct Beside* beside = argument;
  make_current(beside->device);
  CU(cuStreamCreate, &beside->stream, 1u);
  CU(cuStreamBeginCapture, beside->stream, 0u);
  CU(cuMemsetD8Async, beside->place, 0, (size_t)16, beside->stream);
  beside->begun = true;
  while (!beside->stop) usleep(1000);
  CU(cuStreamEndCapture, beside->stream, &beside->graph);
  return NULL;
}
static void undisturbed(struct Beside* beside, const char* by) {
  int status = 0;
  CU(cuStreamIsCapturing, beside->stream, &status);
  if (status != IS_CAPTURED) fail("beside: a capture of another thread is disturbed by %s", by);
}

static void run_beside(struct Rank* r) {
  const size_t bytes = 4 << 20;
  open_rank(r, 0);
  buffers(r, bytes);
  reduce_once(r);
  struct Rank other = *r;
  open_rank(&other, 1);
  enqueue(&other, ALL_REDUCE, F32, 1000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, other.stream);
  barrier();
  struct Beside beside = {.device = r->device, .place = r->scalar};
  pthread_t thread;
  pthread_create(&thread, NULL, capture_beside, &beside);
  while (!beside.begun) usleep(1000);
  barrier();
  undisturbed(&beside, "nothing");
  enqueue(r, ALL_REDUCE, F32, 1000, 0, 0, r->send, r->recv);
  undisturbed(&beside, "a short operation");
  enqueue(r, ALL_REDUCE, F32, bytes / 4, 0, 0, r->send, r->recv);
  undisturbed(&beside, "a long one");
  enqueue(r, SEND_RECV, F32, bytes / 4, 0, 0, r->send, r->recv);
  undisturbed(&beside, "messages");
  Code error;
  NC(CommGetAsyncError(r->comm, &error));
  undisturbed(&beside, "the question for errors");
  void *memory, *handle;
  NC(MemAlloc(&memory, bytes));
  undisturbed(&beside, "memory");
  NC(CommRegister(r->comm, memory, bytes, &handle));
  undisturbed(&beside, "a registration");
  NC(CommDeregister(r->comm, handle));
  undisturbed(&beside, "the end of a registration");
  NC(MemFree(memory));
  undisturbed(&beside, "the end of memory");
  struct Rank third = *r;
  third.comm = new_comm(r, 2);
  undisturbed(&beside, "a new communicator");
  enqueue(&third, ALL_REDUCE, F32, 1000, 0, 0, r->send, r->recv);
  undisturbed(&beside, "its first operation");
  NC(CommDestroy(other.comm));
  undisturbed(&beside, "a communicator's end");
  NC(CommAbort(third.comm));
  undisturbed(&beside, "a communicator's abort");
  // What they leave to other threads.
  usleep(300000);
  undisturbed(&beside, "what a communicator leaves");
  barrier();
  beside.stop = true;
  pthread_join(thread, NULL);
  // To wait for a stream is nothing that may be done while the other rank's thread captures.
  barrier();
  CU(cuStreamSynchronize, r->stream);
  CU(cuGraphDestroy, beside.graph);
  NC(CommDestroy(r->comm));
  if (r->rank == 0) printf("ok a capture beside them is not disturbed\n");
}

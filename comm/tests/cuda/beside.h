// Operations, and a communicator's end, while another thread captures in the mode in which no thread of the process may do what might wait.
#pragma once
#include "rank.h"

struct Beside {
  int device;
  CUdeviceptr place;
  CUgraph graph;
  volatile bool begun, stop;
};

static void* capture_beside(void* argument) {
  struct Beside* beside = argument;
  CUstream stream;
  make_current(beside->device);
  CU(cuStreamCreate, &stream, 1u);
  CU(cuStreamBeginCapture, stream, 0u);
  CU(cuMemsetD8Async, beside->place, 0, (size_t)16, stream);
  beside->begun = true;
  while (!beside->stop) usleep(1000);
  // Fails if anybody has disturbed it.
  CU(cuStreamEndCapture, stream, &beside->graph);
  return NULL;
}

static void run_beside(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, 1 << 20);
  enqueue(r, ALL_REDUCE, F32, 1000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  Comm first = r->comm;
  CUstream stream = r->stream;
  open_rank(r, 1);
  enqueue(r, ALL_REDUCE, F32, 1000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  barrier();
  struct Beside beside = {.device = r->device, .place = r->scalar};
  pthread_t thread;
  pthread_create(&thread, NULL, capture_beside, &beside);
  while (!beside.begun) usleep(1000);
  barrier();
  NC(AllReduce((void*)r->send, (void*)r->recv, 1000, F32, 0, first, stream));
  NC(CommDestroy(r->comm));
  // What it leaves to other threads.
  usleep(300000);
  barrier();
  beside.stop = true;
  pthread_join(thread, NULL);
  CU(cuStreamSynchronize, stream);
  barrier();
  CU(cuGraphDestroy, beside.graph);
  NC(CommDestroy(first));
  if (r->rank == 0) printf("ok a capture beside them is not disturbed\n");
}

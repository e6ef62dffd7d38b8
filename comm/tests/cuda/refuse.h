// Buffers and streams that a GPU cannot use.
#pragma once
#include "rank.h"

// A call with a buffer that the rank's GPU cannot use: refused with the argument's name.
static void refused(struct Rank* r, const char* argument, const void* send, void* recv) {
  const Code code = nccl.AllReduce(send, recv, 100, F32, 0, r->comm, r->stream);
  const char* text = nccl.GetLastError(r->comm);
  char gpu[20];
  snprintf(gpu, sizeof gpu, "GPU %d", r->device);
  if (code != 4 || !strstr(text, argument) || !strstr(text, gpu)) fail("refuse: rank %d: %s: %d: %s", r->rank, argument, code, text);
}

// A call that says what is wrong.
static void says(Code code, const char* words, const char* what) {
  const char* text = nccl.GetLastError(NULL);
  if (code == 0 || !strstr(text, words)) fail("refuse: %s: %d: %s", what, code, text);
}

// Streams of another device, and a group in which some are captured.
static int refuse_streams(struct Rank* r) {
  int number = 0;
  void *send = (void*)r->send, *recv = (void*)r->recv;
  if (devices > 1) {
    CUstream elsewhere;
    make_current((r->device + 1) % devices);
    CU(cuStreamCreate, &elsewhere, 1u);
    make_current(r->device);
    char words[80];
    snprintf(words, sizeof words, "the communicator's is GPU %d", r->device);
    says(nccl.AllReduce(send, recv, 100, F32, 0, r->comm, elsewhere), words, "a stream of another GPU");
    number++;
  }
  CUstream captured;
  CUgraph graph;
  CU(cuStreamCreate, &captured, 1u);
  CU(cuStreamBeginCapture, captured, 1u);
  NC(GroupStart());
  NC(AllReduce(send, recv, 100, F32, 0, r->comm, r->stream));
  says(nccl.AllReduce(send, recv, 100, F32, 0, r->comm, captured), "in the same capture, or in none", "a group that is captured in part");
  says(nccl.GroupEnd(), "in the same capture, or in none", "the end of that group");
  CU(cuStreamEndCapture, captured, &graph);
  CU(cuGraphDestroy, graph);
  return number + 1;
}

// Memory may be given back by a thread that has not used a GPU.
static void* free_elsewhere(void* memory) {
  NC(MemFree(memory));
  return NULL;
}

// Buffers of other devices and of ordinary host memory are refused before anything runs; pinned memory is used.
static void run_refuse(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, 1 << 20);
  int pageable = 0, number = 0;
  CU(cuDeviceGetAttribute, &pageable, 88, r->device);
  void* ordinary = malloc(4096);
  if (!pageable) {
    refused(r, "sendbuff", ordinary, (void*)r->recv);
    refused(r, "recvbuff", (void*)r->send, ordinary);
    number += 2;
  }
  if (devices > 1) {
    CUdeviceptr elsewhere;
    make_current((r->device + 1) % devices);
    CU(cuMemAlloc, &elsewhere, (size_t)4096);
    make_current(r->device);
    refused(r, "sendbuff", (void*)elsewhere, (void*)r->recv);
    refused(r, "recvbuff", (void*)r->send, (void*)elsewhere);
    number += 2;
    CU(cuMemFree, elsewhere);
  }
  number += refuse_streams(r);
  void* memory;
  pthread_t thread;
  NC(MemAlloc(&memory, 4096));
  pthread_create(&thread, NULL, free_elsewhere, memory);
  pthread_join(thread, NULL);
  barrier();
  // Nothing is stuck, and nothing is counted that the others do not count.
  float *in = (float*)r->in, *out = (float*)r->out;
  for (int i = 0; i < 100; i++) in[i] = (float)(r->rank + i);
  NC(AllReduce(in, out, 100, F32, 0, r->comm, r->stream));
  CU(cuStreamSynchronize, r->stream);
  for (int i = 0; i < 100; i++)
    if (out[i] != (float)(ranks * i + ranks * (ranks - 1) / 2)) fail("refuse: rank %d: element %d is %g", r->rank, i, out[i]);
  free(ordinary);
  barrier();
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok %d refused, pinned memory reduced\n", number);
}

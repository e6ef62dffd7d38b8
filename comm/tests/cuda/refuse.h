// Buffers and streams that a GPU cannot use.
#pragma once
#include "green.h"
#include "rank.h"

// Every operation once, its root being this rank; what comes of the last.
static Code call(struct Rank* r, enum Op op, const void* send, void* recv, CUstream stream) {
  const int peer = (r->rank + 1) % ranks, root = r->rank;
  switch (op) {
    case ALL_REDUCE: return nccl.AllReduce(send, recv, 100, F32, SUM, r->comm, stream);
    case ALL_GATHER: return nccl.AllGather(send, recv, 100, F32, r->comm, stream);
    case REDUCE_SCATTER: return nccl.ReduceScatter(send, recv, 100, F32, SUM, r->comm, stream);
    case BROADCAST: return nccl.Broadcast(send, recv, 100, F32, root, r->comm, stream);
    case REDUCE: return nccl.Reduce(send, recv, 100, F32, SUM, root, r->comm, stream);
    case ALLTOALL: return nccl.AlltoAll(send, recv, 100, F32, r->comm, stream);
    case GATHER: return nccl.Gather(send, recv, 100, F32, root, r->comm, stream);
    case SCATTER: return nccl.Scatter(send, recv, 100, F32, root, r->comm, stream);
    default: break;
  }
  // A message has one buffer: the one that is not the rank's own.
  if ((CUdeviceptr)send != r->send) return nccl.Send(send, 100, F32, peer, r->comm, stream);
  return nccl.Recv(recv, 100, F32, peer, r->comm, stream);
}

// Calls with a buffer that the rank's GPU cannot use: each is refused with the argument's name.
static int refused(struct Rank* r, const char* argument, const void* send, void* recv, CUstream stream) {
  char gpu[20];
  snprintf(gpu, sizeof gpu, "GPU %d", r->device);
  for (enum Op op = ALL_REDUCE; op <= SEND_RECV; op++) {
    const Code code = call(r, op, send, recv, stream);
    const char* text = nccl.GetLastError(r->comm);
    const char* named = op == SEND_RECV ? "buff" : argument;
    if (code != 4 || !strstr(text, named) || !strstr(text, gpu)) {
      fail("refuse: rank %d: %s: %s: %d: %s", r->rank, OP_NAMES[op], argument, code, text);
    }
  }
  return 1;
}

// A call that says what is wrong.
static void says(Code code, const char* words, const char* what) {
  const char* text = nccl.GetLastError(NULL);
  if (code == 0 || !strstr(text, words)) fail("refuse: %s: %d: %s", what, code, text);
}

// A stream of a context that the library does not use, of this GPU.
static int refuse_context(struct Rank* r) {
  CUcontext other;
  CUstream stream;
  CU(cuCtxCreate, &other, 0u, r->device);
  CU(cuStreamCreate, &stream, 1u);
  make_current(r->device);
  char words[80];
  snprintf(words, sizeof words, "%#lx is of a context of GPU %d that is not its primary one", (unsigned long)stream, r->device);
  says(nccl.AllReduce((void*)r->send, (void*)r->recv, 100, F32, SUM, r->comm, stream), words, "a stream of another context");
  CU(cuCtxDestroy, other);
  make_current(r->device);
  return 1;
}

// A group whose operations are in two captures.
static int refuse_two_captures(struct Rank* r) {
  CUstream streams[2];
  CUgraph graphs[2];
  for (int i = 0; i < 2; i++) {
    CU(cuStreamCreate, &streams[i], 1u);
    CU(cuStreamBeginCapture, streams[i], 1u);
  }
  NC(GroupStart());
  NC(AllReduce((void*)r->send, (void*)r->recv, 100, F32, SUM, r->comm, streams[0]));
  says(nccl.AllReduce((void*)r->send, (void*)r->recv, 100, F32, SUM, r->comm, streams[1]), "on one communicator must be in the same capture",
       "a group in two captures");
  says(nccl.GroupEnd(), "on one communicator must be in the same capture", "the end of that group");
  for (int i = 0; i < 2; i++) {
    CU(cuStreamEndCapture, streams[i], &graphs[i]);
    CU(cuGraphDestroy, graphs[i]);
  }
  return 1;
}

// A group with two communicators, of which one is captured: its kernel would run later than the other one's, which may wait for it.
static int refuse_half_a_capture(struct Rank* r, CUstream captured) {
  Id id;
  Comm alone;
  NC(GetUniqueId(&id));
  NC(CommInitRank(&alone, 1, id, 0));
  NC(GroupStart());
  NC(AllReduce((void*)r->send, (void*)r->recv, 100, F32, SUM, alone, r->stream));
  says(nccl.AllReduce((void*)r->send, (void*)r->recv, 100, F32, SUM, r->comm, captured), "must be captured", "a group with one communicator in a capture");
  says(nccl.GroupEnd(), "must be captured", "the end of that group");
  NC(CommDestroy(alone));
  return 1;
}

// A stream of another GPU than this rank's.
static void refuse_elsewhere(struct Rank* r, CUstream stream, const char* what) {
  char words[80];
  snprintf(words, sizeof words, "%#lx is GPU %d's, the communicator's is GPU %d", (unsigned long)stream, (r->device + 1) % devices, r->device);
  says(nccl.AllReduce((void*)r->send, (void*)r->recv, 100, F32, SUM, r->comm, stream), words, what);
}

// One of a green context of another GPU; one of this GPU's is used, by all ranks.
static int refuse_green(struct Rank* r) {
  CUstream stream;
  void* green = make_green(r->device, &stream);
  if (green == NULL) return 0;
  NC(AllReduce((void*)r->send, (void*)r->recv, 100, F32, SUM, r->comm, stream));
  CU(cuStreamSynchronize, stream);
  CUstream elsewhere;
  void* other = make_green((r->device + 1) % devices, &elsewhere);
  refuse_elsewhere(r, elsewhere, "a stream of another GPU's green context");
  give_green(green, stream);
  give_green(other, elsewhere);
  return 1;
}

// Streams of another device or context, and groups in which some are captured.
static int refuse_streams(struct Rank* r) {
  int number = 0;
  void *send = (void*)r->send, *recv = (void*)r->recv;
  if (devices > 1) {
    CUstream elsewhere;
    make_current((r->device + 1) % devices);
    CU(cuStreamCreate, &elsewhere, 1u);
    make_current(r->device);
    refuse_elsewhere(r, elsewhere, "a stream of another GPU");
    number += 1 + refuse_green(r);
  }
  CUstream captured;
  CUgraph graph;
  CU(cuStreamCreate, &captured, 1u);
  CU(cuStreamBeginCapture, captured, 1u);
  NC(GroupStart());
  NC(AllReduce(send, recv, 100, F32, 0, r->comm, r->stream));
  says(nccl.AllReduce(send, recv, 100, F32, SUM, r->comm, captured), "must be captured", "a group that is captured in part");
  says(nccl.GroupEnd(), "must be captured", "the end of that group");
  number += refuse_half_a_capture(r, captured);
  CU(cuStreamEndCapture, captured, &graph);
  CU(cuGraphDestroy, graph);
  return number + 1 + refuse_context(r) + refuse_two_captures(r);
}

// A factor that is read when the operation runs.
static int refuse_scalar(struct Rank* r, const void* scalar) {
  int factor;
  char words[80];
  NC(RedOpCreatePreMulSum(&factor, (void*)scalar, F32, 0, r->comm));
  snprintf(words, sizeof words, "scalar: %#lx", (unsigned long)scalar);
  says(nccl.AllReduce((void*)r->send, (void*)r->recv, 100, F32, factor, r->comm, r->stream), words, "a factor elsewhere");
  NC(RedOpDestroy(factor, r->comm));
  return 1;
}

// What is registered is looked at as buffers of operations are, and by window before any rank waits for the others.
static int refuse_registrations(struct Rank* r, CUdeviceptr elsewhere, size_t bytes) {
  char words[120];
  snprintf(words, sizeof words, "buff: %#llx is memory of GPU %d, the communicator's is GPU %d", elsewhere, (r->device + 1) % devices, r->device);
  void* handle = words;
  says(nccl.CommRegister(r->comm, (void*)elsewhere, bytes, &handle), words, "a registration of another GPU's memory");
  if (handle != NULL) fail("refuse: rank %d: a handle of what was refused", r->rank);
  handle = words;
  says(nccl.CommWindowRegister(r->comm, (void*)elsewhere, bytes, &handle, 1), words, "a window of another GPU's memory");
  if (handle != NULL) fail("refuse: rank %d: a window of what was refused", r->rank);
  // Of one rank alone: the others do not wait for it.
  if (r->rank == 0) {
    says(nccl.CommWindowRegister(r->comm, (void*)elsewhere, bytes, &handle, 1), words, "one rank's window of another GPU's memory");
    if (handle != NULL) fail("refuse: a window of what was refused on one rank");
  } else {
    NC(CommWindowRegister(r->comm, (void*)r->recv, bytes, &handle, 1));
    NC(CommWindowDeregister(r->comm, handle));
  }
  return 3;
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
    number += refused(r, "sendbuff", ordinary, (void*)r->recv, r->stream);
    number += refused(r, "recvbuff", (void*)r->send, ordinary, r->stream);
    number += refuse_scalar(r, ordinary);
  }
  if (devices > 1) {
    CUdeviceptr elsewhere;
    make_current((r->device + 1) % devices);
    // So much begins with a page.
    CU(cuMemAlloc, &elsewhere, (size_t)2 << 20);
    make_current(r->device);
    number += refused(r, "sendbuff", (void*)elsewhere, (void*)r->recv, r->stream);
    number += refused(r, "recvbuff", (void*)r->send, (void*)elsewhere, r->stream);
    number += refuse_scalar(r, (void*)elsewhere);
    // Captured, too.
    CUstream captured;
    CUgraph graph;
    CU(cuStreamCreate, &captured, 1u);
    CU(cuStreamBeginCapture, captured, 1u);
    number += refused(r, "sendbuff", (void*)elsewhere, (void*)r->recv, captured);
    CU(cuStreamEndCapture, captured, &graph);
    CU(cuGraphDestroy, graph);
    number += refuse_registrations(r, elsewhere, 4096);
    CU(cuMemFree, elsewhere);
  }
  number += refuse_streams(r);
  void* memory;
  pthread_t thread;
  char words[80];
  snprintf(words, sizeof words, "2199023255552 bytes of GPU %d: ", r->device);
  says(nccl.MemAlloc(&memory, (size_t)1 << 41), words, "more memory than there is");
  number++;
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

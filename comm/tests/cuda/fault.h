// A device that fails while its rank and others wait for another one: all of them are told whose it is, and end.
#pragma once

#include <dlfcn.h>

#include "rank.h"
#include "remap.h"

// What the library's log, the file of NCCL_DEBUG_FILE, has so far.
static char* logged(void) {
  static char text[1 << 20];
  text[0] = 0;
  FILE* file = fopen(getenv("NCCL_DEBUG_FILE"), "r");
  if (file != NULL) {
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
  }
  return text;
}

// Waits until the log has a verdict like this of an operation like that.
static void await_verdict(const char* verdict, const char* operation) {
  for (int i = 0; i < 3000; i++) {
    char* said = strstr(logged(), operation);
    if (said != NULL && strstr(said, verdict) != NULL) return;
    usleep(10000);
  }
  fail("no %s of %s in the log:\n%s", verdict, operation, logged());
}

// What the driver without a GPU has in place of a kernel that does wrong.
typedef void (*Break)(int device);

// A buffer of which only the beginning is there, whatever else the GPU has.
static CUdeviceptr torn(struct Rank* r, size_t bytes) {
  CUdeviceptr buffer;
  CU(cuMemAddressReserve, &buffer, granules(bytes), (size_t)0, 0ull, 0ull);
  map_piece(r, buffer, GRANULE);
  return buffer;
}

// Rank 1's device fails in an all_reduce to which the last rank never comes.
static void run_fault(struct Rank* r) {
  if (ranks < 3) fail("fault: 3 ranks at least");
  open_rank(r, 0);
  buffers(r, 64 << 20);
  reduce_once(r);
  const Break broken = (Break)dlsym(RTLD_DEFAULT, "ringsight_mock_break");
  const uint64_t wrong = broken == NULL && r->rank == 1 ? torn(r, 64 << 20) : 0;
  barrier();
  const double start = now();
  if (r->rank != ranks - 1) NC(AllReduce((void*)(wrong ? wrong : r->send), (void*)r->recv, 16 << 20, F32, 0, r->comm, r->stream));
  if (r->rank == 1 && broken != NULL) broken(r->device);
  Code async = 0;
  while (r->rank != ranks - 1 && now() - start < 20 && async == 0) {
    NC(CommGetAsyncError(r->comm, &async));
    usleep(1000);
  }
  const double noticed = now() - start;
  char text[400];
  snprintf(text, sizeof text, "%s", nccl.GetLastError(r->comm));
  // Where it has a kernel that did wrong, the driver gives up all GPUs that the process uses.
  const bool own = strstr(text, "a kernel on the GPU") != NULL, others = strstr(text, "DEVICE_FAULT: the device of rank 1 has failed") != NULL;
  const bool right = r->rank == 1 ? own : others || (own && !processes && broken == NULL);
  if (r->rank != ranks - 1 && (async == 0 || !right))
    fail("fault: rank %d: error %d after %.1f s: %s", r->rank, async, noticed, text);
  barrier();
  const double before = now();
  NC(CommAbort(r->comm));
  const double took = now() - before;
  if (took > 1) fail("fault: rank %d: abort took %.1f s", r->rank, took);
  barrier();
  if (r->rank == 0) printf("ok after %.1f s, abort in %.0f ms: %s\n", noticed, took * 1e3, text);
}

// As in mock/state.h.
enum { MOVING, FROZEN, COPIES_FROZEN };
typedef void (*Freeze)(int device, int what);
static Freeze freezer(const char* test) {
  const Freeze freeze = (Freeze)dlsym(RTLD_DEFAULT, "ringsight_mock_freeze");
  if (freeze == NULL) fail("%s: only a driver without a GPU stops what a GPU does", test);
  return freeze;
}

// All have come to an operation, and the kernel of rank 1 stops moving: both are told that it is stuck.
static void run_frozen(struct Rank* r) {
  const Freeze freeze = freezer("frozen");
  open_rank(r, 0);
  buffers(r, 16 << 20);
  reduce_once(r);
  barrier();
  if (r->rank == 1) {
    enqueue(r, ALL_REDUCE, F32, 4 << 20, 0, 0, r->send, r->recv);
    // It has begun, and looks for the other.
    usleep(300000);
    freeze(r->device, FROZEN);
    // Each of its threads comes to where it looks for that.
    usleep(500000);
  }
  barrier();
  if (r->rank == 0) enqueue(r, ALL_REDUCE, F32, 4 << 20, 0, 0, r->send, r->recv);
  await_verdict("Verdict: STUCK_KERNEL (hang): ", "AllReduce(count 4194304");
  barrier();
  if (r->rank == 1) freeze(r->device, MOVING);
  CU(cuStreamSynchronize, r->stream);
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok a kernel that does not move is stuck\n");
}

// Queries of events do not come back: of the last rank, whose stream is busy; then of those that wait for the last rank, before they have
// seen that they do. Each time these are told who has not come.
static void run_unanswered(struct Rank* r) {
  void (*const hold_queries)(int on) = (void (*)(int))dlsym(RTLD_DEFAULT, "ringsight_mock_hold_queries");
  if (hold_queries == NULL) fail("unanswered: only a driver without a GPU holds queries");
  open_rank(r, 0);
  buffers(r, 1 << 20);
  reduce_once(r);
  const bool last = r->rank == ranks - 1;
  atomic_int gate = 0;
  if (last) {
    hold_queries(1);
    CU(cuLaunchHostFunc, r->stream, hold, (void*)&gate);
  }
  barrier();
  enqueue(r, ALL_REDUCE, F32, 2000, 0, 0, r->send, r->recv);
  await_verdict("Verdict: QUEUED_BEHIND_COMPUTE (late): ", "AllReduce(count 2000");
  barrier();
  if (last) {
    atomic_store(&gate, 1);
    CU(cuStreamSynchronize, r->stream);
    hold_queries(0);
  }
  CU(cuStreamSynchronize, r->stream);
  barrier();
  if (!last) {
    hold_queries(1);
    enqueue(r, ALL_REDUCE, F32, 3000, 0, 0, r->send, r->recv);
  }
  await_verdict("Verdict: NOT_LAUNCHED (late): ", "AllReduce(count 3000");
  barrier();
  if (last) enqueue(r, ALL_REDUCE, F32, 3000, 0, 0, r->send, r->recv);
  else hold_queries(0);
  CU(cuStreamSynchronize, r->stream);
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok named without an answer of a driver\n");
}

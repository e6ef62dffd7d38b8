// Receive buffers in windows that all ranks register as symmetric: copy engines do what goes into them and is long, or with NCCL_CTA_POLICY=2 all.
#pragma once
#include "fault.h"
#include "rank.h"
#include "remap.h"

enum { SYMMETRIC = 1, WINDOW_BYTES = 8 << 20 };

// Of an operation that goes into the window at an offset: sends from `r->send`, or, in place, from this rank's block there.
static void check_at(struct Rank* r, enum Op op, const struct Type* t, size_t count, size_t offset, bool in_place, int salt) {
  const CUdeviceptr recv = r->recv;
  r->recv += offset;
  check_one(r, op, t, count, 0, in_place, salt);
  r->recv = recv;
}

// The same of a reduce_scatter, whose send buffer is in the window, or both are; else what it receives is `shift` bytes behind where kernels begin with whole words.
static void check_scattered(struct Rank* r, const struct Type* t, size_t count, size_t shift, bool in_place, int salt) {
  const CUdeviceptr send = r->send, recv = r->recv;
  r->send = recv + 8192;
  r->recv = send + shift;
  // Parts of whole words.
  check_one(r, REDUCE_SCATTER, t, (count + 7) / 8 * 8, 0, in_place, salt);
  r->send = send;
  r->recv = recv;
}

// Many in one group, on two streams, among operations that go otherwise.
static void check_group(struct Rank* r, CUstream other, int salt) {
  enum { COUNT = 3000 };
  const size_t block = COUNT * 4, all = block * (size_t)ranks;
  const struct Case gather = {ALL_GATHER, &TYPES[F32], COUNT, 0, 0, salt}, exchange = {ALLTOALL, &TYPES[F32], COUNT, 0, 0, salt},
                    reduce = {ALL_REDUCE, &TYPES[F32], COUNT, 0, 0, salt};
  fill(r, &exchange, r->in);
  CU(cuMemcpyHtoDAsync, r->send, r->in, all, r->stream);
  CU(cuMemsetD8Async, r->recv, (unsigned char)0xa5, 4 * all, r->stream);
  // The other stream's operations come after this, as all of a group are on the first stream.
  CU(cuStreamSynchronize, r->stream);
  barrier();
  CUstream first = r->stream;
  NC(GroupStart());
  enqueue(r, ALL_GATHER, F32, COUNT, 0, 0, r->send, r->recv);
  r->stream = other;
  enqueue(r, ALL_REDUCE, F32, COUNT, 0, 0, r->send, r->recv + all);
  enqueue(r, ALLTOALL, F32, COUNT, 0, 0, r->send, r->recv + 2 * all);
  r->stream = first;
  enqueue(r, SEND_RECV, F32, COUNT, 0, 0, r->send, r->recv + 3 * all);
  NC(GroupEnd());
  CU(cuStreamSynchronize, other);
  CU(cuStreamSynchronize, first);
  CU(cuMemcpyDtoHAsync, r->out, r->recv, 4 * all, first);
  CU(cuStreamSynchronize, first);
  const struct Case message = {SEND_RECV, &TYPES[F32], COUNT, 0, 0, salt};
  verify(r, &gather, r->out, " in a group");
  verify(r, &reduce, r->out + all, " in a group");
  verify(r, &exchange, r->out + 2 * all, " in a group");
  verify(r, &message, r->out + 3 * all, " in a group");
  r->cases += 4;
}

// Captured, with other operations before, between and behind; replayed with eager ones between.
static void check_replays(struct Rank* r, int salt) {
  enum { COUNT = 20011, SCATTERED = 20008, REPLAYS = 10 };
  const size_t all = (size_t)COUNT * 4 * (size_t)ranks;
  const CUdeviceptr scattered = r->recv + 4 * all, scatters_to = r->send + all;
  CUgraph graph;
  CUgraphExec exec;
  CU(cuStreamBeginCapture, r->stream, 1u);
  enqueue(r, ALL_REDUCE, F32, 100, 0, 0, r->send, r->recv + 3 * all);
  enqueue(r, ALL_GATHER, F32, COUNT, 0, 0, r->send, r->recv);
  NC(GroupStart());
  enqueue(r, ALLTOALL, F32, COUNT, 0, 0, r->send, r->recv + all);
  enqueue(r, ALL_REDUCE, F32, COUNT, 0, 0, r->send, r->recv + 2 * all);
  NC(GroupEnd());
  enqueue(r, REDUCE_SCATTER, F32, SCATTERED, 0, 0, scattered, scatters_to);
  CU(cuStreamEndCapture, r->stream, &graph);
  CU(cuGraphInstantiate, &exec, graph, 0ull);
  CU(cuGraphDestroy, graph);
  for (int replay = 0; replay < REPLAYS; replay++) {
    const struct Case gather = {ALL_GATHER, &TYPES[F32], COUNT, 0, 0, salt + replay}, exchange = {ALLTOALL, &TYPES[F32], COUNT, 0, 0, salt + replay},
                      reduce = {ALL_REDUCE, &TYPES[F32], COUNT, 0, 0, salt + replay},
                      scatter = {REDUCE_SCATTER, &TYPES[F32], SCATTERED, 0, 0, salt + replay};
    fill(r, &exchange, r->in);
    CU(cuMemcpyHtoDAsync, r->send, r->in, all, r->stream);
    CU(cuMemcpyHtoDAsync, scattered, r->in, all, r->stream);
    CU(cuMemsetD8Async, r->recv, (unsigned char)0xa5, 3 * all, r->stream);
    CU(cuGraphLaunch, exec, r->stream);
    if (replay % 3 == 0) enqueue(r, ALL_GATHER, F32, 500, 0, 0, r->send, r->recv + 3 * all);
    CU(cuMemcpyDtoHAsync, r->out, r->recv, 3 * all, r->stream);
    CU(cuMemcpyDtoHAsync, r->out + 3 * all, scatters_to, (size_t)SCATTERED * 4, r->stream);
    CU(cuStreamSynchronize, r->stream);
    verify(r, &scatter, r->out + 3 * all, " replayed");
    verify(r, &gather, r->out, " replayed");
    verify(r, &exchange, r->out + all, " replayed");
    verify(r, &reduce, r->out + 2 * all, " replayed");
    r->cases += 4;
  }
  CU(cuGraphExecDestroy, exec);
}

// A moment later.
static void call_again(struct Rank* r) {
  usleep(10000);
  reduce_once(r);
}
// Whether it is so on any rank: to be asked by all.
static bool is_on_any(struct Rank* r, bool so) {
  shared->numbers[r->rank] = so;
  barrier();
  double all = 0;
  for (int rank = 0; rank < ranks; rank++) all += shared->numbers[rank];
  barrier();
  return all > 0;
}

// What others have mapped of a window goes with its memory, once the window has been given back. Only a driver without a GPU tells.
static void check_closed(struct Rank* r) {
  void (*const figures)(uint64_t*) = (void (*)(uint64_t*))dlsym(RTLD_DEFAULT, "ringsight_mock_memory");
  if (figures == NULL || !processes) return;
  enum { OPENED = 2 };
  uint64_t before[4], after[4];
  figures(before);
  // What earlier windows have left may still go, with a later call: until nothing has for a while on any rank.
  for (int quiet = 0; quiet < 20;) {
    call_again(r);
    figures(after);
    const bool changes = after[OPENED] != before[OPENED];
    memcpy(before, after, sizeof before);
    quiet = is_on_any(r, changes) ? 0 : quiet + 1;
  }
  const CUdeviceptr recv = r->recv;
  void* window;
  CU(cuMemAlloc, &r->recv, (size_t)WINDOW_BYTES);
  NC(CommWindowRegister(r->comm, (void*)r->recv, WINDOW_BYTES, &window, SYMMETRIC));
  for (int i = 0; i < 20; i++) enqueue(r, i % 2 ? ALL_GATHER : ALLTOALL, F32, 1000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  figures(after);
  if (after[OPENED] <= before[OPENED]) fail("windows rank %d: nothing is mapped", r->rank);
  barrier();
  NC(CommWindowDeregister(r->comm, window));
  CU(cuMemFree, r->recv);
  r->recv = recv;
  // What is over is let go of with a later call: all ranks make one as long as anything stays on any.
  bool stays = true;
  for (int i = 0; i < 1000 && stays; i++) {
    call_again(r);
    figures(after);
    stays = is_on_any(r, after[OPENED] > before[OPENED]);
  }
  if (after[OPENED] > before[OPENED]) fail("windows rank %d: what was mapped stays", r->rank);
  barrier();
}

// `in_pieces`: the windows are of memory that is mapped in pieces, which are open to the rank's own device.
static void run_windows(struct Rank* r, bool in_pieces) {
  open_rank(r, 0);
  buffers(r, WINDOW_BYTES);
  if (in_pieces) {
    give_whole(r->recv, WINDOW_BYTES);
    r->recv = get_pieces(r, WINDOW_BYTES);
    barrier();
  }
  CUstream other;
  CU(cuStreamCreate, &other, 1u);
  int salt = 0;
  // Before there is a window, in one, in a smaller one at another place, and behind.
  for (int round = 0; round < 4; round++) {
    void* window = NULL;
    if (round == 1) NC(CommWindowRegister(r->comm, (void*)r->recv, WINDOW_BYTES, &window, SYMMETRIC));
    if (round == 2) NC(CommWindowRegister(r->comm, (void*)(r->recv + 4096), WINDOW_BYTES / 4, &window, SYMMETRIC));
    const size_t counts[] = {1, 33, 4099, 100000, 200003};
    for (int c = 0; c < 5; c++) {
      check_at(r, ALL_GATHER, &TYPES[F32], counts[c], 8192, false, salt++);
      check_at(r, ALL_GATHER, &TYPES[BF16], counts[c], 0, true, salt++);
      check_at(r, ALLTOALL, &TYPES[F32], counts[c], 8196, false, salt++);
      check_at(r, ALLTOALL, &TYPES[I8], counts[c], 12289, false, salt++);
      check_at(r, REDUCE_SCATTER, &TYPES[F32], counts[c], 8192, false, salt++);
      check_at(r, ALL_REDUCE, &TYPES[BF16], counts[c], 4096, false, salt++);
      check_at(r, ALL_REDUCE, &TYPES[F32], counts[c], 16, true, salt++);
      // From where kernels do not begin with whole words.
      r->send += 4;
      check_at(r, ALL_REDUCE, &TYPES[F32], counts[c], 8192, false, salt++);
      r->send -= 4;
      check_scattered(r, &TYPES[F32], counts[c], 0, false, salt++);
      check_scattered(r, &TYPES[BF16], counts[c], 2, false, salt++);
      check_scattered(r, &TYPES[F32], counts[c], 0, true, salt++);
    }
    check_group(r, other, salt++);
    check_replays(r, salt += 20);
    barrier();
    if (window != NULL) NC(CommWindowDeregister(r->comm, window));
    barrier();
  }
  check_closed(r);
  // A window that goes with the communicator.
  void* window;
  NC(CommWindowRegister(r->comm, (void*)r->recv, WINDOW_BYTES, &window, SYMMETRIC));
  for (int i = 0; i < 100; i++) enqueue(r, i % 2 ? ALL_GATHER : ALLTOALL, F32, 1000 + (size_t)i, 0, 0, r->send, r->recv + 4 * (CUdeviceptr)i);
  CU(cuStreamSynchronize, r->stream);
  barrier();
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok %ld cases a rank\n", r->cases);
}

// An operation that copy engines do here, or an all_reduce if they move those, or the reduce_scatter that the environment's OPS asks for.
static enum Op in_windows(enum Op op) {
  if (is_wanted(REDUCE_SCATTER, false)) return REDUCE_SCATTER;
  return getenv("RINGSIGHT_ENGINE_REDUCE_BYTES") != NULL ? ALL_REDUCE : op;
}
// It, at an offset of the window: there is the send buffer of a reduce_scatter, else the receive buffer.
static void enqueue_at(struct Rank* r, enum Op op, size_t count, size_t offset) {
  const CUdeviceptr there = r->recv + offset;
  const bool scatters = in_windows(op) == REDUCE_SCATTER;
  enqueue(r, in_windows(op), F32, count, 0, 0, scatters ? there : r->send, scatters ? r->send : there);
}

// An all_gather, or what stands for it, as a call that may find the communicator failed.
static Code call_at(struct Rank* r, size_t count, size_t offset) {
  void *there = (void*)(r->recv + offset), *other = (void*)r->send;
  switch (in_windows(ALL_GATHER)) {
    case ALL_REDUCE: return nccl.AllReduce(other, there, count, F32, SUM, r->comm, r->stream);
    case REDUCE_SCATTER: return nccl.ReduceScatter(there, other, count, F32, SUM, r->comm, r->stream);
    default: return nccl.AllGather(other, there, count, F32, r->comm, r->stream);
  }
}

// Rank 0 breaks the promise: its buffer is elsewhere in the window than the others'.
static void run_promise(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, WINDOW_BYTES);
  void* window;
  NC(CommWindowRegister(r->comm, (void*)r->recv, WINDOW_BYTES, &window, SYMMETRIC));
  enqueue_at(r, ALL_GATHER, 1000, 0);
  CU(cuStreamSynchronize, r->stream);
  // Others have found it before a rank that is late calls.
  if (r->rank == 3) usleep(100000);
  Code async = call_at(r, 1000, r->rank == 0 ? 4096 : 0);
  for (double start = now(); now() - start < 20 && async == 0; usleep(1000)) NC(CommGetAsyncError(r->comm, &async));
  char text[1000];
  snprintf(text, sizeof text, "%s", nccl.GetLastError(r->comm));
  const bool scatters = in_windows(ALL_GATHER) == REDUCE_SCATTER;
  if (async == 0 || !strstr(text, scatters ? "from byte 4096 of window 0" : "to byte 4096 of window 0") ||
      !strstr(text, scatters ? "from byte 0 of window 0" : "to byte 0 of window 0"))
    fail("promise: rank %d: error %d: %s", r->rank, async, text);
  CU(cuStreamSynchronize, r->stream);
  NC(CommAbort(r->comm));
  barrier();
  if (r->rank == 0) printf("ok %s\n", text);
}

// A rank whose window all have registered, and which has done an operation in it.
static void open_window(struct Rank* r) {
  void* window;
  open_rank(r, 0);
  buffers(r, WINDOW_BYTES);
  NC(CommWindowRegister(r->comm, (void*)r->recv, WINDOW_BYTES, &window, SYMMETRIC));
  enqueue(r, ALL_GATHER, F32, 1000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  barrier();
}

// Rank 0 waits for the others in vain, eager and in a replay behind, until it aborts.
static void run_alone(struct Rank* r) {
  open_window(r);
  CUgraph graph;
  CUgraphExec exec;
  CU(cuStreamBeginCapture, r->stream, 1u);
  enqueue_at(r, ALLTOALL, 1000, 0);
  CU(cuStreamEndCapture, r->stream, &graph);
  CU(cuGraphInstantiate, &exec, graph, 0ull);
  barrier();
  if (r->rank == 0) {
    enqueue_at(r, ALL_GATHER, 1000, 0);
    CU(cuGraphLaunch, exec, r->stream);
    usleep(200000);
    if (CALL(cuStreamQuery, r->stream) != CUDA_ERROR_NOT_READY) fail("alone: the operation is not stuck");
    const double start = now();
    NC(CommAbort(r->comm));
    const double aborted = now() - start;
    CU(cuStreamSynchronize, r->stream);
    if (now() - start > 1) fail("alone: abort took %.1f s, the stream %.1f s", aborted, now() - start);
  }
  barrier();
  if (r->rank != 0) NC(CommAbort(r->comm));
  CU(cuGraphExecDestroy, exec);
  barrier();
  if (r->rank == 0) printf("ok an abort frees the stream\n");
}

// All have come, and the copies of rank 1 do not end.
static void run_stalled(struct Rank* r) {
  const Freeze freeze = freezer("stalled");
  open_window(r);
  // Its kernel goes on and waits for the others, whenever they come.
  if (r->rank == 1) freeze(r->device, COPIES_FROZEN);
  enqueue_at(r, ALL_GATHER, 5000, 0);
  const enum Op op = in_windows(ALL_GATHER);
  await_verdict("Verdict: STUCK_KERNEL (hang): ", op == ALL_REDUCE       ? "AllReduce(count 5000"
                                                  : op == REDUCE_SCATTER ? "ReduceScatter(count 5000"
                                                                         : "AllGather(count 5000");
  barrier();
  if (r->rank == 1) freeze(r->device, MOVING);
  CU(cuStreamSynchronize, r->stream);
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok copies that do not end are told\n");
}

// All have come, the copies of rank 1 do not end, and rank 0 aborts: also where it waits for a piece.
static void run_between(struct Rank* r) {
  const Freeze freeze = freezer("between");
  open_window(r);
  if (r->rank == 1) freeze(r->device, FROZEN);
  barrier();
  for (int i = 0; i < 3; i++) enqueue_at(r, ALL_GATHER, 50000, 0);
  usleep(200000);
  if (CALL(cuStreamQuery, r->stream) != CUDA_ERROR_NOT_READY) fail("between: the operation is not stuck");
  barrier();
  for (int rank = 0; rank < ranks; rank++) {
    if (rank == r->rank) {
      // What has been queued behind it goes on then, and finds that rank 0 is gone.
      if (rank == 1) freeze(r->device, MOVING);
      const double start = now();
      NC(CommAbort(r->comm));
      CU(cuStreamSynchronize, r->stream);
      if (now() - start > 2) fail("between: rank %d: the stream was free after %.1f s", rank, now() - start);
    }
    barrier();
  }
  if (r->rank == 0) printf("ok an abort frees the stream\n");
}

// A copy of the last rank is refused, or a launch, each in turn: the call says so, and an abort frees all streams.
static void run_uncopied(struct Rank* r, const char* refused_call) {
  void (*const lack)(int device, int which, const char* call) = (void (*)(int, int, const char*))dlsym(RTLD_DEFAULT, "ringsight_mock_lack");
  const char* (*const lacked)(int) = (const char* (*)(int))dlsym(RTLD_DEFAULT, "ringsight_mock_lacked");
  if (lack == NULL || lacked == NULL) fail("uncopied: only a driver without a GPU refuses a call");
  const bool last = r->rank == ranks - 1;
  int calls[2];
  open_window(r);
  NC(CommDestroy(r->comm));
  for (int captured = 0; captured < 2; captured++) {
    int which = 0;
    for (bool refused = true; refused;) {
      which++;
      r->comm = new_comm(r, 1);
      void* window;
      NC(CommWindowRegister(r->comm, (void*)r->recv, WINDOW_BYTES, &window, SYMMETRIC));
      CUgraph graph;
      if (captured) CU(cuStreamBeginCapture, r->stream, 1u);
      if (last) lack(r->device, which, refused_call);
      const Code code = nccl.AllReduce((void*)r->send, (void*)r->recv, 50000, F32, SUM, r->comm, r->stream);
      const char* text = nccl.GetLastError(NULL);
      const bool is_refused = last && lacked(r->device) != NULL;
      if (last) lack(r->device, 0, NULL);
      if ((code != 0) != is_refused) fail("uncopied: rank %d, number %d: %d: %s", r->rank, which, code, text);
      if (is_refused && !strstr(text, refused_call)) fail("uncopied: number %d: %s", which, text);
      if (captured && CALL(cuStreamEndCapture, r->stream, &graph) == 0) CU(cuGraphDestroy, graph);
      refused = is_on_any(r, is_refused);
      const double start = now();
      NC(CommAbort(r->comm));
      CU(cuStreamSynchronize, r->stream);
      if (now() - start > 2) fail("uncopied: rank %d: the stream was free after %.1f s", r->rank, now() - start);
      barrier();
    }
    calls[captured] = which - 1;
  }
  if (r->rank == 0) printf("ok %d refused, %d captured\n", calls[0], calls[1]);
}

// Buffers that come and go while others have mapped them, of two kinds: whole allocations, and memory that is mapped in pieces.
#pragma once
#include "rank.h"

// Where a rank's buffers come from.
struct Source {
  CUdeviceptr (*get)(struct Rank* r, size_t bytes);
  void (*give)(CUdeviceptr buffer, size_t bytes);
  // Memory other than before, at the same address; a null pointer where there is no such thing.
  void (*exchange)(struct Rank* r, CUdeviceptr buffer, size_t bytes);
};

static CUdeviceptr get_whole(struct Rank* r, size_t bytes) {
  (void)r;
  CUdeviceptr buffer;
  CU(cuMemAlloc, &buffer, bytes);
  return buffer;
}
static void give_whole(CUdeviceptr buffer, size_t bytes) {
  (void)bytes;
  CU(cuMemFree, buffer);
}
static const struct Source whole = {get_whole, give_whole, NULL};

// The first piece is the smallest that there is, each other twice as long as the one before, as far as there is need.
#define GRANULE ((size_t)2 << 20)
static size_t granules(size_t bytes) { return (bytes + GRANULE - 1) / GRANULE * GRANULE; }
static size_t next_piece(size_t before, size_t left) {
  size_t bytes = before == 0 ? GRANULE : 2 * before;
  return bytes < left ? bytes : left;
}
static void map_piece(struct Rank* r, CUdeviceptr at, size_t bytes) {
  struct { int type, ways, place, device; void* unused; unsigned char flags[8]; } properties = {1, 1, 1, r->device, NULL, {0}};
  struct { int place, device, flags; } access = {1, r->device, 3};
  unsigned long long handle;
  CU(cuMemCreate, &handle, bytes, &properties, 0ull);
  CU(cuMemMap, at, bytes, (size_t)0, handle, 0ull);
  CU(cuMemRelease, handle);
  CU(cuMemSetAccess, at, bytes, &access, (size_t)1);
}
static CUdeviceptr get_pieces(struct Rank* r, size_t bytes) {
  CUdeviceptr buffer;
  const size_t all = granules(bytes);
  CU(cuMemAddressReserve, &buffer, all, (size_t)0, 0ull, 0ull);
  for (size_t done = 0, piece = 0; done < all; done += piece) map_piece(r, buffer + done, piece = next_piece(piece, all - done));
  return buffer;
}
static void give_pieces(CUdeviceptr buffer, size_t bytes) {
  const size_t all = granules(bytes);
  for (size_t done = 0, piece = 0; done < all; done += piece) CU(cuMemUnmap, buffer + done, piece = next_piece(piece, all - done));
  CU(cuMemAddressFree, buffer, all);
}
// One in the middle, or the last.
static void exchange_piece(struct Rank* r, CUdeviceptr buffer, size_t bytes) {
  const size_t all = granules(bytes);
  if (all == GRANULE) return;
  const size_t piece = next_piece(GRANULE, all - GRANULE);
  CU(cuMemUnmap, buffer + GRANULE, piece);
  map_piece(r, buffer + GRANULE, piece);
}
static const struct Source pieces = {get_pieces, give_pieces, exchange_piece};

// In every other round one half of the ranks registers what it sends from, the other half what it receives to.
static void register_some(struct Rank* r, int round, void* handles[2]) {
  const bool all = round % 2 == 0, even = (r->rank + round / 2) % 2 == 0;
  handles[0] = handles[1] = NULL;
  if (all || even) NC(CommRegister(r->comm, (void*)r->send, r->bytes, &handles[0]));
  if (all || !even) NC(CommRegister(r->comm, (void*)r->recv, max_bytes, &handles[1]));
}
static void deregister_some(struct Rank* r, void* handles[2]) {
  for (int i = 0; i < 2; i++)
    if (handles[i] != NULL) NC(CommDeregister(r->comm, handles[i]));
}

// A case in a graph.
struct Captured {
  struct Case what;
  CUgraph graph;
  CUgraphExec exec;
};
static struct Captured capture(struct Rank* r, const struct Case* c) {
  struct Captured captured = {*c, NULL, NULL};
  CU(cuStreamBeginCapture, r->stream, 1u);
  enqueue(r, c->op, c->type->code, c->count, c->reduction, c->root, r->send, r->recv);
  CU(cuStreamEndCapture, r->stream, &captured.graph);
  CU(cuGraphInstantiate, &captured.exec, captured.graph, 0ull);
  return captured;
}
// Of other data each time: what an earlier replay had is not right any more.
static void replay(struct Rank* r, struct Captured* captured, const char* what) {
  const struct Case* const c = &captured->what;
  captured->what.salt++;
  fill(r, c, r->in);
  CU(cuMemcpyHtoDAsync, r->send, r->in, send_bytes(c), r->stream);
  CU(cuGraphLaunch, captured->exec, r->stream);
  CU(cuMemcpyDtoHAsync, r->out, r->recv, recv_bytes(c), r->stream);
  CU(cuStreamSynchronize, r->stream);
  verify(r, c, r->out, what);
}
static void destroy(const struct Captured* captured) {
  CU(cuGraphExecDestroy, captured->exec);
  CU(cuGraphDestroy, captured->graph);
}

// At the same addresses as far as the driver gives them again: what others have mapped of them must follow.
static void run_remap(struct Rank* r, const struct Source* source) {
  static const enum Op ops[] = {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALLTOALL, GATHER, SCATTER, SEND_RECV, PAIRS};
  enum { KINDS = sizeof ops / sizeof ops[0] };
  open_rank(r, 0);
  buffers(r, max_bytes);
  give_whole(r->send, max_bytes);
  give_whole(r->recv, max_bytes);
  r->send = source->get(r, max_bytes);
  r->recv = source->get(r, max_bytes);
  barrier();
  const size_t bytes[2] = {max_bytes, max_bytes / 2};
  int salt = 0, again = 0;
  for (int round = 0; round < 6; round++) {
    const size_t count = r->bytes / 8 / (size_t)ranks;
    void* handles[2];
    register_some(r, round, handles);
    // The others map them while these run: some run before, some after.
    for (int i = 0; i < 2 * KINDS; i++) {
      check_one(r, ops[i % KINDS], &TYPES[F32], count, 0, i % 3 == 1, salt++);
      if (i % KINDS == KINDS - 1) usleep(3000);
    }
    const struct Case c = {ALL_REDUCE, &TYPES[F32], count, 0, 0, salt};
    struct Captured captured = capture(r, &c);
    replay(r, &captured, " replayed");
    barrier();
    deregister_some(r, handles);
    // What was captured while it was registered is right all the same, whether the others have let go of it or not.
    for (int i = 0; i < 20; i++) {
      replay(r, &captured, " replayed when nothing is registered");
      usleep(2000);
    }
    destroy(&captured);
    barrier();
    if (source->exchange != NULL) {
      // Of what nobody has registered a graph is promised nothing: it is right of whatever is at those addresses by then.
      captured = capture(r, &c);
      replay(r, &captured, " captured unregistered");
      barrier();
      source->exchange(r, r->send, r->bytes);
      source->exchange(r, r->recv, max_bytes);
      barrier();
      replay(r, &captured, " replayed with other memory");
      destroy(&captured);
      barrier();
      register_some(r, round, handles);
      for (int i = 0; i < KINDS; i++) check_one(r, ops[i], &TYPES[F32], count, 0, i % 3 == 1, salt++);
      barrier();
      // The others have mapped what was there before: still right of what is left of it, for longer than it takes to notice.
      source->exchange(r, r->send, r->bytes);
      source->exchange(r, r->recv, max_bytes);
      const size_t counts[] = {count, 10000};
      for (int i = 0; i < 2 * KINDS; i++) {
        check_one(r, ops[i % KINDS], &TYPES[F32], counts[i / KINDS], 0, i % 3 == 1, salt++);
        if (round == 0 && i >= KINDS) usleep(120000);
      }
      barrier();
      deregister_some(r, handles);
    }
    for (int i = 0; i < KINDS; i++) check_one(r, ops[i], &TYPES[F32], count, 0, i % 3 == 1, salt++);
    barrier();
    const CUdeviceptr before[2] = {r->send, r->recv};
    // One of them, or both, which come back the other way round or of another length.
    source->give(r->send, r->bytes);
    r->bytes = bytes[round % 3 == 2];
    if (round % 3 != 1) {
      source->give(r->recv, max_bytes);
      r->recv = source->get(r, max_bytes);
    }
    r->send = source->get(r, r->bytes);
    again += r->send == before[0] || r->send == before[1];
    barrier();
  }
  barrier();
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok %ld cases a rank, %d buffers where others had been\n", r->cases, again);
}

// Sums of numbers whose last bits depend on the order in which they are added: each result has the same bits on all ranks that get it, a second time, and
// however many blocks a kernel has.
#pragma once
#include "rank.h"

// Of either sign, from an eighth to 16, with all the bits that the type has.
static uint64_t any_number(const struct Type* t, int rank, size_t i) {
  // splitmix64.
  uint64_t x = ((uint64_t)i * MAX_RANKS + (uint64_t)rank + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  const uint64_t bias = (1ull << (t->exponent - 1)) - 1, exponent = bias - 3 + x % 7;
  return ((x >> 63) << t->exponent | exponent) << t->mantissa | (x >> 8 & ((1ull << t->mantissa) - 1));
}

// Whether sums in the order of ranks and in the other one differ: if they do not, this shows nothing.
static bool order_matters(void) {
  for (size_t i = 0; i < 1000; i++) {
    float up = 0, down = 0;
    for (int rank = 0; rank < ranks; rank++) {
      up += (float)decode(&TYPES[F32], any_number(&TYPES[F32], rank, i));
      down += (float)decode(&TYPES[F32], any_number(&TYPES[F32], ranks - 1 - rank, i));
    }
    if (up != down) return true;
  }
  return false;
}

// FNV-1a, of words.
static uint64_t hash_of(const char* bytes, size_t length) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (size_t at = 0; at < length; at += 8) {
    uint64_t word = 0;
    memcpy(&word, bytes + at, length - at < 8 ? length - at : 8);
    hash = (hash ^ word) * 0x100000001b3ull;
  }
  return hash;
}

// A result's hash; 0 where this rank gets none.
static uint64_t result_of(struct Rank* r, const struct Case* c) {
  const size_t sent = send_bytes(c), received = recv_bytes(c);
  CU(cuMemcpyHtoDAsync, r->send, r->in, sent, r->stream);
  enqueue(r, c->op, c->type->code, c->count, c->reduction, c->root, r->send, r->recv);
  CU(cuMemcpyDtoHAsync, r->out, r->recv, received, r->stream);
  CU(cuStreamSynchronize, r->stream);
  r->cases++;
  return c->op == REDUCE && r->rank != c->root ? 0 : hash_of(r->out, received);
}

static void run_bits(struct Rank* r) {
  // Of each communicator; the first one's is what the environment says.
  static const char* const blocks[] = {NULL, "1", "3"};
  static const enum Op ops[] = {ALL_REDUCE, REDUCE_SCATTER, REDUCE};
  static const int types[] = {F16, F32, BF16};
  const size_t counts[] = {33, 5003, 20011, max_bytes / 4 / (size_t)ranks - 5};
  enum { COMMS = 3, OPS_ = 3, TYPES_ = 3, COUNTS = 4 };
  uint64_t first[OPS_ * TYPES_ * COUNTS] = {0};
  if (max_bytes / 4 / (size_t)ranks < counts[2]) fail("bits: %zu bytes are too few", max_bytes);
  if (!order_matters()) fail("bits: sums of %d ranks have no order", ranks);
  for (int comm = 0; comm < COMMS; comm++) {
    barrier();
    if (blocks[comm] != NULL && (processes || r->rank == 0)) setenv("NCCL_MAX_CTAS", blocks[comm], 1);
    open_rank(r, comm);
    if (comm == 0) buffers(r, max_bytes);
    for (int number = 0; number < (int)(sizeof first / sizeof first[0]); number++) {
      const int op = number % OPS_, type = number / OPS_ % TYPES_;
      const size_t count = counts[number / OPS_ / TYPES_];
      const struct Case c = {ops[op], &TYPES[types[type]], count, SUM, number % ranks, 0};
      for (size_t i = 0; i < send_bytes(&c) / (size_t)c.type->size; i++) put(c.type, r->in, i, any_number(c.type, r->rank, i));
      for (int time = 0; time < 2; time++) {
        const uint64_t hash = result_of(r, &c);
        const bool is_first = comm == 0 && time == 0;
        if (is_first) first[number] = hash;
        if (hash != first[number])
          fail("bits %s %s count %zu rank %d of %d: NCCL_MAX_CTAS=%s, time %d: others than at first", OP_NAMES[c.op], c.type->name,
               c.count, r->rank, ranks, blocks[comm] != NULL ? blocks[comm] : "as told", time);
      }
      if (c.op != ALL_REDUCE) continue;
      // As many bits as a double keeps.
      shared->numbers[r->rank] = (double)(first[number] >> 12);
      barrier();
      if (shared->numbers[r->rank] != shared->numbers[0])
        fail("bits all_reduce %s count %zu: rank %d of %d has others than rank 0", c.type->name, c.count, r->rank, ranks);
      barrier();
    }
    NC(CommDestroy(r->comm));
    CU(cuStreamDestroy, r->stream);
  }
  barrier();
  if (r->rank == 0) printf("ok %ld results a rank, their bits the same\n", r->cases);
}

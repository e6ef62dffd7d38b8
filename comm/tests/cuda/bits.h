// Sums of numbers whose last bits depend on the order in which they are added: each result has the same bits on all ranks that get it, a second time, and
// however many blocks a kernel has.
#pragma once
#include "random.h"

// A rank's numbers begin anew with this.
static struct Random numbers_of(int rank) { return (struct Random){((uint64_t)rank + 1) * 0x9e3779b97f4a7c15ull}; }

// Of either sign, from an eighth to 16, with all the bits that the type has.
static uint64_t any_number(const struct Type* t, struct Random* random) {
  const uint64_t x = next_random(random), bias = (1ull << (t->exponent - 1)) - 1, exponent = bias - 3 + x % 7;
  return ((x >> 63) << t->exponent | exponent) << t->mantissa | (x >> 8 & ((1ull << t->mantissa) - 1));
}

// Whether sums in the order of ranks and in the other one differ: if they do not, this shows nothing.
static bool order_matters(void) {
  struct Random random[MAX_RANKS];
  for (int rank = 0; rank < ranks; rank++) random[rank] = numbers_of(rank);
  for (size_t i = 0; i < 1000; i++) {
    float numbers[MAX_RANKS], up = 0, down = 0;
    for (int rank = 0; rank < ranks; rank++) up += numbers[rank] = (float)decode(&TYPES[F32], any_number(&TYPES[F32], &random[rank]));
    for (int rank = ranks; rank-- > 0;) down += numbers[rank];
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
  const size_t received = recv_bytes(c);
  // What was there before is no result.
  CU(cuMemsetD8Async, r->recv, (unsigned char)0xa5, received, r->stream);
  CU(cuMemcpyHtoDAsync, r->send, r->in, send_bytes(c), r->stream);
  enqueue(r, c->op, c->type->code, c->count, c->reduction, c->root, r->send, r->recv);
  CU(cuMemcpyDtoHAsync, r->out, r->recv, received, r->stream);
  CU(cuStreamSynchronize, r->stream);
  r->cases++;
  return c->op == REDUCE && r->rank != c->root ? 0 : hash_of(r->out, received);
}

// One case twice. `first`: the hash that it had at first, or 0, which this then sets.
static void check_bits(struct Rank* r, const struct Case* c, uint64_t* first, const char* blocks) {
  struct Random random = numbers_of(r->rank);
  for (size_t i = 0; i < send_bytes(c) / (size_t)c->type->size; i++) put(c->type, r->in, i, any_number(c->type, &random));
  for (int time = 0; time < 2; time++) {
    const uint64_t hash = result_of(r, c);
    if (*first == 0) *first = hash;
    if (hash != *first)
      fail("bits %s %s count %zu rank %d of %d: NCCL_MAX_CTAS=%s, time %d: others than at first", OP_NAMES[c->op], c->type->name, c->count,
           r->rank, ranks, blocks, time);
  }
  if (c->op != ALL_REDUCE) return;
  // As many bits as a double keeps.
  shared->numbers[r->rank] = (double)(*first >> 12);
  barrier();
  if (shared->numbers[r->rank] != shared->numbers[0])
    fail("bits all_reduce %s count %zu: rank %d of %d has others than rank 0", c->type->name, c->count, r->rank, ranks);
  barrier();
}

// Whether kernels had as many blocks as `NCCL_MAX_CTAS` lets them, and more where it does not say. Only the driver without a GPU knows. By all ranks.
static void check_blocks(struct Rank* r, const char* told) {
  unsigned (*const most)(void) = (unsigned (*)(void))dlsym(RTLD_DEFAULT, "ringsight_mock_blocks");
  barrier();
  if (most != NULL && (processes || r->rank == 0)) {
    const unsigned blocks = most(), limit = told != NULL ? (unsigned)atoi(told) : 0;
    if (limit != 0 ? blocks != limit : blocks <= 3) fail("bits: kernels of %u blocks where NCCL_MAX_CTAS is %s", blocks, told != NULL ? told : "as told");
  }
  barrier();
}

static void run_bits(struct Rank* r) {
  enum { KINDS = 3, COUNTS = 4, COMMUNICATORS = 3 };
  static const enum Op ops[KINDS] = {ALL_REDUCE, REDUCE_SCATTER, REDUCE};
  static const int types[KINDS] = {F16, F32, BF16};
  const size_t counts[COUNTS] = {33, 5003, 20011, max_bytes / 4 / (size_t)ranks - 5};
  // Of each communicator; the first one's is what the environment says.
  static const char* const blocks[COMMUNICATORS] = {NULL, "1", "3"};
  uint64_t first[COUNTS][KINDS][KINDS] = {0};
  if (max_bytes / 4 / (size_t)ranks < counts[2]) fail("bits: %zu bytes are too few", max_bytes);
  if (!order_matters()) fail("bits: sums of %d ranks have no order", ranks);
  for (int which = 0; which < COMMUNICATORS; which++) {
    barrier();
    // The least of all ranks' holds.
    const char* const told = blocks[which] == NULL || r->rank % 2 == 0 ? blocks[which] : "7";
    if (told != NULL && (processes || r->rank == 0)) setenv("NCCL_MAX_CTAS", told, 1);
    // So that this is seen to tell bits apart: an algorithm for the last one that adds in another order.
    if (which == COMMUNICATORS - 1 && getenv("LAST_ALGO") != NULL && (processes || r->rank == 0)) setenv("RINGSIGHT_ALGO", getenv("LAST_ALGO"), 1);
    open_rank(r, which);
    if (which == 0) buffers(r, max_bytes);
    for (int count = 0; count < COUNTS; count++)
      for (int type = 0; type < KINDS; type++)
        for (int op = 0; op < KINDS; op++) {
          const struct Case c = {ops[op], &TYPES[types[type]], counts[count], SUM, (count + type) % ranks, 0};
          check_bits(r, &c, &first[count][type][op], blocks[which] != NULL ? blocks[which] : "as told");
        }
    check_blocks(r, blocks[which]);
    NC(CommDestroy(r->comm));
    CU(cuStreamDestroy, r->stream);
  }
  barrier();
  if (r->rank == 0) printf("ok %ld results a rank, their bits the same\n", r->cases);
}

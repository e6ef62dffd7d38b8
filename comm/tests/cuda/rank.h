// One rank of driver.c: its buffers, the operations, and what their results must be.
#pragma once
#include "load.h"

// ---- types ----
struct Type { const char* name; int code, size, exponent, mantissa; };  // exponent 0: integers
static const struct Type TYPES[] = {
    {"i8", 0, 1, 0, 0}, {"u8", 1, 1, 0, 0}, {"i32", 2, 4, 0, 0}, {"u32", 3, 4, 0, 0}, {"i64", 4, 8, 0, 0},
    {"u64", 5, 8, 0, 0}, {"f16", 6, 2, 5, 10}, {"f32", 7, 4, 8, 23}, {"f64", 8, 8, 11, 52}, {"bf16", 9, 2, 8, 7},
    {"e4m3", 10, 1, 4, 3}, {"e5m2", 11, 1, 5, 2},
};
enum { F16 = 6, F32 = 7, BF16 = 9, I8 = 0, I32 = 2 };
enum { SUM = 0, AVG = 4 };
static const char* REDUCTIONS[] = {"sum", "prod", "max", "min", "avg", "premul-host", "premul-device"};

// A small value that the type represents exactly.
static uint64_t encode(const struct Type* t, double value) {
  if (t->exponent == 0) {
    uint64_t bits = (uint64_t)(int64_t)value;
    return t->size == 8 ? bits : bits & ((1ull << (8 * t->size)) - 1);
  }
  if (value == 0) return 0;
  int exponent;
  double fraction = frexp(value, &exponent);  // [0.5, 1)
  uint64_t bias = (1ull << (t->exponent - 1)) - 1;
  uint64_t mantissa = (uint64_t)ldexp(fraction * 2 - 1, t->mantissa);
  return (uint64_t)(exponent - 1 + (int)bias) << t->mantissa | mantissa;
}
static double decode(const struct Type* t, uint64_t bits) {
  if (t->exponent == 0) {
    switch (t->code) {
      case 0: return (int8_t)bits;
      case 2: return (int32_t)bits;
      case 4: return (double)(int64_t)bits;
      default: return (double)bits;
    }
  }
  uint64_t bias = (1ull << (t->exponent - 1)) - 1;
  int exponent = (int)(bits >> t->mantissa & ((1ull << t->exponent) - 1));
  double fraction = ldexp((double)(bits & ((1ull << t->mantissa) - 1)), -t->mantissa);
  double value = exponent == 0 ? ldexp(fraction, 1 - (int)bias) : ldexp(1 + fraction, exponent - (int)bias);
  return bits >> (8 * t->size - 1) ? -value : value;
}
static uint64_t get(const struct Type* t, const void* at, size_t i) {
  uint64_t bits = 0;
  memcpy(&bits, (const char*)at + i * t->size, t->size);
  return bits;
}
static void put(const struct Type* t, void* at, size_t i, uint64_t bits) { memcpy((char*)at + i * t->size, &bits, t->size); }

// Element i of rank r's data: 0, 1, 2 (products: 1, 2).
static int element(int salt, int rank, size_t i, bool product) {
  size_t x = i * 7 + (size_t)rank * 5 + i / 11 + (size_t)salt;
  return product ? 1 + (int)(x % 5 == 0) : (int)(x % 3);
}
// It repeats: 165 elements further `x` is 1170 more, a multiple of 3 and of 5.
enum { PERIOD = 165 };

// ---- one rank ----
struct Rank {
  int rank, device;
  Comm comm;
  CUstream stream;
  CUdeviceptr send, recv, scalar;
  char *in, *out;
  size_t bytes;
  long cases;
};

static void make_current(int device) {
  CUcontext context;
  CU(cuDevicePrimaryCtxRetain, &context, device);
  CU(cuCtxSetCurrent, context);
}
// A function of a stream, which goes on when the gate, an `atomic_int`, is open.
static void hold(void* gate) {
  while (!atomic_load((atomic_int*)gate)) usleep(100);
}

// The environment's GPUS has a digit for each rank: any of them, in any order.
static int device_of(int rank) {
  const char* order = getenv("GPUS");
  const int device = order != NULL && order[0] != 0 ? order[(size_t)rank % strlen(order)] - '0' : rank % devices;
  if (device < 0 || device >= devices) fail("GPUS=%s: there are %d", order, devices);
  return device;
}

// One of all ranks.
static Comm new_comm(const struct Rank* r, int which) {
  Comm comm;
  if (r->rank == 0) NC(GetUniqueId(&shared->id[which]));
  barrier();
  NC(CommInitRank(&comm, ranks, shared->id[which], r->rank));
  return comm;
}

static void open_rank(struct Rank* r, int which) {
  r->device = device_of(r->rank);
  make_current(r->device);
  CU(cuStreamCreate, &r->stream, 1u);
  r->comm = new_comm(r, which);
}
static void buffers(struct Rank* r, size_t bytes) {
  r->bytes = bytes;
  CU(cuMemAlloc, &r->send, bytes);
  CU(cuMemAlloc, &r->recv, bytes);
  CU(cuMemAlloc, &r->scalar, (size_t)4096);
  CU(cuMemHostAlloc, (void**)&r->in, bytes, 0u);
  CU(cuMemHostAlloc, (void**)&r->out, bytes, 0u);
  barrier();
}

enum Op { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALLTOALL, GATHER, SCATTER, SEND_RECV, PAIRS, OPS };
static const char* OP_NAMES[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "alltoall",
                                 "gather", "scatter", "sendrecv", "pairs"};

// Whether the environment's OPS, names between blanks, has this one; `otherwise` if there is no such variable.
static bool is_wanted(enum Op op, bool otherwise) {
  const char* wanted = getenv("OPS");
  const size_t length = strlen(OP_NAMES[op]);
  if (wanted == NULL) return otherwise;
  // The name stands in others, too.
  for (const char* at = wanted; (at = strstr(at, OP_NAMES[op])) != NULL; at += length)
    if ((at == wanted || at[-1] == ' ') && (at[length] == 0 || at[length] == ' ')) return true;
  return false;
}

static double combined(int salt, size_t i, int reduction, bool integers) {
  double all = element(salt, 0, i, reduction == 1);
  if (reduction >= 5) all *= 2;
  for (int rank = 1; rank < ranks; rank++) {
    double one = element(salt, rank, i, reduction == 1);
    if (reduction >= 5) one *= 2;
    switch (reduction) {
      case 1: all *= one; break;
      case 2: all = all > one ? all : one; break;
      case 3: all = all < one ? all : one; break;
      default: all += one;
    }
  }
  if (reduction == AVG) all = integers ? (double)((long)all / ranks) : all / ranks;
  return all;
}

static void enqueue(struct Rank* r, enum Op op, int type, size_t count, int reduction, int root, CUdeviceptr send,
                    CUdeviceptr recv) {
  const void* s = (const void*)send;
  void* d = (void*)recv;
  switch (op) {
    case ALL_REDUCE: NC(AllReduce(s, d, count, type, reduction, r->comm, r->stream)); break;
    case ALL_GATHER: NC(AllGather(s, d, count, type, r->comm, r->stream)); break;
    case REDUCE_SCATTER: NC(ReduceScatter(s, d, count, type, reduction, r->comm, r->stream)); break;
    case BROADCAST: NC(Broadcast(s, d, count, type, root, r->comm, r->stream)); break;
    case REDUCE: NC(Reduce(s, d, count, type, reduction, root, r->comm, r->stream)); break;
    case ALLTOALL: NC(AlltoAll(s, d, count, type, r->comm, r->stream)); break;
    case GATHER: NC(Gather(s, d, count, type, root, r->comm, r->stream)); break;
    case SCATTER: NC(Scatter(s, d, count, type, root, r->comm, r->stream)); break;
    case SEND_RECV:
      NC(GroupStart());
      NC(Send(s, count, type, (r->rank + 1) % ranks, r->comm, r->stream));
      NC(Recv(d, count, type, (r->rank + ranks - 1) % ranks, r->comm, r->stream));
      NC(GroupEnd());
      break;
    case PAIRS: {  // all to all by messages, with a collective in the same group
      size_t size = TYPES[type].size * count;
      NC(GroupStart());
      for (int peer = 0; peer < ranks; peer++) {
        NC(Send((const char*)s + peer * size, count, type, peer, r->comm, r->stream));
        NC(Recv((char*)d + peer * size, count, type, peer, r->comm, r->stream));
      }
      NC(GroupEnd());
      break;
    }
    default: break;
  }
}

// A short operation, to its end: what comes with the first one is there then.
static void reduce_once(struct Rank* r) {
  enqueue(r, ALL_REDUCE, F32, 1000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
}

// Where block b of this rank's result comes from: rank and first element there; -1: nothing is written.
static int origin(enum Op op, int rank, int root, int block, int* from_block) {
  *from_block = 0;
  switch (op) {
    case ALL_GATHER: return block;
    case BROADCAST: return root;
    case ALLTOALL:
    case PAIRS: *from_block = rank; return block;
    case GATHER: return rank == root ? block : -1;
    case SCATTER: *from_block = rank; return root;
    case SEND_RECV: return (rank + ranks - 1) % ranks;
    default: return -1;
  }
}

// One operation of a rank: what is sent, and what must come of it.
struct Case {
  enum Op op;
  const struct Type* type;
  size_t count;
  int reduction, root, salt;
};
static bool reduces(enum Op op) { return op == ALL_REDUCE || op == REDUCE_SCATTER || op == REDUCE; }
static size_t send_bytes(const struct Case* c) {
  const bool many = c->op == REDUCE_SCATTER || c->op == ALLTOALL || c->op == SCATTER || c->op == PAIRS;
  return (many ? (size_t)ranks : 1) * c->count * (size_t)c->type->size;
}
static size_t recv_blocks(enum Op op) { return op == ALL_GATHER || op == ALLTOALL || op == GATHER || op == PAIRS ? (size_t)ranks : 1; }
static size_t recv_bytes(const struct Case* c) { return recv_blocks(c->op) * c->count * (size_t)c->type->size; }
// The type's 0, 1 and 2.
struct Codes { uint64_t of[3]; };
static struct Codes codes_of(const struct Type* t) { return (struct Codes){{encode(t, 0), encode(t, 1), encode(t, 2)}}; }

static void fill(const struct Rank* r, const struct Case* c, char* in) {
  const struct Codes codes = codes_of(c->type);
  const bool product = reduces(c->op) && c->reduction == 1;
  const size_t bytes = send_bytes(c), all = bytes / (size_t)c->type->size;
  for (size_t i = 0; i < all && i < PERIOD; i++) put(c->type, in, i, codes.of[element(c->salt, r->rank, i, product)]);
  for (size_t done = PERIOD * (size_t)c->type->size; done < bytes; done *= 2) memcpy(in + done, in, done < bytes - done ? done : bytes - done);
}

// How many elements of a block are to be looked at: of one that repeats, as what was sent does, the first ones.
static size_t distinct(const struct Type* t, const char* block, size_t count) {
  const size_t size = (size_t)t->size;
  const bool repeats = count > PERIOD && memcmp(block, block + PERIOD * size, (count - PERIOD) * size) == 0;
  return repeats ? PERIOD : count;
}

// Whether `out` is what this rank must have got; `what` is said of it if not.
static void verify(const struct Rank* r, const struct Case* c, const char* out, const char* what) {
  const struct Type* t = c->type;
  const struct Codes codes = codes_of(t);
  if (c->op == REDUCE && r->rank != c->root) return;
  for (size_t block = 0; block < recv_blocks(c->op); block++) {
    int from_block = 0, from = reduces(c->op) ? 0 : origin(c->op, r->rank, c->root, (int)block, &from_block);
    if (from < 0) continue;
    const size_t looked_at = distinct(t, out + block * c->count * (size_t)t->size, c->count);
    for (size_t i = 0; i < looked_at; i++) {
      uint64_t found = get(t, out, block * c->count + i);
      bool right;
      if (reduces(c->op)) {
        size_t at = c->op == REDUCE_SCATTER ? (size_t)r->rank * c->count + i : i;
        double want = combined(c->salt, at, c->reduction, t->exponent == 0);
        double slack = c->reduction == AVG && t->exponent != 0 && (ranks & (ranks - 1)) ? ldexp(want, 1 - t->mantissa) : 0;
        right = slack != 0 ? fabs(decode(t, found) - want) <= slack : found == encode(t, want);
        if (!right)
          fail("%s %s %s count %zu root %d rank %d of %d%s: element %zu is %g, not %g", OP_NAMES[c->op], t->name,
               REDUCTIONS[c->reduction], c->count, c->root, r->rank, ranks, what, i, decode(t, found), want);
      } else {
        uint64_t want = codes.of[element(c->salt, from, (size_t)from_block * c->count + i, false)];
        if (found != want)
          fail("%s %s count %zu root %d rank %d of %d%s: block %zu element %zu is %#lx, not %#lx", OP_NAMES[c->op], t->name,
               c->count, c->root, r->rank, ranks, what, block, i, (long)found, (long)want);
      }
    }
  }
}

static void check_one(struct Rank* r, enum Op op, const struct Type* t, size_t count, int reduction, bool in_place, int salt) {
  if (!is_wanted(op, true)) return;
  const struct Case c = {op, t, count, reduction, salt % ranks, salt};
  const size_t size = (size_t)t->size, sent = send_bytes(&c), received = recv_bytes(&c);
  if (sent > r->bytes || received > r->bytes) return;
  fill(r, &c, r->in);
  CUdeviceptr send = r->send, recv = r->recv;
  CU(cuMemsetD8Async, recv, (unsigned char)0xa5, r->bytes < received + 64 ? received : received + 64, r->stream);
  if (in_place) {
    if (op == ALL_REDUCE || op == REDUCE || op == BROADCAST) send = recv;
    if (op == ALL_GATHER) send = recv + (size_t)r->rank * count * size;
    if (op == REDUCE_SCATTER) recv = send + (size_t)r->rank * count * size;
  }
  CU(cuMemcpyHtoDAsync, send, r->in, sent, r->stream);
  int number = reduction;
  bool made = reduces(op) && reduction >= 5;
  if (made) {
    uint64_t two = encode(t, 2);
    memcpy(r->out, &two, 8);
    if (reduction == 6) CU(cuMemcpyHtoDAsync, r->scalar, r->out, (size_t)8, r->stream);
    NC(RedOpCreatePreMulSum(&number, reduction == 6 ? (void*)r->scalar : (void*)r->out, t->code, reduction == 5, r->comm));
  }
  enqueue(r, op, t->code, count, number, c.root, send, recv);
  if (made) NC(RedOpDestroy(number, r->comm));
  CU(cuStreamSynchronize, r->stream);
  CU(cuMemcpyDtoHAsync, r->out, recv, received, r->stream);
  CU(cuStreamSynchronize, r->stream);
  r->cases++;
  verify(r, &c, r->out, in_place ? " in place" : "");
}

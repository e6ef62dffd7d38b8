// Random groups: collectives and messages of random sizes, types and roots, over several streams of each rank, eager and in graphs.
// Every rank makes the same plan from the same seed, but takes streams of its own.
#pragma once
#include "rank.h"

enum { STREAMS = 3, MOST_OPS = 8, BUFFER_BYTES = 64 << 20 };

struct Random { uint64_t state; };
// xorshift64*
static uint64_t next_random(struct Random* random) {
  random->state ^= random->state >> 12;
  random->state ^= random->state << 25;
  random->state ^= random->state >> 27;
  return random->state * 0x2545f4914f6cdd1dull;
}
static size_t below(struct Random* random, size_t limit) { return (size_t)(next_random(random) >> 33) % limit; }

// One operation of a plan; a message goes from one rank to another, the case being that of the two.
struct Planned {
  struct Case c;
  bool message;
  int from, to;
  size_t at, into;  // where its parts of the send and of the receive buffer begin
};
struct Plan {
  int ops;
  bool grouped;
  size_t bytes;
  struct Planned all[MOST_OPS];
};

static struct Plan plan_of(uint64_t seed) {
  struct Random random = {seed * 0x9e3779b97f4a7c15ull | 1};
  for (int i = 0; i < 8; i++) next_random(&random);
  struct Plan plan = {.ops = 1 + (int)below(&random, MOST_OPS), .grouped = below(&random, 4) != 0};
  for (int i = 0; i < plan.ops; i++) {
    struct Planned* one = &plan.all[i];
    one->message = below(&random, 3) == 0;
    one->c.type = &TYPES[below(&random, 12)];
    // As many orders of magnitude as there are ways of doing it.
    one->c.count = 1 + below(&random, (size_t)1 << (2 + below(&random, 17)));
    one->c.salt = (int)below(&random, 1000);
    one->c.root = (int)below(&random, (size_t)ranks);
    one->from = (int)below(&random, (size_t)ranks);
    one->to = (int)below(&random, (size_t)ranks);
    one->c.op = one->message ? BROADCAST : (enum Op)below(&random, SEND_RECV);
    one->c.reduction = (int)below(&random, 5);
    // What comes of a message is what comes of a broadcast from its sender.
    if (one->message) one->c.root = one->from;
    // The parts begin at elements.
    one->at = (plan.bytes + 63) / 64 * 64 + below(&random, 4) * (size_t)one->c.type->size;
    one->into = one->at + below(&random, 2) * (size_t)one->c.type->size;
    const size_t sent = one->at + send_bytes(&one->c), received = one->into + recv_bytes(&one->c);
    const size_t end = sent > received ? sent : received;
    if (end > BUFFER_BYTES) {
      plan.ops = i;
      break;
    }
    plan.bytes = end;
  }
  return plan;
}

// Calls what the plan has for this rank.
static void call_plan(struct Rank* r, const struct Plan* plan, CUstream* streams, struct Random* own) {
  CUstream first = r->stream;
  if (plan->grouped) NC(GroupStart());
  for (int i = 0; i < plan->ops; i++) {
    const struct Planned* one = &plan->all[i];
    const struct Case* c = &one->c;
    r->stream = streams[below(own, STREAMS)];
    if (!one->message) {
      enqueue(r, c->op, c->type->code, c->count, c->reduction, c->root, r->send + one->at, r->recv + one->into);
      continue;
    }
    // To oneself both belong to one group.
    if (one->from == one->to) NC(GroupStart());
    if (r->rank == one->from) NC(Send((void*)(r->send + one->at), c->count, c->type->code, one->to, r->comm, r->stream));
    if (r->rank == one->to) NC(Recv((void*)(r->recv + one->into), c->count, c->type->code, one->from, r->comm, r->stream));
    if (one->from == one->to) NC(GroupEnd());
  }
  if (plan->grouped) NC(GroupEnd());
  r->stream = first;
}

// New data: what was there before is no result.
static void fill_plan(struct Rank* r, struct Plan* plan, int salt) {
  for (int i = 0; i < plan->ops; i++) {
    plan->all[i].c.salt = salt + i;
    fill(r, &plan->all[i].c, r->in + plan->all[i].at);
  }
  CU(cuMemcpyHtoDAsync, r->send, r->in, plan->bytes, r->stream);
  CU(cuMemsetD8Async, r->recv, (unsigned char)0xa5, plan->bytes, r->stream);
  CU(cuStreamSynchronize, r->stream);
}

static void verify_plan(struct Rank* r, const struct Plan* plan, CUstream* streams, const char* what) {
  for (int i = 0; i < STREAMS; i++) CU(cuStreamSynchronize, streams[i]);
  CU(cuMemcpyDtoHAsync, r->out, r->recv, plan->bytes, r->stream);
  CU(cuStreamSynchronize, r->stream);
  for (int i = 0; i < plan->ops; i++) {
    const struct Planned* one = &plan->all[i];
    if (!one->message || r->rank == one->to) verify(r, &one->c, r->out + one->into, what);
  }
  r->cases += plan->ops;
}

// The plan in a graph: the other streams are forked from the first and joined to it.
static CUgraphExec capture_plan(struct Rank* r, const struct Plan* plan, CUstream* streams, struct Random* own) {
  CUgraph graph;
  CUgraphExec exec;
  CUevent fork, join[STREAMS];
  CU(cuEventCreate, &fork, 2u);
  CU(cuStreamBeginCapture, streams[0], 1u);
  CU(cuEventRecord, fork, streams[0]);
  for (int i = 1; i < STREAMS; i++) CU(cuStreamWaitEvent, streams[i], fork, 0u);
  call_plan(r, plan, streams, own);
  for (int i = 1; i < STREAMS; i++) {
    CU(cuEventCreate, &join[i], 2u);
    CU(cuEventRecord, join[i], streams[i]);
    CU(cuStreamWaitEvent, streams[0], join[i], 0u);
  }
  CU(cuStreamEndCapture, streams[0], &graph);
  CU(cuGraphInstantiate, &exec, graph, 0ull);
  CU(cuGraphDestroy, graph);
  return exec;
}

static void run_random(struct Rank* r, int rounds) {
  open_rank(r, 0);
  buffers(r, BUFFER_BYTES);
  CUstream streams[STREAMS] = {r->stream};
  for (int i = 1; i < STREAMS; i++) CU(cuStreamCreate, &streams[i], 1u);
  for (int round = 0; round < rounds; round++) {
    struct Plan plan = plan_of((uint64_t)round + 1);
    struct Random own = {(uint64_t)round * 977 + (uint64_t)r->rank * 131 + 7};
    char what[60];
    snprintf(what, sizeof what, " in round %d%s", round, plan.grouped ? ", grouped" : "");
    fill_plan(r, &plan, round);
    barrier();
    call_plan(r, &plan, streams, &own);
    verify_plan(r, &plan, streams, what);
    barrier();
    if (round % 3 != 0) continue;
    // Connections of messages are there now.
    CUgraphExec exec = capture_plan(r, &plan, streams, &own);
    for (int replay = 1; replay <= 3; replay++) {
      snprintf(what, sizeof what, " in round %d%s, replay %d", round, plan.grouped ? ", grouped" : "", replay);
      fill_plan(r, &plan, round + 100 * replay);
      barrier();
      CU(cuGraphLaunch, exec, streams[0]);
      verify_plan(r, &plan, streams, what);
      barrier();
    }
    CU(cuGraphExecDestroy, exec);
  }
  barrier();
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok %d rounds, %ld operations a rank\n", rounds, r->cases);
}

// Two libraries by turns, in one process of each rank, so that what the machine does meanwhile meets both: what an eager all_reduce of
// 8 bytes takes the calling thread, and one of a graph of 20 the GPU.
#pragma once

#include "rank.h"

enum { TURN_CALLS = 100, TURN_WARM = 10, TURN_GRAPH = 20, MOST_TURNS = 10000 };

// A library, with this rank's communicator and graph of it.
struct Side {
  struct Nccl nccl;
  Comm comm;
  CUgraph graph;
  CUgraphExec exec;
  // Nanoseconds, by turn.
  double host[MOST_TURNS], device[MOST_TURNS];
};

static void call_shortest(struct Rank* r) { enqueue(r, ALL_REDUCE, F32, 2, SUM, 0, r->send, r->recv); }

// What is next called is this side's.
static void take(struct Rank* r, const struct Side* side) {
  nccl = side->nccl;
  r->comm = side->comm;
}

static void time_calls(struct Rank* r, struct Side* side, int turn) {
  take(r, side);
  for (int i = 0; i < TURN_WARM; i++) call_shortest(r);
  CU(cuStreamSynchronize, r->stream);
  barrier();
  const double start = now();
  for (int i = 0; i < TURN_CALLS; i++) call_shortest(r);
  side->host[turn] = (now() - start) / TURN_CALLS * 1e9;
  CU(cuStreamSynchronize, r->stream);
}

static void capture_shortest(struct Rank* r, struct Side* side) {
  take(r, side);
  CU(cuStreamBeginCapture, r->stream, 1u);
  for (int i = 0; i < TURN_GRAPH; i++) call_shortest(r);
  CU(cuStreamEndCapture, r->stream, &side->graph);
  CU(cuGraphInstantiate, &side->exec, side->graph, 0ull);
  CU(cuGraphLaunch, side->exec, r->stream);
  CU(cuStreamSynchronize, r->stream);
}

static void time_graph(struct Rank* r, struct Side* side, int turn, CUevent begin, CUevent end) {
  float milliseconds;
  barrier();
  CU(cuEventRecord, begin, r->stream);
  CU(cuGraphLaunch, side->exec, r->stream);
  CU(cuEventRecord, end, r->stream);
  CU(cuStreamSynchronize, r->stream);
  CU(cuEventElapsedTime, &milliseconds, begin, end);
  side->device[turn] = milliseconds / TURN_GRAPH * 1e6;
}

static double middle(const double* values, int count) {
  static double sorted[MOST_TURNS];
  memcpy(sorted, values, (size_t)count * sizeof *values);
  qsort(sorted, (size_t)count, sizeof *sorted, by_value);
  return (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
}

// Medians of both, and of what the first takes more in one turn.
static void tell(const char* what, const double* one, const double* other, int turns) {
  static double more[MOST_TURNS];
  for (int turn = 0; turn < turns; turn++) more[turn] = one[turn] - other[turn];
  printf(", %s_ns %.1f, other_%s_ns %.1f, %s_more_ns %.1f", what, middle(one, turns), what, middle(other, turns), what,
         middle(more, turns));
}

static void run_turns(struct Rank* r, const char* other, int turns) {
  if (!processes) fail("turns: each rank is a process of its own (p)");
  if (other == NULL || turns < 1 || turns > MOST_TURNS) fail("turns: another library, and 1 to %d turns", MOST_TURNS);
  static struct Side sides[2];
  const char* const libraries[2] = {library, other};
  for (int i = 0; i < 2; i++) {
    nccl = sides[i].nccl = open_library(libraries[i]);
    open_rank(r, i);
    sides[i].comm = r->comm;
  }
  if (sides[0].nccl.AllReduce == sides[1].nccl.AllReduce) fail("turns: %s is the same library as %s", other, library);
  buffers(r, 4096);
  // Not always the same one first.
  for (int turn = 0; turn < turns; turn++)
    for (int i = 0; i < 2; i++) time_calls(r, &sides[(turn + i) % 2], turn);
  CUevent begin, end;
  CU(cuEventCreate, &begin, 0u);
  CU(cuEventCreate, &end, 0u);
  // Only now: what is captured may change what a call of its communicator does.
  for (int i = 0; i < 2; i++) capture_shortest(r, &sides[i]);
  for (int turn = 0; turn < turns; turn++)
    for (int i = 0; i < 2; i++) time_graph(r, &sides[(turn + i) % 2], turn, begin, end);
  for (int i = 0; i < 2; i++) {
    take(r, &sides[i]);
    CU(cuGraphExecDestroy, sides[i].exec);
    CU(cuGraphDestroy, sides[i].graph);
    barrier();
    NC(CommDestroy(r->comm));
  }
  barrier();
  if (r->rank != 0) return;
  printf("ok %d turns", turns);
  tell("host", sides[0].host, sides[1].host, turns);
  tell("device", sides[0].device, sides[1].device, turns);
  printf("\n");
}

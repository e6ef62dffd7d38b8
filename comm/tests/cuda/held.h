// Calls of one rank while a kernel of its own waits on the GPU for another rank, which may have the same GPU. The library's return; of the driver's it is told
// which do: what the library may call meanwhile depends on it.
#pragma once

#include "rank.h"

struct Meanwhile {
  const char* name;
  bool is_librarys;
};
static const struct Meanwhile MEANWHILE[] = {
    {"an operation of the same kernel", true},
    {"operations of more kernels than have graphs", true},
    {"an operation in another stream", true},
    {"operations in other streams, the first of which is gone", true},
    {"a capture behind it", true},
    {"to make and destroy a stream", false},
    {"to make and record an event", false},
    {"to copy from pinned memory", false},
    {"to allocate memory", false},
    {"to make a graph", false},
    {"to upload a graph", false},
    {"to launch a graph", false},
};
enum { MEANWHILES = sizeof MEANWHILE / sizeof MEANWHILE[0] };

// Of a copy: `uploaded` before there is anything to wait for.
struct Graphs {
  CUgraph graph;
  CUgraphExec made, uploaded;
};

// Whether what waited has been ended: a call after that is refused, and one that waits is, too.
static atomic_bool has_ended;

static void sum_of(struct Rank* r, int type, CUstream stream) {
  const Code code = nccl.AllReduce((void*)r->recv, (void*)r->recv, 2, type, SUM, r->comm, stream);
  if (code != 0 && !atomic_load(&has_ended)) fail("held: AllReduce: %d: %s", code, nccl.GetLastError(NULL));
}

static void meanwhile(struct Rank* r, int step, CUstream first, CUstream second, struct Graphs* graphs) {
  static const int ALL[] = {F32, BF16, F16, I32, I8, 8};
  enum { TYPES_USED = sizeof ALL / sizeof ALL[0] };
  CUstream made;
  CUevent event;
  CUgraph graph;
  CUdeviceptr memory;
  switch (step) {
    case 0: sum_of(r, F32, first); break;
    case 1:
      for (int i = 0; i < 2 * TYPES_USED; i++) sum_of(r, ALL[i % TYPES_USED], first);
      break;
    case 2: sum_of(r, F32, second); break;
    case 3:
      CU(cuStreamCreate, &made, 1u);
      sum_of(r, BF16, made);
      CU(cuStreamDestroy, made);
      for (int i = 0; i < 4; i++) sum_of(r, i % 2 ? F32 : BF16, i / 2 ? second : first);
      break;
    case 4:
      CU(cuStreamBeginCapture, second, 1u);
      sum_of(r, F32, second);
      CU(cuStreamEndCapture, second, &graph);
      CU(cuGraphDestroy, graph);
      break;
    case 5:
      CU(cuStreamCreate, &made, 1u);
      CU(cuStreamDestroy, made);
      break;
    case 6:
      CU(cuEventCreate, &event, 2u);
      CU(cuEventRecord, event, second);
      break;
    case 7: CU(cuMemcpyHtoDAsync, r->send, r->in, r->bytes, second); break;
    case 8: CU(cuMemAlloc, &memory, (size_t)(64 << 20)); break;
    case 9: CU(cuGraphInstantiate, &graphs->made, graphs->graph, 0ull); break;
    case 10: CU(cuGraphUpload, graphs->made, second); break;
    default: CU(cuGraphLaunch, graphs->uploaded, second);
  }
}

struct Guard {
  struct Rank* rank;
  // It looks; the calls have returned.
  atomic_bool is_there, is_over;
};

// Ends what waits if the calls do not return.
static void* guard(void* argument) {
  struct Guard* of = argument;
  make_current(of->rank->device);
  atomic_store(&of->is_there, true);
  const double start = now();
  while (!atomic_load(&of->is_over) && now() - start < 2) usleep(1000);
  if (!atomic_load(&of->is_over)) {
    atomic_store(&has_ended, true);
    NC(CommRevoke(of->rank->comm, 0));
  }
  return NULL;
}

static void run_held(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, 4096);
  CUstream second;
  struct Graphs graphs = {0};
  CU(cuStreamCreate, &second, 1u);
  CU(cuStreamBeginCapture, second, 1u);
  CU(cuMemcpyDtoDAsync, r->send, r->recv, r->bytes, second);
  CU(cuStreamEndCapture, second, &graphs.graph);
  CU(cuGraphInstantiate, &graphs.uploaded, graphs.graph, 0ull);
  CU(cuGraphUpload, graphs.uploaded, second);
  // Before any kernel of another rank's: making and uploading a graph may wait for those.
  barrier();
  int waited = 0;
  for (int step = 0; step < MEANWHILES; step++) {
    if (step > 0) r->comm = new_comm(r, 0);
    reduce_once(r);
    barrier();
    if (r->rank == 0) {
      struct Guard of = {.rank = r};
      pthread_t thread;
      sum_of(r, F32, r->stream);
      usleep(20000);
      if (CALL(cuStreamQuery, r->stream) != CUDA_ERROR_NOT_READY) fail("held: nothing waits");
      pthread_create(&thread, NULL, guard, &of);
      while (!atomic_load(&of.is_there)) usleep(100);
      // The name first: should it not even be ended, it is known which it is.
      printf("%s:\n", MEANWHILE[step].name);
      const double start = now();
      meanwhile(r, step, r->stream, second, &graphs);
      const double took = now() - start;
      atomic_store(&of.is_over, true);
      pthread_join(thread, NULL);
      const bool is_late = atomic_exchange(&has_ended, false);
      printf("  %.0f us%s\n", took * 1e6, is_late ? ", when what waited was ended" : "");
      waited += is_late && MEANWHILE[step].is_librarys;
      if (!is_late) NC(CommRevoke(r->comm, 0));
      CU(cuStreamSynchronize, r->stream);
      CU(cuStreamSynchronize, second);
      NC(CommDestroy(r->comm));
    }
    barrier();
    if (r->rank != 0) NC(CommAbort(r->comm));
    barrier();
  }
  if (waited > 0) fail("held: %d of the library's wait for the GPU", waited);
  if (r->rank == 0) printf("ok %d kinds of calls while a kernel waits\n", MEANWHILES);
}

// Runs collectives of a libnccl.so.2 on GPUs: checks them, captures them, aborts them, times them. One binary runs any
// library on any driver: tests/cuda.rs runs it on a driver without a GPU.
//
// driver LIBRARY MODE RANKS t|p|n [MAX_BYTES [STEP [MIN_BYTES]]]
// driver LIBRARY watch RANKS t|p|n FOLDER [REPLAYS]
// driver LIBRARY remap|pieces RANKS t|p|n [MAX_BYTES]
// driver LIBRARY bits RANKS t|p [MAX_BYTES]
// driver LIBRARY windows RANKS t|p [1]
// driver LIBRARY promise|alone RANKS t|p
// driver LIBRARY stalled|between RANKS t|p
// driver LIBRARY uncopied 2 t|p [1]
// driver LIBRARY replays RANKS t|p|n FOLDER|- [REPLAYS [OPERATIONS]]
// driver LIBRARY ended RANKS t|p [kept]
// driver LIBRARY beside RANKS t|p
// driver LIBRARY frozen 2 t|p|n
// driver LIBRARY awaited|latecomer RANKS t|p|n
// driver LIBRARY unanswered N p|n
// driver LIBRARY released RANKS t|p|n
// driver LIBRARY streams RANKS t|p|n
// driver LIBRARY held RANKS t|p
// driver LIBRARY turns RANKS p OTHER_LIBRARY [TURNS=1000]
// driver LIBRARY untaken 2 p
// driver LIBRARY fault RANKS t|p|n
// driver LIBRARY lacking RANKS t|p|n [1]
// driver LIBRARY differ RANKS t|p|n VARIANT
// driver LIBRARY random RANKS t|p|n ROUNDS
//
// Of all operations, check and bench take those that the environment's OPS names: check all without it, bench all_reduce,
// of elements that TYPE names, or float32. With WINDOWS, bench registers buffers as symmetric windows. With LAST_ALGO, the last communicator of bits takes
// that algorithm.
//
// Ranks are threads, processes, or processes on nodes of their own; rank r uses device r, modulo the devices, or the one that the environment's GPUS
// has for it; with ONE_EACH a process sees no other than device r. The last line says "ok", or a line "FAILED" and why.
#include "abort.h"
#include "bench.h"
#include "beside.h"
#include "bits.h"
#include "ended.h"
#include "fault.h"
#include "held.h"
#include "lacking.h"
#include "late.h"
#include "random.h"
#include "rank.h"
#include "refuse.h"
#include "remap.h"
#include "released.h"
#include "streams.h"
#include "turns.h"
#include "untaken.h"
#include "windows.h"

static void run_check(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, max_bytes);
  int salt = 0;
  const size_t large = max_bytes / 8 / (size_t)ranks - 3;
  // Every type and reduction.
  for (int t = 0; t < 12; t++)
    for (int reduction = 0; reduction < 7; reduction++) {
      check_one(r, ALL_REDUCE, &TYPES[t], 1003, reduction, false, salt++);
      if (reduction == 0 || reduction == 6) check_one(r, REDUCE_SCATTER, &TYPES[t], 501, reduction, false, salt++);
    }
  // Every operation and several sizes.
  const int types[] = {F32, BF16, I8};
  for (int op = 0; op < OPS; op++) {
    for (int t = 0; t < 3; t++) {
      const size_t counts[] = {1, 33, 4099, 200003, large};
      for (int c = 0; c < 5; c++) {
        if (c == 4 && t != 0) continue;
        check_one(r, op, &TYPES[types[t]], counts[c], 0, false, salt++);
        if (c % 2 == 0) check_one(r, op, &TYPES[types[t]], counts[c], 0, true, salt++);
      }
    }
  }
  // Parts that begin where 16 bytes do, as what goes straight between buffers asks, and ends that do not. Some are averages.
  for (int op = 0; op < OPS; op++)
    for (int t = 0; t < 3; t++) {
      const size_t many = (large + 3) & ~(size_t)63, counts[] = {32, 4096, 100000 - 100000 % 64, 4098, many, many};
      for (int c = 0; c < (t == 0 ? 6 : 4); c++) {
        const int reduction = c == 2 || c == 3 || c == 5 ? AVG : SUM;
        check_one(r, op, &TYPES[types[t]], counts[c], reduction, c % 2 != 0, salt++);
      }
    }
  // Elements that do not fill words, in buffers that do not begin at words; up to where other ways of doing it begin.
  for (int t = 0; t < 12; t++) {
    const struct Type* type = &TYPES[t];
    const size_t counts[] = {1, 2, 3, 5, 8, 9, 31, 300, (512 << 10) / (size_t)(ranks * type->size)};
    for (int c = 0; c < 9; c++) {
      const CUdeviceptr send = r->send, recv = r->recv;
      if (c % 2) r->send += (CUdeviceptr)type->size;
      if (c % 3 == 1) r->recv += (CUdeviceptr)type->size;
      if (c != 8 || t == F32 || t == I8) check_one(r, ALL_REDUCE, type, counts[c], 0, false, salt++);
      r->send = send;
      r->recv = recv;
    }
  }
  // Many small ones, in a row and in groups.
  for (int i = 0; i < 50 && is_wanted(ALL_REDUCE, true); i++) enqueue(r, ALL_REDUCE, F32, 100 + i, 0, 0, r->send, r->recv);
  NC(GroupStart());
  for (int i = 0; i < 20; i++) {
    const enum Op op = i % 2 ? ALL_GATHER : ALL_REDUCE;
    if (is_wanted(op, true)) enqueue(r, op, F32, 100 + i, 0, 0, r->send, r->recv);
  }
  NC(GroupEnd());
  CU(cuStreamSynchronize, r->stream);
  // Memory of the library's, registered.
  void *memory, *handle;
  NC(MemAlloc(&memory, 100));
  if ((uintptr_t)memory % 4096) fail("check rank %d: ncclMemAlloc gave %p", r->rank, memory);
  NC(MemFree(memory));
  NC(MemAlloc(&memory, 1 << 20));
  // The driver may wait for the GPU to have memory: others of its ranks begin no kernel that waits for this one before.
  barrier();
  NC(CommRegister(r->comm, memory, 1 << 20, &handle));
  // Memory of a GPU may be had only once its kernels have ended: none of the others' may wait for this rank yet.
  barrier();
  CUdeviceptr own = r->send;
  r->send = (CUdeviceptr)memory;
  check_one(r, ALL_REDUCE, &TYPES[F32], 5000, 0, false, salt++);
  r->send = own;
  barrier();
  NC(CommDeregister(r->comm, handle));
  NC(MemFree(memory));
  shared->numbers[r->rank] = (double)r->cases;
  barrier();
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok %ld cases a rank\n", r->cases);
}

static void run_graph(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, 8 << 20);
  const size_t count = 100003;
  // A connection is made at the first message: not in the capture.
  enqueue(r, SEND_RECV, F32, count, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  barrier();
  CUgraph graph;
  CUgraphExec exec;
  float* in = (float*)r->in;
  CUdeviceptr gathered = r->recv + (1 << 20);
  CUdeviceptr moved = r->recv + (4 << 20);
  CU(cuStreamBeginCapture, r->stream, 1u);
  CU(cuMemcpyHtoDAsync, r->send, r->in, count * 4, r->stream);
  enqueue(r, ALL_REDUCE, F32, count, 0, 0, r->send, r->recv);
  NC(GroupStart());
  enqueue(r, ALL_GATHER, F32, 1000, 0, 0, r->recv, gathered);
  enqueue(r, ALL_REDUCE, F32, 10, 0, 0, r->send, r->recv + (7 << 20));
  NC(GroupEnd());
  enqueue(r, SEND_RECV, F32, count, 0, 0, r->send, moved);
  CU(cuStreamEndCapture, r->stream, &graph);
  CU(cuGraphInstantiate, &exec, graph, 0ull);
  CU(cuGraphDestroy, graph);
  for (int replay = 0; replay < 30; replay++) {
    for (size_t i = 0; i < count; i++) in[i] = (float)element(replay, r->rank, i, false);
    CU(cuGraphLaunch, exec, r->stream);
    // Eager ones between replays.
    if (replay % 3 == 0) enqueue(r, ALL_REDUCE, F32, 777, 0, 0, r->send, r->recv + (6 << 20));
    CU(cuStreamSynchronize, r->stream);
    CU(cuMemcpyDtoHAsync, r->out, r->recv, (size_t)8 << 20, r->stream);
    CU(cuStreamSynchronize, r->stream);
    const float* few = (const float*)(r->out + (7 << 20));
    for (size_t i = 0; i < 10; i++)
      if (few[i] != (float)combined(replay, i, 0, false)) fail("graph replay %d rank %d: few %zu", replay, r->rank, i);
    const float *out = (const float*)r->out, *all = (const float*)(r->out + (1 << 20)), *from = (const float*)(r->out + (4 << 20));
    for (size_t i = 0; i < count; i++) {
      float want = (float)combined(replay, i, 0, false);
      if (out[i] != want) fail("graph replay %d rank %d: reduced element %zu is %g, not %g", replay, r->rank, i, out[i], want);
      float sent = (float)element(replay, (r->rank + ranks - 1) % ranks, i, false);
      if (from[i] != sent) fail("graph replay %d rank %d: received element %zu is %g, not %g", replay, r->rank, i, from[i], sent);
    }
    for (size_t i = 0; i < 1000 * (size_t)ranks; i++) {
      float want = (float)combined(replay, i % 1000, 0, false);
      if (all[i] != want) fail("graph replay %d rank %d: gathered element %zu is %g, not %g", replay, r->rank, i, all[i], want);
    }
  }
  barrier();
  double start = now();
  int replays = processes && ranks > devices ? 20 : 300;
  for (int replay = 0; replay < replays; replay++) CU(cuGraphLaunch, exec, r->stream);
  CU(cuStreamSynchronize, r->stream);
  double took = now() - start;
  CU(cuGraphExecDestroy, exec);
  // What the graph held may be gone only now.
  enqueue(r, ALL_REDUCE, F32, count, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  barrier();
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok 30 replays checked; %d in a row: %.1f us each (4 operations)\n", replays, took / replays * 1e6);
}

// Rank 0 calls something else than the others: each is told what they called.
static int variant;
static void run_differ(struct Rank* r) {
  enum { MAX = 2 };
  static const struct { enum Op op; int type; size_t count; int reduction, root; const char* says; } CALLS[][2] = {
      {{ALL_REDUCE, F32, 1000, SUM, 0, "float32"}, {ALL_REDUCE, I32, 1000, SUM, 0, "int32"}},
      {{ALL_REDUCE, F32, 1000, SUM, 0, "count 1000,"}, {ALL_REDUCE, F32, 1001, SUM, 0, "count 1001,"}},
      {{ALL_REDUCE, F32, 1000, SUM, 0, "count 1000,"}, {ALL_REDUCE, F32, 1000000, SUM, 0, "count 1000000,"}},
      {{BROADCAST, F32, 1000, SUM, 0, "Broadcast"}, {ALL_REDUCE, F32, 1000, SUM, 0, "AllReduce"}},
      {{ALL_REDUCE, F32, 1000, SUM, 0, "AllReduce"}, {ALLTOALL, F32, 1000, SUM, 0, "AlltoAll"}},
      {{SEND_RECV, F32, 3000000, SUM, 0, "count 3000000,"}, {SEND_RECV, F32, 3000001, SUM, 0, "count 3000001,"}},
      {{SEND_RECV, F32, 3000000, SUM, 0, "count 3000000,"}, {SEND_RECV, F32, 1000, SUM, 0, "count 1000,"}},
      {{SEND_RECV, F32, 1000, SUM, 0, "count 1000,"}, {SEND_RECV, F32, 3000000, SUM, 0, "count 3000000,"}},
      {{ALL_REDUCE, F32, 1000, SUM, 0, "sum)"}, {ALL_REDUCE, F32, 1000, MAX, 0, "max)"}},
      {{BROADCAST, F32, 1000, SUM, 0, "root 0)"}, {BROADCAST, F32, 1000, SUM, 1, "root 1)"}},
  };
  if (variant < 0 || variant >= (int)(sizeof CALLS / sizeof CALLS[0])) fail("differ: no variant %d", variant);
  open_rank(r, 0);
  buffers(r, 16 << 20);
  enqueue(r, ALL_REDUCE, F32, 1000, 0, 0, r->send, r->recv);
  enqueue(r, ALL_GATHER, F32, 1000, 0, 0, r->send, r->recv);
  CU(cuStreamSynchronize, r->stream);
  const int mine = r->rank == 0 ? 0 : 1;
  enqueue(r, CALLS[variant][mine].op, CALLS[variant][mine].type, CALLS[variant][mine].count, CALLS[variant][mine].reduction, CALLS[variant][mine].root,
          r->send, r->recv);
  Code async = 0;
  for (double start = now(); now() - start < 20 && async == 0; usleep(1000)) NC(CommGetAsyncError(r->comm, &async));
  char text[1000];
  snprintf(text, sizeof text, "%s", nccl.GetLastError(r->comm));
  bool told = async != 0 && strstr(text, CALLS[variant][0].says) && strstr(text, CALLS[variant][1].says);
  if (!told) fail("differ %d: rank %d: error %d: %s", variant, r->rank, async, text);
  CU(cuStreamSynchronize, r->stream);
  NC(CommAbort(r->comm));
  barrier();
  if (r->rank == 0) printf("ok %s\n", text);
}

static const char* folder;
static int replays = 1000, graph_ops = 20;

// Says that it is ready by a file in the folder, and goes on when the file "go" is there.
static void await_go(struct Rank* r) {
  char ready[1000], go[1000];
  snprintf(ready, sizeof ready, "%s/ready", folder);
  snprintf(go, sizeof go, "%s/go", folder);
  barrier();
  if (r->rank == 0) fclose(fopen(ready, "w"));
  for (int i = 0; i < 3000 && access(go, F_OK) != 0; i++) usleep(10000);
  barrier();
}

// Something to be seen: ready, and go.
static void run_watch(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, 8 << 20);
  reduce_once(r);
  await_go(r);
  for (int i = 0; i < 200; i++) {
    if (i == 100 && r->rank == ranks - 1) usleep(50000);
    enqueue(r, i % 4 == 3 ? ALL_GATHER : ALL_REDUCE, F32, 1000 << (i % 8), 0, 0, r->send, r->recv);
    CU(cuStreamSynchronize, r->stream);
    // Quiet behind the first ones, in which it is found how the GPU's clock stands.
    if (i < 5) usleep(20000);
  }
  barrier();
  CUgraph graph;
  CUgraphExec exec;
  CU(cuStreamBeginCapture, r->stream, 1u);
  for (int i = 0; i < 3; i++) enqueue(r, ALL_REDUCE, F32, 5000, 0, 0, r->send, r->recv);
  CU(cuStreamEndCapture, r->stream, &graph);
  CU(cuGraphInstantiate, &exec, graph, 0ull);
  // Without a break: nothing of the library's runs on the host meanwhile.
  for (int i = 0; i < replays; i++) CU(cuGraphLaunch, exec, r->stream);
  CU(cuStreamSynchronize, r->stream);
  usleep(200000);
  CU(cuGraphExecDestroy, exec);
  CU(cuGraphDestroy, graph);
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0) printf("ok 200 eager operations, %d in %d replays\n", 3 * replays, replays);
}

// Many replays of a graph of small all_reduces, without a break: how long each takes on the GPU, and an eager call on the host.
// In a folder, as `run_watch`; otherwise, "-", at once.
static void run_replays(struct Rank* r) {
  open_rank(r, 0);
  buffers(r, 1 << 20);
  CUevent begin, end;
  CU(cuEventCreate, &begin, 0u);
  CU(cuEventCreate, &end, 0u);
  CUgraph graph;
  CUgraphExec exec;
  CU(cuStreamBeginCapture, r->stream, 1u);
  for (int i = 0; i < graph_ops; i++) enqueue(r, ALL_REDUCE, F32, 2, 0, 0, r->send, r->recv);
  CU(cuStreamEndCapture, r->stream, &graph);
  CU(cuGraphInstantiate, &exec, graph, 0ull);
  if (strcmp(folder, "-")) await_go(r);
  // What is watched is known to be so, and the GPU is awake.
  for (int i = 0; i < 5; i++) {
    CU(cuGraphLaunch, exec, r->stream);
    CU(cuStreamSynchronize, r->stream);
    usleep(20000);
  }
  barrier();
  CU(cuEventRecord, begin, r->stream);
  for (int i = 0; i < replays; i++) CU(cuGraphLaunch, exec, r->stream);
  CU(cuEventRecord, end, r->stream);
  CU(cuStreamSynchronize, r->stream);
  float milliseconds;
  CU(cuEventElapsedTime, &milliseconds, begin, end);
  // The best of some graphs, each alone: where the host's launches do not keep up with replays.
  float best = 1e9;
  for (int i = 0; i < 50; i++) {
    float alone;
    barrier();
    CU(cuEventRecord, begin, r->stream);
    CU(cuGraphLaunch, exec, r->stream);
    CU(cuEventRecord, end, r->stream);
    CU(cuStreamSynchronize, r->stream);
    CU(cuEventElapsedTime, &alone, begin, end);
    best = alone < best ? alone : best;
  }
  double call = 1e9;
  for (int i = 0; i < 5; i++) {
    barrier();
    double start = now();
    for (int j = 0; j < 200; j++) enqueue(r, ALL_REDUCE, F32, 2, 0, 0, r->send, r->recv);
    double took = (now() - start) / 200;
    call = took < call ? took : call;
    CU(cuStreamSynchronize, r->stream);
  }
  // A reader may be a moment behind.
  usleep(200000);
  CU(cuGraphExecDestroy, exec);
  CU(cuGraphDestroy, graph);
  barrier();
  NC(CommDestroy(r->comm));
  barrier();
  if (r->rank == 0)
    printf("ok %d replays of %d, device_ns %.1f, best_device_ns %.1f, host_ns %.1f\n", replays, graph_ops,
           milliseconds / replays / graph_ops * 1e6, best / graph_ops * 1e6, call * 1e9);
}

static void* run(void* argument) {
  struct Rank* r = argument;
  if (!strcmp(mode, "check")) run_check(r);
  else if (!strcmp(mode, "graph")) run_graph(r);
  else if (!strcmp(mode, "remap")) run_remap(r, &whole);
  else if (!strcmp(mode, "pieces")) run_remap(r, &pieces);
  else if (!strcmp(mode, "abort")) run_abort(r);
  else if (!strcmp(mode, "death")) run_death(r);
  else if (!strcmp(mode, "fault")) run_fault(r);
  else if (!strcmp(mode, "frozen")) run_frozen(r);
  else if (!strcmp(mode, "unanswered")) run_unanswered(r);
  else if (!strcmp(mode, "released")) run_released(r);
  else if (!strcmp(mode, "streams")) run_streams(r);
  else if (!strcmp(mode, "held")) run_held(r);
  else if (!strcmp(mode, "untaken")) run_untaken(r);
  else if (!strcmp(mode, "differ")) run_differ(r);
  else if (!strcmp(mode, "bits")) run_bits(r);
  else if (!strcmp(mode, "windows")) run_windows(r, variant == 1);
  else if (!strcmp(mode, "promise")) run_promise(r);
  else if (!strcmp(mode, "alone")) run_alone(r);
  else if (!strcmp(mode, "stalled")) run_stalled(r);
  else if (!strcmp(mode, "between")) run_between(r);
  else if (!strcmp(mode, "uncopied")) run_uncopied(r, variant == 1 ? "cuLaunchKernel" : "cuMemcpyAsync");
  else if (!strcmp(mode, "random")) run_random(r, variant);
  else if (!strcmp(mode, "refuse")) run_refuse(r);
  else if (!strcmp(mode, "lacking")) run_lacking(r, variant == 1);
  else if (!strcmp(mode, "bench")) run_bench(r);
  else if (!strcmp(mode, "watch")) run_watch(r);
  else if (!strcmp(mode, "replays")) run_replays(r);
  else if (!strcmp(mode, "awaited")) run_awaited(r);
  else if (!strcmp(mode, "latecomer")) run_latecomer(r);
  else if (!strcmp(mode, "ended")) run_ended(r, folder != NULL);
  else if (!strcmp(mode, "beside")) run_beside(r);
  else if (!strcmp(mode, "turns")) run_turns(r, folder, replays);
  else fail("unknown mode %s", mode);
  return NULL;
}

int main(int arguments, char** argument) {
  if (arguments < 5 || atoi(argument[3]) < 1 || atoi(argument[3]) > MAX_RANKS)
    return fprintf(stderr, "driver LIBRARY MODE RANKS t|p|n [MAX_BYTES [STEP [MIN_BYTES]]]\n"), 2;
  library = argument[1];
  mode = argument[2];
  ranks = atoi(argument[3]);
  // n: processes, each on a node of its own.
  bool nodes = argument[4][0] == 'n';
  processes = nodes || argument[4][0] == 'p';
  if (arguments > 5) folder = argument[5];
  if (arguments > 5) variant = atoi(argument[5]);
  if (arguments > 6) replays = atoi(argument[6]);
  if (arguments > 7) graph_ops = atoi(argument[7]);
  if (arguments > 5 && strcmp(mode, "watch")) max_bytes = strtoull(argument[5], NULL, 0);
  if (arguments > 6) sizes_step = atoi(argument[6]);
  if (arguments > 7) min_size = strtoull(argument[7], NULL, 0);
  setvbuf(stdout, NULL, _IOLBF, 0);
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pthread_barrierattr_t attributes;
  pthread_barrierattr_init(&attributes);
  pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&shared->barrier, &attributes, (unsigned)ranks);
  static struct Rank all[MAX_RANKS];
  if (!processes) {
    load();
    pthread_t threads[MAX_RANKS];
    for (int i = 0; i < ranks; i++) {
      all[i].rank = i;
      pthread_create(&threads[i], NULL, run, &all[i]);
    }
    for (int i = 0; i < ranks; i++) pthread_join(threads[i], NULL);
    return shared->failed;
  }
  pid_t children[MAX_RANKS];
  for (int i = 0; i < ranks; i++) {
    children[i] = fork();
    if (children[i] == 0) {
      all[i].rank = i;
      char node[16];
      snprintf(node, sizeof node, "node%d", i);
      if (nodes) setenv("NCCL_HOSTID", node, 1);
      if (getenv("ONE_EACH") != NULL) setenv("CUDA_VISIBLE_DEVICES", node + strlen("node"), 1);
      load();
      run(&all[i]);
      fflush(stdout);
      exit(0);
    }
  }
  int worst = 0;
  for (int i = 0; i < ranks; i++) {
    int status;
    pid_t done = waitpid(-1, &status, 0);
    bool killed = WIFSIGNALED(status);
    if (killed && !(WTERMSIG(status) == SIGKILL && !strcmp(mode, "death")))
      printf("FAILED a rank died of signal %d\n", WTERMSIG(status));
    bool bad = WIFEXITED(status) ? WEXITSTATUS(status) != 0 : strcmp(mode, "death") != 0;
    if (bad && !worst) {
      worst = 1;
      for (int j = 0; j < ranks; j++)
        if (children[j] != done) kill(children[j], SIGKILL);
    }
  }
  return worst;
}

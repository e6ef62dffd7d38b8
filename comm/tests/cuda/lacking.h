// One rank lacks memory, for each allocation in turn of all that a communicator makes in its life. Only a driver without a GPU tells.
#pragma once
#include "rank.h"
#include "remap.h"

enum { SYMMETRIC_WINDOW = 1, LACKING_BYTES = 1 << 20 };
enum { ALLOCATIONS, HELD = 10 };

// Of the driver without a GPU (mock/lacking.h).
static void (*lack)(int device, int which, const char* call);
static const char* (*lacked)(int device);
static void (*exempt)(int on);
static void (*get_held)(uint64_t* figures);

static bool lacks(const struct Rank* r) { return r->rank == ranks - 1; }

// A call of the library, in which memory may lack.
static Code behind(Code code) { return exempt(1), code; }
#define LACKING(call) (exempt(0), behind(nccl.call))

// The error names the call that was refused, how much it was to have, and of which GPU.
static void check_text(const struct Rank* r, Code code, const char* what) {
  const char *text = nccl.GetLastError(NULL), *of = lacked(r->device);
  char gpu[20];
  snprintf(gpu, sizeof gpu, "GPU %d: ", r->device);
  if (of == NULL) fail("lacking: %s: nothing lacks: %d: %s", what, code, text);
  const bool has_size = strncmp(of, "cuMem", 5) || strstr(text, " bytes of ");
  if (!has_size || !strstr(text, gpu) || !strstr(text, of) || !strstr(text, "CUDA_ERROR_OUT_OF_MEMORY")) fail("lacking: %s: %s: %d: %s", what, of, code, text);
}

// Whether a call has failed on any rank, which has to be the one that lacks memory, and says what that is.
static bool has_failed(struct Rank* r, Code code, const char* what, bool on_all) {
  const char* text = nccl.GetLastError(NULL);
  if (code != 0 && lacks(r)) check_text(r, code, what);
  shared->numbers[r->rank] = code != 0;
  barrier();
  const bool failed = shared->numbers[ranks - 1] != 0;
  barrier();
  if (failed && on_all && code == 0) fail("lacking: %s failed on the last rank, and not on rank %d", what, r->rank);
  if (!lacks(r) && code != 0) {
    char last[20];
    snprintf(last, sizeof last, "rank %d", ranks - 1);
    if (!failed || !strstr(text, last)) fail("lacking: %s: rank %d: %d: %s", what, r->rank, code, text);
  }
  return failed;
}

enum { EAGER, MESSAGES, REGISTRATION, WINDOW, GATHER_THERE, CAPTURED, ALLOCATION, STEPS };
static const char* STEP_NAMES[] = {"an all_reduce", "messages", "a registration", "a window", "an all_gather there", "a captured all_reduce", "ncclMemAlloc"};

static Code step(struct Rank* r, int which) {
  void *send = (void*)r->send, *recv = (void*)r->recv, *handle;
  Code code, started;
  CUgraph graph;
  switch (which) {
    case EAGER: return LACKING(AllReduce(send, recv, 1000, F32, SUM, r->comm, r->stream));
    case MESSAGES:
      NC(GroupStart());
      started = LACKING(Send(send, 1000, F32, (r->rank + 1) % ranks, r->comm, r->stream));
      if (started == 0) started = LACKING(Recv(recv, 1000, F32, (r->rank + ranks - 1) % ranks, r->comm, r->stream));
      code = LACKING(GroupEnd());
      return started != 0 ? started : code;
    case REGISTRATION: return LACKING(CommRegister(r->comm, send, LACKING_BYTES, &handle));
    case WINDOW: return LACKING(CommWindowRegister(r->comm, recv, LACKING_BYTES, &handle, SYMMETRIC_WINDOW));
    case GATHER_THERE: return LACKING(AllGather(send, recv, 1000, F32, r->comm, r->stream));
    case CAPTURED:
      CU(cuStreamBeginCapture, r->stream, 1u);
      code = LACKING(AllReduce(send, recv, 1000, F32, SUM, r->comm, r->stream));
      CU(cuStreamEndCapture, r->stream, &graph);
      CU(cuGraphDestroy, graph);
      return code;
    default:
      code = LACKING(MemAlloc(&handle, 4096));
      if (code == 0) NC(MemFree(handle));
      return code;
  }
}

// What comes of a communicator's life: it cannot be made, one of its calls fails, or none; and whether anything lacked.
struct Life {
  bool made, failed, lacked;
  // What copy engines bring contributions to has been made.
  bool scratch;
};
static struct Life live_lacking(struct Rank* r, int which) {
  if (r->rank == 0) NC(GetUniqueId(&shared->id[1]));
  barrier();
  if (lacks(r)) lack(r->device, which, NULL);
  exempt(1);
  struct Life life = {false, false, false, false};
  const Code code = LACKING(CommInitRank(&r->comm, ranks, shared->id[1], r->rank));
  life.failed = has_failed(r, code, "the communicator", true);
  life.made = !life.failed;
  for (int i = 0; i < STEPS && !life.failed; i++) {
    life.failed = has_failed(r, step(r, i), STEP_NAMES[i], false);
    life.scratch |= i == WINDOW && !life.failed && getenv("RINGSIGHT_ENGINE_REDUCE_BYTES") != NULL;
  }
  const double start = now();
  if (life.made && life.failed) NC(CommAbort(r->comm));
  CU(cuStreamSynchronize, r->stream);
  // A loaded machine takes its time; what hangs takes more.
  if (now() - start > 10) fail("lacking: rank %d: the stream was free after %.1f s", r->rank, now() - start);
  if (!life.failed) {
    const struct Case c = {ALL_REDUCE, &TYPES[F32], 1000, SUM, 0, which};
    fill(r, &c, r->in);
    CU(cuMemcpyHtoDAsync, r->send, r->in, send_bytes(&c), r->stream);
    NC(AllReduce((void*)r->send, (void*)r->recv, c.count, F32, SUM, r->comm, r->stream));
    CU(cuMemcpyDtoHAsync, r->out, r->recv, recv_bytes(&c), r->stream);
    CU(cuStreamSynchronize, r->stream);
    verify(r, &c, r->out, " after what lacked");
    barrier();
    NC(CommDestroy(r->comm));
  }
  exempt(0);
  shared->numbers[r->rank] = lacks(r) && lacked(r->device) != NULL;
  if (lacks(r)) lack(r->device, 0, NULL);
  barrier();
  life.lacked = shared->numbers[ranks - 1] != 0;
  barrier();
  return life;
}

// What a process holds is no more than before, a moment later.
static void check_held(const struct Rank* r, const uint64_t* before, int which) {
  static const char* names[HELD] = {"allocations", "other processes' allocations", "pinned allocations", "registered ranges", "ranges of addresses", "streams",
                                    "events", "graphs", "modules", "contexts"};
  uint64_t after[HELD];
  if (processes || r->rank == 0)
    for (const double start = now();; usleep(2000)) {
      get_held(after);
      int more = 0;
      while (more < HELD && after[more] <= before[more]) more++;
      if (more == HELD) break;
      if (now() - start > 10) fail("lacking: rank %d: allocation %d leaves %lu %s, not %lu", r->rank, which, after[more], names[more], before[more]);
    }
  barrier();
}

// More operations are captured than there is memory for at once.
static void capture_more(struct Rank* r, const char* call) {
  enum { MANY = 2000 };
  r->comm = new_comm(r, 1);
  if (lacks(r)) {
    CUgraph graph;
    Code code = 0;
    CU(cuStreamBeginCapture, r->stream, 1u);
    lack(r->device, 1, call);
    for (int i = 0; i < MANY && code == 0; i++) code = nccl.AllReduce((void*)r->send, (void*)r->recv, 1000, F32, SUM, r->comm, r->stream);
    if (code == 0) fail("lacking: %d operations are captured, and none lacks %s", MANY, call);
    check_text(r, code, "one of many captured operations");
    lack(r->device, 0, NULL);
    CU(cuStreamEndCapture, r->stream, &graph);
    CU(cuGraphDestroy, graph);
  }
  barrier();
  NC(CommAbort(r->comm));
  barrier();
}

// `in_pieces`: what is registered as a window is mapped in pieces.
static void run_lacking(struct Rank* r, bool in_pieces) {
  *(void**)&lack = dlsym(RTLD_DEFAULT, "ringsight_mock_lack");
  *(void**)&lacked = dlsym(RTLD_DEFAULT, "ringsight_mock_lacked");
  *(void**)&exempt = dlsym(RTLD_DEFAULT, "ringsight_mock_exempt");
  *(void**)&get_held = dlsym(RTLD_DEFAULT, "ringsight_mock_held");
  if (!lack || !lacked || !exempt || !get_held) fail("lacking: only a driver without a GPU lacks memory");
  r->device = r->rank % devices;
  make_current(r->device);
  CU(cuStreamCreate, &r->stream, 1u);
  buffers(r, LACKING_BYTES);
  if (in_pieces) {
    give_whole(r->recv, LACKING_BYTES);
    r->recv = get_pieces(r, LACKING_BYTES);
  }
  barrier();
  uint64_t before[HELD];
  get_held(before);
  barrier();
  // A GPU is opened with the first communicator: who cannot does not come, and with others they would wait for it.
  int opening = 0;
  if (ranks == 1)
    while (!live_lacking(r, opening + 1).made) check_held(r, before, ++opening);
  // What a GPU has from then on.
  live_lacking(r, 0);
  usleep(200000);
  get_held(before);
  barrier();
  int which = 1;
  for (struct Life life; life = live_lacking(r, which), life.lacked; which++) {
    // What an abort leaves to kernels of other processes is theirs until this one ends: what kernels reach, and FIFOs; and to their copies.
    if (processes && life.made && life.failed) before[ALLOCATIONS] += life.scratch ? 3 : 2;
    check_held(r, before, which);
  }
  capture_more(r, "cuMemAlloc_v2");
  capture_more(r, "cuMemHostAlloc");
  if (r->rank == 0) printf("ok %d allocations to open a GPU, %d of a communicator\n", opening, which - 1);
}

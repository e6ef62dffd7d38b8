/* Drives every function of NCCL's ABI, with good calls and wrong arguments: the results, the codes, and the argument that
 * ncclGetLastError names. Compiles as C and as C++, against the shipped headers or NVIDIA's.
 *
 * -DTWINS_HEADER='"file"'  a header that calls each function by its profiling name
 * -DNVIDIA_NCCL            for NVIDIA's library on one GPU: prints what it returns otherwise than expected; texts and calls on which
 *                          it crashes or hangs are left out
 *
 * Prints every case that failed, then "CASES cases, FAILURES failures"; the exit status is 0 if none did. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <nccl.h>
#include <nccl_device.h>
#ifdef NVIDIA_NCCL
#include <cuda_runtime.h>
enum { RANKS = 1 };
static int set_device(int device) { return cudaSetDevice(device); }
static int make_stream(cudaStream_t* stream) { return cudaStreamCreate(stream); }
static int wait_for(cudaStream_t stream) { return cudaStreamSynchronize(stream); }
static int fetch(void* to, const void* from, size_t bytes) { return cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }
#else
#include "ringsight.h"
enum { RANKS = 2 };
static int set_device(int device) { return ringsightSetDevice(device); }
static int make_stream(cudaStream_t* stream) { return ringsightStreamCreate(stream); }
static int wait_for(cudaStream_t stream) { return ringsightStreamSynchronize(stream); }
static int fetch(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); return 0; }
#endif
#ifndef NVIDIA_NCCL
/* What NCCL 2.32 has besides, which no header here declares. */
#ifdef __cplusplus
extern "C" {
#endif
typedef struct {
  size_t size;
  unsigned int magic, version;
  void* ext;
  int minCTAs, maxCTAs, nvlsCTAs, cgaClusterSize;
  const char* algSelection;
  int forceAlgSelection, CTAPolicy;
  uint64_t userProfilerTag;
  void* launchCompletionEvent;
} CallConfig;
typedef struct {
  size_t size;
  unsigned int magic, version;
  int mode;
  const char* psk;
} Encryption;
#define DECLARE(name, ...) ncclResult_t name(__VA_ARGS__); ncclResult_t p##name(__VA_ARGS__)
#define CALLED ncclComm_t comm, cudaStream_t stream, const CallConfig* config
DECLARE(ncclAllReduceConfig, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, CALLED);
DECLARE(ncclReduceScatterConfig, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, CALLED);
DECLARE(ncclReduceConfig, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, int, CALLED);
DECLARE(ncclBroadcastConfig, const void*, void*, size_t, ncclDataType_t, int, CALLED);
DECLARE(ncclAllGatherConfig, const void*, void*, size_t, ncclDataType_t, CALLED);
DECLARE(ncclAlltoAllConfig, const void*, void*, size_t, ncclDataType_t, CALLED);
DECLARE(ncclGatherConfig, const void*, void*, size_t, ncclDataType_t, int, CALLED);
DECLARE(ncclScatterConfig, const void*, void*, size_t, ncclDataType_t, int, CALLED);
DECLARE(ncclSetEncryption, const Encryption*);
DECLARE(ncclGetMultimemDeviceLeInfo, ncclWindow_t, size_t, void*, size_t*);
DECLARE(ncclGetCftDeviceLeInfo, ncclWindow_t, size_t, int, ncclTeam_t, void*, size_t*);
DECLARE(ncclGetPeerDeviceLeInfo, ncclWindow_t, size_t, int, void*, size_t*);
ncclTeam_t ncclTeamCft(ncclComm_t comm, int mode);
ncclTeam_t pncclTeamCft(ncclComm_t comm, int mode);
ncclTeam_t ncclTeamCftMultimem(ncclComm_t comm);
ncclTeam_t pncclTeamCftMultimem(ncclComm_t comm);
/* Only NVIDIA's own kernels include the header that declares these. */
struct ncclGinOutboxHandle;
struct ncclGinInboxA2AHandle;
DECLARE(ncclGinOutboxCreateRequirement, int, int, struct ncclGinOutboxHandle*, ncclDevResourceRequirements_t*);
DECLARE(ncclGinInboxA2ACreateRequirement, ncclTeam_t, int, int, struct ncclGinInboxA2AHandle*,
        ncclDevResourceRequirements_t*);
#undef DECLARE
#ifdef __cplusplus
}
#endif
#endif
#ifdef TWINS_HEADER
#include TWINS_HEADER
#endif

enum { COUNT = 1000 };

static int cases, failures;

static void failed(int line, const char* what) {
  failures++;
  printf("line %d: %s\n", line, what);
}

static void check(int line, const char* call, int got, int expected, const char* names) {
  const char* text = ncclGetLastError(NULL);
  cases++;
  if (got != expected) {
    failed(line, call);
    printf("  returned %d, not %d: %s\n", got, expected, text);
    return;
  }
#ifdef NVIDIA_NCCL
  (void)names;
#else
  if (names && !strstr(text, names)) {
    failed(line, call);
    printf("  \"%s\" does not say \"%s\"\n", text, names);
  }
#endif
}

#define GOOD(call) check(__LINE__, #call, (int)(call), ncclSuccess, NULL)
#define BAD(code, names, call) check(__LINE__, #call, (int)(call), code, names)
#define HOLDS(condition) (cases++, (condition) ? (void)0 : failed(__LINE__, #condition))
/* Where NVIDIA's library has undefined behaviour, or needs more than one GPU. */
#ifdef NVIDIA_NCCL
#define OURS(...)
#else
#define OURS(...) __VA_ARGS__
#endif

static ncclComm_t comms[RANKS];
static cudaStream_t streams[RANKS];
static float *sent[RANKS], *received[RANKS];

/* The same call for every rank, in one group; `r` is the rank. */
#define ON_ALL(call)                      \
  do {                                    \
    GOOD(ncclGroupStart());               \
    for (int r = 0; r < RANKS; r++) {     \
      set_device(r);                      \
      GOOD(call);                         \
    }                                     \
    GOOD(ncclGroupEnd());                 \
    wait_all();                           \
  } while (0)

static void wait_all(void) {
  for (int r = 0; r < RANKS; r++) {
    set_device(r);
    HOLDS(wait_for(streams[r]) == 0);
  }
  set_device(0);
}

/* Element i of what rank r sends. */
static float input(int r, int i) { return (float)(r + 1 + i % 5); }

static float sum(int i) {
  float total = 0;
  for (int r = 0; r < RANKS; r++) total += input(r, i);
  return total;
}

static float result(int r, int i) {
  float value = -1;
  fetch(&value, received[r] + i, sizeof value);
  return value;
}

static void the_library(void) {
  int version = 0;
  GOOD(ncclGetVersion(&version));
  HOLDS(version == NCCL_VERSION_CODE && version == 23007);
  BAD(ncclInvalidArgument, "version is NULL", ncclGetVersion(NULL));
  ncclUniqueId id;
  GOOD(ncclGetUniqueId(&id));
  BAD(ncclInvalidArgument, "uniqueId is NULL", ncclGetUniqueId(NULL));
  for (int code = 0; code <= ncclNumResults; code++) HOLDS(strlen(ncclGetErrorString((ncclResult_t)code)) > 5);
  HOLDS(strcmp(ncclGetErrorString(ncclSuccess), "no error") == 0);
  HOLDS(strcmp(ncclGetErrorString((ncclResult_t)99), "unknown result code") == 0);
  OURS(HOLDS(strstr(ncclGetLastError(NULL), "uniqueId") != NULL);)
  HOLDS(sizeof(ncclConfig_t) == 96 && sizeof(ncclUniqueId) == 128 && sizeof(ncclSimInfo_t) == 24);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  ncclResetDebugInit();
#pragma GCC diagnostic pop
}

static ncclResult_t init(ncclComm_t* comm, int ranks, int rank) {
  ncclUniqueId id;
  GOOD(ncclGetUniqueId(&id));
  return ncclCommInitRank(comm, ranks, id, rank);
}

static ncclResult_t init_with(ncclConfig_t* config) {
  ncclUniqueId id;
  ncclComm_t comm = NULL;
  GOOD(ncclGetUniqueId(&id));
  ncclResult_t code = ncclCommInitRankConfig(&comm, 1, id, 0, config);
  if (code == ncclSuccess) GOOD(ncclCommDestroy(comm));
  return code;
}

static void configs(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  GOOD(init_with(&config));
  GOOD(init_with(NULL));
  config.minCTAs = 1;
  config.maxCTAs = 4;
  config.blocking = 1;
  config.commName = "from C";
  GOOD(init_with(&config));
#define FIELD(name, value)                                                                 \
  do {                                                                                     \
    ncclConfig_t wrong = NCCL_CONFIG_INITIALIZER;                                          \
    wrong.name = value;                                                                    \
    BAD(ncclInvalidArgument, "config." #name, init_with(&wrong));                          \
  } while (0)
  FIELD(blocking, 2);
  FIELD(cgaClusterSize, -1);
  FIELD(minCTAs, 0);
  FIELD(maxCTAs, -1);
  FIELD(splitShare, 7);
  FIELD(collnetEnable, 2);
  FIELD(CTAPolicy, 4);
  FIELD(shrinkShare, 3);
  FIELD(nvlsCTAs, -2);
  FIELD(nChannelsPerNetPeer, 65);
  FIELD(nvlinkCentricSched, 2);
  FIELD(graphUsageMode, 3);
  FIELD(numRmaCtx, -1);
  FIELD(maxP2pPeers, 0);
  FIELD(graphStreamOrdering, 2);
  FIELD(magic, 0x12345678);
#undef FIELD
  OURS({
    ncclConfig_t wrong = NCCL_CONFIG_INITIALIZER;
    wrong.size = 17;
    BAD(ncclInvalidArgument, "config.size (17)", init_with(&wrong));
  })
  /* A struct of an older version ends earlier: what follows it is not looked at. */
  ncclConfig_t older = NCCL_CONFIG_INITIALIZER;
  older.size = 48;
  older.version = NCCL_VERSION(2, 19, 3);
  older.nvlinkCentricSched = 77;
  older.CTAPolicy = 77;
  GOOD(init_with(&older));
}

static void making(void) {
  ncclComm_t comm = NULL;
  ncclUniqueId id, ids[2];
  int devices[2] = {0, 0};
  BAD(ncclInvalidArgument, "comm is NULL", init(NULL, 1, 0));
  BAD(ncclInvalidArgument, "nranks (0)", init(&comm, 0, 0));
  BAD(ncclInvalidArgument, "nranks (-3)", init(&comm, -3, 0));
  BAD(ncclInvalidArgument, "rank (-1)", init(&comm, 2, -1));
  BAD(ncclInvalidArgument, "rank (2)", init(&comm, 2, 2));
  HOLDS(comm == NULL);
  memset(&id, 0x55, sizeof id);
  OURS(BAD(ncclInvalidArgument, "unique id", ncclCommInitRank(&comm, 1, id, 0));)
  OURS(BAD(ncclInvalidArgument, "unique id", ncclCommInitRankConfig(&comm, 1, id, 0, NULL));)
  configs();

  GOOD(ncclGetUniqueId(&ids[0]));
  GOOD(ncclGetUniqueId(&ids[1]));
  GOOD(ncclCommInitRankScalable(&comm, 1, 0, 1, ids, NULL));
  GOOD(ncclCommDestroy(comm));
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommInitRankScalable(NULL, 1, 0, 1, ids, NULL));
  BAD(ncclInvalidArgument, "nId (0)", ncclCommInitRankScalable(&comm, 1, 0, 0, ids, NULL));
  BAD(ncclInvalidArgument, "nId (2)", ncclCommInitRankScalable(&comm, 1, 0, 2, ids, NULL));
  OURS(BAD(ncclInvalidArgument, "commIds is NULL", ncclCommInitRankScalable(&comm, 1, 0, 1, NULL, NULL));)
  BAD(ncclInvalidArgument, "rank (1)", ncclCommInitRankScalable(&comm, 1, 1, 1, ids, NULL));

  BAD(ncclInvalidArgument, "comms is NULL", ncclCommInitAll(NULL, 1, NULL));
  BAD(ncclInvalidArgument, "ndev (-1)", ncclCommInitAll(comms, -1, NULL));
  OURS(BAD(ncclInvalidUsage, "devlist", ncclCommInitAll(comms, 2, devices));)
  devices[0] = -5;
  BAD(ncclInvalidArgument, "devlist[0] (-5)", ncclCommInitAll(comms, 1, devices));
  GOOD(ncclCommInitAll(comms, RANKS, NULL));
  for (int r = 0; r < RANKS; r++) {
    set_device(r);
    HOLDS(make_stream(&streams[r]) == 0);
  }
  set_device(0);
}

static void queries(void) {
  int value = -1;
  ncclResult_t error = ncclInternalError;
  for (int r = 0; r < RANKS; r++) {
    GOOD(ncclCommCount(comms[r], &value));
    HOLDS(value == RANKS);
    GOOD(ncclCommUserRank(comms[r], &value));
    HOLDS(value == r);
    GOOD(ncclCommCuDevice(comms[r], &value));
    HOLDS(value == r);
    GOOD(ncclCommGetAsyncError(comms[r], &error));
    HOLDS(error == ncclSuccess);
  }
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommCount(NULL, &value));
  BAD(ncclInvalidArgument, "count is NULL", ncclCommCount(comms[0], NULL));
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommUserRank(NULL, &value));
  BAD(ncclInvalidArgument, "rank is NULL", ncclCommUserRank(comms[0], NULL));
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommCuDevice(NULL, &value));
  BAD(ncclInvalidArgument, "device is NULL", ncclCommCuDevice(comms[0], NULL));
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommGetAsyncError(NULL, &error));
  BAD(ncclInvalidArgument, "asyncError is NULL", ncclCommGetAsyncError(comms[0], NULL));
  OURS(BAD(ncclInvalidArgument, "is not a communicator", ncclCommCount((ncclComm_t)(void*)&value, &value));)
}

/* Two windows of one buffer, and what a program may ask of them. */
static void pointers(char* page) {
  ncclWindow_t first[RANKS], second[RANKS];
  void* pointer = page;
  uint64_t bytes = 7;
  for (int r = 0; r < RANKS; r++) first[r] = second[r] = NULL;
  ON_ALL(ncclCommWindowRegister(comms[r], page, 8192, &first[r], NCCL_WIN_COLL_SYMMETRIC));
  ON_ALL(ncclCommWindowRegister(comms[r], page + 4096, 4096, &second[r],
                                NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING));
  for (int r = 0; r < RANKS; r++) {
    GOOD(ncclWinGetUserPtr(comms[r], first[r], &pointer));
    HOLDS(pointer == page);
    GOOD(ncclWinGetUserPtr(comms[r], second[r], &pointer));
    HOLDS(pointer == page + 4096);
    for (int peer = 0; peer < RANKS; peer++) {
      GOOD(ncclGetPeerDevicePointer(second[r], 8, peer, &pointer));
      OURS(HOLDS(pointer == page + 4104);)
      GOOD(ncclGetLsaDevicePointer(first[r], 8191, peer, &pointer));
      OURS(HOLDS(pointer == page + 8191);)
    }
  }
  GOOD(ncclGetLsaMultimemDevicePointer(first[0], 0, &pointer));
  OURS(HOLDS(pointer == NULL);)
#ifndef NVIDIA_NCCL
  ncclMultimemHandle_t multimem;
  multimem.mcBasePtr = page;
  pointer = page;
  GOOD(ncclGetMultimemDevicePointer(first[0], 0, multimem, &pointer));
  HOLDS(pointer == NULL);
  BAD(ncclInvalidArgument, "offset (8192)", ncclGetPeerDevicePointer(first[0], 8192, 1, &pointer));
  BAD(ncclInvalidArgument, "peer (2)", ncclGetPeerDevicePointer(first[0], 0, RANKS, &pointer));
  BAD(ncclInvalidArgument, "lsaRank (-1)", ncclGetLsaDevicePointer(first[0], 0, -1, &pointer));
  BAD(ncclInvalidArgument, "window is NULL", ncclGetPeerDevicePointer(NULL, 0, 0, &pointer));
  BAD(ncclInvalidArgument, "outPtr is NULL", ncclGetLsaDevicePointer(first[0], 0, 0, NULL));
  BAD(ncclInvalidArgument, "is no window", ncclGetPeerDevicePointer((ncclWindow_t)(void*)&bytes, 0, 0, &pointer));
  BAD(ncclInvalidArgument, "is a window of communicator", ncclWinGetUserPtr(comms[1], first[0], &pointer));
  BAD(ncclInvalidArgument, "win is NULL", ncclWinGetUserPtr(comms[0], NULL, &pointer));
  BAD(ncclInvalidArgument, "outUserPtr is NULL", ncclWinGetUserPtr(comms[0], first[0], NULL));
  BAD(ncclInvalidUsage, "(CFT) are not served", ncclGetPeerDeviceLeInfo(first[0], 0, 0, &pointer, NULL));
  BAD(ncclInvalidUsage, "(CFT) are not served", ncclGetMultimemDeviceLeInfo(first[0], 0, &pointer, NULL));
  BAD(ncclInvalidUsage, "(CFT) are not served",
      ncclGetCftDeviceLeInfo(first[0], 0, 0, ncclTeamLsa(comms[0]), &pointer, NULL));
  BAD(ncclInvalidUsage, "keeps its memory", ncclCommSuspend(comms[0], NCCL_SUSPEND_MEM));
  BAD(ncclInvalidArgument, "flags (8)", ncclCommSuspend(comms[0], 8));
  BAD(ncclInvalidUsage, "not suspended", ncclCommResume(comms[0]));
#endif
  for (int r = 0; r < RANKS; r++) {
    GOOD(ncclCommWindowDeregister(comms[r], first[r]));
    GOOD(ncclWinGetUserPtr(comms[r], second[r], &pointer));
    HOLDS(pointer == page + 4096);
    GOOD(ncclCommWindowDeregister(comms[r], second[r]));
  }
  OURS(BAD(ncclInvalidArgument, "is no window", ncclWinGetUserPtr(comms[0], second[0], &pointer));)
  GOOD(ncclCommMemStats(comms[0], ncclStatGpuMemSuspended, &bytes));
  HOLDS(bytes == 0);
  GOOD(ncclCommMemStats(comms[0], ncclStatGpuMemTotal, &bytes));
  GOOD(ncclCommMemStats(comms[0], ncclStatGpuMemPersist, &bytes));
  GOOD(ncclCommMemStats(comms[0], ncclStatGpuMemSuspend, &bytes));
  BAD(ncclInvalidArgument, "stat (4)", ncclCommMemStats(comms[0], (ncclCommMemStat_t)4, &bytes));
  BAD(ncclInvalidArgument, "value is NULL", ncclCommMemStats(comms[0], ncclStatGpuMemTotal, NULL));
}

static void memory(void) {
  void *handle = NULL, *page = NULL;
  ncclWindow_t windows[RANKS];
  BAD(ncclUnhandledCudaError, "ptr is NULL", ncclMemAlloc(NULL, 8));
  for (int r = 0; r < RANKS; r++) {
    float filled[COUNT * RANKS];
    set_device(r);
    GOOD(ncclMemAlloc((void**)&sent[r], COUNT * RANKS * sizeof(float)));
    GOOD(ncclMemAlloc((void**)&received[r], COUNT * RANKS * sizeof(float)));
    for (int i = 0; i < COUNT * RANKS; i++) filled[i] = input(r, i);
    fetch(sent[r], filled, sizeof filled);
  }
  set_device(0);
  GOOD(ncclMemAlloc(&page, 2 * 4096));
  GOOD(ncclCommRegister(comms[0], page, 4096, &handle));
  GOOD(ncclCommDeregister(comms[0], handle));
  GOOD(ncclCommDeregister(comms[0], NULL));
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommRegister(NULL, page, 4096, &handle));
  OURS(BAD(ncclInvalidArgument, "handle is NULL", ncclCommRegister(comms[0], page, 4096, NULL));)
  OURS(BAD(ncclInvalidUsage, "handle (0x", ncclCommDeregister(comms[0], &handle));)
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommDeregister(NULL, NULL));

  for (int r = 0; r < RANKS; r++) windows[r] = NULL;
  ON_ALL(ncclCommWindowRegister(comms[r], page, 4096, &windows[r], NCCL_WIN_DEFAULT));
  for (int r = 0; r < RANKS; r++) {
    OURS(HOLDS(windows[r] != NULL);)
    GOOD(ncclCommWindowDeregister(comms[r], windows[r]));
  }
  GOOD(ncclCommWindowDeregister(NULL, NULL));
  pointers((char*)page);
  OURS(BAD(ncclInvalidArgument, "comm is NULL", ncclCommWindowRegister(NULL, page, 4096, windows, 0));)
  OURS(BAD(ncclInvalidArgument, "win is NULL", ncclCommWindowRegister(comms[0], page, 4096, NULL, 0));)
  OURS(BAD(ncclInvalidArgument, "winFlags (64)", ncclCommWindowRegister(comms[0], page, 4096, windows, 64));)
  OURS(BAD(ncclInvalidArgument, "buff (0x", ncclCommWindowRegister(comms[0], (char*)page + 1, 4095, windows, 1));)
  OURS(BAD(ncclInvalidUsage, "win (0x", ncclCommWindowDeregister(comms[0], (ncclWindow_t)(void*)&handle));)
  GOOD(ncclMemFree(page));
  GOOD(ncclMemFree(NULL));
  OURS(BAD(ncclInvalidArgument, "", ncclMemFree(&handle));)
}

/* Each operation with a good call and with each of its arguments wrong. NVIDIA's library looks at no buffer unless told to. */
static void operations(void) {
  const ncclDataType_t real = ncclFloat32, no_type = (ncclDataType_t)ncclNumTypes;
  const ncclRedOp_t no_op = (ncclRedOp_t)77;
  float* s = sent[0];
  float* d = received[0];
  ncclComm_t c = comms[0];
  cudaStream_t q = streams[0];

#define REFUSES(CALL_COMM, CALL_TYPE, CALL_COUNT)          \
  BAD(ncclInvalidArgument, "comm is NULL", CALL_COMM);     \
  BAD(ncclInvalidArgument, "datatype (12)", CALL_TYPE);    \
  OURS(BAD(ncclInvalidArgument, "count (", CALL_COUNT);)

  ON_ALL(ncclAllReduce(sent[r], received[r], COUNT, real, ncclSum, comms[r], streams[r]));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 7) == sum(7) && result(r, COUNT - 1) == sum(COUNT - 1));
  REFUSES(ncclAllReduce(s, d, 8, real, ncclSum, NULL, q), ncclAllReduce(s, d, 8, no_type, ncclSum, c, q),
          ncclAllReduce(s, d, (size_t)-1, real, ncclSum, c, q))
  BAD(ncclInvalidArgument, "op (77)", ncclAllReduce(s, d, 8, real, no_op, c, q));
  BAD(ncclInvalidArgument, "op (-1)", ncclAllReduce(s, d, 8, real, (ncclRedOp_t)-1, c, q));
  OURS(BAD(ncclInvalidArgument, "sendbuff is NULL", ncclAllReduce(NULL, d, 8, real, ncclSum, c, q));)
  OURS(BAD(ncclInvalidArgument, "recvbuff is NULL", ncclAllReduce(s, NULL, 8, real, ncclSum, c, q));)
  OURS(BAD(ncclInvalidArgument, "stream", ncclAllReduce(s, d, 8, real, ncclSum, c, (cudaStream_t)(void*)&q));)

  ON_ALL(ncclReduce(sent[r], received[r], COUNT, real, ncclMax, 0, comms[r], streams[r]));
  HOLDS(result(0, 3) == input(RANKS - 1, 3));
  REFUSES(ncclReduce(s, d, 8, real, ncclSum, 0, NULL, q), ncclReduce(s, d, 8, no_type, ncclSum, 0, c, q),
          ncclReduce(s, d, (size_t)-1, real, ncclSum, 0, c, q))
  BAD(ncclInvalidArgument, "op (77)", ncclReduce(s, d, 8, real, no_op, 0, c, q));
  BAD(ncclInvalidArgument, "root (-1)", ncclReduce(s, d, 8, real, ncclSum, -1, c, q));
  OURS(BAD(ncclInvalidArgument, "sendbuff is NULL", ncclReduce(NULL, d, 8, real, ncclSum, 0, c, q));)

  ON_ALL(ncclBroadcast(sent[r], received[r], COUNT, real, RANKS - 1, comms[r], streams[r]));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 9) == input(RANKS - 1, 9));
  REFUSES(ncclBroadcast(s, d, 8, real, 0, NULL, q), ncclBroadcast(s, d, 8, no_type, 0, c, q),
          ncclBroadcast(s, d, (size_t)-1, real, 0, c, q))
  BAD(ncclInvalidArgument, "root (99)", ncclBroadcast(s, d, 8, real, 99, c, q));
  OURS(BAD(ncclInvalidArgument, "recvbuff is NULL", ncclBroadcast(s, NULL, 8, real, 0, c, q));)

  ON_ALL(ncclBcast(received[r], COUNT, real, 0, comms[r], streams[r]));
  REFUSES(ncclBcast(d, 8, real, 0, NULL, q), ncclBcast(d, 8, no_type, 0, c, q),
          ncclBcast(d, (size_t)-1, real, 0, c, q))
  BAD(ncclInvalidArgument, "root (-7)", ncclBcast(d, 8, real, -7, c, q));

  ON_ALL(ncclAllGather(sent[r], received[r], COUNT, real, comms[r], streams[r]));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, COUNT * (RANKS - 1) + 6) == input(RANKS - 1, 6));
  REFUSES(ncclAllGather(s, d, 8, real, NULL, q), ncclAllGather(s, d, 8, no_type, c, q),
          ncclAllGather(s, d, (size_t)-1, real, c, q))
  OURS(BAD(ncclInvalidArgument, "sendbuff is NULL", ncclAllGather(NULL, d, 8, real, c, q));)

  ON_ALL(ncclReduceScatter(sent[r], received[r], COUNT, real, ncclAvg, comms[r], streams[r]));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 4) == sum(COUNT * r + 4) / RANKS);
  REFUSES(ncclReduceScatter(s, d, 8, real, ncclSum, NULL, q), ncclReduceScatter(s, d, 8, no_type, ncclSum, c, q),
          ncclReduceScatter(s, d, (size_t)-1, real, ncclSum, c, q))
  BAD(ncclInvalidArgument, "op (77)", ncclReduceScatter(s, d, 8, real, no_op, c, q));

  ON_ALL(ncclAlltoAll(sent[r], received[r], COUNT, real, comms[r], streams[r]));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 2) == input(0, COUNT * r + 2));
  REFUSES(ncclAlltoAll(s, d, 8, real, NULL, q), ncclAlltoAll(s, d, 8, no_type, c, q),
          ncclAlltoAll(s, d, (size_t)-1, real, c, q))

  ON_ALL(ncclGather(sent[r], received[r], COUNT, real, 0, comms[r], streams[r]));
  HOLDS(result(0, COUNT * (RANKS - 1) + 8) == input(RANKS - 1, 8));
  REFUSES(ncclGather(s, d, 8, real, 0, NULL, q), ncclGather(s, d, 8, no_type, 0, c, q),
          ncclGather(s, d, (size_t)-1, real, 0, c, q))
  BAD(ncclInvalidArgument, "root (99)", ncclGather(s, d, 8, real, 99, c, q));

  ON_ALL(ncclScatter(sent[r], received[r], COUNT, real, 0, comms[r], streams[r]));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 1) == input(0, COUNT * r + 1));
  REFUSES(ncclScatter(s, d, 8, real, 0, NULL, q), ncclScatter(s, d, 8, no_type, 0, c, q),
          ncclScatter(s, d, (size_t)-1, real, 0, c, q))
  BAD(ncclInvalidArgument, "root (-1)", ncclScatter(s, d, 8, real, -1, c, q));

  GOOD(ncclGroupStart());
  for (int r = 0; r < RANKS; r++) {
    set_device(r);
    GOOD(ncclSend(sent[r], COUNT, real, (r + 1) % RANKS, comms[r], streams[r]));
    GOOD(ncclRecv(received[r], COUNT, real, (r + RANKS - 1) % RANKS, comms[r], streams[r]));
  }
  GOOD(ncclGroupEnd());
  wait_all();
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 3) == input((r + RANKS - 1) % RANKS, 3));
  REFUSES(ncclSend(s, 8, real, 0, NULL, q), ncclSend(s, 8, no_type, 0, c, q), ncclSend(s, (size_t)-1, real, 0, c, q))
  REFUSES(ncclRecv(d, 8, real, 0, NULL, q), ncclRecv(d, 8, no_type, 0, c, q), ncclRecv(d, (size_t)-1, real, 0, c, q))
  BAD(ncclInvalidArgument, "peer (99)", ncclSend(s, 8, real, 99, c, q));
  BAD(ncclInvalidArgument, "peer (-1)", ncclRecv(d, 8, real, -1, c, q));
  OURS(BAD(ncclInvalidArgument, "sendbuff is NULL", ncclSend(NULL, 8, real, 0, c, q));)
#undef REFUSES
}

#ifndef NVIDIA_NCCL
/* Collectives with a configuration, which no header declares. */
static void configured(void) {
  CallConfig plain = {sizeof plain, NCCL_API_MAGIC, 23203, NULL, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT,
                      NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NULL, 1, NCCL_CONFIG_UNDEF_INT, 0, NULL};
  const ncclDataType_t real = ncclFloat32;
  CallConfig wrong = plain;
  ON_ALL(ncclAllReduceConfig(sent[r], received[r], COUNT, real, ncclSum, comms[r], streams[r], &plain));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 7) == sum(7));
  ON_ALL(ncclAllReduceConfig(sent[r], received[r], COUNT, real, ncclSum, comms[r], streams[r], NULL));
  ON_ALL(ncclReduceScatterConfig(sent[r], received[r], COUNT, real, ncclSum, comms[r], streams[r], &plain));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 4) == sum(COUNT * r + 4));
  ON_ALL(ncclReduceConfig(sent[r], received[r], COUNT, real, ncclMax, 0, comms[r], streams[r], &plain));
  HOLDS(result(0, 3) == input(RANKS - 1, 3));
  ON_ALL(ncclBroadcastConfig(sent[r], received[r], COUNT, real, RANKS - 1, comms[r], streams[r], &plain));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 9) == input(RANKS - 1, 9));
  ON_ALL(ncclAllGatherConfig(sent[r], received[r], COUNT, real, comms[r], streams[r], &plain));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, COUNT * (RANKS - 1) + 6) == input(RANKS - 1, 6));
  ON_ALL(ncclAlltoAllConfig(sent[r], received[r], COUNT, real, comms[r], streams[r], &plain));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 2) == input(0, COUNT * r + 2));
  ON_ALL(ncclGatherConfig(sent[r], received[r], COUNT, real, 0, comms[r], streams[r], &plain));
  HOLDS(result(0, COUNT * (RANKS - 1) + 8) == input(RANKS - 1, 8));
  ON_ALL(ncclScatterConfig(sent[r], received[r], COUNT, real, 0, comms[r], streams[r], &plain));
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 1) == input(0, COUNT * r + 1));
#define REFUSED(code, names) \
  BAD(code, names, ncclAllReduceConfig(sent[0], received[0], 8, real, ncclSum, comms[0], streams[0], &wrong)); \
  wrong = plain
  wrong.size = 48;
  REFUSED(ncclInvalidArgument, "config.size (48)");
  wrong.magic = 1;
  REFUSED(ncclInvalidArgument, "config.magic is 0x1");
  wrong.minCTAs = 0;
  REFUSED(ncclInvalidArgument, "config.minCTAs (0)");
  wrong.minCTAs = 4;
  wrong.maxCTAs = 2;
  REFUSED(ncclInvalidArgument, "more than config.maxCTAs (2)");
  wrong.algSelection = "allreduce=ring";
  REFUSED(ncclInvalidUsage, "forceAlgSelection");
#undef REFUSED
  wrong.algSelection = "allreduce=ring";
  wrong.forceAlgSelection = 0;
  ON_ALL(ncclAllReduceConfig(sent[r], received[r], COUNT, real, ncclSum, comms[r], streams[r], &wrong));
  BAD(ncclInvalidArgument, "comm is NULL",
      ncclBroadcastConfig(sent[0], received[0], 8, real, 0, NULL, streams[0], &plain));

  Encryption encryption = {sizeof encryption, NCCL_API_MAGIC, 23203, 0, NULL};
  GOOD(ncclSetEncryption(&encryption));
  encryption.mode = 1;
  BAD(ncclInvalidUsage, "not encrypted", ncclSetEncryption(&encryption));
  encryption.magic = 1;
  BAD(ncclInvalidArgument, "config.magic", ncclSetEncryption(&encryption));
  BAD(ncclInvalidArgument, "config is NULL", ncclSetEncryption(NULL));

  ncclWaitSignalDesc_t awaited = {1, 0, 0, 0};
  ncclWindow_t window = NULL;
  BAD(ncclInvalidUsage, "one-sided operations",
      ncclPutSignal(sent[0], 8, real, 0, window, 0, 0, 0, 0, comms[0], streams[0]));
  BAD(ncclInvalidUsage, "one-sided operations", ncclSignal(0, 0, 0, 0, comms[0], streams[0]));
  BAD(ncclInvalidUsage, "one-sided operations", ncclWaitSignal(1, &awaited, comms[0], streams[0]));
  BAD(ncclInvalidArgument, "comm is NULL", ncclSignal(0, 0, 0, 0, NULL, streams[0]));
}
#endif

static void parameters(void) {
  ncclParamHandle_t handle = NULL, text = NULL;
  int64_t number = 0;
  const char *value = NULL, **keys = NULL;
  int length = 0;
  char bytes[64];
#ifndef NVIDIA_NCCL
  setenv("NCCL_IB_TIMEOUT", "0x16", 1);
  GOOD(ncclParamBind(&handle, "NCCL_IB_TIMEOUT"));
  GOOD(ncclParamGetI64(handle, &number));
  HOLDS(number == 22);
  GOOD(ncclParamGetParameter("NCCL_IB_TIMEOUT", &value, &length));
  HOLDS(strcmp(value, "22") == 0 && length == 2);
  GOOD(ncclParamGet(handle, bytes, sizeof bytes, &length));
  HOLDS(length == 8 && memcmp(bytes, &number, sizeof number) == 0);
  BAD(ncclInvalidArgument, "maxLen (7)", ncclParamGet(handle, bytes, 7, &length));
  unsetenv("NCCL_IB_TIMEOUT");
  GOOD(ncclParamGetI64(handle, &number));
  HOLDS(number == 20);
  GOOD(ncclParamBind(&text, "NCCL_DEBUG_SUBSYS"));
  GOOD(ncclParamGetStr(text, &value));
  HOLDS(strcmp(value, "INIT,BOOTSTRAP,ENV") == 0);
  GOOD(ncclParamGetAllParameterKeys(&keys, &length));
  HOLDS(length > 40 && strcmp(keys[0], "NCCL_BUFFSIZE") == 0);
  BAD(ncclInvalidArgument, "is a text", ncclParamGetI64(text, &number));
  BAD(ncclInvalidArgument, "is int64_t", ncclParamGetStr(handle, &value));
  BAD(ncclInvalidArgument, "is no parameter", ncclParamBind(&handle, "NCCL_NO_SUCH_THING"));
  BAD(ncclInvalidArgument, "is no parameter", ncclParamGetParameter("HOME", &value, &length));
  HOLDS(value == NULL && length == 0);
  BAD(ncclInvalidArgument, "key is NULL", ncclParamBind(&handle, NULL));
  BAD(ncclInvalidArgument, "out is NULL", ncclParamBind(NULL, "NCCL_NET"));
  BAD(ncclInvalidArgument, "is not a handle", ncclParamGetI64((ncclParamHandle_t)(void*)&number, &number));
  BAD(ncclInvalidArgument, "table is NULL", ncclParamGetAllParameterKeys(NULL, &length));
  /* The place is not written: the numbers are int64_t. */
#define OTHER(call) BAD(ncclInvalidArgument, "is int64_t", call)
  OTHER(ncclParamGetI8(handle, (int8_t*)bytes));
  OTHER(ncclParamGetI16(handle, (int16_t*)(void*)bytes));
  OTHER(ncclParamGetI32(handle, (int32_t*)(void*)bytes));
  OTHER(ncclParamGetU8(handle, (uint8_t*)bytes));
  OTHER(ncclParamGetU16(handle, (uint16_t*)(void*)bytes));
  OTHER(ncclParamGetU32(handle, (uint32_t*)(void*)bytes));
  OTHER(ncclParamGetU64(handle, (uint64_t*)(void*)bytes));
#undef OTHER
#endif
  (void)handle, (void)text, (void)number, (void)value, (void)keys, (void)length, (void)bytes;
  ncclParamDumpAll();
}

static void reductions(void) {
  float two = 2;
  ncclRedOp_t ops[RANKS], other;
  for (int r = 0; r < RANKS; r++) {
    GOOD(ncclRedOpCreatePreMulSum(&ops[r], &two, ncclFloat32, ncclScalarHostImmediate, comms[r]));
    HOLDS((int)ops[r] >= (int)ncclNumOps);
  }
  ON_ALL(ncclAllReduce(sent[r], received[r], COUNT, ncclFloat32, ops[r], comms[r], streams[r]));
  HOLDS(result(0, 5) == 2 * sum(5));
  ON_ALL(ncclRedOpDestroy(ops[r], comms[r]));
  BAD(ncclInvalidArgument, "op (", ncclAllReduce(sent[0], received[0], 8, ncclFloat32, ops[0], comms[0], streams[0]));
  BAD(ncclInvalidArgument, "op", ncclRedOpDestroy(ops[0], comms[0]));
  BAD(ncclInvalidArgument, "op", ncclRedOpDestroy(ncclSum, comms[0]));
  BAD(ncclInvalidArgument, "comm is NULL", ncclRedOpDestroy(ops[0], NULL));
  BAD(ncclInvalidArgument, "comm is NULL",
      ncclRedOpCreatePreMulSum(&other, &two, ncclFloat32, ncclScalarHostImmediate, NULL));
  OURS(BAD(ncclInvalidArgument, "op is NULL",
      ncclRedOpCreatePreMulSum(NULL, &two, ncclFloat32, ncclScalarHostImmediate, comms[0]));)
  OURS(BAD(ncclInvalidArgument, "scalar is NULL",
      ncclRedOpCreatePreMulSum(&other, NULL, ncclFloat32, ncclScalarHostImmediate, comms[0]));)
  OURS(BAD(ncclInvalidArgument, "residence (9)",
      ncclRedOpCreatePreMulSum(&other, &two, ncclFloat32, (ncclScalarResidence_t)9, comms[0]));)
  BAD(ncclInternalError, "datatype (12)",
      ncclRedOpCreatePreMulSum(&other, &two, (ncclDataType_t)12, ncclScalarHostImmediate, comms[0]));
}

static void groups(void) {
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  BAD(ncclInvalidUsage, "ncclGroupStart", ncclGroupEnd());
  GOOD(ncclGroupStart());
  GOOD(ncclGroupStart());
  GOOD(ncclGroupEnd());
  GOOD(ncclGroupEnd());
  /* One wrong call: nothing of the group is done. */
  GOOD(ncclGroupStart());
  BAD(ncclInvalidArgument, "root (99)",
      ncclBroadcast(sent[0], received[0], 8, ncclFloat32, 99, comms[0], streams[0]));
  BAD(ncclInvalidArgument, "root (99)", ncclGroupEnd());

  GOOD(ncclGroupStart());
  for (int r = 0; r < RANKS; r++) {
    set_device(r);
    GOOD(ncclAllReduce(sent[r], received[r], COUNT, ncclFloat32, ncclSum, comms[r], streams[r]));
  }
  set_device(0);
  GOOD(ncclGroupSimulateEnd(&info));
  OURS(HOLDS(info.estimatedTime > 0);)
  BAD(ncclInvalidUsage, "ncclGroupStart", ncclGroupSimulateEnd(&info));
  info.magic = 1;
  GOOD(ncclGroupStart());
  BAD(ncclInvalidArgument, "magic", ncclGroupSimulateEnd(&info));
}

static void teams(void) {
  ncclTeam_t none = {0, 0, 0}, world = none;
  for (int r = 0; r < RANKS; r++) {
    world = ncclTeamWorld(comms[r]);
    HOLDS(world.nRanks == RANKS && world.rank == r && world.stride == 1);
    ncclTeam_t lsa = ncclTeamLsa(comms[r]), rail = ncclTeamRail(comms[r]);
    OURS(HOLDS(lsa.nRanks == RANKS && lsa.rank == r && lsa.stride == 1);)
    OURS(HOLDS(rail.nRanks == 1 && rail.rank == 0 && rail.stride == RANKS);)
    HOLDS(lsa.nRanks * rail.nRanks == RANKS);
    for (int other = 0; other < RANKS; other++) {
      HOLDS(ncclTeamRankToWorld(comms[r], world, other) == other);
      HOLDS(ncclTeamRankToLsa(comms[r], lsa, other % lsa.nRanks) == other % lsa.nRanks);
    }
  }
#ifndef NVIDIA_NCCL
  none = ncclTeamWorld(NULL);
  HOLDS(none.nRanks == 0 && none.stride == 0 && strstr(ncclGetLastError(NULL), "ncclTeamWorld: comm is NULL"));
  HOLDS(ncclTeamLsa(NULL).nRanks == 0 && ncclTeamRail(NULL).nRanks == 0);
  HOLDS(ncclTeamRankToWorld(NULL, world, 0) == -1 && ncclTeamRankToLsa(NULL, world, 0) == -1);
  HOLDS(strstr(ncclGetLastError(NULL), "comm is NULL") != NULL);
#endif
}

static void properties(void) {
  for (int r = 0; r < RANKS; r++) {
    ncclCommProperties_t is = NCCL_COMM_PROPERTIES_INITIALIZER;
    GOOD(ncclCommQueryProperties(comms[r], &is));
    HOLDS(is.rank == r && is.nRanks == RANKS && is.cudaDev == r && is.size == sizeof is);
    OURS(HOLDS(!is.deviceApiSupport && !is.multimemSupport && is.ginType == NCCL_GIN_TYPE_NONE);)
    OURS(HOLDS(is.nLsaTeams == 1 && !is.hostRmaSupport && is.railedGinType == NCCL_GIN_TYPE_NONE);)
  }
#ifndef NVIDIA_NCCL
  ncclCommProperties_t is = NCCL_COMM_PROPERTIES_INITIALIZER;
  /* Nothing is written behind the struct of an older version. */
  is.version = NCCL_VERSION(2, 29, 2);
  is.size = 40;
  is.nLsaTeams = 77;
  GOOD(ncclCommQueryProperties(comms[1], &is));
  HOLDS(is.rank == 1 && is.nLsaTeams == 77);
  is.version = NCCL_VERSION(2, 31, 0);
  BAD(ncclInvalidUsage, "NCCL 2.31.0; this library has NCCL 2.30.7", ncclCommQueryProperties(comms[0], &is));
  is.version = NCCL_VERSION_CODE;
  BAD(ncclInvalidArgument, "props.size (40)", ncclCommQueryProperties(comms[0], &is));
  is.magic = 1;
  BAD(ncclInvalidUsage, "props.magic", ncclCommQueryProperties(comms[0], &is));
  BAD(ncclInvalidArgument, "props is NULL", ncclCommQueryProperties(comms[0], NULL));
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommQueryProperties(NULL, &is));
  HOLDS(ncclTeamCft(comms[0], 0).nRanks == 0 && ncclTeamCftMultimem(comms[0]).nRanks == 0);
#endif
}

static void requirements(void) {
  ncclTeam_t team = {4, 1, 2};
  ncclDevResourceRequirements_t needs;
  ncclLLA2AHandle_t lla2a;
  ncclLsaBarrierHandle_t lsa;
  ncclGinBarrierHandle_t gin;
  HOLDS(ncclLLA2ACalcSlots(10, 8) == 10 && ncclLLA2ACalcSlots(7, 9) == 14 && ncclLLA2ACalcSlots(3, 0) == 0);
  OURS(HOLDS(ncclLLA2ACalcSlots(-1, 8) == -1 && strstr(ncclGetLastError(NULL), "maxElts (-1)"));)
  memset(&needs, 0x55, sizeof needs);
  GOOD(ncclLLA2ACreateRequirement(3, 5, &lla2a, &needs));
  HOLDS(needs.next == NULL && needs.bufferSize == 528 && needs.bufferAlign == 16 && lla2a.nSlots == 5);
  HOLDS(needs.outBufferHandle == &lla2a.bufHandle && needs.ginSignalCount == 0 && needs.ginCounterCount == 0);
  memset(&needs, 0x55, sizeof needs);
  GOOD(ncclLsaBarrierCreateRequirement(team, 3, &lsa, &needs));
  HOLDS(needs.bufferSize == 84 && needs.bufferAlign == 4 && lsa.nBarriers == 3);
  HOLDS(needs.outBufferHandle == &lsa.bufHandle && needs.outGinSignalStart == NULL);
  memset(&needs, 0x55, sizeof needs);
  GOOD(ncclGinBarrierCreateRequirement(comms[0], team, 3, &gin, &needs));
  HOLDS(needs.bufferSize == 0 && needs.ginSignalCount == 12 && needs.outGinSignalStart == &gin.signal0);
  HOLDS(needs.outBufferHandle == NULL && needs.outGinCounterStart == NULL);
#ifndef NVIDIA_NCCL
  BAD(ncclInvalidArgument, "nBlocks (-1)", ncclLLA2ACreateRequirement(-1, 5, &lla2a, &needs));
  BAD(ncclInvalidArgument, "2 GiB", ncclLLA2ACreateRequirement(1 << 30, 1 << 30, &lla2a, &needs));
  BAD(ncclInvalidArgument, "outHandle is NULL", ncclLLA2ACreateRequirement(1, 1, NULL, &needs));
  BAD(ncclInvalidArgument, "outReq is NULL", ncclLLA2ACreateRequirement(1, 1, &lla2a, NULL));
  BAD(ncclInvalidArgument, "nBarriers (-2)", ncclLsaBarrierCreateRequirement(team, -2, &lsa, &needs));
  BAD(ncclInvalidArgument, "outHandle is NULL", ncclLsaBarrierCreateRequirement(team, 1, NULL, &needs));
  BAD(ncclInvalidArgument, "nBarriers (-2)", ncclGinBarrierCreateRequirement(comms[0], team, -2, &gin, &needs));
  BAD(ncclInvalidArgument, "outReq is NULL", ncclGinBarrierCreateRequirement(comms[0], team, 1, &gin, NULL));
  BAD(ncclInvalidUsage, "(GIN) are not served", ncclGinOutboxCreateRequirement(1, 7, NULL, &needs));
  BAD(ncclInvalidUsage, "(GIN) are not served", ncclGinInboxA2ACreateRequirement(team, 1, 7, NULL, &needs));
  /* Kernels that communicate themselves are not served. The structs are NVIDIA's; nobody looks into them. */
  BAD(ncclInvalidArgument, "comm is NULL",
      ncclDevCommCreate(NULL, (const ncclDevCommRequirements_t*)&needs, (ncclDevComm_t*)&gin));
  BAD(ncclInvalidArgument, "reqs is NULL", ncclDevCommCreate(comms[0], NULL, (ncclDevComm_t*)&gin));
  BAD(ncclInvalidArgument, "outDevComm is NULL",
      ncclDevCommCreate(comms[0], (const ncclDevCommRequirements_t*)&needs, NULL));
  BAD(ncclInvalidUsage, "not served",
      ncclDevCommCreate(comms[0], (const ncclDevCommRequirements_t*)&needs, (ncclDevComm_t*)&gin));
  BAD(ncclInvalidArgument, "devComm is NULL", ncclDevCommDestroy(comms[0], NULL));
  BAD(ncclInvalidUsage, "not served", ncclDevCommDestroy(comms[0], (const ncclDevComm_t*)&gin));
#endif
}

static void children(void) {
  ncclComm_t split[RANKS], shrunk = NULL;
  int excluded[RANKS + 1] = {RANKS - 1}, count = 0;
  for (int r = 0; r < RANKS; r++) split[r] = NULL;
  /* In reverse order. */
  ON_ALL(ncclCommSplit(comms[r], 0, RANKS - r, &split[r], NULL));
  for (int r = 0; r < RANKS; r++) {
    GOOD(ncclCommUserRank(split[r], &count));
    HOLDS(count == RANKS - 1 - r);
    GOOD(ncclCommDestroy(split[r]));
    split[r] = comms[0];
  }
  ON_ALL(ncclCommSplit(comms[r], NCCL_SPLIT_NOCOLOR, 0, &split[r], NULL));
  for (int r = 0; r < RANKS; r++) HOLDS(split[r] == NULL);
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommSplit(NULL, 0, 0, &split[0], NULL));
  BAD(ncclInvalidArgument, "newcomm is NULL", ncclCommSplit(comms[0], 0, 0, NULL, NULL));
  OURS(BAD(ncclInvalidArgument, "color (-2)", ncclCommSplit(comms[0], -2, 0, &split[0], NULL));)

  OURS(BAD(ncclInvalidArgument, "comm is NULL", ncclCommShrink(NULL, excluded, 1, &shrunk, NULL, NCCL_SHRINK_DEFAULT));)
  BAD(ncclInvalidArgument, "newcomm is NULL", ncclCommShrink(comms[0], excluded, 1, NULL, NULL, NCCL_SHRINK_DEFAULT));
  BAD(ncclInvalidArgument, "excludeRanksList is NULL", ncclCommShrink(comms[0], NULL, 1, &shrunk, NULL, 0));
  BAD(ncclInvalidArgument, "excludeRanksCount", ncclCommShrink(comms[0], excluded, -1, &shrunk, NULL, 0));
  excluded[0] = 99;
  OURS(BAD(ncclInvalidArgument, "excludeRanksList", ncclCommShrink(comms[0], excluded, 1, &shrunk, NULL, 0));)
#ifndef NVIDIA_NCCL
  excluded[0] = RANKS - 1;
  GOOD(ncclCommShrink(comms[0], excluded, 1, &shrunk, NULL, NCCL_SHRINK_DEFAULT));
  GOOD(ncclCommCount(shrunk, &count));
  HOLDS(count == RANKS - 1);
  BAD(ncclInvalidArgument, "revokeFlags (1)", ncclCommRevoke(shrunk, 1));
  GOOD(ncclCommRevoke(shrunk, NCCL_REVOKE_DEFAULT));
  BAD(ncclInvalidUsage, "revoke",
      ncclAllReduce(sent[0], received[0], 8, ncclFloat32, ncclSum, shrunk, streams[0]));
  BAD(ncclInvalidArgument, "revoke", ncclCommRevoke(shrunk, NCCL_REVOKE_DEFAULT));
  GOOD(ncclCommDestroy(shrunk));
#endif
  GOOD(ncclCommRevoke(NULL, NCCL_REVOKE_DEFAULT));
}

/* The ranks of comms and a new one. */
static void growing(void) {
  ncclUniqueId id;
  ncclComm_t grown[RANKS + 1];
  int count = 0;
  for (int r = 0; r <= RANKS; r++) grown[r] = NULL;
#ifndef NVIDIA_NCCL
  BAD(ncclInvalidArgument, "comm is NULL", ncclCommGetUniqueId(NULL, &id));
  BAD(ncclInvalidArgument, "uniqueId is NULL", ncclCommGetUniqueId(comms[0], NULL));
  GOOD(ncclCommGetUniqueId(comms[RANKS - 1], &id));
  BAD(ncclInvalidUsage, "no ncclCommGrow has used", ncclCommGetUniqueId(comms[RANKS - 1], &id));
  BAD(ncclInvalidArgument, "rank (0) is not -1", ncclCommGrow(comms[0], RANKS + 1, NULL, 0, &grown[0], NULL));
  BAD(ncclInvalidArgument, "nRanks (0)", ncclCommGrow(comms[0], 0, NULL, -1, &grown[0], NULL));
  BAD(ncclInvalidArgument, "is not more than the 2 ranks", ncclCommGrow(comms[0], RANKS, NULL, -1, &grown[0], NULL));
  BAD(ncclInvalidArgument, "newcomm is NULL", ncclCommGrow(comms[0], RANKS + 1, NULL, -1, NULL, NULL));
  BAD(ncclInvalidArgument, "rank (3) of a new rank", ncclCommGrow(NULL, RANKS + 1, &id, RANKS + 1, &grown[0], NULL));
  BAD(ncclInvalidArgument, "uniqueId is NULL", ncclCommGrow(NULL, RANKS + 1, NULL, RANKS, &grown[0], NULL));
  GOOD(ncclGroupStart());
  for (int r = 0; r < RANKS; r++) {
    set_device(r);
    GOOD(ncclCommGrow(comms[r], RANKS + 1, r == RANKS - 1 ? &id : NULL, -1, &grown[r], NULL));
  }
  set_device(RANKS);
  GOOD(ncclCommGrow(NULL, RANKS + 1, &id, RANKS, &grown[RANKS], NULL));
  GOOD(ncclGroupEnd());
  set_device(0);
  for (int r = 0; r <= RANKS; r++) {
    GOOD(ncclCommUserRank(grown[r], &count));
    HOLDS(count == r);
    GOOD(ncclCommCount(grown[r], &count));
    HOLDS(count == RANKS + 1);
  }
  cudaStream_t third;
  set_device(RANKS);
  HOLDS(make_stream(&third) == 0);
  GOOD(ncclGroupStart());
  for (int r = 0; r <= RANKS; r++) {
    set_device(r);
    GOOD(ncclAllReduce(r < RANKS ? sent[r] : sent[0], r < RANKS ? received[r] : sent[0] + COUNT, COUNT, ncclFloat32,
                       ncclSum, grown[r], r < RANKS ? streams[r] : third));
  }
  GOOD(ncclGroupEnd());
  wait_all();
  for (int r = 0; r < RANKS; r++) HOLDS(result(r, 7) == sum(7) + input(0, 7));
  for (int r = 0; r <= RANKS; r++) GOOD(ncclCommDestroy(grown[r]));
  /* The id is used up. */
  GOOD(ncclGroupStart());
  for (int r = 0; r < RANKS; r++) {
    set_device(r);
    GOOD(ncclCommGrow(comms[r], RANKS + 1, r == RANKS - 1 ? &id : NULL, -1, &grown[r], NULL));
  }
  set_device(0);
  BAD(ncclInvalidArgument, "was used already", ncclGroupEnd());
#endif
  (void)id, (void)grown, (void)count;
}

static void ending(void) {
  ncclComm_t aborted = NULL;
  GOOD(init(&aborted, 1, 0));
  GOOD(ncclCommAbort(aborted));
  OURS(BAD(ncclInvalidArgument, "destroyed or aborted", ncclCommAbort(aborted));)
  GOOD(ncclCommAbort(NULL));
  for (int r = 0; r < RANKS; r++) {
    GOOD(ncclMemFree(sent[r]));
    GOOD(ncclMemFree(received[r]));
  }
  ON_ALL(ncclCommFinalize(comms[r]));
  OURS(BAD(ncclInvalidUsage, "finalized",
      ncclAllReduce(&aborted, &aborted, 1, ncclInt8, ncclSum, comms[0], streams[0]));)
  BAD(ncclInvalidArgument, "finalized", ncclCommFinalize(comms[0]));
  GOOD(ncclCommFinalize(NULL));
  for (int r = 0; r < RANKS; r++) GOOD(ncclCommDestroy(comms[r]));
  OURS(BAD(ncclInvalidArgument, "destroyed", ncclCommDestroy(comms[0]));)
  OURS(BAD(ncclInvalidArgument, "destroyed", ncclCommFinalize(comms[0]));)
  GOOD(ncclCommDestroy(NULL));
}

int main(void) {
  the_library();
  making();
  queries();
  memory();
  operations();
  OURS(configured();)
  parameters();
  reductions();
  groups();
  teams();
  properties();
  requirements();
  children();
  growing();
  ending();
  printf("%d cases, %d failures\n", cases, failures);
  return failures != 0;
}

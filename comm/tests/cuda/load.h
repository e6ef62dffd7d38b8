// What a rank of driver.c needs of libcuda and of a libnccl.so.2, both loaded at run time, and how it fails.
#pragma once
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef void* CUstream;
typedef void *CUgraph, *CUgraphExec, *CUevent, *CUcontext;
enum { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_READY = 600 };

// ---- NCCL's ABI, as far as it is used ----
typedef struct { char internal[128]; } Id;
typedef void* Comm;
typedef int Code;
struct Nccl {
  Code (*GetVersion)(int*);
  Code (*GetUniqueId)(Id*);
  Code (*CommInitRank)(Comm*, int, Id, int);
  Code (*CommDestroy)(Comm);
  Code (*CommAbort)(Comm);
  Code (*CommRevoke)(Comm, int);
  Code (*CommGetAsyncError)(Comm, Code*);
  const char* (*GetLastError)(Comm);
  const char* (*GetErrorString)(Code);
  Code (*GroupStart)(void);
  Code (*GroupEnd)(void);
  Code (*AllReduce)(const void*, void*, size_t, int, int, Comm, CUstream);
  Code (*AllGather)(const void*, void*, size_t, int, Comm, CUstream);
  Code (*ReduceScatter)(const void*, void*, size_t, int, int, Comm, CUstream);
  Code (*Broadcast)(const void*, void*, size_t, int, int, Comm, CUstream);
  Code (*Reduce)(const void*, void*, size_t, int, int, int, Comm, CUstream);
  Code (*Send)(const void*, size_t, int, int, Comm, CUstream);
  Code (*Recv)(void*, size_t, int, int, Comm, CUstream);
  Code (*AlltoAll)(const void*, void*, size_t, int, Comm, CUstream);
  Code (*Gather)(const void*, void*, size_t, int, int, Comm, CUstream);
  Code (*Scatter)(const void*, void*, size_t, int, int, Comm, CUstream);
  Code (*RedOpCreatePreMulSum)(int*, void*, int, int, Comm);
  Code (*RedOpDestroy)(int, Comm);
  Code (*MemAlloc)(void**, size_t);
  Code (*MemFree)(void*);
  Code (*CommRegister)(Comm, void*, size_t, void**);
  Code (*CommDeregister)(Comm, void*);
  Code (*CommWindowRegister)(Comm, void*, size_t, void**, int);
  Code (*CommWindowDeregister)(Comm, void*);
};
static struct Nccl nccl;

// ---- libcuda ----
#define CUDA_FUNCTIONS(X) \
  X(cuInit, "cuInit") X(cuDeviceGetCount, "cuDeviceGetCount") X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain") \
  X(cuCtxSetCurrent, "cuCtxSetCurrent") X(cuCtxCreate, "cuCtxCreate_v2") X(cuCtxDestroy, "cuCtxDestroy_v2") X(cuMemAlloc, "cuMemAlloc_v2") X(cuMemFree, "cuMemFree_v2") \
  X(cuMemHostAlloc, "cuMemHostAlloc") X(cuStreamCreate, "cuStreamCreate") X(cuStreamDestroy, "cuStreamDestroy_v2") X(cuStreamSynchronize, "cuStreamSynchronize") \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2") X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2") \
  X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2") X(cuMemsetD8Async, "cuMemsetD8Async") \
  X(cuStreamBeginCapture, "cuStreamBeginCapture_v2") X(cuStreamEndCapture, "cuStreamEndCapture") \
  X(cuStreamIsCapturing, "cuStreamIsCapturing") \
  X(cuGraphInstantiate, "cuGraphInstantiateWithFlags") X(cuGraphUpload, "cuGraphUpload") X(cuGraphLaunch, "cuGraphLaunch") \
  X(cuGraphExecDestroy, "cuGraphExecDestroy") X(cuGraphDestroy, "cuGraphDestroy") X(cuEventCreate, "cuEventCreate") \
  X(cuEventRecord, "cuEventRecord") X(cuEventElapsedTime, "cuEventElapsedTime") X(cuEventSynchronize, "cuEventSynchronize") \
  X(cuGetErrorName, "cuGetErrorName") X(cuStreamQuery, "cuStreamQuery") X(cuDeviceGetName, "cuDeviceGetName") \
  X(cuLaunchHostFunc, "cuLaunchHostFunc") X(cuDeviceGetAttribute, "cuDeviceGetAttribute") \
  X(cuStreamWaitEvent, "cuStreamWaitEvent") X(cuMemCreate, "cuMemCreate") X(cuMemRelease, "cuMemRelease") \
  X(cuMemAddressReserve, "cuMemAddressReserve") X(cuMemAddressFree, "cuMemAddressFree") X(cuMemMap, "cuMemMap") \
  X(cuMemUnmap, "cuMemUnmap") X(cuMemSetAccess, "cuMemSetAccess")
#define X(name, symbol) static void* p_##name;
CUDA_FUNCTIONS(X)
#undef X
#define CALL(name, ...) ((CUresult(*)())p_##name)(__VA_ARGS__)

enum { MAX_RANKS = 16 };
struct Shared {
  Id id[4];
  volatile int failed;
  pthread_barrier_t barrier;
  double numbers[MAX_RANKS];
};
static struct Shared* shared;
static int ranks = 2, devices = 0;
static bool processes = false;
static const char* library;
static size_t max_bytes = 64 << 20;
static const char* mode;
static int sizes_step = 4;
static size_t min_size = 8;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

// For qsort, of times.
static int by_value(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void fail(const char* format, ...) {
  va_list list;
  va_start(list, format);
  char text[1024];
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  printf("FAILED %s\n", text);
  fflush(stdout);
  shared->failed = 1;
  // Others may wait for this rank.
  _exit(1);
}
#define CU(name, ...)                                                                       \
  do {                                                                                      \
    CUresult result_ = CALL(name, __VA_ARGS__);                                             \
    if (result_ != CUDA_SUCCESS) {                                                          \
      const char* text_ = "?";                                                              \
      CALL(cuGetErrorName, result_, &text_);                                                \
      fail("%s:%d %s: %s", mode, __LINE__, #name, text_);                                   \
    }                                                                                       \
  } while (0)
#define NC(call)                                                                            \
  do {                                                                                      \
    Code code_ = nccl.call;                                                                 \
    if (code_ != 0) fail("%s:%d nccl%s: %d: %s", mode, __LINE__, #call, code_, nccl.GetLastError(NULL)); \
  } while (0)

static struct Nccl open_library(const char* path) {
  struct Nccl opened;
  void* lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!lib) fail("%s", dlerror());
#define L(name) *(void**)&opened.name = dlsym(lib, "nccl" #name);
  L(GetVersion) L(GetUniqueId) L(CommInitRank) L(CommDestroy) L(CommAbort) L(CommRevoke) L(CommGetAsyncError) L(GetLastError)
  L(GetErrorString) L(GroupStart) L(GroupEnd) L(AllReduce) L(AllGather) L(ReduceScatter) L(Broadcast) L(Reduce) L(Send)
  L(Recv) L(AlltoAll) L(Gather) L(Scatter) L(RedOpCreatePreMulSum) L(RedOpDestroy) L(MemAlloc) L(MemFree)
  L(CommRegister) L(CommDeregister) L(CommWindowRegister) L(CommWindowDeregister)
#undef L
  return opened;
}

static void load(void) {
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!cuda) fail("%s", dlerror());
#define X(name, symbol) if (!(p_##name = dlsym(cuda, symbol))) fail("no %s", symbol);
  CUDA_FUNCTIONS(X)
#undef X
  nccl = open_library(library);
  CU(cuInit, 0);
  CU(cuDeviceGetCount, &devices);
}

static void barrier(void) { pthread_barrier_wait(&shared->barrier); }

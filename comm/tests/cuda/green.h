// Green contexts: parts of a GPU that streams are made for. Only drivers of CUDA 12.5 and newer tell of their streams.
#pragma once
#include "rank.h"

// One of all multiprocessors of a device, and a stream of it; NULL where the driver has none.
static void* make_green(int device, CUstream* stream) {
  enum { MULTIPROCESSORS = 1, DEFAULT_STREAM = 1, NON_BLOCKING = 1 };
  CUresult (*const get)() = (CUresult(*)())dlsym(RTLD_DEFAULT, "cuDeviceGetDevResource");
  CUresult (*const describe)() = (CUresult(*)())dlsym(RTLD_DEFAULT, "cuDevResourceGenerateDesc");
  CUresult (*const create)() = (CUresult(*)())dlsym(RTLD_DEFAULT, "cuGreenCtxCreate");
  CUresult (*const create_stream)() = (CUresult(*)())dlsym(RTLD_DEFAULT, "cuGreenCtxStreamCreate");
  if (!get || !describe || !create || !create_stream || !dlsym(RTLD_DEFAULT, "cuStreamGetCtx_v2")) return NULL;
  // More than a CUdevResource has.
  long long resource[64] = {0};
  void *description, *green;
  if (get(device, resource, MULTIPROCESSORS) || describe(&description, resource, 1u) || create(&green, description, device, DEFAULT_STREAM) ||
      create_stream(stream, green, NON_BLOCKING, 0))
    fail("%s: no green context of GPU %d", mode, device);
  return green;
}

static void give_green(void* green, CUstream stream) {
  CUresult (*const destroy)() = (CUresult(*)())dlsym(RTLD_DEFAULT, "cuGreenCtxDestroy");
  CU(cuStreamDestroy, stream);
  if (destroy(green)) fail("%s: a green context cannot be given back", mode);
}

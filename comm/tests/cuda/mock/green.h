// Green contexts: what their streams do is done on their device, and of them only newer calls tell. To be included where libcuda.cpp has its
// functions.
#pragma once

// One resource, and the description that is made of it: the device's number and one.
int cuDeviceGetDevResource(int device, u64* resource, int type) {
  if (device < 0 || device >= devices()) return INVALID_DEVICE;
  if (type != 1) return INVALID_VALUE;
  return *resource = static_cast<u64>(device) + 1, SUCCESS;
}
int cuDevResourceGenerateDesc(u64* description, const u64* resource, unsigned count) {
  if (count != 1 || *resource == 0) return INVALID_VALUE;
  return *description = *resource, SUCCESS;
}
int cuGreenCtxCreate(Context** green, u64 description, int device, unsigned flags) {
  if (description != static_cast<u64>(device) + 1 || flags != 1) return INVALID_VALUE;
  return *green = new Context{device}, SUCCESS;
}
int cuGreenCtxDestroy(Context* green) { return delete green, SUCCESS; }
int cuGreenCtxStreamCreate(Stream** stream, Context* green, unsigned flags, int) {
  // Those that wait for default streams there are none of.
  if (flags != 1) return INVALID_VALUE;
  return *stream = new Stream(&contexts[green->device], green), SUCCESS;
}
int cuStreamGetCtx(void* stream, Context** context) {
  if (current == nullptr) return INVALID_CONTEXT;
  const bool special = reinterpret_cast<u64>(stream) <= 2;
  if (!special && of(stream)->green != nullptr) return NOT_SUPPORTED;
  *context = special ? current : of(stream)->context;
  return SUCCESS;
}
int cuStreamGetCtx_v2(void* stream, Context** context, void** green) {
  if (current == nullptr) return INVALID_CONTEXT;
  const bool special = reinterpret_cast<u64>(stream) <= 2;
  *green = special ? nullptr : of(stream)->green;
  *context = special ? current : of(stream)->context;
  return SUCCESS;
}

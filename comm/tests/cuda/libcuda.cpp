// A CUDA driver without a GPU, for comm/tests/cuda.rs: as much of libcuda.so.1 as the library and tests/cuda/driver.c use,
// with the semantics that these rely on. Memory is the host's; a stream is a thread; the kernel is the one of
// kernels/cuda compiled for this processor, each block on a thread of its own. RINGSIGHT_MOCK_GPUS says how many devices
// there are (2).
//
// It refuses what the driver refuses: calls on a thread without a context, host memory that kernels were given without
// registration is not noticed.
//
// With RINGSIGHT_MOCK_TIMER=OFFSET,PPM the timers that kernels read are so many nanoseconds ahead of the host's clock, and
// gain on it.
//
// Memory is exported as dma-bufs of the kind in dma_buf.h, unless RINGSIGHT_MOCK_DMA_BUF=0; RINGSIGHT_MOCK_GDR_ORDERING and
// RINGSIGHT_MOCK_GDR_FLUSH are the device's attributes of writes of other devices (0: such have to be flushed; 1: the host can).
//
// Kernels were compiled for Hopper, or for what RINGSIGHT_MOCK_COMPILED_FOR says (80).
//
// With RINGSIGHT_MOCK_EPOCHS=last operations among peers have the last epochs that there are: behind the fifth of those that begin anew comes
// the seventh last.
//
// With RINGSIGHT_MOCK_NO_KERNEL_NODES there is no memory for graphs that are made of kernels.
//
// With RINGSIGHT_MOCK_MEMORY_MB no device has more for one allocation; with RINGSIGHT_MOCK_NO_PEERS none reaches another's memory, nor a process
// that of another one. With RINGSIGHT_MOCK_IPC_OPEN=0 it is given handles that it does not open; with RINGSIGHT_MOCK_PIECES_EXPORT=0 or
// RINGSIGHT_MOCK_PIECES_IMPORT=0 no descriptors are had of pieces, or none is taken.
//
// With RINGSIGHT_MOCK_FREE=waits, who gives memory back, or makes an executable graph, waits for all kernels and host functions that have been
// launched, and as long nobody launches another one: as drivers do, of graphs when they need more memory for them.
// ringsight_mock_memory says how often that was, and what has not been given back.
//
// With RINGSIGHT_MOCK_KERNELS=skip, kernels of one shot move no data: a launch reports their run at once on the calling
// thread, and events of streams are reached when they are recorded. What a call of the library takes then is the host's part
// of it. ringsight_mock_calls gives the calls of this thread.
#include "mock/state.h"
#include "mock/lacking.h"

extern "C" {

// Calls of this thread: launches of kernels, records of events, waits for events, questions for captures, for or of what is
// current, for ids of streams; and, of the launches of kernels, those that may overlap with the one before, and those by graphs of one kernel.
const u64* ringsight_mock_calls() { return calls; }

// How often somebody waited for kernels to give memory back; allocations of GPUs, those of other processes that are open, and
// ranges of host memory that are registered.
void ringsight_mock_memory(u64* figures) {
  {
    std::lock_guard lock(running.mutex);
    figures[0] = running.waited;
  }
  std::lock_guard lock(memory_mutex);
  figures[1] = memory.size(), figures[2] = opened.size(), figures[3] = registered.size();
}

// Blocks of the largest kernel since this was last asked.
unsigned ringsight_mock_blocks() { return most_blocks.exchange(0); }

// Kernels of a device that have to wait do not go on, nor do its copies; or these alone; or all do again: see `Frozen`.
void ringsight_mock_freeze(int device, int what) { frozen[device] = what; }

// Queries of events do not come back, or do again.
void ringsight_mock_hold_queries(int on) { queries_held = on != 0; }

// A device that fails from now on.
void ringsight_mock_break(int device) { broken[device] = true; }

int cuInit(unsigned) { return SUCCESS; }
int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int* count) { return *count = devices(), SUCCESS; }
int cuDeviceGetName(char* name, int bytes, int) { return std::strncpy(name, "mock", bytes), SUCCESS; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device < 0 || device >= devices()) return INVALID_DEVICE;
  switch (attribute) {
    case 16: *value = 12; break;      // multiprocessors
    case 75: *value = 9; break;       // compute capability, major
    case 88: *value = 0; break;       // reaches memory that is not pinned
    case 91: *value = 1; break;       // registered memory at the host's addresses
    case 97: *value = 232448; break;  // shared memory of a block
    case 117: *value = number("RINGSIGHT_MOCK_GDR_FLUSH", 1); break;
    case 118: *value = dma_buf::ordering(); break;
    case 124: *value = number("RINGSIGHT_MOCK_DMA_BUF", 1); break;
    default: return INVALID_VALUE;
  }
  return SUCCESS;
}
int cuDeviceGetPCIBusId(char* text, int bytes, int device) {
  if (device < 0 || device >= devices()) return INVALID_DEVICE;
  std::snprintf(text, static_cast<size_t>(bytes), "0000:%02X:00.0", device + 16);
  return SUCCESS;
}
int cuDeviceGetByPCIBusId(int* device, const char* text) {
  *device = static_cast<int>(std::strtol(text + 5, nullptr, 16)) - 16;
  return *device >= 0 && *device < devices() ? SUCCESS : INVALID_VALUE;
}
int cuDeviceGetP2PAttribute(int* value, int, int, int) {
  *value = std::getenv("RINGSIGHT_MOCK_NO_NVLINK") == nullptr;
  return SUCCESS;
}
int cuGetErrorName(int result, const char** name) {
  static const std::map<int, const char*> names = {
      {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},  {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},         {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
      {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},     {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
      {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {NOT_READY, "CUDA_ERROR_NOT_READY"},                 {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"}};
  auto found = names.find(result);
  *name = found == names.end() ? "CUDA_ERROR" : found->second;
  return SUCCESS;
}
int cuGetErrorString(int, const char** text) { return *text = "of the mock driver", SUCCESS; }

int cuDevicePrimaryCtxRetain(Context** context, int device) {
  if (device < 0 || device >= devices()) return INVALID_DEVICE;
  *context = &contexts[device];
  held[CONTEXTS]++;
  return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  if (device < 0 || device >= devices()) return INVALID_DEVICE;
  held[CONTEXTS]--;
  return SUCCESS;
}
// Beside the primary one.
int cuCtxCreate_v2(Context** context, unsigned, int device) {
  if (device < 0 || device >= devices()) return INVALID_DEVICE;
  current = *context = new Context{device};
  return SUCCESS;
}
// Its streams are not asked for any more; what they stand for stays.
int cuCtxDestroy_v2(Context* context) {
  if (current == context) current = nullptr;
  return SUCCESS;
}
int cuCtxSetCurrent(Context* context) { return calls[CURRENT]++, current = context, SUCCESS; }
int cuCtxGetCurrent(Context** context) { return calls[CURRENT]++, *context = current, SUCCESS; }
int cuCtxGetDevice(int* device) {
  calls[CURRENT]++;
  if (current == nullptr) return INVALID_CONTEXT;
  *device = current->device;
  return SUCCESS;
}

int cuModuleLoadData(void** module, const void*) {
  if (lacks("cuModuleLoadData")) return OUT_OF_MEMORY;
  held[MODULES]++;
  return *module = contexts, SUCCESS;
}
int cuModuleUnload(void*) { return held[MODULES]--, SUCCESS; }
int cuModuleGetFunction(void** function, void*, const char* name) {
  if (std::strcmp(name, "ringsight_clock") == 0) *function = &clock_kernel;
  else if (std::strcmp(name, "ringsight_count") == 0) *function = &count_kernel;
  else if (std::strcmp(name, "ringsight_append") == 0) *function = &append_kernel;
  else if (std::strcmp(name, "ringsight_nothing") == 0) *function = &nothing_kernel;
  else if (std::strcmp(name, "ringsight_channels") == 0) *function = &channels[1];
  else if (std::strcmp(name, "ringsight_channels_copy") == 0) *function = &channels[0];
  else {
    size_t number = 0;
    while (ringsight_peer_kernels[number].name != nullptr && std::strcmp(name, ringsight_peer_kernels[number].name) != 0) number++;
    if (ringsight_peer_kernels[number].name == nullptr) return INVALID_HANDLE;
    *function = &peer_kernels[number];
  }
  return SUCCESS;
}
int cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
// Of Hopper, or of what RINGSIGHT_MOCK_COMPILED_FOR says.
int cuFuncGetAttribute(int* value, int attribute, void*) {
  enum { PTX_VERSION = 5 };
  if (attribute != PTX_VERSION) return INVALID_VALUE;
  const char* text = std::getenv("RINGSIGHT_MOCK_COMPILED_FOR");
  return *value = text != nullptr ? std::atoi(text) : 90, SUCCESS;
}

#include "mock/pieces.h"

#include "mock/memory.h"

int cuStreamCreate(Stream** stream, unsigned) {
  if (current == nullptr) return INVALID_CONTEXT;
  if (lacks("cuStreamCreate")) return OUT_OF_MEMORY;
  *stream = new Stream(current);
  return SUCCESS;
}
int cuStreamGetId(void* stream, u64* id) {
  calls[STREAM_ID]++;
  if (current == nullptr) return INVALID_CONTEXT;
  return *id = of(stream)->id, SUCCESS;
}
#include "mock/green.h"

int cuStreamDestroy_v2(Stream* stream) { return stream->end(), SUCCESS; }
int cuStreamQuery(void* stream) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  if (of(stream)->capture) return CAPTURE_UNSUPPORTED;
  if (broken[of(stream)->device]) return ILLEGAL_ADDRESS;
  return of(stream)->idle() ? SUCCESS : NOT_READY;
}
int cuStreamSynchronize(void* stream) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  if (of(stream)->capture) return CAPTURE_UNSUPPORTED;
  if (broken[of(stream)->device]) return ILLEGAL_ADDRESS;
  of(stream)->wait();
  return SUCCESS;
}

int cuEventCreate(Mark** event, unsigned) {
  if (lacks("cuEventCreate")) return OUT_OF_MEMORY;
  return *event = new Mark, SUCCESS;
}
int cuEventDestroy_v2(Mark* event) {
  delete event;
  return SUCCESS;
}
int cuEventRecord(Mark* event, void* stream) {
  calls[RECORD]++;
  if (skips && !of(stream)->capture) return SUCCESS;
  auto moment = event->recorded->next();
  event->capture = of(stream)->capture;
  if (event->capture) return SUCCESS;  // it orders nodes, which run in order anyhow
  return add(stream, [moment] { moment->reach(); });
}
int cuEventRecordWithFlags(Mark* event, void* stream, unsigned flags) {
  if (flags == 0) return cuEventRecord(event, stream);
  if (!of(stream)->capture) return INVALID_VALUE;
  of(stream)->last_node = of(stream)->capture->graph->add(nullptr, nullptr, event->recorded);
  return SUCCESS;
}
int cuEventQuery(Mark* event) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  while (queries_held) usleep(1000);
  if (event->capture) return CAPTURE_UNSUPPORTED;
  auto moment = event->recorded->last();
  if (!moment) return SUCCESS;
  std::lock_guard lock(moment->mutex);
  return moment->done ? SUCCESS : NOT_READY;
}
int cuEventSynchronize(Mark* event) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  if (event->capture) return CAPTURE_UNSUPPORTED;
  if (auto moment = event->recorded->last()) moment->wait();
  return SUCCESS;
}
int cuEventElapsedTime(float* milliseconds, Mark* start, Mark* end) {
  const auto from = start->recorded->last(), to = end->recorded->last();
  // Where kernels are skipped, none has been recorded.
  if (!from || !to) return INVALID_HANDLE;
  *milliseconds = static_cast<float>(to->nanoseconds - from->nanoseconds) / 1e6f;
  return SUCCESS;
}
int cuStreamWaitEvent(void* stream, Mark* event, unsigned flags) {
  calls[WAIT]++;
  Stream* waiting = of(stream);
  if (flags != 0) {
    if (!waiting->capture) return INVALID_VALUE;
    waiting->last_node = waiting->capture->graph->add(nullptr, event->recorded, nullptr);
    return SUCCESS;
  }
  if (event->capture) {
    // Only those of a capture under way, which the stream joins.
    if (event->capture->over) return CAPTURE_UNMATCHED;
    waiting->capture = event->capture;
    return SUCCESS;
  }
  // A capture waits for nothing outside it.
  if (waiting->capture) return CAPTURE_UNSUPPORTED;
  auto moment = event->recorded->last();
  if (!moment) return SUCCESS;
  return add(stream, [moment] { moment->wait(); });
}

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return add_kernel(stream, [=] { function(data); });
}
int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned shared_bytes, void* stream, void** parameters, void**) {
  if (function == &clock_kernel) {
    if (blocks != 1 || threads != 1) return INVALID_VALUE;
    return add(stream, [arguments = *static_cast<ClockArguments*>(parameters[0])] { answer_clock(arguments); });
  }
  if (function == &count_kernel) {
    if (blocks != 1 || threads != 1) return INVALID_VALUE;
    return add(stream, [word = *static_cast<u64**>(parameters[0])] { count_up(word); });
  }
  if (function == &append_kernel) {
    if (blocks != 1 || threads != 1) return INVALID_VALUE;
    return add(stream, [journal = *static_cast<u64**>(parameters[0]), word = *static_cast<u64*>(parameters[1])] {
      append(journal, word);
    });
  }
  if (function == &nothing_kernel) return blocks == 1 && threads == 1 ? add(stream, [] {}) : INVALID_VALUE;
  calls[LAUNCH]++;
  for (unsigned most = most_blocks; most < blocks && !most_blocks.compare_exchange_weak(most, blocks);) continue;
  if (refuses("cuLaunchKernel")) return OUT_OF_MEMORY;
  if (broken[of(stream)->device]) return ILLEGAL_ADDRESS;
  std::unique_lock alone(launching, std::defer_lock);
  if (frees_wait) alone.lock();
  if (skips && !is_channels(function) && !of(stream)->capture) {
    if (current == nullptr) return INVALID_CONTEXT;
    return report_run(*static_cast<PeerCall*>(parameters[0])), SUCCESS;
  }
  std::function<void(unsigned)> block;
  const PeerCall* call = nullptr;
  if (!is_channels(function)) {
    if (threads > 544 || threads % 32 != 0) return INVALID_VALUE;
    const PeerKernel kernel = ringsight_peer_kernels[static_cast<char*>(function) - peer_kernels];
    const auto* bytes = static_cast<const char*>(parameters[0]);
    auto arguments = std::make_shared<std::vector<char>>(bytes, bytes + kernel.argument_bytes);
    block = [=](unsigned index) { kernel.run_block(arguments->data(), index, blocks); };
    call = reinterpret_cast<const PeerCall*>(arguments->data());
  } else {
    if (threads != 512) return INVALID_VALUE;
    auto arguments = std::make_shared<Arguments>(*static_cast<Arguments*>(parameters[0]));
    const u32 ops = (shared_bytes - arguments->staged - arguments->lanes * static_cast<u32>(sizeof(LaneState))) / static_cast<u32>(sizeof(OpState));
    const bool reduces = function == &channels[1];
    block = [=](unsigned index) { ringsight_run_block(arguments.get(), index, blocks, ops, reduces); };
  }
  const int device = of(stream)->device;
  return add_kernel(stream, [=] {
    // As every rank does, of its own memory, between the same operations.
    if (call != nullptr) skip_epochs(*call);
    const auto run = [=](unsigned index) {
      running_on = device;
      block(index);
    };
    std::vector<std::thread> all;
    for (unsigned index = 1; index < blocks; index++) all.emplace_back(run, index);
    run(0);
    for (auto& thread : all) thread.join();
  });
}

// A kernel that may overlap with the one before it has to wait for that by itself, which here all do.
int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void** extra) {
  if (config->attributes_count != 1 || config->attributes->id != 6 || config->attributes->value[0] != 1) return INVALID_VALUE;
  if (is_channels(function) || function == &clock_kernel || function == &count_kernel || function == &append_kernel || function == &nothing_kernel) return INVALID_VALUE;
  calls[OVERLAP]++;
  const auto [x, y, z] = config->blocks;
  const auto [threads_x, threads_y, threads_z] = config->threads;
  return cuLaunchKernel(function, x, y, z, threads_x, threads_y, threads_z, config->shared_bytes, config->stream, parameters, extra);
}

#include "mock/captures.h"

}

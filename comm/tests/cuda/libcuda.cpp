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
// With RINGSIGHT_MOCK_FREE=waits, who gives memory back waits for all kernels and host functions that have been launched, and as long
// nobody launches another one: as drivers do. ringsight_mock_memory says how often that was, and what has not been given back.
//
// With RINGSIGHT_MOCK_KERNELS=skip, kernels of one shot move no data: a launch reports their run at once on the calling
// thread, and events of streams are reached when they are recorded. What a call of the library takes then is the host's part
// of it. ringsight_mock_calls gives the calls of this thread.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "dma_buf.h"
#include "on_host.cpp"

namespace {

enum Result : int {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_UNMATCHED = 903,
};

using Task = std::function<void()>;

// The destructors of a graph's user objects, called when the graph and its instances are gone.
struct Objects {
  std::vector<std::pair<void (*)(void*), void*>> all;
  ~Objects() {
    // On another thread, as the driver does.
    auto calls = std::move(all);
    std::thread([calls] {
      for (auto& [function, data] : calls) function(data);
    }).detach();
  }
};

struct Moment {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  u64 nanoseconds = 0;
  void reach() {
    std::lock_guard lock(mutex);
    done = true;
    nanoseconds = ringsight::device_time();
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
};
// What an event recorded last. Nodes of graphs may outlive the event.
struct Recorded {
  std::mutex mutex;
  std::shared_ptr<Moment> moment;
  std::shared_ptr<Moment> last() {
    std::lock_guard lock(mutex);
    return moment;
  }
  std::shared_ptr<Moment> next() {
    std::lock_guard lock(mutex);
    return moment = std::make_shared<Moment>();
  }
};

// One of the three.
struct Node {
  u64 id;
  Task work;
  std::shared_ptr<Recorded> waited, recorded;
};
struct Graph {
  std::vector<Node> nodes;
  // Adds one; its handle.
  void* add(Task work, std::shared_ptr<Recorded> waited, std::shared_ptr<Recorded> recorded) {
    static std::atomic<u64> last{0};
    nodes.push_back({++last, std::move(work), std::move(waited), std::move(recorded)});
    return reinterpret_cast<void*>(nodes.back().id);
  }
  std::vector<Node>::iterator find(void* node) {
    return std::find_if(nodes.begin(), nodes.end(), [=](const Node& one) { return reinterpret_cast<void*>(one.id) == node; });
  }
  std::shared_ptr<Objects> objects = std::make_shared<Objects>();
};
struct Exec {
  std::vector<Node> nodes;
  std::shared_ptr<Objects> objects;
};

// Nodes run in the order of their capture: one that every order of forks and joins allows.
struct Capture {
  u64 id;
  struct Stream* origin;
  Graph* graph;
  std::atomic<bool> over{false};
  Capture(u64 id, struct Stream* origin, Graph* graph) : id(id), origin(origin), graph(graph) {}
};

struct Context {
  int device;
};

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> queue;
  bool busy = false, ended = false;
  std::shared_ptr<Capture> capture;
  void* last_node = nullptr;
  u64 id;
  const int device;
  std::thread thread;

  explicit Stream(int device) : device(device) {
    static std::atomic<u64> last{0};
    id = ++last;
    thread = std::thread([this] { run(); });
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return !queue.empty() || ended; });
      if (queue.empty()) return;
      Task work = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }
  void add(Task work) {
    if (capture) {
      last_node = capture->graph->add(std::move(work), nullptr, nullptr);
      return;
    }
    std::lock_guard lock(mutex);
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  bool idle() {
    std::lock_guard lock(mutex);
    return queue.empty() && !busy;
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return queue.empty() && !busy; });
  }
  // Work in it goes on.
  void end() {
    {
      std::lock_guard lock(mutex);
      ended = true;
      changed.notify_all();
    }
    thread.detach();
  }
};

struct Mark {
  std::shared_ptr<Recorded> recorded = std::make_shared<Recorded>();
  std::shared_ptr<Capture> capture;
};

struct UserObject {
  void (*function)(void*);
  void* data;
};

int number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoi(text) : otherwise;
}
int devices() { return number("RINGSIGHT_MOCK_GPUS", 2); }
// Their addresses are the functions.
char channels[2], peer_kernels[sizeof ringsight_peer_kernels / sizeof ringsight_peer_kernels[0]];
char clock_kernel, count_kernel, append_kernel;
bool is_channels(void* function) { return function == &channels[0] || function == &channels[1]; }
Context contexts[16] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}};
thread_local Context* current = nullptr;
std::mutex memory_mutex;
// Device memory is in files, so that other processes can map it.
struct Allocation {
  int file;
  size_t bytes;
  int device;
  u64 id;
};
// By address. Never destroyed: threads of the library outlive the program's end.
auto& memory = *new std::map<void*, Allocation>;
auto& opened = *new std::map<void*, Allocation>;
// By address of the allocation: what is exported, for the writes that are on their way.
auto& exported = *new std::map<void*, std::unique_ptr<dma_buf::Mapping>>;
auto& host_memory = *new std::map<void*, size_t>;
auto& registered = *new std::set<void*>;
bool has_peers() { return std::getenv("RINGSIGHT_MOCK_NO_PEERS") == nullptr; }
// The default stream of the process; never ended.
Stream* default_stream() {
  static Stream* stream = new Stream(0);
  return stream;
}
Stream* of(void* handle) {
  Stream* stream = handle == nullptr ? default_stream() : static_cast<Stream*>(handle);
  // Streams that joined a capture leave it when it ends.
  if (stream->capture && stream->capture->over) stream->capture = nullptr;
  return stream;
}

// Kernels are not run.
const bool skips = [] {
  const char* text = std::getenv("RINGSIGHT_MOCK_KERNELS");
  return text != nullptr && std::strcmp(text, "skip") == 0;
}();
// Calls of this thread that each operation may make: see ringsight_mock_calls.
enum Counted { LAUNCH, RECORD, WAIT, CAPTURE, CURRENT, STREAM_ID, COUNTED };
thread_local u64 calls[COUNTED];

// Devices on which a kernel has done wrong: it, and all others there, will not do anything any more.
std::atomic<bool> broken[16];

// Giving memory back waits.
const bool frees_wait = [] {
  const char* text = std::getenv("RINGSIGHT_MOCK_FREE");
  return text != nullptr && std::strcmp(text, "waits") == 0;
}();
// Who launches has it, and who gives memory back.
auto& launching = *new std::mutex;
// Kernels of operations and host functions that were launched and are not over, and how often somebody waited for that.
struct Running {
  std::mutex mutex;
  std::condition_variable changed;
  u64 count = 0, waited = 0;
  void add(u64 more) {
    std::lock_guard lock(mutex);
    count += more;
    changed.notify_all();
  }
};
auto& running = *new Running;
void wait_for_kernels() {
  if (!frees_wait) return;
  std::lock_guard alone(launching);
  std::unique_lock lock(running.mutex);
  if (running.count > 0) running.waited++;
  running.changed.wait(lock, [] { return running.count == 0; });
}

// The timer of a GPU is another clock than the host's.
[[maybe_unused]] const bool has_timer = [] {
  static u64 offset, since = steady_time();
  static double gain;
  const char* text = std::getenv("RINGSIGHT_MOCK_TIMER");
  if (text == nullptr) return false;
  char* rest;
  offset = std::strtoull(text, &rest, 10);
  if (*rest == ',') gain = std::strtod(rest + 1, nullptr) / 1e6;
  timer = [] {
    const u64 now = steady_time();
    return now + offset + static_cast<u64>(static_cast<double>(now - since) * gain);
  };
  return true;
}();

// What a kernel of one block tells of its run.
void report_run(const PeerCall& call) {
  const Report report(call.head);
  const u32 runs = report.runs(), replay = report.replay(runs);
  report.event(EventKind::Started, replay, call.channel, call.op, 1);
  report.event(EventKind::Stopped, replay, call.channel, call.op, 1);
  store_release(&report.control().runs, report.renew(runs, false));
}

int add(void* stream, Task work) {
  if (current == nullptr) return INVALID_CONTEXT;
  of(stream)->add(std::move(work));
  return SUCCESS;
}

// The kernel of an operation, or a host function: it counts from its launch on, in a graph from when it begins.
int add_kernel(void* stream, Task work) {
  if (current == nullptr) return INVALID_CONTEXT;
  const bool captured = of(stream)->capture != nullptr;
  if (!captured) running.add(1);
  return add(stream, [=] {
    if (captured) running.add(1);
    work();
    running.add(~u64{0});
  });
}

}  // namespace

extern "C" {

// Calls of this thread: launches of kernels, records of events, waits for events, questions for captures, for or of what is
// current, and for ids of streams.
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
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},         {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
      {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},     {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
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

int cuModuleLoadData(void** module, const void*) { return *module = contexts, SUCCESS; }
int cuModuleGetFunction(void** function, void*, const char* name) {
  if (std::strcmp(name, "ringsight_clock") == 0) *function = &clock_kernel;
  else if (std::strcmp(name, "ringsight_count") == 0) *function = &count_kernel;
  else if (std::strcmp(name, "ringsight_append") == 0) *function = &append_kernel;
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

int cuMemAlloc_v2(void** pointer, size_t bytes) {
  if (current == nullptr) return INVALID_CONTEXT;
  const int file = memfd_create("device-memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return OUT_OF_MEMORY;
  *pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (*pointer == MAP_FAILED) return OUT_OF_MEMORY;
  // What was there before is no zeros.
  std::memset(*pointer, 0x5a, bytes);
  std::lock_guard lock(memory_mutex);
  static u64 last = 0;
  memory[*pointer] = {file, bytes, current->device, ++last};
  return SUCCESS;
}
int cuMemFree_v2(void* pointer) {
  if (current == nullptr) return INVALID_CONTEXT;
  wait_for_kernels();
  std::lock_guard lock(memory_mutex);
  auto found = memory.find(pointer);
  if (found == memory.end()) return INVALID_VALUE;
  munmap(pointer, found->second.bytes);
  close(found->second.file);
  memory.erase(found);
  exported.erase(pointer);
  return SUCCESS;
}
// Whole allocations alone: more is not asked for.
int cuMemGetHandleForAddressRange(int* file, void* pointer, size_t bytes, int type, u64 flags) {
  if (current == nullptr) return INVALID_CONTEXT;
  if (number("RINGSIGHT_MOCK_DMA_BUF", 1) == 0) return NOT_SUPPORTED;
  std::lock_guard lock(memory_mutex);
  auto found = memory.find(pointer);
  if (found == memory.end() || found->second.bytes != bytes || bytes % 4096 != 0 || type != 1 || flags != 0) return INVALID_VALUE;
  if (!dma_buf::Mapping::extend(found->second.file, bytes)) return OUT_OF_MEMORY;
  exported[pointer] = std::make_unique<dma_buf::Mapping>(found->second.file);
  *file = fcntl(found->second.file, F_DUPFD_CLOEXEC, 0);
  return *file < 0 ? OUT_OF_MEMORY : SUCCESS;
}
int cuFlushGPUDirectRDMAWrites(int target, int scope) {
  if (current == nullptr) return INVALID_CONTEXT;
  if (number("RINGSIGHT_MOCK_GDR_FLUSH", 1) != 1) return NOT_SUPPORTED;
  if (target != 0 || scope != 100) return INVALID_VALUE;
  std::lock_guard lock(memory_mutex);
  for (auto& [pointer, mapping] : exported) {
    auto found = memory.find(pointer);
    if (found != memory.end() && found->second.device == current->device) mapping->flush();
  }
  return SUCCESS;
}
// Of any address in an allocation; nothing, and no error, of an address that is in none.
int cuPointerGetAttributes(unsigned count, const int* attributes, void** places, void* address) {
  if (current == nullptr) return INVALID_CONTEXT;
  std::lock_guard lock(memory_mutex);
  const char* at = static_cast<char*>(address);
  auto holds = [=](const void* base, size_t bytes) { return at >= base && at < static_cast<const char*>(base) + bytes; };
  int kind = 0, device = -2;
  const void* start = nullptr;
  size_t size = 0;
  u64 id = 0;
  for (auto& [base, about] : memory)
    if (holds(base, about.bytes)) kind = 2, device = about.device, start = base, size = about.bytes, id = about.id;
  for (auto& [base, bytes] : host_memory)
    if (holds(base, bytes)) kind = 1, device = 0;
  for (unsigned i = 0; i < count; i++) switch (attributes[i]) {
      case 2: *static_cast<int*>(places[i]) = kind; break;
      case 3: *static_cast<void**>(places[i]) = kind == 0 ? nullptr : address; break;
      case 7: *static_cast<u64*>(places[i]) = id; break;
      case 8: *static_cast<bool*>(places[i]) = false; break;
      case 9: *static_cast<int*>(places[i]) = device; break;
      case 10: *static_cast<bool*>(places[i]) = kind == 2; break;
      case 11: *static_cast<const void**>(places[i]) = start; break;
      case 12: *static_cast<size_t*>(places[i]) = size; break;
      default: return INVALID_VALUE;
    }
  return SUCCESS;
}
int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (current == nullptr) return INVALID_CONTEXT;
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*pointer, 0x5a, bytes);
  std::lock_guard lock(memory_mutex);
  host_memory[*pointer] = bytes;
  return SUCCESS;
}
int cuMemFreeHost(void* pointer) {
  wait_for_kernels();
  std::lock_guard lock(memory_mutex);
  if (host_memory.erase(pointer) == 0) return INVALID_VALUE;
  std::free(pointer);
  return SUCCESS;
}

int cuDeviceCanAccessPeer(int* can, int, int) { return *can = has_peers(), SUCCESS; }
int cuCtxEnablePeerAccess(Context* other, unsigned) {
  thread_local std::set<Context*> enabled;
  if (current == nullptr || other == current) return INVALID_CONTEXT;
  return enabled.insert(other).second ? SUCCESS : PEER_ACCESS_ALREADY_ENABLED;
}
struct IpcHandle {
  u64 process, file, bytes, unused[5];
};
int cuIpcGetMemHandle(IpcHandle* handle, void* pointer) {
  if (!has_peers()) return NOT_SUPPORTED;
  std::lock_guard lock(memory_mutex);
  auto found = memory.find(pointer);
  if (found == memory.end()) return INVALID_VALUE;
  *handle = {static_cast<u64>(getpid()), static_cast<u64>(found->second.file), found->second.bytes, {}};
  return SUCCESS;
}
int cuIpcOpenMemHandle_v2(void** pointer, IpcHandle handle, unsigned) {
  if (current == nullptr || handle.process == static_cast<u64>(getpid())) return INVALID_CONTEXT;
  const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return INVALID_VALUE;
  *pointer = mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (*pointer == MAP_FAILED) return INVALID_VALUE;
  std::lock_guard lock(memory_mutex);
  opened[*pointer] = {-1, handle.bytes, current->device, 0};
  return SUCCESS;
}
int cuIpcCloseMemHandle(void* pointer) {
  if (current == nullptr) return INVALID_CONTEXT;
  wait_for_kernels();
  std::lock_guard lock(memory_mutex);
  auto found = opened.find(pointer);
  if (found == opened.end()) return INVALID_VALUE;
  munmap(pointer, found->second.bytes);
  opened.erase(found);
  return SUCCESS;
}
int cuMemHostRegister_v2(void* pointer, size_t, unsigned) {
  if (current == nullptr) return INVALID_CONTEXT;
  std::lock_guard lock(memory_mutex);
  return registered.insert(pointer).second ? SUCCESS : ALREADY_REGISTERED;
}
int cuMemHostUnregister(void* pointer) {
  wait_for_kernels();
  std::lock_guard lock(memory_mutex);
  return registered.erase(pointer) != 0 ? SUCCESS : NOT_REGISTERED;
}
int cuMemsetD8Async(void* pointer, unsigned char value, size_t bytes, void* stream) {
  return add(stream, [=] { std::memset(pointer, value, bytes); });
}
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream) {
  return add(stream, [=] { std::memcpy(to, from, bytes); });
}
int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}
int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void* stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}

int cuStreamCreate(Stream** stream, unsigned) {
  if (current == nullptr) return INVALID_CONTEXT;
  *stream = new Stream(current->device);
  return SUCCESS;
}
int cuStreamGetId(void* stream, u64* id) {
  calls[STREAM_ID]++;
  if (current == nullptr) return INVALID_CONTEXT;
  return *id = of(stream)->id, SUCCESS;
}
int cuStreamDestroy_v2(Stream* stream) { return stream->end(), SUCCESS; }
int cuStreamQuery(void* stream) {
  if (of(stream)->capture) return CAPTURE_UNSUPPORTED;
  if (broken[of(stream)->device]) return ILLEGAL_ADDRESS;
  return of(stream)->idle() ? SUCCESS : NOT_READY;
}
int cuStreamSynchronize(void* stream) {
  if (of(stream)->capture) return CAPTURE_UNSUPPORTED;
  if (broken[of(stream)->device]) return ILLEGAL_ADDRESS;
  of(stream)->wait();
  return SUCCESS;
}

int cuEventCreate(Mark** event, unsigned) { return *event = new Mark, SUCCESS; }
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
  if (event->capture) return CAPTURE_UNSUPPORTED;
  auto moment = event->recorded->last();
  if (!moment) return SUCCESS;
  std::lock_guard lock(moment->mutex);
  return moment->done ? SUCCESS : NOT_READY;
}
int cuEventSynchronize(Mark* event) {
  if (event->capture) return CAPTURE_UNSUPPORTED;
  if (auto moment = event->recorded->last()) moment->wait();
  return SUCCESS;
}
int cuEventElapsedTime(float* milliseconds, Mark* start, Mark* end) {
  const u64 from = start->recorded->last()->nanoseconds, to = end->recorded->last()->nanoseconds;
  *milliseconds = static_cast<float>(to - from) / 1e6f;
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
  calls[LAUNCH]++;
  if (broken[of(stream)->device]) return ILLEGAL_ADDRESS;
  std::unique_lock alone(launching, std::defer_lock);
  if (frees_wait) alone.lock();
  if (skips && !is_channels(function) && !of(stream)->capture) {
    if (current == nullptr) return INVALID_CONTEXT;
    return report_run(*static_cast<PeerCall*>(parameters[0])), SUCCESS;
  }
  std::function<void(unsigned)> block;
  if (!is_channels(function)) {
    if (threads > 544 || threads % 32 != 0) return INVALID_VALUE;
    const PeerKernel kernel = ringsight_peer_kernels[static_cast<char*>(function) - peer_kernels];
    const auto* bytes = static_cast<const char*>(parameters[0]);
    auto arguments = std::make_shared<std::vector<char>>(bytes, bytes + kernel.argument_bytes);
    block = [=](unsigned index) { kernel.run_block(arguments->data(), index, blocks); };
  } else {
    if (threads != 512) return INVALID_VALUE;
    auto arguments = std::make_shared<Arguments>(*static_cast<Arguments*>(parameters[0]));
    const u32 ops = (shared_bytes - arguments->staged - arguments->lanes * static_cast<u32>(sizeof(LaneState))) / static_cast<u32>(sizeof(OpState));
    const bool reduces = function == &channels[1];
    block = [=](unsigned index) { ringsight_run_block(arguments.get(), index, blocks, ops, reduces); };
  }
  return add_kernel(stream, [=] {
    std::vector<std::thread> all;
    for (unsigned index = 1; index < blocks; index++) all.emplace_back(block, index);
    block(0);
    for (auto& thread : all) thread.join();
  });
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int present = 0;
  std::swap(present, *mode);
  return SUCCESS;
}
int cuStreamBeginCapture_v2(Stream* stream, int) {
  static std::atomic<u64> last{0};
  if (stream == nullptr || stream->capture) return CAPTURE_UNSUPPORTED;
  stream->capture = std::make_shared<Capture>(++last, stream, new Graph);
  stream->last_node = nullptr;
  return SUCCESS;
}
// Streams that joined are told by the event that joins them back; here they just see that it is over.
int cuStreamEndCapture(Stream* stream, Graph** graph) {
  *graph = nullptr;
  if (!stream->capture || stream->capture->origin != stream) return CAPTURE_UNMATCHED;
  *graph = stream->capture->graph;
  stream->capture->over = true;
  stream->capture = nullptr;
  return SUCCESS;
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, u64* id, Graph** graph, void*** dependencies, size_t* count) {
  calls[CAPTURE]++;
  if (current == nullptr && stream == nullptr) return INVALID_CONTEXT;
  auto& capture = of(stream)->capture;
  *status = capture ? 1 : 0;
  if (capture) {
    *id = capture->id;
    *graph = capture->graph;
    // Nodes run in order: to depend on the stream's last one is enough.
    *dependencies = &of(stream)->last_node;
    *count = of(stream)->last_node == nullptr ? 0 : 1;
  }
  return SUCCESS;
}
int cuStreamUpdateCaptureDependencies(void* stream, void** nodes, size_t count, unsigned) {
  if (!of(stream)->capture || count > 1) return CAPTURE_UNMATCHED;
  of(stream)->last_node = count == 0 ? nullptr : nodes[0];
  return SUCCESS;
}
int cuGraphAddEventRecordNode(void** node, Graph* graph, void**, size_t, Mark* event) {
  *node = graph->add(nullptr, nullptr, event->recorded);
  return SUCCESS;
}
// What a node does not wait for any more may be any that comes before it.
int cuGraphRemoveDependencies(Graph* graph, void** from, void** to, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (graph->find(from[i]) >= graph->find(to[i])) return INVALID_VALUE;
  }
  return SUCCESS;
}
// A node that is to wait for others comes last: only such that nothing waits for are moved.
int cuGraphAddDependencies(Graph* graph, void** from, void** to, size_t count) {
  for (size_t i = 0; i < count; i++) {
    auto moved = graph->find(to[i]);
    if (moved == graph->nodes.end() || graph->find(from[i]) == graph->nodes.end()) return INVALID_VALUE;
    std::rotate(moved, moved + 1, graph->nodes.end());
  }
  return SUCCESS;
}
int cuUserObjectCreate(UserObject** object, void* data, void (*function)(void*), unsigned, unsigned) {
  *object = new UserObject{function, data};
  return SUCCESS;
}
int cuUserObjectRelease(UserObject* object, unsigned) {
  object->function(object->data);
  delete object;
  return SUCCESS;
}
int cuGraphRetainUserObject(Graph* graph, UserObject* object, unsigned, unsigned) {
  graph->objects->all.emplace_back(object->function, object->data);
  delete object;
  return SUCCESS;
}
int cuGraphInstantiateWithFlags(std::shared_ptr<Exec>** exec, Graph* graph, u64) {
  *exec = new std::shared_ptr<Exec>(std::make_shared<Exec>(Exec{graph->nodes, graph->objects}));
  return SUCCESS;
}
int cuGraphLaunch(std::shared_ptr<Exec>* exec, void* stream) {
  // What is waited for outside is decided now.
  auto works = std::make_shared<std::vector<Task>>();
  for (auto& node : (*exec)->nodes) {
    if (node.work) {
      works->push_back(node.work);
    } else if (node.recorded) {
      works->push_back([moment = node.recorded->next()] { moment->reach(); });
    } else if (auto moment = node.waited->last()) {
      works->push_back([moment] { moment->wait(); });
    }
  }
  return add(stream, [works, exec = *exec] {
    for (auto& work : *works) work();
  });
}
int cuGraphExecDestroy(std::shared_ptr<Exec>* exec) {
  delete exec;
  return SUCCESS;
}
int cuGraphDestroy(Graph* graph) {
  delete graph;
  return SUCCESS;
}
}

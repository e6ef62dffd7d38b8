// What the driver of libcuda.cpp is made of: streams, events, graphs, memory, devices, and how they fail.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
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
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "../dma_buf.h"
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
  CAPTURE_INVALIDATED = 901,
  CAPTURE_UNMATCHED = 903,
};

using Task = std::function<void()>;

// How many there are of what callers give back.
enum { STREAMS, EVENTS, GRAPHS, MODULES, CONTEXTS, KINDS };
std::atomic<u64> held[KINDS];
template <int KIND> struct Held {
  Held() { held[KIND]++; }
  Held(const Held&) = delete;
  ~Held() { held[KIND]--; }
};

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
// A kernel that a node launches as it was last told to: the only node of its graph.
struct KernelNode {
  void* function = nullptr;
  unsigned blocks = 0, threads = 0, shared_bytes = 0;
  std::vector<char> arguments;
};
struct Graph {
  Held<GRAPHS> held;
  std::vector<Node> nodes;
  std::optional<KernelNode> kernel;
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
  Held<GRAPHS> held;
  std::vector<Node> nodes;
  std::shared_ptr<Objects> objects;
  std::optional<KernelNode> kernel;
  // Launches run one after another, whatever their streams are.
  Recorded launched;
};

// Nodes run in the order of their capture: one that every order of forks and joins allows.
struct Capture {
  u64 id;
  struct Stream* origin;
  Graph* graph;
  // No thread may do what might wait, unless it has said that it knows.
  const bool is_global;
  std::atomic<bool> over{false};
  Capture(u64 id, struct Stream* origin, Graph* graph, bool is_global) : id(id), origin(origin), graph(graph), is_global(is_global) {}
};
// Such captures under way, and how often one was disturbed; the mode of this thread.
std::atomic<int> global_captures{0}, disturbed{0};
thread_local int capture_mode = 0;
// Asked by what disturbs captures on a GPU: seen with driver 580.159, function by function.
bool may_wait() {
  if (global_captures == 0 || capture_mode != 0) return true;
  return disturbed++, false;
}

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
  Context* const context;
  // The green context that it is of, if it is of one.
  void* const green;
  const int device = context->device;
  std::thread thread;

  explicit Stream(Context* context, void* green = nullptr) : context(context), green(green) {
    static std::atomic<u64> last{0};
    id = ++last;
    held[STREAMS]++;
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
    held[STREAMS]--;
    {
      std::lock_guard lock(mutex);
      ended = true;
      changed.notify_all();
    }
    thread.detach();
  }
};

struct Mark {
  Held<EVENTS> held;
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
// A GPU, for one allocation.
bool has_memory(size_t bytes) { return bytes <= static_cast<size_t>(number("RINGSIGHT_MOCK_MEMORY_MB", 1 << 20)) << 20; }
// Their addresses are the functions.
char channels[2], peer_kernels[sizeof ringsight_peer_kernels / sizeof ringsight_peer_kernels[0]];
char clock_kernel, count_kernel, append_kernel, nothing_kernel;
bool is_channels(void* function) { return function == &channels[0] || function == &channels[1]; }
bool is_peer_kernel(void* function) { return function >= peer_kernels && function < peer_kernels + sizeof peer_kernels; }
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
// No two have the same, whatever they are. Under the mutex.
u64 last_id = 0;
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
  static Stream* stream = new Stream(&contexts[0]);
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
// See RINGSIGHT_MOCK_EPOCHS.
inline void skip_epochs(const PeerCall& call) {
  static const bool skips = std::getenv("RINGSIGHT_MOCK_EPOCHS") != nullptr;
  u32& epoch = header_of(call.bases[call.rank])->epoch;
  if (skips && (epoch == 0 || epoch == 5)) epoch = LAST_EPOCH - 7;
}

// See ringsight_mock_blocks.
inline std::atomic<unsigned> most_blocks{0};

// Calls of this thread that each operation may make: see ringsight_mock_calls.
enum Counted { LAUNCH, RECORD, WAIT, CAPTURE, CURRENT, STREAM_ID, OVERLAP, BY_GRAPH, CHANGED, COUNTED };

// CUlaunchConfig and CUlaunchAttribute.
struct LaunchAttribute { int id, pad; int value[16]; };
struct LaunchConfig {
  unsigned blocks[3], threads[3], shared_bytes;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned attributes_count;
};
// CUDA_KERNEL_NODE_PARAMS_v2.
struct KernelNodeParams {
  void* function;
  unsigned blocks[3], threads[3], shared_bytes;
  void** parameters;
  void *extra, *kernel, *context;
};
static_assert(sizeof(KernelNodeParams) == 72);
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);
thread_local u64 calls[COUNTED];

// What of each device does not go on: kernels that wait and copies, or copies alone.
enum Frozen { MOVING, FROZEN, COPIES_FROZEN };
std::atomic<int> frozen[16];
std::atomic<bool> queries_held;
// The device of the kernel that this thread runs.
thread_local int running_on = -1;
[[maybe_unused]] const bool may_freeze = [] {
  rest = [] {
    while (running_on >= 0 && frozen[running_on] == FROZEN) usleep(1000);
    std::this_thread::yield();
  };
  return true;
}();

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
  report.event(EventKind::Started, replay, call.channel, call.head.op, 1);
  report.event(EventKind::Stopped, replay, call.channel, call.head.op, 1);
  report.end(runs, false);
}

// The default stream is that of every device.
bool is_of_current(void* stream) { return stream == nullptr || of(stream)->device == current->device; }

int add(void* stream, Task work) {
  if (current == nullptr) return INVALID_CONTEXT;
  if (!is_of_current(stream)) return INVALID_HANDLE;
  of(stream)->add(std::move(work));
  return SUCCESS;
}

// The kernel of an operation, or a host function: it counts from its launch on, in a graph from when it begins.
int add_kernel(void* stream, Task work) {
  if (current == nullptr) return INVALID_CONTEXT;
  if (!is_of_current(stream)) return INVALID_HANDLE;
  const bool captured = of(stream)->capture != nullptr;
  if (!captured) running.add(1);
  return add(stream, [=] {
    if (captured) running.add(1);
    work();
    running.add(~u64{0});
  });
}

}  // namespace

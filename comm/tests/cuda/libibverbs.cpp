// libibverbs without a device, for comm/tests/cuda.rs: as much of libibverbs.so.1 as the library uses (verbs/src/sys.rs, whose
// layouts stand here again), with reliable queue pairs between processes of one machine. It has the devices mock0 and mock1
// of a /sys that the test makes; they reach each other, by queue pair number.
//
// All that processes share is in the file that RINGSIGHT_MOCK_FABRIC names. A write is done when it is posted: into the
// peer's memory by process_vm_writev, into a dma-buf through a mapping of it (dma_buf.h). Bounds, rights and protection
// domains of regions are checked as a device does.
//
// After RINGSIGHT_MOCK_FAILS_AFTER requests of all processes nothing goes from mock0 or to it any more.
// RINGSIGHT_MOCK_UNREACHED names a node (NCCL_HOSTID) whose queue pairs reach nobody. RINGSIGHT_MOCK_NO_DMA_BUF_MR names a device that registers no dma-buf. Compiled with -DNO_DMA_BUF_MR it is a library from
// before there was the call.
#include <arpa/inet.h>
#include <errno.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

#include <map>
#include <memory>
#include <mutex>

#include "dma_buf.h"

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

namespace {

constexpr u32 LOCAL_WRITE = 1, REMOTE_WRITE = 2;
constexpr u32 INLINE = 8, SIGNALED = 2;
enum Opcode : u32 { RDMA_WRITE = 0, RDMA_WRITE_WITH_IMM = 1, SEND = 2 };
enum Status : u32 { SUCCESS = 0, LOCAL_PROTECTION = 4, FLUSHED = 5, REMOTE_ACCESS = 10, RETRY_EXCEEDED = 12, NOT_READY = 13 };
enum State : u32 { RESET = 0, INIT = 1, RTR = 2, RTS = 3, ERROR = 6 };

struct Device {
  const char* name;
};
struct Context {
  Device* device;
  void* before[11];
  int (*poll_cq)(struct Cq*, int, struct Wc*);
  int (*req_notify_cq)(struct Cq*, int);
  void* between[12];
  int (*post_send)(struct Qp*, struct SendWr*, struct SendWr**);
  int (*post_recv)(struct Qp*, struct RecvWr*, struct RecvWr**);
  void* after[5];
  int cmd_fd, async_fd, num_comp_vectors;
};
static_assert(offsetof(Context, poll_cq) == 8 + 88 && offsetof(Context, post_send) == 8 + 200, "as in verbs/src/sys.rs");
static_assert(offsetof(Context, async_fd) == 268, "as in verbs/src/sys.rs");
struct Pd {
  Context* context;
  u32 number;
};
struct CompChannel {
  Context* context;
  int fd, refcnt;
};
struct Cq {
  Context* context;
  u32 index;
};
struct Qp {
  Context* context;
  u8 before[44];
  u32 number;
};
static_assert(offsetof(Qp, number) == 52, "as in verbs/src/sys.rs");
struct Mr {
  u8 before[36];
  u32 lkey, rkey;
};
static_assert(offsetof(Mr, lkey) == 36, "as in verbs/src/sys.rs");
struct Sge {
  u64 address;
  u32 length, lkey;
};
struct SendWr {
  u64 id;
  SendWr* next;
  Sge* pieces;
  int count;
  u32 opcode, flags, immediate;
  u64 remote;
  u32 rkey;
  u64 rest[9];
};
static_assert(sizeof(SendWr) == 128 && offsetof(SendWr, remote) == 40, "as in verbs/src/sys.rs");
struct RecvWr {
  u64 id;
  RecvWr* next;
  Sge* pieces;
  int count;
};
struct Wc {
  u64 id;
  u32 status, opcode, vendor, bytes, immediate, qp, source, flags;
  u16 pkey, slid;
  u8 sl, path;
};
static_assert(sizeof(Wc) == 48 && offsetof(Wc, qp) == 28, "as in verbs/src/sys.rs");
struct QpInitAttr {
  void* context;
  Cq *send, *receive;
  void* srq;
  u32 capabilities[5], type;
  int all_signaled;
};
struct QpAttr {
  u32 state;
  u8 before[24];
  u32 peer;
  u8 rest[112];
};
static_assert(sizeof(QpAttr) == 144 && offsetof(QpAttr, peer) == 28, "as in verbs/src/sys.rs");
constexpr int STATE = 1, DEST_QPN = 1 << 20;

// In the shared file.
struct Region {
  u32 used, rights, pd;
  int process;
  // Of the owner's: where it is mapped, or the descriptor of its dma-buf and where in that it begins.
  u64 mapped;
  int dma_buf;
  u64 offset, bytes, address, serial;
};
struct Receive {
  u64 id;
  Sge piece;
};
struct Pair {
  u32 used, state, pd, cq, peer, device;
  int process;
  u32 taken, posted;
  Receive receives[64];
};
struct Queue {
  u32 used, armed;
  int process;
  u64 handle;
  std::atomic<u32> head, tail;
  Wc completions[512];
};
struct Fabric {
  // What the test reads: bytes that went from dma-bufs, and into them; from and into other memory, inline ones aside.
  u64 from_dma_bufs, into_dma_bufs, from_host, into_host;
  // Regions that are registered now, and requests by device.
  u64 regions_now, requests[2];
  std::atomic<u32> lock;
  u32 domains;
  u64 serial;
  Region regions[4096];
  Pair pairs[1024];
  Queue queues[1024];
};

Fabric* fabric() {
  static Fabric* mapped = [] {
    // Peers of another process write to this one's memory.
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    const char* path = std::getenv("RINGSIGHT_MOCK_FABRIC");
    const int file = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
    void* base = MAP_FAILED;
    if (file >= 0 && ftruncate(file, sizeof(Fabric)) == 0)
      base = mmap(nullptr, sizeof(Fabric), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED) std::printf("FAILED no file that RINGSIGHT_MOCK_FABRIC names\n"), std::abort();
    return static_cast<Fabric*>(base);
  }();
  return mapped;
}

struct Locked {
  Locked() {
    while (fabric()->lock.exchange(1, std::memory_order_acquire) != 0) usleep(5);
  }
  ~Locked() { fabric()->lock.store(0, std::memory_order_release); }
};

template <class T, size_t N>
u32 place(T (&table)[N]) {
  for (u32 i = 1; i < N; i++)
    if (!table[i].used) return i;
  std::printf("FAILED a table of the fabric is full\n");
  std::abort();
}

// The region of a key, if it is of this domain, has these rights and holds these bytes. The key's low byte says which of those that
// had its place it is.
Region* find(u32 key, u32 pd, u64 address, u64 bytes, u32 rights) {
  Region* region = &fabric()->regions[(key >> 8) % 4096];
  const bool holds = address >= region->address && bytes <= region->bytes && address - region->address <= region->bytes - bytes;
  return region->used == key && region->pd == pd && holds && (region->rights & rights) == rights ? region : nullptr;
}

// The dma-buf of a region, mapped here.
const dma_buf::Mapping* buffer_of(const Region* region) {
  static auto& all = *new std::map<u64, std::unique_ptr<dma_buf::Mapping>>;
  auto& mapping = all[region->serial];
  if (!mapping) {
    const std::string path = "/proc/" + std::to_string(region->process) + "/fd/" + std::to_string(region->dma_buf);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    mapping = std::make_unique<dma_buf::Mapping>(file);
    close(file);
  }
  return mapping.get();
}

bool copy_out(int process, u64 address, const void* from, size_t bytes) {
  if (process == getpid()) return std::memcpy(reinterpret_cast<void*>(address), from, bytes), true;
  const iovec here{const_cast<void*>(from), bytes}, there{reinterpret_cast<void*>(address), bytes};
  return process_vm_writev(process, &here, 1, &there, 1, 0) == static_cast<ssize_t>(bytes);
}

void read(const Region* region, u64 address, void* to, size_t bytes) {
  if (region->dma_buf < 0) {
    std::memcpy(to, reinterpret_cast<void*>(region->mapped + (address - region->address)), bytes);
    fabric()->from_host += bytes;
  } else {
    buffer_of(region)->read(to, region->offset + (address - region->address), bytes);
    fabric()->from_dma_bufs += bytes;
  }
}

bool write(const Region* region, u64 address, const void* from, size_t bytes, bool counts) {
  if (region->dma_buf < 0) {
    if (counts) fabric()->into_host += bytes;
    return copy_out(region->process, region->mapped + (address - region->address), from, bytes);
  }
  fabric()->into_dma_bufs += bytes;
  buffer_of(region)->write(region->offset + (address - region->address), from, bytes);
  return true;
}

void complete(u32 index, const Wc& completion) {
  Queue& queue = fabric()->queues[index];
  const u32 tail = queue.tail.load(std::memory_order_relaxed);
  if (tail - queue.head.load(std::memory_order_acquire) == 512) std::printf("FAILED a completion queue is full\n"), std::abort();
  queue.completions[tail % 512] = completion;
  queue.tail.store(tail + 1, std::memory_order_release);
  if (!queue.armed) return;
  queue.armed = 0;
  static const int bell = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_un name{AF_UNIX, {}};
  std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "ringsight-mock-%d-%u", queue.process, index);
  sendto(bell, &queue.handle, 8, 0, reinterpret_cast<sockaddr*>(&name), sizeof name);
}

void flush_receives(Pair& pair, u32 number) {
  for (; pair.taken != pair.posted; pair.taken++)
    complete(pair.cq, {pair.receives[pair.taken % 64].id, FLUSHED, 0, 0, 0, 0, number, 0, 0, 0, 0, 0, 0});
}

// What becomes of one request.
Status carry(u32 number, Pair& pair, const SendWr& request) {
  Pair& peer = fabric()->pairs[pair.peer % 1024];
  if (!peer.used || (peer.state != RTR && peer.state != RTS) || peer.peer != number) return RETRY_EXCEEDED;
  static const u64 most = [] {
    const char* text = std::getenv("RINGSIGHT_MOCK_FAILS_AFTER");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : UINT64_MAX;
  }();
  if ((pair.device == 0 || peer.device == 0) && fabric()->requests[0] >= most) return RETRY_EXCEEDED;
  fabric()->requests[pair.device]++;
  static char bytes[4 << 20];
  const u32 length = request.count > 0 ? request.pieces->length : 0;
  const bool is_inline = request.flags & INLINE;
  if (length > sizeof bytes) return LOCAL_PROTECTION;
  if (is_inline) {
    std::memcpy(bytes, reinterpret_cast<void*>(request.pieces->address), length);
  } else if (length > 0) {
    const Region* region = find(request.pieces->lkey, pair.pd, request.pieces->address, length, 0);
    if (region == nullptr) return LOCAL_PROTECTION;
    read(region, request.pieces->address, bytes, length);
  }
  const bool takes = request.opcode != RDMA_WRITE;
  if (takes && peer.taken == peer.posted) return NOT_READY;
  const Receive receive = peer.receives[peer.taken % 64];
  if (request.opcode == SEND) {
    const Region* region = find(receive.piece.lkey, peer.pd, receive.piece.address, length, LOCAL_WRITE);
    if (region == nullptr || length > receive.piece.length) return REMOTE_ACCESS;
    if (!write(region, receive.piece.address, bytes, length, false)) return RETRY_EXCEEDED;
  } else if (length > 0) {
    const Region* region = find(request.rkey, peer.pd, request.remote, length, REMOTE_WRITE);
    if (region == nullptr) return REMOTE_ACCESS;
    if (!write(region, request.remote, bytes, length, !is_inline)) return RETRY_EXCEEDED;
  }
  if (takes) {
    peer.taken++;
    const u32 opcode = request.opcode == SEND ? 128 : 129;
    complete(peer.cq, {receive.id, SUCCESS, opcode, 0, length, request.immediate, pair.peer, 0, 0, 0, 0, 0, 0});
  }
  return SUCCESS;
}

int post_send(Qp* qp, SendWr* request, SendWr**) {
  Locked locked;
  Pair& pair = fabric()->pairs[qp->number];
  for (; request != nullptr; request = request->next) {
    const Status status = pair.state == ERROR ? FLUSHED : carry(qp->number, pair, *request);
    if (status != SUCCESS || request->flags & SIGNALED)
      complete(pair.cq, {request->id, status, 0, 0, 0, 0, qp->number, 0, 0, 0, 0, 0, 0});
    if (status != SUCCESS && pair.state != ERROR) {
      pair.state = ERROR;
      flush_receives(pair, qp->number);
    }
  }
  return 0;
}

int post_recv(Qp* qp, RecvWr* request, RecvWr**) {
  Locked locked;
  Pair& pair = fabric()->pairs[qp->number];
  for (; request != nullptr; request = request->next) {
    if (pair.posted - pair.taken == 64) return ENOMEM;
    pair.receives[pair.posted++ % 64] = {request->id, request->count > 0 ? *request->pieces : Sge{}};
  }
  if (pair.state == ERROR) flush_receives(pair, qp->number);
  return 0;
}

int poll_cq(Cq* cq, int room, Wc* completions) {
  Queue& queue = fabric()->queues[cq->index];
  const u32 head = queue.head.load(std::memory_order_relaxed), tail = queue.tail.load(std::memory_order_acquire);
  int count = 0;
  while (count < room && head + static_cast<u32>(count) != tail) {
    completions[count] = queue.completions[(head + static_cast<u32>(count)) % 512];
    count++;
  }
  queue.head.store(head + static_cast<u32>(count), std::memory_order_release);
  return count;
}

int req_notify_cq(Cq* cq, int) {
  Locked locked;
  fabric()->queues[cq->index].armed = 1;
  return 0;
}

bool is(const char* variable, const char* name) {
  const char* text = std::getenv(variable);
  return text != nullptr && name != nullptr && std::strcmp(text, name) == 0;
}

Device devices[] = {{"mock0"}, {"mock1"}};

Mr* add(Pd* pd, Region region) {
  Locked locked;
  const u32 index = place(fabric()->regions);
  region.serial = ++fabric()->serial;
  const u32 key = index << 8 | (region.serial % 255 + 1);
  region.used = key;
  region.pd = pd->number;
  region.process = getpid();
  fabric()->regions[index] = region;
  fabric()->regions_now++;
  auto* mr = new Mr{};
  mr->lkey = mr->rkey = key;
  return mr;
}

}  // namespace

extern "C" {

int ibv_fork_init() { return 0; }
Device** ibv_get_device_list(int* count) { return *count = 2, new Device* [3] { &devices[0], &devices[1], nullptr }; }
void ibv_free_device_list(Device** list) { delete[] list; }
const char* ibv_get_device_name(Device* device) { return device->name; }
Context* ibv_open_device(Device* device) {
  auto* context = new Context{};
  context->device = device;
  context->poll_cq = poll_cq;
  context->req_notify_cq = req_notify_cq;
  context->post_send = post_send;
  context->post_recv = post_recv;
  // Nothing happens to a device.
  context->async_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  return context;
}
int ibv_close_device(Context* context) { return close(context->async_fd), delete context, 0; }
int ibv_query_device(Context*, void* attributes) {
  std::memset(attributes, 0, 232);
  const int requests = 32768;
  std::memcpy(static_cast<char*>(attributes) + 112, &requests, 4);
  return 0;
}
int ibv_query_port(Context*, u8 port, void* attributes) {
  if (port != 1) return EINVAL;
  auto* bytes = static_cast<u8*>(attributes);
  std::memset(bytes, 0, 52);
  const u32 words[] = {4, 5, 5, 0};  // up; an MTU of 4096 bytes
  std::memcpy(bytes, words, sizeof words);
  const u16 pkeys_and_lid[] = {1, 7};
  std::memcpy(bytes + 32, pkeys_and_lid, sizeof pkeys_and_lid);
  bytes[46] = 1;  // InfiniBand
  return 0;
}
int ibv_query_gid(Context*, u8, int, u8*) { return -1; }
int ibv_query_pkey(Context*, u8, int index, u16* key) { return *key = 0xffff, index == 0 ? 0 : -1; }
Pd* ibv_alloc_pd(Context* context) {
  Locked locked;
  return new Pd{context, ++fabric()->domains};
}
int ibv_dealloc_pd(Pd* pd) { return delete pd, 0; }

Mr* ibv_reg_mr(Pd* pd, void* address, size_t bytes, int rights) {
  const u64 at = reinterpret_cast<u64>(address);
  return add(pd, {0, static_cast<u32>(rights), 0, 0, at, -1, 0, bytes, at, 0});
}
Mr* ibv_reg_mr_iova2(Pd* pd, void* address, size_t bytes, u64, unsigned rights) {
  return ibv_reg_mr(pd, address, bytes, static_cast<int>(rights));
}
#ifndef NO_DMA_BUF_MR
Mr* ibv_reg_dmabuf_mr(Pd* pd, u64 offset, size_t bytes, u64 address, int fd, int rights) {
  if (is("RINGSIGHT_MOCK_NO_DMA_BUF_MR", pd->context->device->name)) return errno = EOPNOTSUPP, nullptr;
  const dma_buf::Mapping mapping(fd);
  // As kernels do: pages of the address and of the dma-buf are the same.
  const bool fits = offset <= mapping.bytes() && bytes <= mapping.bytes() - offset;
  if (mapping.bytes() == 0 || !fits || offset % 4096 != address % 4096) return errno = EINVAL, nullptr;
  return add(pd, {0, static_cast<u32>(rights), 0, 0, 0, dup(fd), offset, bytes, address, 0});
}
#endif
int ibv_dereg_mr(Mr* mr) {
  Locked locked;
  Region& region = fabric()->regions[mr->lkey >> 8];
  if (region.dma_buf >= 0) close(region.dma_buf);
  region.used = 0;
  fabric()->regions_now--;
  return delete mr, 0;
}

CompChannel* ibv_create_comp_channel(Context* context) {
  return new CompChannel{context, socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0), 0};
}
int ibv_destroy_comp_channel(CompChannel* channel) { return close(channel->fd), delete channel, 0; }
Cq* ibv_create_cq(Context* context, int entries, void*, CompChannel* channel, int) {
  if (entries > 512) return errno = EINVAL, nullptr;
  Locked locked;
  auto* cq = new Cq{context, place(fabric()->queues)};
  Queue& queue = fabric()->queues[cq->index];
  queue.used = 1;
  queue.armed = 0;
  queue.process = getpid();
  queue.handle = reinterpret_cast<u64>(cq);
  queue.head = queue.tail = 0;
  sockaddr_un name{AF_UNIX, {}};
  std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "ringsight-mock-%d-%u", queue.process, cq->index);
  if (bind(channel->fd, reinterpret_cast<sockaddr*>(&name), sizeof name) != 0) return nullptr;
  return cq;
}
int ibv_destroy_cq(Cq* cq) {
  Locked locked;
  fabric()->queues[cq->index].used = 0;
  return delete cq, 0;
}
int ibv_get_cq_event(CompChannel* channel, Cq** cq, void** context) {
  *context = nullptr;
  return recv(channel->fd, cq, sizeof *cq, 0) == sizeof *cq ? 0 : -1;
}
void ibv_ack_cq_events(Cq*, unsigned) {}

Qp* ibv_create_qp(Pd* pd, QpInitAttr* attributes) {
  Locked locked;
  auto* qp = new Qp{pd->context, {}, place(fabric()->pairs)};
  const auto device = static_cast<u32>(pd->context->device - devices);
  fabric()->pairs[qp->number] = Pair{1, RESET, pd->number, attributes->send->index, 0, device, getpid(), 0, 0, {}};
  return qp;
}
int ibv_modify_qp(Qp* qp, QpAttr* attributes, int mask) {
  Locked locked;
  Pair& pair = fabric()->pairs[qp->number];
  if (mask & DEST_QPN) pair.peer = attributes->peer;
  if (!(mask & STATE)) return 0;
  const u32 from = pair.state, to = attributes->state;
  if (to == RTR && is("RINGSIGHT_MOCK_UNREACHED", std::getenv("NCCL_HOSTID"))) return ETIMEDOUT;
  if (to != RESET && to != ERROR && to != from + 1) return EINVAL;
  pair.state = to;
  if (to == RESET) pair.taken = pair.posted;
  if (to == ERROR) flush_receives(pair, qp->number);
  return 0;
}
int ibv_query_qp(Qp* qp, QpAttr* attributes, int, void*) {
  Locked locked;
  return attributes->state = fabric()->pairs[qp->number].state, 0;
}
int ibv_destroy_qp(Qp* qp) {
  Locked locked;
  fabric()->pairs[qp->number].used = 0;
  return delete qp, 0;
}

int ibv_get_async_event(Context*, void*) { return errno = EAGAIN, -1; }
void ibv_ack_async_event(void*) {}
const char* ibv_event_type_str(unsigned) { return "event"; }
const char* ibv_wc_status_str(unsigned status) { return status == SUCCESS ? "success" : "error"; }
}

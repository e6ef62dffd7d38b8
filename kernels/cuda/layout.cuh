// Kernel arguments, and the memory that kernels share with the host: the twin of src/cuda/layout.rs and src/fifo.rs, which document every
// field.
#pragma once

#include "peer_memory.cuh"

namespace ringsight {

enum class Connections : u8 { Local = 0, Ring = 1, Send = 2, Recv = 3 };
enum class ScalarKind : u8 { Argument = 0, Device = 1 };

enum class Function : u8 {
  AllReduce = 0, AllGather = 1, ReduceScatter = 2, Broadcast = 3, Reduce = 4,
  AlltoAll = 5, Gather = 6, Scatter = 7, Send = 8, Recv = 9,
};

enum class DataType : u8 {
  Int8 = 0, Uint8 = 1, Int32 = 2, Uint32 = 3, Int64 = 4, Uint64 = 5, Float16 = 6, Float32 = 7, Float64 = 8,
  Bfloat16 = 9, Float8e4m3 = 10, Float8e5m2 = 11,
};

DEVICE inline u32 size_of(DataType type) {
  switch (type) {
    case DataType::Int8:
    case DataType::Uint8:
    case DataType::Float8e4m3:
    case DataType::Float8e5m2: return 1;
    case DataType::Float16:
    case DataType::Bfloat16: return 2;
    case DataType::Int32:
    case DataType::Uint32:
    case DataType::Float32: return 4;
    default: return 8;
  }
}

// How contributions are combined (`Combination` in src/cuda/layout.rs).
enum class Combine : u8 { Copy = 0, Sum = 1, Prod = 2, Max = 3, Min = 4, MulSum = 5, SumDiv = 6 };

constexpr u32 NONE = 0xffffffff;

struct Work {
  u64 send;
  u64 recv;
  u64 count;
  u64 part_start;
  u64 part_end;
  u64 prev;
  u64 prev_producer;
  u64 next;
  u64 next_producer;
  u64 scalar;
  u32 order_at;
  u32 slot_bytes;
  u32 op;
  u32 tag;
  u32 ranks;
  u32 root;
  u32 state;
  Connections connections;
  Function function;
  DataType data_type;
  Combine combine;
  ScalarKind scalar_kind;
  u8 indirect;
  u8 reserved[6];
};
// Bits of `indirect`: the header of the FIFO says where its slots are.
constexpr u8 PREV_INDIRECT = 1, NEXT_INDIRECT = 2;
static_assert(sizeof(Work) == 120, "as in src/cuda/layout.rs");
static_assert(offsetof(Work, scalar) == 72, "as in src/cuda/layout.rs");
static_assert(offsetof(Work, order_at) == 80, "as in src/cuda/layout.rs");
static_assert(offsetof(Work, connections) == 108, "as in src/cuda/layout.rs");
static_assert(offsetof(Work, scalar_kind) == 112, "as in src/cuda/layout.rs");
static_assert(offsetof(Work, indirect) == 113, "as in src/cuda/layout.rs");

struct Lane {
  u32 first_work;
  u32 end_work;
};
static_assert(sizeof(Lane) == 8, "as in src/cuda/layout.rs");

struct Op {
  u32 number;
  u32 works;
};
static_assert(sizeof(Op) == 8, "as in src/cuda/layout.rs");

struct Channel {
  u32 channel;
  u32 first_lane;
  u32 first_message_lane;
  u32 end_lane;
  u32 first_op;
  u32 end_op;
};
static_assert(sizeof(Channel) == 24, "as in src/cuda/layout.rs");

// An entry of the event ring. Every word carries its lap in the low bits: see src/cuda/ring.rs.
struct Event { Pack halves[2]; };
static_assert(sizeof(Event) == 32, "as in src/cuda/ring.rs");

enum class EventKind : u8 { Started = 1, Stopped = 2, Aborted = 3, Mismatch = 4, Nothing = 5 };

// In device memory, one for each launch that may be running. Zeroed once.
struct LaunchState {
  u64 done;
  u32 runs;
  u32 differs;
};
static_assert(sizeof(LaunchState) == 16, "as in src/cuda/layout.rs");

// In host memory that the device reaches, one for each launch that may be running.
struct LaunchControl {
  u32 abort;
  u32 aborted;
  u32 runs;
  u32 moved;
  u64 waits;
  u32 reserved[10];
};
static_assert(offsetof(LaunchControl, moved) == 12, "as in src/cuda/layout.rs");
static_assert(offsetof(LaunchControl, waits) == 16, "as in src/cuda/layout.rs");
static_assert(sizeof(LaunchControl) == 64, "as in src/cuda/layout.rs");

// What a kernel waits for: the twin of `Phase` in probes/records/src/waits.rs, which documents the encoding.
enum class Phase : u32 { Begin = 1, Data = 2, Room = 3, End = 4, Copies = 5 };

// Where a kernel reports to.
struct Head {
  u64 states;
  u64 controls;
  u64 ring;
  u64 ring_ticket;
  u32 slot;
  u32 launch;
  u32 runs_before;
  u32 op;
};
static_assert(offsetof(Head, slot) == 32, "as in src/cuda/layout.rs");
static_assert(sizeof(Head) == 48, "as in src/cuda/layout.rs");

// Bit in the numbers of captured launches, whose runs are replays.
constexpr u32 CAPTURED = 1u << 31;
// Entries of the event ring, a power of two.
constexpr u32 RING_ENTRIES = 1 << 15;

constexpr u32 INLINE_BYTES = 3984;

struct Arguments {
  Head head;
  u64 program;
  u64 peers;
  u32 channels_at;
  u32 works_at;
  u32 lanes_at;
  u32 ops_at;
  u32 lanes;
  u32 staged;
  u8 inline_program[INLINE_BYTES];
};
static_assert(offsetof(Arguments, program) == 48, "as in src/cuda/layout.rs");
static_assert(offsetof(Arguments, channels_at) == 64, "as in src/cuda/layout.rs");
static_assert(offsetof(Arguments, inline_program) == 88, "as in src/cuda/layout.rs");
static_assert(sizeof(Arguments) == 4072, "as in src/cuda/layout.rs; kernels take 4096 bytes of arguments");

// The beginning of a FIFO's memory: the twin of `FifoHeader` in src/fifo.rs.
constexpr u32 SLOTS = 8;
constexpr u64 SLOTS_OFFSET = 4096;
// `INLINE_BYTES` in src/fifo.rs.
constexpr u32 LINE_BYTES = 48;
struct FifoLine {
  u64 flag;
  u32 size;
  u32 reserved;
  u8 data[LINE_BYTES];
  u64 apart[8];
};
static_assert(sizeof(FifoLine) == 128, "as in src/fifo.rs");
static_assert(offsetof(FifoLine, size) == 8, "as in src/fifo.rs");
static_assert(offsetof(FifoLine, data) == 16, "as in src/fifo.rs");
// A slot's flag (`flag` in src/fifo.rs), whether it says that a position is posted, and its tag.
DEVICE inline u64 flag_of(u64 position, u32 tag) { return static_cast<u64>(tag) << 32 | static_cast<u32>(position + 1); }
DEVICE inline bool is_posted(u64 flag, u64 position) { return static_cast<u32>(flag) == static_cast<u32>(position + 1); }
DEVICE inline u32 tag_of(u64 flag) { return static_cast<u32>(flag >> 32); }
struct FifoCounts {
  u64 tail;
  // Host producers cache the head here. Kernels cache it in their lanes and leave this behind it.
  u64 seen_head;
  u64 apart0[14];
  u64 head;
  u64 apart1[15];
};
static_assert(sizeof(FifoCounts) == 256, "as in src/fifo.rs");
// The consumer half, or both halves in one block.
struct FifoHeader : FifoCounts {
  FifoLine lines[SLOTS];
  u64 slots;
  u64 apart2[15];
};
static_assert(sizeof(FifoHeader) == 1408, "as in src/fifo.rs");
static_assert(offsetof(FifoCounts, tail) == 0, "as in src/fifo.rs");
static_assert(offsetof(FifoCounts, head) == 128, "as in src/fifo.rs");

// ---- peer kernels ----

// What every peer kernel knows of its operation.
struct PeerCall {
  Head head;
  u64 bases[MAX_PEERS];
  u64 argument;
  u32 tag;
  u32 rank;
  u32 ranks;
  DataType data_type;
  Combine combine;
  u8 channel;
  u8 reserved;
};
static_assert(offsetof(PeerCall, bases) == 48, "as in src/cuda/layout.rs");
static_assert(offsetof(PeerCall, tag) == 120, "as in src/cuda/layout.rs");
static_assert(offsetof(PeerCall, data_type) == 132, "as in src/cuda/layout.rs");
static_assert(sizeof(PeerCall) == 136, "as in src/cuda/layout.rs");

struct OneShot {
  PeerCall call;
  u64 send;
  u64 recv;
  u64 elems;
  u32 lines;
  u32 reserved;
};
static_assert(offsetof(OneShot, send) == 136, "as in src/cuda/layout.rs");
static_assert(sizeof(OneShot) == 168, "as in src/cuda/layout.rs");

struct Collective {
  PeerCall call;
  u64 from[MAX_PEERS];
  u64 sends[MAX_PEERS];
  u64 to[MAX_PEERS];
  u64 takes[MAX_PEERS];
  u64 own;
  u64 result;
  u64 result_bytes;
  u64 longest_part;
  u32 chunk;
  bool reduces;
  bool forwards;
  bool zero_copy;
  bool reachable;
  u64 address_to[MAX_PEERS];
  u64 address_from[MAX_PEERS];
  u32 recv_generation, send_generation;
  u64 imports_offset;
  u64 push_counters_offset;
  u32 push_chunk;
  u32 root;
};
static_assert(offsetof(Collective, from) == 136, "as in src/cuda/layout.rs");
static_assert(offsetof(Collective, own) == 392, "as in src/cuda/layout.rs");
static_assert(offsetof(Collective, chunk) == 424, "as in src/cuda/layout.rs");
static_assert(offsetof(Collective, address_to) == 432, "as in src/cuda/layout.rs");
static_assert(offsetof(Collective, imports_offset) == 568, "as in src/cuda/layout.rs");
static_assert(offsetof(Collective, push_counters_offset) == 576, "as in src/cuda/layout.rs");
static_assert(sizeof(Collective) == 592, "as in src/cuda/layout.rs");

struct CopyEngineCall {
  PeerCall call;
  u32 copies_failed;
  u32 barrier;
};
static_assert(offsetof(CopyEngineCall, copies_failed) == 136, "as in src/cuda/layout.rs");
static_assert(sizeof(CopyEngineCall) == 144, "as in src/cuda/layout.rs");

struct Message {
  u64 address;
  u64 bytes;
  u64 peer_address;
  u32 generation;
  u32 op;
  u32 tag;
  u16 lanes;
  u8 rows;
  u8 element_bytes;
};
static_assert(sizeof(Message) == 40, "as in src/cuda/layout.rs");

struct Role {
  u32 peer;
  u32 sends;
  u32 first;
  u32 end;
};
static_assert(sizeof(Role) == 16, "as in src/cuda/layout.rs");

constexpr u32 MAX_ROLES = 2 * (MAX_PEERS - 1);
constexpr u32 MAX_MESSAGES = 93;

struct Messages {
  Head head;
  u64 bases[MAX_PEERS];
  u64 area_offset;
  u64 imports_offset;
  u32 rank;
  u32 roles;
  u32 messages;
  u8 channel;
  u8 reserved[3];
  Role role[MAX_ROLES];
  Message message[MAX_MESSAGES];
};
static_assert(offsetof(Messages, area_offset) == 112, "as in src/cuda/layout.rs");
static_assert(offsetof(Messages, role) == 144, "as in src/cuda/layout.rs");
static_assert(offsetof(Messages, message) == 368, "as in src/cuda/layout.rs");
static_assert(sizeof(Messages) == 4088, "as in src/cuda/layout.rs; kernels take 4096 bytes of arguments");

}  // namespace ringsight

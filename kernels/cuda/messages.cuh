// Sends and receives of a group among peers, all side by side: each peer and direction has blocks of its own, which go through its
// messages in order.
//
// A message is cut into chunks that go over lanes in turn, a warp for each lane at either end, as many as its length asks for,
// so that both ends come to the same. A lane has two slots in the receiver's memory and a number in the sender's: how many chunks the
// receiver has taken. Lines end with the number of the chunk and the tag of the message, so that ends that differ see it.
#pragma once

#include "report.cuh"
#include "rows.cuh"

namespace ringsight {

struct Message {
  u64 address;
  u64 bytes;
  u32 op;
  u32 tag;
  u32 chunk;
  u16 lanes;
  u8 element_bytes;
  u8 reserved;
};
static_assert(sizeof(Message) == 32, "as in src/cuda/layout.rs");

// A peer and a direction.
struct Role {
  u32 peer;
  u32 sends;
  u32 first;
  u32 end;
};
static_assert(sizeof(Role) == 16, "as in src/cuda/layout.rs");

constexpr u32 MOST_ROLES = 2 * (MAX_PEERS - 1);
constexpr u32 MOST_MESSAGES = 112;
// Lanes of a connection in one direction.
constexpr u32 MESSAGE_LANES = 256;

struct Messages {
  Head head;
  u64 bases[MAX_PEERS];
  // Where the part for messages begins in each.
  u64 at;
  u32 rank;
  u32 roles;
  u32 messages;
  u8 channel;
  u8 reserved[3];
  Role role[MOST_ROLES];
  Message message[MOST_MESSAGES];
};
static_assert(offsetof(Messages, at) == 112, "as in src/cuda/layout.rs");
static_assert(offsetof(Messages, role) == 136, "as in src/cuda/layout.rs");
static_assert(offsetof(Messages, message) == 360, "as in src/cuda/layout.rs");
static_assert(sizeof(Messages) == 3944, "as in src/cuda/layout.rs; kernels take 4096 bytes of arguments");

// By peer and lane: chunks that this rank has sent and that the peer has taken of them, and that this rank has taken.
struct MessageCounts {
  u32 sent[MAX_PEERS][MESSAGE_LANES];
  u32 credit[MAX_PEERS][MESSAGE_LANES];
  u32 taken[MAX_PEERS][MESSAGE_LANES];
};
static_assert(sizeof(MessageCounts) == 24576, "as in src/cuda/peers.rs");

// One block; `WHOLE`: all messages begin and end where words do.
template <bool WHOLE>
class MessagesBlock {
 public:
  DEVICE MessagesBlock(const Messages& arguments, u32 block, u32 blocks)
      : arguments_(arguments),
        report_(arguments.head),
        block_(block),
        blocks_(blocks),
        role_(arguments.role[block % arguments.roles]),
        lanes_(blocks / arguments.roles * (threads() / warp_threads())),
        lane_(block / arguments.roles * (threads() / warp_threads()) + thread_index() / warp_threads()) {}

  DEVICE INLINE void run() {
    const u32 runs = report_.runs();
    if (block_ == 0) tell(EventKind::Started, runs);
    bool done = true;
    for (u32 at = role_.first; done && at < role_.end; at++) {
      const Message& message = arguments_.message[at];
      // A GPU has a warp for each lane of the longest message; on the host there may be fewer threads.
      for (u32 lane = lane_; done && lane < message.lanes; lane += lanes_) {
        done = role_.sends != 0 ? send(message, lane) : receive(message, lane);
      }
    }
    bool aborted = block_any(!done);
    const bool last = thread_index() == 0 && report_.block_done(blocks_, aborted);
    if (!block_any(last)) return;
    // One thread knows of all blocks.
    aborted = block_any(last && aborted);
    tell(aborted ? EventKind::Aborted : EventKind::Stopped, runs);
    block_barrier();
    // Relaxed: see `Meeting::finish`.
    if (thread_index() == 0) store_relaxed(&report_.control().runs, report_.renew(runs, aborted));
  }

 private:
  // Rows that a thread asks for before it waits for the first.
  static constexpr u32 COPIED = 4;
  using Part = Stretch<WHOLE>;

  // By all threads of the block, about all messages.
  DEVICE INLINE void tell(EventKind kind, u32 runs) {
    for (u32 at = thread_index(); at < arguments_.messages; at += threads()) {
      report_.event(kind, report_.replay(runs), arguments_.channel, arguments_.message[at].op, device_time());
    }
  }

  DEVICE INLINE u64 area(u32 rank) const { return arguments_.bases[rank] + arguments_.at; }
  DEVICE INLINE MessageCounts& counts(u32 rank) const { return *reinterpret_cast<MessageCounts*>(area(rank)); }
  // Where a chunk that `source` sends to `rank` lies there.
  DEVICE INLINE Pack* slot(u32 rank, u32 source, u32 lane, u32 chunk) const {
    const u64 slot = (static_cast<u64>(source < rank ? source : source - 1) * MESSAGE_LANES + lane) * 2 + chunk % 2;
    return reinterpret_cast<Pack*>(area(rank) + sizeof(MessageCounts) + slot * CHUNK_SLOT_BYTES);
  }
  DEVICE INLINE static Part part(const Message& message, u64 at) {
    return Part(message.address, message.bytes, at, message.chunk, message.element_bytes);
  }
  DEVICE INLINE static u64 end(const Message& message, u32 chunk) { return static_cast<u64>(message.tag) << 32 | chunk; }

  // The lane's chunks of a message; false if it is to give up.
  DEVICE INLINE bool send(const Message& message, u32 lane) {
    const u32 me = arguments_.rank, peer = role_.peer;
    const u32* credit = &counts(me).credit[peer][lane];
    u32* sent = &counts(me).sent[peer][lane];
    u32 chunk = load_relaxed(sent);
    const u64 stride = static_cast<u64>(message.lanes) * message.chunk;
    for (u64 at = static_cast<u64>(lane) * message.chunk; at < message.bytes; at += stride) {
      chunk++;
      // Of the two slots the one of the chunk before the last is to be free. Relaxed: what is written into it depends on this.
      for (u32 polls = 1; chunk - load_relaxed(credit) > 2; polls++) {
        if (!go_on(polls)) return false;
      }
      const Part from = part(message, at);
      Pack* to = slot(peer, me, lane, chunk);
      const u32 rows = from.rows();
      for (u32 first = 0; first < rows; first += COPIED) {
        Row some[COPIED];
        UNROLL
        for (u32 i = 0; i < COPIED; i++) some[i] = load_row(from, first + i);
        UNROLL
        for (u32 i = 0; i < COPIED; i++) put_row(from, first + i, to, some[i], end(message, chunk));
      }
    }
    if (warp_thread() == 0) store_relaxed(sent, chunk);
    warp_barrier();
    return true;
  }
  DEVICE INLINE bool receive(const Message& message, u32 lane) {
    const u32 me = arguments_.rank, peer = role_.peer;
    u32* credit = &counts(peer).credit[me][lane];
    u32* taken = &counts(me).taken[peer][lane];
    u32 chunk = load_relaxed(taken);
    const u64 stride = static_cast<u64>(message.lanes) * message.chunk;
    for (u64 at = static_cast<u64>(lane) * message.chunk; at < message.bytes; at += stride) {
      chunk++;
      const Part to = part(message, at);
      const Pack* from = slot(me, peer, lane, chunk);
      u32 theirs = message.tag;
      const auto is_mine = [&](u64 word) {
        if (static_cast<u32>(word) != chunk) return false;
        theirs = static_cast<u32>(word >> 32);
        return theirs == message.tag;
      };
      const u32 rows = to.rows();
      for (u32 first = 0; first < rows; first += COPIED) {
        Row some[COPIED];
        for (u32 polls = 1;; polls++) {
          bool here = true;
          UNROLL
          for (u32 i = 0; i < COPIED; i++) here = get_row(to, first + i, from, some[i], is_mine) && here;
          if (warp_all(here)) break;
          if (theirs != message.tag) differs(message, theirs);
          if (!go_on(polls)) return false;
        }
        UNROLL
        for (u32 i = 0; i < COPIED; i++) store_row(to, first + i, some[i]);
      }
      warp_barrier();
      // Relaxed: the slot has been read, since what was read has been used, by all threads before the barrier.
      if (warp_thread() == 0) store_relaxed(credit, chunk);
    }
    if (warp_thread() == 0) store_relaxed(taken, chunk);
    warp_barrier();
    return true;
  }

  // The other end does something else: the host is told, once, and releases the wait.
  DEVICE INLINE void differs(const Message& message, u32 theirs) {
    if (exchange_relaxed(&report_.state().differs, 1) == 0) {
      report_.event(EventKind::Mismatch, report_.replay(report_.runs()), arguments_.channel, message.op, theirs);
    }
  }

  // For who has waited long; false if it is to give up.
  DEVICE INLINE bool go_on(u32 polls) const {
    if (PAUSES_AT_ONCE && polls % 256 == 0) pause_polling();
    return !report_.must_give_up(polls);
  }

  const Messages& arguments_;
  const Report report_;
  const u32 block_, blocks_;
  const Role& role_;
  // Of this role in the launch, and this warp's.
  const u32 lanes_, lane_;
};

}  // namespace ringsight

// Sends and receives of a group among peers, all side by side: each peer and direction has blocks of its own, which go through its
// messages in order.
//
// A message is cut into chunks that go over lanes in turn, a warp for each lane at either end, as many as its length asks for,
// so that both ends come to the same. A lane has two slots in the receiver's memory and a number in the sender's: how many chunks the
// receiver has taken. Lines end with the number of the chunk and the tag of the message, so that ends that differ see it.
//
// Long ones go straight into the receiver's buffer where the sender reaches that: the receiver tells each lane's sender the place, or that
// there is none, and the sender answers with a chunk of nothing, once all of the lane's part is there. Nobody else decides and each
// lane is told for itself, so it does no harm if a mapping comes or goes between two of them.
//
// - The place carries the number of the next chunk and the tag. A lane's place is told again only when that chunk has come, so it has been read.
// - What was in the buffer before is there, and what is read from it later is what came: as in straight.cuh. The sender is done when its
//   stores are, and its answer; the receiver's kernel ends when all answers have come.
// - A sender of a long message waits for a place, one of a short message for nothing: so that ends of which one takes it for long and the
//   other for short see each other's tag, the first lane tells a place, of which there is none, for short ones, too.
#pragma once

#include "report.cuh"
#include "rows.cuh"
#include "straight.cuh"

namespace ringsight {

struct Message {
  u64 address;
  u64 bytes;
  // `IS_LONG` if it may go straight; where the sender finds the buffer of a receive, if that is open, and the generation of what has been
  // shown that this is in.
  u64 place;
  u32 generation;
  u32 op;
  u32 tag;
  u16 lanes;
  // Of a chunk.
  u8 rows;
  u8 element_bytes;
};
static_assert(sizeof(Message) == 40, "as in src/cuda/layout.rs");

// A peer and a direction.
struct Role {
  u32 peer;
  u32 sends;
  u32 first;
  u32 end;
};
static_assert(sizeof(Role) == 16, "as in src/cuda/layout.rs");

constexpr u32 MOST_ROLES = 2 * (MAX_PEERS - 1);
constexpr u32 MOST_MESSAGES = 93;
// Lanes of a connection in one direction.
constexpr u32 MESSAGE_LANES = 256;

struct Messages {
  Head head;
  u64 bases[MAX_PEERS];
  // Where the part for messages begins in each.
  u64 at;
  u64 mappings_at;
  u32 rank;
  u32 roles;
  u32 messages;
  u8 channel;
  u8 reserved[3];
  Role role[MOST_ROLES];
  Message message[MOST_MESSAGES];
};
static_assert(offsetof(Messages, at) == 112, "as in src/cuda/layout.rs");
static_assert(offsetof(Messages, role) == 144, "as in src/cuda/layout.rs");
static_assert(offsetof(Messages, message) == 368, "as in src/cuda/layout.rs");
static_assert(sizeof(Messages) == 4088, "as in src/cuda/layout.rs; kernels take 4096 bytes of arguments");

// By peer and lane: chunks that this rank has sent and that the peer has taken of them, and that this rank has taken; and where the next
// chunk that this rank sends goes, as the peer has told: {place, what its lines would end with}.
struct MessageLanes {
  u32 sent[MAX_PEERS][MESSAGE_LANES];
  u32 credit[MAX_PEERS][MESSAGE_LANES];
  u32 taken[MAX_PEERS][MESSAGE_LANES];
  Pack places[MAX_PEERS][MESSAGE_LANES];
};
static_assert(offsetof(MessageLanes, places) == 24576, "as in src/cuda/peers.rs");
static_assert(sizeof(MessageLanes) == 57344, "as in src/cuda/peers.rs");

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
      const bool straight = role_.sends == 0 && tell_places(message);
      // There may be more lanes than warps. Both ends come to lanes in one order, so the first that is not done has both its ends.
      for (u32 lane = lane_; done && lane < message.lanes; lane += lanes_) {
        done = role_.sends != 0 ? send(message, lane) : receive(message, lane, straight);
      }
    }
    bool aborted = block_any(!done);
    let_next_kernel_come();
    const bool last = thread_index() == 0 && report_.block_done(blocks_, aborted);
    if (!block_any(last)) return;
    // One thread knows of all blocks.
    aborted = block_any(last && aborted);
    tell(aborted ? EventKind::Aborted : EventKind::Stopped, runs);
    block_barrier();
    if (thread_index() == 0) report_.end(runs, aborted);
  }

 private:
  // Rows that a thread asks for before it waits for the first.
  static constexpr u32 COPIED = 4;
  // What a thread has under way of what goes straight: its part of a chunk.
  static constexpr u32 PACKS = CHUNK_ROWS * ROW_BYTES / (warp_threads() * sizeof(Pack));
  using Part = Stretch<WHOLE>;

  // By all threads of the block, about all messages.
  DEVICE INLINE void tell(EventKind kind, u32 runs) {
    for (u32 at = thread_index(); at < arguments_.messages; at += threads()) {
      report_.event(kind, report_.replay(runs), arguments_.channel, arguments_.message[at].op, device_time());
    }
  }

  DEVICE INLINE u64 area(u32 rank) const { return arguments_.bases[rank] + arguments_.at; }
  DEVICE INLINE MessageLanes& lanes(u32 rank) const { return *reinterpret_cast<MessageLanes*>(area(rank)); }
  DEVICE INLINE const Mappings& mappings() const {
    return *reinterpret_cast<const Mappings*>(arguments_.bases[arguments_.rank] + arguments_.mappings_at);
  }
  // Where a chunk that `source` sends to `rank` lies there.
  DEVICE INLINE Pack* slot(u32 rank, u32 source, u32 lane, u32 chunk) const {
    const u64 slot = (static_cast<u64>(source < rank ? source : source - 1) * MESSAGE_LANES + lane) * 2 + chunk % 2;
    return reinterpret_cast<Pack*>(area(rank) + sizeof(MessageLanes) + slot * CHUNK_SLOT_BYTES);
  }
  DEVICE INLINE static u32 chunk_bytes(const Message& message) { return message.rows * ROW_BYTES; }
  // Where a lane's first chunk begins, and what lies between two of them.
  DEVICE INLINE static u64 begin(const Message& message, u32 lane) { return static_cast<u64>(lane) * chunk_bytes(message); }
  DEVICE INLINE static u64 stride(const Message& message) { return begin(message, message.lanes); }
  // A chunk; none, of what has gone straight.
  DEVICE INLINE static Part part(const Message& message, u64 at, bool straight) {
    return Part(message.address, straight ? 0 : message.bytes, at, chunk_bytes(message), message.element_bytes);
  }
  DEVICE INLINE static u64 end(const Message& message, u32 chunk) { return static_cast<u64>(message.tag) << 32 | chunk; }
  // Whether a word is the end of what belongs to a chunk, whose tag it gives. Both are so if the other end does the same.
  DEVICE INLINE static bool is_mine(const Message& message, u32 chunk, u64 word, u32& theirs) {
    if (static_cast<u32>(word) != chunk) return false;
    theirs = static_cast<u32>(word >> 32);
    return theirs == message.tag;
  }

  // By a warp: tells the sender where each of its lanes' parts goes, by a thread for each lane; whether there is a place.
  DEVICE INLINE bool tell_places(const Message& message) const {
    const u32 me = arguments_.rank, peer = role_.peer;
    const bool open =
        warp_all((message.place & OPEN) != 0 && is_mapped(mappings(), peer, message.place, message.generation));
    const u32 told = (message.place & IS_LONG) != 0 ? message.lanes : 1;
    for (u32 lane = lane_ + warp_thread() * lanes_; lane < told; lane += warp_threads() * lanes_) {
      if (begin(message, lane) >= message.bytes) break;
      const u32 chunk = load_relaxed(&lanes(me).taken[peer][lane]) + 1;
      store_pack(&lanes(peer).places[me][lane], Pack{{open ? message.place : 0, end(message, chunk)}}, true);
    }
    return open;
  }
  // By a warp: waits until it is told the place of a lane's part; false if it is to give up. The 16 bytes are seen whole, as lines are.
  DEVICE INLINE bool learn_place(const Message& message, u32 lane, u32 chunk, u64& place) {
    const Pack* told = &lanes(arguments_.rank).places[role_.peer][lane];
    u32 theirs = message.tag;
    for (u32 polls = 1;; polls++) {
      const Pack pack = load_pack(told);
      place = pack.words[0];
      if (warp_all(is_mine(message, chunk, pack.words[1], theirs))) return true;
      if (!go_on(message, theirs, polls, Phase::Begin, chunk)) return false;
    }
  }

  // The lane's chunks of a message; false if it is to give up.
  DEVICE INLINE bool send(const Message& message, u32 lane) {
    const u32 me = arguments_.rank, peer = role_.peer;
    const u32* credit = &lanes(me).credit[peer][lane];
    u32* sent = &lanes(me).sent[peer][lane];
    u32 chunk = load_relaxed(sent);
    u64 at = begin(message, lane);
    u64 place = 0;
    if ((message.place & IS_LONG) != 0 && at < message.bytes && !learn_place(message, lane, chunk + 1, place)) return false;
    if ((place & OPEN) != 0) {
      const u64 to = found(mappings(), peer, place);
      u32 chunks = 0;
      for (; at < message.bytes; at += stride(message)) {
        const u64 left = message.bytes - at;
        copy_stretch<PACKS>(to, message.address, at + (left < chunk_bytes(message) ? left : chunk_bytes(message)), at, message.element_bytes);
        moved(++chunks);
      }
      chunk++;
      // What all threads of the warp have written is before what is said of it. The slot is free: what was in it was taken before the place
      // was told.
      warp_barrier();
      fence_system();
      put_chunk<1>(part(message, at, true), slot(peer, me, lane, chunk), end(message, chunk));
    }
    for (; at < message.bytes; at += stride(message)) {
      chunk++;
      // Of the two slots the one of the chunk before the last is to be free. Relaxed: what is written into it depends on this.
      for (u32 polls = 1; chunk - load_relaxed(credit) > 2; polls++) {
        if (!go_on(message, message.tag, polls, Phase::Room, chunk)) return false;
      }
      put_chunk<COPIED>(part(message, at, false), slot(peer, me, lane, chunk), end(message, chunk));
      moved(chunk);
    }
    if (warp_thread() == 0) store_relaxed(sent, chunk);
    warp_barrier();
    return true;
  }
  DEVICE INLINE bool receive(const Message& message, u32 lane, bool straight) {
    const u32 me = arguments_.rank, peer = role_.peer;
    u32* credit = &lanes(peer).credit[me][lane];
    u32* taken = &lanes(me).taken[peer][lane];
    u32 chunk = load_relaxed(taken);
    for (u64 at = begin(message, lane); at < message.bytes; at += straight ? message.bytes : stride(message)) {
      chunk++;
      u32 theirs = message.tag;
      const auto mine = [&](u64 word) { return is_mine(message, chunk, word, theirs); };
      const auto may_go_on = [&](u32 polls) { return go_on(message, theirs, polls, Phase::Data, chunk); };
      if (!take_chunk<COPIED>(part(message, at, straight), slot(me, peer, lane, chunk), mine, may_go_on)) return false;
      // What the sender has written before it said so is there for what comes after the kernel.
      if (straight) fence_system();
      warp_barrier();
      // Relaxed: the slot has been read, since what was read has been used, by all threads before the barrier.
      if (warp_thread() == 0) store_relaxed(credit, chunk);
      moved(chunk);
    }
    if (warp_thread() == 0) store_relaxed(taken, chunk);
    warp_barrier();
    return true;
  }

  // The other end does something else: the host is told, once, and releases the wait.
  DEVICE INLINE void differs(const Message& message, u32 theirs) const {
    if (exchange_relaxed(&report_.state().differs, 1) == 0) {
      report_.event(EventKind::Mismatch, report_.replay(report_.runs()), arguments_.channel, message.op, theirs);
    }
  }

  // For who has not seen what it waits for, of which the other end has said `theirs`; false if it is to give up.
  DEVICE INLINE bool go_on(const Message& message, u32 theirs, u32 polls, Phase phase, u32 chunk) const {
    if (theirs != message.tag) differs(message, theirs);
    if (pauses_after(polls)) pause_polling();
    if (!report_.is_long(polls)) return true;
    report_.waits(polls, phase, role_.peer, arguments_.channel, message.op, chunk);
    return !report_.must_give_up();
  }
  // By a warp: it has moved a chunk. The host is told of some.
  DEVICE INLINE void moved(u32 chunk) const {
    if (chunk % 32 == 0 && thread_index() == 0) report_.moved(chunk);
  }

  const Messages& arguments_;
  const Report report_;
  const u32 block_, blocks_;
  const Role& role_;
  // Of this role in the launch, and this warp's.
  const u32 lanes_, lane_;
};

}  // namespace ringsight

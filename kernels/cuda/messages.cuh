// Sends and receives of a group by one peer kernel. Each role (a peer and a direction) has blocks of its own, which go through its messages in
// order; all roles run side by side.
//
// A message is cut into chunks that go over lanes in turn, with one warp per lane at either end. Its length decides the number of lanes, so both
// ends come to the same. A lane has two slots in the receiver's memory and a credit in the sender's: how many chunks the receiver has taken.
// Lines end with the number of the chunk and the tag of the message, so that ends that run different operations find out.
//
// Long messages are zero-copy if the sender reaches the receiver's buffer. The receiver announces the buffer's address to the sender of each
// lane, or that there is none. The sender writes the lane's bytes there and then sends an empty chunk. Nobody else decides, and each lane has
// its own announcement, so an import may appear or go between two of them.
//
// - The address carries the number of the next chunk and the tag. The receiver announces a lane's address again only after that chunk has
//   arrived, so the sender has read the one before.
// - Earlier contents of the buffer are visible, as in zero_copy.cuh. The sender is done when its stores and the empty chunk are written. The
//   receiver's kernel ends when all empty chunks have arrived.
// - The sender of a long message waits for an address; the sender of a short one does not. If the ends disagree on the length, they must still
//   see each other's tag. So the receiver of a short message announces on the first lane that there is no address.
#pragma once

#include "report.cuh"
#include "ll128.cuh"
#include "zero_copy.cuh"

namespace ringsight {

// One block. `ALIGNED`: all messages begin and end at words.
template <bool ALIGNED>
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
    if (block_ == 0) report(EventKind::Started, runs);
    bool done = true;
    for (u32 at = role_.first; done && at < role_.end; at++) {
      const Message& message = arguments_.message[at];
      const bool zero_copy = role_.sends == 0 && announce_address(message);
      // There may be more lanes than warps. Both ends serve lanes in one order, so the first lane that is not done is served at both ends.
      for (u32 lane = lane_; done && lane < message.lanes; lane += lanes_) {
        done = role_.sends != 0 ? send(message, lane) : receive(message, lane, zero_copy);
      }
    }
    bool aborted = block_any(!done);
    let_next_kernel_come();
    const bool last = thread_index() == 0 && report_.block_done(blocks_, aborted);
    if (!block_any(last)) return;
    // One thread knows of all blocks.
    aborted = block_any(last && aborted);
    report(aborted ? EventKind::Aborted : EventKind::Stopped, runs);
    block_barrier();
    if (thread_index() == 0) report_.end(runs, aborted);
  }

 private:
  // Rows that a thread loads before it stores the first.
  static constexpr u32 COPIED = 4;
  // Zero-copy packs that a thread has in flight: its part of a chunk.
  static constexpr u32 PACKS = CHUNK_ROWS * ROW_BYTES / (warp_threads() * sizeof(Pack));
  using Part = Slice<ALIGNED>;

  // All threads of the block report all messages.
  DEVICE INLINE void report(EventKind kind, u32 runs) {
    for (u32 at = thread_index(); at < arguments_.messages; at += threads()) {
      report_.event(kind, report_.replay(runs), arguments_.channel, arguments_.message[at].op, device_time());
    }
  }

  DEVICE INLINE u64 area(u32 rank) const { return arguments_.bases[rank] + arguments_.area_offset; }
  DEVICE INLINE MessageLanes& lanes(u32 rank) const { return *reinterpret_cast<MessageLanes*>(area(rank)); }
  DEVICE INLINE const Imports& imports() const {
    return *reinterpret_cast<const Imports*>(arguments_.bases[arguments_.rank] + arguments_.imports_offset);
  }
  // Slot in `rank`'s memory of a chunk that `source` sends it.
  DEVICE INLINE Pack* slot(u32 rank, u32 source, u32 lane, u32 chunk) const {
    const u64 slot = (static_cast<u64>(source < rank ? source : source - 1) * MESSAGE_LANES + lane) * 2 + chunk % 2;
    return reinterpret_cast<Pack*>(area(rank) + sizeof(MessageLanes) + slot * CHUNK_SLOT_BYTES);
  }
  DEVICE INLINE static u32 chunk_bytes(const Message& message) { return message.rows * ROW_BYTES; }
  // Offset of a lane's first chunk, and the distance between two of its chunks.
  DEVICE INLINE static u64 begin(const Message& message, u32 lane) { return static_cast<u64>(lane) * chunk_bytes(message); }
  DEVICE INLINE static u64 stride(const Message& message) { return begin(message, message.lanes); }
  // A chunk; an empty one if the bytes were zero-copy.
  DEVICE INLINE static Part part(const Message& message, u64 at, bool zero_copy) {
    return Part(message.address, zero_copy ? 0 : message.bytes, at, chunk_bytes(message), message.element_bytes);
  }
  DEVICE INLINE static u64 end(const Message& message, u32 chunk) { return static_cast<u64>(message.tag) << 32 | chunk; }
  // Whether a word ends a line of this chunk, and the tag in it. True if the other end runs the same operation.
  DEVICE INLINE static bool is_mine(const Message& message, u32 chunk, u64 word, u32& theirs) {
    if (static_cast<u32>(word) != chunk) return false;
    theirs = static_cast<u32>(word >> 32);
    return theirs == message.tag;
  }

  // One warp: announces to the sender where each lane's bytes go, one thread per lane. Returns whether there is an address.
  DEVICE INLINE bool announce_address(const Message& message) const {
    const u32 me = arguments_.rank, peer = role_.peer;
    const bool reachable =
        warp_all((message.peer_address & ADDRESS_VALID) != 0 && is_imported(imports(), peer, message.peer_address, message.generation));
    const u32 announced = (message.peer_address & MAY_ZERO_COPY) != 0 ? message.lanes : 1;
    for (u32 lane = lane_ + warp_thread() * lanes_; lane < announced; lane += warp_threads() * lanes_) {
      if (begin(message, lane) >= message.bytes) break;
      const u32 chunk = load_relaxed(&lanes(me).received[peer][lane]) + 1;
      store_pack(&lanes(peer).addresses[me][lane], Pack{{reachable ? message.peer_address : 0, end(message, chunk)}}, true);
    }
    return reachable;
  }
  // One warp: waits until the address of a lane's bytes is announced. False: give up. The 16 bytes are seen whole, as lines are.
  DEVICE INLINE bool wait_for_address(const Message& message, u32 lane, u32 chunk, u64& word) {
    const Pack* announced = &lanes(arguments_.rank).addresses[role_.peer][lane];
    u32 theirs = message.tag;
    for (u32 polls = 1;; polls++) {
      const Pack pack = load_pack(announced);
      word = pack.words[0];
      if (warp_all(is_mine(message, chunk, pack.words[1], theirs))) return true;
      if (!go_on(message, theirs, polls, Phase::Begin, chunk)) return false;
    }
  }

  // Moves the lane's chunks of a message. False: give up.
  DEVICE INLINE bool send(const Message& message, u32 lane) {
    const u32 me = arguments_.rank, peer = role_.peer;
    const u32* credit = &lanes(me).credit[peer][lane];
    u32* sent = &lanes(me).sent[peer][lane];
    u32 chunk = load_relaxed(sent);
    u64 at = begin(message, lane);
    u64 word = 0;
    if ((message.peer_address & MAY_ZERO_COPY) != 0 && at < message.bytes && !wait_for_address(message, lane, chunk + 1, word)) return false;
    if ((word & ADDRESS_VALID) != 0) {
      const u64 to = resolve(imports(), peer, word);
      u32 chunks = 0;
      for (; at < message.bytes; at += stride(message)) {
        const u64 left = message.bytes - at;
        copy_slice<PACKS>(to, message.address, at + (left < chunk_bytes(message) ? left : chunk_bytes(message)), at, message.element_bytes);
        moved(++chunks);
      }
      chunk++;
      // Everything that the threads of the warp have written comes before the empty chunk. Its slot is free: the receiver took what was in it before
      // it announced the address.
      warp_barrier();
      fence_system();
      put_chunk<1>(part(message, at, true), slot(peer, me, lane, chunk), end(message, chunk));
    }
    for (; at < message.bytes; at += stride(message)) {
      chunk++;
      // One of the two slots must be free: that of the chunk before the last. Relaxed: what is written into it depends on this load.
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
  DEVICE INLINE bool receive(const Message& message, u32 lane, bool zero_copy) {
    const u32 me = arguments_.rank, peer = role_.peer;
    u32* credit = &lanes(peer).credit[me][lane];
    u32* received = &lanes(me).received[peer][lane];
    u32 chunk = load_relaxed(received);
    for (u64 at = begin(message, lane); at < message.bytes; at += zero_copy ? message.bytes : stride(message)) {
      chunk++;
      u32 theirs = message.tag;
      const auto mine = [&](u64 word) { return is_mine(message, chunk, word, theirs); };
      const auto may_go_on = [&](u32 polls) { return go_on(message, theirs, polls, Phase::Data, chunk); };
      if (!take_chunk<COPIED>(part(message, at, zero_copy), slot(me, peer, lane, chunk), mine, may_go_on)) return false;
      // What the sender wrote before the empty chunk is visible to what runs after this kernel.
      if (zero_copy) fence_system();
      warp_barrier();
      // Relaxed: all threads have used what they read from the slot before the barrier.
      if (warp_thread() == 0) store_relaxed(credit, chunk);
      moved(chunk);
    }
    if (warp_thread() == 0) store_relaxed(received, chunk);
    warp_barrier();
    return true;
  }

  // The other end runs another operation. One thread of the launch reports it; the host then sets the abort word.
  DEVICE INLINE void report_mismatch(const Message& message, u32 theirs) const {
    if (exchange_relaxed(&report_.state().differs, 1) == 0) {
      report_.event(EventKind::Mismatch, report_.replay(report_.runs()), arguments_.channel, message.op, theirs);
    }
  }

  // Called after `polls` polls. `theirs`: the tag that the other end has written so far. False: give up.
  DEVICE INLINE bool go_on(const Message& message, u32 theirs, u32 polls, Phase phase, u32 chunk) const {
    if (theirs != message.tag) report_mismatch(message, theirs);
    if (pauses_after(polls)) pause_polling();
    if (!report_.is_long(polls)) return true;
    report_.waits(polls, phase, role_.peer, arguments_.channel, message.op, chunk);
    return !report_.must_give_up();
  }
  // One warp: shows the host progress, now and then.
  DEVICE INLINE void moved(u32 chunk) const {
    if (chunk % 32 == 0 && thread_index() == 0) report_.moved(chunk);
  }

  const Messages& arguments_;
  const Report report_;
  const u32 block_, blocks_;
  const Role& role_;
  // Lanes that this role serves at once, and this warp's.
  const u32 lanes_, lane_;
};

}  // namespace ringsight

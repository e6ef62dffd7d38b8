// What device code needs of the machine, for a GPU and for a C++ compiler.
//
// Compiled for the host, a block is one thread and its barriers do nothing. So the programs can be tested without a GPU (tests/cuda_source.rs).
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define DEVICE __device__
#define NOINLINE __noinline__
#define INLINE __forceinline__
#define PRAGMA(text) _Pragma(#text)
#define UNROLL PRAGMA(unroll)
#define UNROLL_BY(times) PRAGMA(unroll times)
#else
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#define DEVICE
#define NOINLINE __attribute__((noinline))
#define INLINE inline
#define UNROLL
#define UNROLL_BY(times)
#endif

namespace ringsight {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

#ifdef __CUDACC__

DEVICE inline unsigned thread_index() { return threadIdx.x; }
DEVICE inline unsigned threads() { return blockDim.x; }
// Threads of a block of channel programs: `CHANNEL_THREADS` in src/cuda/mod.rs.
constexpr unsigned CHANNEL_THREADS = 512;
DEVICE inline void block_barrier() { __syncthreads(); }
// A barrier of the first `count` threads of a block, whole warps.
DEVICE inline void part_barrier(unsigned count) { asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory"); }
// A barrier that returns whether `so` holds for any thread of the block.
DEVICE inline bool block_any(bool so) { return __syncthreads_or(so ? 1 : 0) != 0; }

// Programmatic dependent launch (CUDA C++ Programming Guide; PTX `griddepcontrol`): the GPU may place such a kernel on the multiprocessors while the one
// before it in its stream ends. The kernel then waits for that end itself.
//
// Returns when the kernels before this one have ended and what they wrote is visible; at once in a kernel that is launched otherwise. All threads
// call it before they read what others write.
DEVICE inline void await_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel be placed once all blocks have called this or have ended. That kernel takes room which a kernel of another communicator may
// need, and other ranks may wait for that one. So only a block that waits for nobody any more may call this.
DEVICE inline void let_next_kernel_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The threads of a warp, which run side by side.
DEVICE inline constexpr u32 warp_threads() { return 32; }
DEVICE inline u32 warp_thread() { return threadIdx.x % 32; }
DEVICE inline void warp_barrier() { __syncwarp(); }
// A barrier that returns whether `so` holds for all threads of the warp.
DEVICE inline bool warp_all(bool so) { return __all_sync(0xffffffff, so) != 0; }
// The number of this warp in its launch.
DEVICE inline u32 warp_in_launch() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }

// Nanoseconds of the GPU's timer, which all its kernels share.
DEVICE inline u64 device_time() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Pauses a polling thread, so that it leaves the memory system to others.
DEVICE inline void pause_polling() { __nanosleep(100); }
constexpr bool PAUSES_AT_ONCE = false;
// Whether a thread that has polled so often, and has more to do than to wait, shall let other threads run.
DEVICE inline constexpr bool pauses_after(u32) { return false; }

// Loads and stores at system scope. `acquire` and `release` also order the block's accesses that a barrier has ordered before or after them, since
// causality order is transitive.
DEVICE inline u64 load_acquire(const u64* address) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
DEVICE inline u32 load_acquire(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
DEVICE inline u64 load_relaxed(const u64* address) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
DEVICE inline u32 load_relaxed(const u32* address) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
DEVICE inline void store_release(u64* address, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
DEVICE inline void store_release(u32* address, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
DEVICE inline void store_relaxed(u64* address, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
DEVICE inline void store_relaxed(u32* address, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Two words of data with a flag beside each: the halves of a line may become visible one by one.
struct alignas(16) Line { u32 low, low_flag, high, high_flag; };
DEVICE inline void store_line(Line* address, u32 low, u32 high, u32 flag) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(address), "r"(low), "r"(flag), "r"(high) : "memory");
}
DEVICE inline Line load_line(const Line* address) {
  Line line;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(line.low), "=r"(line.low_flag), "=r"(line.high), "=r"(line.high_flag)
               : "l"(address)
               : "memory");
  return line;
}

// What a thread moves at once.
struct alignas(16) Pack { u64 words[2]; };
// Loads memory that other processors write, past the caches that do not see their writes.
DEVICE inline Pack load_pack(const Pack* address) {
  Pack pack;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(pack.words[0]), "=l"(pack.words[1]) : "l"(address) : "memory");
  return pack;
}
// `is_last`: it is the last pack of a line. On a GPU one instruction of the warp writes the whole line.
DEVICE inline void store_pack(Pack* address, const Pack& pack, bool) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(pack.words[0]), "l"(pack.words[1]) : "memory");
}

// Orders what the block's threads did before a barrier before what this thread does after it, for all processors.
DEVICE inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// One load for all threads of a warp that are here together.
DEVICE inline u32 load_once_a_warp(const u32* address) {
  const u32 here = __activemask(), first = __ffs(static_cast<int>(here)) - 1;
  u32 value = 0;
  if (threadIdx.x % 32 == first) value = load_relaxed(address);
  return __shfl_sync(here, value, static_cast<int>(first));
}

// Atomics among the blocks of this GPU.
DEVICE inline u64 add_relaxed(u64* address, u64 value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}
DEVICE inline u32 exchange_relaxed(u32* address, u32 value) { return atomicExch(address, value); }
DEVICE inline u64 exchange_relaxed(volatile u64* address, u64 value) {
  return atomicExch(reinterpret_cast<unsigned long long*>(const_cast<u64*>(address)), static_cast<unsigned long long>(value));
}
// Stores `value` if the word is `expected`. Returns what was there.
DEVICE inline u64 compare_exchange_relaxed(u64* address, u64 expected, u64 value) {
  return atomicCAS(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(expected),
                   static_cast<unsigned long long>(value));
}

DEVICE inline float bits_to_float(u32 bits) { return __uint_as_float(bits); }
DEVICE inline u32 float_to_bits(float value) { return __float_as_uint(value); }
DEVICE inline double bits_to_double(u64 bits) { return __longlong_as_double(static_cast<long long>(bits)); }

#else

inline unsigned thread_index() { return 0; }
inline unsigned threads() { return 1; }
constexpr unsigned CHANNEL_THREADS = 1;
inline void block_barrier() {}
inline void part_barrier(unsigned) {}
inline bool block_any(bool so) { return so; }
inline void await_kernels_before() {}
inline void let_next_kernel_come() {}
constexpr u32 warp_threads() { return 1; }
inline u32 warp_thread() { return 0; }
inline void warp_barrier() {}
inline bool warp_all(bool so) { return so; }
inline u32 warp_in_launch() { return 0; }
inline u64 steady_time() {
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                              std::chrono::steady_clock::now().time_since_epoch())
                              .count());
}
// Tests replace the timer.
inline u64 (*timer)() = steady_time;
inline u64 device_time() { return timer(); }
// What a thread does after polling for long. Tests replace it.
inline void (*rest)() = std::this_thread::yield;
inline void pause_polling() { rest(); }
constexpr bool PAUSES_AT_ONCE = true;
// Soon, since what is waited for may run on a thread of the same processor.
inline constexpr bool pauses_after(u32 polls) { return polls % 16 == 0; }

template <class T>
T load_acquire(const T* address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }
template <class T>
T load_relaxed(const T* address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }
template <class T>
void store_release(T* address, T value) { __atomic_store_n(address, value, __ATOMIC_RELEASE); }
template <class T>
void store_relaxed(T* address, T value) { __atomic_store_n(address, value, __ATOMIC_RELAXED); }
inline u64 add_relaxed(u64* address, u64 value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
inline u32 exchange_relaxed(u32* address, u32 value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }
inline u64 exchange_relaxed(volatile u64* address, u64 value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }
inline u64 compare_exchange_relaxed(u64* address, u64 expected, u64 value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

struct alignas(16) Line { u32 low, low_flag, high, high_flag; };
inline void store_line(Line* address, u32 low, u32 high, u32 flag) {
  u64* halves = reinterpret_cast<u64*>(address);
  store_relaxed(&halves[0], static_cast<u64>(flag) << 32 | low);
  store_relaxed(&halves[1], static_cast<u64>(flag) << 32 | high);
}
inline Line load_line(const Line* address) {
  const u64* halves = reinterpret_cast<const u64*>(address);
  const u64 low = load_relaxed(&halves[0]), high = load_relaxed(&halves[1]);
  return Line{static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high), static_cast<u32>(high >> 32)};
}
struct alignas(16) Pack { u64 words[2]; };
// The last pack of a line is written last and read first. Its second word says that the others are there.
inline Pack load_pack(const Pack* address) {
  const u64 second = load_acquire(&address->words[1]);
  return Pack{{load_relaxed(&address->words[0]), second}};
}
inline void store_pack(Pack* address, const Pack& pack, bool is_last) {
  store_relaxed(&address->words[0], pack.words[0]);
  __atomic_store_n(&address->words[1], pack.words[1], is_last ? __ATOMIC_RELEASE : __ATOMIC_RELAXED);
}
inline void fence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline u32 load_once_a_warp(const u32* address) { return load_relaxed(address); }

template <class To, class From>
To bit_copy(From from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float bits_to_float(u32 bits) { return bit_copy<float>(bits); }
inline u32 float_to_bits(float value) { return bit_copy<u32>(value); }
inline double bits_to_double(u64 bits) { return bit_copy<double>(bits); }

#endif

}  // namespace ringsight

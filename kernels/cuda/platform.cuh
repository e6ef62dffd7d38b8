// What device code needs of the machine, for a GPU and for a host compiler.
//
// Compiled by a C++ compiler, a block is one thread: its barriers are nothing, and the programs can be tested where
// there is no GPU (tests/cuda_source.rs).
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define DEVICE __device__
#define NOINLINE __noinline__
#define UNROLL _Pragma("unroll")
#else
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#define DEVICE
#define NOINLINE __attribute__((noinline))
#define UNROLL
#endif

namespace ringsight {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

#ifdef __CUDACC__

DEVICE inline unsigned thread_index() { return threadIdx.x; }
DEVICE inline unsigned threads() { return blockDim.x; }
DEVICE inline void block_barrier() { __syncthreads(); }

// Nanoseconds of the GPU's clock, which all its kernels share.
DEVICE inline u64 device_time() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// A pause of a thread that polls: leaves the memory system to others.
DEVICE inline void pause_polling() { __nanosleep(100); }

// Loads and stores that other processors see. `acquire` and `release` order all of the block's accesses that a barrier
// has ordered before or after them: causality order is transitive.
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

// Atomics among the blocks of this GPU.
DEVICE inline u64 add_relaxed(u64* address, u64 value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}
DEVICE inline u32 add_acq_rel(u32* address, u32 value) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}
DEVICE inline u32 exchange_relaxed(u32* address, u32 value) { return atomicExch(address, value); }

DEVICE inline float bits_to_float(u32 bits) { return __uint_as_float(bits); }
DEVICE inline u32 float_to_bits(float value) { return __float_as_uint(value); }
DEVICE inline double bits_to_double(u64 bits) { return __longlong_as_double(static_cast<long long>(bits)); }

#else

inline unsigned thread_index() { return 0; }
inline unsigned threads() { return 1; }
inline void block_barrier() {}
inline u64 device_time() {
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                              std::chrono::steady_clock::now().time_since_epoch())
                              .count());
}
inline void pause_polling() { std::this_thread::yield(); }

template <class T>
T load_acquire(const T* address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }
template <class T>
T load_relaxed(const T* address) { return __atomic_load_n(address, __ATOMIC_RELAXED); }
template <class T>
void store_release(T* address, T value) { __atomic_store_n(address, value, __ATOMIC_RELEASE); }
template <class T>
void store_relaxed(T* address, T value) { __atomic_store_n(address, value, __ATOMIC_RELAXED); }
inline u64 add_relaxed(u64* address, u64 value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }
inline u32 add_acq_rel(u32* address, u32 value) { return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL); }
inline u32 exchange_relaxed(u32* address, u32 value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }

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

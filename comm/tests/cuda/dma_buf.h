// What stands for a dma-buf between the driver without a GPU (libcuda.cpp) and the RDMA library without a device
// (libibverbs.cpp): a file that holds an allocation, what devices have written to it and is still on its way there, and
// which bytes that is. As on a GPU that does not order such writes, kernels see them once they are flushed.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace dma_buf {

struct Write {
  uint64_t offset, bytes;
};

// At the end of the file.
struct Trailer {
  std::atomic<uint32_t> lock;
  uint32_t count;
  // Of the allocation.
  uint64_t bytes;
  Write writes[4095];
};
constexpr size_t TRAILER_BYTES = sizeof(Trailer);
static_assert(TRAILER_BYTES % 4096 <= 16, "pages");

// Whether what devices write is ordered: nothing is on its way then.
inline int ordering() {
  const char* text = std::getenv("RINGSIGHT_MOCK_GDR_ORDERING");
  return text != nullptr ? std::atoi(text) : 0;
}

inline size_t file_bytes(size_t bytes) { return 2 * bytes + 2 * 65536; }

class Mapping {
  char* base_ = nullptr;
  size_t bytes_ = 0;
  Trailer* trailer() const { return reinterpret_cast<Trailer*>(base_ + 2 * bytes_); }

 public:
  // Makes the file of an allocation of so many bytes one.
  static bool extend(int file, size_t bytes) {
    if (ftruncate(file, static_cast<off_t>(file_bytes(bytes))) != 0) return false;
    return pwrite(file, &bytes, sizeof bytes, static_cast<off_t>(2 * bytes + offsetof(Trailer, bytes))) == sizeof bytes;
  }
  // Maps such a file; `bytes()` is 0 of another one.
  explicit Mapping(int file) {
    struct stat stat;
    if (fstat(file, &stat) != 0 || static_cast<size_t>(stat.st_size) <= file_bytes(0)) return;
    const size_t length = static_cast<size_t>(stat.st_size), bytes = (length - file_bytes(0)) / 2;
    void* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED) return;
    base_ = static_cast<char*>(base);
    bytes_ = bytes;
    if (trailer()->bytes != bytes) bytes_ = 0;
  }
  Mapping(const Mapping&) = delete;
  ~Mapping() {
    if (base_ != nullptr) munmap(base_, file_bytes(bytes_));
  }
  size_t bytes() const { return bytes_; }

  void read(void* to, size_t offset, size_t bytes) const { std::memcpy(to, base_ + offset, bytes); }
  void write(size_t offset, const void* from, size_t bytes) const {
    if (ordering() != 0) {
      std::memcpy(base_ + offset, from, bytes);
      return;
    }
    lock();
    if (trailer()->count == sizeof trailer()->writes / sizeof(Write)) {
      std::printf("FAILED so much is on its way to a GPU, and nobody flushes it\n");
      std::abort();
    }
    std::memcpy(base_ + bytes_ + offset, from, bytes);
    trailer()->writes[trailer()->count++] = {offset, bytes};
    unlock();
  }
  void flush() const {
    lock();
    for (uint32_t i = 0; i < trailer()->count; i++) {
      const Write& one = trailer()->writes[i];
      std::memcpy(base_ + one.offset, base_ + bytes_ + one.offset, one.bytes);
    }
    trailer()->count = 0;
    unlock();
  }

 private:
  void lock() const {
    while (trailer()->lock.exchange(1, std::memory_order_acquire) != 0) usleep(10);
  }
  void unlock() const { trailer()->lock.store(0, std::memory_order_release); }
};

}  // namespace dma_buf

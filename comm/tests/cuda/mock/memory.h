// Memory of devices and of the host, other processes' included. To be included where libcuda.cpp has its functions.
#pragma once

int cuMemAlloc_v2(void** pointer, size_t bytes) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  if (current == nullptr) return INVALID_CONTEXT;
  if (!has_memory(bytes) || lacks("cuMemAlloc_v2")) return OUT_OF_MEMORY;
  const int file = memfd_create("device-memory", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return OUT_OF_MEMORY;
  *pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (*pointer == MAP_FAILED) return OUT_OF_MEMORY;
  // What was there before is no zeros.
  std::memset(*pointer, 0x5a, bytes);
  std::lock_guard lock(memory_mutex);
  memory[*pointer] = {file, bytes, current->device, ++last_id};
  return SUCCESS;
}
int cuMemFree_v2(void* pointer) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
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
  bool whole = false;
  for (auto& [base, about] : memory)
    if (holds(base, about.bytes)) kind = 2, device = about.device, start = base, size = about.bytes, id = about.id, whole = true;
  for (auto& [base, about] : opened)
    if (holds(base, about.bytes)) kind = 2, device = about.device, start = base, size = about.bytes;
  auto piece = piece_around(address);
  const bool in_piece = piece != mapped_pieces.end();
  if (in_piece) {
    auto range = range_around(address);
    kind = 2, device = piece->second.memory->device, start = range->first, size = range->second, id = piece->second.id;
  }
  for (auto& [base, bytes] : host_memory)
    if (holds(base, bytes)) kind = 1, device = 0;
  for (unsigned i = 0; i < count; i++) switch (attributes[i]) {
      case 2: *static_cast<int*>(places[i]) = kind; break;
      case 3: *static_cast<void**>(places[i]) = kind == 0 ? nullptr : address; break;
      case 7: *static_cast<u64*>(places[i]) = id; break;
      case 8: *static_cast<bool*>(places[i]) = false; break;
      case 9: *static_cast<int*>(places[i]) = device; break;
      case 10: *static_cast<bool*>(places[i]) = whole; break;
      case 11: *static_cast<const void**>(places[i]) = start; break;
      case 12: *static_cast<size_t*>(places[i]) = size; break;
      case 14: *static_cast<u64*>(places[i]) = in_piece ? static_cast<u64>(piece->second.memory->ways) : 0; break;
      case 18: *static_cast<size_t*>(places[i]) = in_piece ? piece->second.memory->bytes : 0; break;
      case 19: *static_cast<const void**>(places[i]) = in_piece ? piece->first : nullptr; break;
      default: return INVALID_VALUE;
    }
  return SUCCESS;
}
int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  if (current == nullptr) return INVALID_CONTEXT;
  if (lacks("cuMemHostAlloc")) return OUT_OF_MEMORY;
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(*pointer, 0x5a, bytes);
  std::lock_guard lock(memory_mutex);
  host_memory[*pointer] = bytes;
  return SUCCESS;
}
int cuMemFreeHost(void* pointer) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
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
  if (number("RINGSIGHT_MOCK_IPC_OPEN", 1) == 0) return NOT_SUPPORTED;
  if (current == nullptr || handle.process == static_cast<u64>(getpid())) return INVALID_CONTEXT;
  if (lacks("cuIpcOpenMemHandle_v2")) return OUT_OF_MEMORY;
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
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  if (current == nullptr) return INVALID_CONTEXT;
  if (lacks("cuMemHostRegister_v2")) return OUT_OF_MEMORY;
  std::lock_guard lock(memory_mutex);
  return registered.insert(pointer).second ? SUCCESS : ALREADY_REGISTERED;
}
int cuMemHostUnregister(void* pointer) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  wait_for_kernels();
  std::lock_guard lock(memory_mutex);
  return registered.erase(pointer) != 0 ? SUCCESS : NOT_REGISTERED;
}
int cuMemsetD8Async(void* pointer, unsigned char value, size_t bytes, void* stream) {
  return add(stream, [=] { std::memset(pointer, value, bytes); });
}
int cuMemcpyAsync(void* to, const void* from, size_t bytes, void* stream) {
  if (refuses("cuMemcpyAsync")) return OUT_OF_MEMORY;
  return add(stream, [=, device = of(stream)->device] {
    while (frozen[device]) usleep(1000);
    std::memcpy(to, from, bytes);
  });
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

// What this process has and has not given back: memory of devices, of other processes, of the host, registered ranges, ranges of addresses,
// streams, events, graphs of either kind, modules, and primary contexts.
void ringsight_mock_held(u64* figures) {
  std::lock_guard lock(memory_mutex);
  const u64 all[] = {memory.size(), opened.size(), host_memory.size(), registered.size(), reserved_ranges.size(), held[STREAMS], held[EVENTS], held[GRAPHS], held[MODULES], held[CONTEXTS]};
  std::copy(std::begin(all), std::end(all), figures);
}

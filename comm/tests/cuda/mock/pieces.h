// Memory that is made, mapped and opened in pieces (cuMemCreate, cuMemMap, cuMemSetAccess). What is mapped and not opened is reached by
// nobody, and addresses that are reserved stay so until they are given back. To be included where libcuda.cpp has its functions, before memory.h.
#pragma once

constexpr size_t GRANULE = 2 << 20;
struct Location {
  int type, id;
};
struct Properties {
  int type, ways;
  Location place;
  void* unused;
  unsigned char flags[8];
};
struct Access {
  Location place;
  int flags;
};
// Memory, mapped or not.
struct Physical {
  const int file;
  const size_t bytes;
  const int device, ways;
  Physical(int file, size_t bytes, int device, int ways) : file(file), bytes(bytes), device(device), ways(ways) {}
  ~Physical() { close(file); }
};
using Handle = std::shared_ptr<Physical>;
struct MappedPiece {
  Handle memory;
  u64 id;
  std::set<int> open;
};
auto& reserved_ranges = *new std::map<char*, size_t>;
auto& mapped_pieces = *new std::map<char*, MappedPiece>;

// What an address is in.
auto piece_around(void* address) {
  char* at = static_cast<char*>(address);
  auto found = mapped_pieces.upper_bound(at);
  if (found == mapped_pieces.begin()) return mapped_pieces.end();
  found--;
  return at < found->first + found->second.memory->bytes ? found : mapped_pieces.end();
}
auto range_around(void* address) {
  char* at = static_cast<char*>(address);
  auto found = reserved_ranges.upper_bound(at);
  if (found == reserved_ranges.begin()) return reserved_ranges.end();
  found--;
  return at < found->first + found->second ? found : reserved_ranges.end();
}
// Nothing is there, and it is kept.
void* keep_empty(void* at, size_t bytes) {
  const int fixed = at == nullptr ? 0 : MAP_FIXED;
  return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
}

int cuMemCreate(Handle** handle, size_t bytes, const Properties* properties, u64 flags) {
  if (current == nullptr) return INVALID_CONTEXT;
  if (bytes == 0 || bytes % GRANULE != 0 || properties->type != 1 || properties->place.type != 1 || flags != 0) return INVALID_VALUE;
  if (!has_memory(bytes) || lacks("cuMemCreate")) return OUT_OF_MEMORY;
  const int file = memfd_create("device-pieces", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return OUT_OF_MEMORY;
  void* all = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (all == MAP_FAILED) return OUT_OF_MEMORY;
  std::memset(all, 0x5a, bytes);
  munmap(all, bytes);
  *handle = new Handle(std::make_shared<Physical>(file, bytes, properties->place.id, properties->ways));
  return SUCCESS;
}
int cuMemRelease(Handle* handle) { return delete handle, SUCCESS; }
int cuMemAddressReserve(char** pointer, size_t bytes, size_t, void* wish, u64 flags) {
  if (bytes == 0 || bytes % GRANULE != 0 || wish != nullptr || flags != 0) return INVALID_VALUE;
  if (lacks("cuMemAddressReserve")) return OUT_OF_MEMORY;
  void* at = keep_empty(nullptr, bytes);
  if (at == MAP_FAILED) return OUT_OF_MEMORY;
  std::lock_guard lock(memory_mutex);
  *pointer = static_cast<char*>(at);
  reserved_ranges[*pointer] = bytes;
  return SUCCESS;
}
int cuMemAddressFree(char* pointer, size_t bytes) {
  std::lock_guard lock(memory_mutex);
  auto found = reserved_ranges.find(pointer);
  if (found == reserved_ranges.end() || found->second != bytes) return INVALID_VALUE;
  auto piece = mapped_pieces.lower_bound(pointer);
  if (piece != mapped_pieces.end() && piece->first < pointer + bytes) return INVALID_VALUE;
  reserved_ranges.erase(found);
  munmap(pointer, bytes);
  return SUCCESS;
}
int cuMemMap(char* pointer, size_t bytes, size_t offset, Handle* handle, u64 flags) {
  std::lock_guard lock(memory_mutex);
  auto range = range_around(pointer);
  if (range == reserved_ranges.end() || pointer + bytes > range->first + range->second || offset != 0 || flags != 0) return INVALID_VALUE;
  auto next = mapped_pieces.lower_bound(pointer);
  if (lacks("cuMemMap")) return OUT_OF_MEMORY;
  const bool taken = piece_around(pointer) != mapped_pieces.end() || (next != mapped_pieces.end() && next->first < pointer + bytes);
  if (taken || bytes != (*handle)->bytes) return INVALID_VALUE;
  if (mmap(pointer, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (*handle)->file, 0) == MAP_FAILED) return OUT_OF_MEMORY;
  mapped_pieces[pointer] = {*handle, ++last_id, {}};
  return SUCCESS;
}
// It waits for no kernel.
int cuMemUnmap(char* pointer, size_t bytes) {
  std::lock_guard lock(memory_mutex);
  auto found = mapped_pieces.find(pointer);
  if (found == mapped_pieces.end() || found->second.memory->bytes != bytes) return INVALID_VALUE;
  keep_empty(pointer, bytes);
  mapped_pieces.erase(found);
  return SUCCESS;
}
int cuMemSetAccess(char* pointer, size_t bytes, const Access* access, size_t count) {
  std::lock_guard lock(memory_mutex);
  for (char* at = pointer; at < pointer + bytes;) {
    auto piece = mapped_pieces.find(at);
    if (piece == mapped_pieces.end()) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
      if (access[i].place.type != 1 || access[i].flags != 3) return INVALID_VALUE;
      piece->second.open.insert(access[i].place.id);
    }
    mprotect(at, piece->second.memory->bytes, PROT_READ | PROT_WRITE);
    at += piece->second.memory->bytes;
  }
  return SUCCESS;
}
int cuMemGetAccess(u64* flags, const Location* place, void* pointer) {
  std::lock_guard lock(memory_mutex);
  auto piece = piece_around(pointer);
  if (piece == mapped_pieces.end() || place->type != 1) return INVALID_VALUE;
  *flags = piece->second.open.count(place->id) != 0 ? 3 : 0;
  return SUCCESS;
}
int cuMemRetainAllocationHandle(Handle** handle, void* pointer) {
  std::lock_guard lock(memory_mutex);
  auto piece = piece_around(pointer);
  if (piece == mapped_pieces.end()) return INVALID_VALUE;
  *handle = new Handle(piece->second.memory);
  return SUCCESS;
}
int cuMemExportToShareableHandle(int* file, Handle* handle, int type, u64 flags) {
  if (number("RINGSIGHT_MOCK_PIECES_EXPORT", 1) == 0) return NOT_SUPPORTED;
  if (type != 1 || flags != 0 || ((*handle)->ways & type) == 0) return INVALID_VALUE;
  *file = fcntl((*handle)->file, F_DUPFD_CLOEXEC, 0);
  return *file < 0 ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemImportFromShareableHandle(Handle** handle, void* file, int type) {
  if (number("RINGSIGHT_MOCK_PIECES_IMPORT", 1) == 0) return NOT_SUPPORTED;
  if (current == nullptr) return INVALID_CONTEXT;
  const int own = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(file)), F_DUPFD_CLOEXEC, 0);
  struct stat about;
  if (type != 1 || own < 0 || fstat(own, &about) != 0) return INVALID_VALUE;
  *handle = new Handle(std::make_shared<Physical>(own, static_cast<size_t>(about.st_size), -1, type));
  return SUCCESS;
}

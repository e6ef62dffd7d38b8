// Memory that runs out, of a device or of the host, at a moment that the test chooses.
#pragma once
#include "state.h"

namespace {

// By device: the how manyeth allocation from now on cannot be had. 0: all can.
std::atomic<int> lacking[16];
// By device: the call that alone counts, if any, and the one that was told so last.
std::atomic<const char*> lacking_call[16], lacked[16];
// What this thread asks for is not the library's.
thread_local bool is_exempt = false;

// Asked by what takes memory, on behalf of the current device.
bool lacks(const char* call) {
  if (current == nullptr || is_exempt) return false;
  const char* only = lacking_call[current->device];
  if (only != nullptr && std::strcmp(only, call) != 0) return false;
  auto& left = lacking[current->device];
  const bool lacks = left > 0 && --left == 0;
  if (lacks) lacked[current->device] = call;
  return lacks;
}

// Asked by what takes none: refused only if it alone counts.
bool refuses(const char* call) {
  return current != nullptr && lacking_call[current->device] != nullptr && lacks(call);
}

}  // namespace

extern "C" {

// From now on, of all calls or of one; nothing has been refused yet.
void ringsight_mock_lack(int device, int which, const char* call) {
  lacked[device] = nullptr;
  lacking_call[device] = call;
  lacking[device] = which;
}
// The call that was refused memory last; NULL: none since.
const char* ringsight_mock_lacked(int device) { return lacked[device]; }
void ringsight_mock_exempt(int on) { is_exempt = on != 0; }

}

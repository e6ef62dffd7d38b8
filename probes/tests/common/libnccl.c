/* A stock communication library as far as its callers see it: exported functions of nccl.h, no probe functions. */
#include <stddef.h>
typedef int ncclResult_t;
typedef void* ncclComm_t;
typedef void* cudaStream_t;
static volatile int sink;
ncclResult_t ncclGetVersion(int* version) { *version = 22703; return 0; }
ncclResult_t ncclGroupStart(void) { sink = 1; return 0; }
ncclResult_t ncclGroupEnd(void) { sink = 2; return 0; }
ncclResult_t ncclAllReduce(const void* s, void* r, size_t n, int t, int o, ncclComm_t c, cudaStream_t q) {
  ncclGroupStart(); sink = (int)(n + (size_t)t + (size_t)o + (size_t)s + (size_t)r + (size_t)c + (size_t)q); ncclGroupEnd(); return 0; }
ncclResult_t ncclBroadcast(const void* s, void* r, size_t n, int t, int root, ncclComm_t c, cudaStream_t q) {
  sink = (int)(n + (size_t)t + (size_t)root + (size_t)s + (size_t)r + (size_t)c + (size_t)q); return 4; }
ncclResult_t ncclReduce(const void* s, void* r, size_t n, int t, int o, int root, ncclComm_t c, cudaStream_t q) {
  sink = (int)(n + (size_t)t + (size_t)o + (size_t)root + (size_t)s + (size_t)r + (size_t)c + (size_t)q); return 0; }
ncclResult_t ncclSend(const void* s, size_t n, int t, int peer, ncclComm_t c, cudaStream_t q) {
  sink = (int)(n + (size_t)t + (size_t)peer + (size_t)s + (size_t)c + (size_t)q); return 0; }

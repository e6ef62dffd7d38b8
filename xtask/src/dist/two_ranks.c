/* Two processes sum a vector and pass a message; exit status 0 if every number is right.
 * Uses the shipped header and library and nothing else. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ringsight.h"

#define COUNT 100000

#define CHECK(call)                                                                                   \
  do {                                                                                                \
    ncclResult_t result = (call);                                                                     \
    if (result != ncclSuccess) {                                                                      \
      fprintf(stderr, "rank %d: %s: %s (%s)\n", rank, #call, ncclGetErrorString(result), ncclGetLastError(NULL)); \
      exit(1);                                                                                        \
    }                                                                                                 \
  } while (0)

static int run(int rank, ncclUniqueId id) {
  ncclComm_t comm;
  cudaStream_t stream;
  CHECK(ncclCommInitRank(&comm, 2, id, rank));
  CHECK(ringsightStreamCreate(&stream));
  float *send, *receive;
  CHECK(ringsightMalloc((void**)&send, COUNT * sizeof(float)));
  CHECK(ringsightMalloc((void**)&receive, COUNT * sizeof(float)));
  for (int i = 0; i < COUNT; i++) send[i] = (float)(i % 1000 + rank);
  CHECK(ncclAllReduce(send, receive, COUNT, ncclFloat, ncclSum, comm, stream));
  CHECK(ringsightStreamSynchronize(stream));
  for (int i = 0; i < COUNT; i++) {
    if (receive[i] != (float)(2 * (i % 1000) + 1)) {
      fprintf(stderr, "rank %d: element %d of the sum is %g\n", rank, i, (double)receive[i]);
      return 1;
    }
  }
  CHECK(ncclGroupStart());
  CHECK(ncclSend(send, COUNT, ncclFloat, 1 - rank, comm, stream));
  CHECK(ncclRecv(receive, COUNT, ncclFloat, 1 - rank, comm, stream));
  CHECK(ncclGroupEnd());
  CHECK(ringsightStreamSynchronize(stream));
  for (int i = 0; i < COUNT; i++) {
    if (receive[i] != (float)(i % 1000 + 1 - rank)) {
      fprintf(stderr, "rank %d: element %d of the message is %g\n", rank, i, (double)receive[i]);
      return 1;
    }
  }
  CHECK(ringsightFree(send));
  CHECK(ringsightFree(receive));
  CHECK(ringsightStreamDestroy(stream));
  CHECK(ncclCommDestroy(comm));
  return 0;
}

int main(void) {
  int rank = 0;
  int handover[2];
  if (pipe(handover) != 0) return 1;
  /* Fork before the first call: the library's threads belong to the process that made them. */
  pid_t child = fork();
  if (child < 0) return 1;
  ncclUniqueId id;
  if (child == 0) {
    rank = 1;
    if (read(handover[0], &id, sizeof id) != (ssize_t)sizeof id) return 1;
    return run(rank, id);
  }
  CHECK(ncclGetUniqueId(&id));
  if (write(handover[1], &id, sizeof id) != (ssize_t)sizeof id) return 1;
  int result = run(rank, id);
  int status;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 1;
  return result != 0 ? result : WEXITSTATUS(status);
}

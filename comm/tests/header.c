/* A C program against the shipped headers: one rank of two, told its place on the command line.
 *
 * header RANK RANKS FILE: rank 0 writes the unique id into FILE, the others read it. Prints "rank R ok" and exits 0, or
 * says what failed and exits 1. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nccl.h"
#include "ringsight.h"

#define CHECK(call)                                                                                    \
  do {                                                                                                 \
    ncclResult_t result = (call);                                                                      \
    if (result != ncclSuccess) {                                                                       \
      fprintf(stderr, "%s: %s: %s\n", #call, ncclGetErrorString(result), ncclGetLastError(NULL));      \
      exit(1);                                                                                         \
    }                                                                                                  \
  } while (0)

#define EXPECT(condition)                                                 \
  do {                                                                    \
    if (!(condition)) {                                                   \
      fprintf(stderr, "line %d: %s does not hold\n", __LINE__, #condition); \
      exit(1);                                                            \
    }                                                                     \
  } while (0)

enum { COUNT = 10000 };

static void exchange_id(int rank, const char* file, ncclUniqueId* id) {
  char temporary[4096];
  if (rank == 0) {
    CHECK(ncclGetUniqueId(id));
    snprintf(temporary, sizeof temporary, "%s.part", file);
    FILE* out = fopen(temporary, "wb");
    EXPECT(out && fwrite(id, sizeof *id, 1, out) == 1 && fclose(out) == 0 && rename(temporary, file) == 0);
    return;
  }
  FILE* in = NULL;
  for (int tries = 0; tries < 30000 && !(in = fopen(file, "rb")); tries++) usleep(1000);
  EXPECT(in && fread(id, sizeof *id, 1, in) == 1);
  fclose(in);
}

static void count_up(void* argument) { ++*(int*)argument; }

int main(int argc, char** argv) {
  EXPECT(argc == 4);
  int rank = atoi(argv[1]), ranks = atoi(argv[2]), version = 0, value = -1;
  CHECK(ncclGetVersion(&version));
  EXPECT(version == NCCL_VERSION_CODE && version == 23007);
  EXPECT(sizeof(ncclConfig_t) == 96 && sizeof(ncclUniqueId) == 128);

  ncclUniqueId id;
  exchange_id(rank, argv[3], &id);
  CHECK(ringsightSetDevice(rank));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.commName = "from C";
  config.minCTAs = 1;
  config.maxCTAs = 4;
  ncclComm_t comm = NULL;
  CHECK(ncclCommInitRankConfig(&comm, ranks, id, rank, &config));
  CHECK(ncclCommCount(comm, &value));
  EXPECT(value == ranks);
  CHECK(ncclCommUserRank(comm, &value));
  EXPECT(value == rank);
  CHECK(ncclCommCuDevice(comm, &value));
  EXPECT(value == rank);
  ncclResult_t async = ncclInternalError;
  CHECK(ncclCommGetAsyncError(comm, &async));
  EXPECT(async == ncclSuccess);

  float *send, *recv;
  cudaStream_t stream;
  CHECK(ncclMemAlloc((void**)&send, COUNT * ranks * sizeof *send));
  CHECK(pncclMemAlloc((void**)&recv, COUNT * ranks * sizeof *recv));
  CHECK(ringsightStreamCreate(&stream));

  for (int i = 0; i < COUNT * ranks; i++) send[i] = (float)(rank + i % 7);
  CHECK(ncclAllReduce(send, recv, COUNT, ncclFloat, ncclSum, comm, stream));
  CHECK(ringsightStreamSynchronize(stream));
  for (int i = 0; i < COUNT; i++) EXPECT(recv[i] == (float)(ranks * (ranks - 1) / 2 + ranks * (i % 7)));

  CHECK(ncclAllGather(send, recv, COUNT, ncclFloat32, comm, stream));
  CHECK(ringsightStreamSynchronize(stream));
  for (int i = 0; i < COUNT * ranks; i++) EXPECT(recv[i] == (float)(i / COUNT + i % COUNT % 7));

  CHECK(ncclReduceScatter(send, recv, COUNT, ncclFloat, ncclMax, comm, stream));
  CHECK(ringsightStreamSynchronize(stream));
  for (int i = 0; i < COUNT; i++) EXPECT(recv[i] == (float)(ranks - 1 + (rank * COUNT + i) % 7));

  CHECK(ncclReduce(send, recv, COUNT, ncclFloat, ncclMin, 0, comm, stream));
  CHECK(ncclBroadcast(recv, recv, COUNT, ncclFloat, 0, comm, stream));
  CHECK(ncclBcast(recv, COUNT, ncclFloat, 0, comm, stream));
  CHECK(ringsightStreamSynchronize(stream));
  for (int i = 0; i < COUNT; i++) EXPECT(recv[i] == (float)(i % 7));

  int next = (rank + 1) % ranks, prev = (rank + ranks - 1) % ranks;
  CHECK(ncclGroupStart());
  CHECK(ncclSend(send, COUNT, ncclFloat, next, comm, stream));
  CHECK(ncclRecv(recv, COUNT, ncclFloat, prev, comm, stream));
  CHECK(ncclGroupEnd());
  CHECK(ringsightStreamSynchronize(stream));
  for (int i = 0; i < COUNT; i++) EXPECT(recv[i] == (float)(prev + i % 7));

  /* A captured step, with a host function, replayed. */
  int replays = 0;
  ringsightGraph_t graph;
  ringsightGraphExec_t exec;
  CHECK(ringsightStreamBeginCapture(stream));
  CHECK(pncclAllReduce(send, recv, COUNT, ncclFloat, ncclAvg, comm, stream));
  CHECK(ringsightLaunchHostFunc(stream, count_up, &replays));
  CHECK(ringsightStreamEndCapture(stream, &graph));
  CHECK(ringsightGraphInstantiate(&exec, graph));
  CHECK(ringsightGraphDestroy(graph));
  for (int i = 0; i < 10; i++) CHECK(ringsightGraphLaunch(exec, stream));
  CHECK(ringsightStreamSynchronize(stream));
  CHECK(ringsightGraphExecDestroy(exec));
  EXPECT(replays == 10);
  for (int i = 0; i < COUNT; i++) EXPECT(recv[i] == (float)(ranks - 1) / 2 + (float)(i % 7));

  /* How it was done, and why not otherwise. */
  ringsightExplain_t asked = {.size = sizeof asked, .function = "all_reduce", .count = COUNT, .datatype = ncclFloat, .op = ncclAvg,
                              .ranks = ranks, .channels = 2, .slotBytes = 128 << 10, .oneShot = 0, .peers = 0};
  ringsightExplainRow_t rows[64];
  int row_count = 64, chosen = 0;
  CHECK(ringsightExplain(&asked, rows, &row_count));
  EXPECT(row_count <= 64);
  for (int i = 0; i < row_count; i++) {
    chosen += rows[i].chosen;
    EXPECT((rows[i].reason[0] == 0) == (rows[i].chosen == 1));
    if (rows[i].chosen) EXPECT(strcmp(rows[i].algorithm, "ring") == 0 && rows[i].channels >= 1);
  }
  EXPECT(chosen == 1);

  EXPECT(ncclBroadcast(send, recv, COUNT, ncclFloat, ranks, comm, stream) == ncclInvalidArgument);
  EXPECT(strstr(ncclGetLastError(comm), "root") != NULL);

  CHECK(ringsightStreamDestroy(stream));
  CHECK(ncclMemFree(send));
  CHECK(ncclMemFree(recv));
  CHECK(ncclCommFinalize(comm));
  CHECK(ncclCommDestroy(comm));
  EXPECT(ncclCommDestroy(comm) == ncclInvalidArgument);
  printf("rank %d ok\n", rank);
  return 0;
}

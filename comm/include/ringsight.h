/* ringsight.h: streams, events and graphs of ringsight's host device, for programs that run without a GPU.
 *
 * With RINGSIGHT_DEVICE=host the library works on ordinary memory, and a cudaStream_t given to an nccl* function is one
 * of these streams. They behave as CUDA's do: work is asynchronous and ordered within a stream; events order streams;
 * a captured stream records instead of running; a graph is replayed as often as launched. With RINGSIGHT_DEVICE=cuda
 * these functions return ncclInvalidUsage.
 *
 * Copyright 2026 the ringsight authors. Licensed under the Apache License, Version 2.0. */
#ifndef RINGSIGHT_H_
#define RINGSIGHT_H_

#include "nccl.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ringsightEvent* ringsightEvent_t;
typedef struct ringsightGraph* ringsightGraph_t;
typedef struct ringsightGraphExec* ringsightGraphExec_t;
typedef void (*ringsightHostFn_t)(void* argument);

/* Devices are numbers that only tell ranks of one process apart; each thread has a current one, 0 at first. */
ncclResult_t ringsightSetDevice(int device);
ncclResult_t ringsightGetDevice(int* device);

/* Memory that the device can reach; 4096-byte aligned. On the host device any memory will do. */
ncclResult_t ringsightMalloc(void** pointer, size_t bytes);
ncclResult_t ringsightFree(void* pointer);

ncclResult_t ringsightStreamCreate(cudaStream_t* stream);
/* Returns at once; work already in the stream still runs. */
ncclResult_t ringsightStreamDestroy(cudaStream_t stream);
/* Waits until all work of the stream is done. A NULL stream is the thread's default stream of its current device. */
ncclResult_t ringsightStreamSynchronize(cudaStream_t stream);
/* ncclSuccess if all work is done, ncclInProgress if not. */
ncclResult_t ringsightStreamQuery(cudaStream_t stream);
ncclResult_t ringsightStreamWaitEvent(cudaStream_t stream, ringsightEvent_t event);
ncclResult_t ringsightMemcpyAsync(void* destination, const void* source, size_t bytes, cudaStream_t stream);
ncclResult_t ringsightMemsetAsync(void* destination, int value, size_t bytes, cudaStream_t stream);
/* Runs the function on the stream, in order. It must not call the library (ncclInvalidUsage if it does). */
ncclResult_t ringsightLaunchHostFunc(cudaStream_t stream, ringsightHostFn_t function, void* argument);

ncclResult_t ringsightEventCreate(ringsightEvent_t* event);
ncclResult_t ringsightEventDestroy(ringsightEvent_t event);
ncclResult_t ringsightEventRecord(ringsightEvent_t event, cudaStream_t stream);
/* ncclSuccess if everything before the event's last record is done, or it was never recorded; else ncclInProgress. */
ncclResult_t ringsightEventQuery(ringsightEvent_t event);
ncclResult_t ringsightEventSynchronize(ringsightEvent_t event);
/* Milliseconds between two completed events. */
ncclResult_t ringsightEventElapsedTime(float* milliseconds, ringsightEvent_t start, ringsightEvent_t end);

/* Streams that wait for an event of a capturing stream join its capture and must be joined back before its end. */
ncclResult_t ringsightStreamBeginCapture(cudaStream_t stream);
ncclResult_t ringsightStreamEndCapture(cudaStream_t stream, ringsightGraph_t* graph);
ncclResult_t ringsightGraphInstantiate(ringsightGraphExec_t* exec, ringsightGraph_t graph);
ncclResult_t ringsightGraphLaunch(ringsightGraphExec_t exec, cudaStream_t stream);
ncclResult_t ringsightGraphExecDestroy(ringsightGraphExec_t exec);
ncclResult_t ringsightGraphDestroy(ringsightGraph_t graph);

/* An operation that need not exist. Size is sizeof(ringsightExplain_t): a library that knows fewer fields refuses it. */
typedef struct {
  size_t size;
  const char* function;     /* all_reduce, all_gather, reduce_scatter, broadcast, reduce, alltoall, gather, scatter, send, recv */
  size_t count;             /* elements, as the function takes them */
  ncclDataType_t datatype;
  ncclRedOp_t op;           /* from ncclNumOps on: one that the caller has made */
  int ranks;
  int channels;             /* of the communicator */
  size_t slotBytes;         /* of a FIFO slot: NCCL_BUFFSIZE / 8 */
  int oneShot;              /* all ranks' devices do operations in one shot: GPUs do, the host device does */
  int peers;                /* all ranks' kernels reach each other's memory: GPUs of one node that are not kept apart */
  int zeroCTA;              /* all ranks' CTAPolicy is NCCL_CTA_POLICY_ZERO */
  int window;               /* the receive buffer (of a reduce_scatter the send buffer) is in a window that all ranks registered with NCCL_WIN_COLL_SYMMETRIC and reach; -1: not known */
} ringsightExplain_t;

/* A row of the library's table of algorithms. */
typedef struct {
  char algorithm[16];
  char protocol[16];
  int chosen;               /* 1: this is how the operation is done; of at most one row */
  int channels;             /* that it is done over, where it is chosen */
  char reason[128];         /* why it is not chosen */
} ringsightExplainRow_t;

/* Tells how the library would do an operation, and why not otherwise: fills in up to *count rows in the order in which they are
 * tried, and sets *count to how many there are. Calls no device and needs no communicator. */
ncclResult_t ringsightExplain(const ringsightExplain_t* asked, ringsightExplainRow_t* rows, int* count);

/* Launches a kernel that never ends, as an operation of comm on this rank alone on a stream of its own, and returns at once: shows
 * what the watchdog says of a stuck kernel. Later operations of comm wait behind it, until ncclCommAbort or ncclCommRevoke. On any
 * device. */
ncclResult_t ncclSimulateKernelTimeout(ncclComm_t comm);

#ifdef __cplusplus
}
#endif
#endif

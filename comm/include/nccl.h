/* nccl.h: collective communication behind NCCL's ABI (2.28.9). Compiles without CUDA, as C and as C++.
 *
 * Constants, structs and signatures are those of NVIDIA's NCCL, so that programs built against either header run with
 * this library. What is not declared here is not served by this version.
 *
 * Copyright 2026 the ringsight authors. Licensed under the Apache License, Version 2.0. */
#ifndef NCCL_H_
#define NCCL_H_

#include <limits.h>
#include <stddef.h>

#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_SUFFIX ""

#define NCCL_VERSION(X, Y, Z) \
  (((X) <= 2 && (Y) <= 8) ? (X) * 1000 + (Y) * 100 + (Z) : (X) * 10000 + (Y) * 100 + (Z))
#define NCCL_VERSION_CODE NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

/* As the CUDA headers declare it: both may be included. A stream of ringsight.h on the host device. */
typedef struct CUstream_st* cudaStream_t;

/* One rank of a communicator. */
typedef struct ncclComm* ncclComm_t;
#define NCCL_COMM_NULL NULL

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId;

/* ncclGetLastError says which argument and why. */
typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
  ncclNumResults = 8
} ncclResult_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_SPLIT_NOCOLOR -1
#define NCCL_UNDEF_FLOAT -1.0f

/* Policies for ncclConfig_t.CTAPolicy. */
#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

/* Choices for one communicator. Always begin with NCCL_CONFIG_INITIALIZER. */
typedef struct ncclConfig_v22800 {
  /* Set by the initializer. */
  size_t size;
  unsigned int magic;
  unsigned int version;
  /* Set by the program; NCCL_CONFIG_UNDEF_* leaves the choice to the library. */
  int blocking;
  int cgaClusterSize;
  int minCTAs;
  int maxCTAs;
  const char* netName;
  int splitShare;
  int trafficClass;
  const char* commName;
  int collnetEnable;
  int CTAPolicy;
  int shrinkShare;
  int nvlsCTAs;
  int nChannelsPerNetPeer;
  int nvlinkCentricSched;
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER { \
  sizeof(ncclConfig_t), /* size */ \
  0xcafebeef, /* magic */ \
  NCCL_VERSION_CODE, /* version */ \
  NCCL_CONFIG_UNDEF_INT, /* blocking */ \
  NCCL_CONFIG_UNDEF_INT, /* cgaClusterSize */ \
  NCCL_CONFIG_UNDEF_INT, /* minCTAs */ \
  NCCL_CONFIG_UNDEF_INT, /* maxCTAs */ \
  NCCL_CONFIG_UNDEF_PTR, /* netName */ \
  NCCL_CONFIG_UNDEF_INT, /* splitShare */ \
  NCCL_CONFIG_UNDEF_INT, /* trafficClass */ \
  NCCL_CONFIG_UNDEF_PTR, /* commName */ \
  NCCL_CONFIG_UNDEF_INT, /* collnetEnable */ \
  NCCL_CONFIG_UNDEF_INT, /* CTAPolicy */ \
  NCCL_CONFIG_UNDEF_INT, /* shrinkShare */ \
  NCCL_CONFIG_UNDEF_INT, /* nvlsCTAs */ \
  NCCL_CONFIG_UNDEF_INT, /* nChannelsPerNetPeer */ \
  NCCL_CONFIG_UNDEF_INT  /* nvlinkCentricSched */ \
}

typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  ncclNumOps = 5,
  ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;

typedef enum {
  ncclInt8 = 0, ncclChar = 0,
  ncclUint8 = 1,
  ncclInt32 = 2, ncclInt = 2,
  ncclUint32 = 3,
  ncclInt64 = 4,
  ncclUint64 = 5,
  ncclFloat16 = 6, ncclHalf = 6,
  ncclFloat32 = 7, ncclFloat = 7,
  ncclFloat64 = 8, ncclDouble = 8,
  ncclBfloat16 = 9,
  ncclFloat8e4m3 = 10,
  ncclFloat8e5m2 = 11,
  ncclNumTypes = 12
} ncclDataType_t;

/* Every function has a twin pncclX that a profiler interposing ncclX may call. */
#define RINGSIGHT_NCCL_API(type, name, ...) type name(__VA_ARGS__); type p##name(__VA_ARGS__)

/* Version as NCCL_VERSION_CODE. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclGetVersion, int* version);
/* An id for a new communicator: call once, hand the 128 bytes to every rank. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclGetUniqueId, ncclUniqueId* uniqueId);
RINGSIGHT_NCCL_API(const char*, ncclGetErrorString, ncclResult_t result);
/* Why a call failed: what went wrong behind comm's back, else this thread's last failed call. comm may be NULL. */
RINGSIGHT_NCCL_API(const char*, ncclGetLastError, ncclComm_t comm);

/* One rank on the current device; returns when all ranks have called it. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommInitRank, ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommInitRankConfig, ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
                   ncclConfig_t* config);
/* All ranks in this process; devlist may be NULL for devices 0 to ndev - 1. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommInitAll, ncclComm_t* comms, int ndev, const int* devlist);
/* Waits for all enqueued work. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommFinalize, ncclComm_t comm);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommDestroy, ncclComm_t comm);
/* Releases every wait and frees the communicator, whatever its peers do. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommAbort, ncclComm_t comm);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t* asyncError);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommCount, const ncclComm_t comm, int* count);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommCuDevice, const ncclComm_t comm, int* device);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommUserRank, const ncclComm_t comm, int* rank);

RINGSIGHT_NCCL_API(ncclResult_t, ncclMemAlloc, void** ptr, size_t size);
RINGSIGHT_NCCL_API(ncclResult_t, ncclMemFree, void* ptr);

/* Operations return once they are enqueued on the stream. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclAllReduce, const void* sendbuff, void* recvbuff, size_t count,
                   ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
RINGSIGHT_NCCL_API(ncclResult_t, ncclReduce, const void* sendbuff, void* recvbuff, size_t count,
                   ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
RINGSIGHT_NCCL_API(ncclResult_t, ncclBroadcast, const void* sendbuff, void* recvbuff, size_t count,
                   ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
RINGSIGHT_NCCL_API(ncclResult_t, ncclBcast, void* buff, size_t count, ncclDataType_t datatype, int root,
                   ncclComm_t comm, cudaStream_t stream);
/* recvcount elements a rank: sendbuff holds nranks times as many. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclReduceScatter, const void* sendbuff, void* recvbuff, size_t recvcount,
                   ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
/* sendcount elements a rank: recvbuff holds nranks times as many. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclAllGather, const void* sendbuff, void* recvbuff, size_t sendcount,
                   ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
/* Sends and receives that depend on each other belong into one group. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclSend, const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                   ncclComm_t comm, cudaStream_t stream);
RINGSIGHT_NCCL_API(ncclResult_t, ncclRecv, void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                   ncclComm_t comm, cudaStream_t stream);

/* Calls between the two are done together at the end; groups nest, and belong to the calling thread. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclGroupStart, void);
RINGSIGHT_NCCL_API(ncclResult_t, ncclGroupEnd, void);

#undef RINGSIGHT_NCCL_API

#ifdef __cplusplus
}
#endif
#endif

/* nccl.h: collective communication behind NCCL's ABI (2.30.7). Compiles without CUDA, as C and as C++.
 *
 * Constants, structs and signatures are those of NVIDIA's NCCL, so that programs built against either header run with
 * this library. The host side of the device API is in nccl_device.h, as in NVIDIA's NCCL.
 *
 * Copyright 2026 the ringsight authors. Licensed under the Apache License, Version 2.0. */
#ifndef NCCL_H_
#define NCCL_H_

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

/* NVIDIA's nccl.h includes these; programs rely on it. */
#if defined(__has_include)
#if __has_include(<cuda_runtime.h>)
#include <cuda_runtime.h>
#define RINGSIGHT_HAS_CUDA_RUNTIME
#if __has_include(<cuda_fp16.h>)
#include <cuda_fp16.h>
#endif
#if __has_include(<cuda_bf16.h>)
#include <cuda_bf16.h>
#endif
#endif
#endif

#define NCCL_MAJOR 2
#define NCCL_MINOR 30
#define NCCL_PATCH 7
#define NCCL_SUFFIX ""

#define NCCL_VERSION(X, Y, Z) \
  (((X) <= 2 && (Y) <= 8) ? (X) * 1000 + (Y) * 100 + (Z) : (X) * 10000 + (Y) * 100 + (Z))
#define NCCL_VERSION_CODE 23007

#ifdef __cplusplus
extern "C" {
#endif

/* A stream of ringsight.h on the host device. */
#ifdef RINGSIGHT_HAS_CUDA_RUNTIME
#undef RINGSIGHT_HAS_CUDA_RUNTIME
#else
typedef struct CUstream_st* cudaStream_t;
#endif

/* One rank of a communicator. */
typedef struct ncclComm* ncclComm_t;
/* A buffer registered with every rank of a communicator. */
typedef struct ncclWindow_vidmem* ncclWindow_t;
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
  /* Never given. */
  ncclTimeout = 8,
  ncclNumResults = 9
} ncclResult_t;

/* In the structs that a program fills. */
#define NCCL_API_MAGIC 0xcafebeef

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_SPLIT_NOCOLOR -1
#define NCCL_UNDEF_FLOAT -1.0f

/* Flags of ncclCommWindowRegister, and the alignment of its buffers. */
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_STRICT_ORDERING 0x02
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096

/* Flags of ncclCommShrink: wait for the parent's work, or end it first. */
#define NCCL_SHRINK_DEFAULT 0x00
#define NCCL_SHRINK_ABORT 0x01

/* Flags of ncclCommRevoke. */
#define NCCL_REVOKE_DEFAULT 0x00

/* Flags of ncclCommSuspend. */
#define NCCL_SUSPEND_MEM 0x01

/* Policies for ncclConfig_t.CTAPolicy: a sum. */
#define NCCL_CTA_POLICY_DEFAULT 0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
#define NCCL_CTA_POLICY_ZERO 0x02

/* Choices for one communicator. Always begin with NCCL_CONFIG_INITIALIZER. */
typedef struct ncclConfig_v23000 {
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
  int graphUsageMode;
  int numRmaCtx;
  int maxP2pPeers;
  int graphStreamOrdering;
} ncclConfig_t;

#define NCCL_CONFIG_INITIALIZER { \
  sizeof(ncclConfig_t), /* size */ \
  NCCL_API_MAGIC, /* magic */ \
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
  NCCL_CONFIG_UNDEF_INT, /* nvlinkCentricSched */ \
  NCCL_CONFIG_UNDEF_INT, /* graphUsageMode */ \
  NCCL_CONFIG_UNDEF_INT, /* numRmaCtx */ \
  NCCL_CONFIG_UNDEF_INT, /* maxP2pPeers */ \
  NCCL_CONFIG_UNDEF_INT  /* graphStreamOrdering */ \
}

/* What ncclGroupSimulateEnd tells. Always begin with NCCL_SIM_INFO_INITIALIZER. */
typedef struct ncclSimInfo_v22200 {
  size_t size;
  unsigned int magic;
  unsigned int version;
  /* Microseconds. */
  float estimatedTime;
} ncclSimInfo_t;

#define NCCL_SIM_INFO_INITIALIZER { \
  sizeof(ncclSimInfo_t), /* size */ \
  0x74685283, /* magic */ \
  NCCL_VERSION_CODE, /* version */ \
  NCCL_UNDEF_FLOAT /* estimatedTime */ \
}

typedef enum {
  ncclSum = 0,
  ncclProd = 1,
  ncclMax = 2,
  ncclMin = 3,
  ncclAvg = 4,
  /* From here on: what ncclRedOpCreatePreMulSum made. */
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

/* When the scalar of a reduction is read: on the device while the operation runs, or before the call returns. */
typedef enum {
  ncclScalarDevice = 0,
  ncclScalarHostImmediate = 1
} ncclScalarResidence_t;

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
/* With nId unique ids, so that as many ranks share the work of bringing all together. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommInitRankScalable, ncclComm_t* newcomm, int nranks, int myrank, int nId,
                   ncclUniqueId* commIds, ncclConfig_t* config);
/* All ranks in this process; devlist may be NULL for devices 0 to ndev - 1. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommInitAll, ncclComm_t* comms, int ndev, const int* devlist);
/* Ranks of the same colour make a communicator, ordered by key, then rank; every rank of comm calls it.
 * NCCL_SPLIT_NOCOLOR joins none and receives NULL. config may be NULL: as the parent. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t* newcomm,
                   ncclConfig_t* config);
/* The ranks that are not in excludeRanksList make a communicator, without the others' help. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommShrink, ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                   ncclComm_t* newcomm, ncclConfig_t* config, int shrinkFlags);
/* An id for the new ranks of the next ncclCommGrow of comm, which uses it up. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommGetUniqueId, ncclComm_t comm, ncclUniqueId* uniqueId);
/* The ranks of comm, which keep their numbers and pass rank -1, and new ranks, which pass NULL for comm, make a communicator
 * of nRanks. New ranks and the rank that made uniqueId pass it; the others may pass NULL. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommGrow, ncclComm_t comm, int nRanks, const ncclUniqueId* uniqueId, int rank,
                   ncclComm_t* newcomm, ncclConfig_t* config);
/* Ends the work of comm; it can then only be shrunk, split, queried and destroyed. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommRevoke, ncclComm_t comm, int revokeFlags);
/* Waits for all enqueued work. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommFinalize, ncclComm_t comm);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommDestroy, ncclComm_t comm);
/* Releases every wait and frees the communicator, whatever its peers do. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommAbort, ncclComm_t comm);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t* asyncError);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommCount, const ncclComm_t comm, int* count);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommCuDevice, const ncclComm_t comm, int* device);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommUserRank, const ncclComm_t comm, int* rank);

/* Both return ncclInvalidUsage: a communicator keeps its memory. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommSuspend, ncclComm_t comm, int flags);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommResume, ncclComm_t comm);
/* Bytes of the device's memory that comm holds for itself. */
typedef enum {
  ncclStatGpuMemSuspend = 0,
  ncclStatGpuMemSuspended = 1,
  ncclStatGpuMemPersist = 2,
  ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommMemStats, ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value);

RINGSIGHT_NCCL_API(ncclResult_t, ncclMemAlloc, void** ptr, size_t size);
RINGSIGHT_NCCL_API(ncclResult_t, ncclMemFree, void* ptr);
/* Makes a buffer known to this rank, or (windows) to all ranks at once: every rank calls it. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommRegister, const ncclComm_t comm, void* buff, size_t size, void** handle);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommDeregister, const ncclComm_t comm, void* handle);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommWindowRegister, ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win,
                   int winFlags);
RINGSIGHT_NCCL_API(ncclResult_t, ncclCommWindowDeregister, ncclComm_t comm, ncclWindow_t win);
/* What this rank registered. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclWinGetUserPtr, ncclComm_t comm, ncclWindow_t win, void** outUserPtr);

/* A sum whose inputs are first multiplied by *scalar, of the given type; for operations on comm. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclRedOpCreatePreMulSum, ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                   ncclScalarResidence_t residence, ncclComm_t comm);
/* Operations already called with it are not affected. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclRedOpDestroy, ncclRedOp_t op, ncclComm_t comm);

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
/* Block r of sendbuff goes to rank r, whose block it becomes by this rank's number; count elements a block. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclAlltoAll, const void* sendbuff, void* recvbuff, size_t count,
                   ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
/* count elements a rank: recvbuff of root holds nranks times as many. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclGather, const void* sendbuff, void* recvbuff, size_t count,
                   ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
/* count elements a rank: sendbuff of root holds nranks times as many. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclScatter, const void* sendbuff, void* recvbuff, size_t count,
                   ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream);
/* Sends and receives that depend on each other belong into one group. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclSend, const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                   ncclComm_t comm, cudaStream_t stream);
RINGSIGHT_NCCL_API(ncclResult_t, ncclRecv, void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                   ncclComm_t comm, cudaStream_t stream);

/* One-sided operations: all three return ncclInvalidUsage. */
typedef struct {
  int opCnt;
  int peer;
  int sigIdx;
  int ctx;
} ncclWaitSignalDesc_t;
RINGSIGHT_NCCL_API(ncclResult_t, ncclPutSignal, const void* localbuff, size_t count, ncclDataType_t datatype, int peer,
                   ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                   cudaStream_t stream);
RINGSIGHT_NCCL_API(ncclResult_t, ncclSignal, int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm,
                   cudaStream_t stream);
RINGSIGHT_NCCL_API(ncclResult_t, ncclWaitSignal, int nDesc, ncclWaitSignalDesc_t* signalDescs, ncclComm_t comm,
                   cudaStream_t stream);

/* Calls between the two are done together at the end; groups nest, and belong to the calling thread. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclGroupStart, void);
RINGSIGHT_NCCL_API(ncclResult_t, ncclGroupEnd, void);
/* Ends the group without doing what it collected, and estimates how long that would have taken. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclGroupSimulateEnd, ncclSimInfo_t* simInfo);

/* Reads NCCL_DEBUG and the like again. */
RINGSIGHT_NCCL_API(void, ncclResetDebugInit, void);

/* The library's parameters: NCCL's variables that it reads. A handle is never freed; a text stays until the thread's next call of
 * the same function. Numbers are int64_t. */
typedef struct ncclParamHandle* ncclParamHandle_t;
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamBind, ncclParamHandle_t* out, const char* key);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetI8, ncclParamHandle_t h, int8_t* out);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetI16, ncclParamHandle_t h, int16_t* out);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetI32, ncclParamHandle_t h, int32_t* out);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetI64, ncclParamHandle_t h, int64_t* out);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetU8, ncclParamHandle_t h, uint8_t* out);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetU16, ncclParamHandle_t h, uint16_t* out);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetU32, ncclParamHandle_t h, uint32_t* out);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetU64, ncclParamHandle_t h, uint64_t* out);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetStr, ncclParamHandle_t h, const char** out);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGet, ncclParamHandle_t h, void* out, int maxLen, int* len);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetParameter, const char* key, const char** value, int* valueLen);
RINGSIGHT_NCCL_API(ncclResult_t, ncclParamGetAllParameterKeys, const char*** table, int* tableLen);
/* Writes all to standard output. */
RINGSIGHT_NCCL_API(void, ncclParamDumpAll, void);

#undef RINGSIGHT_NCCL_API

#ifdef __cplusplus
}
#endif
#endif

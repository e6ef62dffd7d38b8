/* nccl_device.h: the host side of NCCL's device API (2.30.7).
 *
 * Kernels that communicate themselves are not served: ncclDevCommCreate returns ncclInvalidUsage. Functions that only
 * compute give NCCL's results, so that a program can ask and then choose another way. With NVIDIA's own nccl_device.h
 * instead of this one, programs compile and run as with this one.
 *
 * Copyright 2026 the ringsight authors. Licensed under the Apache License, Version 2.0. */
#ifndef RINGSIGHT_NCCL_DEVICE_H_
#define RINGSIGHT_NCCL_DEVICE_H_

#ifndef __cplusplus
#include <stdbool.h>
#endif
#include <stddef.h>
#include <stdint.h>

#include "nccl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The ranks (r - rank) * stride away from this one, for r from 0 to nRanks - 1. */
typedef struct ncclTeam {
  int nRanks, rank, stride;
} ncclTeam_t;

/* Never made. */
typedef struct ncclDevComm ncclDevComm_t;
typedef struct ncclDevCommRequirements ncclDevCommRequirements_t;

typedef uint32_t ncclDevResourceHandle_t;
typedef uint32_t ncclGinSignal_t;
typedef uint32_t ncclGinCounter_t;

typedef struct ncclDevResourceRequirements {
  struct ncclDevResourceRequirements* next;
  size_t bufferSize, bufferAlign;
  ncclDevResourceHandle_t* outBufferHandle;
  int ginSignalCount;
  int ginCounterCount;
  ncclGinSignal_t* outGinSignalStart;
  ncclGinCounter_t* outGinCounterStart;
} ncclDevResourceRequirements_t;

typedef struct ncclLLA2AHandle {
  ncclDevResourceHandle_t bufHandle;
  uint32_t nSlots;
} ncclLLA2AHandle_t;

typedef struct ncclLsaBarrierHandle {
  ncclDevResourceHandle_t bufHandle;
  int nBarriers;
} ncclLsaBarrierHandle_t;

typedef struct ncclGinBarrierHandle {
  ncclGinSignal_t signal0;
  ncclDevResourceHandle_t bufHandle;
} ncclGinBarrierHandle_t;

/* Of kernels that use the network. */
typedef struct ncclGinOutboxHandle ncclGinOutboxHandle_t;
typedef struct ncclGinInboxA2AHandle ncclGinInboxA2AHandle_t;

typedef struct ncclMultimemHandle {
  void* mcBasePtr;
} ncclMultimemHandle_t;

typedef enum {
  NCCL_GIN_TYPE_NONE = 0,
  NCCL_GIN_TYPE_PROXY = 2,
  NCCL_GIN_TYPE_GDAKI = 3,
  NCCL_GIN_TYPE_GPI = 4
} ncclGinType_t;

/* What a communicator can do. Always begin with NCCL_COMM_PROPERTIES_INITIALIZER. */
typedef struct ncclCommProperties {
  size_t size;
  unsigned int magic;
  unsigned int version;
  int rank;
  int nRanks;
  int cudaDev;
  /* As cudaDev. */
  int nvmlDev;
  bool deviceApiSupport;
  bool multimemSupport;
  ncclGinType_t ginType;
  int nLsaTeams;
  bool hostRmaSupport;
  ncclGinType_t railedGinType;
} ncclCommProperties_t;

#ifdef __cplusplus
#define RINGSIGHT_UNSET 0, 0, 0, 0, false, false, NCCL_GIN_TYPE_NONE, 0, false, NCCL_GIN_TYPE_NONE
#else
#define RINGSIGHT_UNSET 0, 0, 0, 0, 0, 0, NCCL_GIN_TYPE_NONE, 0, 0, NCCL_GIN_TYPE_NONE
#endif
#define NCCL_COMM_PROPERTIES_INITIALIZER { \
  sizeof(ncclCommProperties_t), /* size */ \
  NCCL_API_MAGIC, /* magic */ \
  NCCL_VERSION_CODE, /* version */ \
  RINGSIGHT_UNSET \
}

#define RINGSIGHT_NCCL_API(type, name, ...) type name(__VA_ARGS__); type p##name(__VA_ARGS__)

/* All ranks; the ranks of this rank's node; the ranks with this rank's number in their nodes. {0, 0, 0} on failure. */
RINGSIGHT_NCCL_API(ncclTeam_t, ncclTeamWorld, ncclComm_t comm);
RINGSIGHT_NCCL_API(ncclTeam_t, ncclTeamLsa, ncclComm_t comm);
RINGSIGHT_NCCL_API(ncclTeam_t, ncclTeamRail, ncclComm_t comm);
/* A rank of the team as a rank of comm, or of ncclTeamLsa(comm). -1 on failure. */
RINGSIGHT_NCCL_API(int, ncclTeamRankToWorld, ncclComm_t comm, ncclTeam_t team, int rank);
RINGSIGHT_NCCL_API(int, ncclTeamRankToLsa, ncclComm_t comm, ncclTeam_t team, int rank);

/* What barriers and all-to-alls within kernels would need. */
RINGSIGHT_NCCL_API(int, ncclLLA2ACalcSlots, int maxElts, int maxEltSize);
RINGSIGHT_NCCL_API(ncclResult_t, ncclLLA2ACreateRequirement, int nBlocks, int nSlots, ncclLLA2AHandle_t* outHandle,
                   ncclDevResourceRequirements_t* outReq);
RINGSIGHT_NCCL_API(ncclResult_t, ncclLsaBarrierCreateRequirement, ncclTeam_t team, int nBarriers,
                   ncclLsaBarrierHandle_t* outHandle, ncclDevResourceRequirements_t* outReq);
RINGSIGHT_NCCL_API(ncclResult_t, ncclGinBarrierCreateRequirement, ncclComm_t comm, ncclTeam_t team, int nBarriers,
                   ncclGinBarrierHandle_t* outHandle, ncclDevResourceRequirements_t* outReq);

/* Both return ncclInvalidUsage: kernels that use the network are not served. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclGinOutboxCreateRequirement, int nBlocks, int size_log2,
                   ncclGinOutboxHandle_t* outHandle, ncclDevResourceRequirements_t* outReq);
RINGSIGHT_NCCL_API(ncclResult_t, ncclGinInboxA2ACreateRequirement, ncclTeam_t peers, int nBlocks, int size_log2,
                   ncclGinInboxA2AHandle_t* outHandle, ncclDevResourceRequirements_t* outReq);

RINGSIGHT_NCCL_API(ncclResult_t, ncclCommQueryProperties, ncclComm_t comm, ncclCommProperties_t* props);
/* Where this rank reaches a rank's part of a window; NULL for a rank that ncclTeamLsa does not have. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclGetLsaDevicePointer, ncclWindow_t window, size_t offset, int lsaRank, void** outPtr);
RINGSIGHT_NCCL_API(ncclResult_t, ncclGetPeerDevicePointer, ncclWindow_t window, size_t offset, int peer, void** outPtr);
/* Both give NULL: nothing goes by multicast. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclGetLsaMultimemDevicePointer, ncclWindow_t window, size_t offset, void** outPtr);
RINGSIGHT_NCCL_API(ncclResult_t, ncclGetMultimemDevicePointer, ncclWindow_t window, size_t offset,
                   ncclMultimemHandle_t multimem, void** outPtr);

/* Both return ncclInvalidUsage. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclDevCommCreate, ncclComm_t comm, const ncclDevCommRequirements_t* reqs,
                   ncclDevComm_t* outDevComm);
RINGSIGHT_NCCL_API(ncclResult_t, ncclDevCommDestroy, ncclComm_t comm, const ncclDevComm_t* devComm);

#undef RINGSIGHT_NCCL_API

#ifdef __cplusplus
}
#endif
#endif

/* nccl_device.h: the host side of NCCL's device API (2.28.9).
 *
 * Kernels that communicate themselves are not served: ncclDevCommCreate returns ncclInvalidUsage. Functions that only
 * compute give NCCL's results, so that a program can ask and then choose another way. With NVIDIA's own nccl_device.h
 * instead of this one, programs compile and run as with this one.
 *
 * Copyright 2026 the ringsight authors. Licensed under the Apache License, Version 2.0. */
#ifndef RINGSIGHT_NCCL_DEVICE_H_
#define RINGSIGHT_NCCL_DEVICE_H_

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

/* Both return ncclInvalidUsage. */
RINGSIGHT_NCCL_API(ncclResult_t, ncclDevCommCreate, ncclComm_t comm, const ncclDevCommRequirements_t* reqs,
                   ncclDevComm_t* outDevComm);
RINGSIGHT_NCCL_API(ncclResult_t, ncclDevCommDestroy, ncclComm_t comm, const ncclDevComm_t* devComm);

#undef RINGSIGHT_NCCL_API

#ifdef __cplusplus
}
#endif
#endif

/* A library with the functions that a driver of the R450 series has, as far as the tests call them, and with the
   answers that a healthy GPU does not give. Structs as in nvml.h. */

#include <stddef.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, IN_USE = 19 };

typedef struct { unsigned start, size; } Placement;
typedef struct { unsigned id, p2p, slices, instances, sm, ce, dec, enc, jpeg, ofa; unsigned long long memory_mib; } GiProfile;
typedef struct { void *device; unsigned id, profile; Placement placement; } GiInfo;
typedef struct { unsigned id, slices, instances, sm, ce, dec, enc, jpeg, ofa; } CiProfile;
typedef struct { void *device, *gpu_instance; unsigned id, profile; Placement placement; } CiInfo;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned long long total, free, used; } Memory;

static char gpu, gpu_instance, compute_instance; /* their addresses are the handles */
static unsigned compute_instances;
static int stale;

int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  strncpy(version, "450.80.02", length);
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  stale = index == 1;
  *device = &gpu;
  return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
  (void)device;
  strncpy(uuid, "GPU-00000000-0000-0000-0000-000000000000", length);
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
  (void)device;
  memory->total = 40960ULL << 20;
  return SUCCESS;
}

/* Enabling: done, but not in force. Disabling: refused, but "in force". */
int nvmlDeviceSetMigMode(void *device, unsigned mode, int *activation) {
  (void)device;
  *activation = mode ? IN_USE : SUCCESS;
  return mode ? SUCCESS : NO_PERMISSION;
}

/* 1g.5gb, a profile without placements, and 7g.40gb under two indexes. */
int nvmlDeviceGetGpuInstanceProfileInfo(void *device, unsigned index, GiProfile *info) {
  (void)device;
  if (stale || index > 6)
    return INVALID_ARGUMENT;
  switch (index) {
  case 0: *info = (GiProfile){.id = 19, .slices = 1, .instances = 7, .sm = 14, .ce = 1, .memory_mib = 4864}; return SUCCESS;
  case 1: *info = (GiProfile){.id = 14, .slices = 2, .instances = 3, .memory_mib = 9856}; return SUCCESS;
  case 4:
  case 5: *info = (GiProfile){.id = 0, .slices = 7, .instances = 1, .sm = 98, .dec = 5, .memory_mib = 40192}; return SUCCESS;
  default: return NOT_SUPPORTED;
  }
}

/* The first version of the call; not sorted. */
int nvmlDeviceGetGpuInstancePossiblePlacements(void *device, unsigned profile, Placement *placements, unsigned *count) {
  (void)device;
  if (profile == 14)
    return NOT_SUPPORTED;
  unsigned wanted = profile == 19 ? 7 : 1;
  if (placements) {
    if (*count < wanted)
      return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < wanted; i++)
      placements[i] = profile == 19 ? (Placement){6 - i, 1} : (Placement){0, 8};
  }
  *count = wanted;
  return SUCCESS;
}

/* Two are listed, but the second is gone when it is looked at. */
int nvmlDeviceGetGpuInstances(void *device, unsigned profile, void **handles, unsigned *count) {
  (void)device;
  *count = 0;
  if (profile == 14)
    return NOT_SUPPORTED;
  if (profile == 19) {
    handles[(*count)++] = &gpu_instance;
    handles[(*count)++] = NULL;
  }
  return SUCCESS;
}

int nvmlDeviceGetGpuInstanceById(void *device, unsigned id, void **handle) {
  (void)device;
  *handle = &gpu_instance;
  return id == 9 ? SUCCESS : NOT_FOUND;
}

int nvmlGpuInstanceGetInfo(void *handle, GiInfo *info) {
  *info = (GiInfo){&gpu, 9, 19, {2, 1}};
  return handle ? SUCCESS : INVALID_ARGUMENT;
}

/* 1_SLICE and its shadow 1_SLICE_REV1, which cannot be created. */
int nvmlGpuInstanceGetComputeInstanceProfileInfo(void *handle, unsigned index, unsigned engines, CiProfile *info) {
  (void)handle, (void)engines;
  *info = (CiProfile){.id = index, .slices = 1, .instances = 1};
  return index > 7 ? INVALID_ARGUMENT : index == 0 || index == 7 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlGpuInstanceCreateComputeInstance(void *handle, unsigned profile, void **created) {
  (void)handle;
  if (profile != 0)
    return NOT_SUPPORTED;
  compute_instances++;
  *created = &compute_instance;
  return SUCCESS;
}

int nvmlGpuInstanceGetComputeInstances(void *handle, unsigned profile, void **handles, unsigned *count) {
  (void)handle, (void)profile;
  *count = compute_instances;
  if (compute_instances)
    handles[0] = &compute_instance;
  return SUCCESS;
}

/* The handle is the parent's, as nvml.h has it, and not the MIG device's. */
int nvmlComputeInstanceGetInfo_v2(void *handle, CiInfo *info) {
  (void)handle;
  *info = (CiInfo){&gpu, &gpu_instance, 0, 0, {0, 1}};
  return SUCCESS;
}

int nvmlComputeInstanceDestroy(void *handle) {
  (void)handle;
  compute_instances--;
  return SUCCESS;
}

/* More processes at each call. */
int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned *count, Process *processes) {
  static unsigned running = 40;
  unsigned capacity = *count;
  (void)device;
  *count = running += 30;
  if (capacity < running)
    return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < running; i++)
    processes[i] = (Process){.pid = 1000 + i, .gpu_instance = i == 0 ? 9 : 0xFFFFFFFF};
  return SUCCESS;
}

/* A double of libnvidia-ml.so.1 for tests: answers from shared memory (file named by NVML_DOUBLE_STATE) and misbehaves on request.
 *
 * Built with -DLIBRARY_VERSION=n; nvmlInit fails with a version mismatch unless the scenario's driver has the same version.
 * A symbol is left out of a build by the linker's version script, as an old driver's library lacks it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

enum {
  OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10,
  LIB_RM_VERSION_MISMATCH = 18, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999,
};

static State *state;
static int references;
static unsigned long long generation;

/* A handle is the address of one of these: it remembers which GPU and which load of the driver it is good for. */
typedef struct { int index; unsigned long long generation; } Device;
static Device devices[MAX_GPUS];

static int load(void) {
  if (state) return OK;
  const char *path = getenv("NVML_DOUBLE_STATE");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return UNKNOWN;
  void *memory = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return UNKNOWN;
  state = memory;
  return OK;
}

static void hold(volatile int *hang) {
  if (*hang == HANG_UNINTERRUPTIBLE) {
    /* the parent of a vfork sleeps in state D until the child ends; the child only watches for its release */
    pid_t child = vfork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      while (*hang) usleep(2000);
      _exit(0);
    }
    if (child > 0) waitpid(child, NULL, 0);
    return;
  }
  while (*hang) usleep(2000);
}

static int initialised(void) { return references > 0 && generation == state->generation; }

/* The start of every call of one GPU: counts it, is slow, hangs or fails as the scenario says. */
static int enter(Device *device, int feature, GpuState **out) {
  if (!state || !initialised() || !device || device->generation != generation) return UNINITIALIZED;
  GpuState *gpu = &state->gpu[device->index];
  *out = gpu;
  gpu->feature_calls[feature]++;
  if (gpu->latency_us) usleep((useconds_t)gpu->latency_us);
  if (gpu->hang && (gpu->hang_feature == EVERY_FEATURE || gpu->hang_feature == feature)) hold(&gpu->hang);
  if (gpu->fault) return gpu->fault;
  return gpu->feature_code[feature];
}

#define EXPORT __attribute__((visibility("default")))
#define ENTER(feature)                                  \
  GpuState *gpu;                                        \
  int code = enter(device, feature, &gpu);              \
  if (code != OK) return code

EXPORT int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  int code = load();
  if (code != OK) return code;
  state->init_calls++;
  hold(&state->init_hang);
  if (state->init_code) return state->init_code;
  if (state->driver_version != LIBRARY_VERSION) return LIB_RM_VERSION_MISMATCH;
  if (references == 0) generation = state->generation;
  references++;
  return OK;
}

EXPORT int nvmlShutdown(void) {
  if (references == 0) return UNINITIALIZED;
  references--;
  return OK;
}

EXPORT const char *nvmlErrorString(int code) { return code == OK ? "Success" : "an error of the double"; }

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
  if (!state || !initialised()) return UNINITIALIZED;
  if (state->count_code) return state->count_code;
  *count = (unsigned)state->gpu_count;
  return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
  if (!state || !initialised()) return UNINITIALIZED;
  if (index >= (unsigned)state->gpu_count) return INVALID_ARGUMENT;
  Device *device = &devices[index];
  device->index = (int)index;
  device->generation = generation;
  ENTER(F_HANDLE);
  *out = device;
  return OK;
}

EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned length) {
  if (!state || !initialised()) return UNINITIALIZED;
  if (strlen(state->driver_text) >= length) return INSUFFICIENT_SIZE;
  strcpy(out, state->driver_text);
  return OK;
}

typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
} PciInfo;

EXPORT int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *out) {
  ENTER(F_PCI);
  *out = (PciInfo){.domain = gpu->pci_domain, .bus = gpu->pci_bus, .device = gpu->pci_device};
  snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus, out->device);
  return OK;
}

/* a MIG instance is one of the states after the GPUs', and has a handle of its own */
static int parent_of(int index) {
  for (int i = 0; i < state->gpu_count; i++) {
    int first = state->gpu[i].mig_first;
    if (first && first <= index && index < first + (int)state->gpu[i].mig_room) return i;
  }
  return index;
}

EXPORT int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
  ENTER(F_MIG_MODE);
  *current = *pending = gpu->mig_mode;
  return OK;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *out) {
  ENTER(F_MIG_MODE);
  *out = gpu->mig_room;
  return OK;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out) {
  ENTER(F_MIG_HANDLE);
  if (index >= gpu->mig_room) return INVALID_ARGUMENT;
  int slot = gpu->mig_first + (int)index;
  if (state->gpu[slot].gpu_instance == NO_INSTANCE) return NOT_FOUND;
  devices[slot] = (Device){slot, generation};
  *out = &devices[slot];
  return OK;
}

EXPORT int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *out) {
  ENTER(F_GPU_INSTANCE);
  *out = gpu->gpu_instance;
  return OK;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *device, Device **out) {
  ENTER(F_HANDLE);
  *out = &devices[parent_of(device->index)];
  return OK;
}

EXPORT int nvmlDeviceGetUUID(Device *device, char *out, unsigned length) {
  ENTER(F_UUID);
  if (strlen(gpu->uuid) >= length) return INSUFFICIENT_SIZE;
  strcpy(out, gpu->uuid);
  return OK;
}

EXPORT int nvmlDeviceGetName(Device *device, char *out, unsigned length) {
  ENTER(F_NAME);
  if (strlen(gpu->name) >= length) return INSUFFICIENT_SIZE;
  strcpy(out, gpu->name);
  return OK;
}

#define NUMBER(symbol, feature, type, expression) \
  EXPORT int symbol(Device *device, type *out) {  \
    ENTER(feature);                               \
    *out = (type)(expression);                    \
    return OK;                                    \
  }

NUMBER(nvmlDeviceGetBrand, F_BRAND, int, gpu->brand)
NUMBER(nvmlDeviceGetPersistenceMode, F_PERSISTENCE, unsigned, gpu->persistence)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, F_EVENT_REASONS, unsigned long long, gpu->reasons)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, F_THROTTLE_REASONS, unsigned long long, gpu->reasons)
NUMBER(nvmlDeviceGetPerformanceState, F_PSTATE, unsigned, gpu->pstate)
NUMBER(nvmlDeviceGetFanSpeed, F_FAN, unsigned, gpu->fan)
NUMBER(nvmlDeviceGetPowerUsage, F_POWER_USAGE, unsigned, gpu->power_mw)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, F_ENFORCED_LIMIT, unsigned, gpu->enforced_mw)
NUMBER(nvmlDeviceGetPowerManagementLimit, F_REQUESTED_LIMIT, unsigned, gpu->requested_mw)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, F_DEFAULT_LIMIT, unsigned, gpu->default_mw)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, F_ENERGY, unsigned long long, gpu->energy_mj)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, F_PCIE_GEN, unsigned, gpu->pcie_gen)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, F_PCIE_GEN_MAX, unsigned, gpu->pcie_gen_max)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, F_PCIE_WIDTH, unsigned, gpu->pcie_width)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, F_PCIE_WIDTH_MAX, unsigned, gpu->pcie_width_max)
NUMBER(nvmlDeviceGetPcieReplayCounter, F_PCIE_REPLAYS, unsigned, gpu->pcie_replays)

typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version, sensor; int celsius; } TemperatureV;
typedef struct { unsigned version; int celsius; } Margin;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned version, supported; } GpmSupport;

EXPORT int nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) {
  ENTER(F_UTILIZATION);
  out->gpu = gpu->gpu_util;
  out->memory = gpu->mem_util;
  return OK;
}

EXPORT int nvmlDeviceGetClockInfo(Device *device, unsigned kind, unsigned *out) {
  ENTER(F_CLOCK);
  if (kind > 3) return INVALID_ARGUMENT;
  *out = gpu->clock[kind];
  return OK;
}

EXPORT int nvmlDeviceGetMaxClockInfo(Device *device, unsigned kind, unsigned *out) {
  ENTER(F_CLOCK_MAX);
  if (kind > 3) return INVALID_ARGUMENT;
  *out = gpu->clock_max[kind];
  return OK;
}

EXPORT int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *out) {
  ENTER(F_TEMPERATURE);
  if (sensor != 0) return INVALID_ARGUMENT;
  *out = (unsigned)gpu->temperature;
  return OK;
}

EXPORT int nvmlDeviceGetTemperatureV(Device *device, TemperatureV *io) {
  ENTER(F_TEMPERATURE_V);
  if (io->version != 0x100000C) return ARGUMENT_VERSION_MISMATCH;
  if (io->sensor != 0) return INVALID_ARGUMENT;
  io->celsius = gpu->temperature;
  return OK;
}

EXPORT int nvmlDeviceGetMarginTemperature(Device *device, Margin *io) {
  ENTER(F_MARGIN);
  if (io->version != 0x1000008) return ARGUMENT_VERSION_MISMATCH;
  io->celsius = gpu->margin;
  return OK;
}

EXPORT int nvmlDeviceGetTemperatureThreshold(Device *device, unsigned kind, unsigned *out) {
  ENTER(F_THRESHOLD);
  if (kind > 7) return INVALID_ARGUMENT;
  if (gpu->threshold_code[kind]) return gpu->threshold_code[kind];
  *out = gpu->threshold[kind];
  return OK;
}

EXPORT int nvmlDeviceGetFanSpeed_v2(Device *device, unsigned fan, unsigned *out) {
  ENTER(F_FAN_V2);
  if (fan != 0) return INVALID_ARGUMENT;
  *out = gpu->fan;
  return OK;
}

/* the first version counts the driver's own reserve as used, the second tells it apart */
EXPORT int nvmlDeviceGetMemoryInfo(Device *device, Memory *out) {
  ENTER(F_MEMORY);
  out->total = gpu->mem_total;
  out->used = gpu->mem_used + gpu->mem_reserved;
  out->free = out->total - out->used;
  return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *io) {
  ENTER(F_MEMORY_V2);
  if (io->version != 0x02000028) return ARGUMENT_VERSION_MISMATCH;
  io->total = gpu->mem_total;
  io->reserved = gpu->mem_reserved;
  io->used = gpu->mem_used;
  io->free = io->total - io->used - io->reserved;
  return OK;
}

EXPORT int nvmlDeviceGetPcieThroughput(Device *device, unsigned counter, unsigned *out) {
  ENTER(F_PCIE_THROUGHPUT);
  if (counter > 1) return INVALID_ARGUMENT;
  usleep((useconds_t)state->pcie_sleep_us);
  *out = counter == 0 ? gpu->pcie_tx_kib : gpu->pcie_rx_kib;
  return OK;
}

EXPORT int nvmlDeviceGetTotalEccErrors(Device *device, unsigned kind, unsigned counter, unsigned long long *out) {
  ENTER(F_ECC);
  if (kind > 1 || counter > 1) return INVALID_ARGUMENT;
  /* the aggregate differs from the count since the reset, so that asking for the wrong one shows */
  *out = (kind == 0 ? gpu->ecc_corrected : gpu->ecc_uncorrected) + (counter == 1 ? 100000 : 0);
  return OK;
}

EXPORT int nvmlDeviceGetRemappedRows(
    Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  ENTER(F_REMAPPED_ROWS);
  *corrected = gpu->remap_corrected;
  *uncorrected = gpu->remap_uncorrected;
  *pending = gpu->remap_pending;
  *failed = gpu->remap_failed;
  return OK;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

static int processes(GpuState *gpu, unsigned *count, Process *out) {
  unsigned room = *count;
  *count = gpu->process_count;
  if (gpu->process_count == 0) return OK;
  if (!out || room < gpu->process_count) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < gpu->process_count; i++)
    out[i] = (Process){gpu->pids[i], ~0ULL, ~0U, ~0U};
  return OK;
}

typedef struct { Process process; unsigned long long more; } LongerProcess;

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *out) {
  ENTER(F_PROCESSES_V3);
  if (gpu->process_layout == 1 && out && *count * sizeof(Process) >= gpu->process_count * sizeof(LongerProcess)) {
    *count = gpu->process_count;
    for (unsigned i = 0; i < gpu->process_count; i++)
      ((LongerProcess *)(void *)out)[i] = (LongerProcess){{gpu->pids[i], 1ULL << 30, ~0U, ~0U}, 0};
    return OK;
  }
  return processes(gpu, count, out);
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(Device *device, unsigned *count, Process *out) {
  ENTER(F_PROCESSES_V2);
  return processes(gpu, count, out);
}

typedef struct {
  unsigned id, scope;
  long long timestamp, latency_us;
  unsigned type;
  int code;
  unsigned long long bits;
} FieldValue;

EXPORT int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
  ENTER(F_FIELD_VALUES);
  for (int i = 0; i < count && gpu->field_strict; i++)
    if (values[i].id >= MAX_FIELDS || gpu->field_code[values[i].id] == INVALID_ARGUMENT) return INVALID_ARGUMENT;
  for (int i = 0; i < count; i++) {
    FieldValue *value = &values[i];
    if (value->id >= MAX_FIELDS) {
      value->code = INVALID_ARGUMENT;
      continue;
    }
    if (value->scope == 1) {
      value->bits = value->id == 185 ? gpu->module_average_mw : value->id == 186 ? gpu->module_instant_mw : 0;
      value->code = value->bits ? OK : NOT_SUPPORTED;
      value->type = 1;
      continue;
    }
    value->code = gpu->field_code[value->id];
    if (value->code != OK) continue;
    value->type = (unsigned)gpu->field_type[value->id];
    value->bits = gpu->field_bits[value->id];
  }
  return OK;
}

/* events: a set starts at the events that come after its creation */
typedef struct { unsigned long long next; int registered[MAX_GPUS]; } EventSet;

EXPORT int nvmlEventSetCreate(EventSet **out) {
  if (!state || !initialised()) return UNINITIALIZED;
  *out = calloc(1, sizeof(EventSet));
  (*out)->next = state->xid_head;
  return OK;
}

EXPORT int nvmlEventSetFree(EventSet *set) {
  free(set);
  return OK;
}

EXPORT int nvmlDeviceRegisterEvents(Device *device, unsigned long long kinds, EventSet *set) {
  ENTER(F_REGISTER_EVENTS);
  if (kinds != 8) return NOT_SUPPORTED;
  set->registered[device->index] = 1;
  return OK;
}

typedef struct { Device *device; unsigned long long kind, data; unsigned gpu_instance, compute_instance; } EventData;

EXPORT int nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms) {
  if (!state || !initialised()) return UNINITIALIZED;
  for (;;) {
    while (set->next < state->xid_head) {
      unsigned slot = (unsigned)(set->next++ % MAX_XIDS);
      int index = state->xid_gpu[slot];
      if (!set->registered[parent_of(index)]) continue;
      *out = (EventData){&devices[index], state->xid_type[slot], state->xid_code[slot], ~0U, ~0U};
      return OK;
    }
    if (timeout_ms == 0) return TIMEOUT;
    usleep(1000);
    timeout_ms--;
  }
}

/* GPM: a sample remembers what the GPU did when it was taken, a pair gives the mean of the two */
typedef struct { int index, taken; double seconds, sm, tensor, dram, graphics; } GpmSample;

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

EXPORT int nvmlGpmQueryDeviceSupport(Device *device, GpmSupport *io) {
  ENTER(F_GPM_SUPPORT);
  if (io->version != 1) return ARGUMENT_VERSION_MISMATCH;
  io->supported = gpu->gpm_supported;
  return OK;
}

EXPORT int nvmlGpmSampleAlloc(GpmSample **out) {
  *out = calloc(1, sizeof(GpmSample));
  return OK;
}

EXPORT int nvmlGpmSampleFree(GpmSample *sample) {
  free(sample);
  return OK;
}

EXPORT int nvmlGpmSampleGet(Device *device, GpmSample *sample) {
  ENTER(F_GPM_SAMPLE);
  *sample = (GpmSample){device->index, 1, seconds(), gpu->gpm_sm, gpu->gpm_tensor, gpu->gpm_dram, gpu->gpm_graphics};
  return OK;
}

EXPORT int nvmlGpmMigSampleGet(Device *device, unsigned instance, GpmSample *sample) {
  ENTER(F_GPM_MIG_SAMPLE);
  for (unsigned i = 0; i < gpu->mig_room; i++) {
    GpuState *part = &state->gpu[gpu->mig_first + (int)i];
    if (part->gpu_instance != instance) continue;
    int slot = gpu->mig_first + (int)i;
    *sample = (GpmSample){slot, 1, seconds(), part->gpm_sm, part->gpm_tensor, part->gpm_dram, part->gpm_graphics};
    return OK;
  }
  return INVALID_ARGUMENT;
}

typedef struct {
  unsigned id;
  int code;
  double value;
  char *short_name, *long_name, *unit;
} GpmMetric;

typedef struct {
  unsigned version, count;
  GpmSample *older, *newer;
  GpmMetric metrics[477];
} GpmMetricsGet;

EXPORT int nvmlGpmMetricsGet(GpmMetricsGet *io) {
  if (io->version != 1) return ARGUMENT_VERSION_MISMATCH;
  GpmSample *a = io->older, *b = io->newer;
  if (!a || !b || !a->taken || !b->taken || a->index != b->index || b->seconds - a->seconds < 0.1) return INVALID_ARGUMENT;
  GpuState *gpu = &state->gpu[a->index];
  gpu->feature_calls[F_GPM_METRICS]++;
  if (gpu->feature_code[F_GPM_METRICS]) return gpu->feature_code[F_GPM_METRICS];
  for (unsigned i = 0; i < io->count; i++) {
    GpmMetric *metric = &io->metrics[i];
    metric->code = gpu->gpm_code;
    switch (metric->id) {
      case 1: metric->value = (a->graphics + b->graphics) / 2; break;
      case 2: metric->value = (a->sm + b->sm) / 2; break;
      case 5: metric->value = (a->tensor + b->tensor) / 2; break;
      case 10: metric->value = (a->dram + b->dram) / 2; break;
      default: metric->code = NOT_SUPPORTED;
    }
  }
  return OK;
}

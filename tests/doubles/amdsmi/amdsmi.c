/* A double of libamd_smi.so for tests: answers from shared memory (file named by AMDSMI_DOUBLE_STATE) and misbehaves on request.
 *
 * A handle is the address of a GPU's place in `handles`; a GPU has a socket of its own, with the same handle.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "state.h"

enum { OK = 0, INVAL = 1, NOT_SUPPORTED = 2, NOT_INIT = 32, FILE_ERROR = 14, VRAM = 0, GFX = 0, MEM = 4, UMC = 1, GFX_BLOCK = 4 };

static State *state;
static unsigned long long generation;
static int is_initialised;
static char handles[MAX_GPUS];

static void nap(long us) {
  struct timespec time = {us / 1000000, us % 1000000 * 1000};
  nanosleep(&time, NULL);
}

static int load(void) {
  if (state) return OK;
  const char *path = getenv("AMDSMI_DOUBLE_STATE");
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return FILE_ERROR;
  void *memory = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return FILE_ERROR;
  state = memory;
  return OK;
}

static int is_ready(void) { return state && is_initialised && generation == state->generation; }

/* The GPU of a handle, after what every call does: it is counted, waits, hangs and fails as the scenario says. */
static GpuState *called(void *handle, int feature, int *code) {
  long index = (char *)handle - handles;
  if (!is_ready()) { *code = NOT_INIT; return NULL; }
  if (index < 0 || index >= state->gpu_count) { *code = INVAL; return NULL; }
  GpuState *gpu = &state->gpu[index];
  __atomic_fetch_add(&gpu->feature_calls[feature], 1, __ATOMIC_SEQ_CST);
  if (gpu->latency_us) nap(gpu->latency_us);
  volatile int *hang = &gpu->hang;
  while (*hang && (gpu->hang_feature == EVERY_FEATURE || gpu->hang_feature == feature)) nap(2000);
  *code = gpu->fault ? gpu->fault : gpu->feature_code[feature];
  return *code ? NULL : gpu;
}

#define CALLED(feature) \
  int code; \
  GpuState *gpu = called(handle, feature, &code); \
  if (!gpu) return code

/* A function that hands out one structure. */
#define HANDS_OUT(feature, member) \
  CALLED(feature); \
  memcpy(out, gpu->member, sizeof gpu->member); \
  return OK

int amdsmi_init(uint64_t flags) {
  int code = load();
  if (code) return code;
  state->init_calls++;
  if (state->init_crash) raise(SIGSEGV);
  volatile int *hang = &state->init_hang;
  while (*hang) nap(2000);
  if (state->init_code) return state->init_code;
  generation = state->generation;
  is_initialised = 1;
  return OK;
}

int amdsmi_shut_down(void) {
  is_initialised = 0;
  return OK;
}

int amdsmi_get_socket_handles(uint32_t *count, void **sockets) {
  if (!is_ready()) return NOT_INIT;
  if (sockets)
    for (uint32_t i = 0; i < *count; i++) sockets[i] = handles + i;
  *count = state->gpu_count;
  return OK;
}

int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **processors) {
  if (!is_ready()) return NOT_INIT;
  if (processors) processors[0] = socket;
  *count = 1;
  return OK;
}

int amdsmi_get_gpu_device_bdf(void *handle, uint64_t *out) {
  CALLED(F_BDF);
  *out = gpu->bdf;
  return OK;
}

int amdsmi_get_gpu_device_uuid(void *handle, uint32_t *length, char *out) {
  CALLED(F_UUID);
  strncpy(out, gpu->uuid, *length);
  return OK;
}

int amdsmi_get_gpu_asic_info(void *handle, void *out) { HANDS_OUT(F_ASIC, asic); }
int amdsmi_get_gpu_driver_info(void *handle, void *out) { HANDS_OUT(F_DRIVER, driver); }
int amdsmi_get_gpu_activity(void *handle, void *out) { HANDS_OUT(F_ACTIVITY, activity); }
int amdsmi_get_gpu_vram_usage(void *handle, void *out) { HANDS_OUT(F_VRAM_USAGE, vram_usage); }
int amdsmi_get_power_info(void *handle, void *out) { HANDS_OUT(F_POWER, power); }
int amdsmi_get_gpu_metrics_info(void *handle, void *out) { HANDS_OUT(F_METRICS, metrics); }
int amdsmi_get_pcie_info(void *handle, void *out) { HANDS_OUT(F_PCIE, pcie); }
int amdsmi_get_gpu_total_ecc_count(void *handle, void *out) { HANDS_OUT(F_TOTAL_ECC, total_ecc); }

int amdsmi_get_power_cap_info(void *handle, uint32_t sensor, void *out) {
  if (sensor) return INVAL;
  HANDS_OUT(F_POWER_CAP, power_cap);
}

int amdsmi_get_gpu_memory_total(void *handle, int kind, uint64_t *out) {
  CALLED(F_MEMORY_TOTAL);
  if (kind != VRAM) return NOT_SUPPORTED;
  *out = gpu->memory_total;
  return OK;
}

int amdsmi_get_gpu_memory_usage(void *handle, int kind, uint64_t *out) {
  CALLED(F_MEMORY_USAGE);
  if (kind != VRAM) return NOT_SUPPORTED;
  *out = gpu->memory_used;
  return OK;
}

int amdsmi_get_temp_metric(void *handle, int sensor, int metric, int64_t *out) {
  CALLED(F_TEMPERATURE);
  if (sensor < 0 || sensor >= SENSORS || metric < 0 || metric >= METRICS) return INVAL;
  *out = gpu->temperature[sensor * METRICS + metric];
  return gpu->temperature_code[sensor * METRICS + metric];
}

int amdsmi_get_energy_count(void *handle, uint64_t *energy, float *resolution, uint64_t *timestamp) {
  CALLED(F_ENERGY);
  *energy = gpu->energy;
  *resolution = gpu->energy_resolution;
  *timestamp = 1;
  return OK;
}

int amdsmi_get_clock_info(void *handle, int kind, void *out) {
  if (kind != GFX && kind != MEM) return NOT_SUPPORTED;
  CALLED(F_CLOCK);
  memcpy(out, kind == GFX ? gpu->clock_gfx : gpu->clock_mem, sizeof gpu->clock_gfx);
  return OK;
}

int amdsmi_get_gpu_pci_replay_counter(void *handle, uint64_t *out) {
  CALLED(F_REPLAYS);
  *out = gpu->replays;
  return OK;
}

int amdsmi_get_gpu_ecc_count(void *handle, int block, void *out) {
  CALLED(F_BLOCK_ECC);
  if (block != UMC && block != GFX_BLOCK) return NOT_SUPPORTED;
  memcpy(out, block == UMC ? gpu->umc_ecc : gpu->gfx_ecc, sizeof gpu->umc_ecc);
  return OK;
}

int amdsmi_get_gpu_process_list(void *handle, uint32_t *most, void *out) {
  CALLED(F_PROCESSES);
  uint32_t told = gpu->process_count < *most ? gpu->process_count : *most;
  if (told > MAX_PROCESSES) told = MAX_PROCESSES;
  memcpy(out, gpu->processes, (size_t)told * PROCESS_BYTES);
  *most = told;
  return OK;
}

/* Two that sleep: nobody who reads once a second may call them. */
int amdsmi_get_violation_status(void *handle, void *out) {
  CALLED(F_VIOLATION_STATUS);
  (void)gpu;
  nap(100000);
  return NOT_SUPPORTED;
}

int amdsmi_get_gpu_pci_throughput(void *handle, uint64_t *sent, uint64_t *received, uint64_t *largest) {
  CALLED(F_PCI_THROUGHPUT);
  (void)gpu;
  nap(1000000);
  return NOT_SUPPORTED;
}

// What the driver says about this machine, as plain C for ctypes.
//
// Each function returns what Guard in failure.h says.

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "driver.h"
#include "failure.h"

namespace k3jax {
namespace {

cuda::Device GetDevice(int ordinal) {
  cuda::Device device;
  cuda::Check(cuda::GetDriver().cuDeviceGet(&device, ordinal), Concat("finding device ", ordinal));
  return device;
}

int Query(cuda::Device device, cuda::DeviceAttribute attribute, const char* what) {
  int value = 0;
  cuda::Check(cuda::GetDriver().cuDeviceGetAttribute(&value, attribute, device),
              Concat("asking for the ", what));
  return value;
}

}  // namespace
}  // namespace k3jax

extern "C" {

// Mirrored by the ctypes.Structure in k3jax/runtime/library.py.
struct k3jax_device_facts {
  char name[128];
  int32_t capability_major;
  int32_t capability_minor;
  int32_t multiprocessors;
  int32_t l2_bytes;
  int32_t shared_bytes_opt_in;
  int32_t multicast_supported;  // reported only: nothing in this library uses multicast
};

const char* k3jax_driver_version(int32_t* version) {
  return k3jax::Guard([&] {
    k3jax::cuda::Check(k3jax::cuda::GetDriver().cuDriverGetVersion(version),
                       "asking for the driver's version");
  });
}

const char* k3jax_device_count(int32_t* count) {
  return k3jax::Guard([&] {
    k3jax::cuda::Check(k3jax::cuda::GetDriver().cuDeviceGetCount(count), "counting devices");
  });
}

const char* k3jax_device_query(int32_t ordinal, k3jax_device_facts* facts) {
  using namespace k3jax;
  return Guard([&] {
    cuda::Device device = GetDevice(ordinal);
    std::memset(facts, 0, sizeof(*facts));
    cuda::Check(cuda::GetDriver().cuDeviceGetName(facts->name, sizeof(facts->name) - 1, device),
                "asking for the device's name");
    facts->capability_major = Query(device, cuda::kCapabilityMajor, "compute capability");
    facts->capability_minor = Query(device, cuda::kCapabilityMinor, "compute capability");
    facts->multiprocessors = Query(device, cuda::kMultiprocessorCount, "multiprocessor count");
    facts->l2_bytes = Query(device, cuda::kL2CacheBytes, "L2 size");
    facts->shared_bytes_opt_in =
        Query(device, cuda::kSharedMemoryOptIn, "shared memory of a block");
    facts->multicast_supported = Query(device, cuda::kMulticastSupported, "multicast support");
  });
}

// matrix[i * count + j] = 1 where device i can address device j's memory, or i == j.
const char* k3jax_peer_access(int32_t count, int32_t* matrix) {
  using namespace k3jax;
  return Guard([&] {
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t j = 0; j < count; ++j) {
        int can_access = 1;
        if (i != j) {
          cuda::Check(
              cuda::GetDriver().cuDeviceCanAccessPeer(&can_access, GetDevice(i), GetDevice(j)),
              Concat("asking whether device ", i, " reaches device ", j));
        }
        matrix[i * count + j] = can_access;
      }
    }
  });
}

}  // extern "C"

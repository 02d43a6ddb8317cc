// A stand-in for the NVIDIA driver that records launches, so that the launch path runs on any CPU.
//
// It is built as a library named libcuda.so.1: once a test has opened it, the code under test finds
// it by that name. A fake cubin is "\177ELF" followed by "entry:arguments;" for each entry point.

#ifndef K3JAX_FFI_TESTS_FAKE_CUDA_H_
#define K3JAX_FFI_TESTS_FAKE_CUDA_H_

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace k3jax::testing {

struct FakeLaunch {
  std::string entry;
  int device;
  unsigned grid[3];
  unsigned block[3];
  unsigned cluster[3];
  unsigned shared_bytes;
  bool overlaps_previous;
  void* stream;
  std::vector<uint64_t> arguments;  // 8 bytes each, whatever the parameter's size
};

struct FakeCuda {
  std::vector<FakeLaunch> launches;
  std::map<std::string, int> calls;         // by driver function
  std::map<std::string, int> failures;      // driver function to the error it shall return
  std::map<std::string, int> shared_limit;  // by entry: dynamic shared memory allowed
  std::map<std::string, int> non_portable;  // by entry
  std::map<uint64_t, int> allocations;      // device memory in use, by address: its device
  int allocations_left = -1;                // after as many, device memory is used up
  int host_allocations = 0;                 // page-locked host memory in use
  std::vector<int> active_devices;          // whose primary contexts exist
  std::function<void()> after_launch;       // called after each launch, if set
  bool all_peers = false;                   // else only device 0 can address its peer
  std::atomic<int> context_depth{0};        // pushes less pops of the thread that last did either
};

// Opens the fake driver named by the one argument, or prints why not and returns null.
inline FakeCuda* OpenFakeCuda(int argc, char** argv) {
  void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) : nullptr;
  if (library == nullptr) {
    std::printf("usage: %s FAKE_LIBCUDA (%s)\n", argv[0], argc == 2 ? dlerror() : "no argument");
    return nullptr;
  }
  return reinterpret_cast<FakeCuda* (*)()>(dlsym(library, "fake_cuda"))();
}

}  // namespace k3jax::testing

#endif  // K3JAX_FFI_TESTS_FAKE_CUDA_H_

#include "fake_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "../driver.h"

using k3jax::testing::FakeCuda;
using k3jax::testing::FakeLaunch;

namespace k3jax::cuda {

struct ContextOpaque {
  int device;
};

struct KernelOpaque {
  std::string entry;
  int num_arguments;
};

struct FunctionOpaque {
  const KernelOpaque* kernel;
  int device;
};

// A fill waits, as on a device that is busy, until someone waits for its stream.
struct StreamOpaque {
  std::vector<std::function<void()>> fills;
};

struct LibraryOpaque {
  std::vector<std::unique_ptr<KernelOpaque>> kernels;
};

}  // namespace k3jax::cuda

namespace {

using namespace k3jax::cuda;

constexpr int kNumDevices = 2;
constexpr Result kNotFound = 500;
constexpr Result kInvalidImage = 200;

FakeCuda fake;
ContextOpaque contexts[kNumDevices] = {{0}, {1}};
thread_local std::vector<Context> context_stack;
std::mutex mutex;  // guards what `fake` counts, and the next one
std::deque<FunctionOpaque> functions;

// Counts the call; the error that a test asked for, or success.
Result Called(const char* function) {
  std::lock_guard<std::mutex> lock(mutex);
  ++fake.calls[function];
  auto failure = fake.failures.find(function);
  return failure == fake.failures.end() ? 0 : failure->second;
}

}  // namespace

extern "C" {

FakeCuda* fake_cuda() { return &fake; }

Result cuInit(unsigned) { return Called("cuInit"); }

Result cuGetErrorName(Result result, const char** name) {
  *name = result == kNotFound ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_FAKE";
  return 0;
}

Result cuGetErrorString(Result, const char** text) {
  *text = "as the test asked";
  return 0;
}

Result cuDriverGetVersion(int* version) {
  *version = 13010;
  return Called("cuDriverGetVersion");
}

Result cuDeviceGetCount(int* count) {
  *count = kNumDevices;
  return Called("cuDeviceGetCount");
}

Result cuDeviceGet(Device* device, int ordinal) {
  if (ordinal >= kNumDevices) return 101;
  *device = ordinal;
  return Called("cuDeviceGet");
}

Result cuDeviceGetName(char* name, int size, Device device) {
  std::snprintf(name, size, "Fake GPU %d", device);
  return Called("cuDeviceGetName");
}

Result cuDeviceGetAttribute(int* value, DeviceAttribute attribute, Device) {
  *value = 1000 + attribute;
  return Called("cuDeviceGetAttribute");
}

Result cuDeviceCanAccessPeer(int* can_access, Device device, Device) {
  *can_access = fake.all_peers || device == 0;
  return Called("cuDeviceCanAccessPeer");
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  *context = &contexts[device];
  return Called("cuDevicePrimaryCtxRetain");
}

Result cuDevicePrimaryCtxGetState(Device device, unsigned* flags, int* active) {
  *flags = 0;
  *active = std::count(fake.active_devices.begin(), fake.active_devices.end(), device) > 0;
  return Called("cuDevicePrimaryCtxGetState");
}

Result cuCtxGetCurrent(Context* context) {
  *context = context_stack.empty() ? nullptr : context_stack.back();
  return 0;
}

Result cuCtxPushCurrent_v2(Context context) {
  if (Result failure = Called("cuCtxPushCurrent")) return failure;
  context_stack.push_back(context);
  fake.context_depth = context_stack.size();
  return 0;
}

Result cuCtxPopCurrent_v2(Context* context) {
  *context = context_stack.back();
  context_stack.pop_back();
  fake.context_depth = context_stack.size();
  return Called("cuCtxPopCurrent");
}

Result cuCtxSynchronize() { return Called("cuCtxSynchronize"); }

Result cuStreamCreate(Stream* stream, unsigned) {
  if (Result failure = Called("cuStreamCreate")) return failure;
  *stream = new StreamOpaque;
  return 0;
}

Result cuStreamSynchronize(Stream stream) {
  for (const auto& fill : stream->fills) fill();
  stream->fills.clear();
  return Called("cuStreamSynchronize");
}

Result cuStreamDestroy_v2(Stream stream) {
  delete stream;
  return Called("cuStreamDestroy");
}

Result cuCtxEnablePeerAccess(Context, unsigned) { return Called("cuCtxEnablePeerAccess"); }

// Device memory is the host's.
Result cuMemAlloc_v2(uint64_t* address, size_t num_bytes) {
  if (Result failure = Called("cuMemAlloc")) return failure;
  if (fake.allocations_left == 0) return kOutOfMemory;
  --fake.allocations_left;
  if (context_stack.empty()) return 201;
  *address = reinterpret_cast<uint64_t>(std::malloc(num_bytes));
  std::lock_guard<std::mutex> lock(mutex);
  fake.allocations[*address] = context_stack.back()->device;
  return 0;
}

Result cuMemFree_v2(uint64_t address) {
  if (Result failure = Called("cuMemFree")) return failure;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = fake.allocations.find(address);
  if (found == fake.allocations.end()) return 1;
  if (context_stack.empty() || context_stack.back()->device != found->second) return 201;
  fake.allocations.erase(found);
  std::free(reinterpret_cast<void*>(address));
  return 0;
}

Result cuMemHostAlloc(void** memory, size_t num_bytes, unsigned) {
  if (Result failure = Called("cuMemHostAlloc")) return failure;
  *memory = std::malloc(num_bytes);
  ++fake.host_allocations;
  return 0;
}

Result cuMemFreeHost(void* memory) {
  std::free(memory);
  --fake.host_allocations;
  return Called("cuMemFreeHost");
}

Result cuMemHostGetDevicePointer_v2(uint64_t* address, void* memory, unsigned) {
  *address = reinterpret_cast<uint64_t>(memory);
  return Called("cuMemHostGetDevicePointer");
}

// A handle holds the address, and a mapping lies where the memory does.
Result cuIpcGetMemHandle(IpcHandle* handle, uint64_t address) {
  std::memcpy(handle->bytes, &address, sizeof(address));
  return Called("cuIpcGetMemHandle");
}

Result cuIpcOpenMemHandle_v2(uint64_t* address, IpcHandle handle, unsigned) {
  std::memcpy(address, handle.bytes, sizeof(*address));
  return Called("cuIpcOpenMemHandle");
}

Result cuMemsetD32_v2(uint64_t address, unsigned word, size_t count) {
  std::fill_n(reinterpret_cast<unsigned*>(address), count, word);
  return Called("cuMemsetD32");
}

Result cuMemsetD32Async(uint64_t address, unsigned word, size_t count, Stream stream) {
  stream->fills.push_back(
      [=] { std::fill_n(reinterpret_cast<unsigned*>(address), count, word); });
  return Called("cuMemsetD32Async");
}

Result cuMemcpyHtoD_v2(uint64_t target, const void* source, size_t num_bytes) {
  std::memcpy(reinterpret_cast<void*>(target), source, num_bytes);
  return Called("cuMemcpyHtoD");
}

Result cuMemcpyDtoH_v2(void* target, uint64_t source, size_t num_bytes) {
  std::memcpy(target, reinterpret_cast<void*>(source), num_bytes);
  return Called("cuMemcpyDtoH");
}

Result cuLibraryLoadData(Library* library, const void* image, void*, void**, unsigned, void*,
                         void**, unsigned) {
  if (Result failure = Called("cuLibraryLoadData")) return failure;
  const char* text = static_cast<const char*>(image);
  if (std::strncmp(text, "\177ELF", 4) != 0) return kInvalidImage;
  auto loaded = std::make_unique<LibraryOpaque>();
  for (const char* entry = text + 4; *entry != 0;) {
    const char* colon = std::strchr(entry, ':');
    auto kernel = std::make_unique<KernelOpaque>();
    kernel->entry.assign(entry, colon);
    kernel->num_arguments = std::atoi(colon + 1);
    loaded->kernels.push_back(std::move(kernel));
    entry = std::strchr(colon, ';') + 1;
  }
  *library = loaded.release();
  return 0;
}

Result cuLibraryGetKernel(Kernel* kernel, Library library, const char* name) {
  if (Result failure = Called("cuLibraryGetKernel")) return failure;
  for (const auto& candidate : library->kernels) {
    if (candidate->entry != name) continue;
    *kernel = candidate.get();
    return 0;
  }
  return kNotFound;
}

Result cuKernelGetFunction(Function* function, Kernel kernel) {
  if (Result failure = Called("cuKernelGetFunction")) return failure;
  if (context_stack.empty()) return 201;
  std::lock_guard<std::mutex> lock(mutex);
  functions.push_back({kernel, context_stack.back()->device});
  *function = &functions.back();
  return 0;
}

Result cuFuncLoad(Function) { return Called("cuFuncLoad"); }

Result cuFuncGetAttribute(int* value, FunctionAttribute attribute, Function function) {
  auto& values = attribute == kMaxDynamicSharedBytes ? fake.shared_limit : fake.non_portable;
  *value = values[function->kernel->entry];
  return Called("cuFuncGetAttribute");
}

Result cuFuncSetAttribute(Function function, FunctionAttribute attribute, int value) {
  auto& values = attribute == kMaxDynamicSharedBytes ? fake.shared_limit : fake.non_portable;
  values[function->kernel->entry] = value;
  return Called("cuFuncSetAttribute");
}

Result cuLaunchKernelEx(const LaunchConfig* config, Function function, void** parameters, void**) {
  if (Result failure = Called("cuLaunchKernelEx")) return failure;
  if (context_stack.empty() || context_stack.back()->device != function->device) return 201;
  FakeLaunch launch{
      function->kernel->entry, function->device, {}, {}, {1, 1, 1}, 0, false, config->stream, {}};
  std::memcpy(launch.grid, config->grid, sizeof(launch.grid));
  std::memcpy(launch.block, config->block, sizeof(launch.block));
  launch.shared_bytes = config->shared_bytes;
  for (unsigned i = 0; i < config->num_attributes; ++i) {
    const LaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == kClusterDimension) {
      std::memcpy(launch.cluster, &attribute.value.cluster, sizeof(launch.cluster));
    } else if (attribute.id == kProgrammaticStreamSerialization) {
      launch.overlaps_previous = attribute.value.programmatic_serialization_allowed != 0;
    }
  }
  for (int i = 0; i < function->kernel->num_arguments; ++i) {
    uint64_t bits;
    std::memcpy(&bits, parameters[i], sizeof(bits));
    launch.arguments.push_back(bits);
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    fake.launches.push_back(launch);
  }
  if (fake.after_launch) fake.after_launch();
  return 0;
}

}  // extern "C"

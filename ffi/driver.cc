#include "driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "failure.h"

namespace k3jax::cuda {
namespace {

template <typename FunctionPointer>
void Resolve(void* library, const char* symbol, FunctionPointer* out) {
  *out = reinterpret_cast<FunctionPointer>(dlsym(library, symbol));
  if (*out == nullptr) {
    throw Failure(
        FailureKind::kFailedPrecondition,
        Concat("the NVIDIA driver has no ", symbol, ": install a driver for CUDA 12.4 or newer"));
  }
}

Driver Open() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Failure(FailureKind::kFailedPrecondition,
                  Concat("no NVIDIA driver: ", dlerror(),
                         "; install one, or run on the CPU with JAX_PLATFORMS=cpu"));
  }
  Driver driver;
  Resolve(library, "cuInit", &driver.cuInit);
  Resolve(library, "cuGetErrorName", &driver.cuGetErrorName);
  Resolve(library, "cuGetErrorString", &driver.cuGetErrorString);
  Resolve(library, "cuDriverGetVersion", &driver.cuDriverGetVersion);
  Resolve(library, "cuDeviceGetCount", &driver.cuDeviceGetCount);
  Resolve(library, "cuDeviceGet", &driver.cuDeviceGet);
  Resolve(library, "cuDeviceGetName", &driver.cuDeviceGetName);
  Resolve(library, "cuDeviceGetAttribute", &driver.cuDeviceGetAttribute);
  Resolve(library, "cuDeviceCanAccessPeer", &driver.cuDeviceCanAccessPeer);
  Resolve(library, "cuDevicePrimaryCtxRetain", &driver.cuDevicePrimaryCtxRetain);
  Resolve(library, "cuDevicePrimaryCtxGetState", &driver.cuDevicePrimaryCtxGetState);
  Resolve(library, "cuCtxGetCurrent", &driver.cuCtxGetCurrent);
  Resolve(library, "cuCtxPushCurrent_v2", &driver.cuCtxPushCurrent);
  Resolve(library, "cuCtxPopCurrent_v2", &driver.cuCtxPopCurrent);
  Resolve(library, "cuCtxSynchronize", &driver.cuCtxSynchronize);
  Resolve(library, "cuStreamCreate", &driver.cuStreamCreate);
  Resolve(library, "cuStreamSynchronize", &driver.cuStreamSynchronize);
  Resolve(library, "cuStreamDestroy_v2", &driver.cuStreamDestroy);
  Resolve(library, "cuCtxEnablePeerAccess", &driver.cuCtxEnablePeerAccess);
  Resolve(library, "cuMemAlloc_v2", &driver.cuMemAlloc);
  Resolve(library, "cuMemFree_v2", &driver.cuMemFree);
  Resolve(library, "cuMemHostAlloc", &driver.cuMemHostAlloc);
  Resolve(library, "cuMemFreeHost", &driver.cuMemFreeHost);
  Resolve(library, "cuMemHostGetDevicePointer_v2", &driver.cuMemHostGetDevicePointer);
  Resolve(library, "cuIpcGetMemHandle", &driver.cuIpcGetMemHandle);
  Resolve(library, "cuIpcOpenMemHandle_v2", &driver.cuIpcOpenMemHandle);
  Resolve(library, "cuMemsetD32_v2", &driver.cuMemsetD32);
  Resolve(library, "cuMemsetD32Async", &driver.cuMemsetD32Async);
  Resolve(library, "cuMemcpyHtoD_v2", &driver.cuMemcpyHtoD);
  Resolve(library, "cuMemcpyDtoH_v2", &driver.cuMemcpyDtoH);
  Resolve(library, "cuLibraryLoadData", &driver.cuLibraryLoadData);
  Resolve(library, "cuLibraryGetKernel", &driver.cuLibraryGetKernel);
  Resolve(library, "cuKernelGetFunction", &driver.cuKernelGetFunction);
  Resolve(library, "cuFuncLoad", &driver.cuFuncLoad);
  Resolve(library, "cuFuncGetAttribute", &driver.cuFuncGetAttribute);
  Resolve(library, "cuFuncSetAttribute", &driver.cuFuncSetAttribute);
  Resolve(library, "cuLaunchKernelEx", &driver.cuLaunchKernelEx);
  return driver;
}

std::string Describe(const Driver& driver, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  return Concat(name ? name : "unknown error", " (", result, ": ", text ? text : "no text", ")");
}

}  // namespace

const Driver& GetDriver() {
  // A failed initialiser leaves the static uninitialised, so a later call tries again.
  static const Driver* driver = [] {
    const Driver opened = Open();
    Result result = opened.cuInit(0);
    if (result != 0) {
      throw Failure(FailureKind::kFailedPrecondition,
                    Concat("the NVIDIA driver cannot start: ", Describe(opened, result),
                           "; see that nvidia-smi lists a GPU and CUDA_VISIBLE_DEVICES names it"));
    }
    return new Driver(opened);
  }();
  return *driver;
}

void Check(Result result, std::string_view what) {
  if (result == 0) return;
  throw Failure(FailureKind::kInternal, Concat(what, " failed: ", Describe(GetDriver(), result)));
}

Context PrimaryContext(int ordinal) {
  static std::mutex mutex;
  static auto* contexts = new std::map<int, Context>();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = contexts->find(ordinal);
  if (found != contexts->end()) return found->second;
  Device device;
  Context context;
  Check(GetDriver().cuDeviceGet(&device, ordinal), Concat("cuDeviceGet of device ", ordinal));
  Check(GetDriver().cuDevicePrimaryCtxRetain(&context, device),
        Concat("cuDevicePrimaryCtxRetain of device ", ordinal));
  contexts->emplace(ordinal, context);
  return context;
}

std::vector<int> ActiveDevices() {
  const Driver& driver = GetDriver();
  int count = 0;
  Check(driver.cuDeviceGetCount(&count), "counting devices");
  std::vector<int> active_devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Device device;
    unsigned flags;
    int active = 0;
    Check(driver.cuDeviceGet(&device, ordinal), Concat("cuDeviceGet of device ", ordinal));
    Check(driver.cuDevicePrimaryCtxGetState(device, &flags, &active),
          Concat("asking whether device ", ordinal, " is in use"));
    if (active) active_devices.push_back(ordinal);
  }
  return active_devices;
}

ContextScope::ContextScope(Context wanted) {
  Context current = nullptr;
  Check(GetDriver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == wanted) return;
  Check(GetDriver().cuCtxPushCurrent(wanted), "cuCtxPushCurrent");
  pushed_ = true;
}

ContextScope::~ContextScope() {
  Context popped;
  if (pushed_) GetDriver().cuCtxPopCurrent(&popped);
}

}  // namespace k3jax::cuda

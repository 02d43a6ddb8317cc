// The handful of CUDA driver entry points this library uses, found at run time.
//
// Nothing here includes or links CUDA: libcuda.so.1 is opened on first use, so the library builds,
// loads and compiles programs on machines without a GPU. Types and numbers are the driver's ABI.

#ifndef K3JAX_FFI_DRIVER_H_
#define K3JAX_FFI_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace k3jax::cuda {

using Result = int;  // CUresult; 0 is success
using Device = int;
using Context = struct ContextOpaque*;
using Stream = struct StreamOpaque*;
using Library = struct LibraryOpaque*;
using Kernel = struct KernelOpaque*;
using Function = struct FunctionOpaque*;

constexpr Result kOutOfMemory = 2;
constexpr Result kPeerAccessUnsupported = 217;
constexpr Result kPeerAccessAlreadyEnabled = 704;

constexpr unsigned kIpcLazyEnablePeerAccess = 1;
constexpr unsigned kHostPortable = 1;
constexpr unsigned kHostDeviceMapped = 2;
constexpr unsigned kStreamNonBlocking = 1;

enum DeviceAttribute : int {
  kMultiprocessorCount = 16,
  kL2CacheBytes = 38,
  kCapabilityMajor = 75,
  kCapabilityMinor = 76,
  kSharedMemoryOptIn = 97,
  kMulticastSupported = 132,
};

enum FunctionAttribute : int {
  kMaxDynamicSharedBytes = 8,
  kNonPortableClusterAllowed = 14,
};

enum LaunchAttributeId : int {
  kClusterDimension = 4,
  kProgrammaticStreamSerialization = 6,
};

struct IpcHandle {
  char bytes[64];
};

union LaunchAttributeValue {
  char pad[64];
  struct {
    unsigned x, y, z;
  } cluster;
  int programmatic_serialization_allowed;
};

struct LaunchAttribute {
  LaunchAttributeId id;
  char pad[4];
  LaunchAttributeValue value;
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56, "driver ABI");

struct Driver {
  Result (*cuInit)(unsigned flags);
  Result (*cuGetErrorName)(Result result, const char** name);
  Result (*cuGetErrorString)(Result result, const char** text);
  Result (*cuDriverGetVersion)(int* version);
  Result (*cuDeviceGetCount)(int* count);
  Result (*cuDeviceGet)(Device* device, int ordinal);
  Result (*cuDeviceGetName)(char* name, int size, Device device);
  Result (*cuDeviceGetAttribute)(int* value, DeviceAttribute attribute, Device device);
  Result (*cuDeviceCanAccessPeer)(int* can_access, Device device, Device peer);
  Result (*cuDevicePrimaryCtxRetain)(Context* context, Device device);
  Result (*cuDevicePrimaryCtxGetState)(Device device, unsigned* flags, int* active);
  Result (*cuCtxGetCurrent)(Context* context);
  Result (*cuCtxPushCurrent)(Context context);
  Result (*cuCtxPopCurrent)(Context* context);
  Result (*cuCtxSynchronize)();
  Result (*cuStreamCreate)(Stream* stream, unsigned flags);
  Result (*cuStreamSynchronize)(Stream stream);
  Result (*cuStreamDestroy)(Stream stream);
  Result (*cuCtxEnablePeerAccess)(Context peer, unsigned flags);
  Result (*cuMemAlloc)(uint64_t* address, size_t num_bytes);
  Result (*cuMemFree)(uint64_t address);
  Result (*cuMemHostAlloc)(void** memory, size_t num_bytes, unsigned flags);
  Result (*cuMemFreeHost)(void* memory);
  Result (*cuMemHostGetDevicePointer)(uint64_t* address, void* memory, unsigned flags);
  Result (*cuIpcGetMemHandle)(IpcHandle* handle, uint64_t address);
  Result (*cuIpcOpenMemHandle)(uint64_t* address, IpcHandle handle, unsigned flags);
  Result (*cuMemsetD32)(uint64_t address, unsigned word, size_t count);
  Result (*cuMemsetD32Async)(uint64_t address, unsigned word, size_t count, Stream stream);
  Result (*cuMemcpyHtoD)(uint64_t target, const void* source, size_t num_bytes);
  Result (*cuMemcpyDtoH)(void* target, uint64_t source, size_t num_bytes);
  Result (*cuLibraryLoadData)(Library* library, const void* image, void* jit_options,
                              void** jit_values, unsigned num_jit, void* library_options,
                              void** library_values, unsigned num_library);
  Result (*cuLibraryGetKernel)(Kernel* kernel, Library library, const char* name);
  Result (*cuKernelGetFunction)(Function* function, Kernel kernel);
  Result (*cuFuncLoad)(Function function);
  Result (*cuFuncGetAttribute)(int* value, FunctionAttribute attribute, Function function);
  Result (*cuFuncSetAttribute)(Function function, FunctionAttribute attribute, int value);
  Result (*cuLaunchKernelEx)(const LaunchConfig* config, Function function, void** parameters,
                             void** extra);
};

// The driver, opened and initialised on the first call. Throws Failure where there is none.
const Driver& GetDriver();

// Throws a Failure that names `what`, the error's name and its text, unless `result` is success.
void Check(Result result, std::string_view what);

// The primary context of a device, retained once and kept: the one in which XLA runs.
Context PrimaryContext(int ordinal);

// The devices of this process whose primary context exists.
std::vector<int> ActiveDevices();

// Makes a context current for the life of the object.
class ContextScope {
 public:
  explicit ContextScope(Context context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace k3jax::cuda

#endif  // K3JAX_FFI_DRIVER_H_

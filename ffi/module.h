// Cubins on the device: each distinct one is kept and loaded once a process, whoever asks for it.

#ifndef K3JAX_FFI_MODULE_H_
#define K3JAX_FFI_MODULE_H_

#include <mutex>
#include <string>
#include <string_view>

#include "driver.h"
#include "program.h"

namespace k3jax {

class Module {
 public:
  // The module of these bytes. Modules live as long as the process: CUDA graphs and other programs
  // may hold their functions, and a layer's cubins are a few hundred kilobytes.
  static Module* Intern(std::string_view cubin);

  // The entry point as a function of the current context, its code resident on the device and its
  // shared memory and cluster size allowed. Allocates; never call it while a stream is captured.
  // `place` completes an error's sentence: for what the code was compiled and where it is loaded.
  cuda::Function Load(const KernelSpec& kernel, const std::string& place);

 private:
  explicit Module(const std::string* cubin) : cubin_(cubin) {}
  cuda::Kernel FindKernel(const KernelSpec& kernel, const std::string& place);

  const std::string* cubin_;
  std::mutex mutex_;
  cuda::Library library_ = nullptr;
};

}  // namespace k3jax

#endif  // K3JAX_FFI_MODULE_H_

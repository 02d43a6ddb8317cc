// Device memory that one custom call keeps from run to run; KeptSpec in k3jax/runtime/program.py
// says what kernels may rely on.

#ifndef K3JAX_FFI_KEPT_H_
#define K3JAX_FFI_KEPT_H_

#include <cstdint>
#include <string>

#include "driver.h"
#include "program.h"

namespace k3jax {

class KeptMemory {
 public:
  // Allocates and fills it: complete on return, whatever the streams of the device are doing. Never
  // call it while this thread captures a stream. `owner` names the call and the device in errors.
  KeptMemory(const KeptSpec& spec, cuda::Context context, const std::string& owner);

  // Waits for the device first: a run that was the last may still be on its way. A context that is
  // already gone took the memory with it.
  ~KeptMemory();
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  uint64_t address() const { return address_; }

 private:
  void Fill(const KeptSpec& spec) const;
  void Free() const;

  cuda::Context context_;
  uint64_t address_ = 0;
};

}  // namespace k3jax

#endif  // K3JAX_FFI_KEPT_H_

#include "kept.h"

#include "failure.h"

namespace k3jax {

KeptMemory::KeptMemory(const KeptSpec& spec, cuda::Context context, const std::string& owner)
    : context_(context) {
  cuda::ContextScope scope(context);
  const std::string what = Concat("allocating ", spec.num_bytes, " bytes that ", owner, " keeps");
  cuda::Result result = cuda::GetDriver().cuMemAlloc(&address_, spec.num_bytes);
  if (result == cuda::kOutOfMemory) {
    throw Failure(FailureKind::kResourceExhausted,
                  Concat(what, " failed: the device is out of memory; leave some to other users ",
                         "than XLA, as by a smaller XLA_PYTHON_CLIENT_MEM_FRACTION"));
  }
  cuda::Check(result, what);
  try {
    Fill(spec);
  } catch (const Failure&) {
    Free();
    throw;
  }
}

// On a stream of its own: the null stream's memset neither completes before a kernel on XLA's
// streams starts nor can be waited for without waiting for those kernels too.
void KeptMemory::Fill(const KeptSpec& spec) const {
  const cuda::Driver& driver = cuda::GetDriver();
  cuda::Stream stream;
  cuda::Check(driver.cuStreamCreate(&stream, cuda::kStreamNonBlocking),
              "making a stream to fill kept memory");
  cuda::Result filled = driver.cuMemsetD32Async(address_, spec.fill, spec.num_bytes / 4, stream);
  if (filled == 0) filled = driver.cuStreamSynchronize(stream);
  driver.cuStreamDestroy(stream);
  cuda::Check(filled, "filling kept memory");
}

void KeptMemory::Free() const { cuda::GetDriver().cuMemFree(address_); }

KeptMemory::~KeptMemory() {
  try {
    cuda::ContextScope scope(context_);
    cuda::GetDriver().cuCtxSynchronize();
    Free();
  } catch (const Failure&) {
    // The process is ending: no context is left to free in.
  }
}

}  // namespace k3jax

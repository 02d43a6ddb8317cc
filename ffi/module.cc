#include "module.h"

#include <memory>
#include <unordered_map>

#include "failure.h"

namespace k3jax {
namespace {

constexpr unsigned kPortableClusterBlocks = 8;  // the CUDA programming model's promise

void RaiseAttribute(cuda::Function function, cuda::FunctionAttribute attribute, int wanted,
                    const std::string& what) {
  // Several programs may share the function: never lower what another one needs.
  int current = 0;
  cuda::Check(cuda::GetDriver().cuFuncGetAttribute(&current, attribute, function),
              Concat("reading ", what));
  if (current >= wanted) return;
  cuda::Check(cuda::GetDriver().cuFuncSetAttribute(function, attribute, wanted),
              Concat("allowing ", wanted, " ", what));
}

}  // namespace

Module* Module::Intern(std::string_view cubin) {
  static std::mutex mutex;
  static auto* modules = new std::unordered_map<std::string, std::unique_ptr<Module>>();
  std::lock_guard<std::mutex> lock(mutex);
  auto [entry, inserted] = modules->try_emplace(std::string(cubin));
  if (inserted) entry->second.reset(new Module(&entry->first));  // node keys never move
  return entry->second.get();
}

cuda::Kernel Module::FindKernel(const KernelSpec& kernel, const std::string& place) {
  const cuda::Driver& driver = cuda::GetDriver();
  if (library_ == nullptr) {
    cuda::Check(driver.cuLibraryLoadData(&library_, cubin_->data(), nullptr, nullptr, 0, nullptr,
                                         nullptr, 0),
                Concat("loading kernel ", kernel.entry, place));
  }
  cuda::Kernel found = nullptr;
  cuda::Check(driver.cuLibraryGetKernel(&found, library_, kernel.entry.c_str()),
              Concat("finding kernel ", kernel.entry, place));
  return found;
}

cuda::Function Module::Load(const KernelSpec& kernel, const std::string& place) {
  const cuda::Driver& driver = cuda::GetDriver();
  std::lock_guard<std::mutex> lock(mutex_);
  cuda::Function function = nullptr;
  cuda::Check(driver.cuKernelGetFunction(&function, FindKernel(kernel, place)),
              Concat("loading kernel ", kernel.entry, place));
  cuda::Check(driver.cuFuncLoad(function), Concat("loading the code of ", kernel.entry, place));
  RaiseAttribute(function, cuda::kMaxDynamicSharedBytes, kernel.shared_bytes,
                 Concat("bytes of dynamic shared memory to ", kernel.entry));
  if (kernel.cluster[0] * kernel.cluster[1] * kernel.cluster[2] > kPortableClusterBlocks) {
    RaiseAttribute(function, cuda::kNonPortableClusterAllowed, 1,
                   Concat("non-portable cluster for ", kernel.entry));
  }
  return function;
}

}  // namespace k3jax

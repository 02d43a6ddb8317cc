#include "workspace.h"

#include <map>
#include <mutex>
#include <utility>

#include "failure.h"

namespace k3jax {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, uint64_t> addresses;
};

Registry& GetRegistry() {
  static auto* registry = new Registry();
  return *registry;
}

}  // namespace

void RegisterWorkspace(int device, int64_t slot, uint64_t address) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto [entry, inserted] = registry.addresses.try_emplace({device, slot}, address);
  if (inserted || entry->second == address) return;
  throw Failure(FailureKind::kFailedPrecondition,
                Concat("workspace ", slot, " of device ", device,
                       " is already registered; captured graphs hold its address, so it stays for "
                       "the life of the process"));
}

uint64_t WorkspaceAddress(int device, int64_t slot) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.addresses.find({device, slot});
  if (found != registry.addresses.end()) return found->second;
  throw Failure(FailureKind::kFailedPrecondition,
                Concat("no workspace ", slot, " on device ", device,
                       ": create the collective workspace before the program that uses it runs"));
}

}  // namespace k3jax

#include "workspace.h"

#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "failure.h"

namespace k3jax {
namespace {

struct Workspace {
  uint64_t address;
  Admission admission;
};

struct Registry {
  std::shared_mutex mutex;  // every call of every run reads
  std::map<std::pair<int, int64_t>, Workspace> workspaces;
};

Registry& GetRegistry() {
  static auto* registry = new Registry();
  return *registry;
}

// What is registered stays where it is, so the reference outlives the lock.
const Workspace& Find(int device, int64_t slot) {
  Registry& registry = GetRegistry();
  std::shared_lock<std::shared_mutex> lock(registry.mutex);
  auto found = registry.workspaces.find({device, slot});
  if (found != registry.workspaces.end()) return found->second;
  throw Failure(FailureKind::kFailedPrecondition,
                Concat("no workspace ", slot, " on device ", device,
                       ": create the collective workspace before the program that uses it runs"));
}

}  // namespace

void RegisterWorkspace(int device, int64_t slot, uint64_t address, Admission admission) {
  Registry& registry = GetRegistry();
  std::lock_guard<std::shared_mutex> lock(registry.mutex);
  auto [entry, inserted] =
      registry.workspaces.try_emplace({device, slot}, Workspace{address, std::move(admission)});
  if (inserted || entry->second.address == address) return;
  throw Failure(FailureKind::kFailedPrecondition,
                Concat("workspace ", slot, " of device ", device,
                       " is already registered; captured graphs hold its address, so it stays for "
                       "the life of the process"));
}

uint64_t WorkspaceAddress(int device, int64_t slot) { return Find(device, slot).address; }

void AdmitRun(int device, int64_t slot, const Run& run) { Find(device, slot).admission(run); }

}  // namespace k3jax

#include "tail_device.h"

#include <map>
#include <mutex>
#include <utility>

#include "driver.h"
#include "failure.h"
#include "workspace.h"

namespace k3jax::tail {
namespace {

struct Created {
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, std::vector<int>> groups;  // by device and slot
};

Created& GetCreated() {
  static auto* created = new Created();
  return *created;
}

void EnablePeers(const std::vector<int>& devices) {
  const cuda::Driver& driver = cuda::GetDriver();
  for (int device : devices) {
    cuda::ContextScope scope(cuda::PrimaryContext(device));
    for (int peer : devices) {
      if (peer == device) continue;
      cuda::Device from, to;
      int can_access = 0;
      cuda::Check(driver.cuDeviceGet(&from, device), Concat("finding device ", device));
      cuda::Check(driver.cuDeviceGet(&to, peer), Concat("finding device ", peer));
      cuda::Check(driver.cuDeviceCanAccessPeer(&can_access, from, to),
                  Concat("asking whether device ", device, " can address device ", peer));
      if (!can_access) {
        throw Failure(FailureKind::kFailedPrecondition,
                      Concat("device ", device, " cannot address the memory of device ", peer,
                             ", which the fused tail needs; choose tail='allreduce_overlap'"));
      }
      cuda::Result result = driver.cuCtxEnablePeerAccess(cuda::PrimaryContext(peer), 0);
      if (result != cuda::kPeerAccessAlreadyEnabled) {
        cuda::Check(result, Concat("letting device ", device, " address device ", peer));
      }
    }
  }
}

// Writes the header of one rank and arms its mailboxes.
void Arm(const std::vector<int>& devices, const std::vector<uint64_t>& addresses, size_t rank,
         const Layout& layout) {
  uint32_t header[kHeaderWords] = {};
  header[kMagicWord] = kMagic;
  header[kVersionWord] = kLayoutVersion;
  header[kRanksWord] = layout.ranks;
  header[kRankWord] = rank;
  header[kMaxTokensWord] = layout.max_tokens;
  header[kLatentWord] = layout.latent;
  header[kHiddenWord] = layout.hidden;
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    header[kPeersWord + 2 * peer] = static_cast<uint32_t>(addresses[peer]);
    header[kPeersWord + 2 * peer + 1] = static_cast<uint32_t>(addresses[peer] >> 32);
  }
  const cuda::Driver& driver = cuda::GetDriver();
  cuda::ContextScope scope(cuda::PrimaryContext(devices[rank]));
  uint64_t mailboxes = addresses[rank] + sizeof(header);
  cuda::Check(driver.cuMemsetD32(mailboxes, kArmed, layout.end() - kHeaderWords),
              Concat("arming the workspace of device ", devices[rank]));
  cuda::Check(driver.cuMemcpyHtoD(addresses[rank], header, sizeof(header)),
              Concat("writing the workspace of device ", devices[rank]));
  cuda::Check(driver.cuCtxSynchronize(), Concat("waiting for device ", devices[rank]));
}

void Synchronize(const std::vector<int>& devices) {
  for (int device : devices) {
    cuda::ContextScope scope(cuda::PrimaryContext(device));
    cuda::Check(cuda::GetDriver().cuCtxSynchronize(), Concat("waiting for device ", device));
  }
}

std::vector<uint64_t> Addresses(const std::vector<int>& devices, int64_t slot) {
  std::vector<uint64_t> addresses;
  for (int device : devices) addresses.push_back(WorkspaceAddress(device, slot));
  return addresses;
}

}  // namespace

void CreateWorkspaces(const std::vector<int>& devices, const Layout& layout, int64_t slot) {
  Created& created = GetCreated();
  std::lock_guard<std::mutex> lock(created.mutex);
  for (int device : devices) {
    auto found = created.groups.find({device, slot});
    if (found == created.groups.end()) continue;
    if (found->second == devices) return;
    throw Failure(FailureKind::kFailedPrecondition,
                  Concat("device ", device,
                         " is already in another group of the fused tail; a device keeps its rank "
                         "and its peers for the life of the process"));
  }
  EnablePeers(devices);
  std::vector<uint64_t> addresses(devices.size());
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    cuda::ContextScope scope(cuda::PrimaryContext(devices[rank]));
    size_t num_bytes = layout.end() * sizeof(uint32_t);
    cuda::Check(cuda::GetDriver().cuMemAlloc(&addresses[rank], num_bytes),
                Concat("allocating ", num_bytes, " bytes for the workspace of device ",
                       devices[rank]));
  }
  for (size_t rank = 0; rank < devices.size(); ++rank) Arm(devices, addresses, rank, layout);
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    RegisterWorkspace(devices[rank], slot, addresses[rank]);
    created.groups[{devices[rank], slot}] = devices;
  }
}

void CheckWorkspaces(const std::vector<int>& devices, int64_t slot) {
  std::vector<uint64_t> addresses = Addresses(devices, slot);
  Synchronize(devices);
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    cuda::ContextScope scope(cuda::PrimaryContext(devices[rank]));
    uint32_t header[kHeaderWords];
    cuda::Check(cuda::GetDriver().cuMemcpyDtoH(header, addresses[rank], sizeof(header)),
                Concat("reading the workspace of device ", devices[rank]));
    if (header[kFailedWord] == 0) continue;
    throw Failure(FailureKind::kInternal,
                  Concat("the fused tail gave up in call ", header[kFailedWord] - 1, ": rank ",
                         rank, " waited for rank ", header[kAwaitedWord],
                         "; results since then are NaN. Reset the workspaces on all ranks"));
  }
}

void ResetWorkspaces(const std::vector<int>& devices, const Layout& layout, int64_t slot) {
  std::vector<uint64_t> addresses = Addresses(devices, slot);
  Synchronize(devices);  // no rank may still publish when another one is armed
  for (size_t rank = 0; rank < devices.size(); ++rank) Arm(devices, addresses, rank, layout);
}

}  // namespace k3jax::tail

// For ctypes (k3jax/runtime/workspace.py); each returns what Guard in failure.h says.
extern "C" {

const char* k3jax_tail_create(const int32_t* devices, int64_t ranks, int64_t max_tokens,
                              int64_t latent, int64_t hidden, int64_t slot) {
  return k3jax::Guard([&] {
    k3jax::tail::CreateWorkspaces({devices, devices + ranks}, {ranks, max_tokens, latent, hidden},
                                  slot);
  });
}

const char* k3jax_tail_check(const int32_t* devices, int64_t ranks, int64_t slot) {
  return k3jax::Guard([&] { k3jax::tail::CheckWorkspaces({devices, devices + ranks}, slot); });
}

const char* k3jax_tail_reset(const int32_t* devices, int64_t ranks, int64_t max_tokens,
                             int64_t latent, int64_t hidden, int64_t slot) {
  return k3jax::Guard([&] {
    k3jax::tail::ResetWorkspaces({devices, devices + ranks}, {ranks, max_tokens, latent, hidden},
                                 slot);
  });
}

}  // extern "C"

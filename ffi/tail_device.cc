#include "tail_device.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "failure.h"
#include "workspace.h"

namespace k3jax::tail {
namespace {

constexpr uint32_t kNobody = 0xffffffff;
constexpr std::chrono::minutes kPatience{10};  // with a process that is busy, perhaps compiling

struct Groups {
  std::mutex mutex;
  std::map<std::pair<std::vector<int>, int64_t>, std::unique_ptr<DeviceGroup>> by_devices;
};

Groups& GetGroups() {
  static auto* groups = new Groups();
  return *groups;
}

[[noreturn]] void NoPeerAccess(int device, const std::string& peer) {
  throw Failure(FailureKind::kFailedPrecondition,
                Concat("device ", device, " cannot address the memory of ", peer,
                       ", which the fused tail needs; choose tail='allreduce_overlap'"));
}

void EnablePeers(const std::vector<int>& devices) {
  const cuda::Driver& driver = cuda::GetDriver();
  for (int device : devices) {
    if (device == kElsewhere) continue;
    cuda::ContextScope scope(cuda::PrimaryContext(device));
    for (int peer : devices) {
      if (peer == device || peer == kElsewhere) continue;
      cuda::Device from, to;
      int can_access = 0;
      cuda::Check(driver.cuDeviceGet(&from, device), Concat("finding device ", device));
      cuda::Check(driver.cuDeviceGet(&to, peer), Concat("finding device ", peer));
      cuda::Check(driver.cuDeviceCanAccessPeer(&can_access, from, to),
                  Concat("asking whether device ", device, " can address device ", peer));
      if (!can_access) NoPeerAccess(device, Concat("device ", peer));
      cuda::Result result = driver.cuCtxEnablePeerAccess(cuda::PrimaryContext(peer), 0);
      if (result != cuda::kPeerAccessAlreadyEnabled) {
        cuda::Check(result, Concat("letting device ", device, " address device ", peer));
      }
    }
  }
}

// The driver forgets the mapping with the process, as it does the memory.
uint64_t OpenPeer(int device, int64_t rank, const cuda::IpcHandle& handle) {
  cuda::ContextScope scope(cuda::PrimaryContext(device));
  uint64_t address;
  cuda::Result result =
      cuda::GetDriver().cuIpcOpenMemHandle(&address, handle, cuda::kIpcLazyEnablePeerAccess);
  if (result == cuda::kPeerAccessUnsupported) NoPeerAccess(device, Concat("rank ", rank));
  cuda::Check(result, Concat("mapping the workspace of rank ", rank, " on device ", device));
  return address;
}

void Synchronize(int device) {
  cuda::ContextScope scope(cuda::PrimaryContext(device));
  cuda::Check(cuda::GetDriver().cuCtxSynchronize(), Concat("waiting for device ", device));
}

void Split(uint64_t address, uint32_t* words) {
  words[0] = static_cast<uint32_t>(address);
  words[1] = static_cast<uint32_t>(address >> 32);
}

}  // namespace

DeviceGroup& DeviceGroup::Create(const std::vector<int>& devices, const Layout& layout,
                                 int64_t slot) {
  Groups& groups = GetGroups();
  std::lock_guard<std::mutex> lock(groups.mutex);
  auto found = groups.by_devices.find({devices, slot});
  if (found != groups.by_devices.end()) return *found->second;
  std::unique_ptr<DeviceGroup> group(new DeviceGroup(devices, layout, slot));
  return *(groups.by_devices[{devices, slot}] = std::move(group));
}

DeviceGroup& DeviceGroup::Get(const std::vector<int>& devices, int64_t slot) {
  Groups& groups = GetGroups();
  std::lock_guard<std::mutex> lock(groups.mutex);
  auto found = groups.by_devices.find({devices, slot});
  if (found != groups.by_devices.end()) return *found->second;
  throw Failure(FailureKind::kFailedPrecondition,
                Concat("the group of workspace ", slot, " was not created"));
}

DeviceGroup::DeviceGroup(const std::vector<int>& devices, const Layout& layout, int64_t slot)
    : devices_(devices), layout_(layout), slot_(slot) {
  EnablePeers(devices);
  for (size_t number = 0; number < devices.size(); ++number) {
    if (devices[number] == kElsewhere) continue;
    ranks_.push_back({static_cast<int64_t>(number), devices[number], 0, nullptr, {}});
  }
  try {
    for (Rank& rank : ranks_) Allocate(rank);
    if (ranks_.size() == devices.size()) Share(Segment::Private(SharedBytes()), true);
  } catch (const std::exception&) {
    for (const Rank& rank : ranks_) Free(rank);  // whoever tries again allocates again
    throw;
  }
}

void DeviceGroup::Allocate(Rank& rank) const {
  const cuda::Driver& driver = cuda::GetDriver();
  cuda::ContextScope scope(cuda::PrimaryContext(rank.device));
  const size_t num_bytes = layout_.end() * sizeof(uint32_t);
  cuda::Check(driver.cuMemAlloc(&rank.address, num_bytes),
              Concat("allocating ", num_bytes, " bytes for the workspace of device ", rank.device));
  void* note;
  cuda::Check(driver.cuMemHostAlloc(&note, sizeof(uint32_t),
                                    cuda::kHostPortable | cuda::kHostDeviceMapped),
              "allocating the word that tells the host whom a rank gave up on");
  rank.note = static_cast<uint32_t*>(note);
}

void DeviceGroup::Free(const Rank& rank) const noexcept {
  try {
    cuda::ContextScope scope(cuda::PrimaryContext(rank.device));
    if (rank.address != 0) cuda::GetDriver().cuMemFree(rank.address);
    if (rank.note != nullptr) cuda::GetDriver().cuMemFreeHost(const_cast<uint32_t*>(rank.note));
  } catch (const Failure&) {
    // No context to free in: the first failure says why.
  }
}

size_t DeviceGroup::SharedBytes() { return Executions::NumBytes() + Meeting::NumBytes(); }

void DeviceGroup::Share(std::unique_ptr<Segment> segment, bool created) {
  std::vector<int64_t> own;
  for (const Rank& rank : ranks_) own.push_back(rank.number);
  segment->Claim(own);
  executions_ = std::make_unique<Executions>(*segment, layout_.ranks, created);
  meeting_ =
      std::make_unique<Meeting>(*segment, Executions::NumBytes(), *executions_, layout_.ranks, own);
  segment_ = std::move(segment);
}

std::vector<cuda::IpcHandle> DeviceGroup::Handles() const {
  std::vector<cuda::IpcHandle> handles(devices_.size());
  for (const Rank& rank : ranks_) {
    cuda::ContextScope scope(cuda::PrimaryContext(rank.device));
    cuda::Check(cuda::GetDriver().cuIpcGetMemHandle(&handles[rank.number], rank.address),
                Concat("sharing the workspace of device ", rank.device, " with other processes"));
  }
  return handles;
}

void DeviceGroup::Connect(const std::vector<cuda::IpcHandle>& handles) {
  if (segment_ == nullptr) {
    throw Failure(FailureKind::kFailedPrecondition,
                  Concat("the processes of workspace ", slot_, " share no host memory yet"));
  }
  std::vector<uint64_t> here(devices_.size());
  for (const Rank& rank : ranks_) here[rank.number] = rank.address;
  for (Rank& rank : ranks_) {
    rank.peers = here;
    for (size_t peer = 0; peer < devices_.size(); ++peer) {
      if (devices_[peer] != kElsewhere) continue;
      rank.peers[peer] = OpenPeer(rank.device, peer, handles[peer]);
    }
    ArmRank(rank);
    RegisterWorkspace(rank.device, slot_, rank.address,
                      [this, device = rank.device](const Run& run) { Admit(device, run); });
  }
}

void DeviceGroup::ArmRank(const Rank& rank) {
  const cuda::Driver& driver = cuda::GetDriver();
  cuda::ContextScope scope(cuda::PrimaryContext(rank.device));
  uint32_t header[kHeaderWords] = {};
  header[kMagicWord] = kMagic;
  header[kVersionWord] = kLayoutVersion;
  header[kRanksWord] = layout_.ranks;
  header[kRankWord] = rank.number;
  header[kMaxTokensWord] = layout_.max_tokens;
  header[kLatentWord] = layout_.latent;
  header[kHiddenWord] = layout_.hidden;
  uint64_t note;
  cuda::Check(driver.cuMemHostGetDevicePointer(&note, const_cast<uint32_t*>(rank.note), 0),
              "mapping the word that tells the host whom a rank gave up on");
  Split(note, header + kNoteWord);
  for (size_t peer = 0; peer < rank.peers.size(); ++peer) {
    Split(rank.peers[peer], header + kPeersWord + 2 * peer);
  }
  *rank.note = kNobody;
  cuda::Check(
      driver.cuMemsetD32(rank.address + sizeof(header), kArmed, layout_.end() - kHeaderWords),
      Concat("arming the workspace of device ", rank.device));
  cuda::Check(driver.cuMemcpyHtoD(rank.address, header, sizeof(header)),
              Concat("writing the workspace of device ", rank.device));
  cuda::Check(driver.cuCtxSynchronize(), Concat("waiting for device ", rank.device));
}

void DeviceGroup::Admit(int device, const Run& run) {
  Rank& rank = *std::find_if(ranks_.begin(), ranks_.end(),
                             [device](const Rank& rank) { return rank.device == device; });
  if (IsAdmitted(rank, run.number)) return;
  try {
    AdmitRank(rank, run);
    Store(rank.admitted, run.number);
  } catch (const Failure&) {
    std::lock_guard<std::mutex> lock(mutex_);
    raised_ = true;
    throw;
  }
}

// Every call of a program asks. After the first, only a failure elsewhere can change the answer.
bool DeviceGroup::IsAdmitted(const Rank& rank, int64_t run) const {
  return Load(rank.admitted) == run && executions_->failed() < Load(rank.execution);
}

void DeviceGroup::AdmitRank(Rank& rank, const Run& run) {
  const auto [execution, is_next] = Begin(rank, run.number);
  executions_->ThrowIfFailed(execution);
  const Deadline deadline(kPatience);
  if (executions_->MustRecover(rank.number)) {
    Synchronize(rank.device);
    executions_->Recover(rank.number, execution, deadline, [&] { ArmRank(rank); });
    std::lock_guard<std::mutex> lock(mutex_);
    raised_ = false;
  }
  if (is_next) meeting_->Attend(rank.number, execution, run.program, deadline);
}

// The number of the execution, and whether it is another one than the device's last. The first
// device to come to it decides for all.
std::pair<int64_t, bool> DeviceGroup::Begin(Rank& rank, int64_t run) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [execution, is_new] = executions_->NumberOf(run);
  const bool is_next = execution != rank.execution;
  if (is_new) Raise(execution);
  Expect(rank, execution);
  return {execution, is_next};
}

// Fails the execution if a call has failed before it and nobody in this process has heard of that.
void DeviceGroup::Raise(int64_t execution) {
  const bool failed = executions_->MustRecover(ranks_.front().number);
  if (failed && raised_) return;
  for (const Rank& rank : ranks_) {
    const uint32_t awaited = *rank.note;
    if (awaited == kNobody) continue;
    const char* after = segment_->Abandoned(awaited)
                            ? ", whose process has ended: start all processes of the group again"
                            : ", and results since then are NaN. The step after this one starts "
                              "afresh";
    executions_->Fail(execution, FailureKind::kFailedPrecondition,
                      Concat("rank ", rank.number, " of the fused tail gave up waiting for rank ",
                             awaited, after));
  }
  if (failed) executions_->FailAgain(execution);
}

// Fails the execution if it is not the one after the device's last.
void DeviceGroup::Expect(Rank& rank, int64_t execution) {
  const int64_t last = rank.execution;
  const int64_t failed = executions_->failed();
  Store(rank.execution, std::max(last, execution));
  if (execution == last || execution <= failed || execution == std::max(last, failed) + 1) return;
  executions_->Fail(rank.execution, FailureKind::kFailedPrecondition,
                    Concat("device ", rank.device, " comes to execution ", execution,
                           " of the fused tail after ", last,
                           ": one workspace serves one program at a time, on all of its devices; "
                           "run them one after the other"));
}

void DeviceGroup::Check() {
  for (const Rank& rank : ranks_) Synchronize(rank.device);
  for (const Rank& rank : ranks_) {
    cuda::ContextScope scope(cuda::PrimaryContext(rank.device));
    uint32_t header[kHeaderWords];
    cuda::Check(cuda::GetDriver().cuMemcpyDtoH(header, rank.address, sizeof(header)),
                Concat("reading the workspace of device ", rank.device));
    if (header[kFailedWord] == 0) continue;
    throw Failure(
        FailureKind::kInternal,
        Concat("the fused tail gave up in call ", header[kFailedWord] - 1, ": rank ", rank.number,
               " waited for rank ", *rank.note, "; results since then are NaN"));
  }
}

}  // namespace k3jax::tail

// For ctypes (k3jax/runtime/mailboxes.py); each returns what Guard in failure.h says. `devices` has
// -1 for the ranks of other processes, and `handles` 64 bytes a rank.
extern "C" {

const char* k3jax_tail_allocate(const int32_t* devices, int64_t slot, int64_t ranks,
                                int64_t max_tokens, int64_t latent, int64_t hidden, char* handles) {
  using namespace k3jax;
  return Guard([&] {
    tail::DeviceGroup& group = tail::DeviceGroup::Create({devices, devices + ranks},
                                                         {ranks, max_tokens, latent, hidden}, slot);
    if (handles == nullptr) return;  // all ranks live here
    std::vector<cuda::IpcHandle> own = group.Handles();
    std::memcpy(handles, own.data(), own.size() * sizeof(cuda::IpcHandle));
  });
}

const char* k3jax_tail_share(const int32_t* devices, int64_t slot, int64_t ranks, const char* name,
                             int64_t create) {
  using namespace k3jax::tail;
  return k3jax::Guard([&] {
    size_t num_bytes = DeviceGroup::SharedBytes();
    DeviceGroup::Get({devices, devices + ranks}, slot)
        .Share(create ? Segment::Create(name, num_bytes) : Segment::Open(name, num_bytes), create);
  });
}

const char* k3jax_tail_connect(const int32_t* devices, int64_t slot, int64_t ranks,
                               const char* handles) {
  using namespace k3jax;
  return Guard([&] {
    std::vector<cuda::IpcHandle> all(ranks);
    if (handles != nullptr) std::memcpy(all.data(), handles, ranks * sizeof(cuda::IpcHandle));
    tail::DeviceGroup::Get({devices, devices + ranks}, slot).Connect(all);
  });
}

const char* k3jax_tail_check(const int32_t* devices, int64_t slot, int64_t ranks) {
  return k3jax::Guard(
      [&] { k3jax::tail::DeviceGroup::Get({devices, devices + ranks}, slot).Check(); });
}

}  // extern "C"

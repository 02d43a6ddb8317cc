// The fused tail's workspaces on the GPUs of this process: allocation, peers, failures, reset.
//
// docs/protocol.md says what lies in a workspace. The ranks of a group live on GPUs of this process
// or of others on the same machine; a workspace stays for the life of the process.

#ifndef K3JAX_FFI_TAIL_DEVICE_H_
#define K3JAX_FFI_TAIL_DEVICE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"
#include "tail_executions.h"
#include "tail_layout.h"
#include "tail_meeting.h"
#include "tail_segment.h"
#include "workspace.h"

namespace k3jax::tail {

constexpr int kElsewhere = -1;  // the device of a rank that lives in another process

// Every method may be called from several threads at once.
class DeviceGroup {
 public:
  // The group of rank r on device devices[r], its workspaces allocated on the first call. Throws a
  // Failure if a device cannot address the memory of another one of this process.
  static DeviceGroup& Create(const std::vector<int>& devices, const Layout& layout, int64_t slot);

  // One that was created; throws a Failure if it was not.
  static DeviceGroup& Get(const std::vector<int>& devices, int64_t slot);

  // Memory of the host that all processes of the group share, before Connect; there is some from
  // the start if all ranks live here. Whoever creates it comes first.
  void Share(std::unique_ptr<Segment> segment, bool created);
  static size_t SharedBytes();

  // What another process opens the workspaces of this process's ranks with; zeros for the others.
  std::vector<cuda::IpcHandle> Handles() const;

  // Arms the workspaces here, tells each where its peers are, those elsewhere by their handles, and
  // registers it. No program may run before this is done on all ranks.
  void Connect(const std::vector<cuda::IpcHandle>& handles);

  // The Admission of each device. Refuses a run, on all devices, if a call has failed before it or
  // if the devices take runs in different orders; the run after that starts afresh, once all ranks
  // have come to it. Every run waits until other processes have come to it too.
  void Admit(int device, const Run& run);

  // Throws a Failure that names who waited for whom if a call has failed. Waits for the devices.
  void Check();

 private:
  struct Rank {
    int64_t number;
    int device;
    uint64_t address;
    volatile uint32_t* note;      // host memory; the kernel writes whom it gave up on
    std::vector<uint64_t> peers;  // the workspaces of all ranks, as this device sees them
    int64_t execution = 0;        // the last one that came here
    int64_t admitted = -1;        // the run that was let in last
  };

  DeviceGroup(const std::vector<int>& devices, const Layout& layout, int64_t slot);
  void Allocate(Rank& rank) const;
  void Free(const Rank& rank) const noexcept;
  void ArmRank(const Rank& rank);
  bool IsAdmitted(const Rank& rank, int64_t run) const;
  void AdmitRank(Rank& rank, const Run& run);
  std::pair<int64_t, bool> Begin(Rank& rank, int64_t run);
  void Raise(int64_t execution);
  void Expect(Rank& rank, int64_t execution);

  const std::vector<int> devices_;
  const Layout layout_;
  const int64_t slot_;
  std::vector<Rank> ranks_;  // those here
  std::unique_ptr<Segment> segment_;
  std::unique_ptr<Executions> executions_;
  std::unique_ptr<Meeting> meeting_;
  std::mutex mutex_;     // guards the next one, and writing of `execution` of the ranks
  bool raised_ = false;  // whether somebody here has heard of the last failure
};

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_DEVICE_H_

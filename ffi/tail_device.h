// The fused tail's workspaces on the GPUs of this process: allocation, peers, failures, reset.
//
// docs/protocol.md says what lies in a workspace. The ranks of a group live on GPUs of this process
// or of others on the same machine; a workspace stays for the life of the process.

#ifndef K3JAX_FFI_TAIL_DEVICE_H_
#define K3JAX_FFI_TAIL_DEVICE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"
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

  // Where the ranks of several processes meet; before Connect, in such a group.
  void MeetIn(std::unique_ptr<Segment> segment);

  // What another process opens the workspaces of this process's ranks with; zeros for the others.
  std::vector<cuda::IpcHandle> Handles() const;

  // Arms the workspaces here, tells each where its peers are, those elsewhere by their handles, and
  // registers it. No program may run before this is done on all ranks.
  void Connect(const std::vector<cuda::IpcHandle>& handles);

  // The Admission of each device. Throws a Failure if a call has failed, or if the devices take
  // their runs in different orders; refuses a run on all devices of this process or on none. Meets
  // other processes if the program is a newcomer.
  void Admit(int device, int64_t run, const ProgramId* newcomer);

  // Throws a Failure that names who waited for whom if a call has failed. Waits for the devices.
  void Check();

  // Reset in two steps, for once all ranks have done the first and nobody publishes any more.
  void Quiesce();
  void Arm();

 private:
  struct Rank {
    int64_t number;
    int device;
    uint64_t address;
    volatile uint32_t* note;      // host memory; the kernel writes whom it gave up on
    std::vector<uint64_t> peers;  // the workspaces of all ranks, as this device sees them
    int64_t runs = 0;             // how many it has been admitted to
  };

  DeviceGroup(const std::vector<int>& devices, const Layout& layout, int64_t slot);
  void Admit(Rank& rank, int64_t run);
  void ArmRank(const Rank& rank);
  [[noreturn]] void Refuse(const std::string& reason);

  const std::vector<int> devices_;
  const Layout layout_;
  const int64_t slot_;
  std::unique_ptr<Meeting> meeting_;
  std::mutex mutex_;          // guards the rest
  std::vector<Rank> ranks_;   // those here
  std::deque<int64_t> runs_;  // in the order of their first admission, the newest last
  int64_t num_runs_ = 0;
  std::string refusal_;  // why no run is admitted until a reset, empty if they are
};

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_DEVICE_H_

// A parsed program made resident on devices, and its launches put on a stream.

#ifndef K3JAX_FFI_LAUNCH_H_
#define K3JAX_FFI_LAUNCH_H_

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "driver.h"
#include "kept.h"
#include "module.h"
#include "program.h"
#include "workspace.h"

namespace k3jax {

constexpr int kMaxDevices = 64;

// The device addresses of one call.
struct Buffers {
  std::array<uint64_t, kMaxBuffers> operands;
  std::array<uint64_t, kMaxBuffers> results;
};

// Shared by all devices of a process; every method may be called from several threads at once.
class LoadedProgram {
 public:
  explicit LoadedProgram(ProgramSpec spec);

  const ProgramSpec& spec() const { return spec_; }

  // Loads the kernels and makes the kept memory, once, on the device and on every other one that
  // this process uses: loading may wait for a device, so none may be left for when a kernel there
  // already spins on a peer.
  void Load(int device);

  // Asks the workspaces that the program uses whether it may run; before every run, on each device.
  void Admit(int device, int64_t run) const;

  // Puts the launches on the stream: no allocation, no wait for the device, which must have been
  // loaded. A program with kept memory waits for other threads that are launching it there: on one
  // stream their runs then follow each other whole.
  void Launch(int device, cuda::Stream stream, const Buffers& buffers) const;

 private:
  struct Resident {
    cuda::Context context;
    std::vector<cuda::Function> functions;  // one a kernel of the program
    std::deque<KeptMemory> kept;
    mutable std::mutex launching;  // held while a run's launches are issued, if there is any `kept`
  };

  void LoadOn(int device);
  uint64_t ArgumentBits(const Argument& argument, int device, const Resident& resident,
                        const Buffers& buffers) const;
  void LaunchOne(const LaunchSpec& launch, int device, const Resident& resident,
                 cuda::Stream stream, const Buffers& buffers) const;

  ProgramSpec spec_;
  std::vector<Module*> modules_;  // one a kernel of the program
  std::set<int64_t> workspaces_;  // slots of those that the launches use
  ProgramId id_;
  std::mutex mutex_;
  std::array<std::unique_ptr<Resident>, kMaxDevices> owned_;
  std::array<std::atomic<const Resident*>, kMaxDevices> resident_ = {};
};

}  // namespace k3jax

#endif  // K3JAX_FFI_LAUNCH_H_

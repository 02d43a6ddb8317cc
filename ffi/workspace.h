// Where launches find per-device memory that outlives a program: the collectives' mailboxes.
//
// Whoever allocates a workspace registers it here; a launch argument of kind `workspace` is
// resolved when the launch is issued. A captured CUDA graph bakes the address in, so a workspace
// once registered never moves and is never freed.

#ifndef K3JAX_FFI_WORKSPACE_H_
#define K3JAX_FFI_WORKSPACE_H_

#include <cstdint>
#include <functional>
#include <string>

namespace k3jax {

struct ProgramId {
  std::string name;
  uint64_t digest;  // of all that it does but for its machine code
};

// A program's run on one device.
struct Run {
  int64_t number;  // XLA's, the same on all devices of a process
  const ProgramId& program;
};

// Called on each device before every run of a program that uses the workspace; for every call in
// it, if there are several. May wait for other processes and, after a failure, for devices. Throws
// a Failure to refuse the run.
using Admission = std::function<void(const Run& run)>;

// Throws a Failure if the slot already holds another address on this device.
void RegisterWorkspace(int device, int64_t slot, uint64_t address, Admission admission);

// Throws a Failure if nothing is registered.
uint64_t WorkspaceAddress(int device, int64_t slot);
void AdmitRun(int device, int64_t slot, const Run& run);

}  // namespace k3jax

#endif  // K3JAX_FFI_WORKSPACE_H_

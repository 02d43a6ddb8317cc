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

// Called on each device before every run of a program that uses the workspace, with XLA's number of
// the run, which all devices of a process share. `newcomer` is the program in its first run on the
// device, when the admission may wait for other devices, and null in all later ones, when it waits
// for nothing. Throws a Failure to refuse the run.
using Admission = std::function<void(int64_t run, const ProgramId* newcomer)>;

// Throws a Failure if the slot already holds another address on this device.
void RegisterWorkspace(int device, int64_t slot, uint64_t address, Admission admission);

// Throws a Failure if nothing is registered.
uint64_t WorkspaceAddress(int device, int64_t slot);
void AdmitRun(int device, int64_t slot, int64_t run, const ProgramId* newcomer);

}  // namespace k3jax

#endif  // K3JAX_FFI_WORKSPACE_H_

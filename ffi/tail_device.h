// The fused tail's workspaces on the GPUs of one process: allocation, failures, reset.
//
// docs/protocol.md says what lies in a workspace. One group is one process: its devices address one
// another directly. A workspace is registered (workspace.h) and stays for the life of the process.

#ifndef K3JAX_FFI_TAIL_DEVICE_H_
#define K3JAX_FFI_TAIL_DEVICE_H_

#include <cstdint>
#include <vector>

#include "tail_layout.h"

namespace k3jax::tail {

// Allocates, arms and registers the workspaces of a group, rank r on devices[r]. Once they exist,
// the same call does nothing. Throws a Failure if a device cannot address another one's memory.
void CreateWorkspaces(const std::vector<int>& devices, const Layout& layout, int64_t slot);

// Throws a Failure that names who waited for whom if a call of the group has failed. Waits for the
// devices.
void CheckWorkspaces(const std::vector<int>& devices, int64_t slot);

// Makes a group usable again after a failure: waits for all its devices, then arms everything.
void ResetWorkspaces(const std::vector<int>& devices, const Layout& layout, int64_t slot);

}  // namespace k3jax::tail

#endif  // K3JAX_FFI_TAIL_DEVICE_H_

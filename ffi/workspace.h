// Where launches find per-device memory that outlives a program: the collectives' mailboxes.
//
// Whoever allocates a workspace registers its address here; a launch argument of kind `workspace`
// is resolved when the launch is issued. A captured CUDA graph bakes the address in, so a workspace
// once registered never moves and is never freed.

#ifndef K3JAX_FFI_WORKSPACE_H_
#define K3JAX_FFI_WORKSPACE_H_

#include <cstdint>

namespace k3jax {

// Throws a Failure if the slot already holds another address on this device.
void RegisterWorkspace(int device, int64_t slot, uint64_t address);

// Throws a Failure if nothing is registered.
uint64_t WorkspaceAddress(int device, int64_t slot);

}  // namespace k3jax

#endif  // K3JAX_FFI_WORKSPACE_H_

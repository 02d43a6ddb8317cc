// Workspaces of the fused tail on the fake driver, whose device memory a test can read.

#include "../tail_device.h"

#include <cstdint>
#include <vector>

#include "../workspace.h"
#include "check.h"
#include "fake_cuda.h"

namespace k3jax::tail {
namespace {

testing::FakeCuda* fake;

const Layout kLayout{2, 5, 64, 128};

uint32_t* Words(int device, int64_t slot) {
  return reinterpret_cast<uint32_t*>(WorkspaceAddress(device, slot));
}

TEST(ADeviceThatCannotAddressAnotherIsNamedAndNothingIsAllocated) {
  fake->all_peers = false;
  fake->calls.clear();
  CHECK_THROWS(CreateWorkspaces({0, 1}, kLayout, 1), "device 1 cannot address", "device 0",
               "allreduce_overlap");
  CHECK(fake->calls["cuMemAlloc"] == 0);
  CHECK_THROWS(WorkspaceAddress(0, 1), "no workspace 1");
  CHECK(fake->context_depth == 0);
}

TEST(WorkspacesAreArmedAndKnowRankAndPeers) {
  fake->all_peers = true;
  CreateWorkspaces({1, 0}, kLayout, 2);
  uint64_t peers[2] = {WorkspaceAddress(1, 2), WorkspaceAddress(0, 2)};
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const uint32_t* words = Words(rank == 0 ? 1 : 0, 2);
    const uint32_t wanted[9] = {kMagic, kLayoutVersion, 2, rank, 5, 64, 128, 0, 0};
    for (int i = 0; i < 9; ++i) CHECK(words[i] == wanted[i]);
    CHECK(words[kFailedWord] == 0);
    for (int peer = 0; peer < 2; ++peer) {
      uint64_t address = words[kPeersWord + 2 * peer];
      address |= uint64_t{words[kPeersWord + 2 * peer + 1]} << 32;
      CHECK(address == peers[peer]);
    }
    for (int64_t i = kHeaderWords; i < kLayout.end(); ++i) CHECK(words[i] == kArmed);
  }
  CHECK(fake->context_depth == 0);
}

TEST(ASecondCreationKeepsTheFirst) {
  fake->calls.clear();
  uint64_t before = WorkspaceAddress(0, 2);
  CreateWorkspaces({1, 0}, kLayout, 2);
  CHECK(WorkspaceAddress(0, 2) == before);
  CHECK(fake->calls["cuMemAlloc"] == 0);
  CHECK_THROWS(CreateWorkspaces({0, 1}, kLayout, 2), "already in another group");
}

TEST(PeerAccessThatSomebodyEnabledIsFineAndOtherErrorsAreNot) {
  fake->failures["cuCtxEnablePeerAccess"] = 704;
  CreateWorkspaces({0, 1}, kLayout, 3);
  fake->failures["cuCtxEnablePeerAccess"] = 999;
  CHECK_THROWS(CreateWorkspaces({0, 1}, kLayout, 4), "letting device 0 address device 1", "999");
  fake->failures.clear();
  fake->failures["cuMemAlloc"] = 2;
  CHECK_THROWS(CreateWorkspaces({0, 1}, kLayout, 4), "allocating", "device 0");
  fake->failures.clear();
}

TEST(AFailureNamesWhoWaitedForWhomAndAResetClearsAllRanks) {
  CreateWorkspaces({0, 1}, kLayout, 5);
  CheckWorkspaces({0, 1}, 5);
  uint32_t* words = Words(1, 5);
  words[kEpochWord] = 8;
  words[kFailedWord] = 8;
  words[kAwaitedWord] = 0;
  words[kLayout.latent_at(1, 0, 2)] = 17;
  CHECK_THROWS(CheckWorkspaces({0, 1}, 5), "call 7", "rank 1 waited for rank 0", "Reset");
  ResetWorkspaces({0, 1}, kLayout, 5);
  CheckWorkspaces({0, 1}, 5);
  CHECK(words[kEpochWord] == 0);
  for (int64_t i = kHeaderWords; i < kLayout.end(); ++i) CHECK(words[i] == kArmed);
  CHECK_THROWS(CheckWorkspaces({0, 1}, 6), "no workspace 6");
}

}  // namespace
}  // namespace k3jax::tail

int main(int argc, char** argv) {
  k3jax::tail::fake = k3jax::testing::OpenFakeCuda(argc, argv);
  return k3jax::tail::fake ? k3jax::testing::RunTests() : 2;
}

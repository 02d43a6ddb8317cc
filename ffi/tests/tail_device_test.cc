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

uint64_t AddressIn(const uint32_t* words, int at) {
  return words[at] | uint64_t{words[at + 1]} << 32;
}

// What the kernel does that gives up on a rank.
void GiveUp(int device, int64_t slot, uint32_t awaited) {
  uint32_t* words = Words(device, slot);
  words[kFailedWord] = words[kEpochWord] + 1;
  *reinterpret_cast<uint32_t*>(AddressIn(words, kNoteWord)) = awaited;
}

bool Armed(const uint32_t* words) {
  for (int64_t i = kHeaderWords; i < kLayout.end(); ++i) {
    if (words[i] != kArmed) return false;
  }
  return true;
}

DeviceGroup& CreateHere(const std::vector<int>& devices, int64_t slot) {
  DeviceGroup& group = DeviceGroup::Create(devices, kLayout, slot);
  group.Connect({});
  return group;
}

TEST(ADeviceThatCannotAddressAnotherIsNamedAndNothingIsAllocated) {
  fake->all_peers = false;
  fake->calls.clear();
  CHECK_THROWS(DeviceGroup::Create({0, 1}, kLayout, 1), "device 1 cannot address", "device 0",
               "allreduce_overlap");
  CHECK(fake->calls["cuMemAlloc"] == 0);
  CHECK_THROWS(DeviceGroup::Get({0, 1}, 1), "workspace 1 was not created");
  CHECK_THROWS(WorkspaceAddress(0, 1), "no workspace 1");
  CHECK(fake->context_depth == 0);
  fake->all_peers = true;
}

TEST(WorkspacesAreArmedAndKnowRankAndPeers) {
  CreateHere({1, 0}, 2);
  uint64_t peers[2] = {WorkspaceAddress(1, 2), WorkspaceAddress(0, 2)};
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const uint32_t* words = Words(rank == 0 ? 1 : 0, 2);
    const uint32_t wanted[9] = {kMagic, kLayoutVersion, 2, rank, 5, 64, 128, 0, 0};
    for (int i = 0; i < 9; ++i) CHECK(words[i] == wanted[i]);
    CHECK(words[kFailedWord] == 0);
    for (int peer = 0; peer < 2; ++peer) {
      CHECK(AddressIn(words, kPeersWord + 2 * peer) == peers[peer]);
    }
    CHECK(*reinterpret_cast<uint32_t*>(AddressIn(words, kNoteWord)) == 0xffffffff);
    CHECK(Armed(words));
  }
  CHECK(fake->context_depth == 0);
}

TEST(ASecondCreationKeepsTheFirstAndADeviceItsGroup) {
  fake->calls.clear();
  uint64_t before = WorkspaceAddress(0, 2);
  DeviceGroup::Create({1, 0}, kLayout, 2);
  CHECK(WorkspaceAddress(0, 2) == before);
  CHECK(fake->calls["cuMemAlloc"] == 0);
  CHECK_THROWS(CreateHere({0, 1}, 2), "already registered");
}

TEST(PeerAccessThatSomebodyEnabledIsFineAndOtherErrorsAreNot) {
  fake->failures["cuCtxEnablePeerAccess"] = 704;
  CreateHere({0, 1}, 3);
  fake->failures["cuCtxEnablePeerAccess"] = 999;
  CHECK_THROWS(CreateHere({0, 1}, 4), "letting device 0 address device 1", "999");
  fake->failures.clear();
  fake->failures["cuMemAlloc"] = 2;
  CHECK_THROWS(CreateHere({0, 1}, 4), "allocating", "device 0");
  fake->failures.clear();
}

TEST(RanksOfTwoProcessesFindEachOtherByHandles) {
  // Two processes of one rank each, both played here.
  DeviceGroup& first = DeviceGroup::Create({0, kElsewhere}, kLayout, 5);
  DeviceGroup& second = DeviceGroup::Create({kElsewhere, 1}, kLayout, 5);
  std::vector<cuda::IpcHandle> handles = {first.Handles()[0], second.Handles()[1]};
  CHECK_THROWS(WorkspaceAddress(0, 5), "no workspace 5");
  first.Connect(handles);
  second.Connect(handles);
  for (int device : {0, 1}) {
    const uint32_t* words = Words(device, 5);
    CHECK(words[kRankWord] == uint32_t(device));
    CHECK(AddressIn(words, kPeersWord) == WorkspaceAddress(0, 5));
    CHECK(AddressIn(words, kPeersWord + 2) == WorkspaceAddress(1, 5));
    CHECK(Armed(words));
  }
  GiveUp(1, 5, 0);
  first.Check();  // has not failed itself
  CHECK_THROWS(second.Check(), "rank 1 waited for rank 0");
  fake->failures["cuIpcOpenMemHandle"] = 217;
  CHECK_THROWS(first.Connect(handles), "device 0 cannot address the memory of rank 1");
  fake->failures["cuIpcOpenMemHandle"] = 1;
  CHECK_THROWS(first.Connect(handles), "mapping the workspace of rank 1 on device 0");
  fake->failures.clear();
  CHECK(fake->context_depth == 0);
}

TEST(AFailureStopsAllRunsThatStartAfterItUntilAReset) {
  DeviceGroup& group = CreateHere({0, 1}, 6);
  for (int64_t run : {10, 11}) {
    for (int device : {0, 1, 1, 0}) AdmitRun(device, 6, run, nullptr);  // two calls a run
  }
  AdmitRun(1, 6, 12, nullptr);
  Words(1, 6)[kEpochWord] = 7;
  Words(1, 6)[kLayout.latent_at(1, 0, 2)] = 17;
  GiveUp(1, 6, 0);
  AdmitRun(0, 6, 12, nullptr);  // the run has begun elsewhere: all devices or none
  fake->calls.clear();
  for (int device : {0, 1}) {
    CHECK_THROWS(AdmitRun(device, 6, 13, nullptr), "rank 1 gave up waiting for rank 0", "NaN",
                 "reset_workspaces");
  }
  CHECK(fake->calls.empty());  // asks no device
  CHECK_THROWS(group.Check(), "call 7", "rank 1 waited for rank 0", "reset_workspaces");
  group.Quiesce();
  group.Arm();
  group.Check();
  CHECK(Words(1, 6)[kEpochWord] == 0);
  CHECK(Armed(Words(1, 6)));
  for (int device : {1, 0}) AdmitRun(device, 6, 14, nullptr);
}

TEST(DevicesThatTakeRunsInDifferentOrdersAreStopped) {
  DeviceGroup& group = CreateHere({0, 1}, 7);
  AdmitRun(0, 7, 20, nullptr);
  CHECK_THROWS(AdmitRun(1, 7, 21, nullptr), "device 1 comes to run 21", "had run 20",
               "one program at a time");
  CHECK_THROWS(AdmitRun(0, 7, 21, nullptr), "had run 20");
  group.Arm();
  for (int64_t run = 30; run < 5000; ++run) {
    for (int device : {0, 1}) AdmitRun(device, 7, run, nullptr);
  }
}

}  // namespace
}  // namespace k3jax::tail

int main(int argc, char** argv) {
  k3jax::tail::fake = k3jax::testing::OpenFakeCuda(argc, argv);
  return k3jax::tail::fake ? k3jax::testing::RunTests() : 2;
}

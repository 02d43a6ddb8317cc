// Workspaces of the fused tail on the fake driver, whose device memory a test can read.

#include "../tail_device.h"

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "../failure.h"
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

void Admit(int device, int64_t slot, int64_t run) {
  static const ProgramId program{"tail_8", 8};
  AdmitRun(device, slot, {run, program});
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

TEST(AGroupThatCannotBeMadeLeavesNothingBehind) {
  const auto before = fake->allocations;
  const int host_before = fake->host_allocations;
  for (int tries = 0; tries < 3; ++tries) {
    fake->failures["cuMemHostAlloc"] = 2;
    CHECK_THROWS(DeviceGroup::Create({0, 1}, kLayout, 7), "whom a rank gave up on", "2");
    fake->failures.clear();
    fake->allocations_left = 1;
    CHECK_THROWS(DeviceGroup::Create({0, 1}, kLayout, 7), "bytes for the workspace of device 1");
    fake->allocations_left = -1;
    CHECK(fake->allocations == before && fake->host_allocations == host_before);
  }
  CHECK(fake->context_depth == 0);
}

TEST(ProcessesShareHostMemoryBeforeTheyConnect) {
  DeviceGroup& group = DeviceGroup::Create({0, kElsewhere}, kLayout, 8);
  CHECK_THROWS(group.Connect(group.Handles()), "workspace 8 share no host memory yet");
  CHECK_THROWS(WorkspaceAddress(0, 8), "no workspace 8");
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
  for (DeviceGroup* group : {&first, &second}) {
    group->Share(Segment::Private(DeviceGroup::SharedBytes()), true);
  }
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

// Two devices come to a run at the same time; what each was told, or "".
std::vector<std::string> RunOnBoth(int64_t slot, int64_t run) {
  std::vector<std::string> said(2);
  std::vector<std::thread> threads;
  for (int device : {0, 1}) {
    threads.emplace_back([&said, slot, run, device] {
      try {
        Admit(device, slot, run);
      } catch (const Failure& failure) {
        said[device] = failure.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return said;
}

bool Admitted(const std::vector<std::string>& said) { return said[0].empty() && said[1].empty(); }

TEST(TheRunAfterAFailureIsRefusedOnAllDevicesAndTheNextStartsAfresh) {
  DeviceGroup& group = CreateHere({0, 1}, 6);
  int64_t run = 10;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 2000; ++i, ++run) {
      for (int device : {0, 1, 1, 0}) Admit(device, 6, run);  // two calls a run
    }
    Admit(1, 6, run);
    Words(1, 6)[kEpochWord] = 7;
    Words(1, 6)[kLayout.latent_at(1, 0, 2)] = 17;
    GiveUp(1, 6, 0);
    Admit(0, 6, run);  // it has begun elsewhere: all devices or none
    CHECK_THROWS(group.Check(), "call 7", "rank 1 waited for rank 0");
    fake->calls.clear();
    for (int device : {1, 0}) {
      CHECK_THROWS(Admit(device, 6, run + 1), "rank 1 of the fused tail gave up",
                   "waiting for rank 0", "NaN", "starts afresh");
    }
    CHECK(fake->calls.empty());  // asks no device
    CHECK(Admitted(RunOnBoth(6, run + 2)));
    group.Check();
    CHECK(Words(1, 6)[kEpochWord] == 0);
    for (int device : {0, 1}) CHECK(Armed(Words(device, 6)));
    run += 3;
  }
}

TEST(DevicesThatTakeRunsInDifferentOrdersAreStopped) {
  CreateHere({0, 1}, 7);
  for (int64_t run = 20; run < 40; run += 10) {
    Admit(0, 7, run);
    CHECK_THROWS(Admit(1, 7, run + 1), "device 1 comes to execution", "one program at a time");
    CHECK_THROWS(Admit(0, 7, run + 1), "device 1 comes to execution");
    CHECK_THROWS(Admit(1, 7, run), "device 1 comes to execution");
    CHECK(Admitted(RunOnBoth(7, run + 2)));
    CHECK(Admitted(RunOnBoth(7, run + 3)));
  }
}

TEST(LaterCallsOfARunAreRefusedOnceItHasFailedElsewhere) {
  CreateHere({0, 1}, 9);
  for (int64_t run = 60; run < 80; run += 10) {
    for (int device : {0, 1, 1, 0}) Admit(device, 9, run);
    Admit(0, 9, run + 2);
    CHECK_THROWS(Admit(1, 9, run + 1), "device 1 comes to execution", "one program at a time");
    CHECK_THROWS(Admit(0, 9, run + 2), "device 1 comes to execution");
    CHECK(Admitted(RunOnBoth(9, run + 3)));
  }
}

TEST(ADeviceThatLeftARunOutIsNoticed) {
  CreateHere({0, 1}, 8);
  Admit(0, 8, 50);
  for (int device : {1, 0}) {
    CHECK_THROWS(Admit(device, 8, 51), "device 1 comes to execution 2 of the fused tail after 0");
  }
  CHECK(Admitted(RunOnBoth(8, 52)));
}

}  // namespace
}  // namespace k3jax::tail

int main(int argc, char** argv) {
  k3jax::tail::fake = k3jax::testing::OpenFakeCuda(argc, argv);
  return k3jax::tail::fake ? k3jax::testing::RunTests() : 2;
}

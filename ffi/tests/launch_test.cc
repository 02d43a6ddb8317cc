// The launch path against the fake driver: what is launched, where, with which bits, and how often
// code is loaded.

#include "../launch.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../workspace.h"
#include "check.h"
#include "fake_cuda.h"

namespace k3jax {
namespace {

testing::FakeCuda* fake;

const cuda::Stream kStream = reinterpret_cast<cuda::Stream>(0x5157);

KernelSpec MakeKernel(const std::string& entry, std::string_view cubin) {
  KernelSpec kernel;
  kernel.entry = entry;
  kernel.cubin = cubin;
  kernel.threads = 192;
  kernel.cluster[0] = 4;
  kernel.cluster[1] = kernel.cluster[2] = 1;
  kernel.shared_bytes = 1000;
  return kernel;
}

// Two launches of one kernel, the second overlapping the first.
ProgramSpec MakeProgram(const std::string& entry, std::string_view cubin) {
  ProgramSpec program;
  program.name = "sample";
  program.arch = "sm_90a";
  program.num_operands = program.num_results = 2;
  program.kernels.push_back(MakeKernel(entry, cubin));
  std::vector<Argument> arguments = {{ArgumentKind::kOperand, 1, 16},
                                     {ArgumentKind::kResult, 0, 0},
                                     {ArgumentKind::kInt32, -7, 0},
                                     {ArgumentKind::kFloat32, 0x3f800000, 0}};
  program.launches.push_back({0, {8, 2, 3}, false, arguments});
  program.launches.push_back({0, {4, 1, 1}, true, arguments});
  return program;
}

Buffers MakeBuffers() {
  Buffers buffers = {};
  buffers.operands = {0x1000, 0x2000};
  buffers.results = {0x3000, 0x4000};
  return buffers;
}

TEST(LaunchesWhatTheProgramSays) {
  fake->launches.clear();
  LoadedProgram program(MakeProgram("plain", "\177ELFplain:4;"));
  program.Load(1);
  program.Launch(1, kStream, MakeBuffers());
  CHECK(fake->launches.size() == 2);
  const testing::FakeLaunch& first = fake->launches[0];
  CHECK(first.entry == "plain" && first.device == 1 && first.stream == kStream);
  CHECK(first.grid[0] == 8 && first.grid[1] == 2 && first.grid[2] == 3);
  CHECK(first.block[0] == 192 && first.block[1] == 1 && first.block[2] == 1);
  CHECK(first.cluster[0] == 4 && first.shared_bytes == 1000 && !first.overlaps_previous);
  CHECK(fake->launches[1].overlaps_previous && fake->launches[1].grid[0] == 4);
  CHECK(first.arguments[0] == 0x2010 && first.arguments[1] == 0x3000);
  CHECK(int32_t(first.arguments[2]) == -7 && uint32_t(first.arguments[3]) == 0x3f800000);
  CHECK(fake->context_depth == 0);
}

TEST(LoadsEachCubinOnceAProcess) {
  const int before = fake->calls["cuLibraryLoadData"];
  for (int round = 0; round < 3; ++round) {
    std::string copy = "\177ELFshared:4;";  // fresh bytes, equal content
    LoadedProgram program(MakeProgram("shared", copy));
    program.Load(0);
    program.Load(0);
    program.Load(1);
  }
  CHECK(fake->calls["cuLibraryLoadData"] == before + 1);
}

TEST(LoadsOnEveryDeviceInUse) {
  LoadedProgram alone(MakeProgram("everywhere", "\177ELFeverywhere:4;"));
  alone.Load(0);
  CHECK_THROWS(alone.Launch(1, kStream, MakeBuffers()), "not loaded on device 1");

  fake->active_devices = {0, 1};
  LoadedProgram program(MakeProgram("everywhere", "\177ELFeverywhere:4;"));
  program.Load(0);
  const auto before = fake->calls;
  program.Load(1);
  CHECK(fake->calls == before);
  program.Launch(1, kStream, MakeBuffers());
  CHECK(fake->launches.back().device == 1);
  fake->active_devices.clear();
}

TEST(LaunchingAllocatesAndLoadsNothing) {
  LoadedProgram program(MakeProgram("steady", "\177ELFsteady:4;"));
  program.Load(0);
  auto before = fake->calls;
  program.Launch(0, kStream, MakeBuffers());
  for (const char* call : {"cuLaunchKernelEx", "cuCtxPushCurrent", "cuCtxPopCurrent"}) {
    before[call] = fake->calls[call];
  }
  CHECK(fake->calls == before);
}

TEST(AllowsLargeSharedMemoryAndNeverLowersIt) {
  for (unsigned bytes : {200000u, 100000u}) {
    ProgramSpec spec = MakeProgram("large", "\177ELFlarge:4;");
    spec.kernels[0].shared_bytes = bytes;
    LoadedProgram program(std::move(spec));
    program.Load(0);
    CHECK(fake->shared_limit["large"] == 200000);
  }
}

TEST(AllowsNonPortableClusters) {
  ProgramSpec spec = MakeProgram("wide", "\177ELFwide:4;");
  spec.kernels[0].cluster[0] = 16;
  LoadedProgram wide(std::move(spec));
  wide.Load(0);
  CHECK(fake->non_portable["wide"] == 1 && fake->non_portable["plain"] == 0);
}

TEST(ThreadsShareOneProgram) {
  fake->launches.clear();
  LoadedProgram program(MakeProgram("threads", "\177ELFthreads:4;"));
  const int before = fake->calls["cuKernelGetFunction"];
  // The fake driver is not thread-safe beyond Load, whose lock is what is tested.
  std::thread other([&] { program.Load(0); });
  program.Load(0);
  other.join();
  CHECK(fake->calls["cuKernelGetFunction"] == before + 1);
}

TEST(ErrorsNameTheKernelAndTheCause) {
  LoadedProgram missing(MakeProgram("absent", "\177ELFpresent:4;"));
  CHECK_THROWS(missing.Load(0), "absent, compiled for sm_90a, on device 0 of compute capability ",
               "CUDA_ERROR_NOT_FOUND");

  LoadedProgram program(MakeProgram("failing", "\177ELFfailing:4;"));
  CHECK_THROWS(program.Launch(0, kStream, MakeBuffers()), "'sample' was not loaded on device 0");
  fake->failures["cuLibraryLoadData"] = 209;
  CHECK_THROWS(program.Load(0), "failing", "sm_90a", "209", "as the test asked");
  fake->failures.clear();
  program.Load(0);  // a failed load leaves nothing half done
  fake->failures["cuLaunchKernelEx"] = 701;
  CHECK_THROWS(program.Launch(0, kStream, MakeBuffers()), "failing", "'sample'", "701");
  fake->failures.clear();
  CHECK_THROWS(program.Load(2), "cuDeviceGet of device 2");
  CHECK_THROWS(program.Load(-1), "device -1");
  CHECK(fake->context_depth == 0);
}

TEST(WorkspacesAreFoundPerDeviceAndNeverMove) {
  fake->launches.clear();
  ProgramSpec spec = MakeProgram("mailbox", "\177ELFmailbox:4;");
  for (LaunchSpec& launch : spec.launches) launch.arguments[0] = {ArgumentKind::kWorkspace, 5, 64};
  LoadedProgram program(std::move(spec));
  program.Load(0);
  CHECK_THROWS(program.Admit(0, 7), "no workspace 5 on device 0");
  CHECK_THROWS(program.Launch(0, kStream, MakeBuffers()), "no workspace 5 on device 0");
  std::vector<int64_t> runs;
  auto admission = [&runs](const Run& run) { runs.push_back(run.number); };
  RegisterWorkspace(0, 5, 0xabc000, admission);
  RegisterWorkspace(0, 5, 0xabc000, admission);
  CHECK_THROWS(RegisterWorkspace(0, 5, 0xdef000, admission),
               "workspace 5 of device 0 is already registered");
  program.Admit(0, 8);
  CHECK(runs == std::vector<int64_t>{8});  // once a run, however many launches use it
  program.Launch(0, kStream, MakeBuffers());
  CHECK(fake->launches.back().arguments[0] == 0xabc040);
  CHECK_THROWS(WorkspaceAddress(1, 5), "no workspace 5 on device 1");
}

// Two launches whose first argument is kept memory 1, 8 bytes in.
ProgramSpec MakeKeeping(const std::string& entry, std::string_view cubin) {
  ProgramSpec spec = MakeProgram(entry, cubin);
  spec.kept = {{64, 1}, {32, 0xfffffff0}};
  for (LaunchSpec& launch : spec.launches) launch.arguments[0] = {ArgumentKind::kKept, 1, 8};
  return spec;
}

uint64_t KeptAddress(const LoadedProgram& program, int device) {
  program.Launch(device, kStream, MakeBuffers());
  return fake->launches.back().arguments[0] - 8;
}

TEST(KeptMemoryIsFilledOnceADeviceAndFreed) {
  auto before = fake->calls;
  {
    LoadedProgram program(MakeKeeping("keeping", "\177ELFkeeping:4;"));
    CHECK(fake->allocations.empty());
    for (int round = 0; round < 2; ++round) program.Load(0);
    program.Load(1);
    CHECK(fake->allocations.size() == 4);
    uint64_t addresses[2] = {KeptAddress(program, 0), KeptAddress(program, 1)};
    CHECK(addresses[0] != addresses[1]);
    for (int device = 0; device < 2; ++device) {
      CHECK(fake->allocations.at(addresses[device]) == device);
      auto* words = reinterpret_cast<uint32_t*>(addresses[device]);
      for (int i = 0; i < 8; ++i) CHECK(words[i] == 0xfffffff0);
      words[3] = 5;
      program.Load(device);
      CHECK(KeptAddress(program, device) == addresses[device] && words[3] == 5);
    }
    CHECK(fake->context_depth == 0);
  }
  CHECK(fake->allocations.empty());
  auto calls = [&before](const char* name) { return fake->calls[name] - before[name]; };
  CHECK(calls("cuMemAlloc") == 4 && calls("cuMemFree") == 4);
  CHECK(calls("cuCtxSynchronize") == 4);  // runs may be on their way when the executable goes
  CHECK(calls("cuStreamCreate") == 4 && calls("cuStreamDestroy") == 4);
  CHECK(fake->context_depth == 0);
}

TEST(FailingToKeepMemoryLeavesNothingBehind) {
  LoadedProgram program(MakeKeeping("keeping", "\177ELFkeeping:4;"));
  fake->failures["cuMemAlloc"] = 2;
  CHECK_THROWS(program.Load(0), "allocating 64 bytes that program 'sample' on device 0 keeps",
               "XLA_PYTHON_CLIENT_MEM_FRACTION");
  fake->failures = {{"cuMemAlloc", 700}};
  CHECK_THROWS(program.Load(0), "allocating 64 bytes", "700");
  for (const char* call : {"cuStreamCreate", "cuMemsetD32Async", "cuStreamSynchronize"}) {
    fake->failures = {{call, 719}};
    CHECK_THROWS(program.Load(0), "kept memory", "719");
    CHECK(fake->allocations.empty() && fake->context_depth == 0);
  }
  fake->failures.clear();
  CHECK_THROWS(program.Launch(0, kStream, MakeBuffers()), "not loaded on device 0");
  program.Load(0);
  CHECK(fake->allocations.size() == 2);
}

TEST(KeptMemoryOutlivesItsContextWithoutHarm) {
  for (const char* call : {"cuCtxPushCurrent", "cuMemFree"}) {
    auto program =
        std::make_unique<LoadedProgram>(MakeKeeping("keeping", "\177ELFkeeping:4;"));
    program->Load(0);
    fake->failures[call] = 4;  // the driver is shutting down
    program.reset();
    fake->failures.clear();
    for (const auto& [address, device] : fake->allocations) {
      std::free(reinterpret_cast<void*>(address));
    }
    fake->allocations.clear();
    CHECK(fake->context_depth == 0);
  }
}

TEST(RunsWithKeptMemoryAreIssuedWhole) {
  fake->launches.clear();
  LoadedProgram program(MakeKeeping("keeping", "\177ELFkeeping:4;"));
  program.Load(0);
  std::promise<void> started;
  fake->after_launch = [&started, first = true]() mutable {
    if (!std::exchange(first, false)) return;
    started.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // time to get in between
  };
  std::thread other([&] {
    started.get_future().wait();
    program.Launch(0, reinterpret_cast<cuda::Stream>(1), MakeBuffers());
  });
  program.Launch(0, kStream, MakeBuffers());
  other.join();
  fake->after_launch = nullptr;
  CHECK(fake->launches.size() == 4);
  CHECK(fake->launches[0].stream == kStream && fake->launches[1].stream == kStream);
  CHECK(fake->launches[2].stream != kStream && fake->launches[3].stream != kStream);
}

}  // namespace
}  // namespace k3jax

// The one argument is the fake driver. Open it first: the library then finds it as libcuda.so.1.
int main(int argc, char** argv) {
  k3jax::fake = k3jax::testing::OpenFakeCuda(argc, argv);
  return k3jax::fake ? k3jax::testing::RunTests() : 2;
}

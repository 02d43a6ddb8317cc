#include "launch.h"

#include <cstring>
#include <utility>

#include "failure.h"

namespace k3jax {
namespace {

void CheckDevice(int device) {
  if (device >= 0 && device < kMaxDevices) return;
  throw Failure(FailureKind::kInvalidArgument,
                Concat("device ", device, " is outside the ", kMaxDevices, " this build supports"));
}

std::string Capability(int ordinal) {
  const cuda::Driver& driver = cuda::GetDriver();
  cuda::Device device;
  int major, minor;
  cuda::Check(driver.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  cuda::Check(driver.cuDeviceGetAttribute(&major, cuda::kCapabilityMajor, device), "capability");
  cuda::Check(driver.cuDeviceGetAttribute(&minor, cuda::kCapabilityMinor, device), "capability");
  return Concat(major, ".", minor);
}

}  // namespace

LoadedProgram::LoadedProgram(ProgramSpec spec) : spec_(std::move(spec)) {
  id_ = {spec_.name, spec_.digest};
  for (KernelSpec& kernel : spec_.kernels) {
    modules_.push_back(Module::Intern(kernel.cubin));
    kernel.cubin = {};  // the attribute it points into does not outlive this call
  }
  for (const LaunchSpec& launch : spec_.launches) {
    for (const Argument& argument : launch.arguments) {
      if (argument.kind == ArgumentKind::kWorkspace) workspaces_.insert(argument.value);
    }
  }
}

void LoadedProgram::Load(int device) {
  CheckDevice(device);
  if (resident_[device].load(std::memory_order_acquire) != nullptr) return;
  std::lock_guard<std::mutex> lock(mutex_);
  LoadOn(device);
  for (int other : cuda::ActiveDevices()) {
    try {
      if (other < kMaxDevices) LoadOn(other);
    } catch (const Failure&) {
      // Of another kind, perhaps: its own call of Load says so, if it ever runs the program.
    }
  }
}

void LoadedProgram::LoadOn(int device) {
  if (owned_[device] != nullptr) return;
  auto resident = std::make_unique<Resident>();
  resident->context = cuda::PrimaryContext(device);
  cuda::ContextScope scope(resident->context);
  const std::string place = Concat(", compiled for ", spec_.arch, ", on device ", device,
                                   " of compute capability ", Capability(device), ",");
  for (size_t i = 0; i < modules_.size(); ++i) {
    resident->functions.push_back(modules_[i]->Load(spec_.kernels[i], place));
  }
  for (const KeptSpec& kept : spec_.kept) {
    resident->kept.emplace_back(kept, resident->context,
                                Concat("program '", spec_.name, "' on device ", device));
  }
  owned_[device] = std::move(resident);
  resident_[device].store(owned_[device].get(), std::memory_order_release);
}

void LoadedProgram::Admit(int device, int64_t run) const {
  for (int64_t slot : workspaces_) AdmitRun(device, slot, {run, id_});
}

void LoadedProgram::Launch(int device, cuda::Stream stream, const Buffers& buffers) const {
  CheckDevice(device);
  const Resident* resident = resident_[device].load(std::memory_order_acquire);
  if (resident == nullptr) {
    throw Failure(FailureKind::kFailedPrecondition,
                  Concat("program '", spec_.name, "' was not loaded on device ", device));
  }
  cuda::ContextScope scope(resident->context);
  std::unique_lock<std::mutex> lock(resident->launching, std::defer_lock);
  if (!resident->kept.empty()) lock.lock();
  for (const LaunchSpec& launch : spec_.launches) {
    LaunchOne(launch, device, *resident, stream, buffers);
  }
}

// The driver reads as many of the 8 bytes as the parameter has: CUDA hosts are little endian.
uint64_t LoadedProgram::ArgumentBits(const Argument& argument, int device, const Resident& resident,
                                     const Buffers& buffers) const {
  switch (argument.kind) {
    case ArgumentKind::kOperand:
      return buffers.operands[argument.value] + argument.offset;
    case ArgumentKind::kResult:
      return buffers.results[argument.value] + argument.offset;
    case ArgumentKind::kWorkspace:
      return WorkspaceAddress(device, argument.value) + argument.offset;
    case ArgumentKind::kKept:
      return resident.kept[argument.value].address() + argument.offset;
    case ArgumentKind::kInt32:
    case ArgumentKind::kFloat32:
      return static_cast<uint32_t>(argument.value);
  }
  throw Failure(FailureKind::kInternal, "unknown argument kind");
}

void LoadedProgram::LaunchOne(const LaunchSpec& launch, int device, const Resident& resident,
                              cuda::Stream stream, const Buffers& buffers) const {
  const KernelSpec& kernel = spec_.kernels[launch.kernel];
  uint64_t values[kMaxArguments];
  void* parameters[kMaxArguments];
  for (size_t i = 0; i < launch.arguments.size(); ++i) {
    values[i] = ArgumentBits(launch.arguments[i], device, resident, buffers);
    parameters[i] = &values[i];
  }

  cuda::LaunchAttribute attributes[2] = {};
  unsigned num_attributes = 0;
  if (kernel.cluster[0] * kernel.cluster[1] * kernel.cluster[2] > 1) {
    cuda::LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = cuda::kClusterDimension;
    attribute.value.cluster = {kernel.cluster[0], kernel.cluster[1], kernel.cluster[2]};
  }
  if (launch.overlaps_previous) {
    cuda::LaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = cuda::kProgrammaticStreamSerialization;
    attribute.value.programmatic_serialization_allowed = 1;
  }

  cuda::LaunchConfig config = {};
  std::memcpy(config.grid, launch.grid, sizeof(config.grid));
  config.block[0] = kernel.threads;
  config.block[1] = config.block[2] = 1;
  config.shared_bytes = kernel.shared_bytes;
  config.stream = stream;
  config.attributes = attributes;
  config.num_attributes = num_attributes;
  cuda::Result result = cuda::GetDriver().cuLaunchKernelEx(
      &config, resident.functions[launch.kernel], parameters, nullptr);
  if (result != 0) {  // building the text allocates, so only where it is needed
    cuda::Check(result, Concat("launching ", kernel.entry, " of '", spec_.name, "'"));
  }
}

}  // namespace k3jax

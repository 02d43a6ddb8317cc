// The XLA FFI custom call `k3jax_launch`: a thin shell around LoadedProgram.
//
// Instantiate parses and needs no device, so programs compile on machines without a GPU.
// Initialize, which XLA calls before every run, loads the kernels and makes the kept memory the
// first time, and asks the workspaces whether they are fit to use. Execute only issues launches, so
// the call may be captured into a CUDA graph.

#include <cstdint>
#include <exception>
#include <memory>
#include <string_view>
#include <utility>

#include "failure.h"
#include "ffi_error.h"
#include "launch.h"
#include "program.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace k3jax {
namespace {

struct ProgramState {
  static ffi::TypeId id;
  explicit ProgramState(ProgramSpec spec) : program(std::move(spec)) {}
  LoadedProgram program;
};

ffi::TypeId ProgramState::id = {};
ffi::TypeInfo program_state_info = ffi::MakeTypeInfo<ProgramState>();

ffi::ErrorOr<std::unique_ptr<ProgramState>> Instantiate(std::string_view name,
                                                        std::string_view arch,
                                                        std::string_view entries,
                                                        std::string_view cubins,
                                                        ffi::Span<const int64_t> words) {
  try {
    return std::make_unique<ProgramState>(
        ParseProgram(name, arch, entries, cubins, words.begin(), words.size()));
  } catch (const std::exception& error) {
    return ffi::Unexpected(ToError(error));
  }
}

ffi::Error Initialize(int32_t device, ffi::RunId run, ProgramState* state) {
  try {
    state->program.Load(device);
    state->program.Admit(device, run.run_id);
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ToError(error);
  }
}

Buffers Addresses(const ProgramSpec& spec, ffi::RemainingArgs& operands,
                  ffi::RemainingRets& results) {
  if (operands.size() != spec.num_operands || results.size() != spec.num_results) {
    throw Failure(
        FailureKind::kInvalidArgument,
        Concat("program '", spec.name, "' got ", operands.size(), " operands and ", results.size(),
               " results, wanted ", spec.num_operands, " and ", spec.num_results));
  }
  Buffers buffers;
  for (size_t i = 0; i < operands.size(); ++i) {
    auto operand = operands.get<ffi::AnyBuffer>(i);
    buffers.operands[i] = reinterpret_cast<uint64_t>(operand->untyped_data());
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    buffers.results[i] = reinterpret_cast<uint64_t>((*result)->untyped_data());
  }
  return buffers;
}

ffi::Error Execute(cuda::Stream stream, int32_t device, ProgramState* state,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  try {
    state->program.Launch(device, stream, Addresses(state->program.spec(), operands, results));
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ToError(error);
  }
}

}  // namespace
}  // namespace k3jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(k3jax_launch_instantiate, k3jax::Instantiate,
                              ffi::Ffi::BindInstantiate()
                                  .Attr<std::string_view>("name")
                                  .Attr<std::string_view>("arch")
                                  .Attr<std::string_view>("entries")
                                  .Attr<std::string_view>("cubins")
                                  .Attr<ffi::Span<const int64_t>>("words"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(k3jax_launch_initialize, k3jax::Initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::State<k3jax::ProgramState>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(k3jax_launch_execute, k3jax::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<k3jax::cuda::Stream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<k3jax::ProgramState>>()
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

extern "C" void* k3jax_program_state_id() { return &k3jax::ProgramState::id; }
extern "C" void* k3jax_program_state_info() { return &k3jax::program_state_info; }

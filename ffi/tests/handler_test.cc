// The XLA handlers, called as XLA calls them, through a stand-in for its runtime.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "../failure.h"
#include "../workspace.h"
#include "check.h"
#include "fake_cuda.h"
#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* k3jax_launch_instantiate(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* k3jax_launch_initialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* k3jax_launch_execute(XLA_FFI_CallFrame* frame);
void* k3jax_program_state_id();
void* k3jax_program_state_info();
}

struct XLA_FFI_Error {
  std::string message;
};

struct XLA_FFI_InvokeContext {
  void* state = nullptr;
  void* stream = reinterpret_cast<void*>(0x5157);
  int32_t device = 1;
  int64_t run = 0;
};

namespace k3jax {
namespace {

testing::FakeCuda* fake;

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
    return new XLA_FFI_Error{args->message};
  };
  api.XLA_FFI_State_Set = [](XLA_FFI_State_Set_Args* args) -> XLA_FFI_Error* {
    args->ctx->state = args->state;
    return nullptr;
  };
  api.XLA_FFI_State_Get = [](XLA_FFI_State_Get_Args* args) -> XLA_FFI_Error* {
    args->state = args->ctx->state;
    return nullptr;
  };
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = args->ctx->stream;
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = args->ctx->device;
    return nullptr;
  };
  api.XLA_FFI_RunId_Get = [](XLA_FFI_RunId_Get_Args* args) -> XLA_FFI_Error* {
    args->run_id = args->ctx->run;
    return nullptr;
  };
  return api;
}

// One custom call: its attributes, and the buffers of a run.
class Call {
 public:
  Call(std::string cubins, std::vector<int64_t> words)
      : cubins_(std::move(cubins)), words_(std::move(words)) {}

  // What unloading the executable does.
  ~Call() {
    if (context_.state == nullptr) return;
    static_cast<const XLA_FFI_TypeInfo*>(k3jax_program_state_info())->deleter(context_.state);
  }
  Call(const Call&) = delete;

  // The message of the error, or "".
  std::string Instantiate() {
    XLA_FFI_ByteSpan name = {"sample", 6}, arch = {"sm_90a", 6}, entries = {"one", 3};
    XLA_FFI_ByteSpan cubins = {cubins_.data(), cubins_.size()};
    XLA_FFI_Array words = {XLA_FFI_DataType_S64, words_.size(), words_.data()};
    // XLA passes attributes in the order of their names.
    XLA_FFI_ByteSpan keys[] = {
        {"arch", 4}, {"cubins", 6}, {"entries", 7}, {"name", 4}, {"words", 5}};
    XLA_FFI_ByteSpan* names[] = {&keys[0], &keys[1], &keys[2], &keys[3], &keys[4]};
    void* values[] = {&arch, &cubins, &entries, &name, &words};
    XLA_FFI_AttrType text = XLA_FFI_AttrType_STRING;
    XLA_FFI_AttrType types[] = {text, text, text, text, XLA_FFI_AttrType_ARRAY};
    XLA_FFI_CallFrame frame = MakeFrame(XLA_FFI_ExecutionStage_INSTANTIATE);
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 5, types, names, values};
    return Message(k3jax_launch_instantiate(&frame));
  }

  std::string Initialize(int64_t run = 0) {
    context_.run = run;
    XLA_FFI_CallFrame frame = MakeFrame(XLA_FFI_ExecutionStage_INITIALIZE);
    return Message(k3jax_launch_initialize(&frame));
  }

  std::string Execute(const std::vector<void*>& operands, const std::vector<void*>& results) {
    std::vector<XLA_FFI_Buffer> buffers;
    std::vector<void*> pointers;
    for (const auto* group : {&operands, &results}) {
      for (void* data : *group) {
        buffers.push_back(
            {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_F32, data, 0, nullptr});
      }
    }
    for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
    std::vector<XLA_FFI_ArgType> arg_types(operands.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(results.size(), XLA_FFI_RetType_BUFFER);
    XLA_FFI_CallFrame frame = MakeFrame(XLA_FFI_ExecutionStage_EXECUTE);
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(operands.size()), arg_types.data(),
                  pointers.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(results.size()), ret_types.data(),
                  pointers.data() + operands.size()};
    return Message(k3jax_launch_execute(&frame));
  }

 private:
  XLA_FFI_CallFrame MakeFrame(XLA_FFI_ExecutionStage stage) {
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api_;
    frame.ctx = &context_;
    frame.stage = stage;
    return frame;
  }

  static std::string Message(XLA_FFI_Error* error) {
    std::unique_ptr<XLA_FFI_Error> owned(error);
    return owned ? owned->message : "";
  }

  XLA_FFI_Api api_ = MakeApi();
  XLA_FFI_InvokeContext context_;
  std::string cubins_;
  std::vector<int64_t> words_;
};

// One launch: (operand 0 + 8, result 0, 7).
// clang-format off
std::vector<int64_t> Words(int64_t cubin_bytes) {
  return {2, 1, 1, 1, 1, 0,                 // version, operands, results, kernels, launches, kept
          0, cubin_bytes, 128, 1, 1, 1, 0,  // kernel
          0, 3, 1, 1, 0, 3, 0, 0, 8, 1, 0, 0, 2, 7, 0};
}
// clang-format on

void* Address(uintptr_t value) { return reinterpret_cast<void*>(value); }

bool Holds(const std::string& text, const char* piece) {
  return text.find(piece) != std::string::npos;
}

TEST(StagesRunInOrderAndPassBuffersOn) {
  fake->launches.clear();
  Call call("\177ELFone:3;", Words(10));
  CHECK(call.Instantiate() == "");
  CHECK(fake->launches.empty() && fake->calls.count("cuLibraryLoadData") == 0);
  CHECK(call.Initialize() == "");
  CHECK(call.Execute({Address(0x1000)}, {Address(0x2000)}) == "");
  CHECK(call.Execute({Address(0x3000)}, {Address(0x4000)}) == "");
  CHECK(fake->launches.size() == 2);
  CHECK(fake->launches[0].device == 1 && fake->launches[0].stream == Address(0x5157));
  CHECK((fake->launches[0].arguments[0] == 0x1008 && fake->launches[0].arguments[1] == 0x2000));
  CHECK((fake->launches[1].arguments[0] == 0x3008 && fake->launches[1].arguments[1] == 0x4000));
  CHECK(uint32_t(fake->launches[1].arguments[2]) == 7);
}

TEST(EveryRunAsksTheWorkspaceFirst) {
  std::vector<int64_t> runs;
  RegisterWorkspace(1, 9, 0xabc000, [&](const Run& run) {
    CHECK(run.program.name == "sample");
    if (run.number == 43) throw Failure(FailureKind::kFailedPrecondition, "not this one");
    runs.push_back(run.number);
  });
  std::vector<int64_t> words = Words(10);
  words[words.size() - 9] = 4;  // operand 0 becomes workspace 9
  words[words.size() - 8] = 9;
  Call call("\177ELFone:3;", words);
  CHECK(call.Instantiate() == "");
  CHECK(Holds(call.Initialize(43), "k3jax: not this one"));
  CHECK(call.Initialize(42) == "");
  CHECK(Holds(call.Initialize(43), "k3jax: not this one"));
  CHECK(call.Initialize(44) == "");
  CHECK((runs == std::vector<int64_t>{42, 44}));
}

// One launch: (kept memory 0 + 4, result 0, 7).
std::vector<int64_t> KeepingWords(int64_t cubin_bytes) {
  std::vector<int64_t> words = Words(cubin_bytes);
  words[5] = 1;
  words.insert(words.begin() + 13, {8, 0xabcdef01});
  words[words.size() - 9] = 5;  // operand 0 becomes kept memory 0
  words[words.size() - 7] = 4;
  return words;
}

uint64_t KeptAddress() { return fake->launches.back().arguments[0] - 4; }

TEST(CallsShareNoKeptMemory) {
  // Equal in every word and byte, as two calls of one executable may be, or one executable loaded
  // twice.
  auto one = std::make_unique<Call>("\177ELFone:3;", KeepingWords(10));
  auto other = std::make_unique<Call>("\177ELFone:3;", KeepingWords(10));
  uint64_t addresses[2];
  for (int i = 0; i < 2; ++i) {
    Call& call = i ? *other : *one;
    CHECK(call.Instantiate() == "");
    CHECK(fake->allocations.size() == size_t(i));  // compiling needs no device
    for (int run = 0; run < 3; ++run) {
      CHECK(call.Initialize(run) == "");
      CHECK(call.Execute({Address(0x1000)}, {Address(0x2000)}) == "");
      if (run == 0) addresses[i] = KeptAddress();
      CHECK(KeptAddress() == addresses[i]);
    }
  }
  CHECK(addresses[0] != addresses[1]);
  CHECK(fake->allocations.size() == 2);
  one.reset();
  CHECK(fake->allocations.size() == 1 && fake->allocations.count(addresses[1]) == 1);
  other.reset();
  CHECK(fake->allocations.empty());
}

TEST(ErrorsBecomeXlaErrors) {
  Call garbled("\177ELFone:3;", {2, 2});
  CHECK(Holds(garbled.Instantiate(), "k3jax: k3jax program 'sample' ends before its results"));

  Call call("\177ELFone:3;", Words(10));
  CHECK(call.Instantiate() == "");
  CHECK(Holds(call.Execute({Address(1)}, {Address(2)}), "'sample' was not loaded on device 1"));
  CHECK(call.Initialize() == "");
  CHECK(Holds(call.Execute({}, {Address(2)}), "got 0 operands and 1 results, wanted 1 and 1"));
  fake->failures["cuLaunchKernelEx"] = 719;
  CHECK(Holds(call.Execute({Address(1)}, {Address(2)}), "launching one of 'sample' failed"));
  fake->failures.clear();

  Call unknown("\177ELFtwo:3;", Words(10));
  CHECK(unknown.Instantiate() == "");
  CHECK(Holds(unknown.Initialize(), "finding kernel one, compiled for sm_90a, on device 1"));
}

}  // namespace
}  // namespace k3jax

// The one argument is the fake driver. Open it first: the library then finds it as libcuda.so.1.
int main(int argc, char** argv) {
  k3jax::fake = k3jax::testing::OpenFakeCuda(argc, argv);
  // What registering the state's type with XLA does.
  static_cast<XLA_FFI_TypeId*>(k3jax_program_state_id())->type_id = 1;
  return k3jax::fake ? k3jax::testing::RunTests() : 2;
}

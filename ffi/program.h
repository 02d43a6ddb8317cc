// A serialised program: the attributes of one custom call, parsed and checked without a device.
//
// The writer is k3jax/runtime/serialize.py. A program has cubins (their bytes end to end), entry
// names (one a kernel, separated by newlines) and a list of 64-bit words:
//
//   header    version, operands, results, kernels, launches, kept memories
//   kernel    first byte of its cubin, bytes, threads of a block, cluster x, y, z, shared bytes
//   kept      bytes, the 32-bit word that fills it
//   launch    kernel, grid x, y, z, overlaps the previous launch (0 or 1), arguments
//   argument  kind, value, offset
//
// An argument's value is an operand's, result's or kept memory's index, a workspace's slot, an
// int32, or the bits of a float32; `offset` is in bytes and zero for scalars.

#ifndef K3JAX_FFI_PROGRAM_H_
#define K3JAX_FFI_PROGRAM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace k3jax {

constexpr int64_t kProgramVersion = 2;
constexpr size_t kMaxArguments = 64;
constexpr size_t kMaxBuffers = 64;

enum class ArgumentKind : int64_t {
  kOperand = 0,
  kResult = 1,
  kInt32 = 2,
  kFloat32 = 3,
  kWorkspace = 4,
  kKept = 5,
};

struct Argument {
  ArgumentKind kind;
  int64_t value;
  int64_t offset;
};

struct KernelSpec {
  std::string entry;
  std::string_view cubin;  // into the attribute: valid while the program is being parsed
  unsigned threads;
  unsigned cluster[3];
  unsigned shared_bytes;
};

// Memory that one call keeps from run to run; KeptSpec in k3jax/runtime/program.py is the contract.
struct KeptSpec {
  size_t num_bytes;  // a multiple of 4
  uint32_t fill;
};

struct LaunchSpec {
  size_t kernel;
  unsigned grid[3];
  bool overlaps_previous;
  std::vector<Argument> arguments;
};

struct ProgramSpec {
  std::string name;
  std::string arch;
  size_t num_operands = 0;
  size_t num_results = 0;
  std::vector<KernelSpec> kernels;
  std::vector<KeptSpec> kept;
  std::vector<LaunchSpec> launches;
  uint64_t digest = 0;  // of name, architecture, entries and words
};

// Throws a Failure that names the program and the word at fault.
ProgramSpec ParseProgram(std::string_view name, std::string_view arch, std::string_view entries,
                         std::string_view cubins, const int64_t* words, size_t num_words);

}  // namespace k3jax

#endif  // K3JAX_FFI_PROGRAM_H_

#include "program.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "failure.h"

namespace k3jax {
namespace {

// Reads words in order and refuses what lies outside its stated range.
class Reader {
 public:
  Reader(std::string_view program, const int64_t* words, size_t num_words)
      : program_(program), words_(words), num_words_(num_words) {}

  int64_t Next(const char* what, int64_t low, int64_t high) {
    if (position_ == num_words_) Refuse(Concat("ends before its ", what));
    int64_t word = words_[position_++];
    if (word < low || word > high) {
      Refuse(Concat("has ", what, " ", word, " at word ", position_ - 1, ", wanted ", low, " to ",
                    high));
    }
    return word;
  }

  void ExpectEnd() const {
    if (position_ != num_words_) Refuse(Concat("has ", num_words_ - position_, " words too many"));
  }

  [[noreturn]] void Refuse(const std::string& why) const {
    throw Failure(FailureKind::kInvalidArgument,
                  Concat("k3jax program '", program_, "' ", why,
                         "; write and run it with the same release of k3jax"));
  }

 private:
  std::string_view program_;
  const int64_t* words_;
  size_t num_words_;
  size_t position_ = 0;
};

constexpr int64_t kMaxGrid[3] = {std::numeric_limits<int32_t>::max(), 65535, 65535};
constexpr int64_t kMaxOffset = int64_t{1} << 48;
constexpr int64_t kMaxKeptBytes = int64_t{1} << 30;

std::vector<std::string> SplitLines(std::string_view text) {
  std::vector<std::string> lines;
  size_t start = 0;
  while (start < text.size()) {
    size_t end = std::min(text.find('\n', start), text.size());
    lines.emplace_back(text.substr(start, end - start));
    start = end + 1;
  }
  return lines;
}

std::string_view ReadCubin(Reader& reader, std::string_view cubins) {
  int64_t total = static_cast<int64_t>(cubins.size());
  int64_t first = reader.Next("first cubin byte", 0, total);
  int64_t bytes = reader.Next("cubin bytes", 0, total - first);
  std::string_view cubin = cubins.substr(first, bytes);
  if (cubin.substr(0, 4) != "\177ELF") reader.Refuse("holds a cubin that is not an ELF image");
  return cubin;
}

KernelSpec ReadKernel(Reader& reader, std::string_view cubins, std::string entry) {
  KernelSpec kernel;
  kernel.entry = std::move(entry);
  kernel.cubin = ReadCubin(reader, cubins);
  kernel.threads = reader.Next("threads", 1, 1024);
  for (unsigned& extent : kernel.cluster) extent = reader.Next("cluster", 1, 16);
  kernel.shared_bytes = reader.Next("shared bytes", 0, 1 << 20);
  return kernel;
}

KeptSpec ReadKept(Reader& reader) {
  KeptSpec kept;
  kept.num_bytes = reader.Next("kept bytes", 4, kMaxKeptBytes);
  if (kept.num_bytes % 4 != 0) {
    reader.Refuse(Concat("keeps ", kept.num_bytes, " bytes, not a multiple of 4"));
  }
  kept.fill = reader.Next("kept fill", 0, std::numeric_limits<uint32_t>::max());
  return kept;
}

Argument ReadArgument(Reader& reader, const ProgramSpec& program) {
  constexpr int64_t kMin32 = std::numeric_limits<int32_t>::min();
  constexpr int64_t kMax32 = std::numeric_limits<int32_t>::max();
  int64_t max_offset = kMaxOffset;
  Argument argument;
  argument.kind = static_cast<ArgumentKind>(reader.Next("argument kind", 0, 5));
  switch (argument.kind) {
    case ArgumentKind::kOperand:
      argument.value = reader.Next("operand", 0, int64_t(program.num_operands) - 1);
      break;
    case ArgumentKind::kResult:
      argument.value = reader.Next("result", 0, int64_t(program.num_results) - 1);
      break;
    case ArgumentKind::kKept:
      argument.value = reader.Next("kept memory", 0, int64_t(program.kept.size()) - 1);
      max_offset = program.kept[argument.value].num_bytes;
      break;
    default:
      argument.value = reader.Next("argument value", kMin32, kMax32);
  }
  argument.offset = reader.Next("offset", 0, max_offset);
  return argument;
}

// FNV-1a.
uint64_t Digest(uint64_t digest, const void* data, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; ++i) {
    digest = (digest ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  }
  return digest;
}

LaunchSpec ReadLaunch(Reader& reader, const ProgramSpec& program) {
  LaunchSpec launch;
  launch.kernel = reader.Next("kernel", 0, int64_t(program.kernels.size()) - 1);
  for (int axis = 0; axis < 3; ++axis) launch.grid[axis] = reader.Next("grid", 1, kMaxGrid[axis]);
  const unsigned* cluster = program.kernels[launch.kernel].cluster;
  for (int axis = 0; axis < 3; ++axis) {
    if (launch.grid[axis] % cluster[axis] != 0) {
      reader.Refuse(Concat("has a grid of ", launch.grid[axis], " blocks, not a multiple of its ",
                           "cluster's ", cluster[axis]));
    }
  }
  launch.overlaps_previous = reader.Next("overlap flag", 0, 1) != 0;
  int64_t num_arguments = reader.Next("arguments", 0, kMaxArguments);
  for (int64_t i = 0; i < num_arguments; ++i) {
    launch.arguments.push_back(ReadArgument(reader, program));
  }
  return launch;
}

}  // namespace

ProgramSpec ParseProgram(std::string_view name, std::string_view arch, std::string_view entries,
                         std::string_view cubins, const int64_t* words, size_t num_words) {
  Reader reader(name, words, num_words);
  ProgramSpec program;
  program.name = name;
  program.arch = arch;
  reader.Next("format version", kProgramVersion, kProgramVersion);
  program.num_operands = reader.Next("operands", 0, kMaxBuffers);
  program.num_results = reader.Next("results", 0, kMaxBuffers);
  std::vector<std::string> names = SplitLines(entries);
  int64_t num_kernels = reader.Next("kernels", names.size(), names.size());
  int64_t num_launches = reader.Next("launches", 1, num_words);
  int64_t num_kept = reader.Next("kept memories", 0, kMaxBuffers);
  for (int64_t i = 0; i < num_kernels; ++i) {
    program.kernels.push_back(ReadKernel(reader, cubins, std::move(names[i])));
  }
  for (int64_t i = 0; i < num_kept; ++i) program.kept.push_back(ReadKept(reader));
  for (int64_t i = 0; i < num_launches; ++i) {
    program.launches.push_back(ReadLaunch(reader, program));
  }
  if (num_kept > 0 && program.launches[0].overlaps_previous) {
    reader.Refuse("keeps memory but starts with a launch that overlaps the one before");
  }
  reader.ExpectEnd();
  program.digest = Digest(0xcbf29ce484222325, name.data(), name.size());
  program.digest = Digest(program.digest, arch.data(), arch.size());
  program.digest = Digest(program.digest, entries.data(), entries.size());
  program.digest = Digest(program.digest, words, num_words * sizeof(*words));
  return program;
}

}  // namespace k3jax
